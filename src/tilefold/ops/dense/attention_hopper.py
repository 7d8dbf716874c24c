"""Binding of the Gluon kernel for dense attention on sm_90."""

from typing import TYPE_CHECKING, Any

import torch

from ..call import UNBOUNDED, Call
from ..hopper import box_of, require, tickets
from .attention_parts import Prepared, head_strides, hooks_of, kind_of
from .attention_tiles import bytes_of, steps_of, tile_box, tiles_of

if TYPE_CHECKING:
    from ...plan import AttentionPlan
    from ..launch import Box

__all__ = ["arguments", "bind", "compile"]


def bind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    window: tuple[int, int],
    scale: float,
    plan: "AttentionPlan",
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> Prepared:
    """Kernel, descriptors, run-time scalars and compile-time constants of this call; Unsupported without Gluon."""
    from ...device import mods
    from ...plan import attention_hopper as rules
    from ..launch import Launch

    require("plan.kernel", plan.kernel)
    from ...kernels.hopper.attention_forward import attention_forward_hopper

    n = plan.problem
    pack = rules.packed_heads(n, plan.options)
    blocks, items = -(-n.seq_q * pack // plan.block_m), plan.grid[0]
    if call.packed is not None:  # places of all sequences: kernels.hopper.forward_work.sequence_of_place
        blocks = q.shape[0] // plan.block_m + n.batch
        items = blocks * n.heads
    sides = (UNBOUNDED if side < 0 else side for side in window)
    strides = head_strides(torch.empty(shapes[0], device="meta"), call.layout)
    if call.packed is not None:
        strides = 0, *strides
    # the arguments that not every call has are the same each time
    plain = all(t is None for t in (call.sinks, call.packed, call.bias, call.mask, call.alibi_slopes))
    grid = min(rules.hopper_programs(n, plan.tile, plan.device), items), 1, 1
    constants = {"KIND": kind_of(window), **_constants(plan), **_tile_constants(call)}
    options = {"num_warps": plan.num_warps, "maxnreg": rules.REGISTERS[rules.consumers_of(plan.tile)][0]}
    return Prepared(
        planned=plan,
        out_shape=shapes[0],
        lse_shape=shapes[1],
        scalars=(scale, n.seq_q, n.seq_k, n.heads // pack, n.group // pack, blocks, items, *sides),
        strides=strides,
        extras=(None, None, float(call.softcap) or None, *(None,) * 13) if plain else (),
        softcap=float(call.softcap),
        boxes=(*_boxes(q, k, v, call, plan, pack), *_tile_boxes(call, plan)),
        plain=plain,
        launch=Launch(attention_forward_hopper, grid, constants, options, q.device.index or 0),
        mods=mods,
        keep=hooks_of(call),
    )


def _constants(plan: "AttentionPlan") -> dict[str, Any]:
    """What the plan's tile and versions make of the kernel."""
    from ...plan import attention_hopper as rules
    from ...plan.hopper import PRODUCER_REGISTERS

    n, consumers = plan.problem, rules.consumers_of(plan.tile)
    softcap = 0 if "softcap" not in n.score_mods else 2 if "tanh" in plan.options else 1
    return {
        "DIM_QK": rules.width_of(n.dim_qk),
        "DIM_V": rules.width_of(n.dim_v),
        "COLUMNS": n.dim_v,
        "KEYS": plan.block_n,
        "SLOTS": plan.num_stages,
        "CONSUMERS": consumers,
        "PACK": rules.packed_heads(n, plan.options),
        "VARLEN": n.varlen,
        "SOFTCAP": softcap,
        **{option.upper(): option in plan.options for option in ("fence", "late", "turns", "skip", "lazy")},
        "POLYNOMIAL": rules.polynomial_of(plan.options),
        "CONSUMER_REGISTERS": rules.REGISTERS[consumers][1],
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }


def _tile_constants(call: Call) -> dict[str, Any]:
    """Rows and buffers of the tiles of the bias and the mask."""
    from ...plan.attention_hopper import MOD_SLOTS

    rows = {"": 0, "tiles": 64, "keys": 1}
    made: dict[str, Any] = {}
    for name, t in (("BIAS", call.bias), ("MASK", call.mask)):
        made |= {name: rows[tiles_of(t)], f"{name}_SLOTS": 0 if t is None else MOD_SLOTS[t.element_size()]}
    return made


def _tile_boxes(call: Call, plan: "AttentionPlan") -> "tuple[Box, ...]":
    """The descriptors of the bias and the mask, of those that are there."""
    return tuple(tile_box(t, plan.block_n) for t in (call.bias, call.mask) if t is not None)


def _boxes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, plan: "AttentionPlan", pack: int
) -> "tuple[Box, ...]":
    """The descriptors; a packed batch is one sequence to the copy engine."""
    from ...plan.attention_hopper import width_of

    made = []
    for t, rows, heads in ((q, 64, pack), (k, plan.block_n, 1), (v, plan.block_n, 1)):
        columns = 64 if width_of(t.shape[-1]) % 64 == 0 else 32
        made.append(box_of(t if call.packed is None else t.unsqueeze(0), call.layout, rows, columns, heads))
    return tuple(made)


def arguments(
    p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, call: Call
) -> tuple[Any, ...]:
    """The kernel's run-time arguments, in order; None for what the call does not have."""
    boxes = (box.over(t) for box, t in zip(p.boxes[:3], (q, k, v), strict=True))
    known = (*boxes, out, lse, tickets(q.device), *p.scalars, *p.strides, *p.extras)
    if p.plain:
        return known
    sinks, packed = call.sinks, call.packed
    sink: tuple[Any, ...] = (None, None) if sinks is None else (sinks, sinks.stride(0))
    batch = (None,) * 4 if packed is None else (packed.cu_q, packed.cu_k, packed.cu_q.shape[0] - 1, q.shape[0])
    return (*known, *sink, p.softcap or None, *batch, *_mod_arguments(p, call))


def _mod_arguments(p: Prepared, call: Call) -> tuple[Any, ...]:
    """Bias, mask and slopes, each with what leads to a batch entry and a head."""
    boxes, made = iter(p.boxes[3:]), []
    for t in (call.bias, call.mask):
        made += [None] * 3 if t is None else [next(boxes).over(bytes_of(t)), *steps_of(t)]
    slopes = call.alibi_slopes
    if slopes is None:
        return (*made, None, None, None)
    return (*made, slopes, slopes.stride(0) if slopes.dim() == 2 else 0, slopes.stride(-1))


def compile(p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
    """Compile the kernel for this call, without a result; what the compiler raises passes through."""
    out = torch.empty(p.out_shape, dtype=q.dtype, device="meta")
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device="meta")
    p.launch.compile(arguments(p, q, k, v, out, lse, call))
