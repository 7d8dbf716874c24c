"""Binding of the Gluon kernel that makes the gradients of packed sequences on sm_90: scratch, descriptors, launches."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..call import UNBOUNDED, Call, window_of
from ..dense.attention import example_call
from ..dense.attention_parts import head_strides, kind_of
from ..hopper import chosen_or_none
from .attention_backward_hopper import FENCED, HOLDING
from .hopper_backward import STATISTICS, UNIT, kept_box, side_boxes, statistics_box

if TYPE_CHECKING:
    from ...plan.attention import AttentionPlan
    from ...plan.attention_backward import AttentionBackwardPlan
    from ...plan.attention_backward_packed import Order
    from ...plan.problem import AttentionProblem
    from ..launch import Box

__all__ = ["PackedBound", "bind", "bound_launches", "example_launch", "run"]

ENTRY = 12  # int32 numbers of a piece of work
CHUNK = 128  # of them that one program writes
Tensors = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class PackedBound:
    """The two launches of a backward pass, each with the arguments that do not change from call to call."""

    plan: "AttentionBackwardPlan"
    prepare: Any
    prepare_tail: tuple[int, ...]
    main: Any
    tail: tuple[Any, ...]
    boxes: "tuple[Box, ...]"  # of q, dout, k, v
    statistics_box: "Box"
    kept_box: "Box"
    sizes: tuple[int, int, int, int]  # rows of statistics, counters, pieces of work, rows of dS


def bind(
    scale: float, tensors: Tensors, dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan"
) -> PackedBound | None:
    """The bound launches; None, after a warning, if this Triton cannot make them, or an error if the caller chose the plan.

    tensors: q, k, v, out."""

    def made() -> PackedBound:
        return bound_launches(scale, tensors, dout, call, plan)

    def compile(bound: PackedBound) -> None:
        bound.main.compile(arguments(bound, tensors, dout, scratch(bound, tensors, "meta")))

    return chosen_or_none(plan, call.backward_plan, "dense", made, compile, "its backward pass of packed sequences")


def run(
    bound: PackedBound, tensors: Tensors, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, call: Call
) -> Tensors:
    """(dq, dk, dv), contiguous; tensors: q, k, v, out; dlse like lse or None."""
    made = scratch(bound, tensors, tensors[0].device)
    bound.prepare(prepare_arguments(bound, tensors, dout, lse, dlse, call, made))
    bound.main(arguments(bound, tensors, dout, made))
    return made[4:]


def scratch(bound: PackedBound, tensors: Tensors, device: Any) -> Tensors:
    """Statistics, progress, the order of the work, lines for dS; then dq, dk and dv."""
    rows, counters, pieces, kept = bound.sizes
    return (
        torch.empty(rows * STATISTICS, dtype=torch.float32, device=device),
        torch.empty(counters, dtype=torch.int32, device=device),
        torch.empty(pieces * ENTRY, dtype=torch.int32, device=device),
        torch.empty(kept, UNIT, dtype=tensors[0].dtype, device=device),
        *(torch.empty(t.shape, dtype=t.dtype, device=device) for t in tensors[:3]),
    )


def prepare_arguments(
    bound: PackedBound,
    tensors: Tensors,
    dout: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    call: Call,
    made: Tensors,
) -> tuple[Any, ...]:
    """The run-time arguments of the kernel that comes first, in order."""
    assert call.packed is not None
    statistics, progress, entries, _, *gradients = made
    offsets = call.packed[:2]
    return tensors[3], dout, lse, dlse, *offsets, *gradients, statistics, progress, entries, *bound.prepare_tail


def arguments(bound: PackedBound, tensors: Tensors, dout: torch.Tensor, made: Tensors) -> tuple[Any, ...]:
    """The main kernel's run-time arguments, in order."""
    q, k, v = tensors[:3]
    statistics, progress, entries, kept, *gradients = made
    sides = (box.over(t) for box, t in zip(bound.boxes, (q, dout, k, v), strict=True))
    boxes = bound.statistics_box.over(statistics), bound.kept_box.over(kept)
    return (*sides, *boxes, *gradients, entries, progress, *bound.tail)


# ---------------------------------------------------------------- the first time


def bound_launches(
    scale: float, tensors: Tensors, dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan"
) -> PackedBound:
    """Launches, scalars, strides and descriptors of this call under this plan; tensors: q, k, v, out."""
    from ...plan.attention_backward_packed import order_of

    q, k, v, out = tensors
    n = plan.problem
    order = order_of(n, plan.device, plan.keys_at_once, q.shape[0], k.shape[0])
    rows, kept = n.heads * order.q_places + 1, order.lines * n.group * order.width * UNIT
    sizes = rows, 1 + 2 * order.blocks, order.keys + order.queries, kept
    q4, dout4, k4, v4 = (t.unsqueeze(0) for t in (q, dout, k, v))  # one sequence to the copy engine
    strides = tuple(s for t in tensors[:3] for s in head_strides(torch.empty(t.shape, device="meta"), call.layout))
    return PackedBound(
        plan,
        *_prepare(plan, order, (q.shape[0], k.shape[0]), (out, dout), strides, sizes[1]),
        *_main(plan, order, scale, q, call, strides, kept),
        side_boxes(q4, dout4, k4, v4, call.layout),
        statistics_box(rows),
        kept_box(kept, q.dtype),
        sizes,
    )


def _prepare(
    plan: "AttentionBackwardPlan",
    order: "Order",
    totals: tuple[int, int],
    tensors: Tensors,
    strides: tuple[int, ...],
    counters: int,
) -> tuple[Any, tuple[int, ...]]:
    """The launch that comes first, its scalars and strides.  tensors: out, dout; strides: of the gradients."""
    from ...kernels.backward_packed import backward_packed
    from ..launch import Launch

    n, rows = plan.problem, order.together * UNIT
    out_strides, do_strides = (head_strides(t, "bshd") for t in tensors)
    constants = {
        "WIDE": max(out_strides[0], do_strides[0]) * UNIT >= 1 << 31,
        "DIM": n.dim_v,
        "BLOCK_D": n.block_v,
        "UNIT": UNIT,
        "ROWS": rows,
        "CHUNK": CHUNK,
    }
    programs = n.heads * order.q_places + 1
    programs += sum(-(-pieces // CHUNK) for pieces in (order.keys, order.queries)) + sum(-(-t // UNIT) for t in totals)
    launch = Launch(backward_packed, (programs, 1, 1), constants, {"num_warps": 4}, tensors[0].device.index or 0)
    return launch, (
        n.batch, (n.batch - 1).bit_length(), n.seq_q, n.seq_k, *totals, n.heads, n.kv_heads, order.keys, order.queries,
        order.longest, order.shift, order.lines, counters, *out_strides, *do_strides, *strides,
    )  # fmt: skip


def _main(
    plan: "AttentionBackwardPlan",
    order: "Order",
    scale: float,
    q: torch.Tensor,
    call: Call,
    strides: tuple[int, ...],
    kept: int,
) -> tuple[Any, tuple[Any, ...]]:
    """The launch, and its scalars and strides."""
    from ...kernels.hopper.attention_backward_packed import attention_backward_packed
    from ...plan.hopper import PRODUCER_REGISTERS
    from ...plan.hopper_backward import REGISTERS
    from ..launch import Launch

    n = plan.problem
    window = window_of(call.window, call.causal)
    constants = {
        "KIND": kind_of(window),
        "D": n.dim_qk,
        "SLOTS": plan.keys.num_stages,
        "SUM_TILES": order.together,
        "FENCE": n.dim_qk in FENCED,
        "HOLD": n.dim_qk in HOLDING,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    options = {"num_warps": plan.keys.num_warps, "maxnreg": REGISTERS}
    grid = order.keys + order.queries, 1, 1
    sides = (UNBOUNDED if side < 0 else side for side in window)
    launch = Launch(attention_backward_packed, grid, constants, options, q.device.index or 0)
    return launch, (
        scale, n.group, q.shape[0], order.q_places, *sides, order.lines, order.width, order.blocks, n.heads * order.q_places,
        kept, *strides,
    )  # fmt: skip


# ---------------------------------------------------------------- without a GPU


def example_launch(
    problem: "AttentionProblem", plan: "AttentionPlan", backward_plan: "AttentionBackwardPlan", part: str
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of a part of the backward pass of a call that has these plans, on tensors without memory, to compile
    ahead: "prepare" or "main"."""
    inputs, call, _, out, lse = example_call(problem, plan)
    tensors = (*inputs, out)
    bound = bound_launches(1.0, tensors, out, call, backward_plan)
    made = scratch(bound, tensors, "meta")
    launch, args = {
        "prepare": (bound.prepare, prepare_arguments(bound, tensors, out, lse, None, call, made)),
        "main": (bound.main, arguments(bound, tensors, out, made)),
    }[part]
    return launch.fn, args, launch.keywords
