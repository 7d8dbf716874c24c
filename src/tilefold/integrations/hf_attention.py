"""The attention function for transformers: its arguments, translated to those of `attention` and `attention_varlen`.

What is visible is what the mask says, as with eager attention; the layer's own `sliding_window` and `is_causal` count where there
is no mask."""

from typing import Any, NamedTuple

import torch

from ..api import attention, attention_varlen
from ..cache_api import attention_kvcache, kvcache_append
from ..errors import DtypeError, ShapeError, Unsupported
from ..ops.cache import kvcache
from ..ops.cache.decode import Step
from ..ops.call import Call
from ..ops.dense import attention as dense
from ..ops.faults import mode_of
from ..ops.route import STACK
from ..ops.source import Cache
from ..ops.watch import wants_gradient
from .visible import Rows, Visible

# Arguments of some models' layers that change the result and have no counterpart here, and what to say about them.
_REFUSED = {
    "head_mask": "drop the head mask",
    "output_attentions": "attention weights are never written to memory: use attn_implementation='eager'",
    "cache": "of caches only continuous batching's, with cu_seq_lens_k by kind of layer, is served",
    "block_table": "of block tables only continuous batching's, with its cache, are served",
    "indices": "attention over chosen keys is not served: use attn_implementation='eager'",
    "block_indices": "attention over chosen blocks is not served: use attn_implementation='eager'",
    "sinks": "sinks have to come as s_aux",
}
_BIASED = "position_bias is not served with packed sequences: it goes by places in the row"


class _View(NamedTuple):
    """What the queries see: options of `attention` and how far the keys go."""

    causal: bool
    window: tuple[int, int] | None = None
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    end: int | None = None
    rows: Rows | None = None
    lengths: torch.Tensor | None = None


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Visible | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | dict[str, torch.Tensor] | None = None,
    max_length_q: int | None = None,
    max_length_k: int | dict[str, int] | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer of a transformers model.

    Args:
        module: the layer; its `is_causal` counts if neither the mask nor the argument says.
        query: [batch, heads, queries, dim]; key, value: [batch, kv_heads, keys, dim], never repeated for grouped heads.
        attention_mask: None, what `make_mask` returned, or a caller's own: [batch or 1, heads or 1, queries or 1, keys] bool
            (true where visible) or floating point (added to the score), or [batch, keys] of padding (0 where there is no token).
        dropout, scaling, softcap: as dropout_p, scale and softcap of `tilefold.attention`.
        sliding_window: keys a query sees, its own included; used if there is no mask.
        s_aux: [heads] attention sinks.  position_bias: [batch or 1, heads or 1, queries or 1, keys], added to the score.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences, as of `attention_varlen`, in a batch of one.
            With the `cache` of continuous batching the last of each pair is a dict by kind of layer: key and value are written to
            the cache, and those of all sequences, old and new, are attended; with its block_table where they lie.
        others: what transformers passes for other implementations; refused by name if it would change the result.

    Returns:
        ([batch, queries, heads, dim], None): there are no attention weights."""
    if isinstance(cu_seq_lens_k, dict):  # continuous batching: each kind of layer has its own lengths
        facts: dict[str, Any] = {"cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k}
        cache = others.pop("cache", None)
        facts |= {name: others.pop(name, None) for name in ("read_index", "write_index", "block_table")}
        _refuse(others)  # before the cache is written
        if position_bias is not None:
            raise Unsupported(_BIASED)
        if dropout and facts["block_table"] is not None:
            raise Unsupported(f"attn_implementation='tilefold' has no dropout over block tables, got {dropout}")
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=facts)
        if facts["block_table"] is not None:
            changes = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
            return _decoded(query, key, value, facts, cu_seq_lens_q, sliding_window, changes), None
        cu_seq_lens_k, max_length_k, attention_mask = facts["cu_seq_lens_k"], facts["max_length_k"], None
    _refuse(others)
    again = attention_mask.again if isinstance(attention_mask, Visible) and not torch.compiler.is_compiling() else None
    plain = s_aux is None and position_bias is None and cu_seq_lens_q is None and not dropout
    if again is not None and plain and again.options == (scaling, softcap) and not STACK:
        bshd = again.step.call.layout == "bshd"
        q, k, v = (x.transpose(1, 2) for x in (query, key, value)) if bshd else (query, key, value)
        if again.step.fits(q, k, v):
            out = again.step.run(q, k, v)
            return out if bshd else out.transpose(1, 2), None
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)  # as SDPA's: rotary embeddings leave q and k in fp32, v not
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    view = _view(query, key, attention_mask, bool(causal), sliding_window)
    packed = None
    if cu_seq_lens_q is not None or view.rows is not None:
        packed = _packed(query, view, (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k))
    if position_bias is not None:
        position_bias = position_bias[..., : key.shape[2]]
        view = view._replace(bias=position_bias if view.bias is None else view.bias + position_bias)
    options: dict[str, Any] = {
        "causal": view.causal, "window": view.window, "scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux,
        "dropout_p": float(dropout),
    }  # fmt: skip
    steps = query.shape[2] == 1 and packed is None and view.lengths is None  # of generation
    if steps and view.end in (None, key.shape[2]):
        out = attention(query, key, value, mask=view.mask, bias=view.bias, layout="bhsd", **options)
        if plain and isinstance(attention_mask, Visible):
            call = Call(view.causal, view.window, scaling, softcap or 0.0, "bhsd", mask=view.mask)
            _leave(attention_mask, (scaling, softcap), dense.step, query, key, value, call)
        return out.transpose(1, 2), None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # views: tilefold takes any strides
    if view.lengths is not None:  # of a static cache only what is filled is read
        if _is_decoded(view, options, (query, key, value)):
            del options["dropout_p"]
            out = attention_kvcache(q, k, v, cache_seqlens=view.lengths, mask=view.mask, **options)
            if plain and isinstance(attention_mask, Visible) and mode_of(None) is False:
                call = Call(
                    view.causal, view.window, scaling, softcap or 0.0, mask=view.mask, source=Cache(view.lengths)
                )
                _leave(attention_mask, (scaling, softcap), kvcache.step, q, k, v, call)
            return out, None
        view = view._replace(mask=_within(view, k.shape[1]))
    if packed is None:
        if view.end is not None and view.end < k.shape[1]:  # the rest of a static cache is empty
            k, v = k[:, : view.end], v[:, : view.end]
            view = view._replace(bias=None if view.bias is None else view.bias[..., : view.end])
        return attention(q, k, v, mask=view.mask, bias=view.bias, **options), None
    if view.bias is not None:
        raise Unsupported(_BIASED)
    # One row after the other: a view where projections made the tensors, a copy where a cache with several rows did.
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = attention_varlen(q, k, v, *packed, **options)
    return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None


def _decoded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, facts: dict[str, Any], queries: torch.Tensor | None,
    window: int | None, changes: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """A token of each sequence, [1, heads, sequences, dim], over the pages of its cache, to which its key and value go.  queries:
    [sequences + 1] offsets of the tokens.

    Sequences that pad the batch have no keys and no pages: nothing is written, and their rows are 0."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [sequences, heads, dim]
    offsets = facts["cu_seq_lens_k"]
    lengths = offsets[1 : len(q) + 1] - offsets[: len(q)]  # the new token's included
    pages = {"block_table": facts["block_table"]}
    before = (lengths - 1).clamp_min(0)
    kvcache_append(k, v, facts["k_cache"], facts["v_cache"], cache_seqlens=before, cu_seqlens=queries, **pages)
    seen = None if window is None else (window - 1, 0)
    out = attention_kvcache(
        q[:, None],
        facts["k_cache"],
        facts["v_cache"],
        cache_seqlens=lengths,
        causal=True,
        window=seen,
        **pages,
        **changes,
    )
    return out.view(1, *out.shape[::2], -1)  # type: ignore[no-any-return]


class _Again(NamedTuple):
    """What the first layer of a step leaves for the others: the options that a layer may have of its own, and its call."""

    options: tuple[float | None, float | None]
    step: Step


def _leave(mask: Visible, options: tuple[float | None, float | None], make: Any, q: torch.Tensor, *call: Any) -> None:
    """Leave the call where the other layers find it: they pass the same mask."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or STACK:
        return
    step = make(q, *call)
    mask.again = None if step is None else _Again(options, step)


def _is_decoded(view: _View, options: dict[str, Any], tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether attention over a cache serves the call: it has no gradients, no dropout and no bias."""
    wanted = torch.is_grad_enabled() and wants_gradient((*tensors, options["sinks"]))
    return view.bias is None and not options["dropout_p"] and not wanted


def _within(view: _View, room: int) -> torch.Tensor:
    """The lengths as a part of the mask, [batch, 1, 1, room]."""
    assert view.lengths is not None
    seen = (torch.arange(room, device=view.lengths.device) < view.lengths[:, None])[:, None, None]
    return seen if view.mask is None else seen & view.mask


def _refuse(others: dict[str, Any]) -> None:
    """Unsupported, by name, for what some layers pass and would change the result."""
    for name, value in others.items():
        if name in _REFUSED and value is not None and value is not False:
            raise Unsupported(f"attn_implementation='tilefold' does not take {name}: {_REFUSED[name]}")


def _view(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | Visible | None,
    causal: bool,
    sliding_window: int | None,
) -> _View:
    """Every kind of mask as one record."""
    if isinstance(mask, Visible):
        if mask.shape[2] != query.shape[2] or mask.end > key.shape[2]:
            raise ShapeError(
                f"attention_mask was made for {mask.shape[2]} queries and {mask.end} keys, but query has {query.shape[2]} and "
                f"key {key.shape[2]}"
            )
        return _View(mask.causal, mask.window, mask.mask, None, mask.end, mask.rows, mask.lengths)
    if mask is None:
        if sliding_window is None:
            return _View(causal)
        return _View(causal, (sliding_window - 1, 0 if causal else sliding_window - 1))
    if mask.ndim == 2:  # padding alone, from models that make no masks for other implementations
        return _View(causal, mask=mask[:, None, None, : key.shape[2]].bool())
    if mask.ndim != 4:
        raise ShapeError(
            f"attention_mask has shape {tuple(mask.shape)}, expected [batch, 1, queries, keys] or [batch, keys]"
        )
    mask = mask[..., : key.shape[2]]
    if mask.stride(2) == 0:
        mask = mask[:, :, :1]  # the same for all queries: written, and read, once
    if mask.dtype == torch.bool:
        return _View(False, mask=mask)
    if not mask.is_floating_point():
        raise DtypeError(
            f"attention_mask has dtype {mask.dtype}, expected bool, or floating point to be added to the scores"
        )
    return _View(False, bias=mask)


def _packed(query: torch.Tensor, view: _View, lengths: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Offsets and longest lengths of packed sequences, if they are: those that a caller described, or those of the mask.

    A mask that is written out says all by itself.  The host reads no tensor but a longest length given as one."""
    if lengths[0] is None or view.mask is not None or view.bias is not None:
        rows = view.rows
        return None if rows is None else (rows.offsets, rows.offsets, rows.longest, rows.longest)
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    absent = [name for name, value in zip(names, lengths, strict=True) if value is None]
    if absent:
        raise Unsupported(f"cu_seq_lens_q was given without {', '.join(absent)}: packed sequences need all four")
    if query.shape[0] != 1:
        raise ShapeError(
            f"query has a batch of {query.shape[0]}, expected 1 with cu_seq_lens_q: all sequences in one row"
        )
    for name, value in zip(names[:2], lengths, strict=False):
        if not isinstance(value, torch.Tensor):
            raise DtypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    for name, value in zip(names[2:], lengths[2:], strict=True):
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt, torch.Tensor)):
            raise DtypeError(f"{name} must be an int or a tensor of one, got {value!r} of type {type(value).__name__}")
    offsets = (offset.to(torch.int32) for offset in lengths[:2])
    longest = (int(one) if isinstance(one, torch.Tensor) else one for one in lengths[2:])
    return (*offsets, *longest)
