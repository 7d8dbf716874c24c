"""Where the keys of a call lie, and which of them a query block sees: the parts of a `Call` that kernels differ by; and the key
of a call, by which its record is found.

Nothing of a tensor is read on the host."""

from contextlib import suppress
from typing import Any, NamedTuple

import torch

from ..types import ModArgs
from .numerics import ASKED


def facts_of(t: torch.Tensor) -> Any:
    """What of a tensor decides checks, plan, compilation, and who has to see a call of it."""
    return type(t), t.shape, t.stride(), t.dtype, t.device, t.is_neg(), t.data_ptr() & 15 == 0, t.requires_grad


def facts_of_values(*values: Any) -> tuple[Any, ...]:
    """Facts of tensors; of all else its type and itself."""
    return tuple([facts_of(v) if isinstance(v, torch.Tensor) else (type(v), v) for v in values])


class Packed(NamedTuple):
    """Where the sequences of a varlen call lie: int32 offsets [batch + 1] and the longest lengths."""

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self[:2]

    def facts(self) -> Any:
        """What of it decides checks, plan and compilation."""
        return facts_of(self[0]), facts_of(self[1]), self[2:], *map(type, self[2:])


class Paged(NamedTuple):
    """Where the keys of a paged call lie: int32 page numbers [batch, max_pages] and numbers of keys [batch]."""

    block_table: torch.Tensor
    cache_seqlens: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self

    def facts(self) -> Any:
        """What of it decides checks, plan and compilation."""
        return facts_of(self[0]), facts_of(self[1])


class Cache(NamedTuple):
    """Where the keys of each sequence lie in a KV cache.

    lengths: [batch] int32: keys of sequence b end at row lengths[b] + more of its cache; None: at the cache's end, or where
        cu_k says.
    pads: [batch] int32: the first pads[b] rows of its cache are no keys.
    batch_index: [batch] int32: whose part of k and v sequence b uses; None: its own.
    block_table: [batch, pages] int32: k and v are [pages, page size, kv heads, dim], and row j of sequence b is row
        j % size of page block_table[b, j // size].
    cu_q, cu_k: [batch + 1] int32: queries, and keys, are packed; the longest are max_q and max_k."""

    lengths: torch.Tensor | None = None
    pads: torch.Tensor | None = None
    batch_index: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    max_q: int = 0
    max_k: int = 0
    more: int = 0
    splits: int = 0

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self[:6]

    def facts(self) -> Any:
        """What of it decides checks, plan and compilation."""
        numbers = self[6:]
        return tuple([None if t is None else facts_of(t) for t in self[:6]]), numbers, tuple(map(type, numbers))


Source = Packed | Paged | Cache


class Scales(NamedTuple):
    """fp32 factors that stored elements are to be multiplied with; None: 1.

    Of e4m3 tensors [batch, heads]; of an 8-bit cache [heads], or [caches or pages, heads]."""

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None

    def facts(self) -> Any:
        """What of them decides checks, plan and compilation."""
        return tuple([None if t is None else facts_of(t) for t in self]), self.k is self.v


UNSCALED = Scales()


class Lists(NamedTuple):
    """What the kernels need of a BlockIndex: its tensors and its geometry (ops does not import the record)."""

    indices: torch.Tensor
    counts: torch.Tensor
    block_sizes: torch.Tensor | None
    query_sizes: torch.Tensor | None
    block_q: int
    block_k: int
    seq_q: int
    seq_k: int
    kept: Any = None  # `facts()`, where somebody keeps them

    @classmethod
    def of(cls, index: Any) -> "Lists":
        """Those of a `BlockIndex`, made once for each."""
        kept: Lists | None = index._kept.get("lists")
        if kept is not None and not torch.compiler.is_compiling():
            return kept
        lists = cls(*index.tensors(), *index.geometry)
        if not torch.compiler.is_compiling():
            # Tensors without an address, as under a tracer, decide nothing yet.
            with suppress(AttributeError, RuntimeError, TypeError):
                lists = index._kept["lists"] = lists._replace(kept=lists.facts())
        return lists

    def facts(self) -> Any:
        """What of the lists decides checks, plan and compilation."""
        return tuple([None if t is None else facts_of(t) for t in self[:4]]), self[4:8]


# ---------------------------------------------------------------- the key


def key_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any, *others: Any) -> Any:
    """Everything that the record of a `Call` depends on.  others: what a call gives besides, which decides over a cache alone.

    Of options the types, too: 1 == True == 1.0, but causal=1 is refused."""
    causal, window, scale, softcap, _ = options = call[:5]
    sides = None if window is None else tuple(map(type, window))
    kinds = options, type(causal), type(scale), type(softcap), sides, call.deterministic, call.numerics or ASKED[-1]
    plain: Any = facts_of(q), facts_of(k), facts_of(v), kinds
    source, lists, scales = call.source, call.lists, call.scales
    if lists is not None:
        listed = Lists, lists.kept or lists.facts()
        plain = plain, None if source is None else (type(source), source.facts()), listed
    elif source is not None or scales is not UNSCALED:
        factors = None if scales is UNSCALED else (Scales, scales.facts())
        plain = plain, None if source is None else (type(source), source.facts()), factors
        if type(source) is Cache:
            plain = (*plain, k.data_ptr() == v.data_ptr(), *others)
    if is_plain(call):
        return plain
    return (
        plain,
        tuple([None if t is None else facts_of(t) for t in call[5:9]]),
        (id(call.score_mod), facts_of_args(call.score_args), id(call.mask_mod), facts_of_args(call.mask_args)),
        (id(call.plan), id(call.score_grad), id(call.backward_plan)),
        (type(call.dropout_p), call.dropout_p, None if call.dropout_seed is None else facts_of(call.dropout_seed)),
    )


def is_plain(call: Any) -> bool:
    """No modifications, no hooks, no plan: the short key will do."""
    slopes, bias, mask, sinks, score_mod, score_args, mask_mod, mask_args, _, plan, grad, backward, p, seed = call[5:-5]
    return (
        slopes is None
        and bias is None
        and mask is None
        and sinks is None
        and score_mod is None
        and mask_mod is None
        and plan is None
        and grad is None
        and backward is None
        and type(p) is float
        and p == 0.0
        and seed is None
        and score_args == ()
        and mask_args == ()
    )


def facts_of_args(args: ModArgs) -> Any:
    """Of a number its type, and of an integer the width: 32 bits, 64 or more."""
    return type(args), tuple([facts_of(a) if isinstance(a, torch.Tensor) else (type(a), _width_of(a)) for a in args])


def _width_of(number: Any) -> int:
    return sum(not -limit <= number < limit for limit in (1 << 31, 1 << 63)) if isinstance(number, int) else 0
