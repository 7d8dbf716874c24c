"""The paged KV cache: pages for many sequences and all layers, written and attended through batches."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ..cache_formats import listed
from ..check import CODED, FLOATS, check_whole
from ..errors import DeviceError, DtypeError, ShapeError, ValueRangeError
from ..keywords import unexpected
from .allocator import PageAllocator
from .batch import CacheBatch
from .pool import PagePool
from .scales import Scales, scales_of
from .staging import Staging
from .statistics import CacheStatistics

__all__ = ["PagedKVCache"]

OPTIONS = ("window", "scale", "softcap", "alibi_slopes", "sinks", "num_splits", "numerics")


class PagedKVCache:
    """Keys and values of many sequences in pages of page_size tokens; a page id stands for one page in every layer.

    Args:
        layers, kv_heads, head_dim: of the model; head_dim_v: of V, by default head_dim.
        num_pages, page_size: what is allocated, all of it here.
        max_sequences, max_tokens: the most sequences at a time, and the most tokens of one.
        dtype: float16, bfloat16 or float32, or float8_e4m3fn or int8.
        device: where the pages lie, a GPU or the CPU.
        k_scale, v_scale: with a dtype of 8 bits, fp32 [kv_heads] or [layers, kv_heads], greater than 0: what stands in the
            pages is to be multiplied by its head's factor (`quantize_kv` finds such factors).  Read and copied here.  Needed for
            int8, 1 by default for e4m3.

    It has k[layer] and v[layer], [num_pages, page_size, kv_heads, dim]; k_scale and v_scale, [layers, kv_heads] fp32, None in
    floats; and allocator, who owns which page.

    Which page a sequence gets is decided on the host, from the calls alone, and nothing waits for the device.  All device work
    goes to the current stream: use one cache from one stream, or order the streams yourself; a page that is given back may be
    written by the next call.  Raises DtypeError, DeviceError, ValueRangeError, all before anything is changed."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        num_pages: int,
        page_size: int = 16,
        max_sequences: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        head_dim_v: int | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        self.layers = check_whole("layers", layers, 1)
        self.kv_heads = check_whole("kv_heads", kv_heads, 1)
        self.head_dim = check_whole("head_dim", head_dim, 1)
        self.head_dim_v = head_dim if head_dim_v is None else check_whole("head_dim_v", head_dim_v, 1)
        if dtype not in (*FLOATS, *CODED):
            raise DtypeError(f"dtype must be float16, bfloat16, float32, {listed('or')}, got {dtype}")
        self.allocator = PageAllocator(num_pages, page_size, max_sequences, max_tokens)
        self.page_size, self.num_pages = page_size, num_pages
        self.dtype, self.device = dtype, _device(device)
        scales = scales_of(dtype, k_scale, v_scale, layers, kv_heads, self.device)
        self.k_scale: torch.Tensor | None = scales[0] if scales else None
        self.v_scale: torch.Tensor | None = scales[1] if scales else None
        self._scales: list[Scales] = list(zip(*scales, strict=True)) if scales else [(None, None)] * layers
        self.staging = Staging(self.device)
        stored = torch.uint8 if dtype == torch.float8_e4m3fn else dtype  # bytes are copied and moved like any others
        self._pool = PagePool((layers, num_pages, page_size, kv_heads), head_dim, self.head_dim_v, stored, self.staging)
        self.k = list(self._pool.k.view(dtype).unbind())
        self.v = list(self._pool.v.view(dtype).unbind())

    def __repr__(self) -> str:
        return (
            f"PagedKVCache({self.layers} layers, {self.kv_heads} KV heads, head dim {self.head_dim}, {self.num_pages} pages of "
            f"{self.page_size}, {self.free_pages} free, {len(self.sequences)} sequences, {self.dtype}, {self.device})"
        )

    # ---------------------------------------------------------------- sequences

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids, oldest first, those swapped out included."""
        return self.allocator.sequences

    @property
    def free_pages(self) -> int:
        """Pages that no sequence owns."""
        return self.allocator.free

    @property
    def page_bytes(self) -> int:
        """Of one page, keys and values of all layers."""
        return self._pool.page_bytes

    def add(self, sequence: int | None = None) -> int:
        """A new, empty sequence; its id is `sequence`, or one never used before.  It takes no page yet."""
        return self.allocator.add(sequence)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence, those reserved by a batch included."""
        return self.allocator.find(sequence).length

    def pages(self, sequence: int) -> tuple[int, ...]:
        """The pages of a sequence, first rows first; negative ids are pages in host memory."""
        return tuple(self.allocator.find(sequence).pages)

    def is_swapped(self, sequence: int) -> bool:
        """Whether it has to be swapped in before it can be used."""
        return self.allocator.find(sequence).state == "swapped"

    def free(self, sequence: int) -> None:
        """Forget a sequence; pages that no other one owns are free."""
        self._pool.drop(self.allocator.free_sequence(sequence))

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first `length` tokens, as after a rejected draft."""
        self.allocator.truncate(sequence, length)

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens in the same pages, as for beams; whoever writes first into a shared page gets a
        copy of it.  Rows that a batch has reserved belong to it, so append them before."""
        return self.allocator.share(sequence)

    def share_prefix(self, sequence: int, tokens: int) -> int:
        """A new sequence that has the first `tokens` tokens of another, in the same pages; the last of these is copied when
        either one writes into it."""
        check_whole("tokens", tokens)
        return self.allocator.share(sequence, tokens)

    # ---------------------------------------------------------------- use

    def batch(
        self, sequences: Iterable[int], counts: int | Iterable[int] = 1, *, max_new: int | None = None
    ) -> CacheBatch:
        """Reserve counts (an int for all, or one for each, 0 allowed) new tokens of each sequence, and give the device tensors
        that `append` and `attend` need.  Pages that others own are copied first where new rows go.

        max_new: the most new tokens in all that `CacheBatch.next` will be asked for; by default one for each sequence, or those
        of this call if they are more.  Raises OutOfPages (needed, free, what could be freed), and ValueRangeError for unknown,
        repeated or swapped sequences and lengths over max_tokens; nothing has changed then."""
        return CacheBatch(self, sequences, counts, max_new)

    def append(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: CacheBatch,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        interleaved: bool = False,
    ) -> None:
        """Write keys and values of the batch's new tokens into one layer.

        k, v: packed [T, kv_heads, dim], or [B, S, kv_heads, dim] if every sequence gets S.  In the cache's dtype; any float
            for a cache in 8 bits, where what is stored is divided by its factor and rounded once, as `kvcache_append` does.
        rotary_cos, rotary_sin: [positions, pairs] float: k is turned by its row on the way; pairs are channels (2i, 2i + 1)
            if interleaved, else (i, i + pairs).

        One launch; no gradients: k and v are taken as detached."""
        from ..ops.cache.cache_append import Append, cache_append
        from ..ops.faults import asked

        caches = self._caches(layer, batch)
        rows = batch.as_rows("k", k), batch.as_rows("v", v)
        if isinstance(rotary_cos, torch.Tensor) and rotary_cos.dim() == 2 and rotary_cos.shape[0] < batch.longest:
            raise ShapeError(
                f"rotary_cos has {rotary_cos.shape[0]} positions, the batch's new rows reach {batch.longest}"
            )
        # That they fit is known: the batch has reserved them.  So no longest is given, which would be a record for each.
        offsets = batch.cu_seqlens_q if batch.count is None else None
        call = Append(
            *caches,
            *rows,
            batch.lengths_before,
            None,
            batch.block_table,
            rotary_cos,
            rotary_sin,
            interleaved,
            offsets,
            *self._scales[layer],
        )
        cache_append(call, asked(None, "kvcache_append"))

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        batch: CacheBatch,
        causal: bool = True,
        *,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        """Attention of the batch's new tokens over their sequences in one layer, forward only.

        q: packed [T, heads, dim], or [B, S, heads, dim] if every sequence has S, in the cache's dtype (any float over 8 bits);
        causal from the bottom right: each sees itself and what was before.  options: window, scale, softcap, alibi_slopes, sinks
        and numerics as for `tilefold.attention`, and num_splits (0: chosen).  Computed by what `tilefold.attention_kvcache`
        calls.  Returns out like q; with return_lse (out, lse), lse fp32 natural log [heads, T], or [B, heads, S]."""
        from ..ops.cache.kvcache import ATTENTION_KVCACHE
        from ..ops.call import Call
        from ..ops.faults import asked
        from ..ops.numerics import check_numerics
        from ..ops.source import Cache
        from ..ops.source import Scales as Factors

        caches = self._caches(layer, batch)
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise ValueRangeError(f"{unexpected('attend', unknown[0], OPTIONS)}; it takes {', '.join(OPTIONS)}")
        if not isinstance(return_lse, bool):
            raise DtypeError(f"return_lse must be a bool, got {return_lse!r}")
        rows = batch.as_rows("q", q)
        if q.dim() == 3 and batch.count != 1:  # one query each is the same batch without offsets
            rows = q
        splits, numerics = options.pop("num_splits", 0), check_numerics(options.pop("numerics", None))
        packed = rows.dim() == 3
        cache = Cache(
            batch.cache_seqlens, None, None, batch.block_table, batch.cu_seqlens_q if packed else None, None,
            batch.max_seqlen_q if packed else 0, 0, 0, splits,
        )  # fmt: skip
        factors = Factors(None, *self._scales[layer])
        call = Call(causal, **options, source=cache, scales=factors, numerics=numerics)
        out, lse = ATTENTION_KVCACHE(rows, *caches, call, asked(None, "attention_kvcache"))
        if rows.dim() != q.dim():
            out, lse = out.flatten(0, 1), lse[..., 0].T
        return (out, lse) if return_lse else out

    def _caches(self, layer: int, batch: CacheBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's pages for a batch that knows where its rows are now."""
        if not isinstance(batch, CacheBatch):
            raise DtypeError(f"batch must be what PagedKVCache.batch returned, got {type(batch).__name__}")
        if batch.cache is not self:
            raise ValueRangeError("batch belongs to another cache")
        if check_whole("layer", layer) >= self.layers:
            raise ValueRangeError(f"layer must be 0 to {self.layers - 1}, got {layer}")
        batch.check_current()
        return self.k[layer], self.v[layer]

    # ---------------------------------------------------------------- moving pages

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Enqueue the copies of pages (from, to), all layers; the allocator says which are due."""
        if pairs:
            self._pool.copy(pairs)

    def defragment(self) -> dict[int, int]:
        """Move pages so that those in use have the lowest ids; {old id: new id} of those that moved.

        Batches made before have to call `next`, or be made anew."""
        moves = self.allocator.defragment()
        self.copy_pages(moves)
        return dict(moves)

    def swap_out(self, sequence: int) -> int:
        """Copy a sequence's pages to pinned host memory and free them; how many.

        Pages that a sequence on the device owns, too, stay there.  The copy is enqueued, as is whatever writes the freed
        pages next: on one stream that is in order.  Where there is not enough host memory nothing has changed."""
        room = self._pool.host_memory(len(self.allocator.swappable(sequence)))  # before anything has changed
        moves = self.allocator.swap_out(sequence)
        self._pool.to_host(moves, room)
        return len(moves)

    def swap_in(self, sequence: int) -> int:
        """Bring a sequence back, into whichever pages are free; how many pages were copied.  Raises OutOfPages."""
        moves = self.allocator.swap_in(sequence)
        self._pool.from_host(moves)
        return len(moves)

    def statistics(self) -> CacheStatistics:
        """Pages and bytes as they are now."""
        found = self.allocator.statistics(self.page_bytes // self.page_size)
        return replace(found, scale_bytes=0 if self.k_scale is None else 8 * self.k_scale.numel())


def _device(device: torch.device | str) -> torch.device:
    """With its index, as tensors report it."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as wrong:
        raise DeviceError(f"device must be cuda or cpu, got {device!r}") from wrong
    if found.type not in ("cuda", "cpu"):
        raise DeviceError(f"device must be cuda or cpu, got {found}")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"device is {found}, but torch sees no GPU; on a CPU give device='cpu'")
    return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found
