"""flash_attn's arguments in tilefold's terms, and its errors: a RuntimeError there, and a tilefold error still."""

import functools
import math
import operator
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ... import errors
from ...check import check_number
from ...errors import DeviceError, DtypeError, ShapeError, Unsupported, ValueRangeError
from ...ops.call import Call
from ...ops.checked import checked_packed
from ...ops.faults import mode_for
from ...ops.source import Packed

VERSION = "2.8.3"
"""The version of flash-attention whose functions these are."""

Function = TypeVar("Function", bound=Callable[..., Any])

_CLASSES: dict[type, type] = {
    cls: type(cls.__name__, (cls, RuntimeError), {"__doc__": cls.__doc__, "__module__": __name__})
    for cls in (getattr(errors, name) for name in errors.__all__)
    if not issubclass(cls, RuntimeError)
}


_ALIASES = {"page_table": "block_table", "learnable_sink": "sinks", "s_aux": "sinks"}


def flash_errors(**names: str) -> Callable[[Function], Function]:
    """A function whose tilefold errors are RuntimeErrors too, as those of flash_attn are, with the same base classes, and speak
    of its own arguments.  names: what tilefold calls one, and what the function does; besides, the alias that was given."""

    def decorate(fn: Function) -> Function:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return fn(*args, **kwargs)
            except errors.TilefoldError as error:
                given = {ours: alias for alias, ours in _ALIASES.items() if kwargs.get(alias) is not None}
                text = _in_their_words(str(error), {**names, **given})
                cls = _CLASSES.get(type(error), type(error))
                if cls is type(error) and text == str(error):
                    raise
                raise cls(text) from error

        return call  # type: ignore[return-value]

    return decorate


def _in_their_words(text: str, names: dict[str, str]) -> str:
    """The text with other names where it names an argument: where it begins, where it compares, before an equals sign."""
    for ours, theirs in names.items():
        if f" {theirs} " not in f" {text} ":  # two names of one argument, or a function below said it already
            text = re.sub(rf"(^|\bin |\bbut ){ours}\b|\b{ours}(?==)", rf"\g<1>{theirs}", text)
    return text


def check_tensor(name: str, value: Any, dims: tuple[int, ...] = (), form: str = "") -> None:
    """DtypeError or ShapeError unless the value is a tensor with one of so many dimensions; form says what they are."""
    if not isinstance(value, torch.Tensor):
        raise DtypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if dims and value.dim() not in dims:
        expected = form or f"{' or '.join(map(str, dims))} dimensions"
        raise ShapeError(f"{name} has shape {tuple(value.shape)}, expected {expected}")


def host_int(name: str, value: Any) -> Any:
    """An int, or an integer of torch or numpy that the host can read without waiting for a GPU."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise DeviceError(f"{name} is a tensor on {value.device}: reading it would make the host wait; pass an int")
        if value.numel() != 1 or value.is_floating_point() or value.dtype == torch.bool:
            raise DtypeError(
                f"{name} must be an int, got a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
            )
        return int(value)
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise DtypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")


def window_of(window_size: Any, causal: bool) -> tuple[int, int]:
    """(left, right), a negative side is unbounded: a pair of ints, or of integers on the host, such as a CPU tensor of two."""
    if not isinstance(causal, bool):
        raise DtypeError(f"causal must be a bool, got {causal!r}")
    try:
        sides = tuple(window_size)
    except TypeError:
        raise DtypeError(f"window_size must be a pair (left, right), got {window_size!r}") from None
    if len(sides) != 2:
        raise ShapeError(f"window_size must be a pair (left, right), got {window_size!r}")
    left, right = (-1 if side is None else host_int(f"window_size[{i}]", side) for i, side in enumerate(sides))
    return max(left, -1), max(right, -1)


def scale_of(softmax_scale: float | None, q: torch.Tensor) -> float:
    """What scores are multiplied with; 1 / sqrt(head dim) by default.  A head dim of 0 is refused with the others."""
    if softmax_scale is not None:
        return check_number("softmax_scale", softmax_scale, above=0.0)
    return float(max(q.shape[-1], 1) ** -0.5)


def flash_call(
    q: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    source: Packed | None = None,
    sinks: torch.Tensor | None = None,
    seeded: bool = True,
) -> Call:
    """The call of these arguments.  seeded: with a seed on q's device from torch's generator, where anything is dropped."""
    share, seed = check_number("dropout_p", dropout_p, low=0.0), None
    if not share < 1:
        raise ValueRangeError(f"dropout_p must be at least 0 and less than 1, got {dropout_p!r}")
    if seeded and share:
        seed = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), dtype=torch.int64, device=q.device)
    return Call(causal, window_of(window_size, causal), scale_of(softmax_scale, q), softcap, alibi_slopes=alibi_slopes,
                sinks=sinks, source=source, dropout_p=share, dropout_seed=seed)  # fmt: skip


def packed_of(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: Any, max_seqlen_k: Any) -> Packed:
    longest = host_int("max_seqlen_q", max_seqlen_q), host_int("max_seqlen_k", max_seqlen_k)
    return Packed(cu_seqlens_q, cu_seqlens_k, *longest)


def check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise DtypeError(f"{name} must be a bool, got {flag!r}")


def flash_lse(lse: torch.Tensor) -> torch.Tensor:
    """lse with +inf where no key is seen, as flash_attn 2.8 has it (there -inf marks empty parts of a split only)."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def tilefold_lse(lse: torch.Tensor) -> torch.Tensor:
    """The other way round."""
    return lse.masked_fill(lse == math.inf, -math.inf)


def contiguous_last(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """The tensors, copied where the last dimension is not contiguous, as flash_attn does."""
    return tuple(
        t.contiguous()
        if isinstance(t, torch.Tensor) and t.layout == torch.strided and t.dim() > 0 and t.stride(-1) != 1
        else t
        for t in tensors
    )


def sinks_of(**named: torch.Tensor | None) -> torch.Tensor | None:
    """The one of its names that was given: FlashAttention-3 and 4, vLLM and transformers each have their own."""
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise ValueRangeError(f"{' and '.join(given)} are names of one argument, of which one may be given")
    return next(iter(given.values()), None)


_ADVICE = {
    "attention_chunk": "use tilefold.attention with mask_mod",
    "qv": "there is no kernel for a second product of queries with values",
    "q_descale": "use tilefold.attention, which takes float8_e4m3fn",
    "k_descale": "use tilefold.attention, which takes float8_e4m3fn",
    "v_descale": "use tilefold.attention, which takes float8_e4m3fn",
    "seqused_q": "give cu_seqlens_q the lengths that are used",
    "scheduler_metadata": "there is no scheduler to be prepared: plans are made from shapes alone",
    "rotary_seqlens": "rotary positions are cache_seqlens",
    "cu_seqlens_k_new": "new keys are [batch, seqlen_new, heads, dim]",
}


def refuse(**named: Any) -> None:
    """Unsupported for an addition of FlashAttention-3 that is not served; its neutral value passes."""
    for name, value in named.items():
        if name == "attention_chunk":
            if value is not None and host_int(name, value) != 0:
                raise Unsupported(f"{name} must be 0, got {value!r}: {_ADVICE[name]}")
        elif value is not None:
            raise Unsupported(f"{name} must be None, got a {type(value).__name__}: {_ADVICE[name]}")


def checked_call(q: Any, k: Any, call: Call, operation: str) -> Call:
    """A packed call whose offsets are looked at as TILEFOLD_CHECK asks, or where they lie on the CPU; others as they are."""
    if call.packed is not None and (mode := mode_for(None, call.packed.cu_q)):
        return call._replace(source=checked_packed(q, k, call.packed, mode, operation))
    return call
