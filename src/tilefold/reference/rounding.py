"""What rounding may do to a result, from the problem alone: fp64 magnitudes, numbers of terms, the dtypes' roundoff.

The model is that of Higham, Accuracy and Stability of Numerical Algorithms (2002), section 2.2, made probabilistic as by Higham
and Mary (SIAM J. Sci. Comput. 41, 2019, A2815, and 42, 2020, A3427).  The result of an operation in a dtype of roundoff u is
x (1 + d), |d| <= u, and off by half of the smallest subnormal number at least; the d are independent, with mean 0.  A sum
s = t_1 + ... + t_n, as of the products of a dot product, is taken in fp32 in an order that does not know the terms, and rounded
once.  The mean square of its partial sums is then s^2 / 3 + q / 6 for large n, where q = t_1^2 + ... + t_n^2; with a mean square
of u^2 / 3 for each d, the sum's error has a standard deviation of

    u32 (n (s^2 / 3 + q / 6) / 3)^(1/2)   <=   u32 (n / 6)^(1/2) (|t_1| + ... + |t_n|):

it grows by n^(1/2) u32 beside the sum of sizes where the terms have a mean, and not with n where they have none.

An error reaches the result multiplied by the derivative of the result by what it sits in, and the variances of all errors add up.
Nobody writes these derivatives down: the computation runs in fp64, a few times, with errors as above drawn from a generator of
fixed seed, and the mean square of what the results are off by is the variance.  Nothing is computed in the dtype itself, so the
deviation is the same on every processor and with every library.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["Rounding", "deviating", "in_dtype"]

F = TypeVar("F", bound=Callable[..., Any])
DRAWS = (3, 8)
"""At least and at most: results of thousands of elements need few, as the largest and the sum of squares are what counts."""
ELEMENTS = 1 << 15
SEED = 2019

PRODUCTS = {
    "mm": 2,
    "bmm": 2,
    "mv": 2,
    "dot": 2,
    "addmm": 3,
    "addmv": 3,
    "baddbmm": 3,
    "convolution": 3,
    "convolution_backward": 3,
}
"""How many of the first arguments are tensors that the terms are products of."""
SUMS = frozenset({"sum", "mean", "cumsum", "logsumexp", "_softmax", "_log_softmax", "_softmax_backward_data"})
EXACT = frozenset(
    """
    _local_scalar_dense _unsafe_view abs amax amin arange argsort bernoulli cat ceil clamp clamp_ clamp_max clamp_max_
    clamp_min clamp_min_ clone constant_pad_nd copy copy_ cummax embedding empty empty_like empty_strided eye fill fill_
    flip floor full full_like gather index index_copy index_copy_ index_put_ index_select kthvalue lift_fresh linspace
    masked_fill masked_fill_ masked_select max maximum min minimum nan_to_num neg neg_ new_empty new_empty_strided new_full
    new_ones new_zeros normal_ ones ones_like rand rand_like randn randn_like relu relu_ repeat resize_ roll round
    scalar_tensor scatter select_backward select_scatter sgn sign slice_backward slice_scatter sort stack threshold_backward
    topk tril tril_ triu trunc uniform_ value_selecting_reduction_backward where zero zero_ zeros zeros_like
    """.split()  # noqa: SIM905
)
"""What moves, chooses or makes numbers, and rounds none; views do not either."""


class Rounding(TorchDispatchMode):
    """While it is entered, what torch computes in fp64 gets the errors that computing it in `dtype` may have.

    dtype: fp32 or narrower; what is converted to fp64 from a wider one is rounded, too.  seed: of the errors."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.seed = dtype, seed
        limits = torch.finfo(dtype)
        self.unit, self.least = limits.eps / 2, limits.smallest_normal * limits.eps / 2
        self.sums = min(torch.finfo(torch.float32).eps / 2, self.unit)
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in EXACT or func.is_view:
            return func(*args, **kwargs)
        if name == "_to_copy":
            out = func(*args, **kwargs)
            wide = args[0].is_floating_point() and torch.finfo(args[0].dtype).eps < torch.finfo(self.dtype).eps
            return self._rounded(out) if wide and args[0].dtype != torch.float64 and _counts(out) else out
        spread = self._spread(func, name, args, kwargs)  # before an operation in place
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            return self._result(out, spread[0] if spread else None)
        if isinstance(out, tuple | list):
            sizes = spread or [None] * len(out)
            return type(out)(self._result(x, s) for x, s in zip(out, sizes, strict=True))
        return out

    def _result(self, out: Any, spread: Any) -> Any:
        """out, of whose terms the squares and the number are known or not, as it comes out of the operation."""
        if not _counts(out):
            return out
        if spread is not None:
            squares, terms = spread
            size = (terms * (out * out / 3 + squares / 6)).sqrt_().mul_(self.sums)
            out.add_(torch.nan_to_num_(size.mul_(self._drawn(out)), 0.0, 0.0, 0.0))
        return self._rounded(out)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        """x, rounded in place; infinities and zeros stay what they are."""
        if self.least < 1e-30:
            return x.mul_(self._drawn(x, 1 - self.unit, 1 + self.unit))
        size = torch.where((x == 0) | ~x.isfinite(), 0.0, x.abs().mul_(self.unit).clamp_min_(self.least))
        return x.add_(size.mul_(self._drawn(x)))

    def _drawn(self, like: torch.Tensor, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
        """Numbers between low and high."""
        made = self.generators.get(like.device)
        if made is None:
            made = self.generators[like.device] = torch.Generator(like.device).manual_seed(self.seed)
        return torch.empty(like.shape, dtype=like.dtype, device=like.device).uniform_(low, high, generator=made)

    def _spread(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """For each result of a sum the sum of its terms' squares, and their number; None for other operations."""
        if name in PRODUCTS:
            count = {
                "addmm": 3,
                "baddbmm": 3,
                "addmv": 3,
                "addbmm": 3,
                "convolution": 3,
                "convolution_backward": 3,
            }.get(name, 2)
            squared = [a * a if isinstance(a, torch.Tensor) and i < count else a for i, a in enumerate(args)]
            squares = func(*squared, **kwargs)
            if name == "convolution":
                return [(squares, args[1][0].numel() if args[1].shape[0] else 1)]
            if name == "convolution_backward":
                grad, _, w = args[:3]
                pixels = grad.numel() // max(1, grad.shape[1])
                return list(zip(squares, (w.numel() // max(1, w.shape[1]), pixels, pixels), strict=True))
            return [(squares, args[count - 1].shape[-2 if args[count - 1].dim() > 1 else -1])]
        if name not in SUMS or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
            return None
        x = args[0]
        if name == "sum":
            squares = func(x * x, *args[1:], **kwargs)
            return [(squares, x.numel() // max(1, squares.numel()))]
        if name == "mean":
            squares = func(x * x, *args[1:], **kwargs)
            n = x.numel() // max(1, squares.numel())
            return [(squares / max(1, n), n)]
        dims = args[1] if len(args) > 1 and name in ("cumsum", "logsumexp", "_softmax", "_log_softmax") else args[2]
        n = 1
        for d in dims if isinstance(dims, list | tuple) else [dims]:
            n *= x.shape[d] if x.dim() else 1
        if name == "cumsum":
            return [(func(x * x, *args[1:], **kwargs), n)]
        if name == "_softmax":  # as far off as the sum that it is divided by, relatively
            return [(torch.zeros((), dtype=x.dtype, device=x.device), n)]
        if name == "_softmax_backward_data":
            y = args[1]
            return [((x * y).square().sum(args[2], keepdim=True) * y * y, n)]
        return [
            (torch.ones((), dtype=x.dtype, device=x.device), 2 * n)
        ]  # a sum's relative error is its logarithm's own


def _counts(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.float64 and x.numel() > 0


def deviating(call: Callable[[], Any], dtype: torch.dtype) -> Any:
    """What `call` returns, each element of fp64 tensors too large by the standard deviation that computing in `dtype` has.

    call: computes in fp64, the same each time, gradients by `torch.autograd.grad` included; returns tensors in any structure."""
    flat, form = tree_flatten(call())
    exact = [x.detach() if isinstance(x, torch.Tensor) else x for x in flat]
    off = [torch.zeros_like(x) if _counts(x) else None for x in exact]
    draws = ELEMENTS // max(1, sum(x.numel() for x in off if x is not None))
    draws = min(max(draws, DRAWS[0]), DRAWS[1])
    for draw in range(draws):
        with Rounding(dtype, SEED + draw):
            found, _ = tree_flatten(call())
        for total, x, y in zip(off, exact, found, strict=True):
            if total is not None:
                total += torch.where(x.isfinite() & y.isfinite(), (y.detach() - x).square(), 0.0)
    made = [
        x if o is None else torch.where(x.isfinite(), x + (o / draws).sqrt(), x)
        for x, o in zip(exact, off, strict=True)
    ]
    return tree_unflatten(made, form)


def in_dtype(function: F) -> F:
    """A reference whose argument `dtype` says what it is computed in: fp64, or a narrower dtype, in which its results and its
    gradients are those of `deviating`, rounded to it."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def computed(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        dtype = bound.arguments["dtype"]
        if dtype == torch.float64:
            return function(*args, **options)
        bound.arguments["dtype"] = torch.float64
        flat, form = tree_flatten((bound.args, bound.kwargs))
        leaves = [x for x in flat if isinstance(x, torch.Tensor) and x.requires_grad] if torch.is_grad_enabled() else []
        chosen = {id(x): i for i, x in enumerate(leaves)}
        spec: list[Any] = []

        def call(inputs: Any) -> Any:
            given, named = tree_unflatten([inputs[chosen[id(x)]] if id(x) in chosen else x for x in flat], form)
            return function(*given, **named)

        results = _Deviating.apply(call, dtype, spec, *leaves)  # type: ignore[no-untyped-call]
        return tree_unflatten(list(results), spec[0])

    return cast(F, computed)


class _Deviating(torch.autograd.Function):
    """Results and gradients by one standard deviation too large, in `dtype`."""

    @staticmethod
    def forward(ctx: Any, call: Any, dtype: torch.dtype, spec: list[Any], *leaves: torch.Tensor) -> Any:
        ctx.call, ctx.dtype = call, dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*leaves)
        found, form = tree_flatten(deviating(lambda: call(leaves), dtype))
        spec.append(form)
        return tuple(x.to(dtype) if _narrow(x) else x for x in found)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        leaves = ctx.saved_tensors

        def pulled() -> Any:
            with torch.enable_grad():
                mine = [x.detach().double().requires_grad_() for x in leaves]
                found, _ = tree_flatten(ctx.call(mine))
                pairs = [
                    (x, c.to(x.dtype))
                    for x, c in zip(found, cotangents, strict=True)
                    if isinstance(x, torch.Tensor) and x.requires_grad and c is not None
                ]
                made = torch.autograd.grad([x for x, _ in pairs], mine, [c for _, c in pairs], allow_unused=True)
            return list(made)

        found = deviating(pulled, ctx.dtype)
        return (None, None, None, *(None if g is None else g.to(x.dtype) for g, x in zip(found, leaves, strict=True)))


def _narrow(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.float64
