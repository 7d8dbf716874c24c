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
GIVEN = ("Q", "K", "V", "Out", "Lse", "DOut", "DLse", "call", "turned", "Places", "edges", "sums", "Statistics", "Progress",
         "kept", "DQ", "DK", "DV")  # fmt: skip
"""What a call gives to the three kernels: its tensors, and what `scratch` makes."""
Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


class Spans(NamedTuple):
    """Of queries, where there are several."""

    number: int
    blocks: int  # query blocks of one
    sums: Scratch  # dk and dv between two


class HopperBound(NamedTuple):
    """The launches of a backward pass."""

    statistics: Bound
    places: Bound
    main: Bound
    buffers: tuple[Scratch, ...]  # statistics, what has been drawn and done, slots for dS; then dq, dk and dv
    spans: Spans | None

    def of_lengths(self, saved: Saved, dout: torch.Tensor, call: "Call") -> "HopperBound":
        """The launches of a call that differs in its lengths, which make the same tiles, over lists that lie alike."""
        values = values_of_lengths(saved[:4], dout, call)
        statistics, main = (one.with_values(values, None, (*saved, dout)) for one in (self.statistics, self.main))
        return HopperBound(statistics, self.places, main, (*self.buffers[:-3], *gradients_of(saved)), self.spans)


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
        kinds = [one.dtype for one in bound.buffers]
        places = stand_in(torch.int32)
        between = (None, None) if bound.spans is None else (places, stand_in(torch.float32))
        bound.main.compile((*saved, dout, None, call, transposed, places, *between, *map(stand_in, kinds)))

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
    return made[-3:]


def scratch(bound: HopperBound, transposed: "Lists", device: Any) -> tuple[Any, ...]:
    """Places, ends of spans in the transposed lists, sums between them, and then what `buffers` says."""
    turned = transposed.indices
    places = torch.empty_strided(turned.shape, turned.stride(), dtype=torch.int32, device=device)
    edges = sums = None
    if bound.spans is not None:
        edges, sums = span_edges(transposed, bound.spans), bound.spans.sums.made(device)
    return places, edges, sums, *[one.made(device) for one in bound.buffers]


def span_edges(transposed: "Lists", spans: Spans) -> torch.Tensor:
    """int32 [spans + 1, batch, heads, KV blocks]: how many entries of each transposed list come before each span."""
    indices, counts = transposed.indices, transposed.counts
    place = torch.arange(indices.shape[3], dtype=torch.int32, device=indices.device)
    ascending = torch.where(place < counts[..., None], indices, torch.iinfo(torch.int32).max)
    ends = torch.arange(spans.number + 1, dtype=torch.int32, device=indices.device) * spans.blocks
    found = torch.searchsorted(ascending, ends.expand(*counts.shape, -1).contiguous(), out_int32=True)
    return found.movedim(-1, 0).contiguous()


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
    at_once = heads, plan.queries_at_once
    q_units, kv_units = rules.units(problem)
    rows = n.batch * n.heads * q_units + 1
    kept_rows = rules.kept_bytes(problem, *at_once) // (UNIT * q.element_size())
    spans, segments = rules.spans(problem, plan.queries_at_once), rules.segments(problem, *at_once)
    counters = 1 + 2 * segments + rules.sum_tiles(problem, *at_once)
    items = rules.items(problem, *at_once)
    running = min(items, PROGRAMS_PER_SM * plan.device.sms)
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
        "span_blocks": rules.span_units(problem, plan.queries_at_once) // per,
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
        "batches": segments,
        "delay": rules.delay(problem, *at_once, running),
        "slots": rules.slots(problem, *at_once),
        "no_unit": rows - 1,
        "nowhere": kept_rows,
        **_span_values(plan, transposed, spans),
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
        Spans(spans, of_places["span_blocks"], Scratch((rules.sum_numbers(problem, *at_once),), torch.float32))
        if spans > 1
        else None,
    )


def _span_values(plan: "SparseBackwardPlan", transposed: "Lists", spans: int) -> dict[str, Any]:
    """Spans of queries by the kernel's names; None where there is one."""
    strides = "stride_es", "stride_eb", "stride_eh"
    if spans == 1:
        return dict.fromkeys(("Edges", "Sums", "spans", "span_tiles", *strides))
    batch, heads, blocks = transposed.counts.shape
    steps = batch * heads * blocks, heads * blocks * (batch > 1), blocks * (heads > 1)
    return {
        "Edges": Slot("edges"),
        "Sums": Slot("sums"),
        "spans": spans,
        "span_tiles": plan.queries_at_once // UNIT,
        **dict(zip(strides, steps, strict=True)),
    }


# ---------------------------------------------------------------- without a GPU


def example_launch(
    saved: Saved, dout: torch.Tensor, call: "Call", transposed: "Lists", plan: "SparseBackwardPlan", part: str
) -> Example:
    """(kernel, args, kwargs) of a part ("statistics", "places" or "main") on tensors without memory, to compile ahead."""
    bound = bound_launches(1.0, saved, dout, call, transposed, plan)
    made = scratch(bound, transposed, "meta")
    of_part: Bound = getattr(bound, part)
    return of_part.example((*saved, dout, saved[4], call, transposed, *made))
