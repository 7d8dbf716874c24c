"""When the Gluon kernel for sm_90 makes the gradients of dense attention, and of how much it keeps dS at a time.

A batch of its work is some KV heads and one KV split.  Whole heads, if some of them have room at once; otherwise one
head and so many keys of it that eight batches have."""

from functools import lru_cache

from tilefold.plan.backward.backward import rows_refusal
from tilefold.plan.backward.kept_backward import (
    NARROW,
    PROGRAMS_PER_SM,
    UNIT,
    WIDE,
    backward_delay,
    divisors,
    heads_fault,
    kept_limit,
    work_fault,
)
from tilefold.plan.base import Fault
from tilefold.plan.device import Device
from tilefold.plan.hopper import type_refusal
from tilefold.plan.limits import box_refusal
from tilefold.plan.problem import AttentionProblem

KERNEL = "attention_backward_hopper"
SLOTS = 8  # of dS, each for one batch; four if whole heads are so few
HELD = 4  # key items whose dS has room at a time, for each running program: with 2 a sixth of the device is idle
PAIRS_FROM = (
    16  # tiles of queries for each running program, from which on an item for dq has two of them, which share K
)
WELL_SLOTS, WELL_HELD = 6, 3  # with fewer, dq added in memory is faster, where it serves
LEAST_HELD = 1.5  # with fewer, portable kernels that make seven products are faster
FOUR_TILES = 192  # the width up to which the registers of each of two warpgroups hold dq of two tiles
LEAST_DIM = 40  # padded to 64; with narrower ones portable kernels are faster


def hopper_backward_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why the kernel does not serve this problem, as a sentence, or None if it does where dS has room, which is for
    attention_backward_spans to say; of a packed batch see attention_backward_packed."""
    n = problem
    if refusal := common_refusal(n, device) or box_refusal(n, device):
        return refusal
    if n.batch * n.heads * tiles(n)[0] >= 1 << 24:
        return "there are more than 2**24 tiles of 64 queries"
    return None


def common_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """hopper_backward_refusal, as far as it holds for packed batches, too."""
    n = problem
    if refusal := type_refusal(n, device):
        return refusal
    if min(n.dim_qk, n.dim_v) < LEAST_DIM:
        return f"with head dims below {LEAST_DIM}, which it pads to 64, portable kernels are faster"
    if max(n.dim_qk, n.dim_v) > WIDE:
        return f"it has head dims to {WIDE}, not {n.dim_qk} and {n.dim_v}"
    if n.dim_qk % 4 or n.dim_v % 4:
        return f"it stores 4 columns at a time, head dims are {n.dim_qk} and {n.dim_v}"
    if not (n.unchanged or is_capped(n)):
        return "it has no changes of scores but softcap of head dims above 128, no masks but causal and window, and no dropout"
    if refusal := rows_refusal(n):
        return refusal
    if n.seq_k == 0:
        return "there are no keys"
    return None if n.seq_q else "there are no queries"


def is_capped(problem: AttentionProblem) -> bool:
    """Whether softcap is all that changes scores, and one of two warpgroups hands its derivative to the other."""
    n = problem
    return n.score_mods == ("softcap",) and not (n.mask_mods or n.dropout) and width_of(n) > NARROW


# ---------------------------------------------------------------- sizes


def tiles(problem: AttentionProblem) -> tuple[int, int]:
    """Tiles of 64 queries and of 64 keys of one head."""
    return -(-problem.seq_q // UNIT), -(-problem.seq_k // UNIT)


def width_of(problem: AttentionProblem) -> int:
    """Columns of a tile: the least multiple of 64 that holds both head dims; TMA fills the rest with zeros."""
    return min(-(-max(problem.dim_qk, problem.dim_v) // UNIT) * UNIT, WIDE)


def places(problem: AttentionProblem, device: Device) -> int:
    """Programs that run at a time."""
    return device.sms * (1 if width_of(problem) > NARROW else PROGRAMS_PER_SM)


def batches_of(problem: AttentionProblem, heads: int, keys: int) -> int:
    """Batches of `heads` KV heads and `keys` of their keys."""
    return problem.batch * problem.kv_heads // heads * -(-tiles(problem)[1] // (keys // UNIT))


def sum_tiles(problem: AttentionProblem, device: Device) -> int:
    """Tiles of queries of one item for dq: two where there are so many that the last, longer items do not count; of two
    warpgroups each makes one or two.  H200, D=192, V of 128, in 4 and 2: 16384 tokens causal 586 and 568, 4096 528 and 524."""
    n = problem
    if width_of(n) > NARROW:
        return 4 if width_of(n) <= FOUR_TILES else 2
    return 2 if n.batch * n.heads * tiles(n)[0] >= PAIRS_FROM * places(n, device) else 1


def query_items(problem: AttentionProblem, device: Device, heads: int) -> int:
    """Items for dq of a batch of `heads` KV heads."""
    return heads * problem.group * -(-tiles(problem)[0] // sum_tiles(problem, device))


def lines(problem: AttentionProblem, keys: int) -> int:
    """Lines of a head's room: one for each tile of keys, under a causal mask one for two."""
    return -(-keys // (2 * UNIT)) if _causal(problem) else keys // UNIT


def line_width(problem: AttentionProblem, keys: int) -> int:
    """Places of a line (tiles of dS): as many tiles of queries as see a tile of keys, or two that share a line; at least 1."""
    n = problem
    q_units = tiles(n)[0]
    left, right = n.sides
    if _causal(n):  # the first split has the most, since fewer queries see later keys, and in it the pair in the middle
        half = keys // UNIT // 2
        middle = (half - 1, keys // UNIT - half) if half else (0,)
        return sum(q_units - max(i * UNIT - n.seq_k + n.seq_q, 0) // UNIT for i in middle)
    if n.sides == (-1, -1):
        return q_units
    span = UNIT + (n.seq_q if left < 0 else left) + (n.seq_q if right < 0 else right)  # queries that see one of 64 keys
    return max(1, min(q_units, (span + UNIT - 2) // UNIT + 1))


def _causal(problem: AttentionProblem) -> bool:
    return problem.sides == (-1, 0)


def slot_bytes(problem: AttentionProblem, heads: int, keys: int) -> int:
    """Memory for dS of one batch: 8 KiB for a pair of tiles."""
    n = problem
    return heads * n.group * lines(n, keys) * line_width(n, keys) * UNIT * UNIT * n.itemsize


@lru_cache(maxsize=256)
def slots(problem: AttentionProblem, device: Device, heads: int, keys: int) -> int:
    """How many batches have room for their dS at a time: HELD key items for each running program, or what kept_limit holds, or
    all."""
    wanted = max(2, HELD * places(problem, device) // (heads * keys // UNIT))
    fitting = kept_limit(problem) // slot_bytes(problem, heads, keys)
    return max(1, min(batches_of(problem, heads, keys), wanted, fitting))


def kept_bytes(problem: AttentionProblem, device: Device, heads: int, keys: int) -> int:
    """Memory for dS (bytes)."""
    return slots(problem, device, heads, keys) * slot_bytes(problem, heads, keys)


def partial_bytes(problem: AttentionProblem, device: Device, keys: int) -> int:
    """Memory for sums of dq between two KV splits (bytes); 0 where one split has all keys."""
    n = problem
    q_units, kv_units = tiles(n)
    together = sum_tiles(n, device)
    rows = -(-q_units // together) * together * UNIT
    return 4 * n.batch * n.heads * rows * width_of(n) if kv_units * UNIT > keys else 0


def delay(problem: AttentionProblem, device: Device, heads: int, keys: int) -> int:
    """How many key items come before the first query item."""
    batch, batches = heads * keys // UNIT, batches_of(problem, heads, keys)
    return backward_delay(batch, batches, slots(problem, device, heads, keys), places(problem, device))


@lru_cache(maxsize=256)  # a plan asks more than once
def kept_at_once(problem: AttentionProblem, device: Device) -> tuple[int, int]:
    """(KV heads of a batch, a divisor of all; keys of its split, a multiple of 64)."""
    n = problem
    kv_units, total = tiles(n)[1], n.batch * n.kv_heads
    whole = kv_units * UNIT
    held = min(HELD * places(problem, device), kept_limit(n) * kv_units // slot_bytes(n, 1, whole))
    if 4 * kv_units <= held or total * kv_units <= held:
        return max(d for d in divisors(total) if d == 1 or d * kv_units * SLOTS <= held), whole
    units = max(1, held // SLOTS)
    while units > 1 and SLOTS * slot_bytes(n, 1, units * UNIT) > kept_limit(n):
        units -= 1  # the first split of a causal mask takes more than its share
    splits = -(-kv_units // units)
    return 1, -(-kv_units // splits) * UNIT


def is_kept_well(problem: AttentionProblem, device: Device) -> bool:
    """Whether there is room for dS of all batches, or of WELL_SLOTS, or of WELL_HELD key items for each running program."""
    n = problem
    heads, keys = kept_at_once(n, device)
    if hopper_backward_refusal(n, device) or kept_violation(n, device, heads, keys):
        return False
    held, batches = slots(n, device, heads, keys), batches_of(n, heads, keys)
    return held == batches or held >= WELL_SLOTS or held * heads * keys >= WELL_HELD * places(n, device) * UNIT


# ---------------------------------------------------------------- limits


def kept_violation(problem: AttentionProblem, device: Device, heads: int, keys: int) -> Fault:
    """(field, sentence) of the first thing about the KV heads and keys of a batch that does not fit, or None."""
    n = problem
    if fault := heads_fault(heads, n.batch * n.kv_heads):
        return fault
    kv_units = tiles(n)[1]
    if type(keys) is not int or keys < UNIT or keys % UNIT or keys > kv_units * UNIT:
        return "keys_at_once", f"must be a multiple of {UNIT} up to {kv_units * UNIT}, got {keys!r}"
    batch, batches = heads * keys // UNIT, batches_of(n, heads, keys)
    held = slots(n, device, heads, keys)
    kept = held * slot_bytes(n, heads, keys)
    limit = kept_limit(n)
    if kept > limit:
        return "heads_at_once", f"dS of a batch would take {kept / 2**30:.1f} GiB, more than {limit / 2**30:.2g}"
    if held < 2 <= batches:
        return (
            "heads_at_once",
            f"dS of two batches would take {2 * kept / 2**30:.1f} GiB, more than {limit / 2**30:.2g}",
        )
    least = int(LEAST_HELD * places(problem, device))
    if held < batches and held * batch < least:
        return "keys_at_once", (
            f"{limit / 2**30:.2g} GiB hold dS of {held * batch * UNIT} keys of one head at a time, fewer than the "
            f"{least * UNIT} that keep the device at work"
        )
    return work_fault(heads, kept // (UNIT * n.itemsize), batch, query_items(n, device, heads), batches)
