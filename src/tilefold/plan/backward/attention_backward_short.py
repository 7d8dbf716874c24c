"""What `attention_backward_short` serves, a program for every gradient of a KV head of a short sequence, and its tile."""

from tilefold.plan.architecture import SM_90
from tilefold.plan.backward.attention_backward_reduce import MOST_STORED
from tilefold.plan.backward.backward import launch_fault
from tilefold.plan.base import Fault
from tilefold.plan.device import Device
from tilefold.plan.limits import Tile
from tilefold.plan.problem import AttentionProblem, next_power_of_two

KERNEL = "attention_backward_short"
ROWS = 64  # queries, or keys, of a tile at most
MOST = {32: 256, 64: 128, 128: 64}
"""Queries, and keys, at most by the padded head dim."""
MOST_CHANGED = 64  # the same up to which it is taken with changes of scores or dropout, and on other GPUs than sm_90
MOST_PACKED_OR_MASKED = 128
"""The same of packed sequences, whose shorter ones have the slices of the longest, and with a causal mask or a window (of which
none was measured), whose hidden tiles are not skipped."""
PADDED = 160  # up to so many, tiles of 32 where those of 64 would be padding by half of one or more
WARPS_OF_GROUPS = {(16, 128): 4, (32, 64): 1}
"""Of tiles below 64 rows where they differ from those of single heads, by the longer side and the padded head dim."""


def width_of(problem: AttentionProblem) -> int:
    """The wider of the padded head dims."""
    return max(problem.block_qk, problem.block_v)


def slices_of(problem: AttentionProblem, tile: Tile) -> int:
    """Tiles of queries that a program holds."""
    return -(-problem.seq_q // tile.block_m)


def short_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why the kernel does not serve this problem, as a sentence, or None if it does."""
    n = problem
    if n.dtype == "float32":
        return "it multiplies float16 and bfloat16, not float32"
    most = MOST.get(max(32, width_of(n)), 0)
    if not most:
        return f"it has head dims up to {max(MOST)}"
    if max(n.seq_q, n.seq_k) > most:
        return f"it has up to {most} queries and keys at these head dims, not {n.seq_q} and {n.seq_k}"
    if n.group > 1 and n.seq_k > ROWS:
        return f"with groups of heads it has up to {ROWS} keys"
    return None


def is_short(problem: AttentionProblem, device: Device) -> bool:
    """Whether the plan takes the kernel: as far as it was faster on an H200 (`benchmarks/short_sequences.py`), elsewhere, where
    nothing was measured, up to 64 tokens.  Not in the interpreter, where the kernels of all lengths are to be run."""
    n = problem
    filled = n.group == 1 or n.batch * n.kv_heads >= device.sms
    if n.group > 1 and width_of(n) > 64 and n.seq_q > ROWS // 2:
        return False
    most = MOST_CHANGED
    if n.unchanged and device.architecture is SM_90:
        most = MOST_PACKED_OR_MASKED if n.varlen or max(n.sides) >= 0 else max(MOST.values())
    few = max(n.seq_q, n.seq_k) <= most
    return device.backend == "cuda" and filled and few and short_refusal(n, device) is None


def side_of_tile(tokens: int) -> int:
    """Rows of a tile for so many queries or keys at most."""
    return min(ROWS, max(16, next_power_of_two(tokens)))


def short_tile(problem: AttentionProblem, stored: bool = False) -> Tile:
    """Slices of 64 queries against 64 keys, or 32 where registers are short; of shorter sequences all of one in one warp or two.
    stored: dS, too."""
    n, width = problem, width_of(problem)
    rows, keys = side_of_tile(n.seq_q), side_of_tile(n.seq_k)
    longest = max(n.seq_q, n.seq_k)
    if max(rows, keys) < ROWS:
        own = WARPS_OF_GROUPS.get((max(rows, keys), width)) if n.group > 1 else None
        return Tile(rows, keys, own or (1 if width <= 32 else 2), 1)
    if n.group == 1 and longest <= PADDED and -longest % ROWS >= ROWS // 2:
        return Tile(min(rows, 32), min(keys, 32), 2, 1)
    if n.group == 1 and width > (32 if stored else 64):
        return Tile(rows, min(keys, 32), 4, 1)
    narrow = n.group == 1 and width <= 32 and longest <= ROWS and n.unchanged
    return Tile(rows, keys, 2 if narrow else 4, 1)


def short_violation(problem: AttentionProblem, device: Device, tile: Tile) -> Fault:
    """(field, sentence) of the first limit that this kernel with this tile breaks, or None."""
    if refusal := short_refusal(problem, device):
        return "kernel", f"{KERNEL} cannot be used: {refusal}"
    sides = ("block_m", tile.block_m, problem.seq_q), ("block_n", tile.block_n, problem.seq_k)
    for name, size, tokens in sides:
        most = side_of_tile(tokens)
        if type(size) is not int or not 16 <= size <= most or size & (size - 1):
            return f"keys.{name}", f"must be a power of two from 16 to {most}, got {size}"
    if problem.group > 1 and tile.block_n < problem.seq_k:
        return "keys.block_n", f"must be at least the {problem.seq_k} keys with groups of heads, got {tile.block_n}"
    fault = launch_fault(tile)
    return fault and (f"keys.{fault[0]}", fault[1])


def ds_shape(problem: AttentionProblem) -> tuple[int, int]:
    """Keys and queries of a head's dS in memory, in whole tiles of whoever writes or reads it."""
    keys, rows = (-(-n // side_of_tile(n)) * side_of_tile(n) for n in (problem.seq_k, problem.seq_q))
    return keys, rows


def sum_tile(problem: AttentionProblem) -> Tile:
    """Of the sum of dS that is stored."""
    return Tile(side_of_tile(problem.seq_q), min(32, side_of_tile(problem.seq_k)), 4, 1)


def ds_bytes(problem: AttentionProblem) -> int:
    """Bytes of dS of all heads, where it is stored."""
    keys, rows = ds_shape(problem)
    return problem.batch * problem.heads * keys * rows * problem.itemsize


def storing_refusal(problem: AttentionProblem) -> str | None:
    """Why dS cannot be stored for the gradient of a bias, as a sentence, or None if it can."""
    if problem.varlen:
        return "sequences are packed"
    if "softcap" in problem.score_mods:
        return "dS has the derivative of softcap, which lies before the bias"
    if ds_bytes(problem) > MOST_STORED:
        return f"it would take {ds_bytes(problem) / 2**30:.3g} GiB, more than {MOST_STORED >> 30}"
    return None


def stores_ds(problem: AttentionProblem, bias: tuple[int, ...]) -> bool:
    """Whether the gradient of such a bias (batch, heads, rows) is summed up from dS, in 16 bits, that the kernel stores.

    Not of a shared bias in float16: its smallest terms would become 0 before they are added."""
    n = problem
    small = n.dtype == "float16" and bias[:2] != (n.batch, n.heads)
    return bias[2:] == (n.seq_q,) and not small and storing_refusal(n) is None
