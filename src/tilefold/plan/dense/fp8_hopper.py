"""When the Gluon kernel of bytes for sm_90 serves attention with e4m3 inputs: its tiles, its versions, what it refuses."""

from tilefold.plan.base import Fault, unusable
from tilefold.plan.capabilities import architecture_refusal
from tilefold.plan.dense.attention_hopper import POLYNOMIALS, consumers_of
from tilefold.plan.device import Device
from tilefold.plan.hopper import tile_fault
from tilefold.plan.limits import MAX_GRID, Tile, grid_of, strides_refusal
from tilefold.plan.problem import AttentionProblem

KERNEL = "attention_forward_fp8"
DEQUANTISE = "dequantise"
WIDTHS = (64, 128, 256)  # bytes of a tile's row; TMA fills what a head dim leaves of it with zeros
REGISTERS = {2: (168, 240), 3: (128, 160)}  # by warpgroups: of a thread at launch, of a folding thread
HELD = {2: 208, 3: 112}  # of a folding thread, by accumulators and weights: with more, compilers spill in the loop
BARRIER_BYTES = 576  # barriers, the mailbox, and what the compiler keeps to start the partitions
OPTIONS = ("direct", "fence", "turns", *POLYNOMIALS)
"""Versions of the kernel. direct: sums over tiles are left to the tensor cores, which keep about 14 bits of them; fence: the wait
for a product stays behind the softmax; turns: the warpgroups issue their products in turns; polynomial n: n sixteenths of the
exponentials on the FMA units."""


def fp8_refusal(problem: AttentionProblem, device: Device, options: tuple[str, ...]) -> str | None:
    """Why the kernel cannot serve this problem, as a sentence, or None if it can."""
    n = problem
    if refusal := architecture_refusal(KERNEL, device):
        return refusal
    if fp8_width(n.dim_v) > 128 and "direct" not in options:
        return (
            f"V has {n.dim_v} columns: past 128 there are no registers to sum tiles in fp32, and the tensor cores' own sums keep "
            "about 14 bits (a plan that asks for option 'direct' has those)"
        )
    if n.dim_v % 4:
        return f"it stores 4 columns at a time, V has {n.dim_v}"
    if refusal := strides_refusal(n.query_descriptors):
        return refusal
    if not n.descriptors:
        return "the base or the strides of K are not multiples of 16 bytes, or there are no keys"
    return None


def fp8_slower(problem: AttentionProblem) -> str | None:
    """Why bfloat16's kernel is the faster one, as a sentence, or None if it is not."""
    if fp8_width(problem.dim_v) == 64:
        return "with V of at most 64 columns bfloat16's kernel is faster: exponentials bound both, and this sums tiles outside"
    return None


def fp8_options(problem: AttentionProblem, tile: Tile) -> tuple[str, ...]:
    """The versions that are taken."""
    chosen = {"direct": fp8_width(problem.dim_v) > 128, "fence": True, "turns": True}
    return tuple(name for name, taken in chosen.items() if taken)


def fp8_width(dim: int) -> int:
    """Width of the tile that holds a head dim."""
    return next(width for width in WIDTHS if width >= dim)


def places_of(seq_k: int) -> int:
    """Keys of V transposed, with those that fill the last 16 up: rows of a tensor that TMA reads."""
    return -(-seq_k // 16) * 16


def fp8_tile(problem: AttentionProblem) -> Tile:
    """128 queries, 4 warps in each of two warpgroups; num_stages: buffers for K, and for V."""
    wide = fp8_width(problem.dim_v) > 128
    stages = 3 if wide or fp8_width(problem.dim_qk) > 128 else 4
    return Tile(block_m=128, block_n=64 if wide else 128, num_warps=4, num_stages=stages)


def fp8_shared_bytes(problem: AttentionProblem, tile: Tile) -> int:
    """Shared memory of a program (bytes): Q, the rings of K and V, barriers."""
    qk, v = fp8_width(problem.dim_qk), fp8_width(problem.dim_v)
    return tile.block_m * qk + tile.num_stages * tile.block_n * (qk + v) + BARRIER_BYTES


def fp8_violation(problem: AttentionProblem, device: Device, tile: Tile, options: tuple[str, ...]) -> Fault:
    """(field, sentence) of the first thing that does not fit, or None."""
    if fault := unusable(KERNEL, fp8_refusal(problem, device, options)):
        return fault
    if tile.block_m not in (128, 192):
        return "block_m", f"must be 128 or 192 with {KERNEL}, got {tile.block_m}"
    if tile.block_n not in (64, 128):
        return "block_n", f"must be 64 or 128 with {KERNEL}, got {tile.block_n}"
    for option in options:
        if option not in OPTIONS:
            return "options", f"must be among direct, fence, turns, polynomial 1 to 16, got {option!r}"
    if sum(option in POLYNOMIALS for option in options) > 1 or len(set(options)) < len(options):
        return "options", f"must name each version once, got {options!r}"
    held, limit = _registers_held(problem, tile, "direct" in options), HELD[consumers_of(tile)]
    if held > limit:
        have = REGISTERS[consumers_of(tile)][1]
        return "block_n", f"accumulators and weights need {held} registers, of {have} a thread can spare {limit}"
    blocks = grid_of(problem, tile.block_m)[0]
    if blocks > MAX_GRID:
        return "grid", f"grid needs {blocks} blocks of queries, a launch counts at most {MAX_GRID}"
    fixed = {"num_warps": 4, "maxnreg": None}
    return tile_fault(KERNEL, tile, fixed, fp8_shared_bytes(problem, tile), device)


def _registers_held(problem: AttentionProblem, tile: Tile, direct: bool) -> int:
    """Of a folding thread: the output's accumulator, a tile's that is summed outside, the scores', the weights in 8 bits."""
    return fp8_width(problem.dim_v) // 2 * (1 if direct else 2) + tile.block_n // 2 + tile.block_n // 8
