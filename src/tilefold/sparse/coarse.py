"""The coarse stage: one row of K and V a block, every query over these rows, and what each query block puts on each row."""

from typing import Literal, NamedTuple

import torch

from ..check import FLOATS, TensorSpec, bind, check_number
from ..errors import ValueRangeError
from ..ops.call import NARROW_HEAD_DIM, SPECS, check_heads
from ..ops.records import recorded
from ..ops.sparse.coarse import COARSE
from ..ops.sparse.coarse_backward import CoarseCall
from ..ops.sparse.project import KINDS, NAMES, PROJECT, SPREAD, check_block, check_layout
from ..ops.watch import is_watched
from ..types import Layout
from .lists import sizes_by_row

CoarseKind = Literal["block", "dense", "pooled"]
"""Rows by a weight for each slot of a block, by a matrix over all tokens, or by means, of queries, too."""

Reduction = Literal["mean", "max"]
"""What a query block's score is over its queries."""

MEAN, WEIGHTED, _ = KINDS


class CoarseResult(NamedTuple):
    """What the coarse stage makes.

    out: [batch, seq_q, heads, dim_v] in q's dtype (and in its layout).
    scores: [batch, heads, Q blocks, KV blocks] fp32, what query block i puts on row j; no gradient passes through it.
    lse: with return_lse [batch, heads, seq_q] fp32, natural log ([batch, heads, Q blocks] with kind "pooled"); else None."""

    out: torch.Tensor
    scores: torch.Tensor
    lse: torch.Tensor | None = None


def project(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    kind: Literal["block", "dense"] = "block",
    block_sizes: torch.Tensor | None = None,
    block: int = 64,
    layout: Layout = "bshd",
) -> torch.Tensor:
    """One row for each block of tokens: [batch, seq, kv_heads, dim] to [batch, ceil(seq / block), kv_heads, dim].

        "block", no weight   row_i = sum over the valid tokens t of block i of x_t / valid_i
        "block", weight w    row_i = sum over the valid tokens t of block i of w_t x_t * (block / valid_i)
        "dense", weight E    row_i = sum over all valid tokens of E_it x_t

    With all tokens valid "block" is a dense E with w in every block.  The factor block / valid_i for blocks that are not full is
    our definition: weights of 1 / block are then the mean, to the last bit, whatever the block's number of tokens.

    Args:
        x: fp16, bf16 or fp32, any strides with a contiguous last dimension, dim 1 to 256.  What lies past a block's valid tokens
            may hold anything.
        weight: "block": [block] or [kv_heads or 1, block] or None; "dense": [blocks, seq] or [kv_heads or 1, blocks, seq].  Any
            floating dtype; a dense one is rounded to that of x for the product.
        kind: "block", a kernel that reads x once; or "dense", a matrix product, which ties the weight to one seq.
        block_sizes: int32 [blocks], [batch or 1, blocks] or [batch or 1, kv_heads or 1, blocks]: valid tokens at the start of
            each block; None: all.  A block without any gives row 0 with kind "block".
        block: tokens of a block, a power of two, at least 16.
        layout: "bshd" as above, or "bhsd" for [batch, heads, seq, dim] of x and of the rows.

    Returns:
        rows in x's dtype, contiguous with "block"; sums are fp32.  Differentiable in x and weight, the same bits every run.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError, Unsupported: naming the argument.

    Source: Linformer (Wang et al. 2020, arXiv:2006.04768, section 4); the mean is VSA's (Zhang et al. 2025, arXiv:2505.13389).
    """
    check_block(block)
    check_layout(layout)
    if kind not in ("block", "dense"):
        raise ValueRangeError(f"kind must be 'block' or 'dense', got {kind!r}")
    return _rows(x, weight, kind, block_sizes, block, layout, NAMES)


def coarse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    weight_k: torch.Tensor | None = None,
    weight_v: torch.Tensor | None = None,
    kind: CoarseKind = "block",
    reduction: Reduction = "mean",
    scale: float | None = None,
    block: int = 64,
    block_sizes: torch.Tensor | None = None,
    query_sizes: torch.Tensor | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
) -> CoarseResult:
    """Attention of every query over one row a KV block, and the share of it that each query block puts on each row.

        rows_k, rows_v = project(k, weight_k), project(v, weight_v)
        p = softmax(q rows_k^T * scale)            out = p rows_v
        scores[b, h, i, j] = mean (or maximum) of p[b, h, t, j] over the valid queries t of block i

    Args:
        q: [batch, seq_q, heads, dim] fp16, bf16 or fp32; dim 1 to 256; any strides with a contiguous last dimension.
        k: [batch, seq_k, kv_heads, dim], dtype of q; heads must be a multiple of kv_heads.
        v: [batch, seq_k, kv_heads, dim_v], dtype of q.
        weight_k, weight_v: the projections, as for `project`; None: the mean.  Both are needed with kind "dense".
        kind: "block" or "dense", as for `project`; "pooled": k and v as for "block", and queries are means over their blocks,
            too: each block's one result goes to all of its valid queries, and its scores are that one row of p.
        reduction: "mean" or "max" over the valid queries of a block ("pooled" has one a block).
        scale: of q . row; None: 1 / sqrt(dim).
        block: tokens of a query block and of a KV block, a power of two, at least 16.
        block_sizes: valid tokens at the start of each KV block, as for `project`.  A block without any is a dead column: no query
            sees its row and its scores are 0, whatever the kind.
        query_sizes: int32, the same for query blocks, [.., heads or 1, Q blocks]; the other queries give 0, lse -inf, and count
            in no score.  Like tokens past block_sizes they may hold anything.
        layout: "bshd" as above, or "bhsd" for [batch, heads, seq, dim] of q, k, v and out.
        return_lse: also the log-sum-exp of the scores of each query.

    Returns:
        `CoarseResult`.  Queries that see no row give out 0, lse -inf and scores 0.  out and lse are differentiable in q, k, v
        and the weights, once; scores are not.  The same bits every run.  p is never written to memory.

    Raises:
        As `project`; ValueRangeError naming reduction or scale, or a weight that the kind needs.

    Source: Linformer (arXiv:2006.04768); scores of blocks from a coarse branch: VSA (arXiv:2505.13389, section 3), whose "pooled"
    it is, and NSA (Yuan et al. 2025, arXiv:2502.11089), which sums them over queries.
    """
    if kind not in ("block", "dense", "pooled"):
        raise ValueRangeError(f"kind must be 'block', 'dense' or 'pooled', got {kind!r}")
    _check_options(reduction, scale, block, layout)
    traced = torch.compiler.is_compiling() or is_watched((q, k, v))
    (_check_tokens if traced else _check_once)(q, k, v, layout)
    rows_k, rows_v = (
        _rows(x, weight, kind, block_sizes, block, layout, f"{name[-1]} {name} block_sizes")
        for x, weight, name in ((k, weight_k, "weight_k"), (v, weight_v, "weight_v"))
    )
    call = CoarseCall(block_sizes, query_sizes, block, scale, reduction, layout, True, "k v")
    if kind != "pooled":
        return _attend(q, rows_k, rows_v, call, return_lse)
    pooled = PROJECT(q, None, query_sizes, block, MEAN, layout, "q weight query_sizes")
    made = _attend(pooled, rows_k, rows_v, call._replace(reduction="each"), return_lse)
    return made._replace(out=SPREAD(made.out, query_sizes, q.shape[1 if layout == "bshd" else 2], block, layout))


def attend_rows(
    q: torch.Tensor,
    rows_k: torch.Tensor,
    rows_v: torch.Tensor,
    *,
    reduction: Reduction = "mean",
    scale: float | None = None,
    block: int = 64,
    block_sizes: torch.Tensor | None = None,
    query_sizes: torch.Tensor | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
) -> CoarseResult:
    """`coarse` over rows that were projected before: of old blocks of a growing cache they need not be made again.

    Args:
        rows_k: [batch, rows, kv_heads, dim], dtype of q, any strides with a contiguous last dimension.
        rows_v: [batch, rows, kv_heads, dim_v], likewise.
        block: queries a block, a power of two, at least 16.
        block_sizes: int32 [rows], [batch or 1, rows] or [batch or 1, kv_heads or 1, rows]: a row with 0 is dead, and may hold
            anything; other values all mean the same.
        The other arguments are those of `coarse`.

    Returns and raises as `coarse`; differentiable in q, rows_k and rows_v."""
    _check_options(reduction, scale, block, layout)
    finite = block_sizes is None
    call = CoarseCall(block_sizes, query_sizes, block, scale, reduction, layout, finite, "rows_k rows_v")
    return _attend(q, rows_k, rows_v, call, return_lse)


def _check_options(reduction: Reduction, scale: float | None, block: int, layout: Layout) -> None:
    check_block(block)
    check_layout(layout)
    if reduction not in ("mean", "max"):
        raise ValueRangeError(f"reduction must be 'mean' or 'max', got {reduction!r}")
    if scale is not None:
        check_number("scale", scale, above=0.0)


def _attend(
    q: torch.Tensor, rows_k: torch.Tensor, rows_v: torch.Tensor, call: CoarseCall, return_lse: bool
) -> CoarseResult:
    out, scores, lse = COARSE(q, rows_k, rows_v, call)
    return CoarseResult(out, scores, lse if return_lse else None)


def _check_tokens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> bool:
    """The tensors of a call, under their own names: what follows sees rows."""
    check_heads(bind(SPECS[layout][:3], {"q": q, "k": k, "v": v}), most=NARROW_HEAD_DIM)
    return True


_check_once = recorded("coarse")(_check_tokens)  # for tensors of one kind


def _rows(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    kind: str,
    block_sizes: torch.Tensor | None,
    block: int,
    layout: Layout,
    names: str,
) -> torch.Tensor:
    """names: of x, weight and block_sizes."""
    if kind == "dense":
        return _project_dense(x, weight, block_sizes, block, layout, names.split()[1])
    result: torch.Tensor = PROJECT(x, weight, block_sizes, block, MEAN if weight is None else WEIGHTED, layout, names)
    return result


# ---------------------------------------------------------------- dense


def _project_dense(
    x: torch.Tensor, weight: torch.Tensor | None, block_sizes: torch.Tensor | None, block: int, layout: Layout, name: str
) -> torch.Tensor:  # fmt: skip
    """E x as a matrix product of torch's."""
    if weight is None:
        raise ValueRangeError(
            f"{name} must be a tensor with kind='dense', [blocks, seq] or [kv_heads, blocks, seq]; got None"
        )
    dims = "batch seq kv_heads dim" if layout == "bshd" else "batch kv_heads seq dim"
    n = bind((TensorSpec("x", dims, FLOATS, contiguous_last=True),), {"x": x})
    n["blocks"] = -(-n["seq"] // block)
    specs = (
        TensorSpec(name, "blocks seq / kv_heads|1 blocks seq", FLOATS),
        TensorSpec("block_sizes", "blocks / batch|1 blocks / batch|1 kv_heads|1 blocks", (torch.int32,), optional=True),
    )
    bind(specs, {name: weight, "block_sizes": block_sizes}, known=n, beside=("x", x))
    if block_sizes is not None:  # 0 * NaN is NaN, so padding has to go before the product
        valid = _valid_tokens(block_sizes, n["seq"], block)
        x = torch.where((valid.transpose(1, 2) if layout == "bshd" else valid)[..., None], x, 0)
    weight = weight.to(x.dtype)
    shared = weight.dim() == 2 or weight.shape[0] == 1
    with torch.autocast(x.device.type, enabled=False):  # rows have the dtype of x, as those of a kernel do
        if shared and layout == "bshd" and x.stride(2) == x.shape[3]:  # the heads are columns of one product
            columns = x.flatten(2)
            rows = torch.bmm(weight.expand(n["batch"], n["blocks"], n["seq"]), columns)
            return rows.view(n["batch"], n["blocks"], n["kv_heads"], n["dim"])
        rows = torch.matmul(weight, x.transpose(1, 2) if layout == "bshd" else x)
    return rows.transpose(1, 2) if layout == "bshd" else rows


def _valid_tokens(sizes: torch.Tensor, seq: int, block: int) -> torch.Tensor:
    """bool [B or 1, H or 1, seq]."""
    token = torch.arange(seq, device=sizes.device)
    return token % block < sizes_by_row(sizes)[..., token // block]
