"""The backward of the fold's step, from scores to probabilities and to the gradient of the scores, and the folds over it.

With p = exp(score - lse), the rows of probabilities that the forward pass normalised, and dp = dout v^T,

    dv = p^T dout        ds = p * (dp - delta)        dq = scale * ds k        dk = scale * ds^T q

where delta = sum(out * dout) - dlse, one number a row (Dao et al. 2022, arXiv:2205.14135, appendix B.2; a gradient of lse adds
p * dlse to ds, which is the same as taking dlse off delta).  No probability is kept from the forward pass: they are computed
again from lse.
"""

import triton
import triton.language as tl

from .dropout import dropout_factor
from .mods import mask, mask_band, modify_with_slope
from .product import add_product
from .ranges import FULL, WINDOW
from .source import fetch_rows, locate_rows
from .state import LOG2E


@triton.jit
def load_statistics(Lse2, Delta, cols, live, EDGE: tl.constexpr):
    """-> lse in base 2 and delta of the rows `cols`, as `backward_delta` left them; lse +inf where not live: p = 0."""
    if EDGE:
        return tl.load(Lse2 + cols, mask=live, other=float("inf")), tl.load(Delta + cols, mask=live, other=0.0)
    else:
        return tl.load(Lse2 + cols), tl.load(Delta + cols)


@triton.jit
def statistics_of_rows(lse, delta):
    """-> lse in base 2, and delta; lse -inf where there is no row.

    A row without a live key has no gradient, whatever dlse says: delta 0 and lse +inf, which makes its probabilities
    exp2(score - inf) = 0 without another test in what follows."""
    dead = lse == float("-inf")
    return tl.where(dead, float("inf"), lse * LOG2E), tl.where(dead, 0.0, delta)


@triton.jit
def no_statistics(stats, Progress, counters, UNIT: tl.constexpr, CHUNK: tl.constexpr):
    """Statistics [2, UNIT] of a tile without queries: lse +inf, delta 0; and zeros in Progress [counters], CHUNK at a time."""
    o_r, o_c = tl.arange(0, UNIT), tl.arange(0, CHUNK)
    tl.store(stats + o_r, tl.full([UNIT], float("inf"), tl.float32))
    tl.store(stats + UNIT + o_r, tl.zeros([UNIT], tl.float32))
    for begin in range(0, counters, CHUNK):
        tl.store(Progress + begin + o_c, tl.zeros([CHUNK], tl.int32), mask=begin + o_c < counters)


@triton.jit
def score_gradient(s, dp, lse, delta, place, kv_index, scale, score_mods, slopes, mask_mods, band, KIND: tl.constexpr,
                   dropout):  # fmt: skip
    """s = q . k and dp = dout . v -> (p, ds), ds without the factor `scale` that turns it into the gradient of q . k.

    s, dp [M, N] with lse, delta, q_index [M, 1] and kv_index [1, N]; or all of it transposed.  lse in base 2.  KIND and band: as
    for device.fold, FULL where the band cuts nothing."""
    if len(score_mods) > 0:
        score, slope = modify_with_slope(s * scale, place, kv_index, score_mods, slopes)
        score = mask(mask_band(score, place, kv_index, band, KIND), place, kv_index, mask_mods)
        p = tl.exp2(score * LOG2E - lse)
        if len(dropout) > 0:
            factor = dropout_factor(place, kv_index, dropout)
            return p * factor, p * (dp * factor - delta) * slope
        else:
            return p, p * (dp - delta) * slope
    else:
        score = mask(mask_band(s, place, kv_index, band, KIND), place, kv_index, mask_mods)
        p = tl.exp2(score * (scale * LOG2E) - lse)
        if len(dropout) > 0:
            factor = dropout_factor(place, kv_index, dropout)
            return p * factor, p * (dp * factor - delta)
        else:
            return p, p * (dp - delta)


@triton.jit
def fold_query_gradient(dq, q, do, lse, delta, lo, hi, place, scale, source, k_side, v_side, score_mods, slopes, mask_mods,
                        band, LOCATE: tl.constexpr, FETCH: tl.constexpr, KIND: tl.constexpr, EDGE: tl.constexpr,
                        EMULATE: tl.constexpr, BLOCK_N: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
                        BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr, dropout):  # fmt: skip
    """Add to dq [M, BLOCK_QK] fp32 of a query tile (still without `scale`) what tiles lo..hi of keys give; lse (base 2), delta
    [M, 1], place[2] [M, 1]."""
    for i in tl.range(lo, hi):
        rows, cols, live = LOCATE(i, source, BLOCK_N)
        k = FETCH(k_side, rows, live, EDGE, EMULATE, BLOCK_N, DIM_QK, BLOCK_QK)
        v = FETCH(v_side, rows, live, EDGE, EMULATE, BLOCK_N, DIM_V, BLOCK_V)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        kv_index = (tl.minimum(cols, place[3][1] - 1) if EDGE else cols)[None, :]
        p, ds = score_gradient(
            s, dp, lse, delta, place, kv_index, scale, score_mods, slopes, mask_mods, band, KIND, dropout
        )
        if EDGE:
            ds = tl.where(live[None, :], ds, 0.0)
        dq = add_product(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def fold_query_range(q, do, lse, delta, tiles, place, scale, source, k_side, v_side, score_mods, slopes, mask_mods, band,
                     LOCATE: tl.constexpr, FETCH: tl.constexpr, KIND: tl.constexpr, EMULATE: tl.constexpr,
                     BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
                     BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr, dropout):  # fmt: skip
    """dq [M, BLOCK_QK] fp32, without `scale`, over a range of device.ranges: edge, interior, edge."""
    lo, full_lo, full_hi, hi = tiles
    dq = tl.zeros([BLOCK_M, BLOCK_QK], tl.float32)
    if KIND == WINDOW:
        dq = fold_query_gradient(dq, q, do, lse, delta, lo, full_lo, place, scale, source, k_side, v_side, score_mods, slopes,
                                 mask_mods, band, LOCATE, FETCH, KIND, True, EMULATE, BLOCK_N, DIM_QK, DIM_V, BLOCK_QK,
                                 BLOCK_V, dropout)  # fmt: skip
    dq = fold_query_gradient(dq, q, do, lse, delta, full_lo, full_hi, place, scale, source, k_side, v_side, score_mods, slopes,
                             mask_mods, band, LOCATE, FETCH, FULL, False, EMULATE, BLOCK_N, DIM_QK, DIM_V, BLOCK_QK,
                             BLOCK_V, dropout)  # fmt: skip
    return fold_query_gradient(dq, q, do, lse, delta, full_hi, hi, place, scale, source, k_side, v_side, score_mods, slopes,
                               mask_mods, band, LOCATE, FETCH, KIND, True, EMULATE, BLOCK_N, DIM_QK, DIM_V, BLOCK_QK,
                               BLOCK_V, dropout)  # fmt: skip


@triton.jit
def fold_key_gradient(k, v, dk, dv, live_k, lo, hi, head, kv_index, scale, source, q_side, do_side, Lse2, Delta, score_mods,
                      slopes, mask_mods, batch, extent, band, LOCATE: tl.constexpr, FETCH: tl.constexpr,
                      KIND: tl.constexpr, EDGE: tl.constexpr, PARTIAL: tl.constexpr, EMULATE: tl.constexpr,
                      BLOCK_M: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_QK: tl.constexpr,
                      BLOCK_V: tl.constexpr, dropout):  # fmt: skip
    """Add to dk [N, BLOCK_QK] (still without `scale`) and dv [N, BLOCK_V] what tiles lo..hi of queries of one head give.

    The fold over the transposed source: everything is transposed, kv_index [N, 1], so that p^T and ds^T come out as the left
    operands of the products.  PARTIAL: some keys of the tile are not live for this head."""
    for i in tl.range(lo, hi):
        rows, cols, live = LOCATE(i, source, BLOCK_M)
        q = FETCH(q_side, rows, live, EDGE, EMULATE, BLOCK_M, DIM_QK, BLOCK_QK)
        do = FETCH(do_side, rows, live, EDGE, EMULATE, BLOCK_M, DIM_V, BLOCK_V)
        lse, delta = load_statistics(Lse2, Delta, cols, live, EDGE)
        s = tl.dot(k, tl.trans(q), input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        q_index = (tl.minimum(cols, extent[0] - 1) if EDGE else cols)[None, :]
        place = (batch, head, q_index, extent)
        p, ds = score_gradient(
            s,
            dp,
            lse[None, :],
            delta[None, :],
            place,
            kv_index,
            scale,
            score_mods,
            slopes,
            mask_mods,
            band,
            KIND,
            dropout,
        )
        if PARTIAL:
            p = tl.where(live_k[:, None], p, 0.0)
            ds = tl.where(live_k[:, None], ds, 0.0)
        # Both narrowed before the products: ds would wait for the first one in twice the registers.
        p, ds = p.to(do.dtype), ds.to(q.dtype)
        dv = add_product(p, do, dv)
        dk = add_product(ds, q, dk)
    return dk, dv


@triton.jit
def fold_score_gradient(acc, k, v, live_k, lo, hi, head, kv_index, scale, source, q_side, do_side, Lse2, Delta, score_mods,
                        slopes, mask_mods, batch, extent, band, KIND: tl.constexpr, EMULATE: tl.constexpr,
                        BLOCK_M: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_QK: tl.constexpr,
                        BLOCK_V: tl.constexpr, dropout):  # fmt: skip
    """Add to acc [M, N] the gradients of the scores of tiles lo..hi of queries of one head with the keys k, one tile upon the
    other; which scores, before or after which mods, is a matter of `slopes`.  kv_index [1, N], by pointers."""
    for i in tl.range(lo, hi):
        rows, cols, live = locate_rows(i, source, BLOCK_M)
        q = fetch_rows(q_side, rows, live, True, EMULATE, BLOCK_M, DIM_QK, BLOCK_QK)
        do = fetch_rows(do_side, rows, live, True, EMULATE, BLOCK_M, DIM_V, BLOCK_V)
        lse, delta = load_statistics(Lse2, Delta, cols, live, True)
        place = (batch, head, tl.minimum(cols, extent[0] - 1)[:, None], extent)
        acc = add_score_gradient(acc, (q, do, lse, delta), k, v, live[:, None] & live_k[None, :], place, kv_index, scale,
                                 score_mods, slopes, mask_mods, band, KIND, dropout)  # fmt: skip
    return acc


@triton.jit
def add_score_gradient(acc, rows, k, v, live, place, kv_index, scale, score_mods, slopes, mask_mods, band, KIND: tl.constexpr,
                       dropout):  # fmt: skip
    """acc [M, N] and the gradients of the scores of one tile; rows: its queries' q, dout, lse in base 2 and delta; live
    [M or 1, N]: what counts."""
    q, do, lse, delta = rows
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    _p, ds = score_gradient(s, dp, lse[:, None], delta[:, None], place, kv_index, scale, score_mods, slopes, mask_mods, band,
                            KIND, dropout)  # fmt: skip
    return acc + tl.where(live, ds, 0.0)


@triton.jit
def fold_probabilities(total, q, lse, lo, hi, place, scale, source, k_side, score_mods, mask_mods, band, KIND: tl.constexpr,
                       EMULATE: tl.constexpr, BLOCK_N: tl.constexpr, DIM_QK: tl.constexpr, BLOCK_QK: tl.constexpr):  # fmt: skip
    """Add to total [M] the probabilities of tiles lo..hi of keys, as `score_gradient` makes them; lse (base 2), place[2] [M, 1],
    keys by pointers."""
    for i in tl.range(lo, hi):
        rows, cols, live = locate_rows(i, source, BLOCK_N)
        k = fetch_rows(k_side, rows, live, True, EMULATE, BLOCK_N, DIM_QK, BLOCK_QK)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        kv_index = tl.minimum(cols, place[3][1] - 1)[None, :]
        p, _ = score_gradient(
            s, 0.0, lse, 0.0, place, kv_index, scale, score_mods, score_mods, mask_mods, band, KIND, ()
        )
        total += tl.sum(tl.where(live[None, :], p, 0.0), 1)
    return total
