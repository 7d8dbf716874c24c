"""Calls of attention as `ops` gives them to kernels: from a call's tensors and options to those that the folds here take.

call, cache, lists, paged: the records of `ops`.  plan: a `TorchPlan`."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..plan.torch_cpu import TorchPlan
from . import cached, dense, rules, sparse, state
from .dense import Gradients
from .terms import Terms
from .tiles import delta_of, heads_first

Tensor = torch.Tensor
Maybe = torch.Tensor | None


class Piece(NamedTuple):
    """What is folded at once: a sequence of a packed call, or (number None) all of another call.  Its views have heads first."""

    layout: str
    number: int | None = None
    rows: slice = slice(None)
    keys: slice = slice(None)

    def of_q(self, t: Any) -> Any:
        """q, out or a gradient of theirs; None stays."""
        return self._view(t, self.rows)

    def of_k(self, t: Any) -> Any:
        """k, v or a gradient of theirs; None stays."""
        return self._view(t, self.keys)

    def _view(self, t: Any, part: slice) -> Any:
        if t is None:
            return None
        return heads_first(t, self.layout) if self.number is None else t[None, part].transpose(1, 2)

    def of_lse(self, t: Tensor) -> Tensor:
        """[batch, heads, rows]."""
        return t if self.number is None else t[None, :, self.rows]

    def terms(self, terms: Terms) -> Terms:
        if self.number is None:
            return terms
        return terms.sequence(self.number, *(part.stop - part.start for part in (self.rows, self.keys)))

    def lists(self, lists: Any) -> Any:
        return lists if self.number is None else _lists_of(lists, self.number)


def _pieces(call: Any, most: int | None = None) -> Iterator[Piece]:
    """Those of a call that have queries; most: queries of a sequence."""
    if call.packed is None:
        yield Piece(call.layout)
        return
    cu_q, cu_k = call.packed.cu_q.tolist(), call.packed.cu_k.tolist()
    for b in range(len(cu_q) - 1):
        if cu_q[b] < cu_q[b + 1]:
            end = cu_q[b + 1] if most is None else min(cu_q[b + 1], cu_q[b] + most)
            yield Piece(call.layout, b, slice(cu_q[b], end), slice(cu_k[b], cu_k[b + 1]))


def _scale(call: Any, dim: int) -> float:
    return 1.0 / math.sqrt(dim) if call.scale is None else float(call.scale)


def _zeros(tensors: tuple[Maybe, ...], wanted: tuple[bool, ...], dtype: torch.dtype | None = None) -> list[Maybe]:
    pairs = zip(tensors, wanted, strict=True)
    return [torch.zeros(t.shape, dtype=dtype or t.dtype) if w and t is not None else None for t, w in pairs]


# ---------------------------------------------------------------- dense, packed and cached keys


def _terms(call: Any, plan: TorchPlan) -> Terms:
    n = getattr(plan.problem, "attention", plan.problem)
    left, right = (None if side < 0 else side for side in ((-1, 0) if n.causal else n.window))
    slopes = call.alibi_slopes
    if slopes is not None and slopes.dim() == 1:
        slopes = slopes[None]
    seen = () if call.mask_mod is None else call.mask_mod.bound(rules, call.mask_args)
    return Terms(_scale(call, n.dim_qk), left, right, float(call.softcap), slopes, call.bias, call.mask, call.sinks,
                 float(call.dropout_p), call.dropout_seed, rules=seen, ordered=plan.numerics == "invariant")  # fmt: skip


def attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Any, plan: Any) -> None:
    """Write out and lse."""
    terms = _terms(call, plan)
    for one in _pieces(call):
        dense.forward(one.of_q(q), one.of_k(k), one.of_k(v), one.terms(terms), plan.cut, one.of_q(out), one.of_lse(lse))


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Maybe, call: Any, wanted: tuple[bool, ...],
    plan: Any,
) -> tuple[Maybe, ...]:  # fmt: skip
    """Gradients of q, k, v, bias and sinks, None where not wanted."""
    delta, terms = delta_of(out, dout, dlse, call.layout), _terms(call, plan)
    dq, dk, dv = _zeros((q, k, v), wanted[:3])
    added = call.bias, call.sinks
    bias, sinks = _zeros(added, wanted[3:], torch.float32)
    for one in _pieces(call):
        own_bias = None if bias is None else one.terms(terms._replace(bias=bias)).bias
        grads = Gradients(one.of_q(dq), one.of_k(dk), one.of_k(dv), own_bias, sinks)
        statistics = one.of_lse(lse), one.of_lse(delta)
        dense.backward(
            one.of_q(q), one.of_k(k), one.of_k(v), one.terms(terms), plan.cut, statistics, one.of_q(dout), grads
        )
    return dq, dk, dv, *(s if s is None else s.to(t.dtype) for s, t in zip((bias, sinks), added, strict=True))


def kvcache(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Any, plan: Any) -> None:
    """Write out and lse of keys in a cache."""
    cached.forward(q, k, v, call.scales[1:], _terms(call, plan), call.source, out, lse)


def attention_cached(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Any, plan: Any) -> None:
    """The same without 8-bit caches."""
    kvcache(q, k, v, out, lse, call, plan)


def merge_results(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Write the merge of two results [.., rows, heads, dim] over disjoint keys."""
    made, log = state.merge(out_a.transpose(-2, -3), lse_a, out_b.transpose(-2, -3), lse_b)
    out.copy_(made.transpose(-2, -3))
    lse.copy_(log)


# ---------------------------------------------------------------- lists of blocks


def _sparse_terms(call: Any, dim: int) -> Terms:
    return Terms(_scale(call, dim), right=0 if call.causal else None, softcap=float(call.softcap))


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Any, plan: Any) -> None:
    """Write out and lse, over dense, packed and paged keys."""
    terms = _sparse_terms(call, q.shape[-1])
    if call.paged is None:
        for one in _pieces(call, call.lists.seq_q):
            lists = one.lists(call.lists)
            sparse.forward(one.of_q(q), one.of_k(k), one.of_k(v), terms, lists, one.of_q(out), one.of_lse(lse))
        return
    q, k, v, out = (heads_first(t, call.layout) for t in (q, k, v, out))
    for b in range(q.shape[0]):
        own, own_k, own_v = slice(b, b + 1), *(_paged(t, call.paged, b) for t in (k, v))
        sparse.forward(q[own], own_k, own_v, terms, _lists_of(call.lists, b), out[own], lse[own])


def sparse_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Maybe, call: Any, wanted: tuple[bool, ...],
    plan: Any,
) -> tuple[Maybe, ...]:  # fmt: skip
    """Gradients of q, k and v, None where not wanted."""
    delta, terms = delta_of(out, dout, dlse, call.layout), _sparse_terms(call, q.shape[-1])
    dq, dk, dv = _zeros((q, k, v), wanted)
    for one in _pieces(call, call.lists.seq_q):
        statistics, grads = (one.of_lse(lse), one.of_lse(delta)), (one.of_q(dq), one.of_k(dk), one.of_k(dv))
        lists = one.lists(call.lists)
        sparse.backward(one.of_q(q), one.of_k(k), one.of_k(v), terms, lists, statistics, one.of_q(dout), grads)
    return dq, dk, dv


def _lists_of(lists: Any, b: int) -> Any:
    """The lists of sequence b alone."""

    def own(t: Maybe) -> Maybe:
        return t if t is None or t.dim() == 1 or t.shape[0] == 1 else t[b : b + 1]

    names = ("indices", "counts", "block_sizes", "query_sizes")
    return lists._replace(**{name: own(getattr(lists, name)) for name in names})


def _paged(pages: Tensor, paged: Any, b: int) -> Tensor:
    """The keys of sequence b, [1, kv_heads, seq_k, dim], of pages [pages, kv_heads, page, dim]."""
    length, size = int(paged.cache_seqlens[b]), pages.shape[2]
    numbers = paged.block_table[b, : -(-length // size)].long()
    return pages[numbers].transpose(0, 1).flatten(1, 2)[None, :, :length]
