"""Who makes a decoding step: tilefold, and the libraries it is compared with, each used if it can run here.

Those that know no pages or no quantised cache get the same numbers contiguous and in the queries' dtype, made before the clock
starts; their times are then of another number of bytes, and their outputs are judged like all others."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import tilefold
from tilefold.bench.decode.cases import DecodeCase
from tilefold.bench.decode.inputs import DecodeInputs
from tilefold.bench.family import Calls, Peer, each
from tilefold.bench.implementation import output_of, sdpa_only
from tilefold.errors import Unsupported
from tilefold.ops.environment import importable

# --- tilefold ---------------------------------------------------------------------------------------------------------------


def attend_cached(inputs: DecodeInputs) -> Callable[[], Tensor]:
    """The step as a user of tilefold calls it."""
    i, case = inputs, inputs.case
    options: dict[str, Any] = {"cache_seqlens": i.lengths, "block_table": i.table, "causal": case.causal}
    options |= {"k_scale": i.k_scale, "v_scale": i.v_scale} if case.cache else {}
    return lambda: tilefold.attention_kvcache(i.q, i.k_cache, i.v_cache, **options)


def _plain_refuses(case: DecodeCase, device: str) -> str | None:
    if case.plain == case:
        return "a row of its own for pages and quantised caches only"
    return "lengths differ: contiguous it would be padded to the longest" if case.uneven else None


OWN = (
    Peer("tilefold", "tilefold", "tilefold.attention_kvcache", "tilefold", each(attend_cached)),
    Peer("plain", "tilefold plain", "the same with the cache contiguous and in the queries' dtype", "tilefold",
         each(lambda inputs: attend_cached(inputs.plain)), _plain_refuses),
)  # fmt: skip


# --- torch ------------------------------------------------------------------------------------------------------------------


def _sdpa_refuses(backend: str) -> Callable[[DecodeCase, str], str | None]:
    def refuses(case: DecodeCase, device: str) -> str | None:
        if case.uneven:
            return "it knows no lengths"
        if backend == "math":
            return None
        if device != "cuda":
            return "needs a GPU"
        return "takes float16 and bfloat16 only" if case.dtype == "float32" else None

    return refuses


def _prepare_sdpa(backend: str) -> Callable[[Sequence[DecodeInputs]], Calls]:
    def attend(inputs: DecodeInputs) -> Callable[[], Tensor]:
        from torch.nn.attention.bias import causal_lower_right
        from torch.nn.functional import scaled_dot_product_attention

        i = inputs.plain
        case, grouped = i.case, i.case.heads != i.case.kv_heads
        mask: Any = None
        if case.causal and backend == "flash":  # it knows this mask, but takes no tensor
            mask = causal_lower_right(case.queries, case.longest)
        elif case.causal:
            mask = torch.ones(case.queries, case.longest, dtype=torch.bool, device=i.q.device)
            mask = mask.tril(case.longest - case.queries)
        q, k, v = (t.transpose(1, 2) for t in (i.q, i.k_cache, i.v_cache))
        return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)

    return each(attend, lambda: sdpa_only(backend))


def _prepare_flex(sets: Sequence[DecodeInputs]) -> Calls:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # else the cases would run into the limit of recompilations
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    case, lengths, queries = sets[0].case, sets[0].lengths, sets[0].case.queries
    grouped, mask = case.heads != case.kv_heads, None

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= row + lengths[batch] - queries

    if case.uneven or case.causal:  # one mask for all sets, whose lengths are the same: another would be compiled again
        mask = create_block_mask(sees, case.batch, None, queries, case.longest, device=sets[0].q.device)

    def attend(inputs: DecodeInputs) -> Callable[[], Tensor]:
        i = inputs.plain
        q, k, v = (t.transpose(1, 2) for t in (i.q, i.k_cache, i.v_cache))
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped).transpose(1, 2)

    return Calls([attend(one) for one in sets])


def _flex_refuses(case: DecodeCase, device: str) -> str | None:
    return None if device == "cuda" else "compiled FlexAttention needs a GPU"


# --- FlashAttention-4 (CuTe DSL) --------------------------------------------------------------------------------------------


def _fa4_refuses(case: DecodeCase, device: str) -> str | None:
    if not importable("flash_attn.cute"):
        return "flash-attn-4 is not installed"
    if device != "cuda":
        return "needs a GPU"
    return "takes float16 and bfloat16 only" if case.dtype == "float32" else None


def _prepare_fa4(sets: Sequence[DecodeInputs]) -> Calls:
    interface: Any = importlib.import_module("flash_attn.cute")
    if sets[0].case.uneven:
        known = inspect.signature(interface.flash_attn_varlen_func).parameters
        if missing := [name for name in ("seqused_k", "page_table") if name not in known]:
            raise Unsupported(f"this version's flash_attn_varlen_func has no {missing[0]}")

    def attend(inputs: DecodeInputs) -> Callable[[], Tensor]:
        i = inputs if inputs.case.uneven and not inputs.case.cache else inputs.plain
        options: dict[str, Any] = {"causal": i.case.causal}
        function = interface.flash_attn_func
        if i.case.uneven:
            function = interface.flash_attn_varlen_func
            options |= {"seqused_k": i.lengths} | ({} if i.table is None else {"page_table": i.table})
        return lambda: output_of(function(i.q, i.k_cache, i.v_cache, **options))

    return Calls([attend(one) for one in sets])


TORCH_AND_FA4 = (
    *(
        Peer(name, title, what, "torch", _prepare_sdpa(name), _sdpa_refuses(name))
        for name, title, what in (
            ("cudnn", "cuDNN", "torch SDPA, cuDNN backend"),
            ("flash", "FA2", "torch SDPA, flash backend (FlashAttention-2)"),
            ("math", "math", "torch SDPA, math backend"),
        )
    ),
    Peer("fa4", "FA4", "flash_attn.cute, if installed", "flash-attn-4", _prepare_fa4, _fa4_refuses),
    Peer("flex", "Flex", "torch FlexAttention, compiled", "torch", _prepare_flex, _flex_refuses),
)
