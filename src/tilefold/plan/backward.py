"""What every plan of a backward pass asks of a tile: shared memory, registers, warps; estimated before anything is compiled."""

from tilefold.plan.device import Device
from tilefold.plan.limits import MOD_BYTES, Tile
from tilefold.plan.problem import AttentionProblem

__all__ = ["backward_shared_bytes", "backward_tile_violation"]


def backward_shared_bytes(problem: AttentionProblem, device: Device, tile: Tile, own: str) -> int:
    """Estimated shared memory of one program: its own two tiles, the two that stream by, and the tile of ds.

    own: "block_m" where the program owns queries, "block_n" where it owns keys."""
    rows, other = (tile.block_m, tile.block_n) if own == "block_m" else (tile.block_n, tile.block_m)
    if (
        100 <= device.generation < 120
    ):  # tcgen05 takes its left operand from elsewhere than its right one: a second copy
        rows *= 2
    width = (problem.block_qk + problem.block_v) * problem.itemsize
    loads = sum(MOD_BYTES.get(mod, 0) for mod in problem.score_mods + problem.mask_mods)
    scores = tile.block_m * tile.block_n
    return (rows + tile.num_stages * other) * width + scores * (2 * problem.itemsize + tile.num_stages * loads)


def backward_tile_violation(
    problem: AttentionProblem, device: Device, tile: Tile, own: str, held: int | None = None
) -> tuple[str, str] | None:
    """The first limit of the device that a tile breaks, as (field, sentence), or None.

    held: fp32 accumulators of a program beside two tiles of scores; None: those of dq, or of dk and dv."""
    if tile.num_warps not in (1, 2, 4, 8, 16, 32) or not 1 <= tile.num_stages <= 8 or tile.maxnreg is not None:
        return "num_warps", f"a tile takes 1 to 32 warps, 1 to 8 stages and no maxnreg here, got {tile}"
    if device.backend == "interpreter":
        return None
    shared = backward_shared_bytes(problem, device, tile, own)
    if shared > device.smem_per_block:
        need, have = shared / 1024, device.smem_per_block / 1024
        return "shared_bytes", f"needs {need:.0f} KiB of shared memory, a program on {device.name} has {have:.0f} KiB"
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
