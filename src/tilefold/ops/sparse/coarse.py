"""Coarse attention over projected rows, with scores for every query block: check, plan, allocate, launch, and its operator."""

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from ...check import TensorSpec, bind
from ...errors import ValueRangeError
from .. import torch_cpu
from ..call import SPECS, check_heads
from ..dense.attention_parts import boxable, describe_box, head_strides
from ..device import device_of
from ..operator import Operator
from ..records import remember
from . import coarse_backward
from .coarse_parts import CoarseCall, Prepared, constants_of
from .project import SIZES, facts, size_strides

if TYPE_CHECKING:
    from ...plan.coarse import CoarsePlan, CoarseProblem

__all__ = ["REDUCTIONS", "CoarseCall", "Prepared", "attend_op", "forward", "prepare"]

REDUCTIONS = ("mean", "max", "each")
_SIZES = (
    TensorSpec("block_sizes", SIZES.format("kv_heads", "rows"), (torch.int32,), contiguous_last=True, optional=True),
    TensorSpec("query_sizes", SIZES.format("heads", "q_blocks"), (torch.int32,), contiguous_last=True, optional=True),
)
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


_CACHE: dict[Any, Prepared] = {}


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CoarseCall) -> Results:
    """(out, scores, lse) of every query over the rows k and v; see `tilefold.sparse.attend_rows`."""
    p = prepare(q, k, v, call)
    out = torch.empty(p.out_shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device=q.device)
    if p.plan is None:  # no query, or no row: then nothing is live
        scores = torch.zeros(p.scores_shape[1:], dtype=torch.float32, device=q.device)
        return out.zero_(), scores, lse.fill_(-math.inf)
    parts = torch.empty(p.scores_shape, dtype=torch.float32, device=q.device)
    sides = tuple(box.over(t) for box, t in zip(p.boxes, (k, v), strict=True)) if p.boxes else (k, v)
    p.launch((q, *sides, out, lse, parts, call.block_sizes, call.query_sizes, *p.tail))
    if parts.shape[0] == 1:
        return out, parts[0], lse
    return out, parts.sum(0) if call.reduction == "mean" else parts.amax(0), lse


def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CoarseCall) -> Prepared:
    """The cached record of this call's shapes and options; checks everything the first time they are seen."""
    key = *map(facts, (q, k, v, *call[:2])), call[2:], type(call.scale)
    found = _CACHE.get(key)
    if found is None:
        found = remember(_CACHE, key, _prepare(q, k, v, call))
    return found


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CoarseCall) -> dict[str, int]:
    """Sizes of all named dimensions, after every check that reads no value."""
    specs, names = SPECS[call.layout][:3], call.names.split()
    if call.names != "k v":
        specs = specs[0], *(replace(s, name=n) for n, s in zip(names, specs[1:], strict=True))
    n = bind(specs, dict(zip(("q", *names), (q, k, v), strict=True)))
    check_heads(n, *names)
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


def _prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CoarseCall) -> Prepared:
    from ...plan.coarse import plan_coarse

    n = check(q, k, v, call)
    out_shape, scores_shape, lse_shape = shapes_of(n, call.layout)
    scale = 1.0 / math.sqrt(n["dim_qk"]) if call.scale is None else float(call.scale)
    device = device_of(q.device, "attend_rows")
    if 0 in (*scores_shape, *lse_shape):
        return Prepared(None, out_shape, (1, *scores_shape), lse_shape)
    if device.backend == "cpu":
        made = torch_cpu.planned("attend_rows", problem_of(q, k, v, n, call), call)
        launch = functools.partial(_launch_on_cpu, scale, call._replace(block_sizes=None, query_sizes=None))
        return Prepared(made, out_shape, (1, *scores_shape), lse_shape, scale, launch=launch)
    plan = plan_coarse(problem_of(q, k, v, n, call), device)
    return bind_forward(q, k, v, call, plan, (out_shape, (plan.parts, *scores_shape), lse_shape), scale)


def _launch_on_cpu(scale: float, call: CoarseCall, given: tuple[Any, ...]) -> None:
    q, k, v, out, lse, scores, block_sizes, query_sizes = given
    block = 1 if call.reduction == "each" else call.block
    q, k, v, out = (torch_cpu.heads_first(t, call.layout) for t in (q, k, v, out))
    torch_cpu.served("attend_rows")(
        q, k, v, out, lse, scores[0], block_sizes, query_sizes, scale, block, call.reduction
    )


def problem_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n: dict[str, int], call: CoarseCall
) -> "CoarseProblem":
    from ...plan.coarse import CoarseProblem
    from ...plan.problem import AttentionProblem

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
    from ...kernels.coarse import coarse_forward
    from ..launch import Launch

    n, tile, layout = plan.problem.attention, plan.forward, cast("Any", call.layout)
    sides = (q, k, v, torch.empty(shapes[0], device="meta"))
    strides = [head_strides(t, layout) for t in sides]
    constants = {
        "REDUCE": REDUCTIONS.index(call.reduction),
        "BOX": plan.boxes[0],
        **constants_of(plan, q.dtype, max(s[1] for s in strides) * 64 >= 1 << 31),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    boxed = ((k, n.block_qk), (v, n.block_v)) if plan.boxes[0] else ()
    return Prepared(
        plan,
        *shapes,
        scale=scale,
        boxes=tuple(describe_box(t, layout, tile.block_n, w) for t, w in boxed),
        launch=Launch(coarse_forward, plan.grid("forward"), constants, options, q.device.index or 0),
        tail=(scale, n.seq_q, n.seq_k, n.heads, n.group, n.batch, *(one for s in strides for one in s),
              *size_strides(call.block_sizes), *size_strides(call.query_sizes)),
    )  # fmt: skip


# ---------------------------------------------------------------- the operator


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_sizes: torch.Tensor | None, query_sizes: torch.Tensor | None,
    block: int, scale: float | None, reduction: str, layout: str, finite: bool, names: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, scores, lse)."""
    return forward(q, k, v, CoarseCall(block_sizes, query_sizes, block, scale, reduction, layout, finite, names))


def _attend_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *call: Any) -> Results:
    given = CoarseCall(*call)
    out, scores, lse = shapes_of(check(q, k, v, given), given.layout)
    return q.new_empty(out), q.new_empty(scores, dtype=torch.float32), q.new_empty(lse, dtype=torch.float32)


def _gradient(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, block_sizes: torch.Tensor | None, query_sizes: torch.Tensor | None, block: int, scale: float | None,
    reduction: str, layout: str, finite: bool, want_q: bool, want_rows: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), empty where not wanted."""
    call = CoarseCall(block_sizes, query_sizes, block, scale, reduction, layout, finite)
    p = prepare(q, k, v, call)
    if p.plan is None:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    return coarse_backward.backward(p, (q, k, v, out, lse), dout, dlse, call, want_q, want_rows)


def _gradient_fake(dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                   *rest: Any) -> Results:  # fmt: skip
    want_q, want_rows = rest[-2:]
    dq = q.new_empty(q.shape if want_q else 0)
    return dq, k.new_empty(k.shape if want_rows else 0), v.new_empty(v.shape if want_rows else 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    out, scores, lse = output
    ctx.save_for_backward(*inputs[:3], out, lse, *inputs[3:5])
    ctx.rest = inputs[5:10]
    ctx.mark_non_differentiable(scores)
    ctx.set_materialize_grads(False)


def _arguments(ctx: Any, dout: torch.Tensor | None, dscores: None, dlse: torch.Tensor | None) -> tuple[Any, ...] | None:
    if dout is None and dlse is None:
        return None
    wanted = ctx.needs_input_grad
    saved = ctx.saved_tensors
    dout = torch.zeros_like(saved[3]) if dout is None else dout
    return dout, dlse, *saved, *ctx.rest, wanted[0], wanted[1] or wanted[2]


def _give(ctx: Any, results: Results) -> tuple[Any, ...]:
    return *(g if want else None for g, want in zip(results, ctx.needs_input_grad, strict=False)), *(None,) * 8


attend_op = Operator("attend_rows", _attend, _attend_fake, _gradient, _gradient_fake, _keep, _arguments, _give)


# ---------------------------------------------------------------- without a GPU


def example_launch(plan: "CoarsePlan", part: str = "forward") -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of a part of a call with this plan ("forward", "queries" or "keys"), on tensors without memory, to
    compile ahead."""

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

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
        p = bind_forward(q, k, v, call, plan, shapes, 1.0)
        sides = tuple(box.over(t) for box, t in zip(p.boxes, (k, v), strict=True)) if p.boxes else (k, v)
        args = (q, *sides, out, lse, meta(*shapes[1]), block_sizes, query_sizes, *p.tail)
        return p.launch.fn, args, p.launch.keywords
    return coarse_backward.example_launch(plan, (q, k, v, out), lse, call, part)
