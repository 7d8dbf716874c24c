"""What the host does for all Gluon kernels: their boxes, the counter they draw work from, and the way back without them."""

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ..errors import Unsupported
from ..types import Layout
from .bound import Box, Slot
from .dense.attention_parts import describe_box, sequence_strides
from .device import stream_of

Made = TypeVar("Made")

DISABLE = "TILEFOLD_DISABLE_HOPPER"
_WARNED: set[str] = set()
_COUNTERS: dict[tuple[int | None, int], torch.Tensor] = {}  # by device and stream


class _Place(threading.local):
    operator = False


_PLACE = _Place()


@contextlib.contextmanager
def inside_operator() -> Iterator[None]:
    """The launches in here were made by torch's dispatcher."""
    before, _PLACE.operator = _PLACE.operator, True
    try:
        yield
    finally:
        _PLACE.operator = before


def disabled() -> bool:
    """Whether the environment asks for portable kernels; looked at when a call of some shape is made for the first time."""
    return os.environ.get(DISABLE, "0") not in ("", "0")


def box_of(t: torch.Tensor, layout: Layout, rows: int, columns: int = 64, heads: int = 1) -> Box:
    """Boxes of 64 columns (128 bytes, the widest that TMA swizzles) or 32.  heads: a divisor of rows; so many are
    brought together, of rows / heads tokens, and the descriptor is of [B, H / heads, N, heads, D]."""
    made = _box_of(t, layout, rows, columns, heads)
    made.describe = functools.partial(box_of, layout=layout, rows=rows, columns=columns, heads=heads)
    at = 0 if t.dim() == 3 else 1
    if layout == "bshd" and t.shape[at] > 1:  # else other strides follow from the length
        made.rows = at, t.stride()[at:]
    return made


def _box_of(t: torch.Tensor, layout: Layout, rows: int, columns: int, heads: int) -> Box:
    if heads == 1:
        return describe_box(t, layout, rows, columns, *descriptor((1, 1, rows, columns), t.dtype))
    box = (1, 1, rows // heads, heads, columns)
    b, n, h = sequence_strides(t, layout)
    batch, length, all_heads = (1, *t.shape[:2]) if t.dim() == 3 else t.shape[:3]
    if layout == "bhsd":
        length, all_heads = all_heads, length
    shape = [batch, all_heads // heads, length, heads, t.shape[-1]]
    row = -(-t.shape[-1] // 8) * 8  # the stride of a dimension of size 1 means nothing and may be invalid
    strides = [row if size == 1 else stride for size, stride in zip(shape, (b, heads * h, n, h), strict=False)]
    return Box(t, shape, [*strides, 1], list(box), *descriptor(box, t.dtype))


@functools.cache
def descriptor(box: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, Any]:
    """Gluon's descriptor, and the layout of a box of it."""
    from ..kernels.hopper.gluon import TensorDescriptor

    return TensorDescriptor, shared_layout(box, dtype)


@functools.cache
def shared_layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    """How a box of a tensor lies in shared memory: the widest swizzle that wgmma reads and the box fills."""
    from ..kernels.hopper.gluon import gl

    kinds = {
        torch.bfloat16: gl.bfloat16,
        torch.float16: gl.float16,
        torch.float32: gl.float32,
        torch.float8_e4m3fn: gl.float8e4nv,
    }
    return gl.NVMMASharedLayout.get_default_for(list(box), kinds[dtype])


def work_counter(device: torch.device) -> torch.Tensor:
    """A counter that is 0, from which the programs draw their work; a launch leaves it at 0 again.

    One per stream, since launches on one stream follow one another.  A captured graph may be replayed beside anything else, so
    each captured launch has its own, set to 0 by the graph itself.  So has one inside an operator: a compiled region may run in
    a graph's memory pool, in which nothing may be kept."""
    if _PLACE.operator or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device.index, stream_of()(device.index)
    found = _COUNTERS.get(key)
    if found is None:
        found = _COUNTERS[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return found


WORK_COUNTER = Slot("q", lambda t: t.new_zeros(1, dtype=torch.int32) if t.is_meta else work_counter(t.device))
"""The counter as an argument by name."""


def require(field: str, kernel: str) -> None:
    """Unsupported, naming the plan's field, unless the installed Triton offers what the kernel that it asks for needs."""
    from ..kernels import hopper

    if refusal := hopper.refusal():
        raise Unsupported(f"{field} is {kernel!r}, but {refusal}")


def bound_or_none(
    kind: str,
    bind: Callable[[], Made],
    compile: Callable[[Made], None],
    what: str = "it",
    faults: list[str] | None = None,
) -> Made | None:
    """A call bound to a kernel that compiles, or None, after one warning a process, if this Triton cannot make it.

    kind: the attention that is meant, what: the part of it that does not compile, both for the warning.  faults: instead of the
    warning, what the compiler says is added here: the fault may be that of the user's own function."""
    from ..kernels import hopper

    if refusal := hopper.refusal():
        _warn_portable(kind, refusal)
        return None
    bound = bind()
    try:
        compile(bound)
    except Exception as problem:  # the compiler raises what it likes, and the portable kernels can do without it
        if faults is not None:
            faults.append(_innermost(problem))
            return None
        _warn_portable(kind, f"{what} does not compile: {type(problem).__name__}: {problem}")
        return None
    return bound


def _innermost(problem: BaseException) -> str:
    """What went wrong where it began: the compiler wraps an error anew in every function that it passes through."""
    while problem.__cause__ is not None:
        problem = problem.__cause__
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    return lines[-1].strip()


def chosen_or_none(
    plan: Any, given: Any, kind: str, bind: Callable[[], Made], compile: Callable[[Made], None], what: str
) -> Made | None:
    """bound_or_none of a backward plan, or, where the caller chose it (given is not None), an error for what it would warn of."""
    if given is None:
        return bound_or_none(kind, bind, compile, what)
    require("backward_plan.kernel", plan.kernel)
    bound = bind()
    compile(bound)
    return bound


def _warn_portable(kind: str, why: str) -> None:
    """Say once a reason that a portable kernel serves; kind: "block-sparse" or "dense"."""
    if why not in _WARNED:
        _WARNED.add(why)
        warnings.warn(
            f"the {kind} kernel for this GPU cannot be used, a portable one serves instead ({why})",
            RuntimeWarning,
            stacklevel=2,
        )
