"""FlexAttention's functions, computed by tilefold: `from tilefold.compat.flex_attention import flex_attention`.

`install()` puts them into `torch.nn.attention.flex_attention`; `uninstall()` takes them out.  docs/compat/flex_attention.md lists
what passes, and what is refused.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.nn.attention import flex_attention as _torch
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)
from torch.nn.attention.flex_attention import create_block_mask as _create_block_mask

from ... import attention, sparse_attention
from ...errors import DtypeError, ShapeError, Unsupported
from ...ops.device import interpreting
from ...ops.reads import reads
from ...ops.sparse.classify import block_kinds
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

F = TypeVar("F", bound=Callable[..., Any])
_before: dict[str, Any] = {}


def _eager(function: F) -> F:
    """The function as a graph break, also where torch.compile is given it itself, which takes its own marks off."""
    inner = torch.compiler.disable(function)

    @functools.wraps(function)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return cast("F", outer)


@_eager
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
        As `tilefold.attention`; Unsupported, naming the mod and the operation, for what has no translation to Triton, and
        for AuxRequest(max_scores=True).

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


def _with_blocks(
    q: Any, k: Any, v: Any, mask: BlockMask, extents: tuple[int, int, int, int], options: dict[str, Any]
) -> Any:
    """(out, lse) over the blocks that a BlockMask lists."""
    if not isinstance(mask, BlockMask):
        raise DtypeError(f"block_mask must be a BlockMask, got {type(mask).__name__}")
    if tuple(mask.seq_lengths) != extents[2:]:
        if mask.mask_mod is noop_mask and mask.kv_indices.numel() == 1:  # of a call without a mask
            return attention(q, k, v, **options)
        raise ShapeError(
            f"block_mask is for {tuple(mask.seq_lengths)} queries and keys, query and key have {extents[2:]}"
        )
    by_args = any(isinstance(each, torch.Tensor) and each.requires_grad for each in options.get("score_args", ()))
    by_args = by_args and torch.is_grad_enabled()  # lists of blocks give these no gradients
    mod: Callable[..., torch.Tensor] | None = mask.mask_mod
    if mod is noop_mask:
        mod = _listed(_index_of(mask)) if by_args else None
    if mod is not None:
        made = translated(mod, extents, q.device, "mask_mod")
        options = {**options, "mask_mod": made.function, "mask_args": made.args}
    if by_args:
        return attention(q, k, v, **options)
    return sparse_attention(q, k, v, _index_of(mask), **options)


@_eager
def create_block_mask(
    mask_mod: Callable[..., torch.Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    **others: Any,
) -> BlockMask:
    """torch's create_block_mask, by one kernel that makes no mask of tokens; _compile is ignored.

    Where that kernel does not run (others are given, a block size that is no power of two from 16 on, a CPU without Triton's
    interpreter) torch's own makes it.  Raises Unsupported for a mod that has no translation to Triton."""
    where = torch.empty(0, device="cuda" if device is None else device).device  # with its number
    sizes = BLOCK_SIZE if isinstance(BLOCK_SIZE, tuple) else (BLOCK_SIZE, BLOCK_SIZE)
    served = all(size >= 16 and size & (size - 1) == 0 for size in sizes) and (where.type != "cpu" or interpreting())
    if others or not served:
        own = {"_compile": _compile, "separate_full_blocks": separate_full_blocks, **others}
        return _create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, where, BLOCK_SIZE, **own)
    grid = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    made = translated(mask_mod, grid, where, "mask_mod")
    batch, heads = (n if read else min(n, 1) for n, read in zip(grid, reads(made.function)[1:], strict=False))
    kinds = block_kinds(made.function, made.args, (batch, heads, Q_LEN, KV_LEN), sizes, where)
    for dim, (length, size) in enumerate(zip((Q_LEN, KV_LEN), sizes, strict=True), 2):
        if length % size and kinds.numel():  # torch counts what is past the end as not seen
            last = kinds.narrow(dim, kinds.shape[dim] - 1, 1)
            last.clamp_(max=1)
    kinds = kinds.expand(*grid[:2], -1, -1)
    partial, full = (kinds == 1, kinds == 2) if separate_full_blocks else (kinds > 0, None)
    num_full, full_indices = (None, None) if full is None else _ordered(full)
    return BlockMask.from_kv_blocks(
        *_ordered(partial), num_full, full_indices, BLOCK_SIZE=sizes, mask_mod=mask_mod, seq_lengths=(Q_LEN, KV_LEN)
    )


def _ordered(keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of each row are true, and all blocks, those first."""
    order = keep.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return keep.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _listed(index: BlockIndex) -> Callable[..., torch.Tensor]:
    """A mask_mod: whether the block of a query and a key is listed."""
    keep = index.to_map()
    strides = [int(size > 1) for size in keep.shape[:2]]

    def listed(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return keep[b * strides[0], h * strides[1], q_idx // index.block_q, kv_idx // index.block_k]

    return listed


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
    """Put `flex_attention` and `create_block_mask` into torch.nn.attention.flex_attention: now, before the modules are imported
    that import them from there."""
    for function in (flex_attention, create_block_mask):
        _before.setdefault(function.__name__, getattr(_torch, function.__name__))
        setattr(_torch, function.__name__, function)


def uninstall() -> None:
    """Put back what `install` found."""
    for name, function in _before.items():
        setattr(_torch, name, function)
    _before.clear()
