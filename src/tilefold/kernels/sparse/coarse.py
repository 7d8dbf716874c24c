"""Coarse attention: every query over one row a KV block, and how much of it each query block puts on each row.

One program makes BLOCK_M rows of one query block of one head, in two passes over the rows of K (which stay in L2):

    pass 1   the fold: out and lse
    pass 2   the scores q . k again, as [keys, queries]; p = exp2(s - lse) is summed (or its maximum taken) over the queries

The probabilities [H, Sq, rows] are never written.  A third product is the price: to sum p in pass 1 its rows would have to be
rescaled by what later tiles do to lse, one factor a query.  Pass 2 is transposed because a sum over the queries is then a sum
within four lanes of a warp instead of across the program.
"""

import triton
import triton.language as tl

from ...device.fold import fold_tiles
from ...device.grid import place_of_program
from ...device.ranges import FULL
from ...device.source import fetch_box, fetch_rows, locate_live, locate_live_box, side_of
from ...device.state import LOG2E, state_finish, state_init
from ...device.tile import load_rows, store_rows, widen

MEAN = tl.constexpr(0)  # over the live queries of a block
MAX = tl.constexpr(1)
EACH = tl.constexpr(2)  # every query is a block

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "batch", "stride_sb", "stride_sh", "stride_pb", "stride_ph"]


@triton.jit
def fold_scores(q, lse, live_q, scores, inverse, lo, hi, scale, source, k_side, seq_k, LOCATE: tl.constexpr,
                FETCH: tl.constexpr, REDUCE: tl.constexpr, EDGE: tl.constexpr, EMULATE: tl.constexpr, BLOCK_N: tl.constexpr,
                DIM_QK: tl.constexpr, BLOCK_QK: tl.constexpr):  # fmt: skip
    """Pass 2 over tiles lo..hi.  q [M, BLOCK_QK]; lse [M] in base 2, +inf for a row that is not live: p = 0; scores: where the
    block's scores begin (EACH: [M, 1], where each row's do); inverse: 1 / live queries of the block."""
    for i in tl.range(lo, hi):
        rows, cols, live = LOCATE(i, source, BLOCK_N)
        k = FETCH(k_side, rows, live, EDGE, EMULATE, BLOCK_N, DIM_QK, BLOCK_QK)
        # [N, M]
        s = tl.dot(k, tl.trans(q), input_precision="ieee")
        p = tl.exp2(s * (scale * LOG2E) - lse[None, :])
        if REDUCE == EACH:
            if EDGE:
                p = tl.where(live[:, None], p, 0.0)
            tl.store(scores + cols[:, None], p, mask=(cols < seq_k)[:, None] & live_q[None, :])
        else:
            x = tl.sum(p, 1) * inverse if REDUCE == MEAN else tl.max(p, 1)
            if EDGE:
                x = tl.where(live, x, 0.0)
            tl.store(scores + cols, x, mask=cols < seq_k)


@triton.jit
def rows_before_dead(source):
    """How many rows come before the first dead one: tiles of these need no mask, and hardly any row is ever dead.  source as for
    live_of_row."""
    length, sizes, offset = source
    found = length
    if sizes is not None:
        for start in range(0, length, 256):
            o_n = start + tl.arange(0, 256)
            size = tl.load(sizes + offset + o_n, mask=o_n < length, other=1)
            found = tl.minimum(found, tl.min(tl.where(size > 0, length, o_n), 0))
    return found


@triton.jit
def live_queries(QuerySizes, o_m, i_m, i_q, seq_q, REDUCE: tl.constexpr, Q_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """-> [M] which rows are live, the end of the rows that may be read, and 1 / live queries of the whole block."""
    if REDUCE == EACH:  # Q_BLOCK is 1, and rows of dead blocks are finite
        live, end = o_m < seq_q, seq_q
        if QuerySizes is not None:
            live = live & (tl.load(QuerySizes + o_m, mask=live, other=0) > 0)
        return live, end, 1.0
    else:
        count = tl.minimum(seq_q - i_q * Q_BLOCK, Q_BLOCK)
        if QuerySizes is not None:
            count = tl.minimum(count, tl.maximum(tl.load(QuerySizes + i_q), 0))
        end = i_q * Q_BLOCK + count
        return o_m < end, end, 1.0 / tl.maximum(count, 1).to(tl.float32)


@triton.jit(do_not_specialize=RUNTIME)
def coarse_forward(
    Q, K, V, Out, Lse, Scores, Sizes, QuerySizes, scale, seq_q, seq_k, heads, group, batch,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_ob, stride_om, stride_oh, stride_sb, stride_sh, stride_pb, stride_ph,
    REDUCE: tl.constexpr, BOX: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr, DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr, Q_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Q [B, Sq, H, Dqk], K [B, Sk, H/group, Dqk], V [B, Sk, H/group, Dv], Sk rows; Out [B, Sq, H, Dv], Lse [B, H, Sq]; Scores
    [Q_BLOCK / BLOCK_M, B, H, Qb, Sk] fp32 contiguous, what each tile of a block makes of them; EACH: [B, H, Sq, Sk].  Sizes
    [B, H/group, Sk] or None: a row with size 0 is dead.  QuerySizes [B, H, Qb] or None: live queries of each block (int32,
    stride 0 broadcasts).  BOX: K and V are descriptors of [B, H/group, Sk, D], box [1, 1, BLOCK_N, padded D], dead rows finite.
    Grid (tiles of whole blocks * H * B,): the last block, too, has all its parts of scores."""
    i_m, i_b, i_h = place_of_program(tl.cdiv(seq_q, Q_BLOCK) * Q_BLOCK, heads, False, BLOCK_M)
    i_k = i_h // group
    i_q = (i_m * BLOCK_M) // Q_BLOCK
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if QuerySizes is not None:
        QuerySizes += i_b * stride_pb + i_h * stride_ph
    live_q, end, inverse = live_queries(QuerySizes, o_m, i_m, i_q, seq_q, REDUCE, Q_BLOCK, BLOCK_M)
    q = widen(load_rows(Q + i_b * stride_qb + i_h * stride_qh, i_m * BLOCK_M, end, stride_qm, WIDE, BLOCK_M, DIM_QK,
                        BLOCK_QK), EMULATE)  # fmt: skip
    k_side = side_of(K, i_b, i_k, 0, stride_kb, stride_kn, stride_kh, BOX)
    v_side = side_of(V, i_b, i_k, 0, stride_vb, stride_vn, stride_vh, BOX)
    source = (seq_k, Sizes, i_b * stride_sb + i_k * stride_sh)
    place = (0, 0, o_m[:, None], (seq_q, seq_k))
    LOCATE: tl.constexpr = locate_live_box if BOX else locate_live
    FETCH: tl.constexpr = fetch_box if BOX else fetch_rows
    tiles = tl.cdiv(seq_k, BLOCK_N)
    full = rows_before_dead(source) // BLOCK_N
    state = state_init(BLOCK_M, BLOCK_V)
    state = fold_tiles(q, state, 0, full, place, scale, source, k_side, v_side, (), (), (0, 0), LOCATE, FETCH, FULL, False,
                       EMULATE, BLOCK_N, DIM_QK, DIM_V, BLOCK_QK, BLOCK_V, ())  # fmt: skip
    acc, m, l = fold_tiles(q, state, full, tiles, place, scale, source, k_side, v_side, (), (), (0, 0), LOCATE, FETCH, FULL,
                           True, EMULATE, BLOCK_N, DIM_QK, DIM_V, BLOCK_QK, BLOCK_V, ())  # fmt: skip
    out, lse = state_finish(acc, m, l)
    out = tl.where(live_q[:, None], out, 0.0)
    store_rows(
        Out + i_b * stride_ob + i_h * stride_oh, o_m.to(tl.int64), stride_om, o_m < seq_q, out, DIM_V, BLOCK_V, EMULATE
    )
    tl.store(Lse + (i_b * heads + i_h) * seq_q + o_m, tl.where(live_q, lse, float("-inf")), mask=o_m < seq_q)

    lse = tl.where(live_q & (lse != float("-inf")), lse * LOG2E, float("inf"))
    head = i_b * heads + i_h
    if REDUCE == EACH:
        scores = Scores + ((head * seq_q + o_m) * seq_k)[None, :]
    else:
        blocks = tl.cdiv(seq_q, Q_BLOCK)
        part = (i_m % (Q_BLOCK // BLOCK_M)).to(tl.int64) * batch * heads
        scores = Scores + ((part + head) * blocks + i_q) * seq_k
    exists = o_m < seq_q
    fold_scores(q, lse, exists, scores, inverse, 0, full, scale, source, k_side, seq_k, LOCATE, FETCH, REDUCE, False, EMULATE,
                BLOCK_N, DIM_QK, BLOCK_QK)  # fmt: skip
    fold_scores(q, lse, exists, scores, inverse, full, tiles, scale, source, k_side, seq_k, LOCATE, FETCH, REDUCE, True, EMULATE,
                BLOCK_N, DIM_QK, BLOCK_QK)  # fmt: skip
