"""RMSNorm fused with the rotary embedding: check, plan, launch; differentiable, as an `Operation`."""

from typing import Any

import torch

from ...check import FLOATS, TensorSpec, bind, check_number
from ...errors import DtypeError, ShapeError, Unsupported
from ...plan.matrix.rms_norm import RMSNormPlan, RMSNormProblem, plan_rms_norm
from ..bound import Bound, Example, Launched, meta
from ..device import device_of, interpreting
from ..operator import Gradient, Operation
from ..records import recorded
from ..serve import function_at


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
    out: torch.Tensor = RMS_NORM_ROTARY(x, weight, cos, sin, check_number("eps", eps, above=0.0), interleaved)[0]
    return out


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
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float, interleaved: bool,
    backward: bool = False, plan: RMSNormPlan | None = None,
) -> Launched:  # fmt: skip
    _check(x, weight, cos, sin)
    name, options = ("rms_norm_rotary_backward", ()) if backward else ("rms_norm_rotary", (eps,))
    if plan is None and (own := function_at(name, x.device, *options, interleaved)) is not None:
        return Launched(1, own if x.numel() else None, run=_run)
    from ...kernels.matrix import rms_norm_rotary as kernels

    plan = plan or plan_rms_norm(_problem(x, weight), device_of(x.device))
    if x.numel() == 0:
        return Launched(1, run=_run)
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
    strides = [s for t in (cos, sin) for s in (t.stride(0) if t.dim() == 3 and t.shape[0] > 1 else 0, t.stride(-2))]
    sizes = (plan.problem.rows, 1 if together else heads, seq, *x.stride()[:3], weight.stride(0), *strides)
    kernel, programs, tensors, numbers = kernels.rms_norm_rotary_forward, plan.tiles, 6, (eps, *sizes)
    if backward:
        kernel, programs, tensors = kernels.rms_norm_rotary_backward, plan.backward_programs, 8
        numbers = -(-plan.tiles // programs), *sizes
    bound = Bound.of(kernel, programs, tensors, numbers, constants, x.device, num_warps=plan.num_warps)
    return Launched(programs, bound, run=_run)


def _run(
    found: Launched, x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, one over the root of each row's mean square)."""
    out, rstd = _results(x, weight)
    if found.bound is not None:
        found.bound((x, weight, cos, sin, out, rstd))
    return out, rstd


def _results(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[:2] if weight.dim() == 2 else x.shape[:3]
    return x.new_empty(x.shape), x.new_empty(rows, dtype=torch.float32)


def _fake(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x, weight, cos, sin)
    return _results(x, weight)


def _gradients(args: Any, results: Any, grads: Any, wanted: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, dw): one kernel makes both."""
    (x, weight, cos, sin, eps, interleaved), (_, rstd), (dout, _) = args, results, grads
    found = _prepare(x, weight, cos, sin, eps, interleaved, True)
    dx, parts = x.new_empty(x.shape), x.new_empty((found.shape, *weight.shape), dtype=torch.float32)
    if found.bound is None:
        return dx, weight.new_zeros(weight.shape)
    found.bound((dout.contiguous(), x, weight, cos, sin, rstd, dx, parts))
    return dx, parts.sum(0).to(weight.dtype)


GRADIENT = Gradient(("x", "weight"), _gradients, unread=(0,), still=(1,))
RMS_NORM_ROTARY = Operation("rms_norm_rotary", _prepare, _fake, GRADIENT)


# ---------------------------------------------------------------- without a GPU


def example_launch(
    plan: RMSNormPlan, dtype: str, heads: int, together: bool, interleaved: bool, part: str = "forward"
) -> Example:
    """(kernel, args, kwargs) of a part of a call with this plan, "forward" or "backward", on tensors without memory, x a slice of
    a fused projection: to compile ahead of time."""
    kind, n = getattr(torch, dtype), plan.problem
    tokens, dim = (n.rows, n.columns // heads) if together else (n.rows // heads, n.columns)
    x = meta(1, tokens, 3 * heads, dim, dtype=kind)[:, :, :heads]
    out, weight = meta(*x.shape, dtype=kind), meta(*((heads, dim) if together else (dim,)), dtype=kind)
    cos, rstd = meta(tokens, dim // 2, dtype=torch.float32), meta(n.rows, dtype=torch.float32)
    found = _prepare(x, weight, cos, cos, 1e-6, interleaved, part == "backward", plan)
    parts = meta(found.shape, n.columns, dtype=torch.float32)
    tensors = (x, weight, cos, cos, out, rstd) if part == "forward" else (out, x, weight, cos, cos, rstd, out, parts)
    assert found.bound is not None
    return found.bound.example(tensors)
