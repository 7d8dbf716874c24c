"""What the plans of the Gluon kernels of the backward pass on sm_90 share: their tile, their memory, the order of their work.

Both keep the dS of some segments at a time, each in a slot of a ring (kernels/hopper/backward_scheduler.py)."""

from math import isqrt

from tilefold.plan.base import Fault
from tilefold.plan.device import Device
from tilefold.plan.hopper import tile_fault
from tilefold.plan.limits import MAX_GRID, Tile
from tilefold.plan.problem import AttentionProblem

UNIT = 64  # tokens of a tile
PROGRAMS_PER_SM = 2  # of the kernels with one folding warpgroup
REGISTERS = 128  # of a thread at launch
NARROW = 128  # the widest head dim that one warpgroup folds
WIDE = 256  # that two fold, one program an SM
STAGES = {64: 4, 128: 2, 192: 3, 256: 2}  # by width: what there is room for
WIDE_REGISTERS = (168, 240)  # of a thread at launch there, of a folding thread
SPARE = (
    1.5  # key items that begin before the first query item, for each place: 1 is too few where items differ in length
)
KEPT_LIMIT = 1 << 28
"""Bytes of dS that are kept at a time, or twice what q, out and their gradients take (`kept_limit`): O(N D)."""
WIDE_LIMIT = 1 << 30
"""The same of head dims above 128, which no other kernel for sm_90 serves: with half of it, 6 to 7 % slower; with four times, 0
to 2 % faster (H100)."""
MOST_KEPT = 4 << 30
"""The same where nothing else serves: packed batches, and lists of blocks."""
BARRIER_BYTES = 640  # barriers, the note, and what the compiler keeps to start the partitions


def backward_delay(batch: int, batches: int, slots: int, places: int) -> int:
    """How many key items come before the first query item: those that it needs, the `batch` of one batch, and SPARE for each of
    `places` running programs, by which time the others are done.  Where slots are used again, not more than halfway to what they
    hold, so that key items need not wait either: they do for query items that lie as many slots behind."""
    most = batches * batch if slots == batches else max(batch, slots * batch // 2)
    return min(batch + int(SPARE * places), most)


def least_kept(dim_qk: int, dim_v: int) -> int:
    """`kept_limit` of the smallest tensors."""
    return WIDE_LIMIT if max(dim_qk, dim_v) > NARROW else KEPT_LIMIT


def kept_limit(problem: AttentionProblem) -> int:
    """Bytes of dS that are kept at a time."""
    n = problem
    return kept_beside(n.batch * n.heads * n.seq_q, n.dim_qk, n.dim_v, n.itemsize)


def kept_beside(rows: int, dim_qk: int, dim_v: int, itemsize: int) -> int:
    """`kept_limit` of so many rows of q and out, those of all heads."""
    return max(least_kept(dim_qk, dim_v), 4 * rows * (dim_qk + dim_v) * itemsize)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def backward_tile(dim: int) -> Tile:
    """64 x 64, what registers hold; num_stages: buffers for q and dout, as many as there is room for.  What is measured is which
    kernel a problem takes: `options_for` of attention_backward_reduce.py."""
    return Tile(block_m=UNIT, block_n=UNIT, num_warps=4, num_stages=STAGES[dim])


def backward_shared(dim: int, itemsize: int, stages: int) -> int:
    """Shared memory of one program (bytes): rings of q and dout, K, V, one dS, statistics, barriers; of wide ones P in fp32."""
    tiles = (2 * stages + 2) * UNIT * dim + UNIT * UNIT
    exchange = UNIT * UNIT * 4 if dim > NARROW else 0
    return tiles * itemsize + exchange + stages * 2 * UNIT * 4 + BARRIER_BYTES


def heads_fault(heads: object, total: int, of: str = "batch x KV heads") -> Fault:
    """That of a number of heads at a time; total: of them, which are what `of` says."""
    if type(heads) is not int or heads < 1 or total % heads:
        return "heads_at_once", f"must be a divisor of {total} ({of}), got {heads!r}"
    return None


def work_fault(heads: int, rows: int, keys: int, queries: int, batches: int) -> Fault:
    """That of so much work.  rows: of kept dS; keys, queries: items of a batch, which has so many heads."""
    if rows >= 1 << 31:
        return "heads_at_once", f"dS of {heads} heads has more rows than a descriptor can count"
    if keys * (keys + queries) >= 1 << 31:
        return "heads_at_once", f"{heads} heads are more pieces of work than a batch can have"
    if batches * (keys + queries) > MAX_GRID:
        return "grid", f"more than {MAX_GRID} pieces of work"
    return None


def backward_tile_fault(kernel: str, dim: int, itemsize: int, device: Device, tile: Tile) -> Fault:
    """(field, sentence) of the first thing about a tile that does not fit, or None.  With one buffer a consumer would wait for a
    tile whose place it holds."""
    if tile.num_stages == 1:
        return "num_stages", f"must be at least 2 with {kernel}, got 1"
    fixed = {"block_m": UNIT, "block_n": UNIT, "num_warps": 4}
    shared = backward_shared(dim, itemsize, tile.num_stages) if type(tile.num_stages) is int else 0
    return tile_fault(kernel, tile, fixed, shared, device)
