"""[M, N] -> [N, M]: check, plan, launch, and the operator with its gradient."""

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
from ..bound import Bound, Box, Example, Launched, Slot
from ..device import device_of
from ..operator import Gradient, Operation
from ..records import recorded
from ..source import facts_of_values

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def transpose(x: torch.Tensor, *, method: str = "auto") -> torch.Tensor:
    """x [M, N], any strides, 1, 2, 4 or 8 bytes an element -> [N, M], contiguous; the bits are copied.

    method: "registers" (a tile is loaded, turned and stored in rows), "strides" (stored by swapped offsets), "descriptors" (the
    tensor memory accelerator loads and stores; sm_90 and newer, rows at multiples of 16 bytes), "auto": by the plan's rule.
    First derivatives.  Raises ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError for another method, Unsupported,
    saying why, for descriptors that are not possible.
    """
    return TRANSPOSE(x, method)  # type: ignore[no-any-return]


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
def _prepare(x: torch.Tensor, method: str) -> Launched:
    _check(x, method)
    return Launched(None, _bind(x, plan_transpose(_problem(x), device_of(x.device), method)), run=_run)


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


def _run(found: Launched, x: torch.Tensor, method: str) -> torch.Tensor:
    out = torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device=x.device)
    if found.bound is not None:
        bits = INTEGERS[x.element_size()]
        found.bound((x.view(bits), out.view(bits)))
    return out


def _fake(x: torch.Tensor, method: str) -> torch.Tensor:
    _check(x, method)
    return x.new_empty((x.shape[1], x.shape[0]))


def _gradients(args: Any, results: Any, grads: tuple[Any, ...], wanted: Any) -> tuple[torch.Tensor]:
    given = grads[0], "auto"
    return (_run(_prepare(*given), *given),)


GRADIENT = Gradient(("x",), _gradients, unread=(0,), kept=lambda tensors, _: (None,))
TRANSPOSE = Operation("transpose", _prepare, _fake, GRADIENT)


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
