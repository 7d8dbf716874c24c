"""When the Gluon kernel of bytes for sm_90 serves attention with e4m3 inputs: its tiles, its versions, what it refuses."""

from tilefold.plan.base import Fault, unusable
from tilefold.plan.capabilities import architecture_refusal
from tilefold.plan.dense.attention_hopper import POLYNOMIALS, consumers_of, versions_fault
from tilefold.plan.device import Device
from tilefold.plan.hopper import blocks_fault, held_fault, sizes_fault, tile_fault
from tilefold.plan.limits import Tile, grid_of, strides_refusal
from tilefold.plan.problem import AttentionProblem

KERNEL = "attention_forward_fp8"
DEQUANTISE = "dequantise"
WIDTHS = (64, 128, 256)  # bytes of a tile's row; TMA fills what a head dim leaves of it with zeros
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


def fp8_options(problem: AttentionProblem) -> tuple[str, ...]:
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
    if fault := sizes_fault(KERNEL, tile, (128, 192), (64, 128)):
        return fault
    if why := versions_fault(options, OPTIONS):
        return "options", why
    held, folding = _registers_held(problem, tile, "direct" in options), consumers_of(tile)
    if fault := held_fault("weights", held, HELD[folding], folding) or blocks_fault(grid_of(problem, tile.block_m)[0]):
        return fault
    fixed = {"num_warps": 4, "maxnreg": None}
    return tile_fault(KERNEL, tile, fixed, fp8_shared_bytes(problem, tile), device)


def _registers_held(problem: AttentionProblem, tile: Tile, direct: bool) -> int:
    """Of a folding thread: the output's accumulator, a tile's that is summed outside, the scores', the weights in 8 bits."""
    return fp8_width(problem.dim_v) // 2 * (1 if direct else 2) + tile.block_n // 2 + tile.block_n // 8
