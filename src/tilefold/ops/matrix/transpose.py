"""[M, N] -> [N, M]: check, plan, launch, and the operator for torch's dispatcher."""

from typing import Any

import torch

from ...check import TensorSpec, bind
from ...plan.matrix.transpose import (
    DESCRIPTORS,
    TransposePlan,
    TransposeProblem,
    check_method,
    plan_transpose,
)
from ..bound import Bound, Box, Example, Slot
from ..device import device_of
from ..operator import one_by_one
from ..records import recorded
from ..source import facts_of_values
from ..watch import in_forward_mode, is_transformed, is_watched, resolved, wants_gradient

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def transpose(x: torch.Tensor, *, method: str = "auto") -> torch.Tensor:
    """x [M, N], any strides, 1, 2, 4 or 8 bytes an element -> [N, M], contiguous; the bits are copied.

    method: "registers" (a tile is loaded, turned and stored in rows), "strides" (stored by swapped offsets), "descriptors" (the
    tensor memory accelerator loads and stores; sm_90 and newer, rows at multiples of 16 bytes), "auto": by the plan's rule.
    Differentiable any number of times, forwards too.  Raises ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError
    for another method, Unsupported, saying why, for descriptors that are not possible.
    """
    transformed = is_transformed()
    if torch.compiler.is_compiling() or (not transformed and is_watched((x,))):
        found: torch.Tensor = transpose_op(x, method)
        return found
    if transformed or in_forward_mode() or (torch.is_grad_enabled() and wants_gradient((x,))):
        return Transpose.apply(x, method)  # type: ignore[no-any-return, no-untyped-call]
    return _forward(x, method)


def _forward(x: torch.Tensor, method: str) -> torch.Tensor:
    bound = _prepare(x, method)
    out = torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device=x.device)
    if bound is not None:
        bits = INTEGERS[x.element_size()]
        bound((x.view(bits), out.view(bits)))
    return out


def _check(x: torch.Tensor, method: str) -> None:
    check_method(method)
    bind((TensorSpec("x", "m n", DTYPES),), {"x": x})
    if not torch.compiler.is_compiling() and x.is_conj():
        from ...errors import LayoutError

        raise LayoutError("x is a lazy conjugate; call x.resolve_conj() first")


def _problem(x: torch.Tensor) -> TransposeProblem:
    aligned = x.device.type == "meta" or x.data_ptr() % 16 == 0
    return TransposeProblem(x.shape[0], x.shape[1], x.element_size(), (x.stride(0), x.stride(1)), aligned)


@recorded("transpose", lambda x, method: (facts_of_values(x, method), x.is_conj()))
def _prepare(x: torch.Tensor, method: str) -> Bound | None:
    _check(x, method)
    return _bind(x, plan_transpose(_problem(x), device_of(x.device), method))


def _bind(x: torch.Tensor, plan: TransposePlan) -> Bound | None:
    from ...kernels.matrix import transpose as kernels

    if x.numel() == 0:
        return None
    (rows, columns), (m, n) = x.shape, plan.tile
    constants: dict[str, Any] = {"BLOCK_M": m, "BLOCK_N": n}
    values: dict[str, Any] = {"rows": rows, "columns": columns, "strides": x.stride()}
    if plan.method == DESCRIPTORS:
        bits = x.view(INTEGERS[x.element_size()])
        out = torch.empty((columns, rows), dtype=bits.dtype, device=x.device)
        values["X"] = Slot("X", Box(bits, [rows, columns], [x.stride(0), 1], [m, n]).over)
        values["Out"] = Slot("Out", Box(out, [columns, rows], [rows, 1], [n, m]).over)
    else:
        constants["WIDE"] = plan.problem.wide
    kernel = getattr(kernels, f"transpose_{plan.method}")
    return Bound.of(kernel, plan.programs, ("X", "Out"), values, constants, x.device, num_warps=plan.num_warps)


class Transpose(torch.autograd.Function):
    """Its gradient is the transpose of the gradient, its tangent that of the tangent."""

    @staticmethod
    def forward(x: torch.Tensor, method: str) -> torch.Tensor:
        return _forward(x, method)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Apart from forward, as functorch's transforms want it; nothing is kept."""

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _backward(ctx, dout)

    @staticmethod
    def jvp(ctx: Any, dx: torch.Tensor, _: None) -> torch.Tensor:
        return transpose(resolved(dx))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, method: str) -> tuple[torch.Tensor, int]:
        return one_by_one(lambda each: transpose(each, method=method), info.batch_size, in_dims[:1], x)


def _backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, None]:
    return transpose(resolved(dout)), None


@torch.library.custom_op("tilefold::transpose", mutates_args=())
def transpose_op(x: torch.Tensor, method: str) -> torch.Tensor:
    """`transpose` for those who trace or watch."""
    return _forward(x, method)


@transpose_op.register_fake
def _(x: torch.Tensor, method: str) -> torch.Tensor:
    _check(x, method)
    return x.new_empty((x.shape[1], x.shape[0]))


transpose_op.register_autograd(_backward)


def example_launch(dtype: str, plan: TransposePlan) -> Example:
    """(kernel, args, kwargs) of a plan's launch on tensors without content: to compile ahead of time."""
    n = plan.problem
    boxed = plan.method == DESCRIPTORS
    x = torch.empty_strided(
        (n.rows, n.columns), n.strides, dtype=getattr(torch, dtype), device="cpu" if boxed else "meta"
    )
    out = torch.empty((n.columns, n.rows), dtype=x.dtype, device=x.device)
    bound, bits = _bind(x, plan), INTEGERS[x.element_size()]
    assert bound is not None
    return bound.example((x.view(bits), out.view(bits)))
