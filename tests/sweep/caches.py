"""KV caches as a problem has them: in rows, chosen rows or pages; in floats or 8 bits; what lies beside the keys is unusable."""

from typing import Any

import torch

from .context import Context
from .dense_run import DTYPES

PAGES = ("16", "1", "odd", "64", "100", "256")
STORES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
NOWHERE = 1 << 30


def page_of(rng: Any, kind: str) -> int:
    return rng.choice((3, 5, 7, 11, 33)) if kind == "odd" else int(kind)


def bits(x: torch.Tensor) -> torch.Tensor:
    """x, or its bytes where its dtype is one that torch does not index everywhere."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


class Caches:
    """K and V of a batch: `k`, `v` as calls take them, `where` their keywords, `rows(b)` the place of each key of a sequence.

    place: "rows", "indexed" or "pages".  room: rows of each sequence.  shared: its first so many rows are everyone's."""

    def __init__(
        self, ctx: Context, o: dict[str, Any], dims: dict[str, Any], batch: int, kv: int, room: int, shared: int = 0
    ) -> None:
        self.ctx, self.o, self.dims, self.batch, self.kv = ctx, o, dims, batch, kv
        self.page = dims.get("page", 0) if o["place"] == "pages" else 0
        self.kind = STORES.get(o["store"], DTYPES[o["dtype"]])
        if self.page:
            count = -(-room // self.page)
            self.each, self.room = count, count * self.page
            order = torch.randperm(
                batch * count + 2, generator=torch.Generator().manual_seed(ctx.rng.randrange(1 << 30))
            )
            self.table = order[: batch * count].view(batch, count)
            self.table[:, : shared // self.page] = self.table[:1, : shared // self.page]
            self.shape = batch * count + 2, self.page
        else:
            extra = 2 if o["place"] == "indexed" else 0
            self.room, self.shape = room, (batch + extra, room)
            self.index = list(range(batch + extra))
            if extra:
                ctx.rng.shuffle(self.index)
        self.scales: dict[str, torch.Tensor] = {}

    def rows(self, b: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The two numbers that find each key of sequence b."""
        j = torch.arange(first, last)
        if self.page:
            return self.table[b][j // self.page].to(self.ctx.device), (j % self.page).to(self.ctx.device)
        return torch.full_like(j, self.index[b]).to(self.ctx.device), j.to(self.ctx.device)

    def where(self, lengths: list[int]) -> dict[str, torch.Tensor]:
        """block_table (with nowhere behind each sequence's last key) or cache_batch_idx."""
        if self.page:
            table = self.table.clone()
            for b, n in enumerate(lengths):
                table[b, -(-n // self.page) :] = NOWHERE
            return {"block_table": self.ctx.whole(table.tolist()) if table.numel() else table.int().to(self.ctx.device)}
        if self.o["place"] == "indexed":
            return {"cache_batch_idx": self.ctx.whole(self.index[: self.batch])}
        return {}

    def factors(self, name: str, value: float) -> torch.Tensor:
        """A factor a head, or one a head and page, around `value`."""
        shape = (self.kv,) if self.o["scales"] == "head" else (self.shape[0], self.kv)
        self.scales[name] = self.ctx.uniform(*shape, low=0.7 * value, high=1.3 * value)
        return self.ctx.place(self.scales[name])

    def empty(self, dim: int) -> torch.Tensor:
        """NaN, or the largest code, everywhere."""
        fill = 127 if self.kind == torch.int8 else float("nan")
        made = torch.full((*self.shape, self.kv, dim), fill, device=self.ctx.device, dtype=torch.float32)
        return made.to(self.kind)

    def filled(self, dim: int, spans: list[tuple[int, int]]) -> torch.Tensor:
        """Random keys in rows first to last - 1 of each sequence, nothing usable elsewhere."""
        made = self.empty(dim)
        for b, (first, last) in enumerate(spans):
            bits(made)[self.rows(b, first, last)] = bits(self.values(max(0, last - first), self.kv, dim))
        return made

    def values(self, *shape: int) -> torch.Tensor:
        x = self.ctx.normal(*shape)
        return (x * 40).round().clamp(-127, 127).to(torch.int8) if self.kind == torch.int8 else x.to(self.kind)

    def exact(self, cache: torch.Tensor, name: str, b: int, first: int, last: int) -> torch.Tensor:
        """Keys of sequence b in fp64, factors applied."""
        at = self.rows(b, first, last)
        found = bits(cache)[at].view(cache.dtype).double()
        if name in self.scales:
            f = self.scales[name].double()
            found = found * (f[at[0]] if f.dim() == 2 else f)[..., None]
        return found
