"""When the Gluon kernel for sm_90 makes the gradients of a block-sparse problem, and of how many heads it keeps dS at a time."""

from functools import lru_cache
from typing import TYPE_CHECKING

from tilefold.plan.backward.kept_backward import (
    MOST_KEPT,
    PROGRAMS_PER_SM,
    UNIT,
    backward_delay,
    backward_shared,
    backward_tile,
    backward_tile_fault,
    divisors,
)
from tilefold.plan.device import Device
from tilefold.plan.hopper import chip_refusal
from tilefold.plan.limits import MAX_GRID, Tile, box_refusal
from tilefold.plan.sparse.sparse_hopper import block_refusal

if TYPE_CHECKING:
    from tilefold.plan.sparse.sparse import SparseProblem

KERNEL = "sparse_backward_hopper"
MOST_SLOTS = (
    4  # of dS, each for one batch of heads; lists whose heads need more than MOST_KEPT have the portable kernels
)


@lru_cache(maxsize=256)  # a plan asks more than once
def hopper_backward_refusal(problem: "SparseProblem", device: Device) -> str | None:
    """Why the kernel does not serve this problem, as a sentence, or None if it does."""
    n = problem.attention
    if refusal := chip_refusal(n, device) or block_refusal(problem):
        return refusal
    if not n.plain or n.causal or n.window != (-1, -1) or n.varlen or problem.page_size:
        return "it has no masks, no changes of scores inside a block, and no packed or paged keys"
    if not problem.descriptors:
        return "the base or the strides of Q are not multiples of 16 bytes"
    if problem.capacity == 0 or n.seq_k == 0:
        return "no list has room for a block"
    if n.batch * n.heads * units(problem)[0] >= 1 << 24:
        return "there are more than 2**24 units of 64 queries"
    if kept_bytes(problem, 1) > MOST_KEPT:
        need, have = kept_bytes(problem, 1) / 2**30, MOST_KEPT / 2**30
        return f"dS of one KV head at a time would take {need:.1f} GiB of memory, more than {have:.0f}"
    if fault := heads_violation(problem, 1):
        return fault[1]
    return box_refusal(n, device)


@lru_cache(maxsize=256)
def units(problem: "SparseProblem") -> tuple[int, int]:
    """Units of 64 tokens of the query blocks and of the KV blocks of one head."""
    n = problem.attention
    per_q, per_k = problem.block_q // UNIT, problem.block_k // UNIT
    return -(-n.seq_q // problem.block_q) * per_q, -(-n.seq_k // problem.block_k) * per_k


def slot_bytes(problem: "SparseProblem", heads: int) -> int:
    """Memory for dS of `heads` KV heads, all listed places of their query heads: 8 KiB for a pair of blocks of 64."""
    n = problem.attention
    q_units, _ = units(problem)
    return heads * n.group * q_units * problem.capacity * problem.block_k * UNIT * n.itemsize


def slots(problem: "SparseProblem", heads: int) -> int:
    """How many batches of `heads` KV heads have room for their dS at a time: with four nobody waits for a slot, two at least."""
    batches = problem.attention.batch * problem.attention.kv_heads // heads
    return min(batches, max(2, min(MOST_SLOTS, MOST_KEPT // max(1, slot_bytes(problem, heads)))))


def delay(problem: "SparseProblem", heads: int, places: int) -> int:
    """How many key items come before the first query item; `places` programs run at a time."""
    batches = problem.attention.batch * problem.attention.kv_heads // heads
    return backward_delay(heads * units(problem)[1], batches, slots(problem, heads), places)


def kept_bytes(problem: "SparseProblem", heads: int) -> int:
    """Memory for dS with `heads` KV heads a batch (bytes)."""
    return slots(problem, heads) * slot_bytes(problem, heads)


@lru_cache(maxsize=256)
def heads_at_once(problem: "SparseProblem", device: Device) -> int:
    """KV heads of a batch, a divisor of all: as few as give every place of the device work on keys while the batch before is made
    complete; fewer, if MOST_KEPT does not hold those."""
    n = problem.attention
    total = n.batch * n.kv_heads
    _, kv_units = units(problem)
    fitting = [d for d in divisors(total) if kept_bytes(problem, d) <= MOST_KEPT and not heads_violation(problem, d)]
    enough = [d for d in fitting if d * kv_units >= PROGRAMS_PER_SM * device.sms]
    return min(enough, default=max(fitting, default=1))


def hopper_backward_tile(problem: "SparseProblem") -> Tile:
    """The one tile of both kinds of work."""
    return backward_tile(problem.attention.dim_qk)


def shared_bytes(problem: "SparseProblem", tile: Tile) -> int:
    """Shared memory of one program (bytes)."""
    return backward_shared(problem.attention.dim_qk, problem.attention.itemsize, tile.num_stages)


def hopper_backward_violation(problem: "SparseProblem", device: Device, tile: Tile) -> tuple[str, str] | None:
    """(field, sentence) of the first thing that does not fit, or None."""
    refusal = hopper_backward_refusal(problem, device)
    if refusal:
        return "kernel", f"{KERNEL} cannot be used: {refusal}"
    return backward_tile_fault(KERNEL, problem.attention.dim_qk, problem.attention.itemsize, device, tile)


def heads_violation(problem: "SparseProblem", heads: int) -> tuple[str, str] | None:
    """As hopper_backward_violation, of the number of KV heads at a time."""
    n = problem.attention
    total = n.batch * n.kv_heads
    if type(heads) is not int or heads < 1 or total % heads:
        return "heads_at_once", f"must be a divisor of {total} (batch x KV heads), got {heads!r}"
    if kept_bytes(problem, heads) // (UNIT * n.itemsize) >= 1 << 31:
        return "heads_at_once", f"dS of {heads} heads has more rows than a descriptor can count"
    q_units, kv_units = units(problem)
    if heads * kv_units * heads * (kv_units + n.group * q_units) >= 1 << 31:
        return "heads_at_once", f"{heads} heads are more pieces of work than a batch can have"
    if total * (kv_units + n.group * q_units) > MAX_GRID:
        return "grid", f"more than {MAX_GRID} pieces of work"
    return None
