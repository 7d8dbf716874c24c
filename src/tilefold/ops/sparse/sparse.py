"""Forward block-sparse attention: check, plan, allocate, launch, merge."""

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from .. import records
from ..bound import Bound, Prepared, attribute, run, stand_in
from ..call import Call, result_shapes
from ..dense.attention_parts import (
    GIVEN,
    boxable,
    boxed,
    dims_of,
    head_strides,
    hooks_of,
    problem_of,
    shared_values,
    sides_of,
)
from ..dense.split import Split, bind_merge
from ..device import device_of, interpreting, on_host
from ..hopper import disabled
from ..numerics import refuse_invariant
from ..places import check_inside, check_pages
from ..records import recorded, remember
from ..serve import function_at, plan_at
from ..source import Packed, Paged, is_plain, key_of
from .sparse_call import check_call, check_lists
from .sparse_parts import HOPPER_KERNEL, list_values, mod_values

if TYPE_CHECKING:
    from ...plan.device import Device
    from ...plan.sparse.sparse import SparsePlan

BLOCK_SPLITS = 16  # partials that one step of the merge takes in


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of block-sparse attention; see `tilefold.sparse_attention`."""
    return run(prepare(q, k, v, call), q, k, v, call)


def _look(sizes: Any, q: torch.Tensor, k: torch.Tensor, call: Call) -> None:
    """In the interpreter a read outside a tensor ends the process: look at what says where blocks and sequences lie."""
    source = call.source
    check_lists(call.lists)
    if isinstance(source, Packed):
        check_inside(source, q.shape[0], k.shape[0])
    if isinstance(source, Paged):
        check_pages(source, k.shape[0], k.shape[1 if call.layout == "bshd" else 2], call.lists.seq_k)


def _near(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, *others: Any, key: Any) -> Prepared | None:
    """The record of a call from that of other lengths; None if there is none.  others: as of `key_of`."""
    family = _key_of_any_length(key, call)
    return None if family is None else _of_other_lengths(family, q, k, v, call)


@recorded("sparse_attention", key_of, _near)
def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, *others: Any, key: Any = None) -> Prepared:
    """The record of this call's shapes and options; checks everything."""
    refuse_invariant("sparse attention", "its tiles follow the lists of blocks", call.numerics)
    found, family = prepare_anew(q, k, v, call), _key_of_any_length(key, call)
    if family is not None and getattr(found.plan, "kernel", "") == HOPPER_KERNEL:
        found.shared = {}
        remember(records.CACHE, family, found)
    found.look = _look if on_host(q) else None
    return found


def _key_of_any_length(key: Any, call: Call) -> Any:
    """The key of calls that differ in lengths alone, and in whether the last KV block is whole; None for other calls.  key: of
    the call."""
    if key is None or call.source is not None or not is_plain(call):
        return None
    (q, k, v, options), _, (_, (parts, (block_q, block_k, seq_q, seq_k))) = key
    at = 2 if call.layout == "bhsd" else 1
    if not len(q[1]) == len(k[1]) == len(v[1]) == 4 or seq_q != q[1][at] or not seq_k == k[1][at] == v[1][at]:
        return None
    if parts[0] is None or len(parts[0][1]) != 4:
        return None
    lists = [None if t is None else (len(t[1]), t[1][: min(2, len(t[1]) - 1)], t[3:]) for t in parts]
    blocks = block_q, block_k, parts[0][1][3], seq_k % block_k == 0
    return "sparse attention of any lengths", sides_of(q, k, v, at), *lists, blocks, options


def _of_other_lengths(family: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Prepared | None:
    """The record of a call from that of other lengths; None where there is none, or these have another kernel or tile."""
    first = records.CACHE.get(family)
    if first is None or disabled():
        return None
    rules, hopper = _rules()
    lengths = call.lists.seq_q, call.lists.seq_k
    # Everything that a plan of this family counts is query tiles, of 64 rows or a multiple; the longest keys are 2^30.
    alike = family, -(-lengths[0] // 64), (lengths[1] - 1) >> 30
    near: Prepared | None = records.CACHE.get(alike)
    plan: Any = (near or first).planned
    if near is None:
        plan = rules.plan_sparse(first.plan.problem.of_lengths(*lengths), first.plan.device)
        if plan.kernel != HOPPER_KERNEL or plan.tile != first.plan.tile:
            return None
    batch, heads, _ = first.lse_shape
    dim = first.out_shape[-1]
    out = (batch, lengths[0], heads, dim) if call.layout == "bshd" else (batch, heads, lengths[0], dim)
    shapes = out, (batch, heads, lengths[0])
    bound = first.bound.with_values(*hopper.values_of_lengths(q, call, plan, out), (q, k, v))
    if near is not None:
        plan = functools.partial(_plan_alike, plan, *lengths)
    made: Prepared = first.of_lengths(plan, shapes, bound, first.shared)
    return made if near is not None else remember(records.CACHE, alike, made)


def _plan_alike(plan: "SparsePlan", *lengths: int) -> "SparsePlan":
    """The plan of the same problem with other lengths, which make the same tiles."""
    problem = plan.problem.of_lengths(*lengths)
    return plan.alike(problem, ("reason",), lambda: _rules()[0].plan_sparse(problem, plan.device))


@functools.cache
def _rules() -> tuple[Any, Any]:
    from ...plan.sparse import sparse  # here: `import tilefold` stays light
    from . import sparse_hopper

    return sparse, sparse_hopper


def prepare_anew(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, on: "Device | None" = None) -> Prepared:
    """The record of a call that is like none before; checks everything.  on: its plan alone, as on that device."""
    from ...plan.sparse.sparse import SparseProblem, plan_sparse
    from ..hopper import bound_or_none

    sizes, scale = check_call(q, k, v, call)
    out_shape, lse_shape = result_shapes(call, sizes)
    device = on or device_of(q.device, "sparse_attention")
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
        bound = None if on else function_at("sparse_attention", q.device, own)
        return Prepared(own, *shapes, bound, scale, keep)
    plan: Any = call.plan or plan_sparse(problem, device, portable=disabled())
    if call.plan is not None:
        plan.check(problem, device)
    if on is not None:
        return Prepared(plan, *shapes)
    if call.plan is None and plan.kernel == HOPPER_KERNEL:
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
    if plan.kernel == HOPPER_KERNEL:
        from . import sparse_hopper

        bound: Any = sparse_hopper.bind(q, k, v, call, scale, plan, shapes[0])
    else:
        bound = _bind(q, k, v, call, sizes, scale, plan, shapes[0])
    return Prepared(plan, *shapes, bound, scale, hooks_of(call))


def _bind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    sizes: dict[str, int],
    scale: float,
    plan: "SparsePlan",
    out_shape: tuple[int, ...],
) -> Bound | Split:
    """The portable kernel, with the merge of its shares where there are some: run-time scalars and compile-time constants."""
    from ...device import mods
    from ...kernels.sparse import sparse_forward

    problem = plan.problem
    n = problem.attention
    q_strides, k_strides, v_strides = (head_strides(t, call.layout) for t in (q, k, v))
    emulate = interpreting() and q.dtype == torch.bfloat16
    early = plan.splits > 1 and plan.device.dependent_launches
    constants = _constants(plan, emulate, early, (q_strides[-2], k_strides[-2], v_strides[-2]))
    values = {
        **shared_values({**sizes, "seq_k": n.seq_k}, scale, q, k, v, out_shape, call.layout),
        "CuQ": attribute("call", "source.cu_q", call.packed),
        "CuK": attribute("call", "source.cu_k", call.packed),
        "Table": attribute("call", "paged.block_table", call.paged),
        "Lengths": attribute("call", "paged.cache_seqlens", call.paged),
        "stride_kp": k_strides[0],
        "stride_vp": v_strides[0],
        "stride_os": math.prod(out_shape),
        "stride_tb": None if call.paged is None else call.paged.block_table.stride(0),
        **list_values(call),
        **mod_values(mods, call, q.dtype),
    }
    if plan.kernel == "sparse_forward_box":
        values |= boxed(k, v, call.layout, plan.block_n, (n.block_qk, n.block_v))
    kernel, options = getattr(sparse_forward, plan.kernel), {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    bound = Bound.of(kernel, plan.grid, GIVEN, values, constants, q.device, **options)
    if plan.splits == 1:
        return bound
    blocks = n.block_v, BLOCK_SPLITS
    merge = bind_merge(out_shape, call.layout, plan.splits, blocks, emulate, q.device, early)
    return Split(bound, merge, plan.splits)


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
        **dims_of(n),
        "Q_BLOCK": problem.block_q,
        "KV_BLOCK": problem.block_k,
        **({"PAGE": problem.page_size} if problem.page_size else {}),
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
    }
