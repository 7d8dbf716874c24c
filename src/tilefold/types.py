"""Frozen records and aliases that users of tilefold hold or pass."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

__all__ = ["Layout", "ModArgs", "ModFunction", "Window"]

Layout: TypeAlias = Literal["bshd", "bhsd"]
"""Order of the dimensions of q, k, v and out: [batch, seq, heads, dim] or [batch, heads, seq, dim]."""

Window: TypeAlias = tuple[int | None, int | None]
"""(left, right): how many keys before and after its own position a query sees, inclusive; None or -1 is unbounded."""

ModFunction: TypeAlias = Callable[..., Any]
"""A @triton.jit function of (score, batch, head, q_index, kv_index, args); see `tilefold.attention`."""

ModArgs: TypeAlias = tuple[Any, ...]
"""What a mod function gets as its args: tensors and numbers; seq_q and seq_k are appended to them."""
