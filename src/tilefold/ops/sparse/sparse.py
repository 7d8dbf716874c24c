"""Forward block-sparse attention: check, plan, allocate, launch, merge."""

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..call import Packed, Paged, check_offsets, check_pages, result_shapes, sizes_of
from ..dense.attention import problem_of
from ..dense.attention_parts import boxable, describe_box, head_strides, mods_of
from ..device import device_of, interpreting
from ..records import remember
from ..startup import uncollected
from .sparse_call import Lists, SparseCall, check_call, check_lists, dense_call, key_of

if TYPE_CHECKING:
    from ...plan.sparse import SparsePlan
    from ..launch import Box

__all__ = [
    "Lists",
    "SparseCall",
    "dense_call",
    "example_call",
    "example_launch",
    "forward",
    "list_strides",
    "mods_of_call",
    "prepare",
]

HOPPER_KERNEL = "sparse_forward_hopper"
BLOCK_SPLITS = 16  # partials that one step of the merge takes in


@dataclass(slots=True)
class Prepared:
    """All that follows from a call's key."""

    plan: "SparsePlan | None"  # None: nothing to compute
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    scalars: tuple[Any, ...] = ()
    strides: tuple[int, ...] = ()
    boxes: "tuple[Box, ...]" = ()
    mods: Any = None
    launch: Any = None
    merge: Any = None
    merge_args: tuple[int, ...] = ()
    keep: tuple[Any, ...] = field(default=())
    backward: dict[Any, Any] = field(default_factory=dict)  # bound backward passes of this call
    mixed: dict[Any, Any] = field(default_factory=dict)  # launches that also mix in another branch


_CACHE: dict[Any, Prepared] = {}


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SparseCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of block-sparse attention; see `tilefold.sparse_attention`."""
    p = prepare(q, k, v, call)
    out = torch.empty(p.out_shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device=q.device)
    if p.plan is None:
        return out, lse
    if interpreting():
        _check_placement(k, q.shape[0], call)
    splits = p.plan.splits
    if splits == 1:
        p.launch(_arguments(p, q, k, v, out, lse, call))
    else:
        part = torch.empty((splits, *p.out_shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((splits, *p.lse_shape), dtype=torch.float32, device=q.device)
        p.launch(_arguments(p, q, k, v, part, part_lse, call))
        p.merge((part, part_lse, out, lse, *p.merge_args))
    return out, lse


def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SparseCall) -> Prepared:
    """The cached record of this call's shapes and options; checks everything the first time they are seen."""
    try:
        key = key_of(q, k, v, call)
        found = _CACHE.get(key)
    except (AttributeError, RuntimeError, TypeError):  # the checks will say which argument is wrong
        return _prepare(q, k, v, call)
    if found is None:
        found = remember(_CACHE, key, _prepare(q, k, v, call))
    return found


def _check_placement(k: torch.Tensor, total_q: int, call: SparseCall) -> None:
    """In the interpreter a read outside a tensor ends the process: look at what says where blocks and sequences lie."""
    check_lists(call.lists)
    if call.packed is not None:
        check_offsets(call.packed, total_q, k.shape[0])
    if call.paged is not None:
        page_size = k.shape[1 if call.layout == "bshd" else 2]
        check_pages(call.paged, k.shape[0], page_size, call.lists.seq_k)


@uncollected()
def _prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SparseCall) -> Prepared:
    from ...plan.sparse import SparseProblem, plan_sparse
    from ..hopper import bound_or_none, disabled

    sizes, scale = check_call(q, k, v, call)
    dense = dense_call(call)
    out_shape, lse_shape = result_shapes(dense, sizes)
    device = device_of(q.device)
    keep = (call.score_mod, call.score_grad, call.mask_mod, call.plan)
    if 0 in (*lse_shape, sizes["batch"], sizes["seq_q"]):
        return Prepared(None, out_shape, lse_shape, keep=keep)
    attention = problem_of(q, k, v, dense, sizes, (-1, 0) if call.causal else (-1, -1))
    index = call.lists
    problem = SparseProblem(
        attention,
        index.block_q,
        index.block_k,
        index.indices.shape[3],
        masked=index.block_sizes is not None,
        descriptors=boxable(q),
        page_size=0 if call.paged is None else sizes["page_size"],
        query_masked=index.query_sizes is not None,
    )
    shapes = out_shape, lse_shape
    if call.plan is not None:
        given: SparsePlan = call.plan  # type: ignore[assignment]
        given.check(problem, device)
        return _bind(q, k, v, call, sizes, scale, given, shapes)
    plan = plan_sparse(problem, device, portable=disabled())
    if plan.kernel == HOPPER_KERNEL:
        from . import sparse_hopper

        made = functools.partial(sparse_hopper.bind, q, k, v, call, scale, plan, shapes)
        found = bound_or_none("block-sparse", made, lambda p: sparse_hopper.compile(p, q, k, v, call))
        if found is not None:
            return found
        plan = plan_sparse(problem, device, portable=True)
    return _bind(q, k, v, call, sizes, scale, plan, shapes)


def _bind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: SparseCall,
    sizes: dict[str, int],
    scale: float,
    plan: "SparsePlan",
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> Prepared:
    """Kernels, run-time scalars and compile-time constants of this call under this plan."""
    from ...device import mods
    from ...kernels import sparse_forward
    from ..launch import Launch

    if plan.kernel == HOPPER_KERNEL:
        from . import sparse_hopper

        return sparse_hopper.bind(q, k, v, call, scale, plan, shapes)
    problem = plan.problem
    n, index = problem.attention, call.lists
    q_strides, k_strides, v_strides = (head_strides(t, call.layout) for t in (q, k, v))
    out_like = torch.empty(shapes[0], device="meta")
    out_strides = head_strides(out_like, call.layout)
    box = plan.kernel == "sparse_forward_box"
    sides = ((k, n.block_qk), (v, n.block_v)) if box else ()
    emulate = interpreting() and q.dtype == torch.bfloat16
    early = plan.splits > 1 and plan.device.dependent_launches
    constants = _constants(plan, emulate, early, (q_strides[-2], k_strides[-2], v_strides[-2]))
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages, **({"launch_pdl": True} if early else {})}
    device = q.device.index or 0
    part_strides = (math.prod(shapes[0]), *out_strides)
    # To the merge, and in the kernel's own arguments, packed rows are those of one long sequence.
    batch, rows, around = (1, sizes["total_q"], (0,)) if n.varlen else (n.batch, n.seq_q, ())
    return Prepared(
        plan=plan,
        out_shape=shapes[0],
        lse_shape=shapes[1],
        scalars=(scale, n.seq_q, rows if n.varlen else n.seq_k, n.heads, n.heads // n.kv_heads, n.batch),
        strides=(
            *q_strides,
            *(() if box else k_strides + v_strides),
            *part_strides,
            *list_strides(index),
            *(() if call.paged is None else (call.paged.block_table.stride(0),)),
        ),
        boxes=tuple(describe_box(t, call.layout, plan.block_n, width) for t, width in sides),
        mods=mods,
        launch=Launch(getattr(sparse_forward, plan.kernel), plan.grid, constants, options, device),
        merge=_merge(plan, rows * n.heads * batch, emulate, early, device),
        merge_args=(plan.splits, batch, rows, n.heads, part_strides[0], *around, *out_strides, *around, *out_strides),
        keep=(call.score_mod, call.score_grad, call.mask_mod, call.plan),
    )


def _constants(plan: "SparsePlan", emulate: bool, early: bool, rows: tuple[int, int, int]) -> dict[str, Any]:
    """The kernel's compile-time constants; rows: the strides of a row of q, k and v."""
    problem = plan.problem
    n = problem.attention
    wide = rows[0] * plan.block_m >= 1 << 31
    return {
        "MASKED": problem.masked or n.varlen or problem.page_size > 0 or n.seq_k % problem.block_k != 0,
        "EMULATE": emulate,
        "EARLY": early,
        "WIDE": wide or problem.page_size * max(rows[1:]) >= 1 << 31,
        "DIM_QK": n.dim_qk,
        "DIM_V": n.dim_v,
        "Q_BLOCK": problem.block_q,
        "KV_BLOCK": problem.block_k,
        **({"PAGE": problem.page_size} if problem.page_size else {}),
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_QK": n.block_qk,
        "BLOCK_V": n.block_v,
    }


def _merge(plan: "SparsePlan", rows: int, emulate: bool, early: bool, device: int) -> Any:
    """The launch that merges the shares of `rows` rows."""
    from ...kernels.combine import combine
    from ..launch import Launch

    n = plan.problem.attention
    constants = {"EMULATE": emulate, "DIM": n.dim_v, "BLOCK_D": n.block_v, "BLOCK_S": BLOCK_SPLITS, "EARLY": early}
    options = {"num_warps": max(1, n.block_v // 128), **({"launch_pdl": True} if early else {})}
    return Launch(combine, (rows, 1, 1), constants, options, device)


def list_strides(index: Lists) -> tuple[int, ...]:
    """Strides of indices (b, h, q), counts, block_sizes and query_sizes (b, h), 0 where broadcast."""
    found: list[int] = list(_broadcast(index.indices, 3))
    found += _broadcast(index.counts, 2)
    for t in (index.block_sizes, index.query_sizes):
        if t is not None and t.dim() < 3:  # [blocks] or [batch, blocks]: never per head
            t = t[None, None] if t.dim() == 1 else t[:, None]
        found += (0, 0) if t is None else _broadcast(t, 2)
    return tuple(found)


def _broadcast(t: torch.Tensor, dims: int) -> tuple[int, ...]:
    return tuple(0 if t.shape[d] == 1 and d < 2 else t.stride(d) for d in range(dims))


def _arguments(
    p: Prepared,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: SparseCall,
) -> tuple[Any, ...]:
    """The kernel's run-time arguments, in order."""
    if p.plan is not None and p.plan.kernel == HOPPER_KERNEL:
        from . import sparse_hopper

        return sparse_hopper.arguments(p, q, k, v, out, lse, call)
    sides = (p.boxes[0].over(k), p.boxes[1].over(v)) if p.boxes else (k, v)
    score, masks = mods_of_call(p, q, call)
    return (q, *sides, out, lse, *call.lists[:4], *call.placement, *p.scalars, *p.strides, score, masks)


def mods_of_call(p: Prepared, q: torch.Tensor, call: SparseCall) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Score mods and mask mods, in the order applied."""
    score, masks = mods_of(p.mods, float(call.softcap), dense_call(call), q.dtype == torch.float32)
    return score, ((p.mods.causal, ()), *masks) if call.causal else masks


# ---------------------------------------------------------------- without a GPU


def example_call(
    plan: "SparsePlan",
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], SparseCall, Prepared, torch.Tensor, torch.Tensor]:
    """((q, k, v), call, its record, out, lse) of a call that has this plan, on tensors without memory."""
    n, problem = plan.problem.attention, plan.problem
    dtype = getattr(torch, n.dtype)
    packed, paged = None, None
    queries: tuple[int, ...] = (n.batch, n.seq_q)
    keys: tuple[int, ...] = (n.batch, n.seq_k)
    if n.varlen:
        queries, keys = (n.batch * n.seq_q,), (n.batch * n.seq_k,)
        offsets = _meta(n.batch + 1, dtype=torch.int32)
        packed = Packed(offsets, offsets, n.seq_q, n.seq_k)
    elif problem.page_size:
        pages = -(-n.seq_k // problem.page_size)
        keys = (n.batch * pages, problem.page_size)
        paged = Paged(_meta(n.batch, pages, dtype=torch.int32), _meta(n.batch, dtype=torch.int32))
    q = _meta(*queries, n.heads, n.dim_qk, dtype=dtype)
    k, v = (_meta(*keys, n.kv_heads, d, dtype=dtype) for d in (n.dim_qk, n.dim_v))
    rows, blocks = -(-n.seq_q // problem.block_q), -(-n.seq_k // problem.block_k)
    lists = Lists(
        _meta(n.batch, n.heads, rows, problem.capacity, dtype=torch.int32),
        _meta(n.batch, n.heads, rows, dtype=torch.int32),
        _meta(n.batch, n.heads, blocks, dtype=torch.int32) if problem.masked else None,
        None,
        problem.block_q,
        problem.block_k,
        n.seq_q,
        n.seq_k,
    )
    call = SparseCall(lists, causal=n.causal, plan=plan, packed=packed, paged=paged)
    sizes = sizes_of(q, k, v, dense_call(call), paged)
    shapes = result_shapes(dense_call(call), sizes)
    p = _bind(q, k, v, call, sizes, 1.0, plan, shapes)
    return (q, k, v), call, p, _meta(*shapes[0], dtype=dtype), _meta(*shapes[1])


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def example_launch(
    plan: "SparsePlan", merge: bool = False, mixed: bool = False
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of a call that has this plan, of its merge, or with another branch mixed in, on tensors without
    memory, to compile ahead."""
    qkv, call, p, out, lse = example_call(plan)
    if merge:
        part, part_lse = _meta(plan.splits, *p.out_shape), _meta(plan.splits, *p.lse_shape)
        return p.merge.fn, (part, part_lse, out, lse, *p.merge_args), p.merge.keywords
    if mixed:
        from . import sparse_hopper, sparse_mixed

        branch, gate = _meta(*p.out_shape, dtype=out.dtype), _meta(*p.out_shape[:3], dtype=out.dtype)
        launch, box, strides = sparse_mixed.bind(p, call, out, branch, gate, gate)
        args = sparse_hopper.arguments(p, *qkv, out, lse, call, (box.over(branch), gate, gate, *strides))
        return launch.fn, args, launch.keywords
    return p.launch.fn, _arguments(p, *qkv, out, lse, call), p.launch.keywords
