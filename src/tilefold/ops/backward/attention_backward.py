"""Backward dense attention: plan, bind, allocate, launch."""

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import DtypeError, PlanError
from ...plan.backward.kept_backward import kept_beside
from ..bound import Bound, Example
from ..cache.decode import dense_rules
from ..call import Call, window_of
from ..dense import attention
from ..dense.attention_parts import band_of, dims_of, kind_of, lengths_of, option_values
from ..device import device_of, interpreting
from ..first_call import without_collector
from ..hopper import chosen_or_none, disabled
from ..serve import BoundFunction, function_at, plan_at
from ..source import facts_of
from .attention_backward_loads import elements_of, loads_of_call, needed, no_gradients
from .attention_backward_short import ShortBound, bind_short
from .attention_backward_terms import Made, TermsBound
from .backward_parts import (
    ROWS,
    bind_weights,
    boxes,
    check_given,
    readable,
    score_slope,
    side_strides,
    slopes_of,
    statistics_by,
    three_by,
    tiled,
    weighted,
    zeros_for,
)

if TYPE_CHECKING:
    from ...plan.backward.attention_backward import AttentionBackwardPlan
    from ...plan.dense.attention import AttentionPlan
    from ...plan.device import Device
    from ...plan.problem import AttentionProblem
    from .attention_backward_spans import SpansBound
    from .hopper_backward import GluonBound

Gradients = tuple[torch.Tensor | None, ...]  # of q, k, v, bias, sinks and the tensors of score_args
GIVEN = ("Q", "K", "V", "DOut", "Lse2", "Delta", "DQ", "DK", "DV", "call")
"""What a call gives to the portable kernels."""
HOPPER, REDUCE, SHORT = "attention_backward_hopper", "attention_backward_reduce", "attention_backward_short"


class DenseBound(NamedTuple):
    """The portable kernels of a backward pass; None for an empty grid."""

    plan: Any
    terms: TermsBound
    queries: Bound
    keys: Bound | None
    weights: Bound | None  # of fp32


def differentiable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Any:
    """The call's record, after everything that would stop the backward pass, before the forward pass is launched; Unsupported
    names a part of the call whose derivative nobody gave."""
    prepared = attention.prepare(q, k, v, call)
    asked = "planned", call.bias is not None and call.bias.requires_grad, call.deterministic, needed(call)
    if asked not in prepared.further:
        score_slope(call.score_mod, call.score_grad)
        if asked[3]:
            loads_of_call(call, asked[3])
        if prepared.planned is not None:
            prepared.further[asked] = backward_plan_of(prepared.problem, call, q, asked[1], asked[3])
    return prepared


def backward(
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    call: Call,
    wanted: tuple[bool, ...],
    whole: bool = True,
) -> Gradients:
    """Gradients of q, k, v, bias, sinks and the tensors of score_args, each shaped like its tensor and contiguous, None where not
    wanted; wanted may end before those of score_args; saved: q, k, v, out, lse of the forward pass; dout like out, dlse like lse
    or None.  whole: False if out and lse are those of more keys than k
    and v hold: the gradients are then summands, dk and dv in fp32 where the kernel adds them up in fp32, and the probabilities
    of these keys do not add up to 1."""
    q, k, v, out, lse = saved
    score_slope(call.score_mod, call.score_grad)
    prepared = call.prepared or attention.prepare(q, k, v, call)
    keys = wanted[1] or wanted[2]  # dk and dv come together
    asked, loads = (wanted[0], keys, keys, *wanted[3:5]), needed(call, wanted[5:])
    if prepared.planned is None:
        return *zeros_for((q, k, v, call.bias, call.sinks), asked), *no_gradients(call, wanted[5:], loads)
    if isinstance(prepared.bound, BoundFunction):
        plan = backward_plan_of(prepared.problem, call, q, wanted[3], loads)
        own = function_at("attention_backward", q.device, plan)
        return own((*saved, dout, dlse, call, asked))  # type: ignore[no-any-return]
    exact = q.dtype == torch.float32
    dout = dout.contiguous() if exact else readable(dout)  # what `weighted` makes of it has other strides else
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    bound = _bound(prepared, (q, k, v, out), (dout, lse, dlse), call, wanted[3], loads)
    if not isinstance(bound, DenseBound):
        run = bound.run if whole or not bound.plan.queries_at_once else bound.sums  # type: ignore[union-attr]
        of_bias, of_sinks = wanted[3] and call.bias is not None, wanted[4] and call.sinks is not None
        needs = wanted[0] or keys or (of_bias and bound.plan.stores_ds)
        dq, dk, dv, *stored = run((q, k, v, out), dout, lse, dlse, call) if needs else (None, None, None)
        three = dq if wanted[0] else None, dk if keys else None, dv if keys else None
        if not (loads or of_bias or of_sinks):
            return *three, None, None, *no_gradients(call, wanted[5:])
        terms = _terms_bound(prepared, bound.plan, (q, k, v, out), (dout, dlse), call, loads)
        beside = statistics_by(terms.delta, out, dout, lse, dlse) if loads or of_sinks or not stored else ()
        return *three, *terms.gradients((q, k, v, dout, *beside), call, wanted[3:], *stored)
    lse2, delta = statistics_by(bound.terms.delta, out, dout, lse, dlse)
    if bound.weights is not None and whole:
        dout, delta = weighted(bound.weights, (q, k, lse2), dout, delta, call)
    rows = q, k, v, dout, lse2, delta
    return *three_by(bound.queries, bound.keys, rows, asked, call), *bound.terms.gradients(rows, call, wanted[3:])


# ---------------------------------------------------------------- the first time


def backward_plan_of(
    problem: "AttentionProblem", call: Call, q: torch.Tensor, with_bias: bool, loads: tuple[int, ...] = (),
    on: "Device | None" = None,
) -> "AttentionBackwardPlan":  # fmt: skip
    """The plan of the backward pass of a call that has this problem; with_bias: the bias gets a gradient; loads: which of
    score_args do; on: as on that device."""
    from ...plan.backward.attention_backward import AttentionBackwardPlan, plan_attention_backward

    bias = tuple(call.bias.shape[:3]) if with_bias and call.bias is not None else ()
    device = on or device_of(q.device, "attention_backward")
    if (own := plan_at("attention_backward", problem, device, call, call.backward_plan)) is not None:
        return own  # type: ignore[no-any-return]
    if call.backward_plan is None:
        elements = elements_of(call, loads)
        exact = bool(bias) and call.bias.dtype != q.dtype  # type: ignore[union-attr]
        return plan_attention_backward(problem, device, bias, disabled(), call.deterministic, elements, exact)
    given = call.backward_plan
    if not isinstance(given, AttentionBackwardPlan):
        raise DtypeError(f"backward_plan must be an AttentionBackwardPlan or None, got {type(given).__name__}")
    # A plan with gradients of the bias and of loads also serves a backward pass that is not asked for them.
    spare = call.bias is not None and given.bias == tuple(call.bias.shape[:3])
    elements = elements_of(call, loads)
    elements = given.loads if set(elements) <= set(given.loads) else elements
    check_given(given, problem, device, given.bias if spare and not with_bias else bias, elements)
    if given.stores_ds and not with_bias:
        return given.without_bias()
    if given.stores_ds and call.bias is not None and call.bias.dtype != q.dtype:
        mend = ": with_tiles(stored=False)" if given.stored else ""
        what = f"backward_plan stores dS in {q.dtype} for the gradient of the bias"
        raise PlanError(f"{what}, which is {call.bias.dtype}{mend}")
    return given


def _bound(
    prepared: Any,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    beside: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    call: Call,
    with_bias: bool,
    loads: tuple[int, ...],
) -> "DenseBound | ShortBound | GluonBound | SpansBound":
    """The bound launches, kept on the forward pass's record: everything else that decides them is in its key."""
    # A launch keeps what it compiled: where an argument may be None, that is part of the key.
    dout, _, dlse = beside
    given = None if dlse is None else facts_of(dlse)
    key = facts_of(dout), facts_of(tensors[3]), given, with_bias, call.deterministic, loads
    found: DenseBound | ShortBound | GluonBound | SpansBound | None = prepared.further.get(key)
    if found is None:
        alike = _key_of_tiles(prepared, tensors, call, key)
        near = None if alike is None else prepared.shared.get(alike)
        found = None if near is None else near.of_lengths(tensors, dout, call)
        if found is None:
            with without_collector():
                found = _bound_anew(prepared, tensors, beside, call, with_bias, loads)
            kept = found.plan.kernel == HOPPER and not found.plan.queries_at_once
            if alike is not None and (kept or (call.packed is not None and found.plan.kernel == REDUCE)):
                prepared.shared[alike] = found
        prepared.further[key] = found
    return found


def _terms_bound(
    prepared: Any, plan: "AttentionBackwardPlan", tensors: tuple[torch.Tensor, ...],
    beside: tuple[torch.Tensor, torch.Tensor | None], call: Call, loads: tuple[int, ...],
) -> TermsBound:  # fmt: skip
    """The launches of other gradients beside a Gluon kernel, kept as `_bound` keeps its own; beside: dout, dlse."""
    out, (dout, dlse) = tensors[3], beside
    key = "terms", facts_of(dout), facts_of(out), None if dlse is None else facts_of(dlse), plan.bias, loads
    found: TermsBound | None = prepared.further.get(key)
    if found is None:
        made = _portable_parts(prepared.scale, tensors, dout, call, plan) if plan.bias or loads else None
        found = prepared.further[key] = TermsBound.of(prepared.problem, plan, tensors, dout, call, made, loads)
    return found


def _bound_anew(
    prepared: Any, tensors: Any, beside: Any, call: Call, with_bias: bool, loads: tuple[int, ...]
) -> "DenseBound | ShortBound | GluonBound | SpansBound":
    """`_bound` of a call that is like none before."""
    from ...plan.backward.attention_backward import plan_attention_backward

    plan = prepared.further.get(("planned", with_bias, call.deterministic, loads))
    if plan is None:  # nobody asked `differentiable`
        plan = backward_plan_of(prepared.problem, call, tensors[0], with_bias, loads)
    if plan.kernel == SHORT:
        return bind_short(plan, tensors, _portable_parts(prepared.scale, tensors, beside[0], call, plan))
    found: GluonBound | SpansBound | None = None
    if plan.kernel in (HOPPER, REDUCE):
        found = _bind_gluon(prepared.scale, tensors, beside, call, plan)
        if found is None:
            plan = plan_attention_backward(plan.problem, plan.device, plan.bias, True, call.deterministic, plan.loads)
    return found or _bind(prepared.scale, tensors, beside[0], call, plan, loads)


def _key_of_tiles(prepared: Any, tensors: tuple[torch.Tensor, ...], call: Call, key: Any) -> Any:
    """The key of calls of a family that make the same tiles in the backward pass, of the kernel that keeps dS, whose tiles are of
    64 tokens, or of packed sequences; None for other calls.  key: of `_bound`."""
    if prepared.shared is None:
        return None
    q, k, v, _ = tensors
    rows, keys = attention.lengths_of_call(q, k, call)
    alike: tuple[Any, ...]
    if call.packed is not None:  # the mean says which kernel is taken, which may read q, k and v by their strides
        at, alike = 0, (attention.mean_of_call(q, call), q.stride(), k.stride(), v.stride())
    elif window_of(call.window, call.causal) in ((-1, -1), (-1, 0)):
        dim, dim_v = q.shape[-1], v.shape[-1]
        kept = kept_beside(q.numel() // dim, dim, dim_v, q.element_size())
        at, alike = 2 if call.layout == "bhsd" else 1, (keys - rows, 2 * rows >= keys, kept)
    else:
        return None
    of_dout, of_out, dlse, *others = key
    sides = [(facts[0], facts[2][at], facts[3:]) for facts in (of_dout, of_out)]
    return dense_rules().lengths_alike(rows, keys), *alike, *sides, dlse and dlse[3:], *others


def _bind_gluon(
    scale: float, tensors: tuple[torch.Tensor, ...], beside: tuple[Any, ...], call: Call, plan: "AttentionBackwardPlan"
) -> "GluonBound | SpansBound | None":
    """The Gluon kernel's launches; None, after a warning, if this Triton cannot make them, or an error if the caller chose the
    plan."""

    def made() -> Any:
        return _gluon(call, plan).bound_launches(scale, tensors, beside[0], call, plan)

    what = "its backward pass" if call.packed is None else "its backward pass of packed sequences"
    return chosen_or_none(
        plan, call.backward_plan, "dense", made, lambda bound: bound.compile(tensors, *beside, call), what
    )


def _gluon(call: Call, plan: "AttentionBackwardPlan") -> Any:
    """The binding of the Gluon kernel that serves this call under this plan."""
    kind = "hopper" if call.packed is None else "packed"
    if plan.kernel == REDUCE or plan.queries_at_once:
        kind = "reduce" if plan.kernel == REDUCE else "spans"
    return importlib.import_module(f"{__package__}.attention_backward_{kind}")


def _bind(
    scale: float,
    tensors: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    call: Call,
    plan: "AttentionBackwardPlan",
    loads: tuple[int, ...] = (),
) -> DenseBound:
    from ...kernels.backward import attention_backward as kernels

    q, k, v, _ = tensors
    n, device = plan.problem, q.device
    constants, values = _portable_parts(scale, tensors, dout, call, plan)
    of_queries, of_keys, boxed = values, values, plan.kernel == "attention_backward_box"
    if boxed:  # what streams by
        of_queries = values | boxes(call.layout, plan.queries.block_n, K=(k, n.block_qk), V=(v, n.block_v))
        of_keys = values | boxes(call.layout, plan.keys.block_m, Q=(q, n.block_qk), DOut=(dout, n.block_v))
    of_sides = {**constants, "BOX": boxed}
    alone = {**of_sides, "ALONE": n.group == 1}
    return DenseBound(
        plan,
        TermsBound.of(n, plan, tensors, dout, call, (constants, values), loads),
        tiled(kernels.attention_backward_queries, plan.queries, plan.grids[0], GIVEN, of_queries, of_sides, device),
        tiled(kernels.attention_backward_keys, plan.keys, plan.grids[1], GIVEN, of_keys, alone, device),
        bind_weights(plan, constants, values, device),
    )


def _portable_parts(
    scale: float, tensors: tuple[torch.Tensor, ...], dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan"
) -> Made:
    """Constants and values of all portable kernels of a call."""
    from ...device import mods

    q, k, v, out = tensors
    n, packed, softcap = plan.problem, call.packed is not None, float(call.softcap)
    strides = side_strides(call.layout, q=q, k=k, v=v, d=dout, o=out, g=q.shape, x=k.shape, y=v.shape)
    most = max(ROWS, *(max(tile.block_m, tile.block_n) for tile in (plan.queries, plan.keys, plan.scores)))
    window = window_of(call.window, call.causal)
    band = band_of(call, window)
    constants = {
        "KIND": kind_of(window, band),
        "EMULATE": interpreting() and q.dtype == torch.bfloat16,
        "WIDE": max(strides[f"stride_{name}"] for name in ("qm", "kn", "vn", "dm", "om")) * most >= 1 << 31,
        **dims_of(n),
    }
    values = {
        **strides,
        "stride_lb": 0 if packed else n.heads * n.seq_q,
        "stride_lh": q.shape[0] if packed else n.seq_q,
        "scale": scale,
        **lengths_of(n),
        **option_values(call, window, mods, softcap, q.dtype, band),
        "slopes": slopes_of(mods, softcap, call, q.dtype == torch.float32)[0],
    }
    return constants, values


# ---------------------------------------------------------------- without a GPU


def example_launch(
    problem: "AttentionProblem",
    plan: "AttentionPlan",
    backward_plan: "AttentionBackwardPlan",
    part: str,
    reads: bool = False,
) -> Example:
    """(kernel, args, kwargs) of a part of the backward pass of a call that has these plans, on tensors without memory, to compile
    ahead: "delta", "queries", "keys", "bias", "sinks" or "weights"; of a Gluon kernel "first", "main" (of several spans that of
    the last) or "last".  reads: the user's functions load from their arguments."""
    (q, k, v), call, _, out, lse = attention.example_call(problem, plan, reads=reads)
    tensors = q, k, v, out
    of_terms = {
        "delta": (out, out, lse, lse, lse, lse),
        "sinks": (lse, lse, lse, call),
        "bias": (q, call.bias) if backward_plan.stores_ds else (q, k, v, out, lse, lse, call, call.bias),
    }
    if part in of_terms:
        made = _portable_parts(1.0, tensors, out, call, backward_plan)
        chosen = getattr(TermsBound.of(problem, backward_plan, tensors, out, call, made), part)
        return chosen.example(of_terms[part])  # type: ignore[no-any-return]
    if backward_plan.kernel in (HOPPER, REDUCE):
        gluon = _gluon(call, backward_plan).bound_launches(1.0, tensors, out, call, backward_plan)
        scratch = gluon.scratch("meta")
        if part == "main" and backward_plan.queries_at_once:
            one = gluon.launches[-1]
            return one.main.example(gluon.given(one, tensors, out, call, scratch))  # type: ignore[no-any-return]
        given = (*tensors, out, lse, None if problem.varlen else lse, call, *scratch)
        return getattr(gluon, part).example(given)  # type: ignore[no-any-return]
    if backward_plan.kernel == SHORT:
        short = bind_short(backward_plan, tensors, _portable_parts(1.0, tensors, out, call, backward_plan))
        return short.main.example((*tensors, out, lse, lse, call, *short.scratch("meta")))
    bound = _bind(1.0, tensors, out, call, backward_plan)
    own = (q, k, lse, lse, call) if part == "weights" else (q, k, v, out, lse, lse, q, k, v, call)
    return getattr(bound, part).example(own)  # type: ignore[no-any-return]
