"""What the Gluon kernels for sm_90 refuse alike: other chips, dtypes and head dims, tiles that do not fit."""

from collections.abc import Mapping

from tilefold.plan.base import Fault
from tilefold.plan.capabilities import architecture_refusal
from tilefold.plan.device import Device
from tilefold.plan.limits import MAX_GRID, Tile, shared_fault
from tilefold.plan.problem import AttentionProblem

REGISTERS = {1: (128, 232), 2: (168, 240), 3: (128, 160)}
"""By warpgroups that fold: of a thread at launch, of a folding thread."""
PRODUCER_REGISTERS = (
    24  # of a thread of the loading warp, which leaves the others its own: the least that can be asked for
)
MAX_STAGES = 8


def chip_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why the kernels of two widths do not serve this chip, dtype or head dim, as a sentence, or None if they can."""
    n = problem
    if refusal := type_refusal(n, device):
        return refusal
    if n.dim_qk != n.dim_v or n.dim_qk not in (64, 128):
        return f"it has head dims of 64 and 128, the same for V, not {n.dim_qk} and {n.dim_v}"
    return None


def type_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why none of these kernels serves this chip or dtype, as a sentence, or None if they can."""
    n = problem
    if refusal := architecture_refusal("attention_forward_hopper", device):
        return refusal
    if n.dtype not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 and float16, not {n.dtype}"
    return None


def sizes_fault(what: str, tile: Tile, rows: tuple[int, ...], keys: tuple[int, ...]) -> Fault:
    """That of a tile's rows and keys, of which `what` has these."""
    for name, accepted in (("block_m", rows), ("block_n", keys)):
        if getattr(tile, name) not in accepted:
            *first, last = map(str, accepted)
            either = f"{', '.join(first)} or {last}" if first else last
            return name, f"must be {either} with {what}, got {getattr(tile, name)}"
    return None


def held_fault(what: str, held: int, limit: int, warpgroups: int) -> Fault:
    """That of registers of a folding thread, which `what` take of those that it can spare."""
    if held <= limit:
        return None
    have = REGISTERS[warpgroups][1]
    return "block_n", f"accumulators and {what} need {held} registers, of {have} a thread can spare {limit}"


def blocks_fault(blocks: int) -> Fault:
    """That of a grid from which programs draw blocks of queries."""
    if blocks <= MAX_GRID:
        return None
    return "grid", f"grid needs {blocks} blocks of queries, a launch counts at most {MAX_GRID}"


def tile_fault(kernel: str, tile: Tile, fixed: Mapping[str, int | None], shared: int, device: Device) -> Fault:
    """(field, sentence) of the first thing that does not fit, or None.

    fixed: the fields of a tile that the kernel has one value of; shared: bytes of shared memory that a program needs."""
    for name, wanted in fixed.items():
        if getattr(tile, name) != wanted:
            return name, f"must be {wanted} with {kernel}, got {getattr(tile, name)}"
    if type(tile.num_stages) is not int or not 1 <= tile.num_stages <= MAX_STAGES:
        return "num_stages", f"must be from 1 to {MAX_STAGES}, got {tile.num_stages!r}"
    return shared_fault("num_stages", shared, device)
