"""Binding of the Gluon kernel for dense attention on sm_90."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...device import mods
from ...plan.dense import attention_hopper as rules
from ...plan.hopper import PRODUCER_REGISTERS, REGISTERS
from ..bound import Bound, Box, Prepared, Slot, attribute, stand_in, strides_named
from ..call import Call
from ..hopper import WORK_COUNTER, box_of, require
from ..integers import runtime_ints
from ..sparse.classify import TileLists
from .attention_parts import GIVEN, TENSORS, hooks_of, kind_of, mask_mods_of, option_values, sequence_strides
from .attention_tiles import bytes_of, steps_of, tile_box, tiles_of

if TYPE_CHECKING:
    from ...plan import AttentionPlan


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
    require("plan.kernel", plan.kernel)
    from ...kernels.hopper.attention_forward import attention_forward_hopper

    n = plan.problem
    values = values_of_lengths(q, call, plan, shapes[0], (n.seq_q, n.seq_k))
    grid = grid_of(plan, values["items"])
    values |= {
        **TENSORS,
        **_boxes(q, k, v, call, plan),
        "scale": scale,
        "heads": n.heads // rules.packed_heads(n, plan.options),
        "group": n.group // rules.packed_heads(n, plan.options),
        **option_values(call, window, mods, 0.0, q.dtype),
        **_user_mods(call, _lists_of(call, plan, window, q.device)),
        **_mod_values(call, plan),
        "Counter": WORK_COUNTER,
        "stride_sinks": None if call.sinks is None else call.sinks.stride(0),
        "cap": float(call.softcap) or None,
        "batch": None if call.packed is None else n.batch,
        "Sums": _sums(plan),
    }
    constants = {"KIND": kind_of(window), **_constants(plan), **_tile_constants(call)}
    options = {"num_warps": plan.num_warps, "maxnreg": REGISTERS[rules.warpgroups_of(n, plan.tile)][0]}
    bound = Bound.of(attention_forward_hopper, grid, GIVEN, values, constants, q.device, **options)
    return Prepared(plan, *shapes, bound, scale, hooks_of(call))


def grid_of(plan: "AttentionPlan", items: int) -> tuple[int, int, int]:
    """The programs that draw so many items."""
    return min(rules.hopper_programs(plan.problem, plan.tile, plan.device, plan.options), items), 1, 1


def values_of_lengths(
    q: torch.Tensor, call: Call, plan: "AttentionPlan", out_shape: tuple[int, ...], lengths: tuple[int, int]
) -> dict[str, Any]:
    """Numbers that differ with the lengths of a call; plan: of these, or of others that make the same tiles."""
    n = plan.problem
    pack = rules.packed_heads(n, plan.options)
    blocks, items = -(-lengths[0] * pack // plan.block_m), plan.grid[0]
    values: dict[str, Any] = {"seq_q": lengths[0], "seq_k": lengths[1], "total_q": None}
    if call.packed is not None:  # places of all sequences: kernels.hopper.scheduler.sequence_of_place
        blocks = q.shape[0] // plan.block_m + n.batch
        items = blocks * n.heads
        values["total_q"] = q.shape[0]
    values |= {
        "q_blocks": blocks,
        "items": items,
        **strides_named("o", sequence_strides(out_shape, call.layout), "bmh"),
    }
    return values


def _boxes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, plan: "AttentionPlan") -> dict[str, Slot]:
    """The descriptors of q, k and v."""
    pack, made = rules.packed_heads(plan.problem, plan.options), {}
    qk, wide = rules.widths_of(plan.problem)
    each = (("q", q, 64, pack, qk), ("k", k, plan.block_n, 1, qk), ("v", v, plan.block_n, 1, wide))
    for name, t, rows, heads, width in each:
        columns = 64 if width % 64 == 0 else 32
        made[f"{name}_desc"] = Slot(name, box_of(t, call.layout, rows, columns, heads).over)
    return made


def _constants(plan: "AttentionPlan") -> dict[str, Any]:
    """What the plan's tile and versions make of the kernel."""
    n = plan.problem
    consumers, widths = rules.warpgroups_of(n, plan.tile), rules.widths_of(n)
    softcap = 0 if "softcap" not in n.score_mods else 2 if "tanh" in plan.options else 1
    return {
        "DIM_QK": widths[0],
        "DIM_V": widths[1],
        "COLUMNS": n.dim_v,
        "KEYS": plan.block_n,
        "SLOTS": plan.num_stages,
        "CONSUMERS": consumers,
        "PACK": rules.packed_heads(n, plan.options),
        "VARLEN": n.varlen,
        "SOFTCAP": softcap,
        **{option.upper(): option in plan.options for option in ("fence", "late", "skip", "lazy", "prefetch")},
        "PING_PONG": "turns" in plan.options,
        "POLYNOMIAL": rules.polynomial_of(plan.options),
        "CONSUMER_REGISTERS": REGISTERS[consumers][1],
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "SPLIT": 2 if rules.is_split(n) else 1,
        "CHUNK": rules.CHUNK_KEYS // plan.block_n if rules.INVARIANT in plan.options else 0,
        "TILE": rules.keys_of_tile(n) if rules.INVARIANT in plan.options else 0,
        "SHARED_SUMS": rules.shared_sums(n) if rules.INVARIANT in plan.options else 0,
    }


def _sums(plan: "AttentionPlan") -> Slot | None:
    """Room for O of the chunks so far, where shared memory has none."""
    width = rules.width_of(plan.problem.dim_v)
    if rules.INVARIANT not in plan.options or rules.shared_sums(plan.problem) == width:
        return None
    size = rules.hopper_programs(plan.problem, plan.tile, plan.device, plan.options) * plan.block_m * width
    return Slot("q", lambda q: q.new_empty(size, dtype=torch.float32))


def _tile_constants(call: Call) -> dict[str, Any]:
    """Rows and buffers of the tiles of the bias and the mask."""
    rows = {"": 0, "tiles": 64, "keys": 1}
    made: dict[str, Any] = {}
    for name, t in (("BIAS", call.bias), ("MASK", call.mask)):
        made |= {name: rows[tiles_of(t)], f"{name}_SLOTS": 0 if t is None else rules.MOD_SLOTS[t.element_size()]}
    return made


def _mod_values(call: Call, plan: "AttentionPlan") -> dict[str, Any]:
    """Bias, mask and slopes, each with what leads to a batch entry and a head; None for what the call does not have."""
    made: dict[str, Any] = {}
    for name in ("bias", "mask"):
        t = getattr(call, name)
        steps = (None, None) if t is None else steps_of(t)
        box = None if t is None else Slot("call", _tile_of(name, tile_box(t, plan.block_n)))
        made |= {f"{name}_desc": box, f"{name}_b": steps[0], f"{name}_h": steps[1]}
    return made | slope_values(call)


def slope_values(call: Call) -> dict[str, Any]:
    """The slopes of ALiBi, by their strides."""
    slopes = call.alibi_slopes
    steps = (None, None) if slopes is None else (slopes.stride(0) if slopes.dim() == 2 else 0, slopes.stride(-1))
    return {"Slopes": attribute("call", "alibi_slopes", slopes), "slope_b": steps[0], "slope_h": steps[1]}


def _user_mods(call: Call, lists: TileLists | None) -> dict[str, Any]:
    """The user's score_mod and mask_mods, () for none; and the lists of KV tiles, with their strides."""
    made: dict[str, Any] = {"score_mods": (), "mask_mods": ()}
    if call.score_mod is not None:
        made["score_mods"] = Slot("call", lambda given: ((given.score_mod, runtime_ints(given.score_args)),))
    if call.mask_mod is not None:
        first = int(call.mask is not None)
        made["mask_mods"] = Slot(
            "call", lambda given: mask_mods_of(mods, lists.inner(given) if lists else given)[first:]
        )
    steps = zip(("lists_b", "lists_h", "lists_q"), lists.strides if lists else (None,) * 3, strict=True)
    return {**made, "Lists": Slot("call", lists.of) if lists else None, **dict(steps)}


def _lists_of(call: Call, plan: "AttentionPlan", window: tuple[int, int], device: torch.device) -> TileLists | None:
    """The lists of KV tiles that the plan asks for."""
    if "lists" not in plan.options:
        return None
    n = plan.problem
    sizes, tile = (n.batch, n.heads, n.seq_q, n.seq_k), (plan.block_m, plan.block_n)
    return TileLists(call, sizes, tile, window, device, "anew" in plan.options)


def _tile_of(name: str, box: Box) -> Callable[[Call], Any]:
    """The descriptor of a call's bias or mask."""
    return lambda call: box.over(bytes_of(getattr(call, name)))


def compile(p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
    """Compile the kernel for this call, without a result; what the compiler raises passes through."""
    p.bound.compile((q, k, v, stand_in(q.dtype), stand_in(torch.float32), call))
