"""A random sequence, and the ways to compute some of its queries that numerics="invariant" gives the same bits: beside others
of a batch, packed, padded, in chunks of its prompt, over caches and pages of any size and order, by any number of programs."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import tilefold
from cases import rand
from cases.flash import in_pages

__all__ = ["WAYS", "Drawn", "draw", "products_in_order"]


@pytest.fixture(autouse=True)
def products_in_order(monkeypatch):
    """In the interpreter products are a library's, whose bits depend on a row's place in a tile: here they are summed in order,
    one after the other."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self, a, b, d, *_):
        total, a, b = d.data.astype(np.float32), a.data.astype(np.float32), b.data.astype(np.float32)
        for i in range(a.shape[1]):
            total = total + a[:, i : i + 1] * b[i : i + 1]
        return TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@dataclass
class Drawn:
    """q [n, H, D], k, v [n, Hkv, ..] of one sequence whose queries see nothing behind them; options of its calls, as keywords."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any]
    chance: random.Random
    pages: list[int]  # sizes of pages that are tried
    alone: tuple[torch.Tensor, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        out, lse = tilefold.attention(self.q[None], self.k[None], self.v[None], return_lse=True, **self.options)
        self.alone = out[0], lse[0]

    @property
    def length(self) -> int:
        return len(self.q)

    def check(self, first: int, out: torch.Tensor, lse: torch.Tensor, how: str) -> None:
        """out [m, H, D], lse [H, m] of queries first and on."""
        end = first + len(out)
        for name, got, one in (("out", out, self.alone[0][first:end]), ("lse", lse, self.alone[1][:, first:end])):
            assert torch.equal(got, one), (
                f"{name} of queries {first} to {end} of {self.length} {how}: other bits, {self.options}"
            )

    def other(self, n: int) -> list[torch.Tensor]:
        """Another sequence of n tokens."""
        return [rand(n, *t.shape[1:], dtype=t.dtype, device=t.device) for t in (self.q, self.k, self.v)]

    def some(self) -> int:
        """Where to cut the sequence: anywhere, so that at least a query is left."""
        return self.chance.randrange(self.length)


def draw(seed: int, device: torch.device, longest: int, dtypes: tuple[torch.dtype, ...], kinds: int = 0) -> Drawn:
    """The sequence of a seed, of at most `longest` tokens.  kinds: of so many kinds of calls, seed % kinds chooses."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    kind = random.Random(seed % kinds if kinds else -1 - seed)
    kv_heads, group = kind.choice([(1, 1), (2, 2), (1, 4), (1, 7)])
    heads, n = kv_heads * group, chance.randint(1, longest)
    (dim, dim_v), dtype = kind.choice([(64, 64), (128, 128), (40, 24), (128, 64)]), kind.choice(dtypes)
    options: dict[str, Any] = {"numerics": "invariant", "scale": chance.choice([None, 0.3])}
    windowed = kind.random() < 0.3
    options |= {"window": (chance.randint(0, longest // 2), 0)} if windowed else {"causal": True}
    if kind.random() < 0.2:
        options["softcap"] = 5.0
    if kind.random() < 0.2:
        options["sinks"] = rand(heads, device=device)
    if kind.random() < 0.2:
        options["alibi_slopes"] = torch.rand(heads).to(device)
    make = {"dtype": dtype, "device": device}
    tensors = rand(n, heads, dim, **make), rand(n, kv_heads, dim, **make), rand(n, kv_heads, dim_v, **make)
    return Drawn(*tensors, options, chance, kind.sample([1, 3, 7, 16, 64, 256], 2))


# ---------------------------------------------------------------- the ways


def in_a_batch(one: Drawn) -> None:
    """In any place among others, its heads in either order."""
    place, batch = one.chance.randrange(3), []
    for t, others in zip(
        (one.q, one.k, one.v), zip(*(one.other(one.length) for _ in range(2)), strict=True), strict=True
    ):
        batch.append(torch.stack([*others[:place], t, *others[place:]]))
    turned = one.chance.random() < 0.5
    if turned:
        batch = [t.transpose(1, 2) for t in batch]
    out, lse = tilefold.attention(*batch, layout="bhsd" if turned else "bshd", return_lse=True, **one.options)
    one.check(0, (out.transpose(1, 2) if turned else out)[place], lse[place], f"as number {place} of 3")


def padded(one: Drawn) -> None:
    """Others' tokens behind."""
    more = one.other(one.chance.randint(1, 40))
    out, lse = tilefold.attention(
        *(torch.cat(pair)[None] for pair in zip((one.q, one.k, one.v), more, strict=True)),
        return_lse=True,
        **one.options,
    )
    one.check(0, out[0, : one.length], lse[0, :, : one.length], f"with {len(more[0])} tokens of padding")


def packed(one: Drawn) -> None:
    """The last queries, behind others of a packed batch."""
    first, place = one.some(), one.chance.randrange(3)
    others = [one.other(one.chance.randint(0, 30)) for _ in range(2)]
    mine = [one.q[first:], one.k, one.v]
    each = [*others[:place], mine, *others[place:]]
    q, k, v = (torch.cat(tensors) for tensors in zip(*each, strict=True))
    cu = [torch.tensor([0, *torch.tensor([len(s[i]) for s in each]).cumsum(0)], dtype=torch.int32) for i in (0, 1)]
    longest = [max(len(s[i]) for s in each) for i in (0, 1)]
    out, lse = tilefold.attention_varlen(
        q, k, v, cu[0].to(q.device), cu[1].to(q.device), *longest, return_lse=True, **one.options
    )
    begin, end = cu[0][place], cu[0][place + 1]
    one.check(first, out[begin:end], lse[:, begin:end], f"packed as number {place} of 3")


def over_a_cache(one: Drawn) -> None:
    """A chunk of its prompt, or its last token, over a cache in one piece or in pages, beside another sequence."""
    first, other = one.some(), one.other(one.chance.randint(1, 50))
    end = one.chance.choice([first + 1, one.length, one.chance.randint(first + 1, one.length)])
    room = max(end, len(other[0])) + one.chance.choice([0, 3, 100])
    caches = []
    for mine, its in zip((one.k, one.v), other[1:], strict=True):
        cache = rand(2, room, *mine.shape[1:], dtype=mine.dtype, device=mine.device)
        cache[1, :end], cache[0, : len(its)] = mine[:end], its
        caches.append(cache)
    q = torch.stack([rand(end - first, *one.q.shape[1:], dtype=one.q.dtype, device=one.q.device), one.q[first:end]])
    options = {**one.options, "num_splits": one.chance.choice([0, 1, 2, 5])}
    page = one.chance.choice([0, *one.pages])
    lengths = torch.tensor([len(other[0]), end], dtype=torch.int32, device=q.device)
    if page:
        both, options["block_table"] = in_pages(torch.cat(caches, -1), page)
        caches = list(both.split([one.k.shape[-1], one.v.shape[-1]], -1))
    out, lse = tilefold.attention_kvcache(q, *caches, cache_seqlens=lengths, return_lse=True, **options)
    one.check(
        first, out[1], lse[1], f"over a cache of {room} rows, pages of {page}, num_splits={options['num_splits']}"
    )


def in_the_paged_cache(one: Drawn) -> None:
    """Its prompt in chunks and its last tokens one by one, beside a sequence that grows as well; perhaps a shared prefix."""
    chance, kv_heads = one.chance, one.k.shape[1]
    options = {key: value for key, value in one.options.items() if key != "causal"}
    page = chance.choice(one.pages)
    rows = one.length + 64
    cache = tilefold.PagedKVCache(
        1, kv_heads, one.k.shape[-1], head_dim_v=one.v.shape[-1], num_pages=3 * (-(-rows // page) + 1), page_size=page,
        max_sequences=3, max_tokens=rows, dtype=one.k.dtype, device=one.k.device,
    )  # fmt: skip
    neighbour, mine, at = cache.add(), cache.add(), 0
    while at < one.length:
        if at and chance.random() < 0.2:  # from here on in a fork, whose first pages are shared
            mine, before = cache.fork(mine), mine
            cache.free(before)
        end = min(one.length, at + chance.choice([1, 1, 5, 33, one.length]))
        counts = [chance.choice([0, 1, 2]) if cache.length(neighbour) < 60 else 0, end - at]
        batch = cache.batch([neighbour, mine], counts)
        theirs = one.other(counts[0])
        q, k, v = (torch.cat([t, m[at:end]]) for t, m in zip(theirs, (one.q, one.k, one.v), strict=True))
        cache.append(0, k, v, batch)
        out, lse = cache.attend(0, q, batch, True, return_lse=True, **options)
        one.check(
            at, out[counts[0] :], lse[:, counts[0] :], f"in the paged cache, pages of {page}, tokens {at} to {end}"
        )
        at = end


def behind_a_shared_prefix(one: Drawn) -> None:
    """The last token, where two sequences share their first keys."""
    if one.length < 2 or not set(one.options) <= {"numerics", "scale", "causal", "softcap", "sinks"}:
        return
    prefix = one.chance.randrange(one.length - 1)
    k, v = (torch.stack([t, t.clone()]) for t in (one.k, one.v))
    for t in (k, v):
        t[0, prefix:] = rand(*t[0, prefix:].shape, dtype=t.dtype, device=t.device)
    q = torch.stack([one.q[-1:].flip(-1), one.q[-1:]])
    lengths = torch.full((2,), one.length, dtype=torch.int32, device=q.device)
    out, lse = tilefold.attention_shared_prefix(
        q, k, v, prefix_length=prefix, cache_seqlens=lengths, return_lse=True, **one.options
    )
    one.check(one.length - 1, out[1], lse[1], f"behind a shared prefix of {prefix}")


WAYS: tuple[Callable[[Drawn], None], ...] = (
    in_a_batch, padded, packed, over_a_cache, in_the_paged_cache, behind_a_shared_prefix,
)  # fmt: skip
