"""x + y: check, launch, and the operator for torch's dispatcher."""

from typing import Any

import torch

from ...check import TensorSpec, bind
from ..bound import Bound, Example, Launched
from ..device import device_of, interpreting
from ..operator import one_by_one
from ..records import recorded
from ..watch import in_forward_mode, is_transformed, is_watched, wants_gradient

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
BLOCK = 4096  # bytes of each tensor that a program of 4 warps moves: two 16-byte loads a thread


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, elementwise.

    x, y: the same shape, 1-D or 2-D, the same dtype (fp16, bf16, fp32, fp64 or an integer), any strides.  The result lies as
    x and y do if those have the same dense strides, else row by row.  Sixteen-bit sums are made in fp32 and rounded once.
    Differentiable any number of times, forwards too.  Raises ShapeError, DtypeError, DeviceError or LayoutError.
    """
    transformed = is_transformed()
    if torch.compiler.is_compiling() or (not transformed and is_watched((x, y))):
        found: torch.Tensor = add_op(x, y)
        return found
    if transformed or in_forward_mode() or (torch.is_grad_enabled() and wants_gradient((x, y))):
        return Sum.apply(x, y)  # type: ignore[no-any-return, no-untyped-call]
    return _forward(x, y)


def _forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p = _prepare(x, y)
    out = torch.empty_strided(x.shape, p.shape, dtype=x.dtype, device=x.device)
    if p.bound is not None:
        p.bound((x, y, out))
    return out


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
        return Launched(strides)
    emulate = interpreting() and x.dtype == torch.bfloat16

    def bound(fn: Any, programs: int, constants: dict[str, Any], values: dict[str, Any]) -> Launched:
        constants = {"EMULATE": emulate, **constants}
        return Launched(strides, Bound.of(fn, programs, ("X", "Y", "Out"), values, constants, x.device))

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


class Sum(torch.autograd.Function):
    """The gradient of a sum is the gradient of both; its tangent is the sum of theirs."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _forward(x, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Apart from forward, as functorch's transforms want it; nothing is kept."""

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return dout, dout

    @staticmethod
    def jvp(ctx: Any, dx: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return add(dx, dy)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        return one_by_one(add, info.batch_size, in_dims, x, y)


@torch.library.custom_op("tilefold::add", mutates_args=())
def add_op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`add` for those who trace or watch."""
    return _forward(x, y)


@add_op.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    _check(x, y)
    return x.new_empty_strided(x.shape, _strides(x, y))


add_op.register_autograd(lambda ctx, dout: (dout, dout))


def example_launch(dtype: str, strided: bool) -> Example:
    """(kernel, args, kwargs) of a call on tensors without memory: to compile ahead of time."""
    x = torch.empty((4096, 4096), dtype=getattr(torch, dtype), device="meta")
    x, y = (x[:, :4000], x[:, 16:4016]) if strided else (x, x)
    bound = _prepare(x, y).bound
    assert bound is not None
    return bound.example((x, y, x))
