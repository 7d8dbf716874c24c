"""RMSNorm with a residual: check, plan, launch; differentiable, as an operator of torch's dispatcher."""

from collections.abc import Sequence
from typing import Any

import torch

from ...check import FLOATS, TensorSpec, bind, check_number
from ...errors import LayoutError
from ...plan.device import Device
from ...plan.matrix.rms_norm import RMSNormPlan, RMSNormProblem, plan_rms_norm
from ...plan.torch_cpu import TorchPlan
from ..bound import Bound, Example, Launched, meta
from ..device import device_asked, device_of, interpreting
from ..operator import Gradient, Operation
from ..records import recorded
from ..serve import function_at, has_function

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
    out, summed, _ = RMS_NORM(x, weight, residual, check_number("eps", eps, above=0.0))
    return out if residual is None else (out, summed)


def rms_norm_plan(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, *, device: str | Device | None = None
) -> RMSNormPlan | TorchPlan:
    """The plan that `rms_norm(x, weight, residual)` follows; `print` it to read the decision.  device: plans as on another one,
    as of `attention_plan`."""
    if (on := device_asked(device)) is not None:
        _check(x, weight, residual)
        problem = _problem(x, residual)
        return TorchPlan("rms_norm", problem, on) if has_function("rms_norm", on) else plan_rms_norm(problem, on)
    plan: RMSNormPlan | TorchPlan = _prepare(x, weight, residual, 1e-6).more
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


def _problem(x: torch.Tensor, residual: torch.Tensor | None) -> RMSNormProblem:
    rows, columns = _rows("x", x).shape
    return RMSNormProblem(rows, columns, x.element_size(), residual is not None)


@recorded("rms_norm")
def _prepare(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float) -> Launched:
    _check(x, weight, residual)
    problem = _problem(x, residual)
    if (own := function_at("rms_norm", x.device, eps)) is not None:
        plan = TorchPlan("rms_norm", problem, device_of(x.device, "rms_norm"))
        return Launched(1, own if x.numel() else None, plan, _run)
    return _bind(x, weight, residual, eps, plan_rms_norm(problem, device_of(x.device)))


def _bind(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, plan: RMSNormPlan
) -> Launched:
    from ...kernels.matrix.rms_norm import rms_norm_forward

    if x.numel() == 0:
        return Launched(1, None, plan, _run)
    strides = [0 if t is None else _rows("x", t).stride(0) for t in (x, residual)]
    constants = _constants(plan, (x, weight), max(strides))
    numbers = plan.problem.rows, eps, *strides
    bound = Bound.of(rms_norm_forward, plan.tiles, 6, numbers, constants, x.device, num_warps=plan.num_warps)
    return Launched(1, bound, plan, _run)


def _constants(plan: RMSNormPlan, tensors: tuple[torch.Tensor, ...], stride: int) -> dict[str, Any]:
    return {
        "EMULATE": interpreting() and torch.bfloat16 in [t.dtype for t in tensors],
        "WIDE": stride * plan.block_rows >= 1 << 31,
        "DIM": plan.problem.columns,
        "ROWS": plan.block_rows,
        "BLOCK_D": plan.block_columns,
    }


def _run(found: Launched, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float) -> Three:
    """(out, sum, one over the root of each row's mean square); sum is empty without a residual."""
    out, summed, rstd = _results(x, residual)
    if found.bound is not None:
        found.bound((x, residual, weight, out, None if residual is None else summed, rstd))
    return out, summed, rstd


def _results(x: torch.Tensor, residual: torch.Tensor | None) -> Three:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    summed = x.new_empty(0) if residual is None else torch.empty_like(out)
    return out, summed, x.new_empty(x.shape[:-1], dtype=torch.float32)


def _fake(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float) -> Three:
    _check(x, weight, residual)
    return _results(x, residual)


# ---------------------------------------------------------------- backward


def _gradients(args: tuple[Any, ...], results: Any, grads: tuple[Any, ...], wanted: tuple[bool, ...]) -> Any:
    (x, weight, residual, _), (_, summed, rstd), (dout, dsum, _) = args, results, grads
    s = summed if x is None or residual is not None else x
    dout = torch.zeros_like(s) if dout is None else dout.contiguous()
    dsum = None if dsum is None else dsum.contiguous()
    found = _bind_gradient(dout, dsum, s, weight)
    dx = torch.empty_like(s, memory_format=torch.contiguous_format)
    parts = s.new_empty((found.shape, weight.shape[0]), dtype=torch.float32)
    if found.bound is None:
        parts.zero_()
    else:
        found.bound((dout, dsum, s, weight, rstd, dx, parts))
    dw = parts.sum(0).to(weight.dtype) if wanted[1] else None
    return dx if wanted[0] else None, dw, dx if wanted[2] else None


@recorded("rms_norm_backward")
def _bind_gradient(
    dout: torch.Tensor,
    dsum: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor,
    plan: RMSNormPlan | None = None,
) -> Launched:
    rows = _rows("x", s)
    problem = RMSNormProblem(rows.shape[0], rows.shape[1], s.element_size(), dsum is not None)
    if plan is None and (own := function_at("rms_norm_backward", s.device)) is not None:
        return Launched(1, own if s.numel() else None)
    from ...kernels.matrix.rms_norm import rms_norm_backward

    plan = plan or plan_rms_norm(problem, device_of(s.device))
    if s.numel() == 0:
        return Launched(1)
    columns, stride = problem.columns, rows.stride(0)
    constants = _constants(plan, (s, weight), max(stride, columns))
    programs, tiles = plan.backward_programs, -(-plan.tiles // plan.backward_programs)
    numbers = problem.rows, tiles, columns, columns, stride
    bound = Bound.of(rms_norm_backward, programs, 7, numbers, constants, s.device, num_warps=plan.num_warps)
    return Launched(programs, bound)


def _kept(tensors: Sequence[Any], needs: Sequence[bool]) -> tuple[Any, ...]:
    """x alone is what was normalised; with a residual that is the sum."""
    x, weight, residual = tensors
    return x if residual is None else None, weight, None


GRADIENT = Gradient(("x", "weight", "residual"), _gradients, unread=(0,), kept=_kept, still=(2,), same=((0, 2),))
RMS_NORM = Operation("rms_norm", _prepare, _fake, GRADIENT)


# ---------------------------------------------------------------- without a GPU


def example_launch(plan: RMSNormPlan, dtype: str, part: str = "forward") -> Example:
    """(kernel, args, kwargs) of a part of a call with this plan, "forward" or "backward", on tensors without memory: to compile
    ahead of time."""
    n = plan.problem
    x, rstd = meta(n.rows, n.columns, dtype=getattr(torch, dtype)), meta(n.rows)
    weight = x[0]
    residual = x if n.residual else None
    if part == "forward":
        found = _bind(x, weight, residual, 1e-6, plan)
        tensors: tuple[Any, ...] = (x, residual, weight, x, residual, rstd)
    else:
        found = _bind_gradient(x, residual, x, weight, plan)
        tensors = (x, residual, x, weight, rstd, x, meta(plan.backward_programs, n.columns))
    assert found.bound is not None
    return found.bound.example(tensors)
