"""Declarative checks of tensor arguments: one specification per operation, one place that words the errors.

    SPEC = (
        TensorSpec("q", "batch seq_q heads dim_qk", FLOATS),
        TensorSpec("bias", "batch|1 heads|1 seq_q|1 seq_k", FLOATS, optional=True),
    )
    sizes = bind(SPEC, {"q": q, "bias": None})      # {"batch": 2, "seq_q": 128, ...}

The first tensor that mentions a dimension sets its size, later ones have to agree; `name|1` also accepts 1
(broadcast).  The first specified tensor sets the device.  Nothing here reads a tensor's values.
"""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .cache_formats import FORMATS
from .errors import DeviceError, DtypeError, LayoutError, ShapeError, ValueRangeError

__all__ = ["CODED", "FLOATS", "TensorSpec", "bind", "check_number", "check_own_rows", "check_share", "check_whole"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
CODED = {getattr(torch, each.name): each for each in FORMATS}
"""What a KV cache may hold beside floats, by dtypes."""


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor argument has to be.

    dims: its dimensions by name, separated by spaces (alternatives for a different rank separated by " / ");
    dtypes: what is accepted; same_dtype_as: an earlier argument whose dtype it must have; contiguous_last: the last dimension
    has stride 1; besides: what else the public function takes, for its message."""

    name: str
    dims: str
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False
    same_dtype_as: str | None = None
    contiguous_last: bool = False
    besides: str = ""
    forms: dict[int, tuple[tuple[str, str], ...]] = field(init=False, hash=False)

    def __post_init__(self) -> None:
        forms = (tuple(dim.partition("|")[::2] for dim in form.split()) for form in self.dims.split("/"))
        object.__setattr__(self, "forms", {len(form): form for form in forms})


def bind(
    specs: Sequence[TensorSpec],
    tensors: Mapping[str, object],
    known: Mapping[str, int] | None = None,
    beside: tuple[str, torch.Tensor] | None = None,
) -> dict[str, int]:
    """Check `tensors` against `specs` and return the size of every named dimension.

    known: sizes that are already settled; beside: (name, tensor) whose device all have to share, by default the first.
    Raises DtypeError, ShapeError, DeviceError or LayoutError naming the argument, what was given and what is accepted."""
    sizes: dict[str, int] = dict(known or {})
    origin: dict[str, str] = {}
    first, compiling = beside, torch.compiler.is_compiling()
    for spec in specs:
        value = tensors.get(spec.name)
        if value is None and spec.optional:
            continue
        if not isinstance(value, torch.Tensor):
            raise DtypeError(f"{spec.name} must be a torch.Tensor{_or_none(spec)}, got {type(value).__name__}")
        first = first or (spec.name, value)
        _check_dtype(spec, value, tensors)
        if value.layout != torch.strided or value.is_nested:
            raise LayoutError(f"{spec.name} must be a dense strided tensor, got layout {value.layout}")
        if not compiling and value.is_neg():  # Dynamo cannot ask, and resolves it itself
            raise LayoutError(f"{spec.name} is a lazy negation; call {spec.name}.resolve_neg() first")
        if value.device != first[1].device:
            raise DeviceError(f"{spec.name} is on {value.device}, but {first[0]} is on {first[1].device}")
        _bind_shape(spec, value, sizes, origin)
        if spec.contiguous_last and value.shape[-1] > 1 and value.stride(-1) != 1:
            raise LayoutError(
                f"{spec.name} needs a contiguous last dimension (stride 1), got strides {tuple(value.stride())} for shape "
                f"{tuple(value.shape)}; call {spec.name}.contiguous() first if a copy is acceptable"
            )
    return sizes


def check_own_rows(name: str, value: torch.Tensor) -> None:
    """LayoutError for a tensor to be written in place of which several elements are one in memory, as after `expand`."""
    if any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True)):
        raise LayoutError(
            f"{name} is written in place, but elements of it share memory: strides {tuple(value.stride())} for shape "
            f"{tuple(value.shape)}; call {name}.contiguous() first"
        )


LARGEST = 1e30  # numbers go into fp32 arithmetic; beyond this, or below its inverse, products leave its range


def check_number(name: str, value: object, *, low: float | None = None, above: float | None = None) -> float:
    """A real number that fp32 arithmetic can hold, at least `low` or greater than `above`; DtypeError or ValueRangeError."""
    given = _real(name, value)
    if low is not None and not given >= low:
        raise ValueRangeError(f"{name} must be at least {low:g}, got {value!r}")
    if above is not None and not given > above:
        raise ValueRangeError(f"{name} must be greater than {above:g}, got {value!r}")
    if given != 0 and not 1 / LARGEST <= abs(given) <= LARGEST:
        raise ValueRangeError(f"{name} must be between {1 / LARGEST:g} and {LARGEST:g} in size, got {value!r}")
    return float(given)


def check_whole(name: str, value: object, low: int = 0) -> int:
    """An int of at least `low`; raises DtypeError or ValueRangeError."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise DtypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < low:
        raise ValueRangeError(f"{name} must be at least {low}, got {value}")
    return value  # type: ignore[return-value]


def check_share(name: str, value: object) -> float:
    """A real number from 0 to 1, however small, for nothing is divided by it; DtypeError or ValueRangeError."""
    given = _real(name, value)
    if not given >= 0:
        raise ValueRangeError(f"{name} must be at least 0, got {value!r}")
    if given > 1:
        raise ValueRangeError(f"{name} must be at most 1, got {value!r}")
    return float(given)


def _real(name: str, value: object) -> Any:
    """The number as it is: an int too large for a float is to be found out of range, not to overflow."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise DtypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    return value


def _or_none(spec: TensorSpec) -> str:
    return (f", {spec.besides}" if spec.besides else "") + (" or None" if spec.optional else "")


def _check_dtype(spec: TensorSpec, value: torch.Tensor, tensors: Mapping[str, object]) -> None:
    if value.dtype not in spec.dtypes:
        accepted = ", ".join(str(d).removeprefix("torch.") for d in spec.dtypes)
        raise DtypeError(f"{spec.name} has dtype {_dtype(value)}, accepted: {accepted}")
    if spec.same_dtype_as is not None:
        other = tensors[spec.same_dtype_as]
        if isinstance(other, torch.Tensor) and value.dtype != other.dtype:
            raise DtypeError(
                f"{spec.name} has dtype {_dtype(value)}, but {spec.same_dtype_as} has {_dtype(other)}: "
                f"they must be the same (nothing is converted silently)"
            )


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _bind_shape(spec: TensorSpec, value: torch.Tensor, sizes: dict[str, int], origin: dict[str, str]) -> None:
    shape = tuple(value.shape)
    form = spec.forms.get(len(shape))
    if form is None:
        wanted = " or ".join(f"[{', '.join(f.split())}]" for f in spec.dims.split("/"))
        raise ShapeError(f"{spec.name} has {len(shape)} dimensions, shape {shape}; expected {wanted}")
    for axis, ((name, broadcast), size) in enumerate(zip(form, shape, strict=True)):
        if broadcast and size == 1:
            continue
        expected = sizes.get(name)
        if expected is None:
            sizes[name], origin[name] = size, spec.name
        elif size != expected:
            why = f" as in {origin[name]}" if name in origin else ""
            one = " or 1" if broadcast else ""
            dims = next(f.split() for f in spec.dims.split("/") if len(f.split()) == len(shape))
            raise ShapeError(
                f"{spec.name} has shape {shape}, expected [{', '.join(dims)}]: dimension {axis} ({name}) is {size}, "
                f"should be {expected}{one}{why}"
            )
