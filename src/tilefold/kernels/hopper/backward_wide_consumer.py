"""The two consumers of the backward kernels that keep dS where head dims are wider than 128: they make a work tile together.

    KV tile       one makes S, P = exp(S - lse) and dv = P^T dout; the other dP, dS = P (dP - delta), dk = dS^T q, and publishes
                  dS.  P goes from one to the other through shared memory, in fp32: each product is made once.  Under softcap it
                  takes the derivative along
    query tile    each makes dq of 64 or 128 queries; they share K

Each consumer has a product in flight beside the one that it waits for, and the other's products beside its own arithmetic:

    dv      issue S'  | issue dv += P dout | wait for S' | publish P'            | wait for dv
    dk      issue dP' | issue dk += dS q   | wait for dP' | consume P', make dS' | wait for dk

dout is free when dP and dv are done, q when S and dk are.

Of packed sequences the last tile of q, dout, K and V may have the next sequence's rows, which one consumer zeroes: of q and K the
first, and P says that it has; of V and dout, and of K for dq, the second, which tells the other.
"""

from .backward_config import UNIT
from .backward_consumer import consume_queries, zero_columns
from .backward_pipeline import first_stage, next_stage
from .backward_scheduler import await_copies
from .gluon import barriers, gl, jit, mbarrier, wgmma, wgmma_wait
from .recompute import Recompute
from .structs import struct


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
def make_exchange():
    # rows of a quad's 8 columns, so that the 8 rows that a warp stores or loads at a time lie in different banks
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    buffer = gl.allocate_shared_memory(gl.float32, [UNIT, UNIT], LAYOUT)
    return Exchange(buffer, barriers(1, 1), barriers(1, 1))


@jit
def probabilities(s, stage, q_tile, work, whole, i, pipe, mask, mods, recompute, exchange):
    """P of a tile whose S is there, also to the other consumer; q and lse are no longer needed here."""
    s, _, steep = mods.capped(s)
    s = mask.apply(s, q_tile, work.tile, whole, work.lengths)
    p = recompute.probabilities(s, recompute.lse(recompute.row(stage.slot)))
    if mods.SOFTCAP:
        exchange.publish(p * steep, i)
    else:
        exchange.publish(p, i)
    pipe.release_q(stage)
    return p


@jit
def clear_tail(pipe, tile, live):
    """Zero the rows of a tile of the pool from `live` on, if there are any."""
    if live < UNIT:
        pipe.clear(tile, live)


@jit
def publish_clear(pipe, stage, live, g):
    """The same of dout, for the other consumer, too, for the g-th time."""
    if live < UNIT:
        pipe.clear(pipe.config.SLOTS + stage.slot, live)
        pipe.publish_clear(g)


@jit
def issue_columns(left, tile, pipe, acc, COLUMNS: gl.constexpr):
    """Issue acc += left times a tile of the pool: COLUMNS of it, and the third panel if acc has a part for it."""
    first = wgmma(left, pipe.part(tile, 0, COLUMNS // UNIT), acc[0], is_async=True)
    if len(acc) == 1:
        return (first,)
    else:
        rest = gl.convert_layout(left, pipe.config.LEFT_REST)
        return first, wgmma(rest, pipe.part(tile, 2, 1), acc[1], is_async=True)


@jit
def wait_columns(flying, left):
    """-> the accumulators and their left operand, which are free."""
    if len(flying) == 1:
        first, left = wgmma_wait(0, deps=(flying[0], left))
        return (first,), left
    else:
        first, rest, left = wgmma_wait(0, deps=(flying[0], flying[1], left))
        return (first, rest), left


@jit
def store_columns(gradient, acc, work, COLUMNS: gl.constexpr):
    """The rows of a KV tile; COLUMNS: of the first part."""
    gradient.store_keys(acc[0], work)
    if len(acc) > 1:
        gradient.store_keys(acc[1], work, COLUMNS)


@jit
def consume_dv(work, group, pipe, mask, mods, exchange, dv_out):
    """dv of a KV tile, over all query heads of its KV head, and the probabilities on the way."""
    config = pipe.config
    lengths = work.lengths
    recompute = Recompute(pipe.statistics, mods.to_base_2(), config.SCORES, UNIT)
    first, seen = mask.queries_of(work.tile, lengths)
    last = first + gl.maximum(seen, 1) - 1
    whole = mask.whole(work.tile, lengths)
    VARLEN: gl.constexpr = config.VARLEN
    dv = zero_columns(config.COLUMNS_V, config.OUT_V, config.REST_V, config.OUT_REST)
    stage = first_stage(0)
    i = 0
    pipe.wait_keys()
    if VARLEN:
        clear_tail(pipe, 2 * config.SLOTS, lengths.seq_k - work.tile * UNIT)
    for g in range(group):
        pipe.wait_q(stage, lengths.seq_q - first * UNIT if VARLEN else None)
        s = wgmma_wait(0, deps=(pipe.issue_scores(stage),))
        p = probabilities(s, stage, first, work, whole, i, pipe, mask, mods, recompute, exchange)
        p16 = gl.convert_layout(p.to(config.DTYPE), config.LEFT_V)
        i += 1
        for tile in range(first + 1, last + 1):  # the tile after the one whose P is there
            now = stage
            stage = next_stage(stage, config.SLOTS)
            pipe.wait_q(stage, lengths.seq_q - tile * UNIT if VARLEN else None)
            s_flying = pipe.issue_scores(stage)
            pipe.wait_dout(now)
            dv_flying = issue_columns(p16, config.SLOTS + now.slot, pipe, dv, config.COLUMNS_V)
            s = wgmma_wait(len(dv), deps=(s_flying,))
            p = probabilities(s, stage, tile, work, whole, i, pipe, mask, mods, recompute, exchange)
            p_next = gl.convert_layout(p.to(config.DTYPE), config.LEFT_V)
            i += 1
            dv, p16 = wait_columns(dv_flying, p16)
            pipe.release_dout(now)
            p16 = p_next
        pipe.wait_dout(stage)
        if VARLEN:
            if lengths.seq_q - last * UNIT < UNIT:
                pipe.await_clear(g)
        dv, p16 = wait_columns(issue_columns(p16, config.SLOTS + stage.slot, pipe, dv, config.COLUMNS_V), p16)
        pipe.release_dout(stage)
        stage = next_stage(stage, config.SLOTS)
    pipe.arrive_done()
    store_columns(dv_out, dv, work, config.COLUMNS_V)


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
def consume_dk(work, group, pipe, mask, exchange, ds, dk_out, scale):
    """dk of a KV tile, over all query heads of its KV head.  scale: natural."""
    config = pipe.config
    recompute = Recompute(pipe.statistics, scale, config.SCORES, UNIT)
    lengths = work.lengths
    VARLEN: gl.constexpr = config.VARLEN
    first, seen = mask.queries_of(work.tile, lengths)
    last = first + gl.maximum(seen, 1) - 1
    begin, step, step_of_head = ds.of_keys(work)
    dk = zero_columns(config.COLUMNS, config.OUT, config.REST, config.OUT_REST)
    stage = first_stage(0)
    i = 0
    pipe.wait_keys()
    if VARLEN:
        clear_tail(pipe, 2 * config.SLOTS + 1, lengths.seq_k - work.tile * UNIT)
    for g in range(group):
        pipe.wait_dout(stage)
        if VARLEN:
            publish_clear(pipe, stage, lengths.seq_q - first * UNIT, g)
        dp = wgmma_wait(0, deps=(pipe.issue_dp(stage),))
        pipe.release_dout(stage)
        row = gl.where(seen > 0, begin, ds.tiles.nowhere)  # keys that nobody sees publish nothing
        ds16 = gradient(dp, stage, row, i, pipe, recompute, exchange, ds.tiles)
        i += 1
        for tile in range(first + 1, last + 1):  # the tile after the one whose dS is there
            now = stage
            stage = next_stage(stage, config.SLOTS)
            row += step
            pipe.wait_dout(stage)
            if VARLEN:
                publish_clear(pipe, stage, lengths.seq_q - tile * UNIT, g)
            dp_flying = pipe.issue_dp(stage)
            dk_flying = issue_columns(ds16, now.slot, pipe, dk, config.COLUMNS)
            dp = wgmma_wait(len(dk), deps=(dp_flying,))
            pipe.release_dout(stage)
            ds_next = gradient(dp, stage, row, i, pipe, recompute, exchange, ds.tiles)
            i += 1
            dk, ds16 = wait_columns(dk_flying, ds16)
            pipe.release_q(now)
            ds16 = ds_next
        dk, ds16 = wait_columns(issue_columns(ds16, stage.slot, pipe, dk, config.COLUMNS), ds16)
        pipe.release_q(stage)
        stage = next_stage(stage, config.SLOTS)
        begin += step_of_head
    await_copies()
    pipe.arrive_done()
    scaled = (dk[0] * scale,)
    if len(dk) > 1:
        scaled = (dk[0] * scale, dk[1] * scale)
    store_columns(dk_out, scaled, work, config.COLUMNS)


@jit
def consume(CID: gl.constexpr, number, scheduler, pipe, mask, mods, exchange, ds, sums, dq, dk, dv):
    """Consumer CID's part of the work tile of a number."""
    drawn = scheduler.locate(number)
    if drawn.keys:
        if CID == 0:
            consume_dv(scheduler.kv_tile(drawn), scheduler.group, pipe, mask, mods, exchange, dv)
        else:
            consume_dk(scheduler.kv_tile(drawn), scheduler.group, pipe, mask, exchange, ds, dk, mods.scale)
    elif drawn.queries:
        NUMBER: gl.constexpr = pipe.config.QUERY_TILES // 2
        consume_queries(scheduler.query_tile(drawn), scheduler, pipe, mask, sums, dq, mods.scale, CID * NUMBER, NUMBER)
