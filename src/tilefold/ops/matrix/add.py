"""x + y: check, launch, and the operator with its gradient."""

from typing import Any

import torch

from ...check import TensorSpec, bind
from ..bound import Bound, Example, Launched
from ..device import device_of, interpreting
from ..operator import Gradient, Operation
from ..records import recorded

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
BLOCK = 4096  # bytes of each tensor that a program of 4 warps moves: two 16-byte loads a thread


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, elementwise.

    x, y: the same shape, 1-D or 2-D, the same dtype (fp16, bf16, fp32, fp64 or an integer), any strides.  The result lies as
    x and y do if those have the same dense strides, else row by row.  Sixteen-bit sums are made in fp32 and rounded once.
    First derivatives.  Raises ShapeError, DtypeError, DeviceError, LayoutError or Unsupported.
    """
    return ADD(x, y)  # type: ignore[no-any-return]


def _check(x: torch.Tensor, y: torch.Tensor) -> None:
    bind((TensorSpec("x", "n / m n", DTYPES),), {"x": x})
    dims = "n" if x.dim() == 1 else "m n"
    bind((TensorSpec("x", dims, DTYPES), TensorSpec("y", dims, DTYPES, same_dtype_as="x")), {"x": x, "y": y})


def _flat(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether both lie one element behind the other in the same order."""
    if x.dim() == 2 and x.stride() == y.stride() and x.t().is_contiguous():
        return True
    return x.is_contiguous() and y.is_contiguous()


def _strides(x: torch.Tensor, y: torch.Tensor) -> tuple[int, ...]:
    """Of the result."""
    if x.dim() == 2 and x.t().is_contiguous() and not x.is_contiguous() and x.stride() == y.stride():
        return 1, x.shape[0]
    return (1,) if x.dim() == 1 else (x.shape[1], 1)


@recorded("add")
def _prepare(x: torch.Tensor, y: torch.Tensor) -> Launched:
    """The strides of the result, and the launch."""
    from ...kernels.matrix.add import add_flat, add_strided

    _check(x, y)
    if x.device.type != "meta":
        device_of(x.device)
    strides = _strides(x, y)
    if x.numel() == 0:
        return Launched(strides, run=_run)
    emulate = interpreting() and x.dtype == torch.bfloat16

    def bound(fn: Any, programs: int, constants: dict[str, Any], values: dict[str, Any]) -> Launched:
        constants = {"EMULATE": emulate, **constants}
        return Launched(strides, Bound.of(fn, programs, ("X", "Y", "Out"), values, constants, x.device), run=_run)

    if _flat(x, y):
        block = BLOCK // x.element_size()
        return bound(add_flat, -(-x.numel() // block), {"BLOCK": block}, {"elements": x.numel()})
    shape, *three = ((1, *x.shape), (0, *x.stride()), (0, *y.stride()), (0, *strides))
    if x.dim() == 2:
        shape, *three = (tuple(x.shape), x.stride(), y.stride(), strides)
    if shape[0] > 1 and three[0][0] < three[0][1]:  # columns are what lies closer together in x
        shape, *three = (pair[::-1] for pair in (shape, *three))
    columns = min(64, 1 << (shape[1] - 1).bit_length())
    rows = max(1, BLOCK // x.element_size() // columns)
    wide = max(abs(s) for pair in three for s in pair) * max(rows, columns) * 2 >= 2**31
    constants = {"WIDE": wide, "ROWS": rows, "COLUMNS": columns}
    values = dict(zip(("rows", "columns", "x_strides", "y_strides", "o_strides"), (*shape, *three), strict=True))
    return bound(add_strided, -(-shape[0] // rows) * -(-shape[1] // columns), constants, values)


def _run(found: Launched, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_strided(x.shape, found.shape, dtype=x.dtype, device=x.device)
    if found.bound is not None:
        found.bound((x, y, out))
    return out


def _fake(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    _check(x, y)
    return x.new_empty_strided(x.shape, _strides(x, y))


GRADIENT = Gradient(
    ("x", "y"),
    lambda args, results, grads, wanted: (grads[0], grads[0]),
    unread=(0,),
    kept=lambda tensors, _: (None, None),
    same=((0, 1),),
)
ADD = Operation("add", _prepare, _fake, GRADIENT)


def example_launch(dtype: str, strided: bool) -> Example:
    """(kernel, args, kwargs) of a call on tensors without memory: to compile ahead of time."""
    x = torch.empty((4096, 4096), dtype=getattr(torch, dtype), device="meta")
    x, y = (x[:, :4000], x[:, 16:4016]) if strided else (x, x)
    bound = _prepare(x, y).bound
    assert bound is not None
    return bound.example((x, y, x))
