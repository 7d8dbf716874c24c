"""Matrix products with bias and activation, of two matrices or of batches: `matmul` and `bmm`, with first derivatives."""

import functools
from typing import TYPE_CHECKING, Any

import torch

from ...check import FLOATS, TensorSpec, bind
from ...errors import DtypeError, LayoutError, PlanError, ShapeError, Unsupported, ValueRangeError
from ...types import Constant, Numerics, constant
from ..bound import Example
from ..numerics import check_numerics
from ..operator import Gradient, Operation
from ..records import recorded
from ..source import facts_of
from ..watch import is_transformed, is_watched, wants_gradient
from .matmul_gradient import gradient
from .options import check_activation, check_tf32
from .product import Epilogue, product

if TYPE_CHECKING:
    from ...plan.matrix.matmul import MatmulPlan

EIGHT = (torch.float8_e4m3fn,)
ORDERS = ("grouped", "plain")


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    order: str = "grouped",
    tf32: bool = False,
    out_dtype: torch.dtype | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    plan: "MatmulPlan | Constant | None" = None,
    numerics: Numerics | None = None,
) -> torch.Tensor:
    """activation(a b + bias) [M, N], summed in fp32.

    a [M, K], b [K, N]: float16, bfloat16, float32 or float8_e4m3fn, the same of both; any strides with one dimension side by
        side, so that `weight.t()` costs nothing.
    bias: float16, bfloat16 or float32, broadcast to [M, N].
    activation: None, "relu", "silu", "gelu" (exact, by erf) or "gelu_tanh"; applied in fp32 before the result is rounded.
    order: of the tiles, "grouped" for the L2 cache or "plain", row by row; the numbers are the same.
    tf32: of float32 only: round factors to 10 bits, for the tensor cores; else their products are exact to fp32.
    out_dtype: of the result: float16, bfloat16 or float32; by default that of a, bfloat16 for float8.
    scale_a, scale_b: of float8 operands only: fp32, a number ([] or [1]), or one a row of a [M], a column of b [N].
    plan: a MatmulPlan, which is followed exactly (inside torch.compile: `tilefold.constant(plan)`).
    numerics: "invariant": an element's bits depend on its row of a and its column of b alone, whatever the other rows and how
        many there are (docs/invariance.md).  "fast"; None: what `tilefold.numerics` or TILEFOLD_NUMERICS says.

    Gradients: of a, b and bias, by the same kernels; not of float8 operands, and no second derivatives.
    Raises ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError, PlanError or Unsupported, naming the argument."""
    check(a, b, bias, scale_a, scale_b, activation, order, tf32, out_dtype, False)
    return _call(a, b, bias, scale_a, scale_b, activation, order, tf32, out_dtype, plan, numerics)


def bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    order: str = "grouped",
    tf32: bool = False,
    out_dtype: torch.dtype | None = None,
    plan: "MatmulPlan | Constant | None" = None,
    numerics: Numerics | None = None,
) -> torch.Tensor:
    """activation(a b + bias) [B, M, N] for a batch of products of float16, bfloat16 or float32; everything else as of `matmul`.

    a [B, M, K] or [M, K], b [B, K, N] or [K, N], one of them with a batch: the other serves all of it and is not copied, and its
        gradient is summed over the batch in fp32 as it is made.  Any batch strides.
    bias: broadcast to [B, M, N], so [N], [M, 1] or [B, 1, 1]; also [B, 1], a number a batch entry, unless B is M or 1, where
        broadcasting gives it another meaning and that one holds: [B, 1, 1] means the same for every M."""
    bias = _of_entries(a, b, bias)
    check(a, b, bias, None, None, activation, order, tf32, out_dtype, True)
    return _call(a, b, bias, None, None, activation, order, tf32, out_dtype, plan, numerics)


def _of_entries(a: Any, b: Any, bias: Any) -> Any:
    """A bias [B, 1] that does not broadcast with the result, but has a number for each batch entry, as [B, 1, 1]."""
    if not all(isinstance(t, torch.Tensor) for t in (a, b, bias)) or bias.dim() != 2 or bias.shape[1] != 1:
        return bias
    batched = [t.shape[0] for t in (a, b) if t.dim() == 3]
    if not batched or min(a.dim(), b.dim()) < 2 or bias.shape[0] in (1, a.shape[-2]) or bias.shape[0] != batched[0]:
        return bias
    return bias.unsqueeze(-1)


def _call(a: torch.Tensor, b: torch.Tensor, bias: Any, scale_a: Any, scale_b: Any, activation: str | None, order: str, tf32: bool,
          out_dtype: torch.dtype | None, plan: Any, numerics: Any) -> torch.Tensor:  # fmt: skip
    tensors, asked = (a, b, bias), check_numerics(numerics)
    if torch.compiler.is_compiling():
        wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    else:
        wanted = is_transformed() or (torch.is_grad_enabled() and wants_gradient((*tensors, scale_a, scale_b)))
    if a.dtype in EIGHT and wanted:
        _refuse_gradients({"a": a, "b": b, "bias": bias, "scale_a": scale_a, "scale_b": scale_b})
    saved, dtype = wanted and activation not in (None, "relu"), result_dtype(a, out_dtype)
    epilogue = Epilogue(activation or "none", order, tf32, dtype, saved, False, plan_name(plan), asked)
    return MATMUL(a, b, bias, scale_a, scale_b, epilogue)[0]  # type: ignore[no-any-return]


# ---------------------------------------------------------------- checks


def check(a: Any, b: Any, bias: Any, scale_a: Any, scale_b: Any, activation: Any, order: Any, tf32: Any, out_dtype: Any,
          batched: bool) -> None:  # fmt: skip
    """Everything that can be wrong with a call but its plan; what was right once is not looked at again."""
    tensors = (a, b, bias, scale_a, scale_b)
    traced = torch.compiler.is_compiling() or is_watched(tensors)
    (_check if traced else _check_once)(*tensors, activation, order, tf32, out_dtype, batched)


def _check(a: Any, b: Any, bias: Any, scale_a: Any, scale_b: Any, activation: Any, order: Any, tf32: Any, out_dtype: Any,
           batched: bool) -> bool:  # fmt: skip
    _check_options(activation, order, out_dtype)
    _check_tensors(a, b, bias, batched)
    check_tf32("a", a, tf32)
    _check_scales(a, b, scale_a, scale_b)
    return True


def _key(a: Any, b: Any, bias: Any, scale_a: Any, scale_b: Any, *options: Any) -> Any:
    others = [None if t is None else facts_of(t) for t in (bias, scale_a, scale_b)]
    return facts_of(a), facts_of(b), *others, options, type(options[2])  # tf32: 1 == True, but is refused


_check_once = recorded("matmul", _key)(_check)


def _check_options(activation: Any, order: Any, out_dtype: Any) -> None:
    check_activation(activation)
    if order not in ORDERS:
        raise ValueRangeError(f"order must be 'grouped' or 'plain', got {order!r}")
    if out_dtype is not None and out_dtype not in FLOATS:
        raise DtypeError(
            f"out_dtype must be None, float16, bfloat16 or float32, got {str(out_dtype).removeprefix('torch.')}"
        )


def _check_tensors(a: Any, b: Any, bias: Any, batched: bool) -> None:
    dtypes = FLOATS if batched else (*FLOATS, *EIGHT)
    forms = ("m k / batch m k", "k n / batch k n") if batched else ("m k", "k n")
    specs = [TensorSpec("a", forms[0], dtypes), TensorSpec("b", forms[1], dtypes, same_dtype_as="a")]
    found = bind(specs, {"a": a, "b": b})
    if batched and a.dim() == 2 and b.dim() == 2:
        raise ShapeError(
            f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}: bmm needs a batch in one of them, [batch, m, k] or "
            "[batch, k, n]; matmul multiplies two matrices"
        )
    for name, t in (("a", a), ("b", b)):
        rows, columns = t.shape[-2:]
        if t.numel() and rows > 1 and columns > 1 and 1 not in t.stride()[-2:]:
            raise LayoutError(
                f"{name} needs rows or columns whose elements lie side by side (stride 1), got strides {tuple(t.stride())} for "
                f"shape {tuple(t.shape)}; call {name}.contiguous() first if a copy is acceptable"
            )
    whole = " / batch|1 m|1 n|1" if batched else ""
    bind(
        [TensorSpec("bias", f"/ n|1 / m|1 n|1{whole}", FLOATS, optional=True)],
        {"bias": bias},
        known=found,
        beside=("a", a),
    )


def _check_scales(a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any) -> None:
    for name, scale, t, dim in (("scale_a", scale_a, a, 0), ("scale_b", scale_b, b, 1)):
        if scale is None:
            continue
        if t.dtype not in EIGHT:
            given = str(t.dtype).removeprefix("torch.")
            raise Unsupported(
                f"{name} is for operands in float8_e4m3fn, {name[-1]} has {given}: multiply the result instead"
            )
        spec = TensorSpec(name, "/ size|1", (torch.float32,))
        bind([spec], {name: scale}, known={"size": t.shape[dim]}, beside=("a", a))


def _refuse_gradients(named: dict[str, Any]) -> None:
    for name, t in named.items():
        if t is not None and t.requires_grad:
            raise Unsupported(f"{name} requires a gradient, but products in float8_e4m3fn have none: detach() it")


@functools.lru_cache(maxsize=1024)
def _named(plan: Any) -> str:
    return constant(plan).key


def plan_name(plan: Any) -> str:
    """What stands for a plan among an operator's arguments: the name of a constant, or ""."""
    if plan is None:
        return ""
    if isinstance(plan, Constant):
        return plan.key
    from ...plan.matrix.matmul import MatmulPlan

    if not isinstance(plan, MatmulPlan):
        raise PlanError(f"plan must be a MatmulPlan or None, got {type(plan).__name__}")
    if torch.compiler.is_compiling():
        raise Unsupported(
            "plan inside torch.compile must be tilefold.constant(plan), made outside the compiled function"
        )
    return _named(plan)


# ---------------------------------------------------------------- the operator


def result_dtype(a: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """out_dtype, or the default: a's, bfloat16 of float8."""
    return out_dtype or (torch.bfloat16 if a.dtype in EIGHT else a.dtype)


def _forward(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None,
    epilogue: Epilogue,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(result, what the activation is applied to, empty unless saved)."""
    out, pre = product(a, b, bias, scale_a, scale_b, epilogue)
    return out, out.new_empty(0) if pre is None else pre


def _fake(
    a: torch.Tensor, b: torch.Tensor, bias: Any, scale_a: Any, scale_b: Any, after: Epilogue
) -> tuple[torch.Tensor, torch.Tensor]:
    given, batched = None if after.activation == "none" else after.activation, a.dim() + b.dim() > 4
    check(a, b, bias, scale_a, scale_b, given, after.order, after.tf32, after.out_dtype, batched)
    batch = [t.shape[0] for t in (a, b) if t.dim() == 3][:1]
    out = a.new_empty((*batch, a.shape[-2], b.shape[-1]), dtype=after.out_dtype)
    return out, out.new_empty(out.shape if after.saved else 0)


def _gradients(args: tuple[Any, ...], results: Any, grads: tuple[Any, ...], wanted: tuple[bool, ...]) -> Any:
    a, b, bias, _, _, after = args
    saved = results[0 if after.activation == "relu" else 1]
    return gradient(grads[0], a, b, bias, saved, after.activation, after.order, after.tf32, wanted)


def _unread(*args: Any) -> tuple[int, ...]:
    return (1,) if args[-1].activation == "relu" else (0,)


MATMUL = Operation("matmul", _forward, _fake, Gradient(("a", "b", "bias"), _gradients, unread=_unread, still=(1,)))


# ---------------------------------------------------------------- without a GPU


def _meta(plan: "MatmulPlan") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """a, b and bias of the plan's problem, without memory."""
    n, dtype = plan.problem, getattr(torch, plan.problem.dtype)

    def made(rows: int, columns: int, turned: bool, shared: bool) -> torch.Tensor:
        batch = () if n.batch == 1 or shared else (n.batch,)
        shape = (*batch, columns, rows) if turned else (*batch, rows, columns)
        t = torch.empty(shape, dtype=dtype, device="meta")
        return t.mT if turned else t

    shapes = {"columns": (n.n,), "rows": (n.m, 1), "full": (n.m, n.n)}
    bias = None if n.bias == "none" else torch.empty(shapes[n.bias], dtype=getattr(torch, n.out_dtype), device="meta")
    return made(n.m, n.k, n.a_major == "m", n.a_shared), made(n.k, n.n, n.b_major == "k", n.b_shared), bias


def example_launch(plan: "MatmulPlan") -> Example:
    """(kernel, args, kwargs) of the plan's first launch on tensors without memory: to compile ahead of time."""
    from .operands import operands
    from .product import bind_portable

    n = plan.problem
    a, b, bias = _meta(plan)
    scale_a, scale_b = (torch.empty(size, device="meta") if n.scaled else None for size in (n.m, n.n))
    x = operands(a, b, bias, n.fold)
    shared = plan.splits > 1
    out = torch.empty(
        (n.results, n.m, n.n), dtype=torch.float32 if shared else getattr(torch, n.out_dtype), device="meta"
    )
    pre = out if n.saved and not shared else None
    scales, given = (scale_a, scale_b), (a, b, out, pre, None if shared else bias, scale_a, scale_b)
    if plan.kernel == "matmul_hopper":
        from .product_hopper import bind

        return bind(x, plan, a.device, scales).example(given)
    return bind_portable(x, plan, scales, a.device).example(given)


def example_finish(plan: "MatmulPlan") -> Example:
    """The same of the launch that adds the shares of the sum up."""
    from .operands import operands
    from .product import bind_finish

    n = plan.problem
    a, b, bias = _meta(plan)
    out = torch.empty((n.results, n.m, n.n), dtype=getattr(torch, n.out_dtype), device="meta")
    part = torch.empty((plan.splits, *out.shape), device="meta")
    bound = bind_finish(operands(a, b, bias, n.fold), plan, a.device)
    return bound.example((part, out, out if n.saved else None, bias))


def example_gradient(activation: str, dtype: str = "bfloat16") -> Example:
    """The same of the activation's part of the gradient."""
    from .product import bind_gradient

    t = torch.empty((4096, 4096), dtype=getattr(torch, dtype), device="meta")
    bound = bind_gradient(t, activation)
    assert bound is not None
    return bound.example((t, t, t))
