"""Binding of the Gluon kernel that makes the gradients of block-sparse attention on sm_90: scratch, descriptors, launches."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..backward.hopper_backward import (
    STATISTICS,
    UNIT,
    kept_box,
    side_boxes,
    statistics_box,
    statistics_launch,
)
from ..dense.attention_parts import head_strides
from ..hopper import chosen_or_none
from .sparse_parts import list_strides

if TYPE_CHECKING:
    from ...plan.sparse_backward import SparseBackwardPlan
    from ..launch import Box
    from .sparse import Lists, SparseCall

__all__ = ["HopperBound", "bind", "example_launch", "run"]

ENTRIES = 128  # of a list, that one step of list_places looks up
Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class HopperBound:
    """The launches of a backward pass, each with the arguments that do not change from call to call."""

    plan: "SparseBackwardPlan"
    statistics: Any
    statistics_tail: tuple[int, ...]
    places: Any
    places_tail: tuple[int, ...]
    main: Any
    scalars: tuple[Any, ...]
    strides: tuple[int, ...]
    boxes: "tuple[Box, ...]"  # of q, dout, k, v
    statistics_box: "Box"
    kept_box: "Box"
    rows: int  # of the statistics
    kept_rows: int
    counters: int  # of what has been drawn and done


def bind(
    scale: float,
    saved: Saved,
    dout: torch.Tensor,
    call: "SparseCall",
    transposed: "Lists",
    plan: "SparseBackwardPlan",
) -> HopperBound | None:
    """The bound launches; None, after a warning, if this Triton cannot make them; if the caller chose the plan, the error."""

    def made() -> HopperBound:
        return bound_launches(scale, saved, dout, call, transposed, plan)

    def compile(bound: HopperBound) -> None:
        bound.main.compile(arguments(bound, saved, dout, call, transposed, scratch(bound, saved, transposed, "meta")))

    return chosen_or_none(plan, call.backward_plan, "block-sparse", made, compile, "its backward pass")


def run(
    bound: HopperBound,
    saved: Saved,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    call: "SparseCall",
    transposed: "Lists",
) -> Tensors:
    """(dq, dk, dv), contiguous."""
    q, _, _, out, lse = saved
    made = scratch(bound, saved, transposed, q.device)
    bound.statistics((out, dout, lse, dlse, call.lists.query_sizes, *made[:2], *bound.statistics_tail))
    bound.places((*call.lists[:2], *transposed[:2], made[2], *bound.places_tail))
    bound.main(arguments(bound, saved, dout, call, transposed, made))
    return made[4:]


def scratch(bound: HopperBound, saved: Saved, transposed: "Lists", device: Any) -> Tensors:
    """Statistics, progress, places, rooms for dS; then dq, dk and dv."""
    turned = transposed.indices
    return (
        torch.empty(bound.rows * STATISTICS, dtype=torch.float32, device=device),
        torch.empty(bound.counters, dtype=torch.int32, device=device),
        torch.empty_strided(turned.shape, turned.stride(), dtype=torch.int32, device=device),
        torch.empty(bound.kept_rows, UNIT, dtype=saved[0].dtype, device=device),
        *(torch.empty(t.shape, dtype=t.dtype, device=device) for t in saved[:3]),
    )


def arguments(
    bound: HopperBound,
    saved: Saved,
    dout: torch.Tensor,
    call: "SparseCall",
    transposed: "Lists",
    made: Tensors,
) -> tuple[Any, ...]:
    """The kernel's run-time arguments, in order; counts stand for sizes that there are none of, and are not read as such."""
    statistics, progress, places, kept, *gradients = made
    q, k, v = saved[:3]
    lists = call.lists
    sizes = (lists.counts if t is None else t for t in (lists.block_sizes, lists.query_sizes))
    sides = (box.over(t) for box, t in zip(bound.boxes, (q, dout, k, v), strict=True))
    turned = (*lists[:2], *transposed[:2], places)
    return (
        *sides, bound.statistics_box.over(statistics), bound.kept_box.over(kept), *gradients, *turned, *sizes, progress,
        *bound.scalars, *bound.strides,
    )  # fmt: skip


# ---------------------------------------------------------------- the first time


def bound_launches(
    scale: float,
    saved: Saved,
    dout: torch.Tensor,
    call: "SparseCall",
    transposed: "Lists",
    plan: "SparseBackwardPlan",
) -> HopperBound:
    """Launches, scalars, strides and descriptors of this call under this plan."""
    from ...plan import sparse_backward_hopper as rules

    q, k, v, out, _ = saved
    problem, n, lists = plan.problem, plan.problem.attention, call.lists
    q_units, _ = rules.units(problem)
    rows = n.batch * n.heads * q_units + 1
    total = rules.kept_bytes(problem, plan.heads_at_once) // (UNIT * q.element_size())
    counters = 1 + 2 * (n.batch * n.kv_heads // plan.heads_at_once)
    strides = [*list_strides(lists)]
    gradients = (s for t in (q, k, v) for s in head_strides(torch.empty(t.shape, device="meta"), call.layout))
    per = problem.block_q // UNIT
    return HopperBound(
        plan,
        *statistics_launch(n, out, dout, call.layout, per, q_units, counters, list_strides(lists)[7:]),
        *_places(plan, lists, transposed, q.device.index or 0),
        *_main(plan, scale, total, rows - 1, lists.query_sizes is not None, q.device.index or 0),
        (*gradients, *strides[:5], *list_strides(transposed)[:5], *strides[5:]),
        side_boxes(q, dout, k, v, call.layout),
        statistics_box(rows),
        kept_box(total, q.dtype),
        rows,
        total,
        counters,
    )


def _main(
    plan: "SparseBackwardPlan", scale: float, total: int, no_unit: int, query_sizes: bool, device: int
) -> tuple[Any, tuple[Any, ...]]:
    """The launch, and its scalars."""
    from ...kernels.hopper.sparse_backward import sparse_backward_hopper
    from ...plan import sparse_backward_hopper as rules
    from ...plan.hopper import PRODUCER_REGISTERS
    from ...plan.hopper_backward import PROGRAMS_PER_SM, REGISTERS
    from ..launch import Launch

    problem, n = plan.problem, plan.problem.attention
    q_units, kv_units = rules.units(problem)
    constants = {
        "D": n.dim_qk,
        "SLOTS": plan.keys.num_stages,
        "Q_UNITS": problem.block_q // UNIT,
        "KV_UNITS": problem.block_k // UNIT,
        "MASKED": problem.masked or n.seq_k % problem.block_k != 0,
        "SIZED": problem.masked,
        "Q_SIZED": query_sizes,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    options = {"num_warps": plan.keys.num_warps, "maxnreg": REGISTERS}
    heads = plan.heads_at_once
    batches = n.batch * n.kv_heads // heads
    items = n.batch * n.kv_heads * (kv_units + n.group * q_units)
    places = min(items, PROGRAMS_PER_SM * plan.device.sms)
    launch = Launch(sparse_backward_hopper, (items, 1, 1), constants, options, device)
    order = heads, batches, rules.delay(problem, heads, places), rules.rooms(problem, heads)
    return launch, (
        scale,
        n.seq_q,
        n.seq_k,
        n.heads,
        n.group,
        q_units,
        kv_units,
        problem.capacity,
        *order,
        no_unit,
        total,
    )


def _places(plan: "SparseBackwardPlan", lists: "Lists", turned: "Lists", device: int) -> tuple[Any, tuple[int, ...]]:
    """One program a list: lists that heads or batch entries share are looked up once."""
    from ...kernels.list_places import list_places
    from ..launch import Launch

    batch, heads = (max(lists.indices.shape[d], lists.counts.shape[d]) for d in (0, 1))
    q_blocks, capacity = lists.indices.shape[2:]
    launch = Launch(list_places, (batch * heads * q_blocks, 1, 1), {"ENTRIES": ENTRIES}, {"num_warps": 4}, device)
    per_block = plan.problem.block_q // UNIT * capacity
    steps = turned.indices.shape[3].bit_length()
    return launch, (heads, q_blocks, per_block, steps, *list_strides(lists)[:5], *list_strides(turned)[:5])


# ---------------------------------------------------------------- without a GPU


def example_launch(
    saved: Saved, dout: torch.Tensor, call: "SparseCall", transposed: "Lists", plan: "SparseBackwardPlan", part: str
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of a part ("statistics", "places" or "main") on tensors without memory, to compile ahead."""
    bound = bound_launches(1.0, saved, dout, call, transposed, plan)
    made = scratch(bound, saved, transposed, "meta")
    launch, args = {
        "statistics": (
            bound.statistics,
            (saved[3], dout, saved[4], saved[4], call.lists.query_sizes, *made[:2], *bound.statistics_tail),
        ),
        "places": (bound.places, (*call.lists[:2], *transposed[:2], made[2], *bound.places_tail)),
        "main": (bound.main, arguments(bound, saved, dout, call, transposed, made)),
    }[part]
    return launch.fn, args, launch.keywords
