"""The attention backend of vLLM: decoding, prompts, chunks of prompts and batches of them all, over its paged KV cache.

vLLM says which tokens are new, where each one's key and value go (a slot), and by which pages each request's keys are found.  So
a layer is two calls: `kvcache_append`, each token as a sequence of its own, and `attention_kvcache` over packed queries.

Contract: vllm/v1/attention/backend.py of vLLM 0.33 (https://github.com/vllm-project/vllm).  A cache is [blocks, KV heads, block
size, 2 * head dim], K before V, of any strides.  tests/vllm_contract.py holds the signatures to an installed vLLM."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from ..cache_api import attention_kvcache, kvcache_append
from ..errors import ShapeError, Unsupported
from ..plan.problem import MAX_HEAD_DIM

__all__ = ["TilefoldBackend", "TilefoldBuilder", "TilefoldImpl", "TilefoldMetadata"]

CODED = ("fp8", "fp8_e4m3")
PAGE = 16  # smallest block; larger ones are multiples


class TilefoldBackend(AttentionBackend):
    """What vLLM asks before it chooses a backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *CODED]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["TilefoldImpl"]:
        return TilefoldImpl

    @staticmethod
    def get_builder_cls() -> type["TilefoldBuilder"]:
        return TilefoldBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(PAGE)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    supports_sliding_window = supports_non_causal = supports_batch_invariance = supports_sink

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8  # type: ignore[no-any-return]


@dataclass
class TilefoldMetadata(AttentionMetadata):
    """A batch.  cu_q [requests + 1], lengths [requests]: int32, keys of each request with its new ones.  table [requests,
    pages] int32.  page, row [tokens]: of each new token's slot, int32; row is the block size where it has none."""

    tokens: int
    max_q: int
    cu_q: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    page: torch.Tensor
    row: torch.Tensor
    causal: bool


class TilefoldBuilder(AttentionMetadataBuilder[TilefoldMetadata]):
    """Makes a batch's record, once a step for all layers of a kind.  Slots are split in buffers that stay where they are, so a
    CUDA graph of a decoding step may read them."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block = int(kv_cache_spec.block_size)
        most = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self.page, self.row = (torch.zeros(most, dtype=torch.int32, device=device) for _ in range(2))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TilefoldMetadata:
        """common_attn_metadata: vLLM's CommonAttentionMetadata."""
        given = common_attn_metadata
        if isinstance(given.causal, torch.Tensor):
            raise Unsupported("tilefold's vLLM backend has one causal flag for a batch, not one for each request")
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens", "dcp_local_seq_lens"):
            if getattr(given, name, None) is not None:
                raise Unsupported(f"tilefold's vLLM backend does not take {name}")
        slots = given.slot_mapping
        n = slots.shape[0]
        if n > self.page.shape[0]:
            raise ShapeError(f"slot_mapping has {n} tokens, max_num_batched_tokens is {self.page.shape[0]}")
        page, row = self.page[:n], self.row[:n]
        page.copy_(slots.clamp(min=0) // self.block)
        row.copy_(torch.where(slots < 0, self.block, slots % self.block))
        return TilefoldMetadata(given.num_actual_tokens, given.max_query_len, given.query_start_loc, given.seq_lens,
                                given.block_table_tensor, page, row, bool(given.causal))  # fmt: skip


class TilefoldImpl(AttentionImpl[TilefoldMetadata]):
    """One layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        """sliding_window: keys that a query sees, its own included.  sinks: [num_heads].  kv_sharing_target_layer_name: the layer
        that writes the cache which this one reads.  others: refused, but for what says that something is off."""
        if attn_type != AttentionType.DECODER:
            raise Unsupported(f"attn_type is {attn_type!r}: tilefold's vLLM backend serves decoder attention")
        if kv_cache_dtype not in TilefoldBackend.supported_kv_cache_dtypes:
            accepted = ", ".join(map(repr, TilefoldBackend.supported_kv_cache_dtypes))
            raise Unsupported(f"kv_cache_dtype is {kv_cache_dtype!r}, expected one of {accepted}")
        if on := [name for name, value in others.items() if value not in (None, False, -1)]:
            raise Unsupported(f"tilefold's vLLM backend does not take {on[0]}={others[on[0]]!r}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.writes = kv_cache_dtype, kv_sharing_target_layer_name is None
        self.window = None if sliding_window is None else sliding_window - 1
        self.options: dict[str, Any] = {
            "softcap": float(logits_soft_cap or 0.0),
            "alibi_slopes": None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32),
            "sinks": sinks,
            "numerics": "invariant" if envs.VLLM_BATCH_INVARIANT else None,
        }

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TilefoldMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values to the cache, and attend.

        Args:
            layer: with `_k_scale` and `_v_scale`, tensors of one number, for a cache in e4m3.
            query: [tokens, heads, dim]; key, value: [tokens, KV heads, dim]; tokens behind those of the batch are padding.
            kv_cache: [blocks, KV heads, block size, 2 * dim]; e4m3 also as bytes.
            attn_metadata: None in vLLM's profiling run.
            output: [tokens, heads, dim] or [tokens, heads * dim], written.

        Raises:
            Unsupported for an output in 8 bits."""
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("tilefold's vLLM backend writes no quantized output")
        if attn_metadata is None:
            return output.fill_(0)
        batch, scales = attn_metadata, self._scales(layer)
        k_cache, v_cache = self._caches(kv_cache)
        if self.writes and key is not None:
            self._write(key, value, k_cache, v_cache, batch, scales)
        options = self.options
        if options["alibi_slopes"] is not None and options["alibi_slopes"].device != query.device:
            options["alibi_slopes"] = options["alibi_slopes"].to(query.device)
        window = None if self.window is None else (self.window, 0 if batch.causal else self.window)
        out = attention_kvcache(
            query[: batch.tokens], k_cache, v_cache, cache_seqlens=batch.lengths, block_table=batch.table,
            cu_seqlens_q=batch.cu_q, max_seqlen_q=batch.max_q, causal=batch.causal, window=window, scale=self.scale, **options,
            **scales,
        )  # fmt: skip
        output.view(-1, self.num_heads, self.head_size)[: batch.tokens].copy_(out)
        return output

    def _caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [blocks, block size, KV heads, dim], views."""
        if self.kv_cache_dtype in CODED:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, -1)
        return k_cache, v_cache

    def _scales(self, layer: Any) -> dict[str, Any]:
        """Factors of each KV head of a cache in e4m3, by names of `attention_kvcache`."""
        if self.kv_cache_dtype not in CODED:
            return {}
        pairs = (("k_scale", layer._k_scale), ("v_scale", layer._v_scale))
        return {name: scale.float().reshape(1).expand(self.num_kv_heads) for name, scale in pairs}

    def _write(
        self, key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        batch: TilefoldMetadata, scales: dict[str, Any],
    ) -> None:  # fmt: skip
        """Each new token to its slot: a sequence of one token, whose cache is a page."""
        n = min(key.shape[0], batch.row.shape[0])
        key, value, row, page = key[:n], value[:n], batch.row[:n], batch.page[:n]
        if not key.is_cuda:  # there a row behind the page is an error; on a GPU it is not written
            held = row < k_cache.shape[1]
            key, value, row, page = (t[held] for t in (key, value, row, page))
        kvcache_append(
            key[:, None],
            value[:, None],
            k_cache,
            v_cache,
            cache_seqlens=row,
            block_table=page[:, None],
            check=False,
            **scales,
        )
