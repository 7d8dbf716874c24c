"""The rules of `tilefold.device.mods` in plain torch: by the same names, of the same args, on the indices of a tile.

Indices broadcast to the tile.  Of the last two args, the lengths there, only the difference seq_k - seq_q is right."""

from typing import Any

import torch

__all__ = ["between", "causal", "either", "every", "inverse", "keep", "keys", "prefix", "prefix_each", "window"]

Index = torch.Tensor


def causal(score: None, batch: Index, head: Index, q_index: Index, kv_index: Index, args: tuple[Any, ...]) -> Any:
    """The key is not after the query."""
    seq_q, seq_k = args
    return kv_index <= q_index + (seq_k - seq_q)


def window(score: None, batch: Index, head: Index, q_index: Index, kv_index: Index, args: tuple[Any, ...]) -> Any:
    """args = (left, right): keys before and after the query, both inclusive."""
    left, right, seq_q, seq_k = args
    position = q_index + (seq_k - seq_q)
    return (kv_index >= position - left) & (kv_index <= position + right)


def prefix(score: None, batch: Index, head: Index, q_index: Index, kv_index: Index, args: tuple[Any, ...]) -> Any:
    """args = (n,): the key is one of the first n, or not after the query."""
    n, seq_q, seq_k = args
    return (kv_index < n) | (kv_index <= q_index + (seq_k - seq_q))


def prefix_each(score: None, batch: Index, head: Index, q_index: Index, kv_index: Index, args: tuple[Any, ...]) -> Any:
    """args = (n [batch],): `prefix` with a length for each sequence."""
    return prefix(score, batch, head, q_index, kv_index, (args[0][batch], *args[1:]))


def keys(score: None, batch: Index, head: Index, q_index: Index, kv_index: Index, args: tuple[Any, ...]) -> Any:
    """args = (lengths [batch],): the key is one of the sequence's first."""
    return kv_index < args[0][batch]


def between(score: None, batch: Index, head: Index, q_index: Index, kv_index: Index, args: tuple[Any, ...]) -> Any:
    """args = (first, last), both [seq_k]: first <= key < last by the query's position; no key for one before the first key."""
    first, last, seq_q, seq_k = args
    position = q_index + (seq_k - seq_q)
    place = position.clamp(min=0)
    return (position >= 0) & (kv_index >= first[place]) & (kv_index < last[place])


def keep(score: None, batch: Index, head: Index, q_index: Index, kv_index: Index, args: tuple[Any, ...]) -> Any:
    """args = (mask, its four strides, 0 where it is broadcast): mask[batch, head, q, kv] is true."""
    mask, *strides, _, _ = args
    indices = (batch, head, q_index, kv_index)
    at = sum(index * stride for index, stride in zip(indices, strides, strict=True))
    reach = 1 + sum((size - 1) * stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    return mask.as_strided((reach,), (1,))[at] != 0


def every(score: None, batch: Index, head: Index, q_index: Index, kv_index: Index, args: tuple[Any, ...]) -> Any:
    """args = pairs (rule, its args): all of them hold."""
    found: Any = True
    for rule, own in args[:-2]:
        found = rule(score, batch, head, q_index, kv_index, own + args[-2:]) & found
    return found


def either(score: None, batch: Index, head: Index, q_index: Index, kv_index: Index, args: tuple[Any, ...]) -> Any:
    """args = pairs (rule, its args): one of them holds."""
    found: Any = False
    for rule, own in args[:-2]:
        found = rule(score, batch, head, q_index, kv_index, own + args[-2:]) | found
    return found


def inverse(score: None, batch: Index, head: Index, q_index: Index, kv_index: Index, args: tuple[Any, ...]) -> Any:
    """args = one pair (rule, its args): it does not hold."""
    (rule, own), *extent = args
    return ~rule(score, batch, head, q_index, kv_index, own + tuple(extent))
