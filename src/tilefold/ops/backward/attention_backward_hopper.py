"""Binding of the Gluon kernel that makes the gradients of dense attention on sm_90: scratch, descriptors, launches."""

from typing import TYPE_CHECKING, Any

import torch

from ..bound import Bound, Slot
from ..call import Call
from ..dense.attention_parts import kind_of, lengths_of, sides_named
from .backward_parts import side_strides
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
    panels_of,
    softcap_kind,
    statistics_bound,
    statistics_box,
)

if TYPE_CHECKING:
    from ...plan.backward.attention_backward import AttentionBackwardPlan

HOLDING = (64,)  # widths of which K and V have room in registers
GIVEN = (*SIDES, "Statistics", "Progress", "kept", "Partial", "DQ", "DK", "DV")
"""What a call gives to the launches: scratch is statistics, progress, the ring of dS, sums between KV splits."""
WHOLE = (*SIDES, "Statistics", "Progress", "kept", "DQ", "DK", "DV")
"""The same where there are no splits: statistics stand for sums, and are not read as such."""
Tensors = tuple[torch.Tensor, ...]
Sizes = tuple[int, int, int, int]  # rows of statistics, counters, rows of dS, fp32 numbers of sums between KV splits


def bound_launches(
    scale: float, tensors: Tensors, dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan"
) -> GluonBound:
    """The launches of this call under this plan; tensors: q, k, v, out."""
    from ...plan.backward import attention_backward_hopper as rules

    q, k, v, out = tensors
    n, at_once = plan.problem, (plan.heads_at_once, plan.keys_at_once)
    q_units, _ = rules.tiles(n)
    rows = n.batch * n.heads * q_units + 1
    counters = 1 + 2 * rules.batches_of(n, *at_once)
    kept = rules.kept_bytes(n, plan.device, *at_once) // (UNIT * q.element_size())
    sizes = rows, counters, kept, rules.partial_bytes(n, plan.device, plan.keys_at_once) // 4
    given, scratch = (GIVEN, scratch_of(sizes, q.dtype)) if sizes[3] else (WHOLE, scratch_of(sizes, q.dtype)[:3])
    return GluonBound(
        plan,
        (*scratch, *gradients_of(tensors)),
        statistics_bound(n, out, dout, call.layout, q_units, counters, given),
        main_bound(plan, scale, tensors, (q, dout, k, v), call, sizes, given=given),
    )


def scratch_of(sizes: Sizes, dtype: torch.dtype) -> tuple[Scratch, ...]:
    """The scratch of a backward pass."""
    rows, counters, kept, sums = sizes
    floats = torch.float32
    return (
        Scratch((rows * STATISTICS,), floats),
        Scratch((counters,), torch.int32),
        Scratch((kept, UNIT), dtype),
        Scratch((max(1, sums),), floats),
    )


def main_bound(
    plan: "AttentionBackwardPlan",
    scale: float,
    tensors: Tensors,
    sides: Tensors,
    call: Call,
    sizes: Sizes,
    span: tuple[int, int] | tuple[None, None] = (None, None),
    split: bool = False,
    given: tuple[str, ...] = GIVEN,
) -> Bound:
    """The kernel's launch.

    tensors: of the shapes of the gradients.  sides: q, dout, k and v as it reads them.  span: of a launch for some of the
    queries, as the kernel has it: rows of dk and dv that are written already, tiles of a head.  split: as if there were several
    splits.  given: what a call gives."""
    from ...plan.backward import attention_backward_hopper as rules

    n, device, (q, dout, k, v) = plan.problem, plan.device, sides
    heads, keys = plan.heads_at_once, plan.keys_at_once
    (q_units, kv_units), split_tiles = rules.tiles(n), keys // UNIT
    splits = -(-kv_units // split_tiles)
    batches = rules.batches_of(n, heads, keys)
    kernel, constants, registers = _kernel(plan)
    constants |= {"KIND": kind_of(n.sides), "SPLIT": split or splits > 1}
    items = batches * (heads * split_tiles + rules.query_items(n, device, heads))
    gradients = {letter: t.shape for letter, t in zip("gxy", tensors, strict=False)}
    values = {
        **boxed_sides((q, dout, k, v), call.layout),
        "stat_desc": Slot("Statistics", statistics_box(sizes[0]).over),
        "Partial": Slot("Partial" if "Partial" in given else "Statistics"),
        "ds_desc": Slot("kept", kept_box(sizes[2], tensors[0].dtype).over),
        "scale": scale,
        **lengths_of(n),
        "q_tiles": q_units,
        "kv_tiles": kv_units,
        **sides_named(n.sides),
        "split_tiles": split_tiles,
        "splits": splits,
        "width": rules.line_width(n, keys),
        "heads_at_once": heads,
        "segments": batches,
        "delay": rules.delay(n, device, heads, keys),
        "slots": rules.slots(n, device, heads, keys),
        "no_tile": sizes[0] - 1,
        "nowhere": sizes[2],
        **side_strides(call.layout, **gradients),
        "written": span[0],
        "stat_tiles": span[1],
        **columns_of(n),
        "cap": float(call.softcap) or None,
    }
    options = {"num_warps": plan.keys.num_warps, "maxnreg": registers}
    return Bound.of(kernel, items, given, values, constants, tensors[0].device, **options)


def _kernel(plan: "AttentionBackwardPlan") -> tuple[Any, dict[str, Any], int]:
    """The kernel of the problem's width, its constants, and how many registers a thread has at launch."""
    from ...plan.backward import attention_backward_hopper as rules
    from ...plan.backward.kept_backward import NARROW, REGISTERS, WIDE_REGISTERS
    from ...plan.hopper import PRODUCER_REGISTERS

    n, width = plan.problem, rules.width_of(plan.problem)
    constants: dict[str, Any] = {
        "D": width,
        "SLOTS": plan.keys.num_stages,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    if width > NARROW:
        from ...kernels.hopper.attention_backward_wide import attention_backward_hopper_wide

        tiles = rules.sum_tiles(n, plan.device)
        constants |= {**panels_of(n), "QUERY_TILES": tiles, "SOFTCAP": softcap_kind(n)}
        constants["CONSUMER_REGISTERS"] = WIDE_REGISTERS[1]
        return attention_backward_hopper_wide, constants, WIDE_REGISTERS[0]
    from ...kernels.hopper.attention_backward import attention_backward_hopper

    constants |= {
        "COLUMNS_QK": None if n.dim_qk == width else n.dim_qk,
        "COLUMNS_V": None if n.dim_v == width else n.dim_v,
        "QUERY_TILES": rules.sum_tiles(n, plan.device),
        "HOLD": width in HOLDING,
    }
    return attention_backward_hopper, constants, REGISTERS
