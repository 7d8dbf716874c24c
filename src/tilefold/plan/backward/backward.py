"""What every plan of a backward pass asks of a tile: shared memory, registers, warps; estimated before anything is compiled."""

from dataclasses import replace

from tilefold.plan.architecture import SM_90
from tilefold.plan.base import Fault
from tilefold.plan.device import Device
from tilefold.plan.limits import MOD_BYTES, Tile, box_refusal, shared_fault, strides_refusal
from tilefold.plan.problem import AttentionProblem


def backward_shared_bytes(problem: AttentionProblem, device: Device, tile: Tile, own: str) -> int:
    """Estimated shared memory of one program: its own two tiles, the two that stream by, and the tile of ds.

    own: "block_m" where the program owns queries, "block_n" where it owns keys, "scores" where all four stream by."""
    rows, other = (tile.block_m, tile.block_n) if own == "block_m" else (tile.block_n, tile.block_m)
    if device.has("tcgen05"):  # takes its left operand from elsewhere than its right one: a second copy
        rows *= 2
    width = (problem.block_qk + problem.block_v) * problem.itemsize
    loads = sum(MOD_BYTES.get(mod, 0) for mod in problem.score_mods + problem.mask_mods)
    scores = tile.block_m * tile.block_n
    owned = (rows + tile.num_stages * other) * width + scores * (2 * problem.itemsize + tile.num_stages * loads)
    if own != "scores":
        return owned
    loads -= MOD_BYTES["bias"] * ("bias" in problem.score_mods)  # its own tile stays in registers
    streams = (rows - tile.block_n + tile.num_stages * (tile.block_m + tile.block_n)) * width
    streams += tile.num_stages * scores * loads
    return streams if device.architecture is SM_90 else max(owned, streams)  # elsewhere nothing was measured


def backward_tiles(
    problem: AttentionProblem, device: Device, rows: int, keys: int, own: str, crowded: bool, loading: bool = False
) -> tuple[Tile, ...]:
    """Tiles of portable kernels of at most so many rows and keys, best first.

    own: as of `backward_shared_bytes`.  crowded: half a tile streams by at a time, since something else needs registers;
    loading: what changes scores is loaded."""
    width = max(problem.block_qk, problem.block_v)
    if device.backend == "interpreter":
        return (Tile(rows, keys, 4, 1),)
    last = Tile(16, 16, 4, 1)
    if problem.dtype == "float32":
        return (Tile(min(rows, 32), min(keys, 32), 8 if width > 64 else 4, 1), last)
    warps = 8 if width > 128 else 4
    narrow = Tile(rows, min(keys, 32), warps, 2)  # products with queries as rows: wgmma takes 64
    if own == "block_n":
        narrow = Tile(min(rows, 32), keys, 8 if loading and width > 64 else warps, 2)
    first = narrow if crowded else Tile(rows, keys, warps, 2)
    return (first, narrow, replace(narrow, num_stages=1), Tile(min(rows, 32), min(keys, 32), 4, 1), last)


def launch_fault(tile: Tile) -> Fault:
    """Of a tile's warps, stages and registers."""
    if type(tile.num_warps) is not int or tile.num_warps not in (1, 2, 4, 8, 16, 32):
        return "num_warps", f"must be a power of two from 1 to 32, got {tile.num_warps!r}"
    if type(tile.num_stages) is not int or not 1 <= tile.num_stages <= 8:
        return "num_stages", f"must be from 1 to 8, got {tile.num_stages!r}"
    if tile.maxnreg is not None:
        return "maxnreg", f"must be None in a backward pass, got {tile.maxnreg!r}"
    return None


def backward_tile_violation(
    problem: AttentionProblem, device: Device, tile: Tile, own: str, held: int | None = None
) -> Fault:
    """The first limit of the device that a tile breaks, as (field, sentence), or None.

    held: fp32 accumulators of a program beside two tiles of scores; None: those of dq, or of dk and dv."""
    if fault := launch_fault(tile):
        return fault
    if device.backend == "interpreter":
        return None
    if fault := shared_fault("shared_bytes", backward_shared_bytes(problem, device, tile, own), device):
        return fault
    if held is None:
        held = (
            tile.block_m * problem.block_qk if own == "block_m" else tile.block_n * (problem.block_qk + problem.block_v)
        )
    registers = -(-(held + 2 * tile.block_m * tile.block_n) // (device.warp_size * tile.num_warps))
    if registers > device.registers_per_thread:
        return (
            "num_warps",
            f"accumulators need {registers} registers per thread, a thread has {device.registers_per_thread}",
        )
    return None


def not_a_tile(**tiles: object) -> Fault:
    """(field, sentence) of the first that is no Tile, or None."""
    for name, tile in tiles.items():
        if not isinstance(tile, Tile):
            return name, f"must be a Tile, got {tile!r} of type {type(tile).__name__}"
    return None


PASS = "the backward pass of this problem"  # as what no tile fits


def backward_box_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why q, k, v and the gradient of out cannot stream by as boxes, as a sentence, or None if they can."""
    if problem.dtype == "float32":
        return "fp32 products are not made from shared memory, and boxes would only take registers"
    return rows_refusal(problem) or box_refusal(problem, device)


def rows_refusal(problem: AttentionProblem) -> str | None:
    """Why q and the gradient of out cannot be read by descriptors, as a sentence, or None if they can."""
    if problem.dim_v * problem.itemsize % 16:
        return "the rows of the gradient of out are not multiples of 16 bytes"
    return strides_refusal(problem.query_descriptors)
