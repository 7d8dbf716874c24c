"""tilefold as a backend of diffusers' attention dispatcher.

The dispatcher's registry is keyed by an enumeration of the backends it knows, so a member is added to that: diffusers has no
function for it."""

from typing import Any

import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName

from ..api import attention
from ..errors import DtypeError, ShapeError, Unsupported

_REGISTRY = attention_dispatch._AttentionBackendRegistry


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """Attention of one layer of a diffusers model.

    Args:
        query: [batch, queries, heads, dim]; key, value: [batch, keys, kv_heads, dim].
        attn_mask: [batch, keys], or anything that broadcasts to [batch, heads, queries, keys]: bool (true where visible) or
            floating point (added to the score).
        is_causal: aligned to the top left, as in SDPA.
        enable_gqa: whether kv_heads may be fewer than heads.
        return_lse: also return the logarithm of each row's softmax denominator, [batch, queries, heads] fp32.

    Returns:
        [batch, queries, heads, dim], or that and the lse."""
    if _parallel_config is not None:
        raise Unsupported(
            "the tilefold backend does not take a _parallel_config: context parallelism needs another backend"
        )
    if key.shape[2] != query.shape[2] and not enable_gqa:
        raise ShapeError(
            f"query has {query.shape[2]} heads and key has {key.shape[2]}: give enable_gqa=True for grouped heads"
        )
    if is_causal and query.shape[1] > key.shape[1]:
        raise Unsupported(
            f"is_causal with {query.shape[1]} queries and {key.shape[1]} keys: give as many keys as queries, or "
            f"the mask itself as attn_mask"
        )
    if is_causal and key.shape[1] > query.shape[1]:  # keys after the last query are seen by none
        key, value = key[:, : query.shape[1]], value[:, : query.shape[1]]
        attn_mask = None if attn_mask is None else attn_mask[..., : query.shape[1]]
    options: dict[str, Any] = {"dropout_p": float(dropout_p), "return_lse": return_lse}
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise DtypeError(
                f"attn_mask has dtype {attn_mask.dtype}, expected bool, or floating point to be added to the scores"
            )
        options["mask" if attn_mask.dtype == torch.bool else "bias"] = _four_dimensions(attn_mask, query, key)
    found = attention(query, key, value, causal=is_causal, scale=scale, **options)
    return (found[0], found[1].transpose(1, 2)) if return_lse else found


def _four_dimensions(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[batch or 1, heads or 1, queries or 1, keys] of any mask that the other backends take."""
    if mask.ndim == 2 and mask.shape == (query.shape[0], key.shape[1]):
        return mask[:, None, None, :]
    if mask.ndim > 4:
        raise ShapeError(f"attn_mask has shape {tuple(mask.shape)}, expected at most four dimensions")
    mask = mask[(None,) * (4 - mask.ndim)]
    return mask.expand(*mask.shape[:3], key.shape[1])


def register(name: str) -> None:
    """Add the backend, by the name that `set_attention_backend` takes."""
    if name in AttentionBackendName._value2member_map_:
        return
    member = str.__new__(AttentionBackendName, name)
    member._name_, member._value_ = name.upper(), name
    AttentionBackendName._member_map_[name.upper()] = member
    AttentionBackendName._member_names_.append(name.upper())
    AttentionBackendName._value2member_map_[name] = member
    _REGISTRY.register(member)(attend)


def unregister(name: str) -> None:
    """Take the backend out again.  Where a model made it the active one of all models, Diffusers' own default is."""
    member = AttentionBackendName._value2member_map_.pop(name, None)
    if member is None:
        return
    AttentionBackendName._member_map_.pop(member.name)
    AttentionBackendName._member_names_.remove(member.name)
    for table in (_REGISTRY._backends, _REGISTRY._constraints, _REGISTRY._supported_arg_names):
        table.pop(member, None)
    if _REGISTRY._active_backend is member:
        _REGISTRY.set_active_backend(AttentionBackendName(attention_dispatch.DIFFUSERS_ATTN_BACKEND))
