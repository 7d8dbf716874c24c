"""When the Gluon kernel for sm_90 serves dense attention, and with how many buffers and registers."""

from tilefold.plan.device import Device
from tilefold.plan.hopper import chip_refusal, tile_fault
from tilefold.plan.limits import MAX_GRID, Tile, box_refusal, grid_of
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
REGISTERS = 168, 240  # of a thread at launch, of a folding thread
BARRIER_BYTES = 512  # barriers, the note, and what the compiler keeps to start the partitions


def hopper_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why the kernel does not serve this problem, as a sentence, or None if it does."""
    n = problem
    if refusal := chip_refusal(n, device):
        return refusal
    if n.dropout:
        return "it has no dropout"
    if not n.plain:
        return "it has no changes of scores, no masks but causal and window, and no sinks"
    if not n.query_descriptors:
        return "the base or the strides of Q are not multiples of 16 bytes"
    return box_refusal(n, device)


def hopper_few(problem: AttentionProblem, device: Device) -> str | None:
    """Why it would leave the device idle, as a sentence, or None if half of the SMs have a block, at least half full."""
    if 2 * problem.seq_q < ROWS:
        return f"only {problem.seq_q} of the {ROWS} rows of a block would be used"
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
        return "kernel", f"{KERNEL} cannot be used: {refusal}"
    if grid_of(problem, ROWS)[0] > MAX_GRID:
        return "grid", f"grid needs {grid_of(problem, ROWS)[0]} blocks of queries, a launch counts at most {MAX_GRID}"
    fixed = {"block_m": ROWS, "block_n": KEYS, "num_warps": 4, "maxnreg": None}
    return tile_fault(KERNEL, tile, fixed, hopper_shared_bytes(problem, tile), device)
