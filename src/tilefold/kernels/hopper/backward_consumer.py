"""The consumer of the backward kernels that keep dS: the main loops of a warpgroup, over the queries of 64 keys and over the keys
of 64 or 128 queries.

For dk and dv everything is transposed, so that P and dS leave one product as accumulators and enter the next as left operands,
without a way through shared memory.  The order in which products are issued, and what is in flight behind each line:

    P of this tile                                     dP
    wait for dP; issue dv; dS                          dv
    issue dk; publish dS                               dv  dk
    wait for dv; issue the next tile's S               dk  S'
    wait for dk: the slot is free; issue dP            S'  dP'
    wait for S                                         dP'
"""

from .backward_config import UNIT
from .backward_pipeline import first_stage, next_stage
from .backward_scheduler import await_copies
from .gluon import gl, jit, opaque, wgmma, wgmma_wait
from .parts import LOG2E
from .recompute import Recompute


@jit
def consume(number, scheduler, pipe, mask, ds, sums, dq, dk, dv, scale):
    """The work tile of a number.  scale: of scores, natural."""
    drawn = scheduler.locate(number)
    if drawn.keys:
        consume_keys(scheduler.kv_tile(drawn), scheduler.group, pipe, mask, ds, dk, dv, scale * LOG2E)
    elif drawn.queries:
        consume_queries(scheduler.query_tile(drawn), scheduler, pipe, mask, sums, dq, scale, 0, pipe.config.QUERY_TILES)


# ---------------------------------------------------------------- dk and dv


@jit
def issue_scores(own, tile, config):
    """Issue S or dP [keys, queries]: own K or V times q or dout."""
    nothing = gl.zeros([UNIT, UNIT], gl.float32, config.SCORES)  # use_acc=False: never read
    return wgmma(own, tile.permute((1, 0)), nothing, use_acc=False, is_async=True)


@jit
def first_products(own, stage, pipe, live_q=None):
    """-> S of the first query tile, and its dP, in flight."""
    pipe.wait_q(stage, live_q)
    s = issue_scores(own[0], pipe.q(stage), pipe.config)
    pipe.wait_dout(stage, live_q)
    dp = issue_scores(own[1], pipe.dout(stage), pipe.config)
    s = wgmma_wait(1, deps=(s,))
    return s, dp


@jit
def key_step(state, own, stage, row, pipe, recompute, ds, LAST: gl.constexpr, live_q=None, live_k=None):
    """One query tile.  On entry its S is there and its dP in flight; on exit so it is for the next one, unless LAST.

    state: S, dP, dk, dv.  own: K and V, as tiles or as left operands in registers.  row: where dS is published.  live_q: valid
    queries of the next tile, live_k: valid keys of this one; None: all, or masked otherwise.  -> state, stage"""
    config = pipe.config
    s, dp, dk, dv = state
    statistics = recompute.row(stage.slot)
    p = recompute.probabilities(s, recompute.lse(statistics))
    if live_k is not None:
        dead = gl.expand_dims(gl.arange(0, UNIT, layout=gl.SliceLayout(1, config.SCORES)) >= live_k, 1)
        p = gl.where(dead, 0.0, p)
    p16 = gl.convert_layout(p.to(config.DTYPE), config.LEFT)
    dp_made = wgmma_wait(0, deps=(dp,))
    dv_flying = wgmma(p16, pipe.dout(stage), dv, is_async=True)
    ds_made = recompute.gradient(p, dp_made, statistics)
    if live_k is not None:
        ds_made = gl.where(dead, 0.0, ds_made)
    ds16 = ds_made.to(config.DTYPE)
    left = gl.convert_layout(ds16, config.LEFT)
    dk_flying = wgmma(left, pipe.q(stage), dk, is_async=True)
    ds.publish(ds16, row)
    dv, p16 = wgmma_wait(1, deps=(dv_flying, p16))
    following = next_stage(stage, config.SLOTS)
    if LAST:
        dk, left = wgmma_wait(0, deps=(dk_flying, left))
        pipe.release_q(stage)
        return (s, dp, dk, dv), following
    else:
        pipe.wait_q(following, live_q)
        s_flying = issue_scores(own[0], pipe.q(following), config)
        dk, left = wgmma_wait(1, deps=(dk_flying, left))
        pipe.release_q(stage)
        pipe.wait_dout(following, live_q)
        dp = issue_scores(own[1], pipe.dout(following), config)
        s = wgmma_wait(1, deps=(s_flying,))
        return (s, dp, dk, dv), following


@jit
def zero_gradient(COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """An accumulator [64, COLUMNS], written before the first product, or all would wait."""
    return opaque(gl.zeros([UNIT, COLUMNS], gl.float32, LAYOUT))


@jit
def zero_columns(COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, REST: gl.constexpr, LAYOUT_REST: gl.constexpr):
    """Accumulators of a gradient: one, or two where its columns are no power of two."""
    first = zero_gradient(COLUMNS, LAYOUT)
    return (first, zero_gradient(REST, LAYOUT_REST)) if REST > 0 else (first,)


@jit
def consume_keys(work, group, pipe, mask, ds, dk_out, dv_out, scale):
    """dk and dv of a KV tile, over all query heads of its KV head.  scale: to base 2.

    Of packed sequences the last query tile, K and V may have an end in them: their rows behind it are zeroed.  Who looks for it
    has to wait for all warps, so the last query tile has a loop of its own."""
    config = pipe.config
    VARLEN: gl.constexpr = config.VARLEN
    recompute = Recompute(pipe.statistics, scale, config.SCORES, UNIT)
    lengths = work.lengths
    first, seen = mask.queries_of(work.tile, lengths)
    last = first + gl.maximum(seen, 1) - 1
    whole = mask.whole(work.tile, lengths)
    begin, step, step_of_head = ds.of_keys(work)
    dk = zero_gradient(config.COLUMNS, config.OUT)
    dv = zero_gradient(config.COLUMNS_V, config.OUT_V)
    stage = first_stage(0)
    pipe.wait_keys()
    if VARLEN:
        live_k = lengths.seq_k - work.tile * UNIT
        if live_k < UNIT:
            pipe.clear(2 * config.SLOTS, live_k)
            pipe.clear(2 * config.SLOTS + 1, live_k)
    own = (pipe.k(), pipe.v())
    if config.HOLD:
        own = (own[0].load(config.OWN), own[1].load(config.OWN))
    if VARLEN:
        begin -= first * step  # its rows are worked out anew: the one of the next tile has no register
    for g in range(group):
        s, dp = first_products(own, stage, pipe, lengths.seq_q - first * UNIT if VARLEN else None)
        s = mask.apply(s, first, work.tile, whole, lengths)
        row = begin
        for i in range(first + 1, last if VARLEN else last + 1):  # the tile after the one whose S is there
            if VARLEN:
                row = begin + (i - 1) * step
            state, stage = key_step((s, dp, dk, dv), own, stage, row, pipe, recompute, ds.tiles, False)
            s, dp, dk, dv = state
            row += step  # before the mask's branch, or the compiler makes the loop twice
            s = mask.apply(s, i, work.tile, whole, lengths)
        if VARLEN:
            for i in range(gl.maximum(first + 1, last), last + 1):
                live_q, row = lengths.seq_q - i * UNIT, begin + (i - 1) * step
                state, stage = key_step((s, dp, dk, dv), own, stage, row, pipe, recompute, ds.tiles, False, live_q)
                s, dp, dk, dv = state
                s = mask.apply(s, i, work.tile, whole, lengths)
            row = begin + last * step
        row = gl.where(seen > 0, row, ds.tiles.nowhere)  # keys that nobody sees publish nothing
        state, stage = key_step((s, dp, dk, dv), own, stage, row, pipe, recompute, ds.tiles, True)
        s, dp, dk, dv = state
        begin += step_of_head
    store_keys(work, pipe, dk, dv, dk_out, dv_out, scale)


@jit
def store_keys(work, pipe, dk, dv, dk_out, dv_out, scale):
    """dk and dv of a KV tile, and as soon as they are there the news that all its dS has been written."""
    if dv_out.written is None:
        dv_out.store_keys(dv, work)
    await_copies()
    pipe.arrive_done()
    if dv_out.written is not None:
        dv_out.store_keys(dv, work)
    dk_out.store_keys(dk * (scale * (1 / LOG2E)), work)


# ---------------------------------------------------------------- dq


@jit
def add_pairs(sums, stage, before, j, pipe, FIRST: gl.constexpr, NUMBER: gl.constexpr):
    """sums + dS K of a slot, in flight: of NUMBER query tiles from FIRST on, of each the first columns and the rest, if there is
    one.  The slot before is free."""
    PARTS: gl.constexpr = len(sums) // NUMBER
    flying = ()
    for t in gl.static_range(NUMBER):
        flying = flying + (pipe.issue_dq(stage, FIRST + t, sums[t * PARTS], 0),)
        if PARTS > 1:
            flying = flying + (pipe.issue_dq(stage, FIRST + t, sums[t * PARTS + 1], pipe.config.COLUMNS),)
    sums = wait_sums(flying, len(flying))
    pipe.release_pair(before, j)
    return sums


@jit
def wait_sums(sums, FLYING: gl.constexpr):
    """Until so many products of them are in flight."""
    if len(sums) == 1:
        return (wgmma_wait(FLYING, deps=sums),)
    else:
        return wgmma_wait(FLYING, deps=sums)


@jit
def consume_queries(work, scheduler, pipe, mask, split_sums, dq_out, scale, FIRST: gl.constexpr, NUMBER: gl.constexpr):
    """dq = scale * sum of dS K, in the keys' order, of NUMBER of the work tile's query tiles from number FIRST on.

    Over the KV split, and of what the splits before made, which waits in memory."""
    config = pipe.config
    lengths = work.lengths
    VARLEN: gl.constexpr = config.VARLEN
    low, tiles, begins, ends = scheduler.keys_of(work, mask)
    sums = ()
    for _ in gl.static_range(NUMBER):
        sums = sums + zero_columns(config.COLUMNS, config.OUT, config.REST, config.OUT_REST)
    stage = first_stage(0)
    before = 0
    for j in range(tiles - 1 if VARLEN else tiles):
        pipe.wait_q(stage)
        sums = add_pairs(sums, stage, before, j, pipe, FIRST, NUMBER)
        before = stage.slot
        stage = next_stage(stage, config.DQ_SLOTS)
    if VARLEN:
        for j in range(gl.maximum(tiles - 1, 0), tiles):  # which may have the end of the sequence in it
            live = lengths.seq_k - (low + j) * UNIT
            if pipe.cleared is None:
                pipe.wait_q(stage, live)
            else:
                pipe.wait_q(stage)
                if live < UNIT:
                    if FIRST > 0:
                        pipe.clear(stage.slot, live)
                        pipe.publish_clear(0)
                    else:
                        pipe.await_clear(0)
            sums = add_pairs(sums, stage, before, j, pipe, FIRST, NUMBER)
            before = stage.slot
            stage = next_stage(stage, config.DQ_SLOTS)
    sums = wait_sums(sums, 0)
    if not split_sums.ON:
        pipe.arrive_done()
    PARTS: gl.constexpr = len(sums) // NUMBER
    seen = (tiles, begins, ends)
    for i in gl.static_range(len(sums)):
        t = FIRST + i // PARTS
        store_sum(sums[i], work, t, seen, scheduler, split_sums, dq_out, scale, i % PARTS * config.COLUMNS)
    if split_sums.ON:
        pipe.arrive_done()  # the sum counts as much as the dS that was read


@jit
def store_sum(made, work, t, seen, scheduler, split_sums, dq_out, scale, COLUMN: gl.constexpr):
    """dq of the work tile's t-th query tile, or the sum so far, to where it goes: of the columns from COLUMN on.

    seen: how many KV tiles of the split, and whether it is the first and the last."""
    tiles, begins, ends = seen
    tile = work.tile + t
    row, rows = work.first_q + tile * UNIT, work.lengths.seq_q - tile * UNIT
    if split_sums.ON:
        kept = split_sums.of(work, tile, made, COLUMN)
        if (tiles > 0) & ~begins:
            scheduler.counters.await_queries(work.segment - 1, scheduler.query_tiles())
            made += gl.load(kept)
        if ends:
            dq_out.store(made * scale, work, row, rows, COLUMN)
        elif tiles > 0:
            gl.store(kept, made)
    else:
        dq_out.store(made * scale, work, row, rows, COLUMN)
