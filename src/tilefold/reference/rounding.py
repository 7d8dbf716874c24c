"""What rounding may do to a result, from the problem alone: fp64 magnitudes, numbers of terms, the dtypes' roundoff.

The computation runs in fp64 with errors in every operation, drawn as Higham and Mary model them (SIAM J. Sci. Comput. 41, 2019,
A2815, and 42, 2020, A3427): independent, of mean 0.  docs/explanation/limits.md derives their sizes.

* A result of roundoff u is off by u times the power of two below it at most, evenly.
* A sum of n terms in fp32, as of a product, is off by u32 (0.541 n (s^2 / 3 + q / 6) / 3)^(1/2), one standard deviation: s is the
  sum, q that of the terms' squares, 0.541 the mean of 1 / m^2 over significands 1 <= m < 2 of evenly spread logarithm.  A
  reduction that is no product is one of tiles of 16 terms or more: n is at most 16 + n / 16.
* A matrix unit that multiplies narrower numbers cuts its sums off instead of rounding them, after every 8 terms or more: an
  error of one sign, `_of_cutting`.  Where that is larger than fp32's roundings, of eight bits, part of it makes all results of
  a product smaller at once: a sum over them, as a softmax's, does not average it out.
* Kernels keep scores, probabilities and sums in fp32.  Of what they compute they round only operands of products to a narrower
  dtype, by at most u of their size: the reference does not know the factor that a kernel keeps them with.  Tensors that the dtype
  holds exactly, as inputs, are not off.
* tanh is off by 4 u32 of 1, as 1 - 2 / (1 + e^2x) is; for bf16 by 2^-11 of its size, as the instruction of NVIDIA's GPUs is.

An error reaches the result multiplied by a derivative that nobody writes down.  The mean square of what the results of a few
runs are off by is their variance.  Of large results it is at least what each rounding to the dtype alone gives: two that are one
error each for a whole row have opposite signs in all of eight draws once in 128 rows.  Nothing is computed in the dtype itself,
so it is the same on every processor.
"""

import contextlib
import contextvars
import functools
import inspect
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..errors import DtypeError

F = TypeVar("F", bound=Callable[..., Any])
DRAWS = (8, 12)
ELEMENTS = 1 << 14
"""As many runs as make so many elements, within DRAWS: `compare` pools variances, so large results need few."""
NUMBERS = 1048573
"""A prime: no period of a tensor's."""
LARGEST = 1 << 22
"""Elements of a tensor whose errors' sizes are kept from one run to the next."""
U32 = 2.0**-24
SIGNIFICAND = 0.541
MEAN = 2 * math.log(2)
"""One over the mean of 1 / m."""
TILE = 16
"""Terms that a reduction adds up, at least, before it adds to what earlier tiles gave; no tile is smaller."""

STEP = 8
"""Terms that a matrix unit adds at once, at least."""
SPARE = 4
"""By how much finer than the sum's last place it cuts off each of them: two bits on Hopper GPUs (Khattak and Mikaitis,
arXiv:2512.07004)."""
SMALLEST = 2.0**-14
"""The smallest normal number of eight bits, in units of a row's largest one: kernels put that at 2^8."""
CODED = {torch.float8_e4m3fn: (2.0**-13, 32, 1, 128), torch.float8_e5m2: (2.0**-13, 32, 1, 128)}
"""Of operands of eight bits on Hopper GPUs, whose sums have 13 bits behind the point: their roundoff, STEP, SPARE, and terms
after which kernels add to fp32 (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)."""
TOWARDS_ZERO = 0.5
"""How often more than not a partial sum has the whole sum's sign: after t of n random terms 2 / pi asin((t / n)^(1/2)), here its
mean."""

PRODUCTS: dict[str, tuple[int, ...]] = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "addmm": (1, 2),
    "addmv": (1, 2),
    "baddbmm": (1, 2),
}
PRODUCTS |= {"convolution": (0, 1), "convolution_backward": (0, 1, 2)}
"""Which arguments are the operands."""
EXACT = frozenset(
    """
    _local_scalar_dense _to_copy _unsafe_view abs amax amin arange argsort bernoulli cat ceil clamp clamp_ clamp_max
    clamp_max_ clamp_min clamp_min_ clone constant_pad_nd copy copy_ cummax embedding empty empty_like empty_strided eye fill
    fill_ flip floor full full_like gather index index_copy index_copy_ index_put_ index_select kthvalue lift_fresh linspace
    masked_fill masked_fill_ masked_select max maximum min minimum nan_to_num neg neg_ new_empty new_empty_strided new_full
    new_ones new_zeros normal_ ones ones_like rand rand_like randn randn_like relu relu_ repeat resize_ roll round
    scalar_tensor scatter select_backward select_scatter sgn sign slice_backward slice_scatter sort stack threshold_backward
    topk tril tril_ triu trunc uniform_ value_selecting_reduction_backward where zero zero_ zeros zeros_like
    """.split()  # noqa: SIM905
)
"""What moves, chooses or makes numbers, and rounds none; views do not either."""


class Rounding(TorchDispatchMode):
    """While it is entered, what torch computes in fp64 gets the errors that a kernel for `dtype` may make.

    dtype: of inputs and results, fp32 or narrower.  seed: of the errors.  kept: what every operation's result is rounded to.
    `again` makes it ready to be entered for the same computation with other errors: their sizes are known by then.  only: the
    number of the only one of the `roundings` to the dtype that is off."""

    entered: ClassVar["list[Rounding]"] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks: else the first operation would import torch._dynamo, seconds of it, and each pass through it."""
        return False

    def __init__(self, dtype: torch.dtype, seed: int = 0, kept: torch.dtype = torch.float32) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.kept = dtype, kept
        self.sizes: list[torch.Tensor | None] = []
        self.roundings = 0
        self.again(seed)

    def again(self, seed: int, only: int | None = None) -> "Rounding":
        self.random, self.at, self.roundings = random.Random(seed), 0, 0
        self.held: dict[int, torch.Tensor] = {}
        self.only = only
        return self

    def __enter__(self) -> "Rounding":
        self.entered.append(self)
        return cast(Rounding, super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self.entered.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in EXACT or func.is_view:
            return func(*args, **kwargs)
        if name in PARTS:
            with self:
                return PARTS[name](*args, **kwargs)
        if name in PRODUCTS and self.dtype not in (torch.float32, self.kept):
            args = [self._operand(a) if i in PRODUCTS[name] and _counts(a) else a for i, a in enumerate(args)]
        out = func(*args, **kwargs)
        sums: list[Any] = []
        for i, x in enumerate(tree_leaves(out)):
            if _counts(x):

                def cut(i: int = i, x: torch.Tensor = x) -> torch.Tensor:
                    sums[:] = sums or _sums(func, name, args, kwargs)
                    squares, terms = sums[i]
                    return torch.copysign(_of_cutting(x, squares, terms, self.dtype)[1], x)

                def size(i: int = i, x: torch.Tensor = x) -> torch.Tensor:
                    sums[:] = sums or _sums(func, name, args, kwargs)
                    own = self._of_tanh(x) if name == "tanh" else self._half(x, self.kept)
                    if not sums:
                        return own
                    squares, terms = sums[i]
                    of_sum = _of_sum(x, squares, terms)
                    if name in PRODUCTS and self.dtype != torch.float32:
                        of_sum = torch.hypot(of_sum, _of_cutting(x, squares, terms, self.dtype)[0])
                    return of_sum if self.kept == torch.float32 else torch.hypot(of_sum, own)

                if name in PRODUCTS and self.dtype in CODED:
                    self._off(x, cut, together=True)
                self._off(x, size)
        return out

    def _off(self, x: torch.Tensor, make: Callable[[], torch.Tensor], together: bool = False) -> torch.Tensor:
        """x, in place, off by at most its size: what `make` gives, or gave in the first run.  together: one draw for all of x."""
        at, self.at = self.at, self.at + 1
        size = self.sizes[at] if at < len(self.sizes) else None
        if size is None or size.shape != x.shape:
            size = torch.nan_to_num_(make(), 0.0, 0.0, 0.0)
            if at == len(self.sizes):
                self.sizes.append(size if size.numel() <= LARGEST else None)
        if together:
            return x.add_(size, alpha=self.random.choice((-1, 1)) / math.sqrt(3))
        table, n = _table(x.device), x.numel()
        start = self.random.randrange(NUMBERS - n % NUMBERS)
        table = table if start + n <= NUMBERS else table.repeat(1 + -(-n // NUMBERS))
        return x.addcmul_(size, table[start : start + n].view(x.shape))

    def narrowed(self, x: torch.Tensor) -> torch.Tensor:
        """x rounded to the dtype; itself where the dtype holds it, or an earlier call made it."""
        if x.untyped_storage().data_ptr() in self.held:
            return x
        return self._narrowed(x, lambda: torch.where(x.to(self.dtype) == x, 0.0, self._half(x, self.dtype)))

    def row_off(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """By how much sum(x factors) of a row is off where x is rounded to the dtype: one error, of known deviation."""

        def size() -> torch.Tensor:
            half = torch.where(x.to(self.dtype) == x, 0.0, self._half(x, self.dtype))
            return (half * factors).square_().sum(-1).sqrt_()

        return self._rounded(torch.zeros_like(x[..., 0]), size)

    def _rounded(self, x: torch.Tensor, size: Callable[[], torch.Tensor]) -> torch.Tensor:
        """x, in place, off by a rounding to the dtype, unless another is the only one."""
        number, self.roundings = self.roundings, self.roundings + 1
        if self.only in (None, number):
            return self._off(x, size)
        self.at += 1
        return x

    def _operand(self, x: torch.Tensor) -> torch.Tensor:
        """x rounded to the dtype after a factor that is not known; itself where the dtype holds it, or `narrowed` made it."""
        if x.untyped_storage().data_ptr() in self.held or torch.equal(x.to(self.dtype).double(), x):
            return x
        limits = torch.finfo(self.dtype)

        def size() -> torch.Tensor:
            least = x.abs().amax(-1, True) * SMALLEST if self.dtype in CODED else limits.smallest_normal
            return torch.where(x == 0, 0.0, torch.maximum(x.abs(), torch.as_tensor(least)) * (limits.eps / 2))

        return self._narrowed(x, size)

    def _narrowed(self, x: torch.Tensor, size: Callable[[], torch.Tensor]) -> torch.Tensor:
        made = self._rounded(x.clone(), size)
        self.held[made.untyped_storage().data_ptr()] = made
        return made

    def _of_tanh(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs() * 2.0**-11 if self.dtype == torch.bfloat16 else torch.full_like(x, 4 * U32)

    @staticmethod
    def _half(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Half a unit in x's last place; 0 of 0 and of infinity."""
        limits = torch.finfo(dtype)
        size = binade(x)
        if limits.smallest_normal > 1e-30:
            size = torch.where(x == 0, 0.0, size.clamp_min_(limits.smallest_normal))
        return size.mul_(limits.eps / 2)


@functools.lru_cache
def _table(device: torch.device) -> torch.Tensor:
    """1 or -1, over the root of 3: the deviation of numbers spread evenly from -1 to 1.  Where one error decides a result every
    draw gives its deviation, which few evenly spread ones would miss."""
    numbers = torch.randint(0, 2, (NUMBERS,), generator=torch.Generator().manual_seed(2019)).double()
    return numbers.mul_(2).sub_(1).div_(math.sqrt(3)).to(device)


def binade(x: torch.Tensor) -> torch.Tensor:
    """The power of two at or below |x|, of fp64; 0 of 0, infinity of infinity and NaN."""
    bits: torch.Tensor = x.view(torch.int64) & 0x7FF << 52
    return bits.view(torch.float64)


def _counts(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.float64 and x.numel() > 0


def _of_sum(x: torch.Tensor, squares: Any, terms: float) -> torch.Tensor:
    size: torch.Tensor = (x * x / 3 + squares / 6).mul_(terms * SIGNIFICAND)
    return size.sqrt_().mul_(U32)


def _of_cutting(x: torch.Tensor, squares: Any, terms: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What a matrix unit takes away from sums of `terms` products (Fasi, Higham, Mikaitis and Pranesh, PeerJ CS 7, 2021, e330):
    from each partial sum after STEP terms, and from each term, on average half of what the last place that is kept counts.

    Its deviation apart from what all sums have in common, and that: the mean of what partial sums of x's sign lose."""
    u, step, spare, most = CODED.get(dtype, (U32, STEP, SPARE, terms))
    added = min(terms, most)
    partial = (x * x / 4 + squares / 12).sqrt_().mul_(math.sqrt(3) / MEAN * u)
    one_sign = x.abs() * (added / math.sqrt(max(1, terms))) / squares.sqrt().clamp_min(1e-290)
    size: torch.Tensor = (one_sign / spare + added / step).mul_(partial)
    if dtype not in CODED:
        return size, torch.zeros((), dtype=x.dtype)
    common = partial.mul_(TOWARDS_ZERO * added / step)
    return (size.square_() - common * common).sqrt_(), common


def _sums(func: Any, name: str, args: Any, kwargs: Any) -> list[tuple[Any, float]]:
    """For each result of a sum the sum of its terms' squares, and their number; empty for other operations."""
    if name in PRODUCTS:
        squared = [a * a if _counts(a) and i <= PRODUCTS[name][-1] else a for i, a in enumerate(args)]
        squares = func(*squared, **kwargs)
        if name == "convolution":
            return [(squares, max(1, args[1][0].numel()))]
        if name == "convolution_backward":
            grad, _, w = args[:3]
            pixels = grad.numel() // max(1, grad.shape[1])
            return list(zip(squares, (w.numel() // max(1, w.shape[1]), pixels, pixels), strict=True))
        right = args[PRODUCTS[name][1]]
        return [(squares, right.shape[-2 if right.dim() > 1 else -1])]
    if name not in ("sum", "cumsum") or not _counts(args[0]):
        return []
    x = args[0]
    squares = func(x * x, *args[1:], **kwargs)
    if name == "cumsum":
        return [(squares, x.shape[args[1]] if x.dim() else 1)]
    n = x.numel() // max(1, squares.numel())
    return [(squares, min(n, TILE + n / TILE))]


def _exps(x: torch.Tensor, dims: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """exp(x - the largest), its sum, and the largest."""
    most = torch.nan_to_num(x.amax(dims, True), 0.0, 0.0, 0.0)
    made = (x - most).exp()
    return made, made.sum(dims, True), most


def _logsumexp(x: torch.Tensor, dims: Any, keepdim: bool = False) -> torch.Tensor:
    _, total, most = _exps(x, dims)
    found = (total.log2() + most * math.log2(math.e)) * math.log(2)  # in base 2, as kernels
    return found if keepdim else found.squeeze(dims)


def _softmax(x: torch.Tensor, dim: int, half: bool) -> torch.Tensor:
    made, total, _ = _exps(x, dim)
    return made / total


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    return x * _normal(x, approximate)[0]


def _gelu_backward(grad: torch.Tensor, x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    share, slope = _normal(x, approximate)
    return grad * (share + x * slope)


def _normal(x: torch.Tensor, approximate: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The share of normal numbers below x, and its derivative: where one is nearly the other's negative the error stays."""
    if approximate == "none":
        return (1 + torch.erf(x * 0.5**0.5)) * 0.5, torch.exp(x * x * -0.5) * (2 * math.pi) ** -0.5
    half = math.sqrt(2 / math.pi)
    t = torch.tanh((x + x * x * x * 0.044715) * half)
    return (1 + t) * 0.5, (1 - t * t) * (1 + x * x * (3 * 0.044715)) * (half / 2)


PARTS: dict[str, Callable[..., Any]] = {
    "logsumexp": _logsumexp,
    "gelu": _gelu,
    "gelu_backward": _gelu_backward,
    "mean": lambda x, *given, **named: (total := x.sum(*given, **named)) * (total.numel() / max(1, x.numel())),
    "_softmax": _softmax,
    "_log_softmax": lambda x, dim, half: x - _logsumexp(x, dim, True),
    "_softmax_backward_data": lambda g, y, dim, kind: y * (g - (g * y).sum(dim, True)),
    "_log_softmax_backward_data": lambda g, y, dim, kind: g - y.exp() * g.sum(dim, True),
}
"""Operations that are several."""


def stored(x: torch.Tensor) -> torch.Tensor:
    """x as one kernel hands it to another, rounded to the dtype, and its gradient as it comes back."""
    return cast(torch.Tensor, _Stored.apply(x)) if Rounding.entered else x  # type: ignore[no-untyped-call]


def attended(p: torch.Tensor, v: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """out = p v [..., D], as backward passes read it: sum(out dout) is part of the gradient of lse [...], of the out that the
    dtype holds and that rounded p made."""
    out = p @ v
    if not Rounding.entered or not out.requires_grad:
        return out
    with _disable_current_modes(), torch.no_grad():
        clean = p @ v
    return cast(torch.Tensor, _Attended.apply(out, lse, clean))  # type: ignore[no-untyped-call]


def activated(function: Callable[[torch.Tensor], torch.Tensor], z: torch.Tensor) -> torch.Tensor:
    """function(z), of which backward passes read z, and hand on its gradient, as the dtype holds them."""
    return cast(torch.Tensor, _Activated.apply(function, z)) if Rounding.entered else function(z)  # type: ignore[no-untyped-call]


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return Rounding.entered[-1].narrowed(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Rounding.entered[-1].narrowed(grad)


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, lse: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            ctx.save_for_backward(out, clean - out)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        out, off = ctx.saved_tensors
        mode = Rounding.entered[-1]
        with _disable_current_modes():
            return grad, mode.row_off(out, grad) + (off * grad).sum(-1), None


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, z: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(z)
        return cast(torch.Tensor, function(z))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        mode = Rounding.entered[-1]
        with torch.enable_grad():
            z = mode.narrowed(ctx.saved_tensors[0]).detach().requires_grad_()
            (made,) = torch.autograd.grad(ctx.function(z), z, grad)
        return None, mode.narrowed(made)


def deviating(call: Callable[[], Any], dtype: torch.dtype, kept: torch.dtype = torch.float32) -> Any:
    """What `call` returns, each element of fp64 tensors too large by the standard deviation that computing for `dtype` has.

    call: computes in fp64, the same each time, gradients by `torch.autograd.grad` included; returns tensors in any structure.
    kept: what is rounded to between operations; fp32 as kernels do, `dtype` where each operation is a kernel.  The rounding of
    the result to `dtype` is not included."""
    flat, whole = opened(call())
    exact = [x.detach() if isinstance(x, torch.Tensor) else x for x in flat]
    off = [torch.zeros_like(x) if _counts(x) else None for x in exact]
    draws = ELEMENTS // max(1, sum(x.numel() for x in off if x is not None))
    draws = min(max(draws, DRAWS[0]), DRAWS[1])
    mode = Rounding(dtype, kept=kept)

    def squares(seed: int, only: int | None = None) -> list[torch.Tensor | None]:
        with mode.again(seed, only):
            found, _ = opened(call())
        return [
            None if o is None else (y.detach() - x).square_().nan_to_num_(0.0, 0.0, 0.0)
            for o, x, y in zip(off, exact, found, strict=True)
        ]

    for draw in range(draws):
        for total, square in zip(off, squares(draw), strict=True):
            if total is not None and square is not None:
                total += square / draws
    if mode.roundings > 1 and draws == DRAWS[0]:
        for number in range(mode.roundings):
            for total, square in zip(off, squares(number, number), strict=True):
                if total is not None and square is not None:
                    torch.maximum(total, square, out=total)
    made = [x if o is None else x + o.sqrt_() for x, o in zip(exact, off, strict=True)]
    return whole(made)


def opened(structure: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves of a structure, the fields of dataclasses among them, and what puts others in their places."""
    leaves, form = tree_flatten(structure)
    records = [is_dataclass(x) and not isinstance(x, type) for x in leaves]
    names = [[f.name for f in fields(x)] if record else [] for x, record in zip(leaves, records, strict=True)]
    flat = [
        value
        for x, record, mine in zip(leaves, records, names, strict=True)
        for value in ([getattr(x, name) for name in mine] if record else [x])
    ]

    def whole(found: list[Any]) -> Any:
        left = iter(found)
        made = [
            replace(x, **{name: next(left) for name in mine}) if record else next(left)
            for x, record, mine in zip(leaves, records, names, strict=True)
        ]
        return tree_unflatten(made, form)

    return flat, whole


PLAIN = contextvars.ContextVar("PLAIN", default=False)


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """While it is entered, a reference computes in the `dtype` that it is given, as plain PyTorch does."""
    before = PLAIN.set(True)
    try:
        yield
    finally:
        PLAIN.reset(before)


def in_dtype(function: F) -> F:
    """A reference whose argument `dtype` says what it is computed for: fp64, or a narrower dtype, for which its results and its
    gradients are those of `deviating`, in fp64."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def computed(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        dtype = bound.arguments["dtype"]
        if dtype == torch.float64 or PLAIN.get():
            return function(*args, **options)
        bound.arguments["dtype"] = torch.float64
        flat, form = tree_flatten((bound.args, bound.kwargs))
        leaves = [x for x in flat if isinstance(x, torch.Tensor) and x.requires_grad] if torch.is_grad_enabled() else []
        if any(x.dtype != torch.float64 for x in leaves):
            raise DtypeError(
                "a reference's gradients for a narrower dtype need inputs in torch.float64: others would round them"
            )
        chosen = {id(x): i for i, x in enumerate(leaves)}
        spec: list[Any] = []

        def call(inputs: Any) -> list[Any]:
            given, named = tree_unflatten([inputs[chosen[id(x)]] if id(x) in chosen else x for x in flat], form)
            found, whole = opened(function(*given, **named))
            spec[:] = [whole]
            return found

        results = _Deviating.apply(call, dtype, *leaves)  # type: ignore[no-untyped-call]
        return spec[0](list(results))

    return cast(F, computed)


class _Deviating(torch.autograd.Function):
    """Results and gradients by one standard deviation too large."""

    @staticmethod
    def forward(ctx: Any, call: Any, dtype: torch.dtype, *leaves: torch.Tensor) -> Any:
        ctx.call, ctx.dtype = call, dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*leaves)
        return tuple(deviating(lambda: call(leaves), dtype))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        def pulled() -> Any:
            with torch.enable_grad():
                mine = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                found = ctx.call(mine)
                pairs = [
                    (x, c)
                    for x, c in zip(found, cotangents, strict=True)
                    if isinstance(x, torch.Tensor) and x.requires_grad and c is not None
                ]
                made = torch.autograd.grad([x for x, _ in pairs], mine, [c for _, c in pairs], allow_unused=True)
            return list(made)

        return None, None, *deviating(pulled, ctx.dtype)
