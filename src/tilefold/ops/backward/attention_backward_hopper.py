"""Binding of the Gluon kernel that makes the gradients of dense attention on sm_90: scratch, descriptors, launches."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..call import UNBOUNDED, Call
from ..dense.attention import example_call
from ..dense.attention_parts import head_strides, kind_of
from ..first_call import in_background
from ..hopper import chosen_or_none
from .hopper_backward import (
    STATISTICS,
    UNIT,
    kept_box,
    side_boxes,
    statistics_arguments,
    statistics_box,
    statistics_launch,
)

if TYPE_CHECKING:
    from ...plan.attention import AttentionPlan
    from ...plan.attention_backward import AttentionBackwardPlan
    from ...plan.problem import AttentionProblem
    from ..launch import Box

__all__ = ["HopperBound", "bind", "bound_launches", "example_launch", "main_launch", "run"]

# Widths of which the wait for dP is kept behind the exponentials, which take as long there as two products; of which K and V
# have room in registers.
FENCED, HOLDING = (64, 256), (64,)
Tensors = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class HopperBound:
    """The two launches of a backward pass, each with the arguments that do not change from call to call."""

    plan: "AttentionBackwardPlan"
    statistics: Any
    statistics_tail: tuple[int, ...]
    main: Any
    tail: tuple[Any, ...]
    boxes: "tuple[Box, ...]"  # of q, dout, k, v
    statistics_box: "Box"
    kept_box: "Box"
    sizes: tuple[int, int, int, int]  # rows of statistics, counters, rows of dS, fp32 numbers of sums between stripes


def bind(
    scale: float, tensors: Tensors, dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan"
) -> HopperBound | None:
    """The bound launches; None, after a warning, if this Triton cannot make them, or an error if the caller chose the plan.

    tensors: q, k, v, out."""

    def made() -> HopperBound:
        return bound_launches(scale, tensors, dout, call, plan)

    def compile(bound: HopperBound) -> None:
        made = scratch(bound, tensors, "meta")
        lse = torch.empty(made[0].shape, device="meta")
        small = statistics_arguments(bound, tensors, dout, lse, None, made)
        in_background(lambda: bound.statistics.compile(small))  # 0.3 s while the other one takes 2
        bound.main.compile(arguments(bound, tensors, dout, made))

    return chosen_or_none(plan, call.backward_plan, "dense", made, compile, "its backward pass")


def run(
    bound: HopperBound, tensors: Tensors, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, call: Call
) -> Tensors:
    """(dq, dk, dv), contiguous; tensors: q, k, v, out; dlse like lse or None."""
    made = scratch(bound, tensors, tensors[0].device)
    bound.statistics(statistics_arguments(bound, tensors, dout, lse, dlse, made))
    bound.main(arguments(bound, tensors, dout, made))
    return made[4:]


def scratch(bound: HopperBound, tensors: Tensors, device: Any) -> Tensors:
    """Statistics, progress, rooms for dS, sums between stripes; then dq, dk and dv."""
    rows, counters, kept, sums = bound.sizes
    return (
        torch.empty(rows * STATISTICS, dtype=torch.float32, device=device),
        torch.empty(counters, dtype=torch.int32, device=device),
        torch.empty(kept, UNIT, dtype=tensors[0].dtype, device=device),
        torch.empty(max(1, sums), dtype=torch.float32, device=device),
        *(torch.empty(t.shape, dtype=t.dtype, device=device) for t in tensors[:3]),
    )


def arguments(bound: HopperBound, tensors: Tensors, dout: torch.Tensor, made: Tensors) -> tuple[Any, ...]:
    """The kernel's run-time arguments, in order."""
    q, k, v = tensors[:3]
    statistics, progress, kept, sums, *gradients = made
    sides = (box.over(t) for box, t in zip(bound.boxes, (q, dout, k, v), strict=True))
    return (
        *sides, bound.statistics_box.over(statistics), bound.kept_box.over(kept), *gradients, sums, progress, *bound.tail,
    )  # fmt: skip


# ---------------------------------------------------------------- the first time


def bound_launches(
    scale: float, tensors: Tensors, dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan"
) -> HopperBound:
    """Launches, scalars, strides and descriptors of this call under this plan; tensors: q, k, v, out."""
    from ...plan import attention_backward_hopper as rules

    q, k, v, out = tensors
    n, at_once = plan.problem, (plan.heads_at_once, plan.keys_at_once)
    q_units, _ = rules.tiles(n)
    rows = n.batch * n.heads * q_units + 1
    counters = 1 + 2 * rules.batches_of(n, *at_once)
    kept = rules.kept_bytes(n, plan.device, *at_once) // (UNIT * q.element_size())
    sizes = rows, counters, kept, rules.partial_bytes(n, plan.device, plan.keys_at_once) // 4
    return HopperBound(
        plan,
        *statistics_launch(n, out, dout, call.layout, 1, q_units, counters, (0, 0)),
        *main_launch(plan, scale, tensors, call, sizes),
        side_boxes(q, dout, k, v, call.layout),
        statistics_box(rows),
        kept_box(kept, q.dtype),
        sizes,
    )


def main_launch(
    plan: "AttentionBackwardPlan",
    scale: float,
    tensors: Tensors,
    call: Call,
    sizes: tuple[int, int, int, int],
    span: tuple[int, int] | tuple[None, None] = (None, None),
    striped: bool = False,
) -> tuple[Any, tuple[Any, ...]]:
    """The launch, and its scalars and strides.

    tensors: of the shapes of the gradients.  span: of a launch for some of the queries, as the kernel has it: rows of dk and dv
    that are written already, tiles of a head.  striped: as if there were several stripes."""
    from ...plan import attention_backward_hopper as rules
    from ..launch import Launch

    n, device = plan.problem, plan.device
    heads, keys = plan.heads_at_once, plan.keys_at_once
    (q_units, kv_units), stripe_units = rules.tiles(n), keys // UNIT
    stripes = -(-kv_units // stripe_units)
    batches = rules.batches_of(n, heads, keys)
    window = n.sides
    kernel, constants, registers = _kernel(plan)
    constants |= {"KIND": kind_of(window), "STRIPED": striped or stripes > 1}
    options = {"num_warps": plan.keys.num_warps, "maxnreg": registers}
    items = batches * (heads * stripe_units + rules.query_items(n, device, heads))
    launch = Launch(kernel, (items, 1, 1), constants, options, tensors[0].device.index or 0)
    sides = (UNBOUNDED if side < 0 else side for side in window)
    width = rules.line_width(n, keys)
    order = heads, batches, rules.delay(n, device, heads, keys), rules.rooms(n, device, heads, keys)
    strides = (s for t in tensors[:3] for s in head_strides(torch.empty(t.shape, device="meta"), call.layout))
    return launch, (
        scale, n.seq_q, n.seq_k, n.heads, n.group, q_units, kv_units, *sides, stripe_units, stripes, width, *order,
        sizes[0] - 1, sizes[2], *strides, *span,
    )  # fmt: skip


def _kernel(plan: "AttentionBackwardPlan") -> tuple[Any, dict[str, Any], int]:
    """The kernel of the problem's width, its constants, and how many registers a thread has at launch."""
    from ...plan import attention_backward_hopper as rules
    from ...plan.hopper import PRODUCER_REGISTERS
    from ...plan.hopper_backward import REGISTERS, WIDE, WIDE_REGISTERS

    n, width = plan.problem, rules.width_of(plan.problem)
    constants: dict[str, Any] = {
        "D": width,
        "COLUMNS_QK": None if n.dim_qk == width else n.dim_qk,
        "COLUMNS_V": None if n.dim_v == width else n.dim_v,
        "SLOTS": plan.keys.num_stages,
        "FENCE": width in FENCED,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    if width == WIDE:
        from ...kernels.hopper.attention_backward_wide import attention_backward_hopper_wide

        return attention_backward_hopper_wide, constants | {"CONSUMER_REGISTERS": WIDE_REGISTERS[1]}, WIDE_REGISTERS[0]
    from ...kernels.hopper.attention_backward import attention_backward_hopper

    constants |= {"SUM_TILES": rules.sum_tiles(n, plan.device), "HOLD": width in HOLDING}
    return attention_backward_hopper, constants, REGISTERS


# ---------------------------------------------------------------- without a GPU


def example_launch(
    problem: "AttentionProblem", plan: "AttentionPlan", backward_plan: "AttentionBackwardPlan", part: str
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of a part of the backward pass of a call that has these plans, on tensors without memory, to compile
    ahead: "statistics" or "main"."""
    inputs, call, _, out, lse = example_call(problem, plan)
    tensors = (*inputs, out)
    bound = bound_launches(1.0, tensors, out, call, backward_plan)
    made = scratch(bound, tensors, "meta")
    launch, args = {
        "statistics": (bound.statistics, (out, out, lse, lse, None, *made[:2], *bound.statistics_tail)),
        "main": (bound.main, arguments(bound, tensors, out, made)),
    }[part]
    return launch.fn, args, launch.keywords
