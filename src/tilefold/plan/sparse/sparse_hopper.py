"""When the Gluon kernel for sm_90 serves a block-sparse problem, and with how many buffers, registers and programs."""

from typing import TYPE_CHECKING

from tilefold.plan.base import Fault, unusable
from tilefold.plan.device import Device
from tilefold.plan.hopper import chip_refusal, tile_fault
from tilefold.plan.limits import RESERVED_SHARED, Tile, strides_refusal

if TYPE_CHECKING:
    from tilefold.plan.sparse.sparse import SparseProblem

KERNEL = "sparse_forward_hopper"
MIN_PAGE = 16  # keys
UNIT = 128  # keys that the kernel takes in at a time: one listed block of 128 or two of 64
BARRIER_BYTES = (
    576  # barriers, what consumers are told of their work tile, and what the compiler keeps to start the partitions
)


def hopper_refusal(problem: "SparseProblem", device: Device) -> str | None:
    """Why the kernel does not serve this problem, as a sentence, or None if it does."""
    n = problem.attention
    if refusal := chip_refusal(n, device) or block_refusal(problem):
        return refusal
    if not n.plain or n.window != (-1, -1):
        return "it has no masks but causal ones and no changes of scores inside a block"
    if problem.page_size and (problem.page_size < MIN_PAGE or problem.page_size & (problem.page_size - 1)):
        return f"it has boxes of pages of 16, 32, 64, ... keys, not of {problem.page_size}"
    return strides_refusal(problem.descriptors, n.descriptors)


def block_refusal(problem: "SparseProblem") -> str | None:
    """Why it has no tiles for blocks of this size, as a sentence, or None if it has."""
    if problem.block_q in (64, 128) and problem.block_k in (64, 128):
        return None
    return f"it has blocks of 64 and 128 tokens, not {problem.block_q} x {problem.block_k}"


def is_masked(problem: "SparseProblem") -> bool:
    """Whether something may be cut off a listed block: always where keys end on the device alone, or a causal mask cuts."""
    n = problem.attention
    return problem.masked or n.varlen or problem.page_size > 0 or n.causal or n.seq_k % problem.block_k != 0


def box_rows(problem: "SparseProblem") -> int:
    """Keys that a TMA load of K or V brings: of a block, or of a page that holds fewer."""
    return min(problem.page_size or problem.block_k, problem.block_k)


def warpgroups(problem: "SparseProblem") -> int:
    """Warpgroups that fold: one per 64 rows of a query block."""
    return max(1, problem.block_q // 64)


def programs_per_sm(problem: "SparseProblem") -> int:
    """By registers: two programs of one folding warpgroup, or one program of two."""
    return max(1, 2 // warpgroups(problem))


def hopper_tile(problem: "SparseProblem", device: Device) -> Tile:
    """The tile with as many buffers as leave the programs of an SM their place: num_stages is the number of V buffers."""
    for stages in (4, 3, 2, 1):
        tile = Tile(block_m=problem.block_q, block_n=problem.block_k, num_warps=4, num_stages=stages)
        if programs_per_sm(problem) * (shared_bytes(problem, tile) + RESERVED_SHARED) <= device.smem_per_sm:
            return tile
    return Tile(block_m=problem.block_q, block_n=problem.block_k, num_warps=4, num_stages=1)


def key_slots(problem: "SparseProblem", tile: Tile) -> int:
    """K buffers: one fewer than V buffers where memory is short, since K is free again before V is."""
    short = problem.attention.dim_qk == 128 and warpgroups(problem) == 1
    return max(1, tile.num_stages - 1) if short else tile.num_stages


def shared_bytes(problem: "SparseProblem", tile: Tile) -> int:
    """Shared memory of one program (bytes): Q, the rings of K and V units, barriers."""
    n = problem.attention
    units = tile.num_stages + key_slots(problem, tile)
    return (problem.block_q + units * UNIT) * n.dim_qk * n.itemsize + BARRIER_BYTES


def hopper_programs(problem: "SparseProblem", device: Device, items: int) -> int:
    """Programs to launch for `items` query blocks: one per place on the device, each drawing a number for its next block while
    it still loads for the one before; lists of different lengths need no more than that to share the work evenly."""
    return min(items, device.sms * programs_per_sm(problem))


def hopper_violation(problem: "SparseProblem", device: Device, tile: Tile, splits: int) -> Fault:
    """(field, sentence) of the first thing that does not fit, or None."""
    if fault := unusable(KERNEL, hopper_refusal(problem, device)):
        return fault
    if splits != 1:
        return "splits", f"must be 1 with {KERNEL}, got {splits}"
    fixed = {"block_m": problem.block_q, "block_n": problem.block_k, "num_warps": 4}
    return tile_fault(KERNEL, tile, fixed, shared_bytes(problem, tile), device)
