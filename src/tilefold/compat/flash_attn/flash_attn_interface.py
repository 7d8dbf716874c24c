"""The functions of flash_attn.flash_attn_interface, version 2.8: its names, its parameters in its order, its layouts and results.

What stands behind a `*` is not in 2.8: names of FlashAttention-3, 4 and vLLM, and arguments of the private functions.  Everything
that is computed is `tilefold.attention`, `attention_varlen` and the kernel for KV caches.
"""

from typing import Any

import torch

from ... import api
from ...errors import DtypeError, ShapeError, Unsupported
from ...ops.cache.cached import attention_cached
from ...ops.call import Call
from ...ops.dense.attention_weights import attention_weights
from ...ops.faults import asked
from ...ops.source import Cache, Packed
from .arguments import (
    check_tensor,
    checked_call,
    contiguous_last,
    dropout_of,
    flash_errors,
    host_int,
    refuse,
    scale_of,
    seed_for,
    sinks_of,
    window_of,
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
from .results import flash_lse

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

WHOLE_ROW = 1 << 30


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys that share the maximum which S_dmask's weights are relative to: here all of a row."""
    return WHOLE_ROW


def maybe_contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """x, copied if its last dimension is not contiguous."""
    return contiguous_last(x)[0]  # type: ignore[no-any-return]


def _check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise DtypeError(f"{name} must be a bool, got {flag!r}")


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


def _dense(q: Any, k: Any, v: Any, call: Call, return_attn_probs: bool) -> Any:
    """attention, and what return_attn_probs adds."""
    q, k, v = contiguous_last(q, k, v)
    found = api.attention(
        q, k, v, causal=call.causal, window=call.window, scale=call.scale, softcap=call.softcap,
        alibi_slopes=call.alibi_slopes, sinks=call.sinks, dropout_p=call.dropout_p, dropout_seed=call.dropout_seed,
        return_lse=return_attn_probs,
    )  # fmt: skip
    return (found[0], flash_lse(found[1]), _dropped(q, k, call)) if return_attn_probs else found


def _packed(q: Any, k: Any, v: Any, call: Call, return_attn_probs: bool) -> Any:
    """attention_varlen, and what return_attn_probs adds."""
    q, k, v = contiguous_last(q, k, v)
    call = checked_call(q, k, call, "flash_attn_varlen_func")
    found = api.attention_varlen(
        q, k, v, *call.packed, causal=call.causal, window=call.window, scale=call.scale,  # type: ignore[misc]
        softcap=call.softcap, alibi_slopes=call.alibi_slopes, sinks=call.sinks, dropout_p=call.dropout_p,
        dropout_seed=call.dropout_seed, return_lse=return_attn_probs, check=False,
    )  # fmt: skip
    return (found[0], flash_lse(found[1]), _dropped(q, k, call)) if return_attn_probs else found


def _dropped(q: torch.Tensor, k: torch.Tensor, call: Call) -> torch.Tensor:
    """S_dmask: weights with dropped ones negative; empty without dropout, as in flash_attn."""
    return attention_weights(q, k, call) if call.dropout_p else torch.empty(0, dtype=q.dtype, device=q.device)


def _call(
    q: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    packed: Packed | None = None,
) -> Call:
    check_tensor("q", q, (3, 4), "[batch, seqlen_q, heads, head dim], packed [total_q, heads, head dim]")
    share = dropout_of(dropout_p)
    return Call(causal, window_of(window_size, causal), scale_of(softmax_scale, q), softcap, alibi_slopes=alibi_slopes,
                sinks=sinks, source=packed, dropout_p=share, dropout_seed=seed_for(share, q))  # fmt: skip


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
    _check_flags(deterministic=deterministic, return_attn_probs=return_attn_probs)
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    _check_speed(num_splits, pack_gqa, sm_margin)
    sink = sinks_of(sinks=sinks, learnable_sink=learnable_sink, s_aux=s_aux)
    call = _call(q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, sink)
    return _dense(q, k, v, call, return_attn_probs)


@flash_errors()
def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_func of k and v in one tensor kv [batch, seqlen_k, 2, kv heads, head dim]."""
    _check_flags(deterministic=deterministic, return_attn_probs=return_attn_probs)
    k, v = _unpacked("kv", kv, 2, 2)
    call = _call(q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, None)
    return _dense(q, k, v, call, return_attn_probs)


@flash_errors()
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_func of q, k and v in one tensor qkv [batch, seqlen, 3, heads, head dim]."""
    _check_flags(deterministic=deterministic, return_attn_probs=return_attn_probs)
    q, k, v = _unpacked("qkv", qkv, 2, 3)
    call = _call(q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, None)
    return _dense(q, k, v, call, return_attn_probs)


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
    _check_flags(deterministic=deterministic, return_attn_probs=return_attn_probs)
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
           seqused_q=seqused_q)  # fmt: skip
    longest = host_int("max_seqlen_q", max_seqlen_q), host_int("max_seqlen_k", max_seqlen_k)
    sink = sinks_of(sinks=sinks, learnable_sink=learnable_sink, s_aux=s_aux)
    given = q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, sink
    if block_table is None and seqused_k is None and leftpad_k is None:
        _check_speed(num_splits, pack_gqa, sm_margin)
        call = _call(*given, Packed(cu_seqlens_q, cu_seqlens_k, *longest))
        return _packed(q, k, v, call, return_attn_probs)
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
    cache = Cache(seqused_k, leftpad_k, None, table, cu_seqlens_q, cu_seqlens_k, *longest, splits=splits)
    out, lse = attention_cached(q, k, v, _call(*given)._replace(source=cache), asked(None, "flash_attn_varlen_func"))
    return (out, flash_lse(lse), torch.empty(0, dtype=q.dtype, device=q.device)) if return_attn_probs else out


@flash_errors()
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_varlen_func of k and v in one tensor kv [total_k, 2, kv heads, head dim]."""
    _check_flags(deterministic=deterministic, return_attn_probs=return_attn_probs)
    k, v = _unpacked("kv", kv, 1, 2)
    longest = host_int("max_seqlen_q", max_seqlen_q), host_int("max_seqlen_k", max_seqlen_k)
    packed = Packed(cu_seqlens_q, cu_seqlens_k, *longest)
    call = _call(q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, None, packed)
    return _packed(q, k, v, call, return_attn_probs)


@flash_errors(
    cu_seqlens_q="cu_seqlens", cu_seqlens_k="cu_seqlens", max_seqlen_q="max_seqlen", max_seqlen_k="max_seqlen"
)
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """flash_attn_varlen_func of q, k and v in one tensor qkv [total, 3, heads, head dim]."""
    _check_flags(deterministic=deterministic, return_attn_probs=return_attn_probs)
    q, k, v = _unpacked("qkv", qkv, 1, 3)
    longest = host_int("max_seqlen", max_seqlen)
    packed = Packed(cu_seqlens, cu_seqlens, longest, longest)
    call = _call(q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, None, packed)
    return _packed(q, k, v, call, return_attn_probs)
