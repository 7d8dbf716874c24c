"""How the Gluon kernel for sm_90 makes the gradients of a packed batch: how many slots for dS, and the order of its work.

The plan knows the longest sequence; the tokens of all sequences are known when a call is bound (`order_of`), their lengths never.
A line keeps the dS of one tile of keys with all queries that can see one (kernels/backward/backward_packed.py has the order, and
why nothing waits for what comes later)."""

from functools import lru_cache
from typing import NamedTuple

from tilefold.plan.backward.attention_backward_hopper import (
    HELD,
    PAIRS_FROM,
    common_refusal,
    line_width,
    places,
    tiles,
    width_of,
)
from tilefold.plan.backward.kept_backward import MOST_KEPT, NARROW, SPARE, UNIT
from tilefold.plan.base import Fault
from tilefold.plan.device import Device
from tilefold.plan.limits import MAX_GRID, strides_refusal
from tilefold.plan.problem import AttentionProblem

ENTRY_BYTES = 48  # of one piece of work
LEAST_FREE = (
    0.75  # slots beside those of the longest sequence, for each running program: a quarter of the device is idle
)
MAX_BLOCKS = 1 << 22  # sequences times heads
WIDTHS = (64, 128)


class Order(NamedTuple):
    """What the kernels have to know of a batch of so many tokens.

    together: tiles of queries of an item for dq, 1 or 2. q_places: places for tiles of queries. keys, queries: numbers of key
    items and query items, some of which are empty. longest, shift, slots: see kernels/backward/backward_packed.py. width: places
    of a line. blocks: sequences times KV heads."""

    together: int
    q_places: int
    keys: int
    queries: int
    longest: int
    shift: int
    slots: int
    width: int
    blocks: int


@lru_cache(maxsize=256)  # a plan asks more than once
def packed_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why the kernel does not serve this packed batch, as a sentence, or None if it does."""
    n = problem
    if refusal := common_refusal(n, device):
        return refusal
    if width_of(n) <= NARROW and (n.dim_qk != n.dim_v or n.dim_qk not in WIDTHS):
        return f"it has head dims of 64 and 128, the same for V, or wider ones, not {n.dim_qk} and {n.dim_v}"
    if refusal := strides_refusal(keys=n.descriptors):
        return refusal
    if n.batch * n.heads >= MAX_BLOCKS:
        return f"sequences times heads are {n.batch * n.heads}, more than {MAX_BLOCKS - 1}"
    slots, least = kept_at_once(n, device)[1] // UNIT, longest(n) + int(LEAST_FREE * places(problem, device))
    if slots < min(least, _most(n)):
        return (
            f"{MOST_KEPT / 2**30:.0f} GiB hold dS of {slots * UNIT} keys of sequences of up to {n.seq_q} queries, fewer than "
            f"the {least * UNIT} that keep the device at work"
        )
    return None


# ---------------------------------------------------------------- sizes


def longest(problem: AttentionProblem) -> int:
    """Places of tiles of keys that the longest sequence has at most."""
    return tiles(problem)[1] + 1


def kept_at_once(problem: AttentionProblem, device: Device) -> tuple[int, int]:
    """(1, keys whose dS has a slot at a time, a multiple of 64): enough that no key item waits, if MOST_KEPT holds them."""
    wanted = min(_most(problem), HELD * places(problem, device) + longest(problem))
    return 1, UNIT * min(wanted, MOST_KEPT // _line_bytes(problem))


def kept_bytes(problem: AttentionProblem, keys: int) -> int:
    """Memory for dS (bytes), at most: a batch of fewer tokens has fewer slots."""
    return keys // UNIT * _line_bytes(problem)


def scratch_bytes(problem: AttentionProblem, keys: int) -> int:
    """Bytes beside the gradients, at most: dS, statistics, the order of the work."""
    n = problem
    statistics = 8 * UNIT * n.batch * n.heads * (tiles(n)[0] + 1)
    entries = ENTRY_BYTES * n.batch * (n.kv_heads * longest(n) + n.heads * (tiles(n)[0] + 1))
    return kept_bytes(n, keys) + statistics + entries


def kept_violation(problem: AttentionProblem, heads: int, keys: int) -> Fault:
    """(field, sentence) of the first thing about the heads and keys at a time that does not fit, or None."""
    n = problem
    if heads != 1 or type(heads) is not int:
        return "heads_at_once", f"must be 1 for a packed batch, got {heads!r}"
    least = min(longest(n), _most(n))
    if type(keys) is not int or keys % UNIT or keys < least * UNIT:
        return "keys_at_once", f"must be a multiple of {UNIT} from {least * UNIT}, the longest sequence, got {keys!r}"
    kept = kept_bytes(n, keys)
    if kept > MOST_KEPT:
        return (
            "keys_at_once",
            f"dS of {keys} keys would take {kept / 2**30:.1f} GiB, more than {MOST_KEPT / 2**30:.0f}",
        )
    return None


def order_of(problem: AttentionProblem, device: Device, keys: int, total_q: int, total_k: int) -> Order:
    """Of a batch of total_q and total_k tokens, with dS of so many keys at a time.

    PlanError is not for here: whatever was not refused has an order."""
    n = problem
    together = tiles_together(n, device, total_q)
    all_keys = n.kv_heads * (total_k // UNIT + n.batch)
    all_queries = n.heads * (total_q // (UNIT * together) + n.batch)
    assert all_keys + all_queries <= MAX_GRID, "more pieces of work than tokens fit a device's memory"
    slots, most = min(keys // UNIT, all_keys), longest(n)
    wanted = most + int(
        SPARE * places(problem, device)
    )  # the key items that a block needs are done when its query items begin
    free = all_keys if slots == all_keys else max(0, slots - most)
    shift = min(wanted, max(slots // 2, slots - 2 * most), free)
    q_places = total_q // UNIT + n.batch
    return Order(together, q_places, all_keys, all_queries, most, shift, slots, _width(n), n.batch * n.kv_heads)


def tiles_together(problem: AttentionProblem, device: Device, total_q: int) -> int:
    """Tiles of queries of one item for dq: two where there are many, of sequences that mostly have two, and where each of two
    consumers makes one."""
    n = problem
    if width_of(n) > NARROW:
        return 2
    many = n.heads * (total_q // UNIT) >= PAIRS_FROM * places(problem, device)
    return 2 if many and total_q >= 2 * UNIT * n.batch else 1


def _most(problem: AttentionProblem) -> int:
    """Tiles of keys of all heads, at most."""
    return problem.batch * problem.kv_heads * longest(problem)


def _width(problem: AttentionProblem) -> int:
    """Places of a line: tiles of queries that see a tile of keys.  Lines of a causal mask are not shared."""
    return max(1, tiles(problem)[0]) if problem.sides == (-1, 0) else line_width(problem, UNIT)


def _line_bytes(problem: AttentionProblem) -> int:
    return problem.group * _width(problem) * UNIT * UNIT * problem.itemsize
