"""Gradients of dense attention on sm_90 where head dims are wider than 128: dk and dv do not fit into one warpgroup's registers.

The work and its order are those of `attention_backward`.  One program an SM; two consumers make a work tile together:

    KV tile       one makes S, P = exp(S - lse) and dv = P^T dout; the other dP, dS = P (dP - delta), dk = dS^T q, and publishes
                  dS.  P goes from one to the other through shared memory, in fp32: each product is made once
    query tile    each makes dq of 64 queries; they share K

Each consumer has one product in flight beside the one that it waits for, and the other's products beside its own arithmetic:

    dv      issue S'  | issue dv += P dout | wait for S' | publish P'            | wait for dv
    dk      issue dP' | issue dk += dS q   | wait for dP' | consume P', make dS' | wait for dk

dout is free when dP and dv are done, q when S and dk are.
"""

from .backward_config import UNIT, BackwardConfig
from .backward_consumer import consume_queries, zero_gradient
from .backward_epilogue import Gradient, SplitSums
from .backward_mask import BackwardMask, Lengths
from .backward_pipeline import allocate_ds, allocate_pool, first_stage, make_backward_pipeline, next_stage
from .backward_producer import produce
from .backward_scheduler import Counters, SplitScheduler, await_copies
from .ds_ring import DsTiles, make_ds_ring
from .gluon import barriers, fence_async_shared, gl, jit, mbarrier, wgmma, wgmma_wait
from .parts import LOG2E
from .recompute import Recompute
from .structs import struct

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_tiles", "kv_tiles", "left", "right", "split_tiles", "splits",
           "width", "heads_at_once", "segments", "delay", "slots", "no_tile", "nowhere",
           "stride_gb", "stride_gm", "stride_gh", "stride_xb", "stride_xn", "stride_xh", "stride_yb", "stride_yn",
           "stride_yh", "written", "stat_tiles", "columns_qk", "columns_v"]  # fmt: skip


@struct
class Exchange:
    """P [64 keys, 64 queries] in fp32, on its way from one consumer to the other.  i: how many tiles came before."""

    buffer: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @jit
    def publish(self, p, i):
        mbarrier.wait(self.empty.index(0), (i & 1) ^ 1)
        self.buffer.store(p)
        mbarrier.arrive(self.full.index(0), count=1)

    @jit
    def consume(self, i, LAYOUT: gl.constexpr):
        mbarrier.wait(self.full.index(0), i & 1)
        p = self.buffer.load(LAYOUT)
        mbarrier.arrive(self.empty.index(0), count=1)
        return p


@jit
def probabilities(s, stage, i, pipe, recompute, exchange):
    """P of a tile whose S is there, also to the other consumer; q and lse are no longer needed here."""
    p = recompute.probabilities(s, recompute.lse(recompute.row(stage.slot)))
    exchange.publish(p, i)
    pipe.release_q(stage)
    return p


@jit
def consume_dv(work, group, pipe, mask, exchange, dv_out, scale):
    """dv of a KV tile, over all query heads of its KV head, and the probabilities on the way.  scale: to base 2."""
    config = pipe.config
    lengths = work.lengths
    recompute = Recompute(pipe.statistics, scale, config.SCORES, UNIT)
    first, seen = mask.queries_of(work.tile, lengths)
    last = first + gl.maximum(seen, 1) - 1
    whole = mask.whole(work.tile, lengths)
    dv = zero_gradient(config.COLUMNS_V, config.OUT_V)
    stage = first_stage(0)
    i = 0
    pipe.wait_keys()
    for g in range(group):
        pipe.wait_q(stage)
        s = wgmma_wait(0, deps=(pipe.issue_scores(stage),))
        s = mask.apply(s, first, work.tile, whole, lengths)
        p = probabilities(s, stage, i, pipe, recompute, exchange)
        p16 = gl.convert_layout(p.to(config.DTYPE), config.LEFT_V)
        i += 1
        for tile in range(first + 1, last + 1):  # the tile after the one whose P is there
            now = stage
            stage = next_stage(stage, config.SLOTS)
            pipe.wait_q(stage)
            s_flying = pipe.issue_scores(stage)
            pipe.wait_dout(now)
            dv_flying = wgmma(p16, pipe.dout_for_dv(now), dv, is_async=True)
            s = wgmma_wait(1, deps=(s_flying,))
            s = mask.apply(s, tile, work.tile, whole, lengths)
            p = probabilities(s, stage, i, pipe, recompute, exchange)
            p_next = gl.convert_layout(p.to(config.DTYPE), config.LEFT_V)
            i += 1
            dv, p16 = wgmma_wait(0, deps=(dv_flying, p16))
            pipe.release_dout(now)
            p16 = p_next
        pipe.wait_dout(stage)
        dv = wgmma_wait(0, deps=(wgmma(p16, pipe.dout_for_dv(stage), dv, is_async=True),))
        pipe.release_dout(stage)
        stage = next_stage(stage, config.SLOTS)
    pipe.arrive_done()
    dv_out.store_keys(dv, work)


@jit
def gradient(dp, stage, row, i, pipe, recompute, exchange, ds):
    """dS of a tile whose dP is there, as a left operand, and published."""
    config = pipe.config
    p = exchange.consume(i, config.SCORES)
    pipe.wait_q(stage)
    ds16 = recompute.gradient(p, dp, recompute.row(stage.slot)).to(config.DTYPE)
    ds.publish(ds16, row)
    return gl.convert_layout(ds16, config.LEFT)


@jit
def zero_dk(config):
    """Accumulators of dk: one, or two where its columns are no power of two."""
    first = zero_gradient(config.COLUMNS, config.OUT)
    return (first, zero_gradient(config.REST, config.OUT_REST)) if config.REST > 0 else (first,)


@jit
def issue_dk(ds16, stage, pipe, dk):
    """Issue dk += dS q.  ds16: as a left operand."""
    config = pipe.config
    first = wgmma(ds16, pipe.part(stage.slot, 0, config.COLUMNS // UNIT), dk[0], is_async=True)
    if len(dk) == 1:
        return (first,)
    else:
        rest = gl.convert_layout(ds16, config.LEFT_REST)
        return first, wgmma(rest, pipe.part(stage.slot, 2, 1), dk[1], is_async=True)


@jit
def wait_dk(flying, ds16):
    """-> dk and its left operand, which are free."""
    if len(flying) == 1:
        first, ds16 = wgmma_wait(0, deps=(flying[0], ds16))
        return (first,), ds16
    else:
        first, rest, ds16 = wgmma_wait(0, deps=(flying[0], flying[1], ds16))
        return (first, rest), ds16


@jit
def consume_dk(work, group, pipe, mask, exchange, ds, dk_out, scale):
    """dk of a KV tile, over all query heads of its KV head.  scale: natural."""
    config = pipe.config
    recompute = Recompute(pipe.statistics, scale, config.SCORES, UNIT)
    first, seen = mask.queries_of(work.tile, work.lengths)
    last = first + gl.maximum(seen, 1) - 1
    begin, step, step_of_head = ds.of_keys(work)
    dk = zero_dk(config)
    stage = first_stage(0)
    i = 0
    pipe.wait_keys()
    for g in range(group):
        pipe.wait_dout(stage)
        dp = wgmma_wait(0, deps=(pipe.issue_dp(stage),))
        pipe.release_dout(stage)
        row = gl.where(seen > 0, begin, ds.tiles.nowhere)  # keys that nobody sees publish nothing
        ds16 = gradient(dp, stage, row, i, pipe, recompute, exchange, ds.tiles)
        i += 1
        for _ in range(first + 1, last + 1):  # the tile after the one whose dS is there
            now = stage
            stage = next_stage(stage, config.SLOTS)
            row += step
            pipe.wait_dout(stage)
            dp_flying = pipe.issue_dp(stage)
            dk_flying = issue_dk(ds16, now, pipe, dk)
            dp = wgmma_wait(len(dk), deps=(dp_flying,))
            pipe.release_dout(stage)
            ds_next = gradient(dp, stage, row, i, pipe, recompute, exchange, ds.tiles)
            i += 1
            dk, ds16 = wait_dk(dk_flying, ds16)
            pipe.release_q(now)
            ds16 = ds_next
        dk, ds16 = wait_dk(issue_dk(ds16, stage, pipe, dk), ds16)
        pipe.release_q(stage)
        stage = next_stage(stage, config.SLOTS)
        begin += step_of_head
    await_copies()
    pipe.arrive_done()
    dk_out.store_keys(dk[0] * scale, work)
    if config.REST > 0:
        dk_out.store_keys(dk[1] * scale, work, config.COLUMNS)


@jit
def consume(CID: gl.constexpr, number, scheduler, pipe, mask, exchange, ds, sums, dq, dk, dv, scale):
    """Consumer CID's part of the work tile of a number.  scale: of scores, natural."""
    drawn = scheduler.locate(number)
    if drawn.keys:
        if CID == 0:
            consume_dv(scheduler.kv_tile(drawn), scheduler.group, pipe, mask, exchange, dv, scale * LOG2E)
        else:
            consume_dk(scheduler.kv_tile(drawn), scheduler.group, pipe, mask, exchange, ds, dk, scale)
    else:
        consume_queries(scheduler.query_tile(drawn), scheduler, pipe, mask, sums, dq, scale, CID, 1)


@jit(do_not_specialize=RUNTIME)
def attention_backward_hopper_wide(
    q_desc, do_desc, k_desc, v_desc, stat_desc, ds_desc, DQ, DK, DV, Partial, Progress,
    scale, seq_q, seq_k, heads, group, q_tiles, kv_tiles, left, right, split_tiles, splits, width, heads_at_once, segments, delay,
    slots, no_tile, nowhere,
    stride_gb, stride_gm, stride_gh, stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh, written, stat_tiles,
    columns_qk, columns_v,
    KIND: gl.constexpr, D: gl.constexpr, PANELS_QK: gl.constexpr, PANELS_V: gl.constexpr, SLOTS: gl.constexpr, SPLIT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `attention_backward.attention_backward_hopper`, with D = 256, the width of all tiles, of which head dims fill PANELS_QK
    and PANELS_V panels of 64 columns.  columns_qk, columns_v: of the gradients; None: all that a product makes.  Partial [.., D].
    CONSUMER_REGISTERS, PRODUCER_REGISTERS: of a thread."""
    config = BackwardConfig(q_desc.dtype, D, SLOTS, 2, False, False, PANELS_QK, PANELS_V)
    memory = allocate_pool(stat_desc, config)
    # rows of a quad's 8 columns, so that the 8 rows that a warp stores or loads at a time lie in different banks
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    p_buffer = gl.allocate_shared_memory(gl.float32, [UNIT, UNIT], LAYOUT)
    ds_buffer = allocate_ds(config)
    pipe = make_backward_pipeline(q_desc, do_desc, k_desc, v_desc, stat_desc, memory, config, 2)
    exchange = Exchange(p_buffer, barriers(1, 1), barriers(1, 1))
    fence_async_shared()
    counters = Counters(Progress, segments)
    number = counters.draw()
    lengths = Lengths(seq_q, seq_k, q_tiles, kv_tiles)
    scheduler = SplitScheduler(counters, lengths, heads, group, split_tiles, splits, heads_at_once, delay, slots, no_tile,
                               stat_tiles, 2)  # fmt: skip
    mask = BackwardMask(left, right, KIND)
    ds = make_ds_ring(DsTiles(ds_desc, ds_buffer, nowhere), slots, heads_at_once, group, split_tiles, width, KIND)
    sums = SplitSums(Partial, heads, config, SPLIT)
    dq = Gradient(DQ, stride_gb, stride_gm, stride_gh, config.DTYPE, columns_qk)
    dk = Gradient(DK, stride_xb, stride_xn, stride_xh, config.DTYPE, columns_qk, written)
    dv = Gradient(DV, stride_yb, stride_yn, stride_yh, config.DTYPE, columns_v, written)
    gl.warp_specialize(
        [(consume, (c, number, scheduler, pipe, mask, exchange, ds, sums, dq, dk, dv, scale)) for c in (0, 1)]
        + [(produce, (number, scheduler, pipe, mask, ds))],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
