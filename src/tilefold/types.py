"""Frozen records and aliases that users of tilefold hold or pass."""

import hashlib
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

from .errors import DtypeError, Unsupported

__all__ = ["Constant", "Layout", "ModArgs", "ModFunction", "Window", "constant"]

Layout: TypeAlias = Literal["bshd", "bhsd"]
"""Order of the dimensions of q, k, v and out: [batch, seq, heads, dim] or [batch, heads, seq, dim]."""

Window: TypeAlias = tuple[int | None, int | None]
"""(left, right): how many keys before and after its own position a query sees, inclusive; None or -1 is unbounded."""

ModFunction: TypeAlias = Callable[..., Any]
"""A @triton.jit function of (score, batch, head, q_index, kv_index, args); see `tilefold.attention`."""

ModArgs: TypeAlias = tuple[Any, ...]
"""What a mod function gets as its args: tensors and numbers; seq_q and seq_k are appended to them."""


class Constant(NamedTuple):
    """A name for an object that torch.compile cannot carry through a graph; made by `constant`."""

    key: str

    @property
    def value(self) -> Any:
        """The object that `constant` was given; Unsupported if this process has not named it."""
        if self.key not in _CONSTANTS:
            raise Unsupported(
                f"this graph uses {self.key!r}, which this process does not know: call tilefold.constant(...) on the same object "
                f"before running it"
            )
        return _CONSTANTS[self.key]


_CONSTANTS: dict[str, Any] = {}


def constant(value: Any) -> Constant:
    """Name a mod function or a plan, so that it can be passed inside torch.compile: `score_mod=tilefold.constant(fn)`.

    Make it once, outside the compiled function: the object is kept for good.  The name follows from the object's source or
    value, so a graph that was exported with it runs in another process that has named the same object.  Eager calls take it."""
    if isinstance(value, Constant):
        return value
    name = getattr(value, "__name__", type(value).__name__)
    if callable(value):
        function = getattr(value, "fn", value)
        text = getattr(value, "cache_key", None) or f"{inspect.getsource(function)} {function.__module__}"
    elif hasattr(value, "to_json"):
        text = value.to_json()
    else:
        raise DtypeError(f"constant() takes a mod function or a plan, got {value!r}")
    key = f"{name}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    _CONSTANTS[key] = value
    return Constant(key)
