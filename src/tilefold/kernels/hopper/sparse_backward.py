"""Gradients of block-sparse attention on sm_90, in five products a pair of blocks and without an addition in memory.

The work, its order and its steps are those of `attention_backward`.  A program makes either dk and dv of 64 keys, over the query
blocks that list them, or dq of 64 queries, over their list.  Sums follow a list, span by span: the same bits in every run.
"""

from .backward_config import UNIT, BackwardConfig
from .backward_consumer import add_pairs, first_products, key_step, store_keys, zero_gradient
from .backward_epilogue import Gradient
from .backward_lists import BlockSizes, ListDsRing, Lists, ListScheduler, Spans
from .backward_mask import Lengths
from .backward_pipeline import allocate_ds, allocate_pool, first_stage, make_backward_pipeline, next_stage
from .backward_scheduler import Counters, await_copies
from .ds_ring import DsTiles
from .gluon import fence_async_shared, gl, jit, wgmma_wait
from .parts import LOG2E
from .recompute import Recompute

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_units", "kv_units", "capacity", "heads_at_once", "batches", "delay",
           "slots", "no_unit", "nowhere",
           "stride_gb", "stride_gm", "stride_gh", "stride_xb", "stride_xn", "stride_xh", "stride_yb", "stride_yn", "stride_yh",
           "stride_ib", "stride_ih", "stride_iq", "stride_cb", "stride_ch",
           "stride_tb", "stride_th", "stride_tk", "stride_ub", "stride_uh",
           "stride_sb", "stride_sh", "stride_pb", "stride_ph",
           "spans", "span_tiles", "stride_es", "stride_eb", "stride_eh"]  # fmt: skip


# ---------------------------------------------------------------- the producer


@jit
def produce_keys(work, scheduler, pipe, transposed, spans):
    """K and V, then q, dout and statistics of every query tile of the segment that lists them."""
    Q_TILES: gl.constexpr = transposed.LISTED
    q_tiles = work.lengths.q_tiles
    pipe.load_keys(work)
    stage = first_stage(1)
    for g in range(scheduler.group):
        head = work.head * scheduler.group + g
        index, count = transposed.of(work.tile, work.batch, head)
        first, count = spans.cut(work, work.tile // transposed.TILES, head, count)
        index += first
        row = (work.batch * scheduler.heads + head) * q_tiles
        ahead = gl.load(index)
        for j in range(gl.maximum(count, 1) * Q_TILES):
            tile = ahead * Q_TILES + j % Q_TILES
            ahead = gl.load(index + gl.minimum((j + 1) // Q_TILES, gl.maximum(count - 1, 0)))
            # An empty list is a tile without queries, past the end, where TMA gives zeros.
            tile = gl.where(count > 0, tile, q_tiles)
            statistics = gl.where(count > 0, row + tile, scheduler.no_tile)
            pipe.load_queries(stage, work, head, tile * UNIT, statistics, (g == 0) & (j == 0), scheduler.counters)
            stage = next_stage(stage, pipe.config.SLOTS)


@jit
def produce_queries(work, scheduler, pipe, lists, ds):
    """K and dS of every pair of a query tile."""
    KV_TILES: gl.constexpr = lists.LISTED
    index, count = scheduler.keys_of(work, lists)
    scheduler.counters.await_keys_without_ds(work, count)
    kv_head = work.head // scheduler.group
    row = ds.of_queries(work)
    stage = first_stage(1)
    ahead = gl.load(index)
    for j in range(count * KV_TILES):
        tile = ahead * KV_TILES + j % KV_TILES
        ahead = gl.load(index + gl.minimum((j + 1) // KV_TILES, count - 1))
        pipe.load_pair(stage, work, kv_head, tile, (row + j * UNIT,), ds.tiles, j == 0, scheduler.counters)
        stage = next_stage(stage, pipe.config.DQ_SLOTS)


@jit
def produce(number, scheduler, pipe, lists, transposed, spans, ds):
    """The work tile of a number, counted as done while the results are written."""
    drawn = scheduler.locate(number)
    if drawn.keys:
        work = scheduler.kv_tile(drawn)
        produce_keys(work, scheduler, pipe, transposed, spans)
        pipe.wait_done()
        scheduler.counters.publish_keys(work)
        if scheduler.spans is not None:
            scheduler.counters.publish_sums(work)
    else:
        work = scheduler.query_tile(drawn)
        produce_queries(work, scheduler, pipe, lists, ds)
        pipe.wait_done()
        scheduler.counters.publish_queries(work)


# ---------------------------------------------------------------- the consumer


@jit
def consume_keys(work, scheduler, pipe, transposed, spans, sizes, ds, dk_out, dv_out, scale):
    """dk and dv of a KV tile, over the lists of all query heads of its KV head.  scale: to base 2."""
    config = pipe.config
    Q_TILES: gl.constexpr = ds.Q_TILES
    MASKED: gl.constexpr = sizes.MASKED
    Q_SIZED: gl.constexpr = sizes.Q_SIZED
    group = scheduler.group
    recompute = Recompute(pipe.statistics, scale, config.SCORES, UNIT)
    slot, first_head = ds.slot(work), scheduler.span_of(work.segment)[0] * scheduler.heads_at_once
    block, part = work.tile // ds.KV_TILES, work.tile % ds.KV_TILES
    dk = zero_gradient(config.COLUMNS, config.OUT)
    dv = zero_gradient(config.COLUMNS_V, config.OUT_V)
    stage = first_stage(0)
    pipe.wait_keys()
    own = (pipe.k(), pipe.v())
    for g in range(group):
        head = work.head * group + g
        index, count = transposed.of(work.tile, work.batch, head)
        first, count = spans.cut(work, block, head, count)
        index += first
        places = transposed.begin(ds.Places, block, work.batch, head) + first
        live_k = sizes.live_keys(work, head, block, part)
        begin = ds.of_keys(slot, work, work.batch * scheduler.heads + head - first_head * group, part)
        tiles = gl.maximum(count, 1) * Q_TILES
        ahead = ds.row(begin, places, 0, count)
        live_q = sizes.live_queries(work.batch, head, index, 0, count, Q_TILES)
        s, dp = first_products(own, stage, pipe, live_q if Q_SIZED else None)
        for j in range(1, tiles):
            live_q = sizes.live_queries(work.batch, head, index, j, count, Q_TILES)
            row = ahead
            ahead = ds.row(begin, places, j, count)
            state, stage = key_step((s, dp, dk, dv), own, stage, row, pipe, recompute, ds.tiles, False,
                                    live_q if Q_SIZED else None, live_k if MASKED else None)  # fmt: skip
            s, dp, dk, dv = state
        state, stage = key_step((s, dp, dk, dv), own, stage, ahead, pipe, recompute, ds.tiles, True, None,
                                live_k if MASKED else None)  # fmt: skip
        s, dp, dk, dv = state
    if spans.number is None:
        store_keys(work, pipe, dk, dv, dk_out, dv_out, scale)
    else:
        scheduler.counters.await_sums(work)
        dk = spans.add(0, dk, work)
        dv = spans.add(1, dv, work)
        await_copies()
        pipe.arrive_done()
        row = work.tile * UNIT
        rows = gl.where(work.split == spans.number - 1, work.lengths.seq_k - row, 0)
        dv_out.store(dv, work, row, rows)
        dk_out.store(dk * (scale * (1 / LOG2E)), work, row, rows)


@jit
def consume_queries(work, scheduler, pipe, lists, sizes, dq_out, scale):
    """dq = scale * sum of dS K of a query tile, in the order of its list."""
    config = pipe.config
    KV_TILES: gl.constexpr = lists.LISTED
    index, count = scheduler.keys_of(work, lists)
    begin = sizes.of_keys(work.batch, work.head)
    sums = (zero_gradient(config.COLUMNS, config.OUT),)
    stage = first_stage(0)
    before = 0
    for j in range(count * KV_TILES):
        if sizes.SIZED:
            pipe.wait_q(stage, gl.load(begin + gl.load(index + j // KV_TILES)) - j % KV_TILES * UNIT)
        else:
            pipe.wait_q(stage)
        sums = add_pairs(sums, stage, before, j, pipe, 0, 1)
        before = stage.slot
        stage = next_stage(stage, config.DQ_SLOTS)
    dq = wgmma_wait(0, deps=(sums[0],))
    pipe.arrive_done()
    row = work.tile * UNIT
    dq_out.store(dq * scale, work, row, work.lengths.seq_q - row)


@jit
def consume(number, scheduler, pipe, lists, transposed, spans, sizes, ds, dq, dk, dv, scale):
    """The work tile of a number.  scale: of scores, natural."""
    drawn = scheduler.locate(number)
    if drawn.keys:
        work = scheduler.kv_tile(drawn)
        consume_keys(work, scheduler, pipe, transposed, spans, sizes, ds, dk, dv, scale * LOG2E)
    else:
        consume_queries(scheduler.query_tile(drawn), scheduler, pipe, lists, sizes, dq, scale)


@jit(do_not_specialize=RUNTIME)
def sparse_backward_hopper(
    q_desc, do_desc, k_desc, v_desc, stat_desc, keep_desc, DQ, DK, DV, Index, Count, TurnedIndex, TurnedCount, Places, Sizes,
    QuerySizes, Progress, Edges, Sums,
    scale, seq_q, seq_k, heads, group, q_units, kv_units, capacity, heads_at_once, batches, delay, slots, no_unit, nowhere,
    stride_gb, stride_gm, stride_gh, stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh,
    stride_ib, stride_ih, stride_iq, stride_cb, stride_ch, stride_tb, stride_th, stride_tk, stride_ub, stride_uh,
    stride_sb, stride_sh, stride_pb, stride_ph, spans, span_tiles, stride_es, stride_eb, stride_eh,
    D: gl.constexpr, SLOTS: gl.constexpr, Q_UNITS: gl.constexpr, KV_UNITS: gl.constexpr, MASKED: gl.constexpr,
    SIZED: gl.constexpr, Q_SIZED: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q_desc, do_desc [B, H, Sq, D], k_desc, v_desc [B, H/group, Sk, D] with boxes [1, 1, 64, 64]; stat_desc: statistics as one
    dimension, box [128], the last row being number no_unit; keep_desc [nowhere, 64], box [64, 64]: the ring of dS.
    DQ [B, Sq, H, D], DK, DV [B, Sk, H/group, D] by strides.  Index [B, H, Qb, cap], Count [B, H, Qb]: the lists;
    TurnedIndex [B, H, KVb, tcap], TurnedCount [B, H, KVb]: their transpose, Places likewise (kernels.list_places);
    Sizes [B, H, KVb] if SIZED, QuerySizes [B, H, Qb] if Q_SIZED; int32.  scale > 0.  Query blocks have 64 * Q_UNITS tokens,
    KV blocks 64 * KV_UNITS; q_units = Qb * Q_UNITS, kv_units = KVb * KV_UNITS.  MASKED: some key of a block is not live.

    A segment is heads_at_once KV heads: B * H/group = batches * heads_at_once; `slots` is the number of slots of the ring of dS,
    `delay` of `backward_scheduler`.
    spans, span_tiles: of ListScheduler, with Edges by its strides and Sums: of Spans; or all None.
    A segment is then one span of heads_at_once heads, of which there are `batches`.
    Progress [1 + 2 * batches, with spans and heads_at_once * kv_units more] int32: zeros.  Grid: a program for each work tile;
    which one it makes, it draws."""
    config = BackwardConfig(q_desc.dtype, D, SLOTS, 1)
    memory = allocate_pool(stat_desc, config)
    ds_tiles = DsTiles(keep_desc, allocate_ds(config), nowhere)
    pipe = make_backward_pipeline(q_desc, do_desc, k_desc, v_desc, stat_desc, memory, config, 1)
    fence_async_shared()
    counters = Counters(Progress, batches)
    number = counters.draw()
    scheduler = ListScheduler(
        counters, Lengths(seq_q, seq_k, q_units, kv_units), heads, group, heads_at_once, delay, slots, no_unit, spans,
        span_tiles,
    )  # fmt: skip
    slot_rows = scheduler.query_tiles() * capacity * (KV_UNITS * UNIT)
    ds = ListDsRing(ds_tiles, Places, slots, slot_rows, scheduler.head_tiles(), capacity, Q_UNITS, KV_UNITS)
    of_spans = Spans(spans, Edges, stride_es, stride_eb, stride_eh, Sums, config)
    lists = Lists(Index, Count, (stride_ib, stride_ih, stride_iq, stride_cb, stride_ch), Q_UNITS, KV_UNITS)
    strides = (stride_tb, stride_th, stride_tk, stride_ub, stride_uh)
    transposed = Lists(TurnedIndex, TurnedCount, strides, KV_UNITS, Q_UNITS)
    sizes = BlockSizes(Sizes, QuerySizes, (stride_sb, stride_sh, stride_pb, stride_ph), MASKED, SIZED, Q_SIZED)
    dq = Gradient(DQ, stride_gb, stride_gm, stride_gh, config.DTYPE)
    dk = Gradient(DK, stride_xb, stride_xn, stride_xh, config.DTYPE)
    dv = Gradient(DV, stride_yb, stride_yn, stride_yh, config.DTYPE)
    gl.warp_specialize(
        [
            (consume, (number, scheduler, pipe, lists, transposed, of_spans, sizes, ds, dq, dk, dv, scale)),
            (produce, (number, scheduler, pipe, lists, transposed, of_spans, ds)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )
