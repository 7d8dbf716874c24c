"""RMSNorm with a residual: check, plan, launch; differentiable, as an operator of torch's dispatcher."""

from typing import Any, NamedTuple

import torch

from ...check import FLOATS, TensorSpec, bind, check_number
from ...errors import LayoutError
from ...plan.matrix.rms_norm import RMSNormPlan, RMSNormProblem, plan_rms_norm
from ...plan.torch_cpu import TorchPlan
from ..bound import Example, launch_of
from ..device import device_of, interpreting
from ..operator import Operator
from ..records import recorded
from ..serve import function_at


class Prepared(NamedTuple):
    """What follows from a call's key; launch None: there is nothing to do."""

    plan: Any
    launch: Any
    scalars: tuple[Any, ...]
    parts: int = 1  # that the weight's gradient is summed from


def rms_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, *, eps: float = 1e-6) -> Any:
    """s * (mean(s^2) + eps)^(-1/2) * weight over the last dimension, where s is x, or x + residual.

    x: [.., columns] fp16, bf16 or fp32; the last dimension contiguous, rows evenly apart; columns 1 to 16384.
    weight: [columns], a float dtype.
    residual: like x: added first; the sum is rounded to x's dtype, and that is what is normalised.
    eps: greater than 0.

    Returns out like x, contiguous; with a residual (out, sum), sum being the next one.  Arithmetic in fp32.  Differentiable in x,
    weight and residual, once, with the same bits every run: dw is added by each program over its rows, then over the programs.
    Raises ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError, Unsupported: naming the argument.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467)."""
    out, summed, _ = rms_norm_op(x, weight, residual, check_number("eps", eps, above=0.0))
    return out if residual is None else (out, summed)


def rms_norm_plan(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None
) -> RMSNormPlan | TorchPlan:
    """The plan that `rms_norm(x, weight, residual)` follows; `print` it to read the decision."""
    plan: RMSNormPlan | TorchPlan = _prepare(x, weight, residual, 1e-6).plan
    return plan


# ---------------------------------------------------------------- forward


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    dims = " ".join(f"d{i}" for i in range(x.dim() - 1)) if isinstance(x, torch.Tensor) else ""
    rows = f"{dims} columns".strip()
    specs = (
        TensorSpec("x", rows, FLOATS, contiguous_last=True),
        TensorSpec("weight", "columns", FLOATS, contiguous_last=True),
        TensorSpec("residual", rows, FLOATS, optional=True, same_dtype_as="x", contiguous_last=True),
    )
    bind(specs, {"x": x, "weight": weight, "residual": residual})
    for name, t in (("x", x), ("residual", residual)):
        if t is not None:
            _rows(name, t)


def _rows(name: str, t: torch.Tensor) -> torch.Tensor:
    """[rows, columns] of the same memory."""
    try:
        return t.view(-1, t.shape[-1]) if t.numel() else t.new_empty(0, t.shape[-1])
    except RuntimeError:
        raise LayoutError(
            f"{name} has strides {tuple(t.stride())} for shape {tuple(t.shape)}: its rows must be evenly apart; call "
            f"{name}.contiguous() first if a copy is acceptable"
        ) from None


@recorded("rms_norm")
def _prepare(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float) -> Prepared:
    _check(x, weight, residual)
    rows = _rows("x", x)
    problem = RMSNormProblem(rows.shape[0], rows.shape[1], x.element_size(), residual is not None)
    if (own := function_at("rms_norm", x.device)) is not None:
        plan = TorchPlan("rms_norm", problem, device_of(x.device, "rms_norm"))
        return Prepared(plan, own if x.numel() else None, (eps,))
    return _bind(x, weight, residual, eps, plan_rms_norm(problem, device_of(x.device)))


def _bind(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, plan: RMSNormPlan
) -> Prepared:
    from ...kernels.matrix.rms_norm import rms_norm_forward

    if x.numel() == 0:
        return Prepared(plan, None, ())
    strides = [0 if t is None else _rows("x", t).stride(0) for t in (x, residual)]
    constants = _constants(plan, (x, weight), max(strides))
    launch = launch_of(rms_norm_forward, plan.tiles, constants, x.device, num_warps=plan.num_warps)
    return Prepared(plan, launch, (plan.problem.rows, eps, *strides))


def _constants(plan: RMSNormPlan, tensors: tuple[torch.Tensor, ...], stride: int) -> dict[str, Any]:
    return {
        "EMULATE": interpreting() and torch.bfloat16 in [t.dtype for t in tensors],
        "WIDE": stride * plan.block_rows >= 1 << 31,
        "DIM": plan.problem.columns,
        "ROWS": plan.block_rows,
        "BLOCK_D": plan.block_columns,
    }


def _forward(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, sum, one over the root of each row's mean square); sum is empty without a residual."""
    found = _prepare(x, weight, residual, eps)
    out, summed, rstd = (torch.empty(shape, dtype=t, device=x.device) for shape, t in _results(x, residual))
    if found.launch is not None:
        found.launch((x, residual, weight, out, None if residual is None else summed, rstd, *found.scalars))
    return out, summed, rstd


def _results(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[tuple[Any, torch.dtype], ...]:
    return (x.shape, x.dtype), (x.shape if residual is not None else (0,), x.dtype), (x.shape[:-1], torch.float32)


def _fake(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(x, weight, residual)
    out, summed, rstd = (x.new_empty(shape, dtype=t) for shape, t in _results(x, residual))
    return out, summed, rstd


# ---------------------------------------------------------------- backward


def _gradient(
    dout: torch.Tensor, dsum: torch.Tensor | None, s: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, dw) from the gradients of out and of the sum; s: the sum, or x."""
    dout = dout.contiguous()
    dsum = None if dsum is None else dsum.contiguous()
    found = _bind_gradient(dout, dsum, s, weight)
    dx = torch.empty(s.shape, dtype=s.dtype, device=s.device)
    parts = torch.empty((found.parts, weight.shape[0]), dtype=torch.float32, device=s.device)
    if found.launch is None:
        return dx, torch.zeros_like(weight)
    found.launch((dout, dsum, s, weight, rstd, dx, parts, *found.scalars))
    return dx, parts.sum(0).to(weight.dtype)


@recorded("rms_norm_backward")
def _bind_gradient(
    dout: torch.Tensor,
    dsum: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor,
    plan: RMSNormPlan | None = None,
) -> Prepared:
    rows = _rows("x", s)
    problem = RMSNormProblem(rows.shape[0], rows.shape[1], s.element_size(), dsum is not None)
    if plan is None and (own := function_at("rms_norm_backward", s.device)) is not None:
        return Prepared(None, own if s.numel() else None, ())
    from ...kernels.matrix.rms_norm import rms_norm_backward

    plan = plan or plan_rms_norm(problem, device_of(s.device))
    if s.numel() == 0:
        return Prepared(plan, None, ())
    columns, stride = problem.columns, rows.stride(0)
    constants = _constants(plan, (s, weight), max(stride, columns))
    launch = launch_of(rms_norm_backward, plan.backward_programs, constants, s.device, num_warps=plan.num_warps)
    tiles = -(-plan.tiles // plan.backward_programs)
    return Prepared(plan, launch, (problem.rows, tiles, columns, columns, stride), plan.backward_programs)


def _gradient_fake(
    dout: torch.Tensor, dsum: torch.Tensor | None, s: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return s.new_empty(s.shape), weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, residual, _ = inputs
    _, summed, rstd = output
    ctx.save_for_backward(x if residual is None else summed, weight, rstd)
    ctx.mark_non_differentiable(*([rstd, summed] if residual is None else [rstd]))
    ctx.set_materialize_grads(False)


def _arguments(ctx: Any, dout: torch.Tensor | None, dsum: torch.Tensor | None, _: None) -> tuple[Any, ...] | None:
    if dout is None and dsum is None:
        return None
    s, weight, rstd = ctx.saved_tensors
    return torch.zeros_like(s) if dout is None else dout, dsum, s, weight, rstd


def _give(ctx: Any, results: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, ...]:
    need, (dx, dw) = ctx.needs_input_grad, results
    return dx if need[0] else None, dw if need[1] else None, dx if need[2] else None, None


rms_norm_op = Operator("rms_norm", _forward, _fake, _gradient, _gradient_fake, _keep, _arguments, _give)


# ---------------------------------------------------------------- without a GPU


def example_launch(plan: RMSNormPlan, dtype: str, part: str = "forward") -> Example:
    """(kernel, args, kwargs) of a part of a call with this plan, "forward" or "backward", on tensors without memory: to compile
    ahead of time."""
    n = plan.problem
    x = torch.empty((n.rows, n.columns), dtype=getattr(torch, dtype), device="meta")
    weight, rstd = x[0], torch.empty(n.rows, device="meta")
    residual = x if n.residual else None
    if part == "forward":
        launch, scalars = _bind(x, weight, residual, 1e-6, plan)[1:3]
        return launch.fn, (x, residual, weight, x, residual, rstd, *scalars), launch.keywords
    launch, scalars = _bind_gradient(x, residual, x, weight, plan)[1:3]
    parts = torch.empty((plan.backward_programs, n.columns), device="meta")
    return launch.fn, (x, residual, x, weight, rstd, x, parts, *scalars), launch.keywords
