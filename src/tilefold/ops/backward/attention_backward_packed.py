"""Binding of the Gluon kernel that makes the gradients of packed sequences on sm_90: scratch, descriptors, launches."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..bound import Bound, Slot, attribute
from ..call import Call, window_of
from ..dense.attention_parts import kind_of, lengths_of, sides_named
from .attention_backward_hopper import HOLDING
from .hopper_backward import (
    SIDES,
    STATISTICS,
    UNIT,
    GluonBound,
    Scratch,
    boxed_sides,
    columns_of,
    gradients_of,
    kept_box,
    packed_strides,
    panels_of,
    softcap_kind,
    statistics_box,
    values_of_lengths,
)

if TYPE_CHECKING:
    from ...plan.backward.attention_backward import AttentionBackwardPlan
    from ...plan.backward.attention_backward_packed import Order

ENTRY = 12  # int32 numbers of a piece of work
CHUNK = 128  # of them that one program writes
GIVEN = (*SIDES, "Statistics", "Progress", "Entries", "kept", "DQ", "DK", "DV")
"""What a call gives to the launches: scratch is statistics, progress, the order of the work, lines for dS."""
Tensors = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class PackedBound(GluonBound):
    """The launches of a backward pass; together: tiles of queries of an item for dq."""

    together: int = 1

    def of_lengths(self, tensors: Tensors, dout: torch.Tensor, call: Call) -> "PackedBound | None":
        """The launches of a call of other tokens; None where items for dq have another number of tiles."""
        order = _order_of(self.plan, tensors)
        if order.together != self.together:
            return None
        values = values_of_lengths(tensors, dout, call) | _values(self.plan, order, tensors[0].dtype)
        given = (*tensors, dout)
        first = self.first.with_values(values, _first_grid(self.plan, order, tensors), given)
        main = self.main.with_values(values, _main_grid(order), given)
        return PackedBound(self.plan, _buffers(self.plan, order, tensors), first, main, together=order.together)


def bound_launches(
    scale: float, tensors: Tensors, dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan"
) -> PackedBound:
    """The launches of this call under this plan; tensors: q, k, v, out."""
    q, k, v, _ = tensors
    n, order = plan.problem, _order_of(plan, tensors)
    values = {
        **lengths_of(n),
        **boxed_sides((q, dout, k, v), call.layout),
        **values_of_lengths(tensors, dout, call),
        **_values(plan, order, q.dtype),
        "CuQ": attribute("call", "source.cu_q", call.packed),
        "CuK": attribute("call", "source.cu_k", call.packed),
        "scale": scale,
        "steps": (n.batch - 1).bit_length(),
        **sides_named(window_of(call.window, call.causal)),
        **packed_strides(g=q.shape, x=k.shape, y=v.shape),
        **columns_of(n),
        "cap": float(call.softcap) or None,
    }
    first = _prepare(plan, order, tensors, dout, values)
    main = _main(plan, order, call, values, q.device)
    return PackedBound(plan, _buffers(plan, order, tensors), first, main, together=order.together)


def _order_of(plan: "AttentionBackwardPlan", tensors: Tensors) -> "Order":
    from ...plan.backward.attention_backward_packed import order_of

    return order_of(plan.problem, plan.device, plan.keys_at_once, tensors[0].shape[0], tensors[1].shape[0])


def _sizes(plan: "AttentionBackwardPlan", order: "Order") -> tuple[int, int, int]:
    """Rows of statistics, counters, rows of dS."""
    n = plan.problem
    return n.heads * order.q_places + 1, 1 + 2 * order.blocks, order.slots * n.group * order.width * UNIT


def _values(plan: "AttentionBackwardPlan", order: "Order", dtype: torch.dtype) -> dict[str, Any]:
    """Values that differ with the order of the work."""
    rows, counters, kept = _sizes(plan, order)
    return {
        "stat_desc": Slot("Statistics", statistics_box(rows).over),
        "ds_desc": Slot("kept", kept_box(kept, dtype).over),
        "q_places": order.q_places,
        "all_keys": order.keys,
        "all_queries": order.queries,
        "longest": order.longest,
        "shift": order.shift,
        "slots": order.slots,
        "width": order.width,
        "segments": order.blocks,
        "counters": counters,
        "no_tile": rows - 1,
        "nowhere": kept,
    }


def _buffers(plan: "AttentionBackwardPlan", order: "Order", tensors: Tensors) -> tuple[Scratch, ...]:
    rows, counters, kept = _sizes(plan, order)
    return (
        Scratch((rows * STATISTICS,), torch.float32),
        Scratch((counters,), torch.int32),
        Scratch(((order.keys + order.queries) * ENTRY,), torch.int32),
        Scratch((kept, UNIT), tensors[0].dtype),
        *gradients_of(tensors),
    )


def _first_grid(plan: "AttentionBackwardPlan", order: "Order", tensors: Tensors) -> tuple[int, int, int]:
    programs = plan.problem.heads * order.q_places + 1
    programs += sum(-(-pieces // CHUNK) for pieces in (order.keys, order.queries))
    return programs + sum(-(-t.shape[0] // UNIT) for t in tensors[:2]), 1, 1


def _main_grid(order: "Order") -> tuple[int, int, int]:
    return order.keys + order.queries, 1, 1


def _prepare(
    plan: "AttentionBackwardPlan", order: "Order", tensors: Tensors, dout: torch.Tensor, values: dict[str, Any]
) -> Bound:
    """The launch that comes first."""
    from ...kernels.backward.backward_packed import backward_packed

    n, out = plan.problem, tensors[3]
    constants = {
        "WIDE": max(out.stride(0), dout.stride(0)) * UNIT >= 1 << 31,
        "DIM_QK": n.dim_qk,
        "DIM": n.dim_v,
        "BLOCK_D": max(n.block_qk, n.block_v),
        "UNIT": UNIT,
        "ROWS": order.together * UNIT,
        "CHUNK": CHUNK,
    }
    return Bound.of(backward_packed, _first_grid(plan, order, tensors), GIVEN, values, constants, out.device)


def _main(
    plan: "AttentionBackwardPlan", order: "Order", call: Call, values: dict[str, Any], device: torch.device
) -> Bound:
    """The launch that makes the gradients."""
    from ...kernels.hopper.attention_backward_packed import attention_backward_packed
    from ...plan.backward.attention_backward_hopper import width_of
    from ...plan.backward.kept_backward import NARROW, REGISTERS, WIDE_REGISTERS
    from ...plan.hopper import PRODUCER_REGISTERS

    n, width = plan.problem, width_of(plan.problem)
    wide = width > NARROW
    constants = {
        "KIND": kind_of(window_of(call.window, call.causal)),
        "D": width,
        **panels_of(n),
        "SLOTS": plan.keys.num_stages,
        "QUERY_TILES": order.together,
        "HOLD": width in HOLDING,
        "SOFTCAP": softcap_kind(n),
        "CONSUMERS": 2 if wide else 1,
        "CONSUMER_REGISTERS": WIDE_REGISTERS[1] if wide else 0,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    options = {"num_warps": plan.keys.num_warps, "maxnreg": WIDE_REGISTERS[0] if wide else REGISTERS}
    return Bound.of(attention_backward_packed, _main_grid(order), GIVEN, values, constants, device, **options)
