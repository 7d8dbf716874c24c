"""Binding of the Gluon kernel for sm_90 that adds dq in memory: statistics, zeroed sums, the kernel, and the sums' last step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..bound import Bound, Box, Slot, attribute, stand_in
from ..call import Call, window_of
from ..dense.attention_hopper import slope_values
from ..dense.attention_parts import kind_of, lengths_of, mask_mods_of, score_mods_of, sides_named
from ..dense.attention_tiles import bytes_of, steps_of, tile_box, tiles_of
from ..hopper import descriptor
from ..sparse.classify import QueryLists
from .backward_parts import score_slope, side_strides
from .hopper_backward import (
    SIDES,
    UNIT,
    GluonBound,
    Scratch,
    boxed_sides,
    gradients_of,
    kept_box,
    packed_strides,
    softcap_kind,
    statistics_bound,
    statistics_box,
    values_of_lengths,
)

if TYPE_CHECKING:
    from ...plan.backward.attention_backward import AttentionBackwardPlan
    from ...plan.problem import AttentionProblem

CHUNK = 128  # blocks of packed keys whose entries one program writes
GIVEN = (*SIDES, "Statistics", "Progress", "Sums", "KeySums", "Blocks", "Tails", "DQ", "DK", "DV", "Stored")
"""What a call gives to the launches: scratch is statistics, counters, zeroed sums of dq, and those of dk and dv over a group; of
packed sequences their blocks of keys, and their last tiles; dS for the gradient of a bias."""
Tensors = tuple[torch.Tensor, ...]


def bound_launches(
    scale: float, tensors: Tensors, dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan"
) -> GluonBound:
    """The launches of this call under this plan; tensors: q, k, v, out."""
    from ...kernels.backward.backward_reduced import backward_reduced
    from ...plan.backward import attention_backward_reduce as rules

    q, k, v, out = tensors
    n, queries, options = plan.problem, rules.queries_of(plan.problem), plan.options
    assert options is not None  # of this kernel's plans
    tokens = _tokens_of(tensors, call)
    sizes = _sizes_of(plan, tokens)
    values = {
        **boxed_sides((q, dout, k, v), call.layout, queries, rules.KEYS),
        **_values(sizes),
        "scale": scale,
        **lengths_of(n),
        "members": rules.members(n, options),
        **sides_named(window_of(call.window, call.causal)),
        "heads_at_once": plan.heads_at_once,
        **_mod_values(call, n, _lists_of(call, plan, q.device)),
        "stored_desc": Slot("Stored", _ds_box(rules.ds_shape(n), q.dtype).over) if options.stored else None,
        **(_packed_values(tensors, dout, call, plan) if tokens else _dense_values(tensors, call, n)),
    }
    constants = {"QUERIES": queries, "D": sizes.columns, "COLUMNS": n.dim_qk}
    if tokens is None:
        first = statistics_bound(n, out, dout, call.layout, sizes.q_tiles, sizes.counters, GIVEN, unit=queries)
    else:
        first = _prepare(plan, _first_grid(plan, sizes, tokens), tensors, dout, values)
    main = _main(plan, call, sizes.programs, values, q.device)
    last = Bound.of(backward_reduced, sizes.last_grid, GIVEN, values, constants, q.device)
    buffers = _buffers(sizes, tensors)
    if options.stored:  # with lists the sum reads tiles that no program visits: zeros
        buffers = (*buffers, Scratch(rules.ds_shape(n), q.dtype, options.lists))
    made = ReduceBound if tokens else GluonBound
    return made(plan, buffers, first, main, last, results=3 + options.stored)


@dataclass(slots=True)
class ReduceBound(GluonBound):
    """The launches of packed sequences."""

    def of_lengths(self, tensors: Tensors, dout: torch.Tensor, call: Call) -> "ReduceBound":
        """The launches of a call of other tokens."""
        tokens = _tokens_of(tensors, call)
        sizes = _sizes_of(self.plan, tokens)
        values = values_of_lengths(tensors, dout, call) | _values(sizes)
        given, last = (*tensors, dout), self.last
        assert last is not None
        return ReduceBound(
            self.plan,
            _buffers(sizes, tensors),
            self.first.with_values(values, _first_grid(self.plan, sizes, tokens), given),
            self.main.with_values(values, (sizes.programs, 1, 1), given),
            last.with_values(values, sizes.last_grid, given),
        )


def _tokens_of(tensors: Tensors, call: Call) -> tuple[int, int] | None:
    """Queries and keys of all packed sequences."""
    return None if call.packed is None else (tensors[0].shape[0], tensors[1].shape[0])


class Sizes(NamedTuple):
    """What follows from the tokens of a call, as the functions of plan/backward/attention_backward_reduce.py say it."""

    queries: int
    columns: int
    rows: int
    q_tiles: int
    blocks: int
    counters: int
    key_sums: int
    tails: int
    entries: int
    programs: int

    @property
    def last_grid(self) -> tuple[int, int, int]:
        return (self.rows - 1) * 2, 1, 1


def _sizes_of(plan: "AttentionBackwardPlan", tokens: tuple[int, int] | None) -> Sizes:
    from ...plan.backward import attention_backward_reduce as rules

    n, options = plan.problem, plan.options
    rows, blocks, programs = rules.rows(n, tokens), rules.blocks(n, tokens), rules.programs(n, options, tokens)
    counters, key_sums = rules.counters(n, options, tokens), rules.key_sums(n, options, tokens)
    entries = rules.ENTRY_BYTES // 4 * blocks if tokens else 0
    tile = rules.queries_of(n), rules.columns_of(n)
    return Sizes(*tile, rows, rules.q_tiles(n, tokens), blocks, counters, key_sums, rules.tails(n), entries, programs)


def _values(sizes: Sizes) -> dict[str, Any]:
    """Values that differ with the number of tiles."""
    numbers, columns = sizes.rows * sizes.queries * sizes.columns, sizes.columns
    return {
        "stat_desc": Slot("Statistics", statistics_box(sizes.rows, 2 * sizes.queries).over),
        "sum_desc": Slot("Sums", _sum_box(numbers, columns).over),
        "KeySums": Slot("KeySums", lambda sums: sums) if sizes.key_sums else None,
        "q_tiles": sizes.q_tiles,
        "blocks": sizes.blocks,
        "no_tile": sizes.rows - 1,
        "counters": sizes.counters,
    }


def _dense_values(tensors: Tensors, call: Call, problem: "AttentionProblem") -> dict[str, Any]:
    """Of a call with a batch."""
    from ...plan.backward.attention_backward_hopper import tiles

    n, (q, k, v, _) = problem, tensors
    q_units, kv_units = tiles(n)
    return {
        "q_units": q_units,
        "kv_units": kv_units,
        **dict.fromkeys(("Blocks", "tail_desc", "CuQ")),
        **dict.fromkeys(("sequences", "batch", "steps", "max_q"), 0),
        **side_strides(call.layout, g=q.shape, x=k.shape, y=v.shape),
    }


def _packed_values(tensors: Tensors, dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan") -> dict[str, Any]:
    """Of packed sequences."""
    from ...plan.backward import attention_backward_reduce as rules

    n, (q, k, v, _) = plan.problem, tensors
    return {
        **dict.fromkeys(("seq_q", "seq_k", "q_units", "kv_units"), 0),
        **dict.fromkeys(("stride_gb", "stride_xb", "stride_yb")),
        "CuQ": attribute("call", "source.cu_q", call.packed),
        "CuK": attribute("call", "source.cu_k", call.packed),
        "tail_desc": Slot("Tails", kept_box(rules.tails(n), q.dtype).over),
        "sequences": n.batch,
        "steps": (n.batch - 1).bit_length(),
        **values_of_lengths(tensors, dout, call),
        **packed_strides(q=q, k=k, v=v, g=q.shape, x=k.shape, y=v.shape),
    }


def _buffers(sizes: Sizes, tensors: Tensors) -> tuple[Scratch, ...]:
    floats, queries = torch.float32, sizes.rows * sizes.queries
    return (
        Scratch((2 * queries,), floats),
        Scratch((sizes.counters,), torch.int32),
        Scratch((queries * sizes.columns,), floats, True),
        Scratch((sizes.key_sums,), floats),
        Scratch((sizes.entries,), torch.int32),
        Scratch((sizes.tails, UNIT), tensors[0].dtype),
        *gradients_of(tensors),
    )


def _first_grid(plan: "AttentionBackwardPlan", sizes: Sizes, tokens: Any) -> tuple[int, int, int]:
    """Of `_prepare`."""
    n = plan.problem
    programs = sizes.rows - (-sizes.blocks // CHUNK) + 2 * n.batch * (n.heads + n.kv_heads)
    return programs + sum(-(-total // sizes.queries) for total in tokens), 1, 1


def _prepare(
    plan: "AttentionBackwardPlan", grid: Any, tensors: Tensors, dout: torch.Tensor, values: dict[str, Any]
) -> Bound:
    """The launch that comes first for packed sequences."""
    from ...kernels.backward.backward_packed_blocks import backward_packed_blocks
    from ...plan.backward import attention_backward_reduce as rules
    from ...plan.backward.attention_backward_hopper import width_of

    n, queries = plan.problem, rules.queries_of(plan.problem)
    longest = max(t.stride(0) for t in (*tensors, dout))
    constants = {
        "WIDE": longest * rules.KEYS >= 1 << 31,
        "DIM_QK": n.dim_qk,
        "DIM": n.dim_v,
        "HELD": width_of(n),
        "ROWS": queries,
        "KEYS": rules.KEYS,
        "CHUNK": CHUNK,
        "ALTERNATE": plan.options.ordered and max(n.sides) >= 0,  # type: ignore[union-attr]
    }
    return Bound.of(backward_packed_blocks, grid, GIVEN, values, constants, dout.device)


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
    from ..derivative import derivative_of, is_one

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
        "score_grads": tuple([() if is_one(grad) else (grad,) for grad in grads]),
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


def _ds_box(shape: tuple[int, int], dtype: torch.dtype) -> Any:
    """Of dS in memory, a panel of a tile at a time."""
    from ...plan.backward.attention_backward_reduce import KEYS

    box = KEYS, UNIT
    return Box(stand_in(dtype), list(shape), [shape[1], 1], list(box), *descriptor(box, dtype))


def _main(
    plan: "AttentionBackwardPlan", call: Call, programs: int, values: dict[str, Any], device: torch.device
) -> Bound:
    """The kernel's launch."""
    from ...kernels.hopper.attention_backward_reduce import attention_backward_reduce
    from ...plan.backward import attention_backward_reduce as rules
    from ...plan.hopper import PRODUCER_REGISTERS, REGISTERS

    n, options = plan.problem, plan.options
    assert options is not None  # of this kernel's plans
    constants = {
        "SOFTCAP": softcap_kind(n),
        "MASK": _mask_rows(call, n),
        "KIND": kind_of(window_of(call.window, call.causal)),
        "D": (columns := rules.columns_of(n)),
        "COLUMNS_QK": None if n.dim_qk == columns else n.dim_qk,
        "COLUMNS_V": None if n.dim_v == columns else n.dim_v,
        "QUERIES": rules.queries_of(n),
        "SLOTS": plan.keys.num_stages,
        "ORDERED": options.ordered,
        "LATE": options.late,
        "CONSUMER_REGISTERS": REGISTERS[2][1],
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    own = {"num_warps": plan.keys.num_warps, "maxnreg": REGISTERS[2][0]}
    return Bound.of(attention_backward_reduce, programs, GIVEN, values, constants, device, **own)
