"""Which work the programs of the backward pass do, in which order, and who waits for whom.

A *key item* makes dk and dv of 64 keys, and keeps the dS of its pairs; a *query item* makes dq of 64 queries from the dS that was
kept.  Work comes in batches of some KV heads.  Key items are bound by the tensor cores, query items by the way from L2, so both
kinds should run at any time.  Every item has a number, which programs draw from a counter:

    key items 0 ... delay - 1 | key items delay ... and query items 0 ..., in the ratio of their numbers | the last query items

A query item waits for all key items of its batch: with a delay of a batch and of one item for each running program, those are
done.  There are `rooms` rooms for dS, which batches use in turn: a key item waits for all query items of the batch that had its
room before.  With a delay of one to rooms - 1 batches, whatever an item waits for has a smaller number, so a running program has
drawn it: nothing can lock up, in whatever order programs run.
"""

from .gluon import gl, jit


@jit
def work_of_item(item, key_items, query_items, batches, delay):
    """-> whether it is a key item, its batch, its number there.  key_items, query_items: of a batch; key_items * (key_items +
    query_items) < 2**31."""
    first = gl.minimum(delay, batches * key_items)
    rest = batches * key_items - first
    later = item - first
    whole = later // (key_items + query_items)
    part = later - whole * (key_items + query_items)
    before = gl.minimum(whole * key_items + part * key_items // (key_items + query_items), rest)
    after = gl.minimum(whole * key_items + (part + 1) * key_items // (key_items + query_items), rest)
    keys = (later < 0) | (before < after)
    number = gl.where(later < 0, item, gl.where(keys, first + before, later - before))
    batch = number // gl.where(keys, key_items, query_items)
    return keys, batch, number - batch * gl.where(keys, key_items, query_items)


@jit
def await_room(Progress, batch, rooms, query_items, batches):
    """Before a key item: until the query items of the batch that had this one's room are done."""
    before = batch - rooms
    _await(Progress + 1 + batches + gl.maximum(before, 0), gl.where(before < 0, 0, query_items))


@jit
def await_keys(Progress, batch, key_items):
    """Before a query item: until all dS of its batch has been kept."""
    _await(Progress + 1 + batch, key_items)


@jit
def await_queries(Progress, batch, batches, query_items):
    """Before a sum goes on that the query items of this batch have begun: until all are done."""
    _await(Progress + 1 + batches + batch, query_items)


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
def await_copies():
    """Until all that the threads of this partition had copied out of shared memory has been written where others can see it."""
    gl.inline_asm_elementwise("{ cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, 0; }", "=r", [],
                              dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@jit
def count_keys(Progress, batch):
    """After a key item's dS has been written."""
    _count(Progress + 1 + batch)


@jit
def count_queries(Progress, batch, batches):
    """After a query item's dS has been read, and what it left for another item has been written."""
    _count(Progress + 1 + batches + batch)


@jit
def _count(counter):
    """Add 1, by one thread of the one warp that calls this, after all that it knows to be done."""
    gl.inline_asm_elementwise(
        "{ .reg .pred one; elect.sync _|one, 0xffffffff; @one red.release.gpu.global.add.s32 [$1], 1; mov.b32 $0, 0; }",
        "=r,l",
        [counter.to(gl.int64, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
