"""What the Gluon kernels for sm_90 refuse alike: other chips, dtypes and head dims, tiles that do not fit."""

from collections.abc import Mapping

from tilefold.plan.base import Fault
from tilefold.plan.capabilities import architecture_refusal
from tilefold.plan.device import Device
from tilefold.plan.limits import Tile, shared_fault
from tilefold.plan.problem import AttentionProblem

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


def tile_fault(kernel: str, tile: Tile, fixed: Mapping[str, int | None], shared: int, device: Device) -> Fault:
    """(field, sentence) of the first thing that does not fit, or None.

    fixed: the fields of a tile that the kernel has one value of; shared: bytes of shared memory that a program needs."""
    for name, wanted in fixed.items():
        if getattr(tile, name) != wanted:
            return name, f"must be {wanted} with {kernel}, got {getattr(tile, name)}"
    if type(tile.num_stages) is not int or not 1 <= tile.num_stages <= MAX_STAGES:
        return "num_stages", f"must be from 1 to {MAX_STAGES}, got {tile.num_stages!r}"
    return shared_fault("num_stages", shared, device)
