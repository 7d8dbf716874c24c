"""Frozen records and aliases that users of tilefold hold or pass."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

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
        """The object that `constant` was given."""
        return _CONSTANTS[self.key]


_CONSTANTS: dict[str, Any] = {}


def constant(value: Any) -> Constant:
    """Name a mod function or a plan, so that it can be passed inside torch.compile: `score_mod=tilefold.constant(fn)`.

    Make it once, outside the compiled function: the object is kept for good.  Eager calls take it too."""
    key = f"{getattr(value, '__name__', type(value).__name__)}@{id(value):x}"
    _CONSTANTS[key] = value
    return Constant(key)
