"""The producer of the backward kernels that keep dS: one warp that issues every TMA load of a work tile, and counts it as done
while the results are written."""

from .backward_config import UNIT
from .backward_pipeline import first_stage, next_stage
from .ds_ring import row_of_pair
from .gluon import gl, jit


@jit
def produce(number, scheduler, pipe, mask, ds):
    """The work tile of a number."""
    drawn = scheduler.locate(number)
    if drawn.keys:
        work = scheduler.kv_tile(drawn)
        produce_keys(work, scheduler, pipe, mask)
        pipe.wait_done()
        scheduler.counters.publish_keys(work)
    elif drawn.queries:
        work = scheduler.query_tile(drawn)
        produce_queries(work, scheduler, pipe, mask, ds)
        pipe.wait_done()
        scheduler.counters.publish_queries(work)


@jit
def produce_keys(work, scheduler, pipe, mask):
    """K and V, then q, dout and statistics of every query tile that sees them."""
    pipe.load_keys(work)
    first, tiles = mask.queries_of(work.tile, work.lengths)
    stage = first_stage(1)
    for g in range(scheduler.group):
        head = work.head * scheduler.group + g
        statistics = scheduler.statistics(work, head)
        for j in range(gl.maximum(tiles, 1)):
            # Keys that nobody sees meet a tile without queries.
            row = gl.where(tiles > 0, work.first_q + (first + j) * UNIT, scheduler.past_queries())
            of = gl.where(tiles > 0, statistics + first + j, scheduler.no_tile)
            pipe.load_queries(stage, work, head, row, of, (g == 0) & (j == 0), scheduler.counters)
            stage = next_stage(stage, pipe.config.SLOTS)


@jit
def produce_queries(work, scheduler, pipe, mask, ds):
    """K and dS of every pair of the query tiles."""
    SEVERAL: gl.constexpr = pipe.config.QUERY_TILES > 1
    low, tiles, begins, ends = scheduler.keys_of(work, mask)
    begin = ds.of_queries(work)
    scheduler.counters.await_keys_without_ds(work, tiles)
    stage = first_stage(1)
    for j in range(tiles):
        rows = ()
        for t in gl.static_range(pipe.config.QUERY_TILES):
            rows = rows + (row_of_pair(ds, begin, work, work.tile + t, low + j, mask, SEVERAL),)
        pipe.load_pair(stage, work, work.head // scheduler.group, low + j, rows, ds.tiles, j == 0, scheduler.counters)
        stage = next_stage(stage, pipe.config.DQ_SLOTS)
