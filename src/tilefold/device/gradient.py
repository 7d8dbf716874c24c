"""The backward of the fold's step: from scores to probabilities and to the gradient of the scores.

With p = exp(score - lse), the rows of probabilities that the forward pass normalised, and dp = dout v^T,

    dv = p^T dout        ds = p * (dp - delta)        dq = scale * ds k        dk = scale * ds^T q

where delta = sum(out * dout) - dlse, one number a row (Dao et al. 2022, arXiv:2205.14135, appendix B.2; a gradient of lse adds
p * dlse to ds, which is the same as taking dlse off delta).  No probability is kept from the forward pass: they are computed
again from lse.
"""

import triton
import triton.language as tl

from .mods import mask, modify_with_slope
from .state import LOG2E


@triton.jit
def load_statistics(Lse2, Delta, cols, live, EDGE: tl.constexpr):
    """-> lse in base 2 and delta of the rows `cols`, as `backward_delta` left them; lse +inf where not live: p = 0."""
    if EDGE:
        return tl.load(Lse2 + cols, mask=live, other=float("inf")), tl.load(Delta + cols, mask=live, other=0.0)
    else:
        return tl.load(Lse2 + cols), tl.load(Delta + cols)


@triton.jit
def score_gradient(s, dp, lse, delta, place, kv_index, scale, score_mods, slopes, mask_mods):
    """s = q . k and dp = dout . v -> (p, ds), ds without the factor `scale` that turns it into the gradient of q . k.

    s, dp [M, N] with lse, delta, q_index [M, 1] and kv_index [1, N]; or all of it transposed.  lse in base 2."""
    if len(score_mods) > 0:
        score, slope = modify_with_slope(s * scale, place, kv_index, score_mods, slopes)
        score = mask(score, place, kv_index, mask_mods)
        p = tl.exp2(score * LOG2E - lse)
        return p, p * (dp - delta) * slope
    else:
        score = mask(s, place, kv_index, mask_mods)
        p = tl.exp2(score * (scale * LOG2E) - lse)
        return p, p * (dp - delta)


@triton.jit
def fold_query_gradient(q, do, lse, delta, tiles, place, scale, source, k_side, v_side, score_mods, slopes, mask_mods,
                        LOCATE: tl.constexpr, FETCH: tl.constexpr, EDGE: tl.constexpr, EMULATE: tl.constexpr,
                        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
                        BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    """dq [M, BLOCK_QK] fp32 of a query tile from `tiles` tiles of keys; lse (base 2), delta [M, 1], place[2] [M, 1]."""
    dq = tl.zeros([BLOCK_M, BLOCK_QK], tl.float32)
    for i in tl.range(0, tiles):
        rows, cols, live = LOCATE(i, source, BLOCK_N)
        k = FETCH(k_side, rows, live, EDGE, EMULATE, BLOCK_N, DIM_QK, BLOCK_QK)
        v = FETCH(v_side, rows, live, EDGE, EMULATE, BLOCK_N, DIM_V, BLOCK_V)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        kv_index = (tl.minimum(cols, place[3][1] - 1) if EDGE else cols)[None, :]
        p, ds = score_gradient(s, dp, lse, delta, place, kv_index, scale, score_mods, slopes, mask_mods)
        if EDGE:
            ds = tl.where(live[None, :], ds, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq * scale


@triton.jit
def fold_key_gradient(k, v, dk, dv, live_k, tiles, head, kv_index, scale, source, q_side, do_side, Lse2, Delta, score_mods,
                      slopes, mask_mods, batch, extent, LOCATE: tl.constexpr, FETCH: tl.constexpr, EDGE: tl.constexpr,
                      PARTIAL: tl.constexpr, EMULATE: tl.constexpr, BLOCK_M: tl.constexpr, DIM_QK: tl.constexpr,
                      DIM_V: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    """Add to dk [N, BLOCK_QK] (still without `scale`) and dv [N, BLOCK_V] what `tiles` tiles of queries of one head give.

    The fold over the transposed source: everything is transposed, kv_index [N, 1], so that p^T and ds^T come out as the left
    operands of the products.  PARTIAL: some keys of the tile are not live for this head."""
    for i in tl.range(0, tiles):
        rows, cols, live = LOCATE(i, source, BLOCK_M)
        q = FETCH(q_side, rows, live, EDGE, EMULATE, BLOCK_M, DIM_QK, BLOCK_QK)
        do = FETCH(do_side, rows, live, EDGE, EMULATE, BLOCK_M, DIM_V, BLOCK_V)
        lse, delta = load_statistics(Lse2, Delta, cols, live, EDGE)
        s = tl.dot(k, tl.trans(q), input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        q_index = (tl.minimum(cols, extent[0] - 1) if EDGE else cols)[None, :]
        place = (batch, head, q_index, extent)
        p, ds = score_gradient(
            s, dp, lse[None, :], delta[None, :], place, kv_index, scale, score_mods, slopes, mask_mods
        )
        if PARTIAL:
            p = tl.where(live_k[:, None], p, 0.0)
            ds = tl.where(live_k[:, None], ds, 0.0)
        # Both narrowed before the products: ds would wait for the first one in twice the registers.
        p, ds = p.to(do.dtype), ds.to(q.dtype)
        dv = tl.dot(p, do, dv, input_precision="ieee")
        dk = tl.dot(ds, q, dk, input_precision="ieee")
    return dk, dv
