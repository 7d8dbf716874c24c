"""When the Gluon kernel for sm_90 that adds dq in memory makes the gradients of dense attention, and in which version.

The order of its additions changes from run to run, so a plan takes it only for a call that says deterministic=False."""

from dataclasses import dataclass

from tilefold.plan.backward.hopper_backward import divisors
from tilefold.plan.device import Device
from tilefold.plan.hopper import chip_refusal, tile_fault
from tilefold.plan.limits import MAX_GRID, Tile, box_refusal
from tilefold.plan.problem import AttentionProblem

__all__ = [
    "KERNEL",
    "KEYS",
    "ORDERS",
    "ReduceOptions",
    "blocks",
    "heads_at_once",
    "options_violation",
    "programs",
    "queries_of",
    "reduce_options",
    "reduce_refusal",
    "reduce_tile",
    "reduce_unmeasured",
    "reduce_violation",
    "rows",
    "sum_bytes",
]

KERNEL = "attention_backward_reduce"
KEYS = 128  # of a program
REGISTERS = (168, 240)  # of a thread at launch, of a folding thread
LEAST_KEYS = 16384
"""With so many it was measured to be faster than the kernel that keeps the order; with 8192 (D=128), 4096 (D=64) not."""
SUMS_AT_ONCE = 16 << 20
"""Bytes of sums of dq that the programs of one batch of heads add to: of 50 MiB of L2, each half of which keeps its own copy."""
ORDERS = ("keys first", "queries first", "keys late", "tile by tile")
SHARED = 768  # barriers, and what the compiler keeps to start the partitions


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """Which version of the kernel.

    sum_slots: buffers of a tile of dq in shared memory, 1 or 2, from which a warp of its own has it added to memory; 0: the
    warpgroups add it from registers. order: of a step's products: "keys first" (dk, then dq), "queries first" (dq, then dk),
    "keys late" (dk of a tile beside the next one's exponentials) or "tile by tile" (as FlashAttention-4: dq, then dk, and nothing
    of the next tile; with sum_slots=1). stagger: tiles of queries between the beginnings of two
    neighbours' walks, where there is no mask with a diagonal. fence: keep the wait for dP behind the exponentials. rounded: make
    dS of the probabilities in 16 bits, as dv is, so that their 32 bits need no registers (at D=64 they have none)."""

    sum_slots: int = 1
    order: str = "keys first"
    stagger: int = 2
    fence: bool = True
    rounded: bool = False

    def __str__(self) -> str:
        way = ("registers", "copies out of 1 buffer", "copies out of 2 buffers")[self.sum_slots]
        return f"dq added by {way}, {self.order}, {self.stagger} tiles apart{', fenced' if self.fence else ''}"


def reduce_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why the kernel does not serve this problem, as a sentence, or None if it does."""
    n = problem
    if refusal := chip_refusal(n, device):
        return refusal
    if n.varlen:
        return "it has no packed batches"
    if refusal := box_refusal(n, device):
        return refusal
    if not n.plain:
        return "it has no changes of scores, no masks but causal and window, no sinks and no dropout"
    if not n.query_descriptors:
        return "the base or the strides of Q are not multiples of 16 bytes"
    if n.seq_k == 0:
        return "there are no keys"
    if rows(n) * (queries_of(n) * n.dim_qk // 32) >= 1 << 31:
        return "the sums of dq have more rows than a descriptor can count"
    if programs(n) > MAX_GRID:
        return f"there are more than {MAX_GRID} blocks of {KEYS} keys"
    return None


def reduce_unmeasured(problem: AttentionProblem, device: Device) -> str | None:
    """As reduce_refusal, also of what it can serve, but was not measured to serve faster than the kernel that keeps the order."""
    if refusal := reduce_refusal(problem, device):
        return refusal
    if problem.seq_k < LEAST_KEYS:
        return f"with fewer than {LEAST_KEYS} keys it was not faster than keeping the order"
    if min(problem.sides) >= 0:
        return "it was not measured with a window"
    return None


# ---------------------------------------------------------------- sizes


def queries_of(problem: AttentionProblem) -> int:
    """Queries of a tile: as many as S and dP have registers for."""
    return 128 if problem.dim_qk == 64 else 64


def blocks(problem: AttentionProblem) -> int:
    """Blocks of 128 keys of a head."""
    return -(-problem.seq_k // KEYS)


def programs(problem: AttentionProblem) -> int:
    """Programs of a launch."""
    return blocks(problem) * problem.batch * problem.kv_heads


def rows(problem: AttentionProblem) -> int:
    """Tiles of queries, and one more without any."""
    n = problem
    return n.batch * n.heads * -(-n.seq_q // queries_of(n)) + 1


def sum_bytes(problem: AttentionProblem) -> int:
    """Memory for the fp32 sums of dq, and statistics."""
    return 4 * rows(problem) * queries_of(problem) * (problem.dim_qk + 2)


def heads_at_once(problem: AttentionProblem) -> int:
    """KV heads of a batch, a divisor of all: as many as SUMS_AT_ONCE holds dq of."""
    n = problem
    head = n.group * n.seq_q * n.dim_qk * 4
    return max(d for d in divisors(n.batch * n.kv_heads) if d == 1 or d * head <= SUMS_AT_ONCE)


def reduce_tile(problem: AttentionProblem) -> Tile:
    """num_stages: buffers for q and dout."""
    return Tile(queries_of(problem), KEYS, 4, 2)


def reduce_options(problem: AttentionProblem) -> ReduceOptions:
    """The version that was measured to be the fastest."""
    return ReduceOptions(1, ORDERS[0], 2, fence=True, rounded=problem.dim_qk == 64)


def reduce_shared(problem: AttentionProblem, stages: int, sum_slots: int) -> int:
    """Shared memory of one program (bytes): rings of q and dout, K, V, two dS, tiles of dq, statistics, barriers."""
    n, queries = problem, queries_of(problem)
    halves = (2 * stages * queries + 2 * KEYS) * n.dim_qk + 2 * KEYS * queries
    return halves * n.itemsize + 4 * queries * (sum_slots * n.dim_qk + stages * 2) + SHARED


# ---------------------------------------------------------------- limits


def reduce_violation(
    problem: AttentionProblem, device: Device, tile: Tile, options: ReduceOptions | None, heads: int, keys: int
) -> tuple[str, str] | None:
    """(field, sentence) of the first thing that does not fit, or None."""
    n = problem
    if refusal := reduce_refusal(n, device):
        return "kernel", f"{KERNEL} cannot be used: {refusal}"
    if fault := options_violation(options):
        return fault
    assert options is not None
    if n.dim_qk == 64 and options.order == ORDERS[1]:
        return (
            "options.order",
            f"must not be {ORDERS[1]!r} with a head dim of 64, for which there are no registers",
        )
    if n.dim_qk == 64 and not options.rounded:
        return (
            "options.rounded",
            "must be True with a head dim of 64: there are no registers for probabilities in 32 bits",
        )
    if options.order == ORDERS[3] and options.sum_slots != 1:
        return "options.sum_slots", f"must be 1 with order={ORDERS[3]!r}, got {options.sum_slots}"
    fixed = {"block_m": queries_of(n), "block_n": KEYS, "num_warps": 4}
    if fault := tile_fault(KERNEL, tile, fixed, reduce_shared(n, tile.num_stages, options.sum_slots), device):
        return fault
    if tile.num_stages < 2:
        return "num_stages", f"must be at least 2 with {KERNEL}, got {tile.num_stages}"
    total = n.batch * n.kv_heads
    if type(heads) is not int or heads < 1 or total % heads:
        return "heads_at_once", f"must be a divisor of {total} (batch x KV heads), got {heads!r}"
    if keys:
        return "keys_at_once", f"must be 0 with {KERNEL}, which keeps no dS, got {keys!r}"
    return None


def options_violation(options: object) -> tuple[str, str] | None:
    """As reduce_violation, of the options alone."""
    if not isinstance(options, ReduceOptions):
        return "options", f"must be ReduceOptions with {KERNEL}, got {options!r}"
    if type(options.sum_slots) is not int or not 0 <= options.sum_slots <= 2:
        return "options.sum_slots", f"must be 0, 1 or 2, got {options.sum_slots!r}"
    if options.order not in ORDERS:
        return "options.order", f"must be one of {', '.join(map(repr, ORDERS))}, got {options.order!r}"
    if type(options.stagger) is not int or not 0 <= options.stagger < 1 << 10:
        return "options.stagger", f"must be from 0 to 1023, got {options.stagger!r}"
    for name in ("fence", "rounded"):
        if type(getattr(options, name)) is not bool:
            return f"options.{name}", f"must be a bool, got {getattr(options, name)!r}"
    return None
