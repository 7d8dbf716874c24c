"""A call of attention as given: its record and its checks.  Its key: `ops/source.py`."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..check import FLOATS, TensorSpec, bind, check_number
from ..errors import DeviceError, DtypeError, ShapeError, TilefoldError, Unsupported, ValueRangeError
from ..types import Constant, Layout, ModArgs, ModFunction, Rules, Window
from .numerics import check_numerics
from .reads import check_unpacking
from .source import UNSCALED, Lists, Packed, Paged, Scales, Source

if TYPE_CHECKING:  # imported where it is needed: `import tilefold` stays light
    from ..plan import AttentionFp8Plan, AttentionPlan, DecodePlan, InvariantPlan
    from ..plan.backward.attention_backward import AttentionBackwardPlan
    from ..plan.sparse.sparse import SparsePlan
    from ..plan.sparse.sparse_backward import SparseBackwardPlan

MAX_HEAD_DIM, NARROW_HEAD_DIM = 512, 256  # as plan.problem has them
UNBOUNDED = (1 << 30) - 1  # a window side that never cuts; its sum with two positions fits int32

_OPTIONS = (
    TensorSpec("alibi_slopes", "heads / batch heads", (torch.float32,), optional=True),
    TensorSpec("bias", "batch|1 heads|1 seq_q|1 seq_k", FLOATS, optional=True),
    TensorSpec(
        "mask", "batch|1 heads|1 seq_q|1 seq_k", (torch.bool,), optional=True, besides="a value of tilefold.masks"
    ),
    TensorSpec("sinks", "heads", FLOATS, optional=True),
    TensorSpec("dropout_seed", "seeds", (torch.int64,), optional=True),
)


def _qkv(*dims: str, names: tuple[str, str] = ("k", "v")) -> tuple[TensorSpec, ...]:
    last = {"same_dtype_as": "q", "contiguous_last": True}
    return (
        TensorSpec("q", dims[0], FLOATS, contiguous_last=True),
        *(TensorSpec(name, dim, FLOATS, **last) for name, dim in zip(names, dims[1:], strict=True)),  # type: ignore[arg-type]
    )


def _paged(q: str, page: str) -> tuple[TensorSpec, ...]:
    return (
        *_qkv(q, f"pages {page} dim_qk", f"pages {page} dim_v", names=("k_pages", "v_pages")),
        TensorSpec("block_table", "batch max_pages", (torch.int32,), contiguous_last=True),
        TensorSpec("cache_seqlens", "batch", (torch.int32,), contiguous_last=True),
    )


SPECS = {
    "bshd": _qkv("batch seq_q heads dim_qk", "batch seq_k kv_heads dim_qk", "batch seq_k kv_heads dim_v") + _OPTIONS,
    "bhsd": _qkv("batch heads seq_q dim_qk", "batch kv_heads seq_k dim_qk", "batch kv_heads seq_k dim_v") + _OPTIONS,
    "varlen": (
        *_qkv("total_q heads dim_qk", "total_k kv_heads dim_qk", "total_k kv_heads dim_v"),
        TensorSpec("cu_seqlens_q", "batch+1", (torch.int32,), contiguous_last=True),
        TensorSpec("cu_seqlens_k", "batch+1", (torch.int32,), contiguous_last=True),
    ),
    "paged bshd": _paged("batch seq_q heads dim_qk", "page_size kv_heads"),
    "paged bhsd": _paged("batch heads seq_q dim_qk", "kv_heads page_size"),
}


class Call(NamedTuple):
    """The arguments of a call of attention but q, k and v, as given.

    source: where queries and keys lie, if not each sequence in a row of one tensor.  scales: factors of elements in 8 bits.
    lists: the KV blocks that a query block sees, of a block-sparse call."""

    causal: bool = False
    window: Window | None = None
    scale: float | None = None
    softcap: float = 0.0
    layout: Layout = "bshd"
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    score_mod: ModFunction | Constant | None = None
    score_args: ModArgs = ()
    mask_mod: ModFunction | Rules | Constant | None = None
    mask_args: ModArgs = ()
    source: Source | None = None
    plan: "AttentionPlan | DecodePlan | InvariantPlan | AttentionFp8Plan | SparsePlan | Constant | None" = None
    score_grad: ModFunction | Constant | None = None  # this and the next concern the backward pass alone
    backward_plan: "AttentionBackwardPlan | SparseBackwardPlan | Constant | None" = None
    dropout_p: float = 0.0
    dropout_seed: torch.Tensor | None = None  # one int64 on q's device, where dropout_p is not 0
    deterministic: bool = True  # of the gradients alone
    scales: Scales = UNSCALED
    lists: Lists = None  # type: ignore[assignment]  # of block-sparse calls, which all have them
    numerics: str = ""  # of ops.numerics; "": what the context says
    prepared: Any = None  # the record of the call, where somebody has looked it up already

    @property
    def packed(self) -> Packed | None:
        """The source of a packed batch."""
        return self.source if type(self.source) is Packed else None

    @property
    def paged(self) -> Paged | None:
        """The source of block-sparse attention over pages."""
        return self.source if type(self.source) is Paged else None

    @property
    def placement(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that say where the sequences lie."""
        return () if self.source is None else self.source.tensors


def args_of(call: Any) -> dict[str, Any]:
    """The args of both mods by name; what is no tuple is for the checks to find."""
    both = (("score_args", call.score_args), ("mask_args", call.mask_args))
    return {f"{name}[{i}]": arg for name, args in both if type(args) is tuple for i, arg in enumerate(args)}


# ---------------------------------------------------------------- the checks


def sizes_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> dict[str, int]:
    """Check every tensor; the sizes of all named dimensions.  Where k and v are pages there is no "seq_k"."""
    try:
        return _sizes_of(q, k, v, call)
    except ShapeError as error:
        if call.packed is not None:
            raise
        hint = layout_hint(call.layout, lambda other: _sizes_of(q, k, v, call._replace(layout=other)))
        raise ShapeError(f"{error}{hint}") from None


def layout_hint(layout: Layout, fits: Callable[[Layout], object]) -> str:
    """What an error about shapes adds if they fit the other layout; fits: raises if they do not."""
    other: Layout = "bhsd" if layout == "bshd" else "bshd"
    try:
        fits(other)
    except TilefoldError:
        return ""
    form = "[batch, heads, seq, dim]" if other == "bhsd" else "[batch, seq, heads, dim]"
    return f"; as {form} all shapes fit: if they lie so, pass layout={other!r}"


def _sizes_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> dict[str, int]:
    tensors, paged, packed = {"q": q, "k": k, "v": v, **call._asdict()}, call.paged, call.packed
    if paged is not None:
        sizes = bind(SPECS[f"paged {call.layout}"], {"q": q, "k_pages": k, "v_pages": v, **paged._asdict()})
        if sizes["page_size"] < 1:
            raise ShapeError(f"k_pages has shape {tuple(k.shape)}: a page must hold at least 1 key")
    elif packed is None:
        sizes = bind(SPECS[call.layout], tensors)
    else:
        tensors |= {"cu_seqlens_q": packed.cu_q, "cu_seqlens_k": packed.cu_k}
        sizes = bind(SPECS["varlen"], tensors)
        if sizes["batch+1"] < 1:
            raise ShapeError("cu_seqlens_q is empty, expected [batch + 1] offsets")
        sizes |= {"batch": sizes["batch+1"] - 1, "seq_q": packed.max_q, "seq_k": packed.max_k}
        bind(_OPTIONS, tensors, known=sizes, beside=("q", q))
    if call.dropout_seed is not None and call.dropout_seed.shape != (1,):
        raise ShapeError(f"dropout_seed has shape {tuple(call.dropout_seed.shape)}, expected [1]: one seed")
    check_heads(sizes, "k" if paged is None else "k_pages")
    return sizes


def check_heads(sizes: dict[str, int], k: str = "k", v: str = "v", most: int = MAX_HEAD_DIM) -> None:
    """Groups of heads are whole, head dims are served, up to `most`; k, v: what the arguments are called."""
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ShapeError(
            f"q has {heads} heads and {k} has {kv_heads}: the heads of q must be a multiple of those of k and v"
        )
    for name, dim in ((f"q and {k if v != 'v' else 'k'} have", sizes["dim_qk"]), (f"{v} has", sizes["dim_v"])):
        if not 1 <= dim <= most:
            raise Unsupported(f"{name} head dim {dim}; accepted: 1 to {most}")


def shapes_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out and lse, after the checks that need no device."""
    check_options(call)
    return result_shapes(call, sizes_of(q, k, v, call))


def result_shapes(call: Call, sizes: dict[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    heads, seq_q = sizes["heads"], sizes["seq_q"]
    if call.packed is not None:
        return (sizes["total_q"], heads, sizes["dim_v"]), (heads, sizes["total_q"])
    rows = (seq_q, heads) if call.layout == "bshd" else (heads, seq_q)
    return (sizes["batch"], *rows, sizes["dim_v"]), (sizes["batch"], heads, seq_q)


def check_options(call: Call) -> None:
    """Everything that is wrong with a call whatever its tensors; plain Python that torch.compile can trace."""
    window_of(call.window, call.causal)
    if call.scale is not None:
        check_number("scale", call.scale, above=0.0)
    check_number("softcap", call.softcap, low=0.0)
    check_number("dropout_p", call.dropout_p, low=0.0)
    if not call.dropout_p < 1.0:
        raise ValueRangeError(f"dropout_p must be at least 0 and less than 1, got {call.dropout_p}")
    if call.layout not in ("bshd", "bhsd"):
        raise ValueRangeError(f"layout must be 'bshd' or 'bhsd', got {call.layout!r}")
    if call.packed is not None:
        if call.layout != "bshd":
            raise ValueRangeError(f"layout must be left alone for packed sequences, got {call.layout!r}")
        for name, value in (("max_seqlen_q", call.packed.max_q), ("max_seqlen_k", call.packed.max_k)):
            check_integer(name, value)
            if isinstance(value, int) and value < 0:
                raise ValueRangeError(f"{name} must be at least 0, got {value}")
    check_numerics(call.numerics)
    check_mod_args("score", call.score_mod, call.score_args)
    check_mod_args("mask", call.mask_mod, call.mask_args)


def check_kinds(
    return_lse: object, backward_plan: object = None, plans: str = "", deterministic: object = True
) -> None:
    """What no cached record depends on, so that it is looked at in every call; plans: the class of a backward plan."""
    if return_lse is not True and return_lse is not False:
        raise DtypeError(f"return_lse must be a bool, got {return_lse!r}")
    if deterministic is not True and deterministic is not False:
        raise DtypeError(f"deterministic must be a bool, got {deterministic!r}")
    if backward_plan is not None and not isinstance(backward_plan, Constant):
        from .. import plan

        if not isinstance(backward_plan, (getattr(plan, plans), plan.TorchPlan)):
            article = "an" if plans.startswith("A") else "a"
            raise DtypeError(f"backward_plan must be {article} {plans} or None, got {type(backward_plan).__name__}")


def check_integer(name: str, value: object) -> None:
    """An int, or one that a tracer does not know yet; not a bool."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise DtypeError(f"{name} must be an int, got {type(value).__name__}")


def scale_of(call: Any, dim: int) -> float:
    """The factor of the scores of a call whose head dim is this."""
    return 1.0 / math.sqrt(dim) if call.scale is None else float(call.scale)


def window_of(window: Window | None, causal: bool) -> tuple[int, int]:
    """(left, right) with -1 for unbounded; causal bounds the right at 0."""
    if not isinstance(causal, bool):
        raise DtypeError(f"causal must be a bool, got {causal!r}")
    if window is None:
        return (-1, 0) if causal else (-1, -1)
    if not isinstance(window, tuple) or len(window) != 2:
        raise DtypeError(f"window must be None or a pair (left, right), got {window!r}")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, (int, torch.SymInt))):
            raise DtypeError(f"window must hold integers or None, got {window!r}")
        if isinstance(side, int) and side < -1:
            raise ValueRangeError(f"window sides must be at least 0 (or -1 or None for unbounded), got {window!r}")
    left, right = (-1 if side is None or (isinstance(side, int) and side >= UNBOUNDED) else side for side in window)
    return (left, 0) if causal else (left, right)


def check_mod_args(name: str, fn: object, args: object) -> None:
    """The args of a mod are tensors and numbers."""
    if not isinstance(args, tuple):
        raise DtypeError(f"{name}_args must be a tuple, got {type(args).__name__}")
    for i, arg in enumerate(args):
        if isinstance(arg, bool) or not isinstance(arg, (torch.Tensor, int, float, torch.SymInt)):
            raise DtypeError(f"{name}_args[{i}] must be a tensor, an int or a float, got {type(arg).__name__}")
        if isinstance(arg, int) and not -(1 << 63) <= arg < 1 << 63:
            raise ValueRangeError(f"{name}_args[{i}] must fit 64 bits, got {arg}")
    if fn is None and len(args) > 0:
        raise ValueRangeError(f"{name}_args were given without {name}_mod")


def check_hooks(call: Call, device: torch.device) -> None:
    """The mods are Triton functions, and their tensors on q's device."""
    for name, fn, args in (("score", call.score_mod, call.score_args), ("mask", call.mask_mod, call.mask_args)):
        for i, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and arg.device != device:
                raise DeviceError(f"{name}_args[{i}] is on {arg.device}, but q is on {device}")
        if isinstance(fn, Rules):
            for rule in (each for each in fn.rules if not isinstance(each.function, str)):
                _check_function("fn of masks.rule", rule.function)
                check_unpacking("fn of masks.rule", rule.function, "its args", rule.takes)
        elif fn is not None:
            _check_function(f"{name}_mod", fn)
            check_unpacking(f"{name}_mod", fn, f"{name}_args", len(args))
    check_slope(call.score_mod, call.score_grad, call.score_args)


def _check_function(name: str, fn: Any) -> None:
    signature = "(score, batch, head, q_index, kv_index, args)"
    parameters = getattr(fn, "arg_names", None)
    if parameters is None or hasattr(fn, "configs"):
        raise DtypeError(f"{name} must be a @triton.jit function of {signature}, got {fn!r}")
    if len(parameters) != 6:
        raise DtypeError(f"{name} takes {len(parameters)} arguments, it has to take 6: {signature}")


def check_slope(mod: Any, slope: Any, args: ModArgs) -> None:
    """score_grad goes with score_mod, and is a Triton function as well."""
    if slope is None:
        return
    if mod is None:
        raise ValueRangeError("score_grad was given without score_mod")
    _check_function("score_grad", slope)
    check_unpacking("score_grad", slope, "score_args", len(args))
