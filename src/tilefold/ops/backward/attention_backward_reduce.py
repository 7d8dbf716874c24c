"""Binding of the Gluon kernel for sm_90 that adds dq in memory: statistics, zeroed sums, the kernel, and the sums' last step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..call import UNBOUNDED, Call, window_of
from ..dense.attention import example_call
from ..dense.attention_parts import head_strides, kind_of
from ..first_call import in_background
from ..hopper import box_of, chosen_or_none
from .hopper_backward import statistics_arguments, statistics_box, statistics_launch

if TYPE_CHECKING:
    from ...plan.attention import AttentionPlan
    from ...plan.attention_backward import AttentionBackwardPlan
    from ...plan.problem import AttentionProblem
    from ..launch import Box

__all__ = ["ReduceBound", "bind", "bound_launches", "example_launch", "run"]

Tensors = tuple[torch.Tensor, ...]
SUM_BOX = [128, 32]  # fp32 of a warpgroup's part of a tile of dq


@dataclass(slots=True)
class ReduceBound:
    """The three launches of a backward pass, each with the arguments that do not change from call to call."""

    plan: "AttentionBackwardPlan"
    statistics: Any
    statistics_tail: tuple[int, ...]
    main: Any
    tail: tuple[Any, ...]
    last: Any
    last_tail: tuple[Any, ...]
    boxes: "tuple[Box, ...]"  # of q, dout, k, v
    statistics_box: "Box"
    sum_box: "Box"
    sizes: tuple[int, int]  # rows of statistics and of sums, queries of a row


def bind(
    scale: float, tensors: Tensors, dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan"
) -> ReduceBound | None:
    """The bound launches; None, after a warning, if this Triton cannot make them, or an error if the caller chose the plan.

    tensors: q, k, v, out."""

    def made() -> ReduceBound:
        return bound_launches(scale, tensors, dout, call, plan)

    def compile(bound: ReduceBound) -> None:
        made = scratch(bound, tensors, "meta")
        lse = torch.empty(made[0].shape, device="meta")
        small = statistics_arguments(bound, tensors, dout, lse, None, made)
        in_background(lambda: bound.statistics.compile(small))  # while the other one takes longer
        bound.main.compile(arguments(bound, tensors, dout, made))

    return chosen_or_none(plan, call.backward_plan, "dense", made, compile, "its backward pass")


def run(
    bound: ReduceBound, tensors: Tensors, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, call: Call
) -> Tensors:
    """(dq, dk, dv), contiguous; tensors: q, k, v, out; dlse like lse or None."""
    made = scratch(bound, tensors, tensors[0].device)
    bound.statistics(statistics_arguments(bound, tensors, dout, lse, dlse, made))
    bound.main(arguments(bound, tensors, dout, made))
    bound.last((made[2], made[3], *bound.last_tail))
    return made[3:]


def scratch(bound: ReduceBound, tensors: Tensors, device: Any) -> Tensors:
    """Statistics, progress (which this kernel has none of), zeroed sums of dq; then dq, dk and dv."""
    rows, queries = bound.sizes
    return (
        torch.empty(rows * 2 * queries, dtype=torch.float32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
        torch.zeros(rows * queries * tensors[0].shape[-1], dtype=torch.float32, device=device),
        *(torch.empty(t.shape, dtype=t.dtype, device=device) for t in tensors[:3]),
    )


def arguments(bound: ReduceBound, tensors: Tensors, dout: torch.Tensor, made: Tensors) -> tuple[Any, ...]:
    """The kernel's run-time arguments, in order."""
    q, k, v = tensors[:3]
    statistics, _, sums, _, dk, dv = made
    sides = (box.over(t) for box, t in zip(bound.boxes, (q, dout, k, v), strict=True))
    return *sides, bound.statistics_box.over(statistics), bound.sum_box.over(sums), sums, dk, dv, *bound.tail


# ---------------------------------------------------------------- the first time


def bound_launches(
    scale: float, tensors: Tensors, dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan"
) -> ReduceBound:
    """Launches, scalars, strides and descriptors of this call under this plan; tensors: q, k, v, out."""
    from ...kernels.backward_reduced import backward_reduced
    from ...plan import attention_backward_reduce as rules
    from ..launch import Launch

    q, k, v, out = tensors
    n, queries = plan.problem, rules.queries_of(plan.problem)
    rows, q_tiles = rules.rows(n), -(-n.seq_q // queries)
    grid = (rows - 1) * 2, 1, 1
    strides = head_strides(torch.empty(q.shape, device="meta"), call.layout)
    last = Launch(backward_reduced, grid, {"QUERIES": queries, "D": n.dim_qk}, {"num_warps": 4}, q.device.index or 0)
    sides = zip((q, dout, k, v), (queries, queries, rules.KEYS, rules.KEYS), strict=True)
    return ReduceBound(
        plan,
        *statistics_launch(n, out, dout, call.layout, 1, q_tiles, 1, (0, 0), queries),
        *_main(plan, scale, tensors, call, rows),
        last,
        (scale, n.seq_q, n.heads, q_tiles, *strides),
        tuple(box_of(t, call.layout, size) for t, size in sides),
        statistics_box(rows, 2 * queries),
        _sum_box(rows * queries * n.dim_qk),
        (rows, queries),
    )


def _sum_box(numbers: int) -> "Box":
    """Of the sums [.., 32], a warpgroup's part of a tile at a time."""
    from ...kernels.hopper.gluon import TensorDescriptor, gl
    from ..launch import Box

    t = torch.empty(numbers, dtype=torch.float32, device="meta")
    layout = gl.NVMMASharedLayout.get_default_for(SUM_BOX, gl.float32)
    return Box(t, [numbers // 32, 32], [32, 1], SUM_BOX, TensorDescriptor, layout)


def _main(
    plan: "AttentionBackwardPlan", scale: float, tensors: Tensors, call: Call, rows: int
) -> tuple[Any, tuple[Any, ...]]:
    """The launch, and its scalars and strides."""
    from ...kernels.hopper.attention_backward_reduce import attention_backward_reduce
    from ...plan import attention_backward_reduce as rules
    from ...plan.attention_backward_hopper import tiles
    from ...plan.hopper import PRODUCER_REGISTERS
    from ..launch import Launch

    n, options = plan.problem, plan.options
    assert options is not None  # of this kernel's plans
    window, queries = window_of(call.window, call.causal), rules.queries_of(n)
    constants = {
        "KIND": kind_of(window),
        "D": n.dim_qk,
        "QUERIES": queries,
        "SLOTS": plan.keys.num_stages,
        "SUM_SLOTS": options.sum_slots,
        "ORDER": rules.ORDERS.index(options.order),
        "STAGGER": options.stagger,
        "FENCE": options.fence,
        "ROUNDED": options.rounded,
        "CONSUMER_REGISTERS": rules.REGISTERS[1],
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    launch_options = {"num_warps": plan.keys.num_warps, "maxnreg": rules.REGISTERS[0]}
    grid = rules.programs(n), 1, 1
    launch = Launch(attention_backward_reduce, grid, constants, launch_options, tensors[0].device.index or 0)
    sides = (UNBOUNDED if side < 0 else side for side in window)
    strides = (s for t in tensors[1:3] for s in head_strides(torch.empty(t.shape, device="meta"), call.layout))
    return launch, (
        scale, n.seq_q, n.seq_k, n.heads, n.group, *tiles(n), -(-n.seq_q // queries), rules.blocks(n), *sides,
        plan.heads_at_once, rows - 1, *strides,
    )  # fmt: skip


# ---------------------------------------------------------------- without a GPU


def example_launch(
    problem: "AttentionProblem", plan: "AttentionPlan", backward_plan: "AttentionBackwardPlan", part: str
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of a part of the backward pass of a call that has these plans, on tensors without memory, to compile
    ahead: "statistics", "main" or "last"."""
    inputs, call, _, out, lse = example_call(problem, plan)
    tensors = (*inputs, out)
    bound = bound_launches(1.0, tensors, out, call, backward_plan)
    made = scratch(bound, tensors, "meta")
    launch, args = {
        "statistics": (bound.statistics, (out, out, lse, lse, None, *made[:2], *bound.statistics_tail)),
        "main": (bound.main, arguments(bound, tensors, out, made)),
        "last": (bound.last, (*made[2:4], *bound.last_tail)),
    }[part]
    return launch.fn, args, launch.keywords
