"""Binding of the Gluon kernel that makes the gradients of block-sparse attention on sm_90: scratch, descriptors, launches."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..backward.backward_parts import side_strides
from ..backward.hopper_backward import (
    STATISTICS,
    UNIT,
    Scratch,
    boxed_sides,
    gradients_of,
    kept_box,
    statistics_bound,
    statistics_box,
    values_of_lengths,
)
from ..bound import Bound, Example, Slot, stand_in, strides_named
from ..dense.attention_parts import lengths_of
from ..hopper import chosen_or_none
from .sparse_parts import list_strides, list_values

if TYPE_CHECKING:
    from ...plan.sparse.sparse_backward import SparseBackwardPlan
    from ..call import Call
    from ..source import Lists

ENTRIES = 128  # of a list, that one step of list_places looks up
GIVEN = ("Q", "K", "V", "Out", "Lse", "DOut", "DLse", "call", "turned", "Places", "Statistics", "Progress", "kept", "DQ", "DK",
         "DV")  # fmt: skip
"""What a call gives to the three kernels: its tensors, and what `scratch` makes."""
Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


class HopperBound(NamedTuple):
    """The launches of a backward pass."""

    statistics: Bound
    places: Bound
    main: Bound
    buffers: tuple[Scratch, ...]  # statistics, what has been drawn and done, slots for dS; then dq, dk and dv

    def of_lengths(self, saved: Saved, dout: torch.Tensor, call: "Call") -> "HopperBound":
        """The launches of a call that differs in its lengths, which make the same tiles, over lists that lie alike."""
        values = values_of_lengths(saved[:4], dout, call)
        statistics, main = (one.with_values(values, None, (*saved, dout)) for one in (self.statistics, self.main))
        return HopperBound(statistics, self.places, main, (*self.buffers[:-3], *gradients_of(saved)))


def bind(
    scale: float,
    saved: Saved,
    dout: torch.Tensor,
    call: "Call",
    transposed: "Lists",
    plan: "SparseBackwardPlan",
) -> HopperBound | None:
    """The bound launches; None, after a warning, if this Triton cannot make them; if the caller chose the plan, the error."""

    def made() -> HopperBound:
        return bound_launches(scale, saved, dout, call, transposed, plan)

    def compile(bound: HopperBound) -> None:
        kinds = torch.int32, *[one.dtype for one in bound.buffers]
        bound.main.compile((*saved, dout, None, call, transposed, *map(stand_in, kinds)))

    return chosen_or_none(plan, call.backward_plan, "block-sparse", made, compile, "its backward pass")


def run(
    bound: HopperBound,
    saved: Saved,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    call: "Call",
    transposed: "Lists",
) -> Tensors:
    """(dq, dk, dv), contiguous."""
    made = scratch(bound, transposed, saved[0].device)
    given = (*saved, dout, dlse, call, transposed, *made)
    bound.statistics(given)
    bound.places(given)
    bound.main(given)
    return made[4:]


def scratch(bound: HopperBound, transposed: "Lists", device: Any) -> Tensors:
    """Places, and then what `buffers` says."""
    turned = transposed.indices
    places = torch.empty_strided(turned.shape, turned.stride(), dtype=torch.int32, device=device)
    return places, *[one.made(device) for one in bound.buffers]


# ---------------------------------------------------------------- the first time


def bound_launches(
    scale: float,
    saved: Saved,
    dout: torch.Tensor,
    call: "Call",
    transposed: "Lists",
    plan: "SparseBackwardPlan",
) -> HopperBound:
    """Launches and sizes of scratch of this call under this plan."""
    from ...kernels.hopper.sparse_backward import sparse_backward_hopper
    from ...kernels.sparse.list_places import list_places
    from ...plan.backward.kept_backward import PROGRAMS_PER_SM, REGISTERS
    from ...plan.hopper import PRODUCER_REGISTERS
    from ...plan.sparse import sparse_backward_hopper as rules

    q, k, v, out, _ = saved
    problem, n, layout = plan.problem, plan.problem.attention, call.layout
    per, heads = problem.block_q // UNIT, plan.heads_at_once
    q_units, kv_units = rules.units(problem)
    rows = n.batch * n.heads * q_units + 1
    kept_rows = rules.kept_bytes(problem, heads) // (UNIT * q.element_size())
    batches = n.batch * n.kv_heads // heads
    counters = 1 + 2 * batches
    items = n.batch * n.kv_heads * (kv_units + n.group * q_units)
    at_once = min(items, PROGRAMS_PER_SM * plan.device.sms)
    lists = {
        **list_values(call),
        "TurnedIndex": Slot("turned", lambda turned: turned.indices),
        "TurnedCount": Slot("turned", lambda turned: turned.counts),
        **strides_named("", list_strides(transposed)[:5], ("tb", "th", "tk", "ub", "uh")),
    }
    strides = side_strides(layout, o=out, d=dout, g=q.shape, x=k.shape, y=v.shape)

    # One program a list: lists that heads or batch entries share are looked up once.
    batch, list_heads = (max(call.lists.indices.shape[d], call.lists.counts.shape[d]) for d in (0, 1))
    q_blocks, capacity = call.lists.indices.shape[2:]
    of_places = {
        **lists,
        "heads": list_heads,
        "q_blocks": q_blocks,
        "per_block": per * capacity,
        "steps": transposed.indices.shape[3].bit_length(),
    }

    constants = {
        "D": n.dim_qk,
        "SLOTS": plan.keys.num_stages,
        "Q_UNITS": per,
        "KV_UNITS": problem.block_k // UNIT,
        "MASKED": problem.masked or n.seq_k % problem.block_k != 0,
        "SIZED": problem.masked,
        "Q_SIZED": call.lists.query_sizes is not None,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    options = {"num_warps": plan.keys.num_warps, "maxnreg": REGISTERS}
    of_main = {
        **lists,
        **strides,
        **boxed_sides((q, dout, k, v), layout),
        "stat_desc": Slot("Statistics", statistics_box(rows).over),
        "keep_desc": Slot("kept", kept_box(kept_rows, q.dtype).over),
        # counts stand for sizes that there are none of, and are not read as such
        **{name: lists[name] or lists["Count"] for name in ("Sizes", "QuerySizes")},
        "scale": scale,
        **lengths_of(n),
        "q_units": q_units,
        "kv_units": kv_units,
        "capacity": problem.capacity,
        "heads_at_once": heads,
        "batches": batches,
        "delay": rules.delay(problem, heads, at_once),
        "slots": rules.slots(problem, heads),
        "no_unit": rows - 1,
        "nowhere": kept_rows,
    }
    return HopperBound(
        statistics_bound(n, out, dout, layout, q_units, counters, GIVEN, lists, per),
        Bound.of(list_places, batch * list_heads * q_blocks, GIVEN, of_places, {"ENTRIES": ENTRIES}, q.device),
        Bound.of(sparse_backward_hopper, items, GIVEN, of_main, constants, q.device, **options),
        (
            Scratch((rows * STATISTICS,), torch.float32),
            Scratch((counters,), torch.int32),
            Scratch((kept_rows, UNIT), q.dtype),
            *gradients_of(saved),
        ),
    )


# ---------------------------------------------------------------- without a GPU


def example_launch(
    saved: Saved, dout: torch.Tensor, call: "Call", transposed: "Lists", plan: "SparseBackwardPlan", part: str
) -> Example:
    """(kernel, args, kwargs) of a part ("statistics", "places" or "main") on tensors without memory, to compile ahead."""
    bound = bound_launches(1.0, saved, dout, call, transposed, plan)
    made = scratch(bound, transposed, "meta")
    of_part: Bound = getattr(bound, part)
    return of_part.example((*saved, dout, saved[4], call, transposed, *made))
