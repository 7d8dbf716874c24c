"""Gradients of dense attention on sm_90, dq by additions in memory: non-deterministic, their order changes from run to run.

A program owns 128 keys, 64 for each of two consumers, whose dk and dv stay in registers, and walks over the query tiles that see
them.  Each consumer makes S, dP, dv and dk of its own keys; dS of both goes through shared memory, and each makes one half of the
tile's share of dq over all 128 keys, which is added to fp32 sums in memory (`dq_sums`).

Against `attention_backward`, which keeps dS: each tile of q and dout comes once for 128 keys, and nothing goes to memory and back
but the sums, which stay in L2 while the programs of a few heads run (heads_at_once).

Source: the division of work is FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608; https://github.com/Dao-AILab/flash-attention).
"""

from .backward_config import UNIT
from .backward_epilogue import Gradient
from .backward_mask import BackwardMask, Lengths
from .backward_pipeline import first_stage, next_stage
from .dq_sums import make_dq_sums
from .gluon import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    narrowed,
    opaque,
    pair_barrier,
    schedule_fence_16,
    tma_store_wait,
    wgmma,
    wgmma_init,
    wgmma_wait,
    widened,
)
from .parts import LOG2E
from .pipeline import Stage
from .recompute import Recompute
from .reduce_pipeline import KEYS_FIRST, KEYS_LATE, QUERIES_FIRST, TILE_BY_TILE, ReduceConfig, make_reduce_pipeline
from .reduce_scheduler import BlockScheduler, own_keys

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_units", "kv_units", "q_tiles", "blocks", "left", "right",
           "heads_at_once", "no_tile", "stride_xb", "stride_xn", "stride_xh", "stride_yb", "stride_yn", "stride_yh"]  # fmt: skip


# ---------------------------------------------------------------- the partitions


@jit
def produce(scheduler, pipe):
    """Load K and V, then q, dout and statistics of every query tile, head after head of the group."""
    block = scheduler.block()
    pipe.load_keys(block)
    stage = first_stage(1)
    row = block.row
    for g in range(scheduler.group):
        tile = block.begin
        for _ in range(block.first, block.end):
            pipe.load_queries(stage, block.batch, block.head * scheduler.group + g, tile, row + tile)
            stage = next_stage(stage, pipe.config.SLOTS)
            tile = scheduler.after(tile, block)
        row += block.step


@jit
def add(scheduler, sums):
    """Have every query tile's dq added to memory, in the order in which the consumers make them."""
    block = scheduler.block()
    i = 0
    row = block.row
    for _g in range(scheduler.group):
        tile = block.begin
        for _ in range(block.first, block.end):
            sums.add_parts(row + tile, i)
            i += 1
            tile = scheduler.after(tile, block)
        row += block.step
    tma_store_wait(0)  # shared memory stays until it has been read


@jit
def step(state, own, tile, pipe, recompute, sums, begin, row, i, more, CID: gl.constexpr):
    """The i-th query tile, number `tile`, and this consumer's own 64 keys.  On entry its S is there and its dP (KEYS_LATE: and
    dk of the tile before) in flight; on exit so it is for the next tile, if there is one more.

    state: S, dP, dk, dv.  begin, row: where dq is added, of `DqSums.add`."""
    config = pipe.config
    ORDER: gl.constexpr = config.ORDER
    s, dp_flying, dk, dv = state
    stage = pipe.stage(i)
    ds = pipe.ds.index(i & 1)
    statistics = recompute.row(stage.slot)
    s = own.cut(s, tile)
    p = recompute.probabilities(s, statistics)
    p16 = narrowed(p, config.DTYPE)
    if config.FENCE:
        schedule_fence_16(p16)
    if config.ROUNDED:
        short = p16
    p16 = gl.convert_layout(p16, config.LEFT)
    if ORDER == KEYS_LATE:
        dp, dk = wgmma_wait(0, deps=(dp_flying, dk))
    else:
        dp = wgmma_wait(0, deps=(dp_flying,))
    dv_flying = wgmma(p16, pipe.dout(stage), dv, is_async=True)
    if ORDER == KEYS_LATE:  # dk was the last to read the tile before
        mbarrier.arrive(pipe.empty.index((stage.slot + config.SLOTS - 1) % config.SLOTS), count=1, pred=i > 0)
    if config.ROUNDED:
        p = widened(short)
    ds16 = narrowed(recompute.gradient(p, dp, statistics), config.DTYPE)
    ds.slice(CID * UNIT, UNIT, dim=0).store(ds16)
    fence_async_shared()
    if ORDER != KEYS_LATE:
        left = gl.convert_layout(ds16, config.LEFT)
    if ORDER == KEYS_FIRST:
        dk_flying = wgmma(left, pipe.q(stage), dk, is_async=True)
    pair_barrier(CID, i)
    dq_flying = pipe.issue_dq(ds, CID)
    if ORDER == KEYS_FIRST:
        dv, dk, p16, left = wgmma_wait(1, deps=(dv_flying, dk_flying, p16, left))  # in flight: dq
        pipe.release(stage)
    elif ORDER == QUERIES_FIRST:
        dk_flying = wgmma(left, pipe.q(stage), dk, is_async=True)
        dv, p16 = wgmma_wait(2, deps=(dv_flying, p16))  # in flight: dq, dk
    else:
        dv, p16 = wgmma_wait(1, deps=(dv_flying, p16))  # in flight: dq
    ahead = pipe.stage(i + 1)
    s_flying = pipe.issue_scores(ahead, more, CID)
    if ORDER == QUERIES_FIRST:
        dq = wgmma_wait(2, deps=(dq_flying,))  # in flight: dk, S
    else:
        dq = wgmma_wait(1, deps=(dq_flying,))  # in flight: S
    sums.add(dq, begin, row, i, CID)
    dp_flying = pipe.issue_dp(ahead, more, CID)
    if ORDER == KEYS_LATE:
        dk = wgmma(ds.slice(CID * UNIT, UNIT, dim=0), pipe.q(stage), dk, is_async=True)
        s = wgmma_wait(2, deps=(s_flying,))  # in flight: dP, dk
    elif ORDER == QUERIES_FIRST:
        s, dk, left = wgmma_wait(1, deps=(s_flying, dk_flying, left))  # in flight: dP
        pipe.release(stage)
    else:
        s = wgmma_wait(1, deps=(s_flying,))  # in flight: dP
    return s, dp_flying, dk, dv


@jit
def step_alone(dk, dv, own, tile, pipe, recompute, sums, begin, row, i, CID: gl.constexpr):
    """The i-th query tile as `step` makes it, with nothing in flight before and after.

    Source: the order of the products is FlashAttention-4's (https://github.com/Dao-AILab/flash-attention, flash_bwd_sm90.py)."""
    config = pipe.config
    stage = pipe.stage(i)
    ds = pipe.ds.index(i & 1)
    s_flying = pipe.issue_scores(stage, True, CID)
    statistics = recompute.row(stage.slot)
    dp_flying = pipe.issue_dp(stage, True, CID)
    s = wgmma_wait(1, deps=(s_flying,))
    p = recompute.probabilities(own.cut(s, tile), statistics)
    p16 = narrowed(p, config.DTYPE)
    if config.FENCE:
        schedule_fence_16(p16)
    if config.ROUNDED:
        short = p16
    p16 = gl.convert_layout(p16, config.LEFT)
    dp = wgmma_wait(0, deps=(dp_flying,))
    if config.ROUNDED:
        p = widened(short)
    ds16 = narrowed(recompute.gradient(p, dp, statistics), config.DTYPE)
    ds.slice(CID * UNIT, UNIT, dim=0).store(ds16)
    dv_flying = wgmma(p16, pipe.dout(stage), dv, is_async=True)
    fence_async_shared()
    left = gl.convert_layout(ds16, config.LEFT)
    pair_barrier(CID, i)
    dq_flying = pipe.issue_dq(ds, CID)
    dv, p16 = wgmma_wait(1, deps=(dv_flying, p16))  # in flight: dq
    dk_flying = wgmma(left, pipe.q(stage), dk, is_async=True)
    dq = wgmma_wait(1, deps=(dq_flying,))  # in flight: dk
    sums.add(dq, begin, row, i, CID)
    dk, left = wgmma_wait(0, deps=(dk_flying, left))
    pipe.release(stage)
    return dk, dv


@jit
def consume(CID: gl.constexpr, scheduler, pipe, sums, dk_out, dv_out, scale):
    """dk and dv of 64 keys, over all query heads of their KV head, and half of every query tile's dq."""
    config = pipe.config
    block = scheduler.block()
    own = own_keys(block.tile * 2 + CID, scheduler)
    begin = sums.begin(CID, config.DQ) if sums.SLOTS == 0 else 0
    dk = opaque(
        gl.zeros([UNIT, config.D], gl.float32, config.OUT)
    )  # written before the first product, or all would wait
    dv = opaque(gl.zeros([UNIT, config.D], gl.float32, config.OUT))
    mbarrier.wait(pipe.kv_full.index(0), 0)
    if config.ORDER != TILE_BY_TILE:
        s_flying = pipe.issue_scores(Stage(0, 0), True, CID)
        dp = pipe.issue_dp(Stage(0, 0), True, CID)
        s = wgmma_wait(1, deps=(s_flying,))
    if config.ORDER == KEYS_LATE:
        dk = wgmma_init(dk)
    i = 0
    row = block.row
    steps = (block.end - block.first) * scheduler.group
    for _g in range(scheduler.group):
        tile = block.begin
        for _ in range(block.first, block.end):
            recompute = Recompute(pipe.statistics, scale * LOG2E, config.SCORES, config.QUERIES)
            if config.ORDER == TILE_BY_TILE:
                dk, dv = step_alone(dk, dv, own, tile, pipe, recompute, sums, begin, row + tile, i, CID)
            else:
                state = (s, dp, dk, dv)
                s, dp, dk, dv = step(state, own, tile, pipe, recompute, sums, begin, row + tile, i, i + 1 < steps, CID)
            i += 1
            tile = scheduler.after(tile, block)
        row += block.step
    if config.ORDER != TILE_BY_TILE:
        made, dk = wgmma_wait(0, deps=(dp, dk))  # of no tile, and the last dk if it comes late
    n = own.tile.to(gl.int64) * UNIT
    rows = own.lengths.seq_k - own.tile * UNIT
    dv_out.store(dv, block, n, rows)
    dk_out.store(dk * scale, block, n, rows)


@jit(do_not_specialize=RUNTIME)
def attention_backward_reduce(
    q_desc, do_desc, k_desc, v_desc, stat_desc, sum_desc, Sums, DK, DV,
    scale, seq_q, seq_k, heads, group, q_units, kv_units, q_tiles, blocks, left, right, heads_at_once, no_tile,
    stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh,
    KIND: gl.constexpr, D: gl.constexpr, QUERIES: gl.constexpr, SLOTS: gl.constexpr, SUM_SLOTS: gl.constexpr,
    ORDER: gl.constexpr, STAGGER: gl.constexpr, FENCE: gl.constexpr, ROUNDED: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q_desc, do_desc [B, H, Sq, D], boxes [1, 1, QUERIES, 64]; k_desc, v_desc [B, H/group, Sk, D], boxes [1, 1, 128, 64].  D is
    64 with QUERIES 128, or 128 with QUERIES 64.  stat_desc: statistics (`recompute`, of QUERIES queries) as one dimension, box
    [2 * QUERIES], the last row being number no_tile = B * H * q_tiles, of a tile without queries.

    Sums [no_tile + 1, QUERIES * D] fp32: zeros, to which dq / scale is added; sum_desc: the same as [.., 32], box [128, 32].
    DK, DV [B, Sk, H/group, D] by strides.  scale > 0.  q_units, kv_units: tiles of 64 queries and keys; q_tiles, blocks: tiles of
    QUERIES queries, blocks of 128 keys of a head.  KIND: FULL, CAUSAL or WINDOW (left, right).

    SUM_SLOTS: of DqSums.  ORDER: of the products of a step.  STAGGER: of BlockScheduler.  FENCE, ROUNDED: of ReduceConfig.
    Grid: B * H/group * blocks, heads_at_once KV heads at a time."""
    config = ReduceConfig(q_desc.dtype, D, QUERIES, SLOTS, ORDER, FENCE, ROUNDED)
    pipe = make_reduce_pipeline(q_desc, do_desc, k_desc, v_desc, stat_desc, config)
    sums = make_dq_sums(Sums, sum_desc, SUM_SLOTS, QUERIES * D, ORDER == TILE_BY_TILE)
    fence_async_shared()
    lengths = Lengths(seq_q, seq_k, q_units, kv_units)
    mask = BackwardMask(left, right, KIND)
    scheduler = BlockScheduler(lengths, heads, group, q_tiles, blocks, heads_at_once, no_tile, mask, QUERIES, STAGGER)
    dk = Gradient(DK, stride_xb, stride_xn, stride_xh, config.DTYPE)
    dv = Gradient(DV, stride_yb, stride_yn, stride_yh, config.DTYPE)
    gl.warp_specialize(
        [(consume, (c, scheduler, pipe, sums, dk, dv, scale)) for c in (0, 1)]
        + [(produce, (scheduler, pipe))]
        + ([(add, (scheduler, sums))] if SUM_SLOTS > 0 else []),
        [4, 1, 1] if SUM_SLOTS > 0 else [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS] + ([PRODUCER_REGISTERS] if SUM_SLOTS > 0 else []),
    )
