"""Binding of the Gluon kernel for sm_90 that adds dq in memory: statistics, zeroed sums, the kernel, and the sums' last step."""

from typing import TYPE_CHECKING, Any

import torch

from ..bound import Bound, Box, Slot, stand_in
from ..call import UNBOUNDED, Call, window_of
from ..dense.attention_hopper import slope_values
from ..dense.attention_parts import kind_of, mask_mods_of, score_mods_of
from ..dense.attention_tiles import bytes_of, steps_of, tile_box, tiles_of
from ..hopper import box_of, descriptor
from ..sparse.classify import QueryLists
from .backward_parts import score_slope, side_strides
from .hopper_backward import (
    SIDES,
    UNIT,
    GluonBound,
    Scratch,
    boxed_sides,
    gradients_of,
    statistics_bound,
    statistics_box,
)

if TYPE_CHECKING:
    from ...plan.backward.attention_backward import AttentionBackwardPlan
    from ...plan.problem import AttentionProblem
    from ..launch import Launch

GIVEN = (*SIDES, "Statistics", "Progress", "Sums", "KeySums", "DQ", "DK", "DV")
"""What a call gives to the launches: scratch is statistics, counters, zeroed sums of dq, and those of dk and dv over a group."""
Tensors = tuple[torch.Tensor, ...]


def bound_launches(
    scale: float, tensors: Tensors, dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan"
) -> GluonBound:
    """The launches of this call under this plan; tensors: q, k, v, out."""
    from ...kernels.backward.backward_reduced import backward_reduced
    from ...plan.backward import attention_backward_reduce as rules
    from ...plan.backward.attention_backward_hopper import tiles
    from ..launch import Launch

    q, k, v, out = tensors
    n, queries, options = plan.problem, rules.queries_of(plan.problem), plan.options
    assert options is not None  # of this kernel's plans
    rows, q_tiles = rules.rows(n), -(-n.seq_q // queries)
    counters, key_sums = rules.counters(n, options), rules.key_sums(n, options)
    columns = rules.columns_of(n)
    numbers = rows * queries * columns
    grid, constants = ((rows - 1) * 2, 1, 1), {"QUERIES": queries, "D": columns, "COLUMNS": n.dim_qk}
    last = Launch(backward_reduced, grid, constants, {"num_warps": 4}, q.device.index or 0)
    q_units, kv_units = tiles(n)
    left, right = (UNBOUNDED if side < 0 else side for side in window_of(call.window, call.causal))
    sides = zip((q, dout, k, v), (queries, queries, rules.KEYS, rules.KEYS), strict=True)
    values = {
        **boxed_sides(tuple(box_of(t, call.layout, size) for t, size in sides)),
        "stat_desc": Slot("Statistics", statistics_box(rows, 2 * queries).over),
        "sum_desc": Slot("Sums", _sum_box(numbers, columns).over),
        "scale": scale,
        "seq_q": n.seq_q,
        "seq_k": n.seq_k,
        "heads": n.heads,
        "group": n.group,
        "q_units": q_units,
        "kv_units": kv_units,
        "members": rules.members(n, options),
        "q_tiles": q_tiles,
        "blocks": rules.blocks(n),
        "left": left,
        "right": right,
        "heads_at_once": plan.heads_at_once,
        "no_tile": rows - 1,
        "KeySums": Slot("KeySums", lambda sums: sums) if key_sums else None,
        **_mod_values(call, n, _lists_of(call, plan, q.device)),
        **side_strides(call.layout, g=q.shape, x=k.shape, y=v.shape),
    }
    scratch = (
        Scratch((rows * 2 * queries,), torch.float32),
        Scratch((counters,), torch.int32),
        Scratch((numbers,), torch.float32, True),
        Scratch((key_sums,), torch.float32),
    )
    return GluonBound(
        plan,
        (*scratch, *gradients_of(tensors)),
        statistics_bound(n, out, dout, call.layout, q_tiles, counters, GIVEN, unit=queries),
        Bound(_main(plan, call, q.device.index or 0), GIVEN, values),
        Bound(last, GIVEN, values),
    )


def _mask_rows(call: Call, problem: "AttentionProblem") -> int:
    """Rows of a tile of the mask, 0 where there is none or no box reads it."""
    from ...plan.backward.attention_backward_reduce import queries_of

    if not problem.mask_descriptors:
        return 0
    return {"": 0, "tiles": queries_of(problem), "keys": 1}[tiles_of(call.mask)]


def _mod_values(call: Call, problem: "AttentionProblem", lists: QueryLists | None) -> dict[str, Any]:
    """What changes the scores, and the lists of query tiles, with their strides; None and () for what the call does not have.  A
    bias, and a mask that no box reads, are loaded as users' functions load."""
    from ...device import mods
    from ...plan.backward import attention_backward_reduce as rules
    from ..derivative import derivative_of

    boxed = _mask_rows(call, problem) > 0
    box: Any = None
    steps: tuple[Any, Any] = None, None
    if call.mask is not None and boxed:
        tile = tile_box(call.mask, UNIT, rules.queries_of(problem))
        box, steps = Slot("call", lambda given: tile.over(bytes_of(given.mask))), steps_of(call.mask)
    grads = [derivative_of(mods.bias)] * (call.bias is not None)
    grads += [score_slope(call.score_mod, call.score_grad)] * (call.score_mod is not None)
    unboxed = call._replace(mask=None) if boxed else call
    made: dict[str, Any] = {"score_mods": (), "mask_mods": ()}
    if grads:
        made["score_mods"] = Slot(
            "call", lambda given: score_mods_of(mods, 0.0, given._replace(alibi_slopes=None), False)
        )
    if mask_mods_of(mods, unboxed):
        made["mask_mods"] = Slot(
            "call", lambda given: mask_mods_of(mods, lists.inner(given) if lists else given)[int(boxed) :]
        )
    return {
        **made,
        **slope_values(call),
        "cap": float(call.softcap) or None,
        "score_grads": tuple([(grad, ()) for grad in grads]),
        "mask_desc": box,
        "mask_b": steps[0],
        "mask_h": steps[1],
        "Lists": Slot("call", lists.of) if lists else None,
        "lists_b": lists.strides[0] if lists else None,
        "lists_h": lists.strides[1] if lists else None,
    }


def _lists_of(call: Call, plan: "AttentionBackwardPlan", device: torch.device) -> QueryLists | None:
    """The lists of query tiles that the plan asks for."""
    from ...plan.backward import attention_backward_reduce as rules

    n, options = plan.problem, plan.options
    if options is None or not options.lists:
        return None
    sizes, tile = (n.batch, n.heads, n.seq_q, n.seq_k), (rules.queries_of(n), rules.KEYS)
    return QueryLists(n.kv_heads, call, sizes, tile, window_of(call.window, call.causal), device, options.anew)


def _sum_box(numbers: int, columns: int) -> Any:
    """Of the sums [.., 32], a warpgroup's part of a tile at a time, or the smaller part."""
    floats, box = torch.float32, [2 * (columns % 64) or 128, 32]
    return Box(stand_in(floats), [numbers // 32, 32], [32, 1], box, *descriptor(tuple(box), floats))


def _main(plan: "AttentionBackwardPlan", call: Call, device: int) -> "Launch":
    """The kernel's launch."""
    from ...kernels.hopper.attention_backward_reduce import attention_backward_reduce
    from ...plan.backward import attention_backward_reduce as rules
    from ...plan.hopper import PRODUCER_REGISTERS
    from ..launch import Launch

    n, options = plan.problem, plan.options
    assert options is not None  # of this kernel's plans
    constants = {
        "SOFTCAP": 0 if "softcap" not in n.score_mods else 2 if n.dtype == "bfloat16" else 1,
        "MASK": _mask_rows(call, n),
        "KIND": kind_of(window_of(call.window, call.causal)),
        "D": (columns := rules.columns_of(n)),
        "COLUMNS_QK": None if n.dim_qk == columns else n.dim_qk,
        "COLUMNS_V": None if n.dim_v == columns else n.dim_v,
        "QUERIES": rules.queries_of(n),
        "SLOTS": plan.keys.num_stages,
        "ORDERED": options.ordered,
        "LATE": options.late,
        "CONSUMER_REGISTERS": rules.REGISTERS[1],
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    launch_options = {"num_warps": plan.keys.num_warps, "maxnreg": rules.REGISTERS[0]}
    return Launch(attention_backward_reduce, (rules.programs(n, options), 1, 1), constants, launch_options, device)
