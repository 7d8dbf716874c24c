"""RMSNorm fused with the rotary embedding: check, plan, launch; differentiable, as an operator of torch's dispatcher."""

from typing import Any

import torch

from ...check import FLOATS, TensorSpec, bind, check_number
from ...errors import DtypeError, ShapeError, Unsupported
from ...plan.matrix.rms_norm import RMSNormPlan, RMSNormProblem, plan_rms_norm
from ..bound import meta
from ..device import device_of, interpreting
from ..operator import Operator
from ..records import recorded
from ..serve import function_at
from ..watch import refuse_gradients
from .rms_norm import Prepared


def rms_norm_rotary(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> torch.Tensor:
    """Rotary embedding of x * (mean(x^2) + eps)^(-1/2) * weight: what models do to queries and keys, in one pass.

    x: [batch, seq, heads, dim] fp16, bf16 or fp32; the last dimension contiguous, other strides any, as of a slice of a fused
        projection.
    weight: a float dtype; [dim]: the mean is of each head; [heads, dim]: of all heads of a token together, at most 16384 columns.
    cos, sin: [positions, pairs] or [batch or 1, positions, pairs], one float dtype; row i turns token i; positions at least seq.
    eps: greater than 0.
    interleaved: pair i is the channels (2i, 2i + 1); else (i, i + pairs).  Channels past 2 * pairs are normalised alone.

    Returns a tensor like x, contiguous.  Arithmetic in fp32, rounded once.  Differentiable in x and weight, once, with the same
    bits every run: dw is added by each program over its rows, then over the programs.
    Raises ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError, Unsupported: naming the argument.

    Sources: Zhang and Sennrich 2019 (arXiv:1910.07467), Su et al. 2021 (arXiv:2104.09864)."""
    if not isinstance(interleaved, bool):
        raise DtypeError(f"interleaved must be a bool, got {interleaved!r}")
    if torch.is_grad_enabled():
        refuse_gradients((("cos", cos), ("sin", sin)), "x and weight")
    out: torch.Tensor = rms_norm_rotary_op(x, weight, cos, sin, check_number("eps", eps, above=0.0), interleaved)[0]
    return out


# ---------------------------------------------------------------- forward


def _check(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    table = "positions pairs / batch|1 positions pairs"
    specs = (
        TensorSpec("x", "batch seq heads dim", FLOATS, contiguous_last=True),
        TensorSpec("weight", "dim / heads dim", FLOATS, contiguous_last=True),
        TensorSpec("cos", table, FLOATS, contiguous_last=True),
        TensorSpec("sin", table, FLOATS, same_dtype_as="cos", contiguous_last=True),
    )
    n = bind(specs, {"x": x, "weight": weight, "cos": cos, "sin": sin})
    if cos.shape != sin.shape:
        raise ShapeError(f"sin has shape {tuple(sin.shape)}, expected {tuple(cos.shape)} as of cos")
    if n["pairs"] < 1 or 2 * n["pairs"] > n["dim"]:
        raise ShapeError(f"cos has shape {tuple(cos.shape)}: it turns {2 * n['pairs']} channels, x has {n['dim']}")
    if n["positions"] < n["seq"]:
        raise ShapeError(f"cos has {n['positions']} positions, x has {n['seq']} tokens")


def _problem(x: torch.Tensor, weight: torch.Tensor) -> RMSNormProblem:
    """Rows of tokens or of heads; an odd dim counts as one more."""
    batch, seq, heads, dim = x.shape
    heads, row_heads = (heads, 1) if weight.dim() == 2 else (1, heads)
    problem = RMSNormProblem(batch * seq * row_heads, heads * (dim + dim % 2), x.element_size())
    if problem.rows >= 1 << 30:
        raise Unsupported(f"x has shape {tuple(x.shape)}: {problem.rows} rows, accepted: less than 2^30")
    return problem


@recorded("rms_norm_rotary")
def _prepare(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float, interleaved: bool
) -> Prepared:
    _check(x, weight, cos, sin)
    if (own := function_at("rms_norm_rotary", x.device, eps, interleaved)) is not None:
        return Prepared(None, own if x.numel() else None, ())
    plan = plan_rms_norm(_problem(x, weight), device_of(x.device))
    return _bind(x, weight, cos, sin, eps, interleaved, plan)


def _bind(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    interleaved: bool,
    plan: RMSNormPlan,
) -> Prepared:
    from ...kernels.matrix.rms_norm_rotary import rms_norm_rotary_forward

    if x.numel() == 0:
        return Prepared(plan, None, ())
    launch, values = _launch(rms_norm_rotary_forward, plan.tiles, x, weight, cos, sin, interleaved, plan)
    return Prepared(plan, launch, (eps, *values))


def _launch(
    kernel: Any, programs: int, x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    interleaved: bool, plan: RMSNormPlan,
) -> tuple[Any, tuple[int, ...]]:  # fmt: skip
    """A kernel's launch, and what both kernels take of sizes and strides."""
    from ..launch import Launch

    _, seq, heads, dim = x.shape
    together = weight.dim() == 2
    constants = {
        "INTERLEAVED": interleaved,
        "EMULATE": interpreting() and x.dtype == torch.bfloat16,
        "HEADS": heads if together else 1,
        "DIM": dim,
        "PAIRS": cos.shape[-1],
        "ROWS": plan.block_rows,
        "BLOCK_P": plan.block_columns // 2,
    }
    launch = Launch(kernel, (programs, 1, 1), constants, {"num_warps": plan.num_warps}, x.device.index or 0)
    strides = [s for t in (cos, sin) for s in (t.stride(0) if t.dim() == 3 and t.shape[0] > 1 else 0, t.stride(-2))]
    row_heads = 1 if together else heads
    return launch, (plan.problem.rows, row_heads, seq, *x.stride()[:3], weight.stride(0) if together else dim, *strides)


def _forward(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, one over the root of each row's mean square)."""
    found = _prepare(x, weight, cos, sin, eps, interleaved)
    out, rstd = _results(x, weight)
    if found.launch is not None:
        found.launch((x, weight, cos, sin, out, rstd, *found.scalars))
    return out, rstd


def _results(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = x.new_empty(x.shape[:2] if weight.dim() == 2 else x.shape[:3], dtype=torch.float32)
    return x.new_empty(x.shape), rstd


def _fake(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x, weight, cos, sin)
    return _results(x, weight)


# ---------------------------------------------------------------- backward


def _gradient(
    dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rstd: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dx, dw)."""
    dout = dout.contiguous()
    found = _bind_gradient(dout, x, weight, cos, sin, interleaved)
    dx = x.new_empty(x.shape)
    if found.launch is None:
        return dx, weight.new_zeros(weight.shape)
    parts = x.new_empty((found.parts, *weight.shape), dtype=torch.float32)
    found.launch((dout, x, weight, cos, sin, rstd, dx, parts, *found.scalars))
    return dx, parts.sum(0).to(weight.dtype)


@recorded("rms_norm_rotary_backward")
def _bind_gradient(
    dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool,
    plan: RMSNormPlan | None = None,
) -> Prepared:  # fmt: skip
    if plan is None and (own := function_at("rms_norm_rotary_backward", x.device, interleaved)) is not None:
        return Prepared(None, own if x.numel() else None, ())
    from ...kernels.matrix.rms_norm_rotary import rms_norm_rotary_backward

    plan = plan or plan_rms_norm(_problem(x, weight), device_of(x.device))
    if x.numel() == 0:
        return Prepared(plan, None, ())
    programs = plan.backward_programs
    launch, values = _launch(rms_norm_rotary_backward, programs, x, weight, cos, sin, interleaved, plan)
    return Prepared(plan, launch, (-(-plan.tiles // programs), *values), programs)


def _gradient_fake(
    dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rstd: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, _, ctx.interleaved = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _arguments(ctx: Any, dout: torch.Tensor | None, _: None) -> tuple[Any, ...] | None:
    return None if dout is None else (dout, *ctx.saved_tensors, ctx.interleaved)


def _give(ctx: Any, results: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, ...]:
    given = (one if need else None for one, need in zip(results, ctx.needs_input_grad[:2], strict=True))
    return *given, None, None, None, None


rms_norm_rotary_op = Operator("rms_norm_rotary", _forward, _fake, _gradient, _gradient_fake, _keep, _arguments, _give)


# ---------------------------------------------------------------- without a GPU


def example_launch(
    plan: RMSNormPlan, dtype: str, heads: int, together: bool, interleaved: bool, part: str = "forward"
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of a part of a call with this plan, "forward" or "backward", on tensors without memory, x a slice of
    a fused projection: to compile ahead of time."""
    kind, n = getattr(torch, dtype), plan.problem
    tokens, dim = (n.rows, n.columns // heads) if together else (n.rows // heads, n.columns)
    x = meta(1, tokens, 3 * heads, dim, dtype=kind)[:, :, :heads]
    out, weight = meta(*x.shape, dtype=kind), meta(*((heads, dim) if together else (dim,)), dtype=kind)
    cos, rstd = meta(tokens, dim // 2, dtype=torch.float32), meta(n.rows, dtype=torch.float32)
    if part == "forward":
        launch, scalars = _bind(x, weight, cos, cos, 1e-6, interleaved, plan)[1:3]
        return launch.fn, (x, weight, cos, cos, out, rstd, *scalars), launch.keywords
    launch, scalars = _bind_gradient(out, x, weight, cos, cos, interleaved, plan)[1:3]
    parts = meta(plan.backward_programs, n.columns, dtype=torch.float32)
    return launch.fn, (out, x, weight, cos, cos, rstd, out, parts, *scalars), launch.keywords
