"""Backward dense attention: plan, allocate, launch; and the autograd function around forward and backward."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...errors import DtypeError, Unsupported
from .. import torch_cpu
from ..call import UNBOUNDED, Call, facts_of, window_of
from ..dense import attention
from ..dense.attention_parts import dropout_of, kind_of, mods_of, sequence_strides
from ..device import device_of, interpreting
from ..hopper import disabled
from ..startup import uncollected
from ..watch import resolved, wants_gradient
from .attention_backward_weights import bind_weights, weighted
from .backward_parts import (
    ROWS,
    Bound,
    boxes_of,
    delta_launch,
    readable,
    require_score_grad,
    streamed,
    tiled,
)

if TYPE_CHECKING:
    from ...plan.attention import AttentionPlan
    from ...plan.attention_backward import AttentionBackwardPlan
    from ...plan.problem import AttentionProblem
    from .attention_backward_hopper import HopperBound
    from .attention_backward_packed import PackedBound
    from .attention_backward_reduce import ReduceBound
    from .attention_backward_spans import SpansBound

__all__ = ["Attention", "backward", "backward_plan_of", "check_differentiable", "example_launch"]

Gradients = tuple[torch.Tensor | None, ...]  # of q, k, v, bias and sinks
SINK_ROWS = 1024
HOPPER, REDUCE = "attention_backward_hopper", "attention_backward_reduce"


@dataclass(slots=True)
class DenseBound(Bound):
    """And those of the gradients of bias and sinks."""

    bias: Any
    bias_tail: tuple[Any, ...]
    sinks: Any
    sinks_tail: tuple[Any, ...]
    weights: Any
    weights_tail: tuple[Any, ...]


class Attention(torch.autograd.Function):
    """(out, lse) of dense attention, differentiable in q, k, v, bias and sinks.  The tensors of the call come apart from it, so
    that autograd and torch.func see every one."""

    @staticmethod
    def forward(
        bare: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        call = joined(bare, tensors)
        if wants_gradient((q, k, v, *tensors)):  # not if only functorch watches: then the backward pass says so
            check_differentiable(q, k, v, call)
        return attention.forward(q, k, v, call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Apart from forward, as functorch's transforms want it."""
        ctx.bare = inputs[0]
        ctx.save_for_backward(*output, *inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        out, lse, *inputs = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (1 + len(inputs))
        dout, dlse = torch.zeros_like(out) if dout is None else resolved(dout), resolved(dlse)
        need = ctx.needs_input_grad
        wanted = (*need[1:4], need[5], need[7])
        dq, dk, dv, dbias, dsinks = AttentionGradient.apply(  # type: ignore[no-untyped-call]
            ctx.bare, wanted, dout, dlse, out, lse, *inputs
        )
        return None, dq, dk, dv, None, dbias, None, dsinks, *(None,) * (len(inputs) - 7)


class AttentionGradient(torch.autograd.Function):
    """The backward pass as a function of its own: torch.func unwraps its tensors, and a second derivative is refused."""

    @staticmethod
    def forward(
        bare: Call,
        wanted: tuple[bool, ...],
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *tensors: torch.Tensor | None,
    ) -> Gradients:
        return backward((q, k, v, out, lse), dout, dlse, joined(bare, tensors), wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        """Nothing is kept: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise Unsupported("attention has first derivatives only: this call differentiates its gradient")


def split(call: Call) -> tuple[Call, tuple[torch.Tensor | None, ...]]:
    """The call without its tensors, and these: alibi_slopes, bias, mask, sinks, two offsets, the seed, then those of the mods."""
    args = [a for a in (*call.score_args, *call.mask_args) if isinstance(a, torch.Tensor)]
    packed = call.packed
    offsets = (None, None) if packed is None else packed[:2]
    score_args, mask_args = (
        tuple(None if isinstance(a, torch.Tensor) else a for a in each) for each in (call.score_args, call.mask_args)
    )
    bare = call._replace(
        alibi_slopes=None, bias=None, mask=None, sinks=None, score_args=score_args, mask_args=mask_args,
        dropout_seed=None,
        packed=None if packed is None else packed._replace(cu_q=None, cu_k=None),  # type: ignore[arg-type]
    )  # fmt: skip
    return bare, (call.alibi_slopes, call.bias, call.mask, call.sinks, *offsets, call.dropout_seed, *args)


def joined(bare: Call, tensors: Sequence[torch.Tensor | None]) -> Call:
    """What `split` took apart."""
    slopes, bias, mask, sinks, cu_q, cu_k, seed = tensors[:7]
    left = iter(tensors[7:])
    score_args, mask_args = (
        tuple(next(left) if a is None else a for a in each) for each in (bare.score_args, bare.mask_args)
    )
    packed = None if bare.packed is None else bare.packed._replace(cu_q=cu_q, cu_k=cu_k)  # type: ignore[arg-type]
    return bare._replace(
        alibi_slopes=slopes,
        bias=bias,
        mask=mask,
        sinks=sinks,
        score_args=score_args,
        mask_args=mask_args,
        packed=packed,
        dropout_seed=seed,
    )


def check_differentiable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
    """Everything that would stop the backward pass, found before the forward pass is launched; Unsupported names a part of the
    call whose derivative nobody gave."""
    prepared = attention.prepare(q, k, v, call)
    require_score_grad(call.score_mod, call.score_grad)
    if prepared.plan is not None:
        backward_plan_of(prepared.problem, call, q, call.bias is not None and call.bias.requires_grad)


def backward(
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    call: Call,
    wanted: tuple[bool, ...],
    whole: bool = True,
) -> Gradients:
    """Gradients of q, k, v, bias and sinks, each shaped like its tensor and contiguous, None where not wanted; saved: q, k, v,
    out, lse of the forward pass; dout like out, dlse like lse or None.  whole: False if out and lse are those of more keys than k
    and v hold: the gradients are then summands, dk and dv in fp32 where the kernel adds them up in fp32, and the probabilities
    of these keys do not add up to 1."""
    q, k, v, out, lse = saved
    require_score_grad(call.score_mod, call.score_grad)
    prepared = attention.prepare(q, k, v, call)
    grads: list[Any] = [None] * 5
    if prepared.plan is None:
        targets = zip((q, k, v, call.bias, call.sinks), made_of(wanted), strict=True)
        return tuple(
            torch.zeros(t.shape, dtype=t.dtype, device=t.device) if t is not None and w else None for t, w in targets
        )
    if torch_cpu.on_cpu(prepared.plan):
        cut = backward_plan_of(prepared.problem, call, q, wanted[3]).cut  # type: ignore[attr-defined]
        return torch_cpu.backward(saved, dout, dlse, call, prepared.bound, cut, made_of(wanted))
    exact, drop = q.dtype == torch.float32, dropout_of(call)
    dout = dout.contiguous() if exact else readable(dout)  # what `weighted` makes of it has other strides else
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    bound = _bound(prepared, (q, k, v, out), dout, dlse, call, wanted[3])
    if not isinstance(bound, DenseBound):
        module, given = _gluon(call, bound.plan), (bound, (q, k, v, out), dout, lse, dlse)
        dq, dk, dv = module.run(*given, call) if whole or not bound.plan.queries_at_once else module.sums(*given)
        keys = wanted[1] or wanted[2]  # which come together, as from the portable kernels
        return dq if wanted[0] else None, dk if keys else None, dv if keys else None, None, None
    statistics = torch.empty((2, *lse.shape), dtype=torch.float32, device=lse.device)
    lse2, delta = statistics.unbind()
    bound.delta((out, dout, lse, dlse, lse2, delta, *bound.delta_tail))
    score, masks = mods_of(prepared.mods, prepared.softcap, call, exact)
    slopes, after_bias = slopes_of(prepared.mods, prepared.softcap, call, exact)
    if exact and whole:
        rows = q, k, dout, lse2, delta
        dout, delta = weighted(bound.weights, bound.weights_tail, rows, call, (score, masks))
    offsets = (None, None) if call.packed is None else call.packed[:2]
    inputs, own = streamed(bound, (q, k, v, dout), (lse2, delta))
    new = torch.empty if call.packed is None else torch.zeros  # rows of no sequence have no program
    if wanted[0]:
        grads[0] = new(q.shape, dtype=q.dtype, device=q.device)
        bound.queries((*inputs, grads[0], *offsets, *bound.queries_tail, score, slopes, masks, drop))
    if wanted[1] or wanted[2]:
        grads[1], grads[2] = (new(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
        if bound.keys is not None:
            bound.keys((*own, grads[1], grads[2], *offsets, *bound.keys_tail, score, slopes, masks, drop))
    if wanted[3] and call.bias is not None:
        arguments = (q, k, v, dout, lse2, delta), offsets, (score, after_bias, masks, drop)
        grads[3] = _bias_gradient(bound, call.bias, *arguments)
    if wanted[4] and call.sinks is not None:
        parts = torch.empty((prepared.problem.batch, lse.shape[-2]), dtype=torch.float32, device=q.device)
        bound.sinks((call.sinks, lse2, delta, parts, offsets[0], *bound.sinks_tail))
        grads[4] = parts.sum(0).to(call.sinks.dtype)
    return tuple(grads)


def made_of(wanted: Sequence[bool]) -> tuple[bool, ...]:
    """Which gradients are made if these are wanted: dk and dv come together, from one kernel."""
    return wanted[0], wanted[1] or wanted[2], wanted[1] or wanted[2], *wanted[3:]


def _bias_gradient(
    bound: DenseBound, bias: torch.Tensor, inputs: tuple[Any, ...], offsets: tuple[Any, ...], hooks: tuple[Any, ...]
) -> torch.Tensor:
    """Straight into the gradient, or through fp32 shares that are added in order."""
    if bound.bias is None:  # there are no keys
        return torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
    shares = bound.plan.bias_shares
    dtype = bias.dtype if shares == 1 else torch.float32
    parts = torch.empty((shares, *bias.shape), dtype=dtype, device=bias.device)
    bound.bias((*inputs, parts, *offsets, *bound.bias_tail, *hooks))
    return parts[0] if shares == 1 else parts.sum(0).to(bias.dtype)


def slopes_of(mods: Any, softcap: float, call: Call, exact: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The derivative of each score mod, in their order; and the same with 1 for the bias and the mods before it."""
    unit = (mods.unit_slope, ())  # a slope gets the args of its mod
    cap = (mods.softcap_exact_slope if exact else mods.softcap_slope, ())
    before = [cap] * bool(softcap) + [unit] * (call.alibi_slopes is not None) + [unit] * (call.bias is not None)
    after = [(call.score_grad, ())] if call.score_mod is not None else []
    return (*before, *after), (*[unit] * len(before), *after)


# ---------------------------------------------------------------- the first time


def backward_plan_of(
    problem: "AttentionProblem", call: Call, q: torch.Tensor, with_bias: bool
) -> "AttentionBackwardPlan":
    """The plan of the backward pass of a call that has this problem; with_bias: the bias gets a gradient."""
    from ...plan.attention_backward import AttentionBackwardPlan, plan_attention_backward

    bias = tuple(call.bias.shape[:3]) if with_bias and call.bias is not None else ()
    device = device_of(q.device, "attention_backward")
    if device.backend == "cpu":
        made: AttentionBackwardPlan = torch_cpu.planned("attention_backward", problem, call, call.backward_plan)
        return made
    if call.backward_plan is None:
        return plan_attention_backward(problem, device, bias, disabled(), call.deterministic)
    given = call.backward_plan
    if not isinstance(given, AttentionBackwardPlan):
        raise DtypeError(f"backward_plan must be an AttentionBackwardPlan or None, got {type(given).__name__}")
    # A plan with the gradient of the bias also serves a backward pass that is not asked for it.
    spare = call.bias is not None and given.bias == tuple(call.bias.shape[:3])
    given.check(problem, device, given.bias if spare and not with_bias else bias)
    return given


def _bound(
    prepared: Any,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    call: Call,
    with_bias: bool,
) -> "DenseBound | HopperBound | PackedBound | ReduceBound | SpansBound":
    """The bound launches, kept on the forward pass's record: everything else that decides them is in its key."""
    # A launch keeps what it compiled: where an argument may be None, that is part of the key.
    key = facts_of(dout), facts_of(tensors[3]), None if dlse is None else facts_of(dlse), with_bias, call.deterministic
    found: DenseBound | HopperBound | PackedBound | ReduceBound | SpansBound | None = prepared.backward.get(key)
    if found is None:
        from ...plan.attention_backward import plan_attention_backward

        plan, scale = backward_plan_of(prepared.problem, call, tensors[0], with_bias), prepared.scale
        with uncollected():
            if plan.kernel in (HOPPER, REDUCE):
                found = _gluon(call, plan).bind(scale, tensors, dout, call, plan)
                plan = plan_attention_backward(plan.problem, plan.device, plan.bias, portable=True)
            found = prepared.backward[key] = found or _bind(scale, tensors, dout, call, plan)
    return found


def _gluon(call: Call, plan: "AttentionBackwardPlan") -> Any:
    """The binding of the Gluon kernel that serves this call under this plan."""
    kind = "hopper" if call.packed is None else "packed"
    if plan.kernel == REDUCE or plan.queries_at_once:
        kind = "reduce" if plan.kernel == REDUCE else "spans"
    return importlib.import_module(f"{__package__}.attention_backward_{kind}")


def _bind(
    scale: float, tensors: tuple[torch.Tensor, ...], dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan"
) -> DenseBound:
    from ...kernels import attention_backward as kernels

    q, k, v, out = tensors
    n, packed, device, group = plan.problem, call.packed is not None, q.device.index or 0, plan.problem.group
    strides = [sequence_strides(t, call.layout) for t in (q, k, v, dout)]
    grad_strides = [sequence_strides(torch.empty(t.shape, device="meta"), call.layout) for t in (q, k, v)]
    inputs = tuple(one for each in strides for one in each)
    rows = q.shape[0] if packed else n.seq_q
    lse_strides = (0, rows) if packed else (n.heads * n.seq_q, n.seq_q)
    tiles = plan.queries, plan.keys, plan.scores
    most = max(ROWS, *(max(tile.block_m, tile.block_n) for tile in tiles))
    wide = max(s[1] for s in strides) * most >= 1 << 31
    constants = _constants(n, call, q.dtype, wide)
    band = tuple(UNBOUNDED if side < 0 else side for side in window_of(call.window, call.causal))
    boxed = plan.kernel == "attention_backward_box"
    queries, keys, _ = plan.grids
    return DenseBound(
        plan,
        delta_launch(n, rows * (1 if packed else n.batch), rows, wide, device),
        (rows, n.heads, *sequence_strides(out, call.layout), *strides[3]),
        tiled(kernels.attention_backward_queries, plan.queries, queries, {**constants, "BOX": boxed}, device),
        (scale, n.seq_q, n.seq_k, n.heads, group, *band, *inputs, *grad_strides[0], *lse_strides),
        tiled(kernels.attention_backward_keys, plan.keys, keys, {**constants, "BOX": boxed, "ALONE": group == 1}, device),
        (scale, n.seq_q, n.seq_k, n.kv_heads, group, *band, *inputs, *grad_strides[1], *grad_strides[2], *lse_strides),
        boxes_of(n, plan.queries, plan.keys, (q, k, v, dout), call.layout) if boxed else (),
        *_bind_terms(scale, call, plan, constants, band, inputs, lse_strides, device),
        *bind_weights(scale, call, plan, constants, band, inputs, lse_strides, device),
    )  # fmt: skip


def _bind_terms(
    scale: float,
    call: Call,
    plan: "AttentionBackwardPlan",
    constants: dict[str, Any],
    band: tuple[int, ...],
    inputs: tuple[int, ...],
    lse_strides: tuple[int, int],
    device: int,
) -> tuple[Any, tuple[Any, ...], Any, tuple[Any, ...]]:
    """The launches of bias and sinks with their arguments, None and nothing where there is none."""
    from ...kernels import attention_backward_terms as kernels
    from ..launch import Launch

    n = plan.problem
    bias: Any = None
    sinks: Any = None
    bias_tail: tuple[Any, ...] = ()
    sinks_tail: tuple[Any, ...] = ()
    if plan.bias:
        chosen = {**constants, "ROWS": plan.bias[2] > 1, "ROUND": interpreting()}
        bias = tiled(kernels.attention_backward_bias, plan.scores, plan.grids[2], chosen, device)
        bias_tail = (scale, n.seq_q, n.seq_k, n.batch, n.heads, n.group, *band, *plan.bias[:2], *inputs, *lse_strides)
    if call.sinks is not None:
        grid = (n.heads * n.batch, 1, 1)
        sinks = Launch(kernels.attention_backward_sinks, grid, {"BLOCK_M": SINK_ROWS}, {"num_warps": 4}, device)
        sinks_tail = n.seq_q, n.heads, call.sinks.stride(0), *lse_strides
    return bias, bias_tail, sinks, sinks_tail


def _constants(n: "AttentionProblem", call: Call, dtype: torch.dtype, wide: bool) -> dict[str, Any]:
    return {
        "KIND": kind_of(window_of(call.window, call.causal)),
        "EMULATE": interpreting() and dtype == torch.bfloat16,
        "WIDE": wide,
        "DIM_QK": n.dim_qk,
        "DIM_V": n.dim_v,
        "BLOCK_QK": n.block_qk,
        "BLOCK_V": n.block_v,
    }


# ---------------------------------------------------------------- without a GPU


def example_launch(
    problem: "AttentionProblem", plan: "AttentionPlan", backward_plan: "AttentionBackwardPlan", part: str
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of a part of the backward pass of a call that has these plans, on tensors without memory, to compile
    ahead: "delta", "queries", "keys", "bias", "sinks" or "weights"."""
    (q, k, v), call, prepared, out, lse = attention.example_call(problem, plan)
    bound = _bind(1.0, (q, k, v, out), out, call, backward_plan)
    exact, drop = problem.dtype == "float32", dropout_of(call)
    score, masks = mods_of(prepared.mods, prepared.softcap, call, exact)
    slopes, after_bias = slopes_of(prepared.mods, prepared.softcap, call, exact)
    offsets = (None, None) if call.packed is None else call.packed[:2]
    plain = (q, k, v, out, lse, lse)
    inputs, own = streamed(bound, plain[:4], plain[4:])
    launch, args = {
        "delta": (bound.delta, (out, out, lse, lse, lse, lse, *bound.delta_tail)),
        "queries": (bound.queries, (*inputs, q, *offsets, *bound.queries_tail, score, slopes, masks, drop)),
        "keys": (bound.keys, (*own, k, v, *offsets, *bound.keys_tail, score, slopes, masks, drop)),
        "bias": (bound.bias, (*plain, call.bias, *offsets, *bound.bias_tail, score, after_bias, masks, drop)),
        "sinks": (bound.sinks, (call.sinks, lse, lse, lse, offsets[0], *bound.sinks_tail)),
        "weights": (bound.weights, (q, k, lse, lse, call.sinks, *offsets, *bound.weights_tail, score, masks)),
    }[part]
    return launch.fn, args, launch.keywords
