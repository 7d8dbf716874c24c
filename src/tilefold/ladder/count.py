"""What a launch really loads, stores and multiplies, counted while Triton's interpreter runs it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilefold.errors import Unsupported
from tilefold.ops.device import interpreting

METHODS = ("create_masked_load", "create_masked_store", "create_dot")


@dataclass(slots=True)
class Counts:
    """Bytes loaded and stored by lanes whose mask was on, floating-point operations of matrix products, whole tiles."""

    loaded: int = 0
    stored: int = 0
    flops: int = 0

    @property
    def bytes(self) -> int:
        return self.loaded + self.stored


@contextmanager
def counting() -> Iterator[Counts]:
    """Count every launch while it is open: `with counting() as counts: attention(q, k, v)`.  Unsupported on a GPU."""
    if not interpreting():
        raise Unsupported(
            "loads and stores are counted in Triton's interpreter only: start Python with TRITON_INTERPRET=1"
        )
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    missing = [name for name in METHODS if not hasattr(builder, name)]
    if missing:
        raise Unsupported(f"the interpreter of this Triton has no {', '.join(missing)}; tested with triton 3.6")
    counts = Counts()

    def load(original: Callable[..., Any], pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        counts.loaded += _lanes(mask, pointers) * max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        return original(pointers, mask, *rest, **named)

    def store(original: Callable[..., Any], pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        counts.stored += _lanes(mask, pointers) * value.data.itemsize
        return original(pointers, value, mask, *rest, **named)

    def dot(original: Callable[..., Any], a: Any, b: Any, *rest: Any, **named: Any) -> Any:
        counts.flops += 2 * int(np.prod(a.data.shape)) * int(b.data.shape[-1])
        return original(a, b, *rest, **named)

    watchers: tuple[Callable[..., Any], ...] = (load, store, dot)
    for name, watched in zip(METHODS, watchers, strict=True):
        setattr(builder, name, _bound(watched, getattr(builder, name)))
    try:
        yield counts
    finally:
        for name in METHODS:
            delattr(builder, name)  # of the instance: its class's is visible again


def _bound(watched: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: watched(original, *args, **kwargs)


def _lanes(mask: Any, pointers: Any) -> int:
    """How many lanes of an access are on."""
    return int(np.broadcast_to(np.asarray(mask.data, bool), pointers.data.shape).sum())
