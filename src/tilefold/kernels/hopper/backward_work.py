"""Which work the programs of the backward pass do, in which order, and who waits for whom.

A *key item* makes dk and dv of 64 keys, and keeps the dS of its pairs; a *query item* makes dq of 64 queries from the dS that was
kept.  Work comes in batches of some KV heads, and every item has a number, which programs draw from a counter:

    keys of batch 0 | keys of 1 | queries of 0 | keys of 2 | queries of 1 | ... | queries of the last

A query item waits for all key items of its batch.  There are as many rooms for dS as `rooms` says, which batches use in turn: a
key item waits for all query items of the batch that had its room before.  Whoever waits does so for items further up in the
order, which running programs have drawn: nothing can lock up, in whatever order programs run.  And with as many items in a batch
as the device has places, what is waited for has long been done.
"""

from .gluon import gl, jit

WARPS = gl.constexpr(4)  # that count an item as done, each for itself


@jit
def work_of_item(item, key_items, query_items, batches):
    """-> whether it is a key item, its batch, its number there.  key_items, query_items: of a batch."""
    later = item - key_items
    step = gl.maximum(later, 0) // (key_items + query_items)
    within = later - step * (key_items + query_items)
    first = later < 0
    ahead = gl.where(step == batches - 1, 0, key_items)  # of the next batch, if there is one
    keys = first | (within < ahead)
    batch = gl.where(first, 0, gl.where(keys, step + 1, step))
    return keys, batch, gl.where(first, item, gl.where(keys, within, within - ahead))


@jit
def await_room(Progress, batch, rooms, query_items, batches):
    """Before a key item: until the query items of the batch that had this one's room are done."""
    before = batch - rooms
    _await(Progress + 1 + batches + gl.maximum(before, 0), gl.where(before < 0, 0, query_items * WARPS))


@jit
def await_keys(Progress, batch, key_items):
    """Before a query item: until all dS of its batch has been kept."""
    _await(Progress + 1 + batch, key_items * WARPS)


@jit
def _await(counter, wanted):
    """Wait until a counter has come so far; what was written before it was counted is then there for the copy engine, too."""
    gl.inline_asm_elementwise(
        "{ .reg .pred less; .reg .b32 seen; again: ld.acquire.gpu.global.s32 seen, [$1]; setp.lt.s32 less, seen, $2; "
        "@less nanosleep.u32 64; @less bra again; fence.proxy.async.global; mov.b32 $0, seen; }",
        "=r,l,r",
        [counter.to(gl.int64, bitcast=True), wanted],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def count_keys(Progress, batch):
    """After a key item."""
    _count(Progress + 1 + batch)


@jit
def count_queries(Progress, batch, batches):
    """After a query item."""
    _count(Progress + 1 + batches + batch)


@jit
def _count(counter):
    """Each warp of the partition adds 1, once all that its threads had copied out of shared memory has been written.

    The one thread that issued the copies waits for them here as all others do; its warp's 1 can only follow."""
    gl.inline_asm_elementwise(
        "{ .reg .pred one; cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.warp.sync 0xffffffff; "
        "elect.sync _|one, 0xffffffff; @one red.release.gpu.global.add.s32 [$1], 1; mov.b32 $0, 0; }",
        "=r,l",
        [counter.to(gl.int64, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
