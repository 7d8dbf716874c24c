"""Forward block-sparse attention: check, plan, allocate, launch, merge."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..check import check_number
from ..errors import DeviceError, DtypeError, ShapeError
from ..types import Constant, Layout, ModArgs, ModFunction
from .attention import CACHE_LIMIT, describe_box, head_strides, mods_of, problem_of
from .call import Call, check_mods, facts_of, facts_of_args, result_shapes, sizes_of
from .device import device_of, interpreting

if TYPE_CHECKING:
    from ..plan.sparse import SparsePlan, SparseProblem
    from ..sparse.index import BlockIndex
    from .launch import Box

__all__ = ["SparseCall", "forward", "prepare"]

BLOCK_SPLITS = 16  # partials that one step of the merge takes in


class SparseCall(NamedTuple):
    """The keyword arguments of `sparse_attention`, as given."""

    index: "BlockIndex"
    causal: bool = False
    scale: float | None = None
    softcap: float = 0.0
    layout: Layout = "bshd"
    score_mod: ModFunction | Constant | None = None
    score_args: ModArgs = ()
    mask_mod: ModFunction | Constant | None = None
    mask_args: ModArgs = ()
    plan: "SparsePlan | Constant | None" = None


@dataclass(slots=True)
class Prepared:
    """All that follows from a call's key."""

    plan: "SparsePlan | None"  # None: nothing to compute
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    scalars: tuple[Any, ...] = ()
    strides: tuple[int, ...] = ()
    boxes: "tuple[Box, ...]" = ()
    aligned: bool = True
    launcher: Any = None
    merger: Any = None
    merge_args: tuple[int, ...] = ()
    device: int = -1
    keep: tuple[Any, ...] = field(default=())


_CACHE: dict[Any, Prepared] = {}


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SparseCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of block-sparse attention; see `tilefold.sparse_attention`."""
    p = prepare(q, k, v, call)
    out = torch.empty(p.out_shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device=q.device)
    if p.plan is None:
        return out, lse
    splits = p.plan.splits
    if splits == 1:
        p.launcher(_arguments(p, q, k, v, out, lse, call), p.device, p.aligned)
    else:
        part = torch.empty((splits, *p.out_shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((splits, *p.lse_shape), dtype=torch.float32, device=q.device)
        p.launcher(_arguments(p, q, k, v, part, part_lse, call), p.device, p.aligned)
        p.merger((part, part_lse, out, lse, *p.merge_args), p.device, True)
    return out, lse


def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SparseCall) -> Prepared:
    """The cached record of this call's shapes and options; checks everything the first time they are seen."""
    try:
        index = call.index
        lists = tuple(None if t is None else facts_of(t) for t in index.tensors())
        shape = (index.block_q, index.block_k, index.seq_q, index.seq_k)
        hooks = (id(call.score_mod), facts_of_args(call.score_args), id(call.mask_mod), facts_of_args(call.mask_args))
        options = tuple((type(o), o) for o in call[1:5])
        key = (facts_of(q), facts_of(k), facts_of(v), lists, shape, options, hooks, id(call.plan))
        found = _CACHE.get(key)
    except (AttributeError, TypeError):  # not a tensor, not an index, or not hashable: the checks will say which
        return _prepare(q, k, v, call)
    if found is None:
        found = _prepare(q, k, v, call)
        if len(_CACHE) >= CACHE_LIMIT:
            _CACHE.clear()
        _CACHE[key] = found
    return found


def _dense_call(call: SparseCall) -> Call:
    """The dense call with the same options: its checks and its mods are ours."""
    return Call(scale=call.scale, softcap=call.softcap, layout=call.layout, score_mod=call.score_mod,
                score_args=call.score_args, mask_mod=call.mask_mod, mask_args=call.mask_args)  # fmt: skip


def _prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SparseCall) -> Prepared:
    from ..plan.sparse import SparsePlan, SparseProblem, plan_sparse

    dense = _dense_call(call)
    sizes = sizes_of(q, k, v, dense)
    if not isinstance(call.causal, bool):
        raise DtypeError(f"causal must be a bool, got {call.causal!r}")
    scale = 1.0 / math.sqrt(sizes["dim_qk"]) if call.scale is None else check_number("scale", call.scale, above=0.0)
    softcap = check_number("softcap", call.softcap, low=0.0)
    check_mods(dense, q.device)
    if call.plan is not None and not isinstance(call.plan, SparsePlan):
        raise DtypeError(f"plan must be a SparsePlan or None, got {type(call.plan).__name__}")
    _check_index(call.index, sizes, q.device)
    out_shape, lse_shape = result_shapes(dense, sizes)
    device = device_of(q.device)
    keep = (call.score_mod, call.mask_mod, call.plan)
    if 0 in lse_shape:
        return Prepared(None, out_shape, lse_shape, keep=keep)
    attention = problem_of(q, k, v, dense, sizes, (-1, 0) if call.causal else (-1, -1))
    index = call.index
    problem = SparseProblem(
        attention,
        index.block_q,
        index.block_k,
        index.indices.shape[3],
        masked=index.block_sizes is not None,
    )
    if call.plan is None:
        plan = plan_sparse(problem, device)
    else:
        plan = call.plan
        plan.check(problem, device)
    return _bind(q, k, v, call, sizes, scale, softcap, plan, (out_shape, lse_shape))


def _check_index(index: Any, sizes: dict[str, int], device: torch.device) -> None:
    """The index describes these sequences, on this device."""
    from ..sparse.index import BlockIndex

    if not isinstance(index, BlockIndex):
        raise DtypeError(f"index must be a tilefold.BlockIndex, got {type(index).__name__}")
    for name in ("seq_q", "seq_k"):
        if getattr(index, name) != sizes[name]:
            raise ShapeError(f"index was made for {name}={getattr(index, name)}, q, k and v have {name}={sizes[name]}")
    for name, size in zip(("batch", "heads"), index.indices.shape[:2], strict=True):
        if size not in (1, sizes[name]):
            raise ShapeError(f"index has {name}={size}, expected {sizes[name]} (as in q) or 1")
    if index.indices.device != device:
        raise DeviceError(f"index is on {index.indices.device}, but q is on {device}")


def _bind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: SparseCall,
    sizes: dict[str, int],
    scale: float,
    softcap: float,
    plan: "SparsePlan",
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> Prepared:
    """Kernels, run-time scalars and compile-time constants of this call under this plan."""
    from ..kernels import combine, sparse_forward
    from .launch import Launcher

    problem = plan.problem
    n, index = problem.attention, call.index
    q_strides, k_strides, v_strides = (head_strides(t, call.layout) for t in (q, k, v))
    out_like = torch.empty(shapes[0], device="meta")
    out_strides = head_strides(out_like, call.layout)
    box = plan.kernel == "sparse_forward_box"
    sides = ((k, n.block_qk), (v, n.block_v)) if box else ()
    emulate = interpreting() and q.dtype == torch.bfloat16
    constants = {
        "MASKED": problem.masked or n.seq_k % problem.block_k != 0,
        "EMULATE": emulate,
        "WIDE": max(q_strides) * plan.block_m >= 1 << 31,
        "DIM_QK": n.dim_qk,
        "DIM_V": n.dim_v,
        "Q_BLOCK": problem.block_q,
        "KV_BLOCK": problem.block_k,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_QK": n.block_qk,
        "BLOCK_V": n.block_v,
    }
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    merge_constants = {"EMULATE": emulate, "DIM": n.dim_v, "BLOCK_D": n.block_v, "BLOCK_S": BLOCK_SPLITS}
    part_strides = (math.prod(shapes[0]), *out_strides)
    return Prepared(
        plan=plan,
        out_shape=shapes[0],
        lse_shape=shapes[1],
        scalars=(scale, n.seq_q, n.seq_k, n.heads, n.heads // n.kv_heads, n.batch),
        strides=(*q_strides, *(() if box else k_strides + v_strides), *part_strides, *_list_strides(index)),
        boxes=tuple(describe_box(t, call.layout, sizes, plan.block_n, width) for t, width in sides),
        aligned=all(t.data_ptr() % 16 == 0 for t in _tensors(q, k, v, call)),
        launcher=Launcher(getattr(sparse_forward, plan.kernel), plan.grid, constants, options),
        merger=Launcher(combine.combine, (n.seq_q * n.heads * n.batch, 1, 1), merge_constants, {"num_warps": 4}),
        merge_args=(plan.splits, n.batch, n.seq_q, n.heads, *part_strides, *out_strides),
        device=q.device.index if q.device.type == "cuda" else -1,
        keep=(call.score_mod, call.mask_mod, call.plan),
    )


def _list_strides(index: "BlockIndex") -> tuple[int, ...]:
    """Strides of indices (b, h, q), counts, block_sizes and query_sizes (b, h), 0 where broadcast."""
    found: list[int] = list(_broadcast(index.indices, 3))
    found += _broadcast(index.counts, 2)
    for t in (index.block_sizes, index.query_sizes):
        found += (0, 0) if t is None else _broadcast(t.view((1,) * (3 - t.dim()) + t.shape), 2)
    return tuple(found)


def _broadcast(t: torch.Tensor, dims: int) -> tuple[int, ...]:
    return tuple(0 if t.shape[d] == 1 and d < 2 else t.stride(d) for d in range(dims))


def _tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SparseCall) -> list[torch.Tensor]:
    found = (q, k, v, *call.index.tensors(), *call.score_args, *call.mask_args)
    return [t for t in found if isinstance(t, torch.Tensor)]


def _arguments(
    p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, call: SparseCall
) -> tuple[Any, ...]:
    """The kernel's run-time arguments, in order."""
    from ..device import mods

    sides = (p.boxes[0].over(k), p.boxes[1].over(v)) if p.boxes else (k, v)
    index = call.index
    lists = (index.indices, index.counts, index.block_sizes, index.query_sizes)
    score, masks = mods_of(float(call.softcap), _dense_call(call), q.dtype == torch.float32)
    if call.causal:
        masks = ((mods.causal, ()), *masks)
    return (q, *sides, out, lse, *lists, *p.scalars, *p.strides, score, masks)
