"""What users call of KV caches: sign, document, delegate."""

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .errors import DtypeError, Unsupported
from .keywords import refusing, unexpected, unexpected_of
from .masks import Mask
from .ops.cache import kvcache
from .ops.call import Call, check_kinds
from .ops.device import device_asked
from .ops.faults import asked, mode_of
from .ops.masking import Terms, spelled_for_cache
from .ops.numerics import check_numerics
from .ops.quantise import quantize_kv
from .ops.source import UNSCALED, Cache, Scales
from .ops.watch import refuse_batched, refuse_tangents, wants_gradient
from .scores import Score
from .types import Numerics, Window

if TYPE_CHECKING:
    from .plan import DecodePlan, Device, InvariantPlan

__all__ = [
    "attention_kvcache",
    "attention_kvcache_plan",
    "attention_shared_prefix",
    "kvcache_append",
    "merge_attention",
    "quantize_kv",
]


@refusing
def attention_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    mask: torch.Tensor | Mask | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    plan: "DecodePlan | InvariantPlan | None" = None,
    check: bool | str | None = None,
    score: Score | None = None,
    numerics: Numerics | None = None,
    **others: NoReturn,
) -> Any:
    """Attention of few queries a sequence over the keys of a cache: decoding, speculative decoding, chunks of prompts.

    Up to 128 rows a KV head (query heads x tokens) go to a kernel that reads keys once for all of them; with a plan, keys in 8
    bits or V as a part of K, all calls do.  Other prompts go to one whose tiles are of one head.

    Args:
        q: [batch, seq_q, heads, dim] fp16, bf16 or fp32; or packed, [total_q, heads, dim] with cu_seqlens_q and max_seqlen_q.
        k_cache: [caches, capacity, kv_heads, dim]; or [pages, page size, kv_heads, dim] with block_table, pages of any size.  In
            q's dtype, or float8_e4m3fn or int8 (see k_scale).  dim 1 to 512.
        v_cache: the same with dim_v, 1 to 512.  Where it is k_cache[..., :dim_v], its bytes are read once, and dims may be larger
            (MLA: 576 and 512).
        cache_seqlens: [batch] int32: keys in each cache, those of the queries' own tokens included: query i of a causal call
            sits at key cache_seqlens - seq_q + i.  None: all rows.
        block_table: [batch, pages] int32: key j of sequence b is row j % size of page block_table[b, j // size].  Entries behind
            a sequence's last key are not read.
        cache_batch_idx: [batch] int32: the cache of each sequence, where there are no pages; default: its own number.
        cache_leftpad: [batch] int32: the first rows of a cache that are no keys; cache_seqlens counts them.
        cu_seqlens_q: [batch + 1] int32: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q.
        max_seqlen_q: at least the longest sequence of cu_seqlens_q; only with it.
        causal: query i sees key j if j <= i + cache_seqlens - seq_q.
        window, scale, softcap, alibi_slopes, sinks: as for `attention`, of each sequence with its keys.
        mask: [batch or 1, heads or 1, seq_q or 1, capacity] bool: true where the query sees the key, by its number in its
            sequence; what lies behind the last key is not read.  Or a `Mask` of causal, windows and tensors, joined by &.
        k_scale, v_scale: [kv_heads] fp32, or [caches or pages, kv_heads], greater than 0: what stored elements are to be
            multiplied with, as `quantize_kv` gives and `kvcache_append` takes them.  Needed for int8, 1 by default for e4m3.
            bfloat16 queries meet such keys in float16, scaled by a power of two so that none is out of range.
        num_splits: 0: the keys of all sequences are shared out evenly over the device; 1 to 128: each sequence and head is
            cut into so many equal parts instead, so that its bits do not depend on the other sequences of the batch.
        return_lse: also return the logarithm of each row's softmax denominator.
        plan: a `DecodePlan` to follow exactly, made by `attention_kvcache_plan` and perhaps changed by dataclasses.replace.
        check: True: first read the index tensors and the factors that are used, and raise ValueRangeError naming the entry that
            is out of range.  "device": kernels follow no index out of a tensor and take note of it, and nothing waits:
            `last_fault` tells.  False: lengths past the cache's room count as the room, page numbers have to be right.  Default:
            what the environment variable TILEFOLD_CHECK (0, 1 or device) said when tilefold was imported, else False.
        score: a `Score` (`tilefold.scores`) of softcap and ALiBi, instead of softcap and alibi_slopes.
        numerics: as for `attention`; with "invariant" num_splits says how many programs share the keys, and moves no bit.

    Returns:
        out like q with dim_v; with return_lse (out, lse), lse [batch, heads, seq_q] or [heads, total_q] fp32, natural log.  A
        row without keys is 0 with lse -inf (the sink, if there are sinks).  The same bits every run.  Rows of q that belong to
        no sequence are not written.  Works under CUDA graphs and torch.compile.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError, PlanError, Unsupported: before anything is launched,
        naming the argument.  There are no gradients: a backward pass raises Unsupported.

    Source: Flash-Decoding (Dao et al. 2023), Stream-K (Osama et al. 2023, arXiv:2301.03598), PagedAttention (Kwon et al. 2023,
    arXiv:2309.06180)."""
    if others:
        raise unexpected_of(attention_kvcache, others)
    if type(return_lse) is not bool:
        check_kinds(return_lse)  # type: ignore[unreachable]
    checked = asked(check, "attention_kvcache")
    if isinstance(mask, Mask) or score is not None:
        terms = Terms(causal, window, softcap, alibi_slopes, None, mask)
        terms = _spelled(q, k_cache, terms, score, block_table, cu_seqlens_q, max_seqlen_q)
        causal, window, softcap, alibi_slopes, _, mask = terms[:6]
    cache = Cache(
        cache_seqlens, cache_leftpad, cache_batch_idx, block_table, cu_seqlens_q, None, max_seqlen_q, 0, 0, num_splits
    )
    scales = UNSCALED if k_scale is None and v_scale is None else Scales(None, k_scale, v_scale)
    call = Call(causal, window, scale, softcap, alibi_slopes=alibi_slopes, mask=mask, sinks=sinks, source=cache,  # type: ignore[arg-type]
                plan=plan, scales=scales, numerics=check_numerics(numerics))  # fmt: skip
    out, lse = kvcache.ATTENTION_KVCACHE(q, k_cache, v_cache, call, checked)
    return (out, lse) if return_lse else out


def attention_kvcache_plan(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    device: "str | Device | None" = None,
    **options: Any,
) -> "DecodePlan | InvariantPlan":
    """The plan that `attention_kvcache(q, k_cache, v_cache, **options)` follows, without running it; `print` it to read
    the decision, or change it by dataclasses.replace and give it as plan.  For prompts that go to the other kernel: the one that
    would be followed if it were given.  device: as for `attention_plan`.

    Raises what the call would raise before it reads a tensor, and Unsupported for a call without queries."""
    for name in options:
        if name not in (*_OPTIONS, "score"):
            raise unexpected("attention_kvcache_plan", name, _OPTIONS)
    check_kinds(options.get("return_lse", False))
    mode_of(options.get("check"))
    given = {name: options[name] for name in _OF_CALL if name in options}
    given["numerics"] = check_numerics(options.get("numerics"))
    if isinstance(given.get("mask"), Mask) or options.get("score") is not None:
        terms = Terms(**{name: value for name, value in given.items() if name in Terms._fields})
        table, cu_q, max_q = (options.get(name) for name in ("block_table", "cu_seqlens_q", "max_seqlen_q"))
        made = _spelled(q, k_cache, terms, options.get("score"), table, cu_q, max_q or 0)
        given |= {name: getattr(made, name) for name in _OF_CALL if name in Terms._fields}
    places = {field: options[name] for name, field in _OF_CACHE.items() if name in options}
    scales = Scales(None, options.get("k_scale"), options.get("v_scale"))
    call = Call(**given, source=Cache(**places), scales=scales, plan=options.get("plan"))
    return kvcache.plan_of(q, k_cache, v_cache, call, device_asked(device))


def _spelled(
    q: torch.Tensor, k_cache: torch.Tensor, given: Terms, score: Score | None, table: Any, cu_q: Any, max_q: int
) -> Terms:
    """Keywords with the mask and the score as kernels take them; what the tensors lack is left to the call's own checks."""
    if not all(isinstance(t, torch.Tensor) for t in (q, k_cache)) or q.dim() < 3 or k_cache.dim() < 2:
        return given
    room = k_cache.shape[1] if table is None else k_cache.shape[1] * table.shape[-1]
    batch, queries = (q.shape[0], q.shape[1]) if cu_q is None else (cu_q.shape[0] - 1, max_q)
    return spelled_for_cache(q, given, score, (batch, queries, room))


_OF_CALL = ("causal", "window", "scale", "softcap", "alibi_slopes", "mask", "sinks")
_OF_CACHE = {  # what `Cache` calls them
    "cache_seqlens": "lengths", "block_table": "block_table", "cache_batch_idx": "batch_index", "cache_leftpad": "pads",
    "cu_seqlens_q": "cu_q", "max_seqlen_q": "max_q", "num_splits": "splits",
}  # fmt: skip
_OPTIONS = {*_OF_CALL, *_OF_CACHE, "k_scale", "v_scale", "return_lse", "plan", "check", "numerics"}


def kvcache_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int = 0,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    check: bool | str | None = None,
) -> torch.Tensor | None:
    """Write the keys and values of new tokens into a KV cache in place, in one launch that reads no length on the host.

    Args:
        k: [batch, seq, kv_heads, dim] fp16, bf16 or fp32, dim 1 to 1024; or packed, [total, kv_heads, dim] with cu_seqlens.
            Token i of sequence b becomes row cache_seqlens[b] + i of its cache.
        v: like k, with a dim of its own.
        k_cache, v_cache: [caches, capacity, kv_heads, dim], or [pages, page size, kv_heads, dim] with block_table.  In k's
            dtype; or in float8_e4m3fn or int8, with k_scale and v_scale.
        cache_seqlens: [batch] int32: the rows that each sequence has before this call.  It is not changed.
        block_table: [batch, pages] int32: row j of sequence b is row j % size of page block_table[b, j // size], of any size.
        cache_batch_idx: [batch] int32: the cache of each sequence, where there are no pages; default: its own number.
        cu_seqlens: [batch + 1] int32: sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1] of k and v.  Lengths of 0 are fine.
        max_seqlen: at least the longest sequence of cu_seqlens, to be checked against the capacity; 0: not known.
        rotary_cos, rotary_sin: [positions, pairs] of one float dtype: the first 2 * pairs channels of each key are turned by the
            angles of its row in the cache; rows past the table are not turned, and refused with check=True.
        interleaved: pair i is the channels (2i, 2i + 1); otherwise (i, i + pairs).
        k_scale, v_scale: [kv_heads] fp32, or [caches or pages, kv_heads], greater than 0 (not read on the host): what stands in
            the cache is to be multiplied by its head's factor.  `quantize_kv` finds such factors.
        q: [batch, seq, heads, dim] or [total, heads, dim], dtype of k: the queries of the same tokens, turned by the same
            angles in the same launch.  Only with rotary_cos and rotary_sin.
        check: as for `attention_kvcache`; "device" notes the rows that are not written.

    Returns:
        The turned queries, a new contiguous tensor like q (packed rows of no sequence as they were), or None without q.

        What is stored is rounded once: a key is turned in fp32, then rounded to the cache's float type; or divided by its factor
        (a correctly rounded fp32 division), and rounded to the nearest of the cache's numbers, to even where two are as near:
        float8_e4m3fn from -448 to 448 (NaN stays NaN), int8 from -128 to 127 (NaN becomes 0); what lies outside becomes the last.

        Rows past the capacity, rows of a page or cache that does not exist, and packed rows of no sequence are not written; no
        two sequences may write the same row.  (In the interpreter wrong values raise ValueRangeError.)  Any strides with
        a contiguous last dimension, and more than 2^31 elements.  Works under CUDA graphs and torch.compile.  There are
        no gradients.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError, Unsupported: naming the argument, before anything is
        written; Unsupported if a tensor requires a gradient while gradients are on.

    Source: RoPE (Su et al. 2021, arXiv:2104.09864); pages (Kwon et al. 2023, arXiv:2309.06180)."""
    from .ops.cache import cache_append  # here: `import tilefold` stays light

    mode = mode_of(check)
    named = {
        "k": k,
        "v": v,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "q": q,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    refuse_tangents(named)
    refuse_batched(named, "kvcache_append")
    if torch.is_grad_enabled():
        for name, t in named.items():
            if wants_gradient((t,)):
                raise Unsupported(
                    f"{name} requires a gradient, but what is written into a cache passes none: call kvcache_append under "
                    f"torch.no_grad(), or detach() it"
                )
    call = cache_append.Append(k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, block_table, rotary_cos, rotary_sin,
                               interleaved, cu_seqlens, k_scale, v_scale, q, max_seqlen)  # fmt: skip
    return cache_append.cache_append(call, asked(mode, "kvcache_append"))


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys, from the results over each: exact, as if all keys had been seen at once.

    Args:
        out_a, out_b: [batch, seq, heads, dim] or [total, heads, dim], fp16, bf16 or fp32, both of one dtype, dim 1 to 1024, any
            strides with a contiguous last dimension.
        lse_a, lse_b: [batch, heads, seq] or [heads, total] fp32, natural log, any strides: what return_lse=True returns.

    Returns:
        (out, lse), contiguous, like out_a and lse_a.  A result without keys (lse -inf) changes no bit of the other, whatever its
        out holds; two of them give 0 and -inf.  Sinks belong to one of the two calls only.  There are no gradients.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, Unsupported: naming the argument; Unsupported if one requires a gradient
        while gradients are on.

    Source: docs/explanation/merge.md; online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867)."""
    from .ops.cache import merge  # here: `import tilefold` stays light

    return merge.merge_attention(out_a, lse_a, out_b, lse_b)


@refusing
def attention_shared_prefix(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    prefix_length: int,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    causal: bool = True,
    window: Any = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_splits: int = 0,
    cascade: bool | None = None,
    return_lse: bool = False,
    check: bool | str | None = None,
    numerics: Numerics | None = None,
    **others: NoReturn,
) -> Any:
    """Attention over a KV cache whose sequences all begin with the same keys, which are read once for the whole batch.

    The queries of all sequences attend to the prefix as the rows of one sequence, each sequence attends to what follows in its
    own cache, and the two results are merged exactly by their lse: out is what it would be without the prefix being shared.

    Args:
        q: [batch, seq_q, heads, dim] fp16, bf16 or fp32, or packed, [total_q, heads, dim] with cu_seqlens_q and max_seqlen_q; the
            last tokens of each sequence, whose keys are in the cache already.
        k_cache, v_cache: [caches, capacity, kv_heads, dim], or [pages, page size, kv_heads, dim] with block_table; in q's dtype,
            or float8_e4m3fn or int8 (see k_scale).
        prefix_length: the number of shared keys, an int.  With pages, whole pages are read once and what is over belongs to each
            sequence; without, they are read in the cache of sequence 0, and the same rows of the other caches are not.
        cache_seqlens: [batch] int32, not read on the host: keys of each sequence, the prefix's among them; at least
            prefix_length, and with causal at least prefix_length + seq_q: every query lies behind the prefix.
        block_table: [batch, pages] int32: every row begins with the same pages.
        cache_batch_idx: [batch] int32: the cache of each sequence, where there are no pages.
        causal: query i sees key j if j <= i + cache_seqlens - seq_q.
        window, alibi_slopes: None: they go by the distance to keys of the prefix, which differs from sequence to sequence, while
            its rows are one sequence's here.
        scale, softcap, sinks: as for `attention`; the sinks are counted once.
        k_scale, v_scale: [kv_heads] fp32, or [caches or pages, kv_heads]: as for `attention_kvcache`.  Without pages the prefix
            has the factors of the cache that it is read in, sequence 0's.
        num_splits: parts of the keys that are folded apart, in either attention; 0: the plan decides.
        cascade: True to share, False to attend plainly, None for what `tilefold.plan.plan_shared_prefix` predicts to be faster.
        return_lse: also return the logarithm of each row's softmax denominator.
        check: as for `attention_kvcache`; that all rows of block_table begin alike is looked at by check=True alone.
        numerics: as for `attention`; with "invariant" the prefix is not shared (cascade=True raises Unsupported): a merge of two
            finished results has other bits than one fold.

    Returns:
        out, like q with the dim of v_cache; with return_lse (out, lse), lse [batch, heads, seq_q] or [heads, total_q] fp32,
        natural log.  There are no gradients.  Works under CUDA graphs and torch.compile.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError, Unsupported: naming the argument.

    Source: shared prefixes by merged states: Hydragen (Juravsky et al. 2024, arXiv:2402.05099); FlashInfer's cascade (Ye et al.
    2025, arXiv:2501.01005)."""
    if others:
        raise unexpected_of(attention_shared_prefix, others)
    from .ops.cache import shared_prefix  # here: `import tilefold` stays light

    for name, value in (("window", window), ("alibi_slopes", alibi_slopes)):
        if value is not None:
            raise Unsupported(
                f"{name} was given, but the shared prefix is attended to by all queries as one sequence, whose distances "
                f"to its keys are not those of the sequences: leave it None, or attend plainly"
            )
    if not isinstance(return_lse, bool):
        raise DtypeError(f"return_lse must be a bool, got {return_lse!r}")
    mode = mode_of(check)
    cache = Cache(
        cache_seqlens, None, cache_batch_idx, block_table, cu_seqlens_q, max_q=max_seqlen_q, splits=num_splits
    )
    call = Call(causal, None, scale, softcap, sinks=sinks, source=cache, scales=Scales(k=k_scale, v=v_scale),
                numerics=check_numerics(numerics))  # fmt: skip
    out, lse = shared_prefix.attend(q, k_cache, v_cache, call, prefix_length, cascade, mode)
    return (out, lse) if return_lse else out
