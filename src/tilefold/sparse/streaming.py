"""Sparse video attention over a growing cache: new tokens attend all that came before them, block by block.

A block's keys and values are written once, and its row of the coarse branch is made once, when the block comes.
"""

from typing import Any

import torch

from .. import sparse_attention, sparse_attention_paged
from ..check import FLOATS, TensorSpec, bind, check_share
from ..errors import DtypeError, ShapeError, Unsupported
from ..plan.sparse.select import kept_blocks
from ..types import Layout
from .coarse import attend_rows, project
from .fuse import fuse
from .select import select as select_blocks
from .select_arguments import kept_by
from .stages import CoarseOptions, SelectOptions, Stages


class VideoCache:
    """Keys, values and rows of the blocks of `batch` sequences that grow together, in memory of a fixed size.

    Args:
        batch, capacity: sequences, and the most tokens of one, whole blocks.
        kv_heads, dim, dim_v: of K and V; dim_v None: dim.
        block: tokens of a block.
        page_size: None: K [batch, capacity, kv_heads, dim] in one piece; else in pages [pages, page_size, kv_heads, dim] that
            block_table int32 [batch, ceil(capacity / page_size)] names (made here, pages in order).
        dtype, device: of K and V.

    Attributes (change them only by `append` and `clear`):
        k, v: as said.  rows_k, rows_v: [batch, blocks, kv_heads, dim].
        block_sizes: int32 [batch, blocks], valid tokens of each block, 0 for those that are still to come.
        lengths: int32 [batch], tokens so far.  tokens: the same as a number, which graph replays do not change.

    Memory: (capacity + blocks) * kv_heads * (dim + dim_v) numbers a sequence.
    Raises ShapeError, ValueRangeError, naming the argument.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_heads: int,
        dim: int,
        dim_v: int | None = None,
        *,
        block: int = 64,
        page_size: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        dim_v = dim if dim_v is None else dim_v
        sizes = {"batch": batch, "capacity": capacity, "kv_heads": kv_heads, "dim": dim, "dim_v": dim_v, "block": block}
        if page_size is not None:
            sizes["page_size"] = page_size
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise ShapeError(f"{name} must be an integer of at least 1, got {value!r}")
        if capacity % block:
            raise ShapeError(f"capacity must be whole blocks of {block} tokens, got {capacity}")
        if dtype not in FLOATS:
            raise DtypeError(f"dtype must be float16, bfloat16 or float32, got {dtype}")
        self.block, self.capacity, self.page_size, self.tokens = block, capacity, page_size, 0
        self.block_table, places = None, (batch, capacity)
        if page_size is not None:
            pages = -(-capacity // page_size)
            self.block_table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
            places = (batch * pages, page_size)
        self.k, self.v = (torch.zeros(*places, kv_heads, d, dtype=dtype, device=device) for d in (dim, dim_v))
        self.rows_k, self.rows_v = (
            torch.zeros(batch, capacity // block, kv_heads, d, dtype=dtype, device=device) for d in (dim, dim_v)
        )
        self.block_sizes = torch.zeros(batch, capacity // block, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def blocks(self) -> int:
        """How many blocks there is room for."""
        return self.capacity // self.block

    def __repr__(self) -> str:
        where = "" if self.page_size is None else f", pages of {self.page_size}"
        return f"VideoCache({self.batch} x {self.tokens} of {self.capacity} tokens in blocks of {self.block}{where})"

    def clear(self) -> None:
        """Forget everything; the memory stays."""
        self.lengths.zero_()
        self.block_sizes.zero_()
        self.tokens = 0

    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        weight_k: torch.Tensor | None = None,
        weight_v: torch.Tensor | None = None,
        block_sizes: torch.Tensor | None = None,
        layout: Layout = "bshd",
    ) -> None:
        """Write new blocks behind those that are there, and make their rows.

        Args:
            k, v: [batch, tokens, kv_heads, dim], whole blocks, in the cache's dtype; any strides.
            weight_k, weight_v: the coarse branch's projections of kind "block"; None: the mean.
            block_sizes: int32 [new blocks] or [batch or 1, new blocks]: their valid tokens; None: all.
            layout: "bhsd" for [batch, kv_heads, tokens, dim].

        No value is read on the host, so an append can be captured in a CUDA graph; its replays go on from `lengths`, and it is
        the caller's part that they stay within the capacity.  Raises ShapeError if there is no room; Unsupported for what
        requires a gradient.
        """
        refuse_gradients(k=k, v=v, weight_k=weight_k, weight_v=weight_v)
        if layout == "bhsd":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        self._check(k, v)
        new = k.shape[1]
        if self.tokens + new > self.capacity:
            raise ShapeError(f"k has {new} tokens, but the cache has room for {self.capacity - self.tokens} more")
        sizes = torch.full((1, new // self.block), self.block, dtype=torch.int32, device=k.device)
        if block_sizes is not None:
            names = ("batch|1 blocks", "blocks")
            spec = TensorSpec("block_sizes", names[block_sizes.dim() == 1], (torch.int32,))
            known = {"batch": self.batch, "blocks": new // self.block}
            bind((spec,), {"block_sizes": block_sizes}, known, beside=("k", k))
            sizes = block_sizes if block_sizes.dim() == 2 else block_sizes[None]
        blocks = self._next_blocks(new)
        places = self.lengths[:, None].long() + torch.arange(new, device=k.device)
        for stored, fresh in ((self.k, k), (self.v, v)):
            stored[self._places(blocks[0], places)] = fresh
        for rows, fresh, weight in ((self.rows_k, k, weight_k), (self.rows_v, v, weight_v)):
            rows[blocks] = project(fresh, weight, block_sizes=sizes, block=self.block)
        self.block_sizes[blocks] = sizes.expand(self.batch, -1)
        self.lengths += new
        self.tokens += new

    def take_back(self, tokens: int) -> None:
        """Forget what was appended since there were `tokens` tokens."""
        added = self.tokens - tokens
        self.lengths -= added
        self.block_sizes[self._next_blocks(added)] = 0
        self.tokens = tokens

    def _next_blocks(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the blocks of so many more tokens lie: (batch entry, block)."""
        device = self.lengths.device
        blocks = self.lengths[:, None].long() // self.block + torch.arange(tokens // self.block, device=device)
        return torch.arange(self.batch, device=device)[:, None], blocks

    def _places(self, batch: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where tokens lie: (batch entry, token), or (page, row)."""
        if self.block_table is None or self.page_size is None:
            return batch, places
        return self.block_table[batch, places // self.page_size].long(), places % self.page_size

    def _check(self, k: torch.Tensor, v: torch.Tensor) -> None:
        specs = (
            TensorSpec("k", "batch tokens kv_heads dim", FLOATS, contiguous_last=True),
            TensorSpec("v", "batch tokens kv_heads dim_v", FLOATS, same_dtype_as="k", contiguous_last=True),
        )
        known = {"batch": self.batch, "kv_heads": self.k.shape[2], "dim": self.k.shape[3], "dim_v": self.v.shape[3]}
        bind(specs, {"k": k, "v": v}, known=known, beside=("the cache", self.k))
        if k.dtype != self.k.dtype:
            raise DtypeError(f"k must have the cache's dtype {self.k.dtype}, got {k.dtype}")
        if k.shape[1] % self.block:
            raise ShapeError(f"k has {k.shape[1]} tokens: a cache grows by whole blocks of {self.block}")


def refuse_gradients(**tensors: torch.Tensor | None) -> None:
    """Unsupported, naming the tensor, if one of them would put the cache into a graph."""
    for name, t in tensors.items():
        if torch.is_grad_enabled() and isinstance(t, torch.Tensor) and t.requires_grad:
            raise Unsupported(f"{name} requires a gradient, but a cache passes none: call under torch.no_grad()")


def attend_cache(
    q: torch.Tensor,
    cache: VideoCache,
    *,
    coarse: CoarseOptions,
    select: SelectOptions,
    gate_coarse: torch.Tensor | None = None,
    gate_fine: torch.Tensor | None = None,
    scale: float | None = None,
    query_sizes: torch.Tensor | None = None,
    layout: Layout = "bshd",
) -> tuple[torch.Tensor, Any]:
    """(out, stages) of the newest tokens over everything that the cache holds; see `sparse_video_attention`.

    q: [batch, seq_q, heads, dim], the last seq_q tokens that were appended.  Forward only."""
    queries = q.shape[1 if layout == "bshd" else 2]
    if queries > cache.tokens:
        raise ShapeError(f"q has {queries} tokens, but the cache holds {cache.tokens}: queries are the last of them")
    sizes: dict[str, Any] = {"block_sizes": cache.block_sizes, "query_sizes": query_sizes}
    shared: dict[str, Any] = {"scale": scale, "layout": layout}
    rows_k, rows_v, k, v = cache.rows_k, cache.rows_v, cache.k, cache.v
    if layout == "bhsd":
        rows_k, rows_v, k, v = (t.transpose(1, 2) for t in (rows_k, rows_v, k, v))
    rough = attend_rows(q, rows_k, rows_v, reduction=coarse.reduction, block=cache.block, **sizes, **shared)
    chosen = select_blocks(
        rough.scores,
        **{**select.arguments(), **_share(select, cache), **_forced(select, cache, rough.scores)},
        block_q=cache.block,
        block_k=cache.block,
        seq_q=queries,
        seq_k=cache.capacity,
        **sizes,
    )
    if cache.block_table is None:
        fine, lse = sparse_attention(q, k, v, chosen.index, return_lse=True, **shared)
    else:
        fine, lse = sparse_attention_paged(
            q, k, v, chosen.index, cache.block_table, cache.lengths, return_lse=True, **shared
        )  # fmt: skip
    out = fuse(rough.out, fine, gate_coarse, gate_fine, layout=layout)
    return out, Stages(rough.out, rough.scores, chosen.gini, chosen.tau, chosen.mass, chosen.index, fine, lse)


def _share(select: SelectOptions, cache: VideoCache) -> dict[str, Any]:
    """A sparsity is a share of the blocks that are there, not of those that there is room for."""
    sparsity = select.sparsity
    if select.method != "top_k" or sparsity is None:
        return {}
    live = (cache.lengths // cache.block).double()[:, None, None]
    if isinstance(sparsity, torch.Tensor):
        return {"sparsity": None, "top_k": kept_by(sparsity[:, None] if sparsity.dim() == 1 else sparsity, live)}
    check_share("sparsity", sparsity)
    found: dict[str, Any] = {"sparsity": None, "top_k": kept_by(sparsity, live)}
    others = (select.capacity, select.max_blocks, select.force, select.local_window)
    if all(o is None for o in others) and not select.force_self and isinstance(select.min_blocks, int):
        found["capacity"] = max(kept_blocks(sparsity, cache.blocks), select.min_blocks, select.force_first)
    return found


def _forced(select: SelectOptions, cache: VideoCache, scores: torch.Tensor) -> dict[str, Any]:
    """The blocks that are always kept, counted from the newest block that is there and not from the end of the memory."""
    if not select.force_self and select.local_window is None:
        return {}
    q_blocks, kv_blocks = scores.shape[2:]
    places = torch.arange(kv_blocks, device=scores.device)
    newest = cache.lengths[:, None] // cache.block - q_blocks + torch.arange(q_blocks, device=scores.device)
    near = (places - newest[..., None]).abs() <= (select.local_window or 0)
    force = (near & (cache.block_sizes[:, None] > 0))[:, None]
    force = force if select.force is None else force | select.force
    return {"force_self": False, "local_window": None, "force": force}
