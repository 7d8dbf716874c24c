"""What the backward passes share on the host: launches by name, descriptors, strides, dout as a kernel can read it, and the
weights of rows in fp32."""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...errors import PlanError
from ...types import Layout
from ..bound import Bound, Slot, stride_names
from ..call import Call
from ..dense.attention_parts import boxable, describe_box, sequence_strides

if TYPE_CHECKING:
    from ...plan.backward.attention_backward import AttentionBackwardPlan
    from ...plan.limits import Tile
    from ...plan.problem import AttentionProblem

ROWS = 64  # rows of delta that one program makes
OF_DELTA = ("Out", "DOut", "Lse", "DLse", "Lse2", "Delta")
"""What a call gives to the kernel of delta."""


def check_given(plan: Any, *facts: Any) -> None:
    """The plan's own `check` of a call's `backward_plan`, whose errors begin with "plan": a call may be given two."""
    try:
        plan.check(*facts)
    except PlanError as error:
        raise PlanError(f"backward_{error}") from None


def delta_bound(
    problem: "AttentionProblem", total: int, rows: int, wide: bool, strides: Mapping[str, int], device: torch.device
) -> Bound:
    """The launch that makes lse in base 2 and the sums of out * dout; total: rows of all sequences, `rows` of each (a packed
    batch is one sequence here)."""
    from ...kernels.backward.backward_delta import backward_delta

    constants = {"WIDE": wide, "DIM": problem.dim_v, "BLOCK_D": problem.block_v, "BLOCK_M": ROWS}
    programs = -(-rows // ROWS) * problem.heads * (total // rows)
    values = {**strides, "seq_q": rows, "heads": problem.heads}
    return Bound.of(backward_delta, programs, OF_DELTA, values, constants, device)


def statistics_by(
    bound: Bound, out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """lse in base 2, and delta, by a launch of `delta_bound`."""
    # Each on its own: parts of one tensor would begin at addresses of another alignment, and kernels be compiled for that.
    lse2, delta = (torch.empty(lse.shape, dtype=torch.float32, device=lse.device) for _ in range(2))
    bound((out, dout, lse, dlse, lse2, delta))
    return lse2, delta


def three_by(
    queries: Bound | None,
    keys: Bound | None,
    rows: tuple[torch.Tensor, ...],
    wanted: Sequence[bool],
    call: Call,
    *given: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dq, dk, dv) by the portable kernels, None where not wanted.  rows: q, k, v, dout, lse in base 2 and delta; given: what
    the kernels get behind the call."""
    new = torch.empty if call.packed is None else torch.zeros  # rows of no sequence have no program
    dq = dk = dv = None
    if wanted[0]:
        dq = new(rows[0].shape, dtype=rows[0].dtype, device=rows[0].device)
    if wanted[1] or wanted[2]:
        dk, dv = (new(t.shape, dtype=t.dtype, device=t.device) for t in rows[1:3])
    for kernel, made in ((queries, dq), (keys, dk)):
        if kernel is not None and made is not None:
            kernel((*rows, dq, dk, dv, call, *given))
    return dq, dk, dv


def zeros_for(tensors: Sequence[torch.Tensor | None], wanted: Sequence[bool]) -> tuple[torch.Tensor | None, ...]:
    """Gradients of a call that computes nothing, None where not wanted."""
    pairs = zip(tensors, wanted, strict=True)
    return tuple(
        [torch.zeros(t.shape, dtype=t.dtype, device=t.device) if t is not None and w else None for t, w in pairs]
    )


def tiled(
    kernel: Any, tile: "Tile", grid: tuple[int, int, int], given: Sequence[str], values: Mapping[str, Any],
    constants: Mapping[str, Any], device: torch.device,
) -> Any:  # fmt: skip
    """The launch of a kernel with this tile, and its arguments; None for an empty grid."""
    constants = {**constants, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return Bound.of(kernel, grid, given, values, constants, device, **options) if grid[0] else None


def side_strides(layout: Layout, **sides: torch.Tensor | tuple[int, ...]) -> dict[str, int]:
    """stride_qb, stride_qm, stride_qh of q, and so on, or of the gradient of this shape; a row of k and v, or of their gradients
    x and y, is n."""
    made: dict[str, int] = {}
    for letter, t in sides.items():
        made.update(zip(_side_names(letter), sequence_strides(t, layout), strict=True))
    return made


@functools.cache
def _side_names(letter: str) -> tuple[str, ...]:
    return stride_names(letter, "bnh" if letter in "kvxy" else "bmh", 3)


def boxes(layout: Layout, rows: int, **sides: tuple[torch.Tensor, int]) -> dict[str, Slot]:
    """Descriptors of `rows` rows of tensors, each with the columns of a box, by the kernel's names."""
    return {name: Slot(name, describe_box(t, layout, rows, width).over) for name, (t, width) in sides.items()}


def readable(dout: torch.Tensor) -> torch.Tensor:
    """dout, or its copy where some kernel could not read it: after sum() every element is at one address, and a part of a larger
    gradient may begin anywhere."""
    if boxable(dout) and dout.stride(-1) == 1:
        return dout
    return dout.clone(memory_format=torch.contiguous_format)


def score_slope(score_mod: Any, score_grad: Any) -> Any:
    """The derivative of the user's score mod: as given, else made of its source; None without a mod."""
    if score_mod is None or score_grad is not None:
        return score_grad
    from ..derivative import derivative_of  # here: `import tilefold` stays light

    return derivative_of(score_mod)


def slopes_of(mods: Any, softcap: float, call: Call, exact: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The derivative of each score mod, in their order; and the same with 1 for the bias and the mods before it."""
    unit = (mods.unit_slope, ())  # a slope gets the args of its mod
    cap = (mods.softcap_exact_slope if exact else mods.softcap_slope, ())
    before = [cap] * bool(softcap) + [unit] * (call.alibi_slopes is not None) + [unit] * (call.bias is not None)
    after = [(score_slope(call.score_mod, call.score_grad), ())] if call.score_mod is not None else []
    return (*before, *after), (*[unit] * len(before), *after)


# ---------------------------------------------------------------- fp32: probabilities made again are divided by their sum

OF_WEIGHTS = ("Q", "K", "Lse2", "Weight", "call")
"""What a call gives to the kernel of weights.  Both products of the probabilities, p^T dout and p * (dp - delta), are linear in
dout and delta, so it is these that are multiplied by one number a row; every kernel that follows stays as it is."""


def bind_weights(
    plan: "AttentionBackwardPlan", constants: Mapping[str, Any], values: Mapping[str, Any], device: torch.device
) -> Any:
    """The launch that makes the weights of an fp32 call; None of any other call."""
    from ...kernels.backward.attention_backward_weights import attention_backward_weights

    if plan.problem.dtype != "float32":
        return None
    chosen = {name: constants[name] for name in ("KIND", "EMULATE", "WIDE", "DIM_QK", "BLOCK_QK")}
    return tiled(attention_backward_weights, plan.queries, plan.grids[0], OF_WEIGHTS, values, chosen, device)


def weighted(
    bound: Bound, tensors: tuple[torch.Tensor, ...], dout: torch.Tensor, delta: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """dout, contiguous, and delta [batch, heads, rows] or packed, times the weights of their rows; tensors: q, k, and lse in base
    2."""
    q, k, lse2 = tensors
    packed = call.packed is not None
    weight = torch.ones_like(lse2) if packed else torch.empty_like(lse2)  # rows of no sequence have no program
    bound((q, k, lse2, weight, call))
    rows = weight if call.layout == "bhsd" and not packed else weight.transpose(-2, -1)
    scaled = torch.empty_like(dout, memory_format=torch.contiguous_format)
    torch.mul(dout, rows[..., None], out=scaled)
    return scaled, delta * weight
