"""flash_attn's arguments in tilefold's terms, and its errors: a RuntimeError there, and a tilefold error still."""

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ... import errors
from ...check import check_number
from ...errors import DeviceError, DtypeError, ShapeError, Unsupported, ValueRangeError

__all__ = [
    "VERSION",
    "contiguous_last",
    "flash_errors",
    "host_int",
    "refuse",
    "scale_of",
    "seed_for",
    "sinks_of",
    "window_of",
]

VERSION = "2.8.3"
"""The version of flash-attention whose functions these are."""

Function = TypeVar("Function", bound=Callable[..., Any])

_CLASSES: dict[type, type] = {
    cls: type(cls.__name__, (cls, RuntimeError), {"__doc__": cls.__doc__, "__module__": __name__})
    for cls in (getattr(errors, name) for name in errors.__all__)
    if not issubclass(cls, RuntimeError)
}


def flash_errors(fn: Function) -> Function:
    """fn, whose tilefold errors are RuntimeErrors too, as those of flash_attn are, with the same text and base classes."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except errors.TilefoldError as error:
            cls = _CLASSES.get(type(error))
            if cls is None:
                raise
            raise cls(str(error)) from error

    return call  # type: ignore[return-value]


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
    """What scores are multiplied with; 1 / sqrt(head dim) by default."""
    return (
        float(q.shape[-1] ** -0.5) if softmax_scale is None else check_number("softmax_scale", softmax_scale, above=0.0)
    )


def seed_for(dropout_p: float, q: torch.Tensor) -> torch.Tensor | None:
    """A seed on q's device from torch's generator, where anything is dropped."""
    if not check_number("dropout_p", dropout_p, low=0.0):
        return None
    return torch.randint(-(1 << 63), (1 << 63) - 1, (1,), dtype=torch.int64, device=q.device)


def contiguous_last(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """The tensors, copied where the last dimension is not contiguous, as flash_attn does."""
    return tuple(
        t.contiguous() if isinstance(t, torch.Tensor) and t.dim() > 0 and t.stride(-1) != 1 else t for t in tensors
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
        if value is not None and not (name == "attention_chunk" and isinstance(value, int) and value == 0):
            raise Unsupported(f"{name} is not supported: {_ADVICE[name]}")
