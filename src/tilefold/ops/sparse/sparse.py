"""Forward block-sparse attention: check, plan, allocate, launch, merge."""

import functools
import math
from typing import TYPE_CHECKING, Any, cast

import torch

from .. import records
from ..bound import Bound, Slot, attribute, stand_in, strides_named
from ..call import Call, is_plain, key_of, result_shapes
from ..dense.attention_parts import (
    boxable,
    boxed,
    head_strides,
    hooks_of,
    new_results,
    problem_of,
    shared_values,
    side_of,
)
from ..device import device_of, interpreting, on_host
from ..numerics import refuse_invariant
from ..places import check_inside, check_pages
from ..records import recorded, remember
from ..serve import function_at, plan_at
from .sparse_call import check_call, check_lists
from .sparse_parts import GIVEN, HOPPER_KERNEL, TO_MERGE, Prepared, list_values, mod_values

if TYPE_CHECKING:
    from ...plan.sparse.sparse import SparsePlan

__all__ = [
    "bind",
    "forward",
    "prepare",
    "run",
]

BLOCK_SPLITS = 16  # partials that one step of the merge takes in


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of block-sparse attention; see `tilefold.sparse_attention`."""
    return run(prepare(q, k, v, call), q, k, v, call)


def run(
    p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`forward` of a call that has this record."""
    out, lse = new_results(q, p.out_shape, p.lse_shape)
    if p.plan is None:
        return out, lse
    if p.placed:
        _check_placement(k, q.shape[0], call)
    splits = p.plan.splits
    if splits == 1:
        p.bound((q, k, v, out, lse, call))
    else:
        part = torch.empty((splits, *p.out_shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((splits, *p.lse_shape), dtype=torch.float32, device=q.device)
        p.bound((q, k, v, part, part_lse, call))
        p.merge((part, part_lse, out, lse))
    return out, lse


def _check_placement(k: torch.Tensor, total_q: int, call: Call) -> None:
    """In the interpreter a read outside a tensor ends the process: look at what says where blocks and sequences lie."""
    check_lists(call.lists)
    if call.packed is not None:
        check_inside(call.packed, total_q, k.shape[0])
    if call.paged is not None:
        page_size = k.shape[1 if call.layout == "bshd" else 2]
        check_pages(call.paged, k.shape[0], page_size, call.lists.seq_k)


def _near(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, *others: Any, key: Any) -> Prepared | None:
    """The record of a call from that of other lengths; None if there is none.  others: as of `key_of`."""
    family = _key_of_any_length(key, call)
    return None if family is None else _of_other_lengths(family, q, k, v, call)


@recorded("sparse_attention", key_of, _near)
def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, key: Any = None) -> Prepared:
    """The record of this call's shapes and options; checks everything."""
    refuse_invariant("sparse attention", "its tiles follow the lists of blocks", call.numerics)
    found, family = _prepare(q, k, v, call), _key_of_any_length(key, call)
    if family is not None and getattr(found.plan, "kernel", "") == HOPPER_KERNEL:
        remember(records.CACHE, family, found)
    found.placed = on_host(q)
    return found


def _key_of_any_length(key: Any, call: Call) -> Any:
    """The key of calls that differ in lengths alone, and in whether the last KV block is whole; None for other calls.  key: of
    the call."""
    if key is None or call.source is not None or not is_plain(call):
        return None
    (q, k, v, options), _, (_, (parts, (block_q, block_k, seq_q, seq_k))), _ = key
    at = 2 if call.layout == "bhsd" else 1
    if not len(q[1]) == len(k[1]) == len(v[1]) == 4 or seq_q != q[1][at] or not seq_k == k[1][at] == v[1][at]:
        return None
    if parts[0] is None or len(parts[0][1]) != 4:
        return None
    lists = [None if t is None else (len(t[1]), t[1][: min(2, len(t[1]) - 1)], t[3:]) for t in parts]
    blocks = block_q, block_k, parts[0][1][3], seq_k % block_k == 0
    return "sparse attention of any lengths", side_of(q, at), side_of(k, at), side_of(v, at), *lists, blocks, options


def _of_other_lengths(family: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Prepared | None:
    """The record of a call from that of other lengths; None where there is none, or these have another kernel or tile."""
    first = records.CACHE.get(family)
    if first is None:
        return None
    from ...plan.sparse.sparse import plan_sparse
    from ..hopper import disabled
    from .sparse_hopper import values_of_lengths

    lengths = call.lists.seq_q, call.lists.seq_k
    # Everything that a plan of this family counts is query tiles, of 16 rows or a multiple; the longest keys are 2^30.
    alike = None if disabled() else (family, -(-lengths[0] // 16), (lengths[1] - 1) >> 30)
    near: Prepared | None = records.CACHE.get(alike)
    old = cast("SparsePlan", (near or first).plan)
    problem = old.problem.of_lengths(*lengths)
    if near is not None:
        plan = old.alike(problem, ("reason",), lambda: plan_sparse(problem, old.device))
    else:
        plan = plan_sparse(problem, old.device, portable=alike is None)
        if plan.kernel != HOPPER_KERNEL or plan.tile != old.tile:
            return None
    n = problem.attention
    shapes = result_shapes(call, {"batch": n.batch, "seq_q": n.seq_q, "heads": n.heads, "dim_v": n.dim_v})
    bound = first.bound.with_values(*values_of_lengths(q, k, v, call, plan, shapes[0]))
    made = Prepared(plan, *shapes, first.scale, first.mods, bound, None, first.keep, placed=first.placed,
                    ways=first.ways)  # fmt: skip
    if alike is None:
        return made
    made.shared = {} if near is None else near.shared
    return made if near is not None else remember(records.CACHE, alike, made)


def _prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Prepared:
    """The record of a call; checks everything."""
    from ...plan.sparse.sparse import SparseProblem, plan_sparse
    from ..hopper import bound_or_none, disabled

    sizes, scale = check_call(q, k, v, call)
    out_shape, lse_shape = result_shapes(call, sizes)
    device = device_of(q.device, "sparse_attention")
    keep = hooks_of(call)
    if 0 in (*lse_shape, sizes["batch"], sizes["seq_q"]):
        return Prepared(None, out_shape, lse_shape, keep=keep)
    attention = problem_of(q, k, v, call, sizes, (-1, 0) if call.causal else (-1, -1))
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
    if (own := plan_at("sparse_attention", problem, device, call, call.plan)) is not None:
        return Prepared(own, *shapes, scale, bound=function_at("sparse_attention", q.device, own), keep=keep)
    if call.plan is not None:
        given: SparsePlan = call.plan  # type: ignore[assignment]
        given.check(problem, device)
        return bind(q, k, v, call, sizes, scale, given, shapes)
    plan = plan_sparse(problem, device, portable=disabled())
    if plan.kernel == HOPPER_KERNEL:
        given_to = (q, k, v, stand_in(q.dtype), stand_in(torch.float32), call)
        made = functools.partial(bind, q, k, v, call, sizes, scale, plan, shapes)
        found = bound_or_none("block-sparse", made, lambda p: p.bound.compile(given_to))
        if found is not None:
            return found
        plan = plan_sparse(problem, device, portable=True)
    return bind(q, k, v, call, sizes, scale, plan, shapes)


def bind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    sizes: dict[str, int],
    scale: float,
    plan: "SparsePlan",
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> Prepared:
    """The record of this call under this plan."""
    from ...device import mods

    if plan.kernel == HOPPER_KERNEL:
        from . import sparse_hopper

        bound, merge = sparse_hopper.bind(q, k, v, call, scale, plan, shapes[0]), None
    else:
        bound, merge = _bind(q, k, v, call, sizes, scale, plan, shapes[0], mods)
    keep = hooks_of(call)
    return Prepared(plan, *shapes, scale, mods, bound, merge, keep)


def _bind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    sizes: dict[str, int],
    scale: float,
    plan: "SparsePlan",
    out_shape: tuple[int, ...],
    mods: Any,
) -> tuple[Bound, Bound]:
    """The portable kernel, and the merge of its shares: run-time scalars and compile-time constants."""
    from ...kernels.sparse import sparse_forward
    from ..launch import Launch

    problem = plan.problem
    n = problem.attention
    q_strides, k_strides, v_strides, out_strides = (head_strides(t, call.layout) for t in (q, k, v, out_shape))
    emulate = interpreting() and q.dtype == torch.bfloat16
    early = plan.splits > 1 and plan.device.dependent_launches
    constants = _constants(plan, emulate, early, (q_strides[-2], k_strides[-2], v_strides[-2]))
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages, **({"launch_pdl": True} if early else {})}
    launch = Launch(getattr(sparse_forward, plan.kernel), plan.grid, constants, options, q.device.index or 0)
    # To the merge, and in the kernel's own arguments, packed rows are those of one long sequence.
    batch, rows = (1, sizes["total_q"]) if n.varlen else (n.batch, n.seq_q)
    share = math.prod(out_shape)
    values = {
        **shared_values({**sizes, "seq_k": n.seq_k}, scale, q, k, v, out_shape, call.layout),
        "CuQ": attribute("call", "source.cu_q", call.packed),
        "CuK": attribute("call", "source.cu_k", call.packed),
        "Table": attribute("call", "paged.block_table", call.paged),
        "Lengths": attribute("call", "paged.cache_seqlens", call.paged),
        "stride_kp": k_strides[0],
        "stride_vp": v_strides[0],
        "stride_os": share,
        "stride_tb": None if call.paged is None else call.paged.block_table.stride(0),
        **list_values(call),
        **mod_values(mods, call, q.dtype),
    }
    if plan.kernel == "sparse_forward_box":
        values |= boxed(k, v, call.layout, plan.block_n, (n.block_qk, n.block_v))
    merge = _merge(plan, batch, rows, (share, *out_strides), emulate, early, launch.device)
    return Bound(launch, GIVEN, values), merge


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


def _merge(
    plan: "SparsePlan", batch: int, rows: int, strides: tuple[int, ...], emulate: bool, early: bool, device: int
) -> Bound:
    """The launch that merges the shares of `rows` rows of each of `batch` sequences; strides: of a share, and of out."""
    from ...kernels.cache.combine import combine
    from ..launch import Launch

    n = plan.problem.attention
    constants = {"EMULATE": emulate, "DIM": n.dim_v, "BLOCK_D": n.block_v, "BLOCK_S": BLOCK_SPLITS, "EARLY": early}
    options = {"num_warps": max(1, n.block_v // 128), **({"launch_pdl": True} if early else {})}
    launch = Launch(combine, (rows * n.heads * batch, 1, 1), constants, options, device)
    each = strides[1:] if len(strides) == 4 else (0, *strides[1:])
    values = {
        **{name: Slot(of) for name, of in zip(("Part", "PartLse", "Out", "Lse"), TO_MERGE, strict=True)},
        "splits": plan.splits,
        "batch": batch,
        "seq_q": rows,
        "heads": n.heads,
        **strides_named("p", (strides[0], *each), "sbmh"),
        **strides_named("o", each, "bmh"),
    }
    return Bound(launch, TO_MERGE, values)
