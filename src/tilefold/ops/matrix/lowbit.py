"""Products with weights of few bits: the checks, the choice of an operator or a plain call, gradients."""

from typing import TYPE_CHECKING, Any

import torch

from ...errors import DtypeError, ValueRangeError
from ...quant import QuantizedTensor
from ...types import Numerics
from ..device import device_asked, device_of, device_of_kernels
from ..numerics import check_numerics, is_invariant
from ..operator import Gradient, Operation
from ..serve import has_function
from ..watch import in_forward_mode, is_transformed, is_watched, refuse_gradients, refuse_tangents, wants_gradient
from .lowbit_launch import call, check, dequantise, plain_product

if TYPE_CHECKING:
    from ...plan.device import Device
    from ...plan.matrix.lowbit import LowbitPlan
    from ...plan.torch_cpu import TorchPlan

Tensors = tuple[torch.Tensor | None, ...]
FIELDS = ("packed", "packed_high", "scales", "zeros", "table", "perm")


def lowbit_matmul(
    x: torch.Tensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool = True,
    plan: "LowbitPlan | None" = None,
    numerics: Numerics | None = None,
) -> torch.Tensor:
    """x times the transpose of a weight of 8, 4, 3 or 2 bits, plus a bias; weights are read as they are kept.

    Args:
        x: [..., K] fp16, bf16 or fp32, the last dimension contiguous.
        weight: a `tilefold.quant.QuantizedTensor` [N, K] on x's device: any bits, scheme, group, order of columns.
        bias: [N] in x's dtype.
        deterministic: the same bits every run.  False allows sums in memory in the order of arrival, where the plan uses them.
        plan: what `lowbit_matmul_plan` made for such a call, perhaps changed; by default the planner's own.
        numerics: "invariant": a row's bits do not depend on the other rows (docs/invariance.md); as for `matmul`.

    Returns:
        [..., N] in x's dtype; sums are fp32.  x meets weights as `weight.dequantize(x.dtype)` has them, or more exact;
        fp32 x is multiplied by torch with the dequantised weight.
        The gradient for x is g @ W; weights and their scales have none.

    Raises:
        DtypeError, ShapeError, LayoutError, DeviceError, ValueRangeError, naming the argument; PlanError for a plan of another
        problem.
    """
    check_options(weight, deterministic, plan)
    asked = check_numerics(numerics)
    if in_forward_mode():
        refuse_tangents({"x": x, "bias": bias, "weight.scales": weight.scales})  # no_grad does not stop them
    if (
        torch.compiler.is_compiling()
        or is_transformed()
        or is_watched((x, bias, weight.packed))
        or (torch.is_grad_enabled() and wants_gradient((x, bias, weight.scales)))
    ):
        check(x, weight, bias)
        if torch.is_grad_enabled():
            refuse_gradients((("weight.scales", weight.scales), ("weight.zeros", weight.zeros)), "x and bias")
        text = "" if plan is None else plan.to_json()
        tensors = tuple(getattr(weight, name) for name in FIELDS)
        found: torch.Tensor = LOWBIT_MATMUL(
            x, bias, *tensors, weight.bits, weight.group, *weight.shape, deterministic, text, asked
        )
        return found
    return call(x, weight, bias, deterministic, plan, asked)


def check_options(weight: Any, deterministic: Any, plan: Any) -> None:
    """Raise DtypeError unless they are of the types that every call needs."""
    if not isinstance(weight, QuantizedTensor):
        raise DtypeError(f"weight must be a tilefold.quant.QuantizedTensor, got {type(weight).__name__}")
    if type(deterministic) is not bool:
        raise DtypeError(f"deterministic must be True or False, got {deterministic!r}")
    if plan is not None:
        from ...plan.matrix.lowbit import LowbitPlan

        if not isinstance(plan, LowbitPlan):
            raise DtypeError(f"plan must be a LowbitPlan or None, got {type(plan).__name__}")


def lowbit_matmul_plan(
    x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None, *, deterministic: bool = True,
    numerics: Numerics | None = None, device: "str | Device | None" = None,
) -> "LowbitPlan | TorchPlan":  # fmt: skip
    """The plan that `lowbit_matmul` would use for this call: `print` it, change it with `dataclasses.replace`, give it back.

    device: plans as on another one, as of `attention_plan`.  A `TorchPlan` where a function of torch serves it."""
    from ...plan.torch_cpu import TorchPlan
    from .lowbit_launch import plan_of, problem_of

    check_options(weight, deterministic, None)
    check(x, weight, bias)
    on = device_asked(device) or device_of(x.device, "lowbit_matmul")
    if has_function("lowbit_matmul", on):
        return TorchPlan("lowbit_matmul", problem_of(x, weight, deterministic), on)
    return plan_of(
        x,
        weight,
        deterministic,
        is_invariant(check_numerics(numerics)),
        None if device is None else device_of_kernels(device, x.device),
    )


def _record(tensors: Tensors, bits: int, group: int, n: int, k: int, dtype: torch.dtype) -> QuantizedTensor:
    """The record that these fields are of."""
    packed, high, scales, zeros, table, perm = tensors
    if packed is None or scales is None:
        raise ValueRangeError("packed and scales of a weight cannot be None")
    scheme = "table" if table is not None else "symmetric" if zeros is None else "asymmetric"
    return QuantizedTensor(packed=packed, packed_high=high, scales=scales, zeros=zeros, table=table, perm=perm, bits=bits,
                           group=group, shape=(n, k), scheme=scheme, dtype=dtype)  # fmt: skip


def _forward(
    x: torch.Tensor, bias: torch.Tensor | None, packed: torch.Tensor, packed_high: torch.Tensor | None, scales: torch.Tensor,
    zeros: torch.Tensor | None, table: torch.Tensor | None, perm: torch.Tensor | None, bits: int, group: int, n: int, k: int,
    deterministic: bool, plan: str, numerics: str,
) -> torch.Tensor:  # fmt: skip
    from ...plan.matrix.lowbit import LowbitPlan

    weight = _record((packed, packed_high, scales, zeros, table, perm), bits, group, n, k, x.dtype)
    return call(x, weight, bias, deterministic, LowbitPlan.from_json(plan) if plan else None, numerics)


def _fake(x: torch.Tensor, *given: Any) -> torch.Tensor:
    *_, n, _, _, _, _ = given
    return x.new_empty((*x.shape[:-1], n))


def _gradients(args: tuple[Any, ...], results: Any, grads: tuple[Any, ...], wanted: tuple[bool, ...]) -> Any:
    """Of x the gradient [..., N] times the weight; of the bias its sum."""
    (_, _, *tensors, bits, group, n, k, _, _, _), (g,) = args, grads
    dx = db = None
    if wanted[0]:
        weight = _record(tuple(tensors), bits, group, n, k, g.dtype)
        dx = plain_product(g, dequantise(weight, g.dtype).t())
        if weight.perm is not None:
            dx = torch.zeros_like(dx).index_copy_(dx.dim() - 1, weight.perm.long(), dx)
    if wanted[1]:
        db = g.reshape(-1, n).sum(0)
    return dx, db


GRADIENT = Gradient(("x", "bias"), _gradients, unread=(0,), kept=lambda tensors, _: (None, None, *tensors[2:]))
LOWBIT_MATMUL = Operation("lowbit_matmul", _forward, _fake, GRADIENT)
