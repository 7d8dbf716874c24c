"""Binding of the Gluon kernel that makes the gradients of packed sequences on sm_90: scratch, descriptors, launches."""

from typing import TYPE_CHECKING

import torch

from ..bound import Bound, Slot, attribute
from ..call import UNBOUNDED, Call, window_of
from ..dense.attention_parts import kind_of
from .attention_backward_hopper import FENCED, HOLDING
from .hopper_backward import (
    SIDES,
    STATISTICS,
    UNIT,
    GluonBound,
    Scratch,
    gradients_of,
    kept_box,
    packed_strides,
    statistics_box,
    values_of_lengths,
)

if TYPE_CHECKING:
    from ...plan.backward.attention_backward import AttentionBackwardPlan
    from ...plan.backward.attention_backward_packed import Order
    from ..launch import Launch

ENTRY = 12  # int32 numbers of a piece of work
CHUNK = 128  # of them that one program writes
GIVEN = (*SIDES, "Statistics", "Progress", "Entries", "kept", "DQ", "DK", "DV")
"""What a call gives to the launches: scratch is statistics, progress, the order of the work, lines for dS."""
Tensors = tuple[torch.Tensor, ...]


def bound_launches(
    scale: float, tensors: Tensors, dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan"
) -> GluonBound:
    """The launches of this call under this plan; tensors: q, k, v, out."""
    from ...plan.backward.attention_backward_packed import order_of

    q, k, v, out = tensors
    n = plan.problem
    order = order_of(n, plan.device, plan.keys_at_once, q.shape[0], k.shape[0])
    rows, kept = n.heads * order.q_places + 1, order.slots * n.group * order.width * UNIT
    pieces, counters = order.keys + order.queries, 1 + 2 * order.blocks
    left, right = (UNBOUNDED if side < 0 else side for side in window_of(call.window, call.causal))
    values = {
        **values_of_lengths(tensors, dout, call),
        "stat_desc": Slot("Statistics", statistics_box(rows).over),
        "ds_desc": Slot("kept", kept_box(kept, q.dtype).over),
        "CuQ": attribute("call", "source.cu_q", call.packed),
        "CuK": attribute("call", "source.cu_k", call.packed),
        "scale": scale,
        "batch": n.batch,
        "steps": (n.batch - 1).bit_length(),
        "heads": n.heads,
        "kv_heads": n.kv_heads,
        "group": n.group,
        "q_places": order.q_places,
        "left": left,
        "right": right,
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
        **packed_strides(g=q.shape, x=k.shape, y=v.shape),
    }
    scratch = (
        Scratch((rows * STATISTICS,), torch.float32),
        Scratch((counters,), torch.int32),
        Scratch((pieces * ENTRY,), torch.int32),
        Scratch((kept, UNIT), q.dtype),
    )
    return GluonBound(
        plan,
        (*scratch, *gradients_of(tensors)),
        Bound(_prepare(plan, order, q, k, out, dout), GIVEN, values),
        Bound(_main(plan, order, call, q.device.index or 0), GIVEN, values),
    )


def _prepare(
    plan: "AttentionBackwardPlan",
    order: "Order",
    q: torch.Tensor,
    k: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
) -> "Launch":
    """The launch that comes first."""
    from ...kernels.backward.backward_packed import backward_packed
    from ..launch import Launch

    n = plan.problem
    constants = {
        "WIDE": max(out.stride(0), dout.stride(0)) * UNIT >= 1 << 31,
        "DIM": n.dim_v,
        "BLOCK_D": n.block_v,
        "UNIT": UNIT,
        "ROWS": order.together * UNIT,
        "CHUNK": CHUNK,
    }
    programs = n.heads * order.q_places + 1
    programs += sum(-(-pieces // CHUNK) for pieces in (order.keys, order.queries))
    programs += sum(-(-t.shape[0] // UNIT) for t in (q, k))
    return Launch(backward_packed, (programs, 1, 1), constants, {"num_warps": 4}, q.device.index or 0)


def _main(plan: "AttentionBackwardPlan", order: "Order", call: Call, device: int) -> "Launch":
    """The launch that makes the gradients."""
    from ...kernels.hopper.attention_backward_packed import attention_backward_packed
    from ...plan.backward.hopper_backward import REGISTERS
    from ...plan.hopper import PRODUCER_REGISTERS
    from ..launch import Launch

    n = plan.problem
    constants = {
        "KIND": kind_of(window_of(call.window, call.causal)),
        "D": n.dim_qk,
        "SLOTS": plan.keys.num_stages,
        "QUERY_TILES": order.together,
        "FENCE": n.dim_qk in FENCED,
        "HOLD": n.dim_qk in HOLDING,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    options = {"num_warps": plan.keys.num_warps, "maxnreg": REGISTERS}
    return Launch(attention_backward_packed, (order.keys + order.queries, 1, 1), constants, options, device)
