"""The functions of flash_attn.flash_attn_interface, version 2.8: its names, its parameters in its order, its layouts and results.

What stands behind a `*` is not in 2.8: names of FlashAttention-3, 4 and vLLM, and arguments of the private functions.  Everything
that is computed is `tilefold.attention`, `attention_varlen` and the kernel for KV caches.
"""

from typing import Any

import torch

from ... import api
from ...errors import ShapeError, Unsupported
from ...ops.cache.cached import attention_cached
from ...ops.call import Call
from ...ops.dense.attention_weights import attention_weights
from ...ops.faults import asked
from ...ops.source import Cache
from .arguments import (
    check_flags,
    check_tensor,
    checked_call,
    contiguous_last,
    flash_call,
    flash_errors,
    flash_lse,
    host_int,
    packed_of,
    refuse,
    sinks_of,
)
from .kvcache import flash_attn_with_kvcache
from .lowlevel import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
)

__all__ = [
    "USE_TRITON_ROCM",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "maybe_contiguous",
]

USE_TRITON_ROCM = False
"""flash_attn's switch to another implementation on AMD GPUs, of which there is none here."""


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys that share the maximum which S_dmask's weights are relative to: here all of a row."""
    return 1 << 30


def maybe_contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """x, copied if its last dimension is not contiguous."""
    return contiguous_last(x)[0]  # type: ignore[no-any-return]


def _check_speed(num_splits: int | None, pack_gqa: bool | None, sm_margin: int) -> None:
    """FlashAttention-3's arguments that change how, not what: what cannot be honoured is refused."""
    if num_splits is not None and host_int("num_splits", num_splits) not in (0, 1):
        raise Unsupported(
            f"num_splits must be 0 or 1, got {num_splits!r}: keys are split in flash_attn_with_kvcache and with block_table only"
        )
    if pack_gqa is not None:
        raise Unsupported(
            f"pack_gqa must be None, got {pack_gqa!r}: the plan decides; tilefold.attention(plan=...) takes another one"
        )
    if host_int("sm_margin", sm_margin) != 0:
        raise Unsupported(f"sm_margin must be 0, got {sm_margin!r}: kernels take all SMs")


def _unpacked(name: str, x: torch.Tensor, dim: int, parts: int) -> tuple[torch.Tensor, ...]:
    """The tensors that x holds side by side along dimension `dim`."""
    check_tensor(name, x)
    if x.dim() != dim + 3 or x.shape[dim] != parts:
        form = "batch, seqlen" if dim == 2 else "total"
        raise ShapeError(f"{name} has shape {tuple(x.shape)}, expected [{form}, {parts}, heads, head dim]")
    return x.unbind(dim)


def _attend(q: Any, k: Any, v: Any, call: Call, return_attn_probs: bool) -> Any:
    """attention or attention_varlen, and what return_attn_probs adds."""
    check_flags(return_attn_probs=return_attn_probs)
    q, k, v = contiguous_last(q, k, v)
    options: dict[str, Any] = {
        "causal": call.causal, "window": call.window, "scale": call.scale, "softcap": call.softcap,
        "alibi_slopes": call.alibi_slopes, "sinks": call.sinks, "dropout_p": call.dropout_p,
        "dropout_seed": call.dropout_seed, "return_lse": return_attn_probs,
    }  # fmt: skip
    if call.packed is None:
        found = api.attention(q, k, v, **options)
    else:
        call = checked_call(q, k, call, "flash_attn_varlen_func")
        found = api.attention_varlen(q, k, v, *call.packed, **options, check=False)  # type: ignore[misc]
    if not return_attn_probs:
        return found
    dropped = attention_weights(q, k, call) if call.dropout_p else q.new_empty(0)
    return found[0], flash_lse(found[1]), dropped


def _call(q: torch.Tensor, deterministic: bool, *given: Any, sinks: torch.Tensor | None = None) -> Call:
    """given: as of `flash_call`."""
    check_flags(deterministic=deterministic)
    check_tensor("q", q, (3, 4), "[batch, seqlen_q, heads, head dim], packed [total_q, heads, head dim]")
    return flash_call(q, *given, sinks=sinks)  # type: ignore[misc]


@flash_errors()
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, sinks: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None, s_aux: torch.Tensor | None = None, qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0, num_splits: int = 1, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> Any:  # fmt: skip
    """Attention of q [batch, seqlen_q, heads, head dim] over k, v [batch, seqlen_k, kv heads, head dim]; v's head dim may differ.

    Args:
        dropout_p: probability of dropping a weight of the softmax.  softmax_scale: default 1 / sqrt(head dim).
        causal: aligned to the bottom right.  window_size: (left, right), negative is unbounded; a CPU tensor of two, too.
        softcap: 0 is off.  alibi_slopes: [heads] or [batch, heads] fp32.
        deterministic: gradients are the same bits every run either way.
        return_attn_probs: also return lse and S_dmask.
        sinks, learnable_sink, s_aux: [heads]: one argument under the names of tilefold, FlashAttention-4, and vLLM and
            transformers: a score that joins each row's softmax.  Differentiable.
        The rest is refused by name unless it is at its default, see docs/reference/flash_attn.md.

    Returns:
        out like q with v's head dim; with return_attn_probs (out, lse [batch, heads, seqlen_q] fp32, +inf where no key is seen,
        S_dmask [batch, heads, seqlen_q, seqlen_k], both rounded up to 128: weights relative to the row's largest, negative where
        dropped; empty without dropout).  Differentiable in q, k, v.

    Raises:
        What `tilefold.attention` raises, as a RuntimeError too.

    Source: the interface is flash-attention 2.8's (https://github.com/Dao-AILab/flash-attention)."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    _check_speed(num_splits, pack_gqa, sm_margin)
    sink = sinks_of(sinks=sinks, learnable_sink=learnable_sink, s_aux=s_aux)
    call = _call(q, deterministic, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks=sink)
    return _attend(q, k, v, call, return_attn_probs)


@flash_errors()
def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_func of k and v in one tensor kv [batch, seqlen_k, 2, kv heads, head dim]."""
    k, v = _unpacked("kv", kv, 2, 2)
    call = _call(q, deterministic, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attend(q, k, v, call, return_attn_probs)


@flash_errors()
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_func of q, k and v in one tensor qkv [batch, seqlen, 3, heads, head dim]."""
    q, k, v = _unpacked("qkv", qkv, 2, 3)
    call = _call(q, deterministic, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attend(q, k, v, call, return_attn_probs)


@flash_errors()
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: torch.Tensor | None = None, *, seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None, seqused_q: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None, s_aux: torch.Tensor | None = None, qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0, num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> Any:  # fmt: skip
    """flash_attn_func within each of many sequences, packed along the first dimension: q [total_q, heads, head dim], k and v
    [total_k, kv heads, head dim].

    Args:
        cu_seqlens_q, cu_seqlens_k: [batch + 1] int32: where sequences begin and end; lengths of 0 are fine.
        max_seqlen_q, max_seqlen_k: at least the longest.
        block_table: [batch, pages] int32: k and v are [pages, page size, kv heads, head dim], pages of any size, and
            cu_seqlens_k gives lengths only.
        seqused_k: [batch] int32: how many of each sequence's keys count.  leftpad_k: [batch] int32: how many of the first do
            not.  With any of these three there is no gradient, no S_dmask, and num_splits parts of the keys are folded apart
            (0: the plan decides).
        The rest is as for flash_attn_func.

    Returns:
        out [total_q, heads, head dim]; with return_attn_probs (out, lse [heads, total_q], S_dmask [batch, heads, max_seqlen_q,
        max_seqlen_k], both rounded up to 128).  Rows of no sequence are not written; their gradients are 0."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
           seqused_q=seqused_q)  # fmt: skip
    packed = packed_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    sink = sinks_of(sinks=sinks, learnable_sink=learnable_sink, s_aux=s_aux)
    call = _call(
        q, deterministic, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, packed, sinks=sink
    )
    if block_table is None and seqused_k is None and leftpad_k is None:
        _check_speed(num_splits, pack_gqa, sm_margin)
        return _attend(q, k, v, call, return_attn_probs)
    check_flags(return_attn_probs=return_attn_probs)
    _check_speed(0, pack_gqa, sm_margin)
    if return_attn_probs and dropout_p:
        raise Unsupported(
            "return_attn_probs with dropout_p and block_table, seqused_k or leftpad_k: S_dmask is not made there"
        )
    check_tensor("cu_seqlens_q", cu_seqlens_q, (1,), "[batch + 1]")
    check_tensor("cu_seqlens_k", cu_seqlens_k, (1,), "[batch + 1]")
    q, k, v = contiguous_last(q, k, v)
    (table,) = contiguous_last(block_table)
    splits = host_int("num_splits", num_splits)
    cache = Cache(seqused_k, leftpad_k, None, table, *packed, splits=splits)
    out, lse = attention_cached(q, k, v, call._replace(source=cache), asked(None, "flash_attn_varlen_func"))
    return (out, flash_lse(lse), q.new_empty(0)) if return_attn_probs else out


@flash_errors()
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_varlen_func of k and v in one tensor kv [total_k, 2, kv heads, head dim]."""
    k, v = _unpacked("kv", kv, 1, 2)
    packed = packed_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    call = _call(q, deterministic, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, packed)
    return _attend(q, k, v, call, return_attn_probs)


@flash_errors(
    cu_seqlens_q="cu_seqlens", cu_seqlens_k="cu_seqlens", max_seqlen_q="max_seqlen", max_seqlen_k="max_seqlen"
)
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_varlen_func of q, k and v in one tensor qkv [total, 3, heads, head dim]."""
    q, k, v = _unpacked("qkv", qkv, 1, 3)
    packed = packed_of(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    call = _call(q, deterministic, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, packed)
    return _attend(q, k, v, call, return_attn_probs)
