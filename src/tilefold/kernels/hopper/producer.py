"""The producer of the forward kernels: one warp that chooses the work tiles and issues every TMA load."""

from .gluon import gl, jit
from .pipeline import Stage
from .scheduler import IDLE, LEAVE


@jit
def acquire_all(q, i, CONSUMERS: gl.constexpr):
    """Wait until every consumer is done with Q of the query tile whose slots the i-th takes."""
    for c in gl.static_range(CONSUMERS):
        stage = q.query_stage(c, i, CONSUMERS)
        q.acquire(Stage(stage.slot, stage.phase ^ 1))


@jit
def signal_all(q, i, CONSUMERS: gl.constexpr):
    """Have every consumer read the mailbox, without Q."""
    for c in gl.static_range(CONSUMERS):
        q.signal(q.query_stage(c, i, CONSUMERS))


@jit
def load_work(scheduler, q, k, v, mask, mods, work, now, item, i, t, programs):
    """Issue every load of work tile `now`, the i-th of this program -> the work tile that follows, and the next KV tile's number.

    item: `now`, or, if that is folded again, the one that waits meanwhile."""
    CONSUMERS: gl.constexpr = scheduler.ROWS // 64
    SPLIT: gl.constexpr = v.SLOTS // k.SLOTS  # see `consume`
    number = 0
    following = item
    walk = mask.walk(work)
    tiles = walk.count
    if not scheduler.overflow.LAZY:  # the caller has
        acquire_all(q, i, CONSUMERS)
    scheduler.post(now, work, i)
    for c in gl.static_range(CONSUMERS):
        row = work.first_q + work.block * (CONSUMERS * 64) + c * 64
        q.load(q.query_stage(c, i, CONSUMERS), work.batch, work.head, row)
    kv_head = work.head // scheduler.problem.group
    for j in range(tiles):
        stage = k.write_stage(t)
        key = walk.tile(walk.entry(j)) * k.ROWS
        k.acquire(stage)
        k.load(stage, work.batch, kv_head, work.first_k + key)
        mods.load(t, work, work.block * (CONSUMERS * 64), key)
        for c in gl.static_range(SPLIT):
            part = v.share(stage, c, SPLIT)
            v.acquire(part)
            v.load(part, work.batch, kv_head, work.first_k + key, c * v.DIM)
        t += 1
        # As late as hides the answers: who draws early may hold two long work tiles while others have none.
        if (j == gl.maximum(tiles - 4, 0)) & (item == now):
            number = scheduler.counter.draw()
        if (j == gl.maximum(tiles - 2, 0)) & (item == now):
            following = scheduler.counter.drawn(number, programs)
    return following, t


@jit
def produce(scheduler, q, k, v, mask, mods):
    """The producer: chooses the work tiles and issues every load, in the order in which the consumers need them.

    LAZY: a query tile whose overflow flags are set is folded again, see `OverflowFlags`."""
    CONSUMERS: gl.constexpr = scheduler.ROWS // 64
    programs = gl.num_programs(0)
    item = gl.program_id(0)  # the first that nobody has begun
    i = 0  # query tiles that were begun
    t = 0  # KV tiles that were loaded
    if scheduler.overflow.LAZY:
        open = scheduler.overflow.TILES  # below it: every query tile was begun, and nothing is left but flags
        while open > 0:
            acquire_all(q, i, CONSUMERS)
            again = scheduler.overflow.read(i)
            if (again > 0) | (item < scheduler.counter.items):
                now = gl.where(again > 0, again - 1, item)
                work = scheduler.locate(now)
                if work.live:
                    scheduler.overflow.set_checked(again, i)
                    item, t = load_work(scheduler, q, k, v, mask, mods, work, now, item, i, t, programs)
                    i += 1
                else:
                    item = scheduler.counter.drawn(scheduler.counter.draw(), programs)
            else:
                open = gl.where(i > 0, open - 1, 0)
                if open > 0:
                    scheduler.post_none(IDLE, i)
                    signal_all(q, i, CONSUMERS)
                    i += 1
    else:
        while item < scheduler.counter.items:
            work = scheduler.locate(item)
            if work.live:
                item, t = load_work(scheduler, q, k, v, mask, mods, work, item, item, i, t, programs)
                i += 1
            else:
                item = scheduler.counter.drawn(scheduler.counter.draw(), programs)
        acquire_all(q, i, CONSUMERS)
    scheduler.post_none(LEAVE, i)
    signal_all(q, i, CONSUMERS)
    scheduler.counter.end(item, programs)
