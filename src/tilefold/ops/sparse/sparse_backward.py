"""Backward block-sparse attention: plan, allocate, launch; and the autograd function around forward and backward."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from ...errors import DtypeError, Unsupported
from ..backward.backward_parts import (
    ROWS,
    boxes,
    check_given,
    delta_bound,
    readable,
    score_slope,
    side_strides,
    slopes_of,
    statistics_by,
    three_by,
    tiled,
    zeros_for,
)
from ..bound import Bound, Example, attribute, meta
from ..dense.attention_parts import dims_of, lengths_of
from ..device import device_of, interpreting
from ..first_call import without_collector
from ..operator import differentiable, first_derivative
from ..serve import BoundFunction, function_at, plan_at
from ..source import Lists, facts_of
from ..watch import resolved, wants_gradient
from . import sparse, sparse_backward_hopper
from .sparse_call import check_unchanged, versions_of
from .sparse_parts import Launches, list_values, mod_values

if TYPE_CHECKING:
    from ...plan.device import Device
    from ...plan.sparse.sparse import SparsePlan
    from ...plan.sparse.sparse_backward import SparseBackwardPlan
    from ..call import Call
    from .sparse_backward_hopper import HopperBound

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
HOPPER_KERNEL = "sparse_backward_hopper"
GIVEN = ("Q", "K", "V", "DOut", "Lse2", "Delta", "DQ", "DK", "DV", "call", "turned")
"""What a call gives to the portable kernels."""


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: "Call", transposed: "Callable[[], Lists]", found: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if found is None and wants_gradient((q, k, v)):  # not if only functorch watches: then the backward pass says so
        check_differentiable(q, k, v, call)
    found = found or sparse.prepare(q, k, v, call)
    return found.run(found, q, k, v, call)  # type: ignore[no-any-return]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.call, ctx.transposed, ctx.found = inputs[3:]
    ctx.versions = versions_of(ctx.call)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 6
    q, k, v, out, lse = ctx.saved_tensors
    check_unchanged(ctx.call, ctx.versions)
    dout, dlse = torch.zeros_like(out) if dout is None else resolved(dout), resolved(dlse)
    rest = ctx.call, ctx.transposed(), ctx.needs_input_grad[:3], ctx.found
    return *_gradient(q, k, v, out, lse, dout, dlse, *rest), None, None, None


def _refuse(ctx: Any, *gradients: Any) -> Any:
    raise Unsupported("sparse_attention has first derivatives only: this call differentiates its gradient")


DIFFERENTIABLE, TRANSFORMED = differentiable(_attend, _keep, _differentiate)
"""(out, lse) of sparse attention, differentiable in q, k and v; and the same for torch.func."""
_gradient = first_derivative("sparse_attention", lambda *given: backward(given[:5], *given[5:]), _refuse)


def differentiated(found: Any, q: Any, k: Any, v: Any, call: "Call", transpose: "Callable[[], Any]") -> Any:
    """(out, lse) of a call that has this record, with a node of autograd."""
    return DIFFERENTIABLE.apply(q, k, v, call, lambda: Lists.of(transpose()), found)


def check_differentiable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: "Call") -> Any:
    """The call's record, after everything that would stop the backward pass, before the forward pass is launched; Unsupported
    names a part of the call whose derivative nobody gave."""
    score_slope(call.score_mod, call.score_grad)
    prepared = sparse.prepare(q, k, v, call)
    if prepared.plan is not None:
        _plan(prepared, call, q)
    return prepared


def backward_plan_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: "Call", on: "Device | None" = None
) -> "SparseBackwardPlan":
    """The plan that the backward pass of a call with queries follows; Unsupported for a call that has none.  on: as on that
    device."""
    if call.paged is not None:
        raise Unsupported("attention over pages has no backward pass, so direction='backward' has no plan")
    if on is not None:
        score_slope(call.score_mod, call.score_grad)
        return _plan(sparse.prepare_anew(q, k, v, call, on), call, q, on=on)
    prepared = check_differentiable(q, k, v, call)
    plan = _plan(prepared, call, q)
    if plan.kernel == HOPPER_KERNEL and call.backward_plan is None:
        from ...kernels import hopper

        if hopper.refusal() is not None:
            return _plan(prepared, call, q, portable=True)
    return plan


def backward(
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    call: "Call",
    transposed: "Lists",
    wanted: tuple[bool, ...] = (True, True, True),
    found: Any = None,
) -> Gradients:
    """(dq, dk, dv), each shaped like its tensor and contiguous, None where not wanted; saved: q, k, v, out, lse of the
    forward pass; dout like out, dlse like lse or None; found: the call's record, if somebody has it."""
    q, k, v, out, lse = saved
    score_slope(call.score_mod, call.score_grad)
    prepared = found or sparse.prepare(q, k, v, call)
    if prepared.planned is None:
        return cast("Gradients", zeros_for(saved[:3], wanted))
    if isinstance(prepared.bound, BoundFunction):
        own = function_at("sparse_attention_backward", q.device, _plan(prepared, call, q))
        return cast("Gradients", own((*saved, dout, dlse, call, wanted)))
    dout, lse, dlse = readable(dout), lse.contiguous(), None if dlse is None else dlse.contiguous()
    saved = q, k, v, out, lse
    bound = _bound(prepared, saved, dout, dlse, call, transposed)
    if not isinstance(bound, Launches):
        gradients = sparse_backward_hopper.run(bound, saved, dout, dlse, call, transposed)
        return cast("Gradients", tuple(g if want else None for g, want in zip(gradients, wanted, strict=True)))
    rows = q, k, v, dout, *statistics_by(bound.delta, out, dout, lse, dlse)
    return three_by(bound.queries, bound.keys, rows, wanted, call, transposed)


# ---------------------------------------------------------------- the first time


def _bound(
    prepared: Any,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    call: "Call",
    transposed: "Lists",
) -> "Launches | HopperBound":
    """The bound launches, kept on the forward pass's record: everything else that decides them is in its key."""
    hooks = call.score_grad, call.backward_plan
    # A launch keeps what it compiled: where an argument may be None, that is part of the key.
    given = (dout, saved[3], dlse, transposed.indices, transposed.counts)
    key = *(None if t is None else facts_of(t) for t in given), *map(id, hooks)
    found: Launches | HopperBound | None = prepared.further.get(key)
    if found is None:
        alike = _key_of_tiles(prepared, call, key)
        if (near := None if alike is None else prepared.shared.get(alike)) is not None:
            found = near.of_lengths(saved, dout, call)
        else:
            with without_collector():
                found = _bound_anew(prepared, saved, dout, call, transposed)
            if alike is not None and not isinstance(found, Launches):
                prepared.shared[alike] = found
        prepared.further[key] = found
        prepared.keep += hooks
    return found


def _bound_anew(
    prepared: Any, saved: tuple[Any, ...], dout: torch.Tensor, call: "Call", transposed: "Lists"
) -> "Launches | HopperBound":
    """`_bound` of a call that is like none before."""
    plan, found = _plan(prepared, call, saved[0]), None
    if plan.kernel == HOPPER_KERNEL:
        found = sparse_backward_hopper.bind(prepared.scale, saved, dout, call, transposed, plan)
        if found is None:  # after a warning: this Triton cannot make it
            plan = _plan(prepared, call, saved[0], portable=True)
    return found or _bind(prepared, saved, dout, call, transposed, plan)


def _key_of_tiles(prepared: Any, call: "Call", key: Any) -> Any:
    """The key of calls of a family that make the same tiles; None for other calls.  key: of `_bound`."""
    if prepared.shared is None:
        return None
    dout, out, dlse, *turned = key
    at, lists = 2 if call.layout == "bhsd" else 1, call.lists
    strides = [None if t is None else t.stride() for t in lists[:4]]
    sides = [(facts[0], facts[2][at], facts[3:]) for facts in (dout, out)]
    blocks = -(-lists.seq_q // lists.block_q), -(-lists.seq_k // lists.block_k)
    return *blocks, *strides, *sides, dlse and dlse[3:], *turned


def _plan(
    prepared: Any, call: "Call", q: torch.Tensor, portable: bool = False, on: "Device | None" = None
) -> "SparseBackwardPlan":
    from ...plan.sparse.sparse_backward import SparseBackwardPlan, plan_sparse_backward
    from ..hopper import disabled

    problem = prepared.plan.problem
    device = on or device_of(q.device, "sparse_attention_backward")
    if (own := plan_at("sparse_attention_backward", problem, device, call, call.backward_plan)) is not None:
        return own  # type: ignore[no-any-return]
    if call.backward_plan is None:
        return plan_sparse_backward(problem, device, portable or disabled())
    if not isinstance(call.backward_plan, SparseBackwardPlan):
        raise DtypeError(f"backward_plan must be a SparseBackwardPlan or None, got {type(call.backward_plan).__name__}")
    check_given(call.backward_plan, problem, device)
    return call.backward_plan


def _bind(
    prepared: Any,
    saved: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    call: "Call",
    transposed: "Lists",
    plan: "SparseBackwardPlan",
) -> Launches:
    from ...device import mods
    from ...kernels.sparse import sparse_backward as kernels

    q, k, v, out, lse = saved
    problem, n, device = plan.problem, plan.problem.attention, q.device
    packed, boxed, layout = call.packed is not None, plan.kernel == "sparse_backward_box", call.layout
    strides = side_strides(layout, q=q, k=k, v=v, d=dout, o=out, g=q.shape, x=k.shape, y=v.shape)
    farthest = max(strides[f"stride_{name}"] for name in ("qm", "kn", "vn", "dm"))
    constants = {
        "EMULATE": interpreting() and q.dtype == torch.bfloat16,
        "WIDE": farthest * max(plan.queries.block_m, plan.keys.block_n) >= 1 << 31,
        **dims_of(n),
        "Q_BLOCK": problem.block_q,
        "KV_BLOCK": problem.block_k,
        "BOX": boxed,
    }
    edge_k = packed or problem.masked or n.seq_k % problem.block_k != 0
    edge_q = packed or call.lists.query_sizes is not None or n.seq_q % problem.block_q != 0
    values = {
        **strides,
        "stride_lb": 0 if packed else lse[0].numel(),
        "stride_lh": lse.shape[-1],
        "scale": prepared.scale,
        **lengths_of(n),
        "CuQ": attribute("call", "source.cu_q", call.packed),
        "CuK": attribute("call", "source.cu_k", call.packed),
        **mod_values(mods, call, q.dtype),
        "slopes": slopes_of(mods, float(call.softcap), call, q.dtype == torch.float32)[0],
    }
    of_queries, of_keys = {**values, **list_values(call)}, {**values, **list_values(call, transposed)}
    if boxed:  # what streams by
        of_queries |= boxes(layout, plan.queries.block_n, K=(k, n.block_qk), V=(v, n.block_v))
        of_keys |= boxes(layout, plan.keys.block_m, Q=(q, n.block_qk), DOut=(dout, n.block_v))
    alone = {**constants, "EDGE": edge_q, "ALONE": n.heads == n.kv_heads}
    constants["EDGE"] = edge_k
    rows = q.shape[0] if packed else n.seq_q
    return Launches(
        delta_bound(n, rows * (1 if packed else n.batch), rows, farthest * ROWS >= 1 << 31, strides, device),
        tiled(kernels.sparse_backward_queries, plan.queries, plan.grids[0], GIVEN, of_queries, constants, device),
        tiled(kernels.sparse_backward_keys, plan.keys, plan.grids[1], GIVEN, of_keys, alone, device),
    )


# ---------------------------------------------------------------- without a GPU


def example_launch(plan: "SparsePlan", backward_plan: "SparseBackwardPlan", part: str) -> Example:
    """(kernel, args, kwargs) of a part of the backward pass of a call that has these plans, on tensors without memory, to compile
    ahead: "delta", "queries" or "keys"; of the Hopper kernel "statistics", "places" or "main"."""
    from .sparse_example import example_call

    (q, k, v), call, prepared, out, lse = example_call(plan)
    saved, call = (q, k, v, out, lse), call._replace(backward_plan=backward_plan)
    lists, n = call.lists, plan.problem.attention
    blocks, rows = -(-n.seq_k // lists.block_k), lists.indices.shape[2]
    indices, counts = (meta(n.batch, n.heads, blocks, *more, dtype=torch.int32) for more in ((rows,), ()))
    transposed = lists._replace(indices=indices, counts=counts)
    if backward_plan.kernel == HOPPER_KERNEL:
        return sparse_backward_hopper.example_launch(saved, out, call, transposed, backward_plan, part)
    bound = _bind(prepared, saved, out, call, transposed, backward_plan)
    if part == "delta":
        return bound.delta.example((out, out, lse, lse, lse, lse))
    made: Bound = getattr(bound, part)
    return made.example((q, k, v, out, lse, lse, q, k, v, call, transposed))
