"""Coarse attention over projected rows, with scores for every query block: check, plan, allocate, launch, and its operator."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from ...check import TensorSpec, bind
from ...errors import ValueRangeError
from ..backward.backward_parts import boxes, side_strides, tiled
from ..bound import Bound, Example, Prepared, meta
from ..call import NARROW_HEAD_DIM, SPECS, check_heads, scale_of
from ..dense.attention_parts import boxable
from ..device import device_of
from ..operator import Gradient, Operation
from ..records import recorded
from ..serve import function_at, plan_at
from ..source import facts_of_values
from . import coarse_backward
from .coarse_backward import CoarseCall, constants_of, values_of
from .project import SIZES

if TYPE_CHECKING:
    from ...plan.sparse.coarse import CoarsePlan, CoarseProblem

REDUCTIONS = ("mean", "max", "each")
GIVEN = ("Q", "K", "V", "Out", "Lse", "Scores", "Sizes", "QuerySizes")
"""What a call gives to the forward kernel."""
_SIZES = (
    TensorSpec("block_sizes", SIZES.format("kv_heads", "rows"), (torch.int32,), contiguous_last=True, optional=True),
    TensorSpec("query_sizes", SIZES.format("heads", "q_blocks"), (torch.int32,), contiguous_last=True, optional=True),
)
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CoarseCall) -> Results:
    """(out, scores, lse) of every query over the rows k and v; see `tilefold.sparse.attend_rows`."""
    p = prepare(q, k, v, call)
    out = torch.empty(p.out_shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device=q.device)
    if p.bound is None:  # no query, or no row: then nothing is live
        scores = torch.zeros(p.sizes[1:], dtype=torch.float32, device=q.device)
        return out.zero_(), scores, lse.fill_(-math.inf)
    parts = torch.empty(p.sizes, dtype=torch.float32, device=q.device)
    p.bound((q, k, v, out, lse, parts, call.block_sizes, call.query_sizes))
    if parts.shape[0] == 1:
        return out, parts[0], lse
    return out, parts.sum(0) if call.reduction == "mean" else parts.amax(0), lse


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CoarseCall) -> dict[str, int]:
    """Sizes of all named dimensions, after every check that reads no value."""
    specs, names = SPECS[call.layout][:3], call.names.split()
    if call.names != "k v":
        specs = specs[0], *(replace(s, name=n) for n, s in zip(names, specs[1:], strict=True))
    n = bind(specs, dict(zip(("q", *names), (q, k, v), strict=True)))
    check_heads(n, names[0], names[1], NARROW_HEAD_DIM)
    block = 1 if call.reduction == "each" else call.block
    n |= {"rows": n["seq_k"], "q_blocks": -(-n["seq_q"] // block)}
    bind(_SIZES, {"block_sizes": call.block_sizes, "query_sizes": call.query_sizes}, known=n, beside=("q", q))
    if call.reduction not in REDUCTIONS:
        raise ValueRangeError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {call.reduction!r}")
    return n


def shapes_of(n: dict[str, int], layout: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of out, scores and lse."""
    middle = (n["seq_q"], n["heads"]) if layout == "bshd" else (n["heads"], n["seq_q"])
    lead = n["batch"], n["heads"]
    return (n["batch"], *middle, n["dim_v"]), (*lead, n["q_blocks"], n["rows"]), (*lead, n["seq_q"])


@recorded("attend_rows", lambda q, k, v, call: facts_of_values(q, k, v, *call))
def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CoarseCall) -> Prepared:
    """The record of this call's shapes and options, its sizes those of the scores' parts; checks everything."""
    from ...plan.sparse.coarse import plan_coarse

    n = check(q, k, v, call)
    out_shape, scores_shape, lse_shape = shapes_of(n, call.layout)
    scale = scale_of(call, n["dim_qk"])
    device = device_of(q.device, "attend_rows")
    if 0 in (*scores_shape, *lse_shape):
        return Prepared(None, out_shape, lse_shape, sizes=(1, *scores_shape))
    problem = problem_of(q, k, v, n, call)
    if (own := plan_at("attend_rows", problem, device, call)) is not None:
        bound = function_at("attend_rows", q.device, own, call.layout, scale)
        return Prepared(own, out_shape, lse_shape, bound, scale, sizes=(1, *scores_shape))
    plan = plan_coarse(problem, device)
    return bind_forward(q, k, v, call, plan, (out_shape, (plan.parts, *scores_shape), lse_shape), scale)


def problem_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n: dict[str, int], call: CoarseCall
) -> "CoarseProblem":
    from ...plan.problem import AttentionProblem
    from ...plan.sparse.coarse import CoarseProblem

    names = ("batch", "seq_q", "seq_k", "heads", "kv_heads", "dim_qk", "dim_v")
    lengths: dict[str, Any] = {name: n[name] for name in names}
    attention = AttentionProblem(
        **lengths,
        dtype=str(q.dtype).removeprefix("torch."),
        descriptors=call.finite and boxable(k) and boxable(v),
    )
    each = call.reduction == "each"
    masked, query_masked = call.block_sizes is not None, call.query_sizes is not None and not each
    return CoarseProblem(attention, 1 if each else call.block, call.reduction, masked, query_masked, boxable(q))


def bind_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CoarseCall, plan: "CoarsePlan",
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], scale: float,
) -> Prepared:  # fmt: skip
    """Launch, run-time scalars and compile-time constants of this call under this plan."""
    from ...kernels.sparse.coarse import coarse_forward

    n, tile, layout = plan.problem.attention, plan.forward, cast("Any", call.layout)
    strides = side_strides(layout, q=q, k=k, v=v, o=meta(*shapes[0]))
    wide = max(strides[f"stride_{name}"] for name in ("qm", "kn", "vn", "om")) * 64 >= 1 << 31
    constants = {
        "REDUCE": REDUCTIONS.index(call.reduction),
        "BOX": plan.boxes[0],
        **constants_of(plan, q.dtype, wide),
    }
    boxed = boxes(layout, tile.block_n, K=(k, n.block_qk), V=(v, n.block_v)) if plan.boxes[0] else {}
    values = {**strides, **values_of(plan, call, scale), **boxed}
    bound = tiled(coarse_forward, tile, plan.grid("forward"), GIVEN, values, constants, q.device)
    return Prepared(plan, shapes[0], shapes[2], bound, scale, sizes=shapes[1])


# ---------------------------------------------------------------- the operator


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CoarseCall) -> Results:
    out, scores, lse = shapes_of(check(q, k, v, call), call.layout)
    return q.new_empty(out), q.new_empty(scores, dtype=torch.float32), q.new_empty(lse, dtype=torch.float32)


def _gradients(args: tuple[Any, ...], results: Any, grads: tuple[Any, ...], wanted: tuple[bool, ...]) -> Any:
    q, k, v, call = args
    (out, _, lse), (dout, _, dlse) = results, grads
    p = prepare(q, k, v, call)
    if p.plan is None:
        return tuple(map(torch.zeros_like, (q, k, v)))
    dout = torch.zeros_like(out) if dout is None else dout
    found = coarse_backward.backward(p, (q, k, v, out, lse), dout, dlse, call, wanted[0], wanted[1] or wanted[2])
    return tuple(g if want else None for g, want in zip(found, wanted, strict=True))


COARSE = Operation("attend_rows", forward, _fake, Gradient(("q", "k", "v"), _gradients, unread=(1,), still=(1,)))
"""(out, scores, lse); no gradient passes through the scores."""


# ---------------------------------------------------------------- without a GPU


def example_launch(plan: "CoarsePlan", part: str = "forward") -> Example:
    """(kernel, args, kwargs) of a part of a call with this plan ("forward", "queries" or "keys"), on tensors without memory, to
    compile ahead."""
    problem, n = plan.problem, plan.problem.attention
    dtype, blocks = getattr(torch, n.dtype), -(-n.seq_q // problem.block)
    q = meta(n.batch, n.seq_q, n.heads, n.dim_qk, dtype=dtype)
    k, v = (meta(n.batch, n.seq_k, n.kv_heads, d, dtype=dtype) for d in (n.dim_qk, n.dim_v))
    out, lse = meta(n.batch, n.seq_q, n.heads, n.dim_v, dtype=dtype), meta(n.batch, n.heads, n.seq_q)
    block_sizes = meta(n.seq_k, dtype=torch.int32) if problem.masked else None
    query_sizes = meta(blocks, dtype=torch.int32) if problem.query_masked else None
    call = CoarseCall(block_sizes, query_sizes, problem.block, None, problem.reduction, "bshd", True)
    shapes = tuple(out.shape), (plan.parts, n.batch, n.heads, blocks, n.seq_k), tuple(lse.shape)
    if part == "forward":
        bound: Bound = bind_forward(q, k, v, call, plan, shapes, 1.0).bound
        return bound.example((q, k, v, out, lse, meta(*shapes[1]), block_sizes, query_sizes))
    return coarse_backward.example_launch(plan, (q, k, v, out), lse, call, part)
