"""The stages of sparse video attention composed: coarse, select, fine, fuse."""

from typing import Any

import torch

from .. import sparse_attention
from ..errors import DtypeError, ValueRangeError
from ..ops.call import Call
from ..ops.source import Lists
from ..ops.sparse.project import check_layout
from ..ops.sparse.sparse_mixed import attend_and_fuse
from ..ops.watch import wants_gradient
from ..types import Layout
from .coarse import coarse as coarse_stage
from .fuse import fuse
from .index import BlockIndex
from .select import is_traced
from .select import select as select_stage
from .stages import CoarseOptions, SelectOptions, Stages
from .streaming import VideoCache, attend_cache, refuse_gradients

_BLOCKS = CoarseOptions()


def sparse_video_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    coarse: CoarseOptions | None = _BLOCKS,
    select: SelectOptions | None = None,
    weight_k: torch.Tensor | None = None,
    weight_v: torch.Tensor | None = None,
    gate_coarse: torch.Tensor | None = None,
    gate_fine: torch.Tensor | None = None,
    index: BlockIndex | None = None,
    cache: VideoCache | None = None,
    scale: float | None = None,
    block: int = 64,
    block_sizes: torch.Tensor | None = None,
    query_sizes: torch.Tensor | None = None,
    layout: Layout = "bshd",
    return_stages: bool = False,
) -> Any:
    """Attention of a coarse branch over blocks and a fine branch over the blocks that it finds important, each with its gate.

        coarse, scores = attention over one learned row a block;  index = select(scores)
        out = gate_coarse * coarse + gate_fine * (attention over the listed blocks)

    Args:
        q: [batch, seq, heads, dim] fp16, bf16 or fp32, in blocks (`GridTiling.tile`); any strides with a contiguous
            last dimension.
        k: [batch, seq_k, kv_heads, dim], dtype of q; heads must be a multiple of kv_heads.  With another length than q's, queries
            are the last of the tokens: so forced blocks are counted.
        v: [batch, seq_k, kv_heads, dim_v], dtype of q.
        coarse: the coarse stage's options; None: no coarse branch, the fine one attends the lists of `index`.
        select: the selection's options; None: its defaults.
        weight_k, weight_v: the coarse branch's projections, [block] or [kv_heads, block] with the kind "block", [blocks, seq] or
            [kv_heads, blocks, seq] with "dense", which needs them; None: the mean over a block's tokens.
        gate_coarse, gate_fine: floating point [heads], [batch, seq, heads], or four dimensions that broadcast with out; in the
            order of `layout`; None: 1.
        index: lists to attend instead of selected ones; only with coarse None.
        cache: a `VideoCache` that grows: k and v (whole blocks) are appended, block_sizes are theirs, and q, the last of all
            tokens, attends everything that the cache then holds (a select.sparsity
            is a share of that).  Forward only, coarse.kind "block"; old rows are not made again.
        scale: of both branches' scores; None: 1 / sqrt(dim).
        block: tokens of a query and of a KV block.
        block_sizes, query_sizes: valid tokens at the start of each KV and query block, as for `BlockIndex`; None: all.
        layout: "bshd" as above, or "bhsd" for [batch, heads, seq, dim] of q, k, v and out.
        return_stages: also return a `Stages` with what each stage made.

    Returns:
        out, like q with dim_v for dim; with return_stages (out, stages).  Queries past query_sizes hold 0.
        Differentiable in q, k, v, the weights and the gates; the selection passes no gradient.

    Raises:
        As the stages `tilefold.sparse.coarse`, `select` and `fuse`, and `tilefold.sparse_attention`.  ValueRangeError if
        index, the weights or gate_coarse do not go with the coarse branch, or without it.

    Source: the two branches and gates, VSA (Zhang et al. 2025, arXiv:2505.13389) and NSA (Yuan et al. 2025, arXiv:2502.11089);
    the projection, Linformer (Wang et al. 2020, arXiv:2006.04768)."""
    _check_records(coarse, select, layout)
    if cache is not None:
        if coarse is None or index is not None:
            raise ValueRangeError("cache was given with coarse=None or an index: a cache selects by its own rows")
        _check_cache(cache, coarse, block)
        refuse_gradients(q=q, gate_coarse=gate_coarse, gate_fine=gate_fine)
        before = cache.tokens
        cache.append(k, v, weight_k=weight_k, weight_v=weight_v, block_sizes=block_sizes, layout=layout)
        try:
            out, stages = attend_cache(
                q, cache, coarse=coarse, select=select or SelectOptions(), gate_coarse=gate_coarse, gate_fine=gate_fine,
                scale=scale, query_sizes=query_sizes, layout=layout,
            )  # fmt: skip
        except BaseException:  # a call that failed has appended nothing
            cache.take_back(before)
            raise
        return (out, stages) if return_stages else out
    if coarse is None:
        return _listed(q, k, v, index, gate_fine, scale, layout, return_stages,
                       {"select": select, "weight_k": weight_k, "weight_v": weight_v, "gate_coarse": gate_coarse,
                        "block_sizes": block_sizes, "query_sizes": query_sizes})  # fmt: skip
    if index is not None:
        raise ValueRangeError(
            "index was given with a coarse branch, which selects its own lists: pass coarse=None or no index"
        )
    sizes: dict[str, Any] = {"block_sizes": block_sizes, "query_sizes": query_sizes}
    rows = 1 if layout == "bshd" else 2
    rough = coarse_stage(
        q, k, v, weight_k=weight_k, weight_v=weight_v, kind=coarse.kind, reduction=coarse.reduction, scale=scale, block=block,
        **sizes, layout=layout,
    )  # fmt: skip
    chosen = select_stage(
        rough.scores,
        **(select or SelectOptions()).arguments(),
        block_q=block,
        block_k=block,
        seq_q=q.shape[rows],
        seq_k=k.shape[rows],
        **sizes,
    )
    if not return_stages and _at_once(q, k, v, rough.out, gate_coarse, gate_fine):
        call = Call(lists=Lists.of(chosen.index), scale=scale, layout=layout)
        return attend_and_fuse(q, k, v, call, rough.out, gate_coarse, gate_fine)
    fine, lse = sparse_attention(q, k, v, chosen.index, scale=scale, layout=layout, return_lse=True)
    out = fuse(rough.out, fine, gate_coarse, gate_fine, layout=layout)
    if not return_stages:
        return out
    return out, Stages(rough.out, rough.scores, chosen.gini, chosen.tau, chosen.mass, chosen.index, fine, lse)


def _at_once(*tensors: torch.Tensor | None) -> bool:
    """Whether the fine branch may be mixed with the other where it is made: its gradients need it by itself, and who traces
    has to see operators."""
    return not is_traced(tensors) and not (torch.is_grad_enabled() and wants_gradient(tensors))


def _listed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: BlockIndex | None, gate: torch.Tensor | None, scale: float | None,
    layout: Layout, return_stages: bool, others: dict[str, object],
) -> Any:  # fmt: skip
    """The fine branch alone, over the lists that were given."""
    if index is None:
        raise ValueRangeError(
            "coarse is None and index is None: without a coarse branch, index says which blocks are attended"
        )
    for name, given in others.items():
        if given is not None:
            where = "index carries its own" if name.endswith("sizes") else "there is no coarse branch to use it"
            raise ValueRangeError(f"{name} was given with coarse=None: {where}")
    fine, lse = sparse_attention(q, k, v, index, scale=scale, layout=layout, return_lse=True)
    out = fine if gate is None else fuse(None, fine, None, gate, layout=layout)
    return (out, Stages(None, None, None, None, None, index, fine, lse)) if return_stages else out


def _check_cache(cache: VideoCache, coarse: CoarseOptions, block: int) -> None:
    """Everything that would stop the call after the cache has grown."""
    if not isinstance(cache, VideoCache):
        raise DtypeError(f"cache must be a VideoCache or None, got {type(cache).__name__}")
    if block != cache.block:
        raise ValueRangeError(f"block is {block}, but the cache has blocks of {cache.block}")
    if coarse.kind != "block":
        raise ValueRangeError(
            f"coarse.kind must be 'block' with a cache, got {coarse.kind!r}: others need all tokens at once"
        )


def _check_records(coarse: object, select: object, layout: object) -> None:
    if coarse is not None and not isinstance(coarse, CoarseOptions):
        raise DtypeError(f"coarse must be a CoarseOptions or None, got {coarse!r}")
    if select is not None and not isinstance(select, SelectOptions):
        raise DtypeError(f"select must be a SelectOptions or None, got {select!r}")
    check_layout(layout)
