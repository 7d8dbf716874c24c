"""When the Gluon kernel for sm_90 serves dense attention, and with how many buffers and registers."""

from tilefold.plan.device import Device
from tilefold.plan.limits import MAX_GRID, RESERVED_SHARED, Tile, box_refusal, grid_of
from tilefold.plan.problem import AttentionProblem

__all__ = [
    "KERNEL",
    "REGISTERS",
    "hopper_few",
    "hopper_programs",
    "hopper_refusal",
    "hopper_shared_bytes",
    "hopper_tile",
    "hopper_violation",
]

KERNEL = "attention_forward_hopper"
ROWS, KEYS = 128, 128  # of a block of queries, 64 for each of two warpgroups, and of a tile of keys
REGISTERS = (
    168,
    240,
    24,
)  # of a thread at launch, of a folding thread, of the loading warp, which leaves its own to those
BARRIER_BYTES = 512  # barriers, the note, and what the compiler keeps to start the partitions


def hopper_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why the kernel does not serve this problem, as a sentence, or None if it does."""
    n = problem
    if device.backend != "cuda" or device.arch != 90:
        return f"it is written for sm_90, this is {device.target}"
    if n.dtype not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 and float16, not {n.dtype}"
    if n.dim_qk != n.dim_v or n.dim_qk not in (64, 128):
        return f"it has head dims of 64 and 128, the same for V, not {n.dim_qk} and {n.dim_v}"
    if not n.plain:
        return "it has no changes of scores, no masks but causal and window, and no sinks"
    if not n.query_descriptors:
        return "the base or the strides of Q are not multiples of 16 bytes"
    return box_refusal(n, device)


def hopper_few(problem: AttentionProblem, device: Device) -> str | None:
    """Why it would leave the device idle, as a sentence, or None if half of the SMs have a block of queries."""
    blocks = grid_of(problem, ROWS)[0]
    if 2 * blocks >= device.sms:
        return None
    return f"it would have {blocks} blocks of {ROWS} queries for {device.sms} SMs"


def hopper_tile(problem: AttentionProblem) -> Tile:
    """128 x 128, 4 warps in each of two warpgroups; num_stages: buffers for K, and for V."""
    return Tile(ROWS, KEYS, 4, 2 if problem.dim_qk == 128 else 4)


def hopper_shared_bytes(problem: AttentionProblem, tile: Tile) -> int:
    """Shared memory of a program (bytes): Q, the rings of K and V, barriers."""
    return (ROWS + 2 * tile.num_stages * KEYS) * problem.dim_qk * problem.itemsize + BARRIER_BYTES


def hopper_programs(problem: AttentionProblem, device: Device) -> int:
    """Programs to launch: one for each SM, drawing one block of queries after the other, or fewer if there are fewer blocks."""
    return min(device.sms, grid_of(problem, ROWS)[0])


def hopper_violation(problem: AttentionProblem, device: Device, tile: Tile) -> tuple[str, str] | None:
    """(field, sentence) of the first thing that does not fit, or None."""
    refusal = hopper_refusal(problem, device)
    if refusal:
        return "kernel", f"kernel {KERNEL} cannot be used: {refusal}"
    for name, wanted in (("block_m", ROWS), ("block_n", KEYS), ("num_warps", 4), ("maxnreg", None)):
        if getattr(tile, name) != wanted:
            return name, f"{name} must be {wanted} with {KERNEL}, got {getattr(tile, name)}"
    if grid_of(problem, ROWS)[0] > MAX_GRID:
        return "grid", f"grid needs {grid_of(problem, ROWS)[0]} blocks of queries, a launch counts at most {MAX_GRID}"
    if type(tile.num_stages) is not int or not 1 <= tile.num_stages <= 8:
        return "num_stages", f"num_stages must be from 1 to 8, got {tile.num_stages!r}"
    shared, limit = hopper_shared_bytes(problem, tile), device.smem_per_block - RESERVED_SHARED
    if shared > limit:
        return (
            "num_stages",
            f"needs {shared / 1024:.0f} KiB of shared memory, a program on {device.name} has {limit / 1024:.0f} KiB",
        )
    return None
