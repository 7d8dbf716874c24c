"""`flex_attention` by torch's signature, its block masks as lists of blocks, and `install`."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as _torch
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)

from ... import attention, sparse_attention
from ...errors import DtypeError, ShapeError, Unsupported
from ...sparse import BlockIndex
from .translate import translated

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "install",
    "noop_mask",
    "or_masks",
    "uninstall",
]

_before: dict[str, Any] = {}


@torch.compiler.disable
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Attention with a Python score_mod and a BlockMask, as torch.nn.attention.flex_attention.flex_attention has it.

    Args:
        query: [batch, heads, seq_q, dim] fp16, bf16 or fp32.
        key, value: [batch or 1, kv_heads, seq_k, dim and dim_v], dtype of query.
        score_mod: function of (score, batch, head, q_idx, kv_idx), scalar tensors, that torch can trace.  Floating tensors that
            it reads get gradients.
        block_mask: of `create_block_mask`; its lists are of blocks, its mask_mod is asked inside of the partial and full ones.
        scale: of query . key, greater than 0; default 1 / sqrt(dim).
        enable_gqa: allows fewer kv_heads, which must divide heads.
        return_lse: also return the logarithm of each row's softmax denominator, [batch, heads, seq_q] fp32.
        kernel_options: ignored.
        return_aux: AuxRequest(lse=True) for (out, AuxOutput).

    Returns:
        out [batch, heads, seq_q, dim_v]; (out, lse) or (out, AuxOutput) where asked for.  Differentiable once.

    Raises:
        As `tilefold.attention`; Unsupported, naming the mod and the operation, for what has no translation to Triton, for
        AuxRequest(max_scores=True), and for gradients of tensors that a score_mod reads beside a block_mask without a mask_mod.

    Source: FlexAttention (Dong et al. 2024, arXiv:2412.05496)."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ShapeError(f"{name} must be a tensor [batch, heads, seq, dim], got {shape}")
    if return_aux is not None and return_lse:
        raise Unsupported("return_lse=True beside return_aux: ask for AuxRequest(lse=True) alone")
    if return_aux is not None and return_aux.max_scores:
        raise Unsupported("AuxRequest(max_scores=True): the largest scores are not kept; lse=True is served")
    batch, heads, seq_q = query.shape[:3]
    kv_heads, seq_k = key.shape[1:3]
    if kv_heads != heads and not enable_gqa:
        raise ShapeError(f"key has {kv_heads} heads, query {heads}: pass enable_gqa=True for grouped queries")
    extents = (batch, heads, seq_q, seq_k)
    q, k, v = (t if t.stride(-1) == 1 or t.numel() == 0 else t.contiguous() for t in (query, key, value))
    if k.shape[0] == v.shape[0] == 1 != batch:
        k, v = k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)
    options: dict[str, Any] = {"scale": scale, "layout": "bhsd", "return_lse": True}
    if score_mod is not None:
        made = translated(score_mod, extents, query.device, "score_mod")
        options |= {"score_mod": made.function, "score_args": made.args}
    if block_mask is None:
        out, lse = attention(q, k, v, **options)
    else:
        out, lse = _with_blocks(q, k, v, block_mask, extents, options)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _with_blocks(q: Any, k: Any, v: Any, mask: BlockMask, extents: tuple[int, ...], options: dict[str, Any]) -> Any:
    """(out, lse) over the blocks that a BlockMask lists."""
    if not isinstance(mask, BlockMask):
        raise DtypeError(f"block_mask must be a BlockMask, got {type(mask).__name__}")
    batch, heads, seq_q, seq_k = extents
    if tuple(mask.seq_lengths) != (seq_q, seq_k):
        if mask.mask_mod is noop_mask and mask.kv_indices.numel() == 1:  # of a call without a mask
            return attention(q, k, v, **options)
        raise ShapeError(
            f"block_mask is for {tuple(mask.seq_lengths)} queries and keys, query and key have {extents[2:]}"
        )
    if mask.mask_mod is not noop_mask:
        made = translated(mask.mask_mod, (batch, heads, seq_q, seq_k), q.device, "mask_mod")
        options = {**options, "mask_mod": made.function, "mask_args": made.args}
    by_args = any(isinstance(each, torch.Tensor) and each.requires_grad for each in options.get("score_args", ()))
    if by_args and torch.is_grad_enabled():
        if "mask_mod" not in options:
            raise Unsupported(
                "score_mod reads tensors that require a gradient, beside a block_mask without a mask_mod: lists of blocks give "
                "these none; make the block_mask with create_block_mask, or detach() them"
            )
        return attention(q, k, v, **options)
    return sparse_attention(q, k, v, _index_of(mask), **options)


def _index_of(mask: BlockMask) -> BlockIndex:
    """The lists of a BlockMask, kept with it until its tensors change."""
    tensors = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    versions = tuple((id(t), 0 if t.is_inference() else t._version) for t in tensors if t is not None)
    kept = mask.__dict__.get("_tilefold_index")
    if kept is None or kept[0] != versions:
        kept = versions, BlockIndex.from_flex(mask)
        mask.__dict__["_tilefold_index"] = kept
    index: BlockIndex = kept[1]
    return index


def install() -> None:
    """Put `flex_attention` into torch.nn.attention.flex_attention: now, before the modules that import it from there."""
    if not _before:
        _before["flex_attention"] = _torch.flex_attention
        _torch.flex_attention = flex_attention


def uninstall() -> None:
    """Put back what `install` found."""
    for name, function in _before.items():
        setattr(_torch, name, function)
    _before.clear()
