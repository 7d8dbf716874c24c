"""FlexAttention's functions, computed by tilefold: `from tilefold.compat.flex_attention import flex_attention`.

`install()` puts them into `torch.nn.attention.flex_attention`; `uninstall()` takes them out.  docs/reference/flex_attention.md
lists what passes, and what is refused.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

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

from ... import attention, attention_plan, masks, sparse_attention, sparse_plan
from ...check import check_whole
from ...errors import DtypeError, ShapeError, Unsupported
from ...ops.call import Call
from ...ops.dense.attention_tiles import tiles_of
from ...ops.device import interpreting
from ...ops.masking import named_terms
from ...ops.reads import reads
from ...ops.sparse.classify import block_kinds
from ...ops.sparse.listed import tiles_refusals
from ...ops.watch import is_transformed
from ...plan.device import Device
from ...sparse import BlockIndex
from ...sparse.convert import maps_of_flex
from .translate import translated

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "flex_attention_plan",
    "install",
    "noop_mask",
    "or_masks",
    "uninstall",
]

F = TypeVar("F", bound=Callable[..., Any])
Made = TypeVar("Made")
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
        out [batch, heads, seq_q, dim_v], its dimensions in the order in memory that query's have; (out, lse) or (out,
        AuxOutput) where asked for.  Differentiable once.

    Raises:
        As `tilefold.attention`; Unsupported, naming the mod and the operation, for what has no translation to Triton, and
        for AuxRequest(max_scores=True).

    Source: FlexAttention (Dong et al. 2024, arXiv:2412.05496)."""
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise DtypeError(f"return_aux must be an AuxRequest or None, got {return_aux!r}")
    if return_aux is not None and return_lse:
        raise Unsupported("return_lse=True beside return_aux: ask for AuxRequest(lse=True) alone")
    if return_aux is not None and return_aux.max_scores:
        raise Unsupported("AuxRequest(max_scores=True): the largest scores are not kept; lse=True is served")
    done = _planned(query, key, value, score_mod, block_mask, scale, enable_gqa)
    out, lse = done.run(return_lse=True)
    out = _in_order_of(query, out.transpose(1, 2) if done.options["layout"] == "bshd" else out)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


@_eager
def flex_attention_plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    device: str | Device | None = None,
) -> Any:
    """The plan of the forward pass of `flex_attention` with these arguments, without running it; tilefold's own function.

    An `AttentionPlan` (with the option `lists` where tiles are left out by the tables of the BlockMask), or a `SparsePlan`, whose
    reason says why the dense kernels over lists of tiles are not taken.  Raises what the call would raise.

    device: plans as on another one, as of `attention_plan`."""
    done = _planned(query, key, value, score_mod, block_mask, scale, enable_gqa)
    q, k, v = done.tensors
    if done.lists is None:
        return attention_plan(q, k, v, device=device, **done.options)
    plan = sparse_plan(q, k, v, done.lists, device=device, **done.options)
    return replace(plan, reason=f"{plan.reason} The dense kernels over lists of tiles are not taken: {done.why}.")


def _in_order_of(query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out with its dimensions in the order in memory that query's have: as it is, but for orders that no layout has."""
    strides, own = query.stride(), out.stride()
    order = sorted(range(4), key=lambda dim: -strides[dim])
    if all(own[a] >= own[b] for a, b in itertools.pairwise(order)):
        return out
    return out.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])


class _Planned(NamedTuple):
    """A call as tilefold makes it.  lists: of `sparse_attention`, None: `attention`.  why: for what reason that is not taken."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    options: dict[str, Any]
    lists: BlockIndex | None = None
    why: str = ""

    def run(self, **more: Any) -> Any:
        q, k, v = self.tensors
        if self.lists is None:
            return attention(q, k, v, **self.options, **more)
        return sparse_attention(q, k, v, self.lists, **self.options, **more)


def _planned(
    query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: float | None, enable_gqa: bool
) -> _Planned:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ShapeError(f"{name} must be a tensor [batch, heads, seq, dim], got {shape}")
    if isinstance(score_mod, BlockMask) or not (score_mod is None or callable(score_mod)):
        hint = ": pass it as block_mask=" if isinstance(score_mod, BlockMask) else ""
        raise DtypeError(f"score_mod must be a function or None, got {type(score_mod).__name__}{hint}")
    batch, heads, seq_q = query.shape[:3]
    kv_heads, seq_k = key.shape[1:3]
    if kv_heads != heads and not enable_gqa:
        raise ShapeError(f"key has {kv_heads} heads, query {heads}: pass enable_gqa=True for grouped queries")
    extents = (batch, heads, seq_q, seq_k)
    q, k, v = (t if t.stride(-1) == 1 or t.numel() == 0 else t.contiguous() for t in (query, key, value))
    if k.shape[0] == v.shape[0] == 1 != batch:
        k, v = k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)
    options: dict[str, Any] = {"scale": scale, "layout": "bhsd"}
    if query.stride(1) < query.stride(2):  # heads lie within tokens, as those of out will
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        options["layout"] = "bshd"
    if score_mod is not None:
        made = translated(score_mod, extents, query.device, "score_mod")
        if block_mask is None and tiles_of(made.bias):  # which boxes read; it also has a kernel for its gradient
            options["bias"] = made.bias
        else:
            options |= {"score_mod": made.function, "score_args": made.args}
    if block_mask is None:
        return _Planned((q, k, v), options)
    return _with_blocks((q, k, v), block_mask, extents, options)


def _with_blocks(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: Any,
    extents: tuple[int, int, int, int],
    options: dict[str, Any],
) -> _Planned:
    """A call over the blocks that a BlockMask lists: over lists of the dense kernels' tiles where these serve it, else over lists
    of its own blocks, or of none where these do not have its block size.  What the tables say counts, in each of them."""
    if not isinstance(mask, BlockMask):
        raise DtypeError(f"block_mask must be a BlockMask, got {type(mask).__name__}")
    if tuple(mask.seq_lengths) != extents[2:]:
        if mask.mask_mod is noop_mask and mask.kv_indices.numel() == 1:  # of a call without a mask
            return _Planned(tensors, options)
        raise ShapeError(
            f"block_mask is for {tuple(mask.seq_lengths)} queries and keys, query and key have {extents[2:]}"
        )
    for dim, name in ((0, "batch"), (1, "heads")):
        if mask.kv_num_blocks.dim() == 3 and mask.kv_num_blocks.shape[dim] not in (1, extents[dim]):
            raise ShapeError(
                f"block_mask is for {mask.kv_num_blocks.shape[dim]} ({name}), query has {extents[dim]}; 1 or as many are accepted"
            )
    q, k, v = tensors
    inner: tuple[masks.Mask, ...] = ()
    if mask.mask_mod is not noop_mask:
        made = translated(mask.mask_mod, extents, q.device, "mask_mod")
        inner = (masks.rule(made.function, made.args),)
    block = (int(mask.BLOCK_SIZE[0]), int(mask.BLOCK_SIZE[1]))
    table = masks.blocks(_kept(mask, _kinds_of), block, *inner)
    dense = named_terms({**options, "mask": table}, q, k, options["layout"])
    by_args = [each for each in options.get("score_args", ()) if isinstance(each, torch.Tensor) and each.requires_grad]
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *by_args))
    if not _is_served(block) or (graded and by_args) or is_transformed():  # lists of blocks give these no gradients
        return _Planned(tensors, dense)
    refusals = tiles_refusals(q, k, v, Call(**dense))
    if (why := refusals.forward or (refusals.backward if graded else None)) is None:
        return _Planned(tensors, dense)
    alike = mask.full_kv_num_blocks is None or not inner  # all that is listed is partial, or whole
    within = table if not alike else inner[0] if inner else None
    return _Planned(tensors, {**options, "mask": within}, _kept(mask, BlockIndex.from_flex), why)


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
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.empty(0, device=device).device  # with its number
    sizes = BLOCK_SIZE if isinstance(BLOCK_SIZE, tuple) else (BLOCK_SIZE, BLOCK_SIZE)
    for name, number in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN), ("BLOCK_SIZE", sizes[0]), ("BLOCK_SIZE", sizes[1])):
        whole = number.__index__() if hasattr(number, "__index__") and not isinstance(number, bool) else number
        check_whole(name, whole, 1 if name == "BLOCK_SIZE" else 0)
    if others or not _is_served(sizes) or (where.type == "cpu" and not interpreting()):
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


def _is_served(block: tuple[int, ...]) -> bool:
    """Whether the kernels of block-sparse attention have blocks of this size."""
    return all(size >= 16 and size & (size - 1) == 0 for size in block)


def _kinds_of(mask: BlockMask) -> torch.Tensor:
    """Of each block of a BlockMask 0 if it is not listed, 1 if it is partial, 2 if it is full: the table of `masks.blocks`."""
    with torch.inference_mode(False):  # so that torch counts its changes: there are none
        partial, full = maps_of_flex(mask)
        kinds = partial.to(torch.uint8)
        return kinds if full is None else torch.where(full, 2, kinds)


def _kept(mask: BlockMask, make: Callable[[BlockMask], Made]) -> Made:
    """What is made of the tables of a BlockMask, kept with it until its tensors change."""
    tables = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    versions = [0 if t is None or t.is_inference() else t._version for t in tables]
    kept = mask.__dict__.setdefault("_tilefold", {})
    found = kept.get(make)
    if found is None or found[1] != versions or any(a is not b for a, b in zip(found[0], tables, strict=True)):
        found = tables, versions, make(mask)
        capturing = mask.kv_indices.is_cuda and torch.cuda.is_current_stream_capturing()
        if not capturing:  # its memory would be the graph's
            kept[make] = found
    return found[2]  # type: ignore[no-any-return]


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
