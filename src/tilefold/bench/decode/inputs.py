"""The tensors of a decoding step, and whether a result of one is right: against fp64, sequence by sequence."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tilefold import reference
from tilefold.bench.decode.cases import DecodeCase
from tilefold.bench.judge import verdict_of
from tilefold.reference import Comparison

# Spread of quantised elements, in their own units, of normally distributed values: most of the range, hardly any cut off.
SPREAD = {"fp8": 32.0, "int8": 36.0}


@dataclass(frozen=True)
class DecodeInputs:
    """q [B, Sq, H, D]; the caches [B, longest, Hkv, D or Dv], or [pages, page, Hkv, D or Dv] with table [B, most pages] int32;
    lengths [B] int32 of all keys; k_scale and v_scale fp32 [Hkv] of a quantised cache: a value is its element times that."""

    case: DecodeCase
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Of `attention_kvcache` and its plan."""
        found = {"cache_seqlens": self.lengths, "block_table": self.table, "causal": self.case.causal}
        return found | ({"k_scale": self.k_scale, "v_scale": self.v_scale} if self.case.cache else {})

    @cached_property
    def plain(self) -> "DecodeInputs":
        """The same numbers contiguous and in the queries' dtype, for those who know neither pages nor quantised caches; these
        inputs themselves if they are."""
        if self.case.plain == self.case:
            return self
        k = self._plain(self.k_cache, self.k_scale)
        v = k[..., : self.case.dim_v] if self.case.shared else self._plain(self.v_cache, self.v_scale)
        return DecodeInputs(self.case.plain, self.q, k, v, self.lengths)

    def _plain(self, cache: Tensor, scale: Tensor | None) -> Tensor:
        """A cache as [B, longest, Hkv, D] in the queries' dtype."""
        rows = _as_bytes(cache)
        if self.table is not None:
            rows = rows[self.table.long()].flatten(1, 2)[:, : self.case.longest].contiguous()
        rows = rows.view(cache.dtype)
        if scale is None:
            return rows
        return torch.stack([(one.float() * scale[:, None]).to(self.q.dtype) for one in rows])

    def sequence(self, b: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [1, length, Hkv, D or Dv] of a sequence in a dtype."""
        n = self.case.lengths[b]

        def rows(cache: Tensor, scale: Tensor | None) -> Tensor:
            if self.table is None:
                mine = cache[b]
            else:
                mine = _as_bytes(cache)[self.table[b, : self.case.pages[b]].long()].flatten(0, 1).view(cache.dtype)
            found = mine[None, :n].to(dtype)
            return found if scale is None else found * scale[:, None].to(dtype)

        return rows(self.k_cache, self.k_scale), rows(self.v_cache, self.v_scale)


def _as_bytes(cache: Tensor) -> Tensor:
    """e4m3, which torch does not gather, as the bytes that it is; others as they are."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def make_decode_inputs(case: DecodeCase, device: str, seed: int = 0) -> DecodeInputs:
    """Standard-normal queries, keys and values, the same for a seed and device.  Pages lie in random order in a pool that they
    fill; entries of the table past a sequence's last page are 0."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def cache(dim: int) -> tuple[Tensor, Tensor | None]:
        where = (sum(case.pages), case.page) if case.page else (case.batch, case.longest)
        made = normal(*where, case.kv_heads, dim)
        if not case.cache:
            return made, None
        spread = SPREAD[case.cache]
        scale = (0.5 + torch.rand(case.kv_heads, generator=generator, device=device)) / spread
        made *= spread
        return made.to(torch.float8_e4m3fn) if case.cache == "fp8" else made.clamp_(-127, 127).to(torch.int8), scale

    q = normal(case.batch, case.queries, case.heads, case.dim_qk)
    k, k_scale = cache(case.dim_qk)
    v, v_scale = (k[..., : case.dim_v], k_scale) if case.shared else cache(case.dim_v)
    table = _table(case, generator.manual_seed(seed + 1), device) if case.page else None
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    return DecodeInputs(case, q, k, v, lengths, table, k_scale, v_scale)


def _table(case: DecodeCase, generator: torch.Generator, device: str) -> Tensor:
    order = torch.randperm(sum(case.pages), generator=generator, device=device).int()
    table = torch.zeros(case.batch, max(case.pages), dtype=torch.int32, device=device)
    for b, mine in enumerate(order.split(case.pages)):
        table[b, : len(mine)] = mine
    return table


class DecodeJudge:
    """The reference of one step: `tilefold.reference.attention` in fp64, and the same one standard deviation off, which
    says how much error the queries' dtype allows.  Every sequence and head; one sequence at a time is in memory."""

    def __init__(self, inputs: DecodeInputs) -> None:
        self.inputs = inputs
        self.want, self.plain = (self._computed(dtype) for dtype in (torch.float64, inputs.q.dtype))

    def _computed(self, dtype: torch.dtype) -> Tensor:
        i, outs = self.inputs, []
        for b in range(i.case.batch):
            k, v = i.sequence(b, dtype)
            outs.append(reference.attention(i.q[b : b + 1], k, v, causal=i.case.causal, dtype=dtype)[0])
        return torch.cat(outs)

    def verdict(self, out: Tensor) -> Comparison:
        """Judge an output [B, Sq, H, Dv]."""
        return verdict_of((out,), [(out, self.want, self.plain)])
