"""When the Gluon kernel for sm_90 makes the gradients of a block-sparse problem, and of how many heads and queries it keeps dS at
a time.

Where one head's dS has no room, its queries come in spans, one after the other; dk and dv of a head wait in fp32 between two."""

from functools import lru_cache
from typing import TYPE_CHECKING

from tilefold.plan.backward.kept_backward import (
    MOST_KEPT,
    PROGRAMS_PER_SM,
    UNIT,
    backward_delay,
    divisors,
    heads_fault,
    work_fault,
)
from tilefold.plan.base import Fault
from tilefold.plan.device import Device
from tilefold.plan.hopper import chip_refusal
from tilefold.plan.limits import box_refusal, strides_refusal
from tilefold.plan.sparse.sparse_hopper import block_refusal

if TYPE_CHECKING:
    from tilefold.plan.sparse.sparse import SparseProblem

KERNEL = "sparse_backward_hopper"
MOST_SLOTS = 4  # of dS, each for one segment: a batch of heads, or a span of their queries
LEAST_OF_SPAN, FREE_SPAN = 16, 120
"""Listed pairs of a KV tile in a span, in the mean: with fewer the sums of dk and dv move about as many bytes as the pairs; with
so many spans cost no time (H200: of 60 pairs 1 to 3 %, of 30 10 %)."""


@lru_cache(maxsize=256)  # a plan asks more than once
def hopper_backward_refusal(problem: "SparseProblem", device: Device) -> str | None:
    """Why the kernel does not serve this problem, as a sentence, or None if it does."""
    n = problem.attention
    if refusal := chip_refusal(n, device) or block_refusal(problem):
        return refusal
    if not n.plain or n.causal or n.window != (-1, -1) or n.varlen or problem.page_size:
        return "it has no masks, no changes of scores inside a block, and no packed or paged keys"
    if refusal := strides_refusal(problem.descriptors):
        return refusal
    if problem.capacity == 0 or n.seq_k == 0:
        return "no list has room for a block"
    if n.batch * n.heads * units(problem)[0] >= 1 << 24:
        return "there are more than 2**24 units of 64 queries"
    queries = queries_at_once(problem)
    if queries and _pairs(problem, queries) < LEAST_OF_SPAN:
        return (
            f"{MOST_KEPT / 2**30:.0f} GiB hold dS of {queries} queries of a KV head at a time, which list too few "
            "blocks for sums between them"
        )
    if fault := heads_violation(problem, 1, queries):
        return fault[1]
    return box_refusal(n, device)


@lru_cache(maxsize=256)
def units(problem: "SparseProblem") -> tuple[int, int]:
    """Units of 64 tokens of the query blocks and of the KV blocks of one head."""
    n = problem.attention
    per_q, per_k = problem.block_q // UNIT, problem.block_k // UNIT
    return -(-n.seq_q // problem.block_q) * per_q, -(-n.seq_k // problem.block_k) * per_k


def span_units(problem: "SparseProblem", queries: int) -> int:
    """Units of 64 queries of a head in a span of so many queries; of 0, or of more than there are, all."""
    whole = units(problem)[0]
    return min(queries // UNIT or whole, whole)


def spans(problem: "SparseProblem", queries: int) -> int:
    """How many there are; one if there are no queries."""
    return max(1, -(-units(problem)[0] // max(1, span_units(problem, queries))))


def segments(problem: "SparseProblem", heads: int, queries: int) -> int:
    """Spans of batches of `heads` KV heads."""
    return problem.attention.batch * problem.attention.kv_heads // heads * spans(problem, queries)


def slot_bytes(problem: "SparseProblem", heads: int, queries: int) -> int:
    """Memory for dS of a segment, all listed places of its query heads: 8 KiB for a pair of blocks of 64."""
    n = problem.attention
    return heads * n.group * span_units(problem, queries) * problem.capacity * problem.block_k * UNIT * n.itemsize


def slots(problem: "SparseProblem", heads: int, queries: int) -> int:
    """How many segments have room for their dS at a time: with four nobody waits for a slot, two at least."""
    room = MOST_KEPT // max(1, slot_bytes(problem, heads, queries))
    return min(segments(problem, heads, queries), max(2, min(MOST_SLOTS, room)))


def delay(problem: "SparseProblem", heads: int, queries: int, places: int) -> int:
    """How many key items come before the first query item; `places` programs run at a time."""
    of_all, at_once = segments(problem, heads, queries), slots(problem, heads, queries)
    return backward_delay(heads * units(problem)[1], of_all, at_once, places)


def kept_bytes(problem: "SparseProblem", heads: int, queries: int) -> int:
    """Memory for dS (bytes)."""
    return slots(problem, heads, queries) * slot_bytes(problem, heads, queries)


def sum_tiles(problem: "SparseProblem", heads: int, queries: int) -> int:
    """KV tiles whose dk and dv wait between two spans."""
    return heads * units(problem)[1] if spans(problem, queries) > 1 else 0


def sum_numbers(problem: "SparseProblem", heads: int, queries: int) -> int:
    """fp32 numbers of these."""
    return sum_tiles(problem, heads, queries) * 2 * UNIT * problem.attention.dim_qk


def _pairs(problem: "SparseProblem", queries: int) -> float:
    """Listed pairs of tiles that a KV tile has in a span, in the mean, if lists are full."""
    listed = span_units(problem, queries) * problem.capacity * (problem.block_k // UNIT)
    return problem.attention.group * listed / units(problem)[1]


@lru_cache(maxsize=256)
def queries_at_once(problem: "SparseProblem") -> int:
    """Queries of a span, whole blocks; 0 for all of them.

    As many spans, of one size, as cost nothing; more where MOST_KEPT does not hold dS of one KV head, two of its spans, else."""
    blocks, block = -(-problem.attention.seq_q // problem.block_q), problem.block_q
    count = max(1, int(_pairs(problem, 0)) // FREE_SPAN)
    if kept_bytes(problem, 1, 0) > MOST_KEPT or heads_violation(problem, 1, 0):
        count = max(count, -(-blocks // max(1, MOST_KEPT // (2 * max(1, slot_bytes(problem, 1, block))))))
    return 0 if count == 1 else -(-blocks // count) * block


@lru_cache(maxsize=256)
def heads_at_once(problem: "SparseProblem", device: Device) -> int:
    """KV heads of a batch, a divisor of all: as few as give every place of the device work on keys while the batch before is made
    complete; fewer, if MOST_KEPT does not hold those."""
    n = problem.attention
    total, queries = n.batch * n.kv_heads, queries_at_once(problem)
    _, kv_units = units(problem)
    fitting = [
        d
        for d in divisors(total)
        if kept_bytes(problem, d, queries) <= MOST_KEPT and not heads_violation(problem, d, queries)
    ]
    enough = [d for d in fitting if d * kv_units >= PROGRAMS_PER_SM * device.sms]
    return min(enough, default=max(fitting, default=1))


def heads_violation(problem: "SparseProblem", heads: int, queries: int) -> Fault:
    """(field, sentence) of the first thing about the KV heads and queries at a time that does not fit, or None."""
    n = problem.attention
    if fault := heads_fault(heads, n.batch * n.kv_heads):
        return fault
    if type(queries) is not int or queries < 0 or queries % problem.block_q:
        return "queries_at_once", f"must be 0 (all) or a multiple of {problem.block_q}, a query block, got {queries!r}"
    rows = kept_bytes(problem, heads, queries) // (UNIT * n.itemsize)
    key_items, query_items = heads * units(problem)[1], heads * n.group * span_units(problem, queries)
    return work_fault(heads, rows, key_items, query_items, segments(problem, heads, queries))


def items(problem: "SparseProblem", heads: int, queries: int) -> int:
    """Pieces of work, each of a program."""
    q_units, kv_units = span_units(problem, queries), units(problem)[1]
    return segments(problem, heads, queries) * heads * (kv_units + problem.attention.group * q_units)
