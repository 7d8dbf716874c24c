"""The select and index stages: from block scores, or a map of blocks, to the lists that attention follows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from ..check import check_number
from ..errors import DtypeError, ValueRangeError
from ..ops.sparse import select as _select
from ..ops.sparse.select import GINI, SELECT, SelectCall, Selected
from ..ops.watch import is_transformed, is_watched
from ..plan.sparse.select import LONGEST_ROW
from .index import BlockIndex
from .select_arguments import Number, bind_scores, bind_sizes, blocks_setting, make_call, setting_of
from .select_long import gini_long, select_long

Method: TypeAlias = Literal["gini", "top_p", "top_k"]
"""How many blocks a row keeps: by its Gini coefficient, by a share of its mass, or a number."""


@dataclass(frozen=True, eq=False)
class Selection:
    """What `select` gives, and what it was made by.  A pytree node; none of its tensors has a gradient.

    index: the lists, ascending, and their lengths.
    gini: fp32 [batch, heads, Q blocks]: the Gini coefficient of each row's scores, 0 (all equal) to (n - 1) / n (one has all);
        None with return_gini=False.
    tau: fp32 [batch, heads, Q blocks]: the share of the row's mass that was asked for, 0 to 1; None for "top_k".
    mass: fp32 [batch, heads, Q blocks]: the share that the listed blocks have, 0 to 1; 1 for a row whose scores sum to 0."""

    index: BlockIndex
    gini: torch.Tensor | None
    tau: torch.Tensor | None
    mass: torch.Tensor


def select(
    scores: torch.Tensor,
    *,
    method: Method = "gini",
    tau_min: Number | None = None,
    tau_max: Number | None = None,
    tau: Callable[[torch.Tensor], Any] | None = None,
    top_p: Number | None = None,
    top_k: Number | None = None,
    sparsity: Number | None = None,
    min_blocks: Number = 1,
    max_blocks: Number | None = None,
    capacity: int | None = None,
    force_self: bool = False,
    force_first: int = 0,
    local_window: int | None = None,
    force: torch.Tensor | None = None,
    block_q: int = 64,
    block_k: int = 64,
    seq_q: int | None = None,
    seq_k: int | None = None,
    block_sizes: torch.Tensor | None = None,
    query_sizes: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    return_gini: bool = True,
) -> Selection:
    """The KV blocks that each query block keeps: of the highest scores the fewest whose mass is enough.

    A *score* is a number of at least 0: the probability that a query block puts on a KV block, or anything else that is a
    mass.  Rows need not sum to 1: mass counts relative to the sum of the row's finite scores.  NaN, -inf and numbers below 0 are
    no scores; +inf comes before every other score and has no mass.  (For scores of any sign: `BlockIndex.from_topk`.)

    Args:
        scores: [batch, heads, Q blocks, KV blocks] fp16, bf16 or fp32, any strides with a contiguous last dimension.  May
            require a gradient; the selection passes none.
        method: "gini": mass of at least tau, tau = tau_min + (tau_max - tau_min) * (1 - G), G the Gini coefficient of the
            row; or tau(G).  "top_p": mass of at least top_p.  "top_k": top_k blocks that have a score.
        tau_min, tau_max: 0 to 1, by default 0.5 and 0.95: asked of a row with one score, and of one with equal scores.
        tau: instead of them, a function of G fp32 [batch, heads, Q blocks] on the device that returns what is asked (a tensor
            that broadcasts with G, or a number).
        top_p: 0 to 1.
        top_k: blocks; more than there are means all of them.
        sparsity: instead of top_k: keep at least the rest of the KV blocks, max(1, ceil((1 - sparsity) * KV blocks)); 0 to 1,
            exact to a millionth.
        min_blocks, max_blocks: bounds of a list's length, min(·, KV blocks).  Where tensors disagree max_blocks wins.  What is
            needed beyond the scored blocks comes from those without a score, lowest number first, empty ones last.
        capacity: entries a list; by default max_blocks if that is a number, else what a top_k of numbers can need,
            else KV blocks; never more than KV blocks.  Lists are cut to it as by max_blocks.
        force_self: keep the KV blocks at the tokens of the query block; queries are aligned to the end of the keys, token i to
            token i + seq_k - seq_q.  force_first: keep the first so many blocks.  local_window: keep the blocks that are at most
            so many away from those of force_self (0: the same).  force: keep where true; bool, broadcasts with scores.  Forced
            blocks are in every list, whatever their score or size, and count as mass and toward min_blocks, max_blocks and
            top_k; only capacity is stronger: the lowest-numbered forced blocks stay.
        block_q, block_k, seq_q, seq_k, block_sizes, query_sizes: the record's, see `BlockIndex`; lengths by default whole blocks.
            A block of size 0 has no score, whatever its number says.
        softmax_scale: None, or above 0: scores are logits, finite or -inf, and softmax(softmax_scale * scores) over a row is
            what selects.
        return_gini: False: `Selection.gini` is None, and rows are not sorted for it; lists are the same.  Not with "gini".

    tau_min, tau_max, top_p, top_k, sparsity, min_blocks and max_blocks are numbers, or real tensors on the device of scores
    that broadcast to [batch, heads, Q blocks]; of one dimension: [heads].  Tensors are not read on the host; values out of range
    count as the nearest in range, a NaN share as 1.

    Returns:
        `Selection`.  Equal scores go to the lower block.  A share of 1 keeps every block with a score above 0.  A row without any
        score keeps min_blocks.  Lists, gini, tau and mass are the same to the last bit in every run.  No host synchronisation;
        all shapes follow from shapes.

    Rounding: a block's mass counts in whole 2^-30ths of its row's (in torch, and so of more than 4096 blocks: 2^-40ths), so that
    sums are exact in any order.  Where a sum of masses is within 2^-17 of the share asked for, the last block may be another one
    than in exact arithmetic.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError: naming the argument.

    Source: top-p is nucleus selection (Holtzman et al. 2020, arXiv:1904.09751); top-k over block scores as in VSA (Zhang et al.
    2025, arXiv:2505.13389).  The map from Gini coefficient to tau is our own definition.
    """
    bind_scores(scores)
    if not isinstance(return_gini, bool):
        raise DtypeError(f"return_gini must be a bool, got {return_gini!r}")
    if not return_gini and method == "gini":
        raise ValueRangeError(
            "return_gini is False, but method 'gini' keeps blocks by the Gini coefficients, accepted: 'top_p', 'top_k'"
        )
    seq_q = scores.shape[2] * block_q if seq_q is None else seq_q
    seq_k = scores.shape[3] * block_k if seq_k is None else seq_k
    geometry = (block_q, block_k, seq_q, seq_k)
    sizes = bind_sizes(scores, geometry, block_sizes, query_sizes)
    numbers = {"tau_min": tau_min, "tau_max": tau_max, "tau": tau, "top_p": top_p, "top_k": top_k, "sparsity": sparsity}
    bounds = blocks_setting("min_blocks", min_blocks, scores), max_blocks
    window = (force_self, force_first, local_window, force)
    call = make_call(scores, method, numbers, bounds, capacity, window, geometry, sizes)
    found = None
    if softmax_scale is not None:
        call = call._replace(softmax=check_number("softmax_scale", softmax_scale, above=0.0))
    if tau is not None:
        scores, call = _select.scores_of(scores.detach(), sizes, call.softmax), call._replace(softmax=None)
        found = gini(scores, block_sizes=block_sizes)
        call = call._replace(method="mass", amount=(setting_of("what tau returns", tau(found), scores),), gini=False)
    elif not return_gini:
        call = call._replace(gini=False)
    made = _run(scores.detach(), call)
    if return_gini and found is None:
        found = made.gini
    lists = BlockIndex(made.indices, made.counts, *geometry, block_sizes, query_sizes)
    return Selection(lists, found, None if call.method == "count" else made.tau, made.mass)


def gini(scores: torch.Tensor, *, block_sizes: torch.Tensor | None = None) -> torch.Tensor:
    """The Gini coefficient G of each row of scores [batch, heads, Q blocks, KV blocks]: fp32 [batch, heads, Q blocks].

    G = sum_i sum_j |x_i - x_j| / (2 n sum_i x_i) over the n finite scores of the row, zeros among them: 0 where all are
    equal or their sum is 0, (n - 1) / n where one has everything.  scores, block_sizes and what is no score: as for `select`.

    Source: Gini 1912; for the sorted form Sen, On Economic Inequality, 1973, section 2.
    """
    bind_scores(scores)
    sizes = bind_sizes(scores, None, block_sizes, None)
    scores = scores.detach()
    if scores.shape[3] > LONGEST_ROW:
        return gini_long(scores, sizes)
    return (GINI.dispatched if is_traced((scores, sizes)) else _select.gini)(scores, sizes)


def index(
    block_map: torch.Tensor,
    *,
    block_q: int = 64,
    block_k: int = 64,
    seq_q: int | None = None,
    seq_k: int | None = None,
    block_sizes: torch.Tensor | None = None,
    query_sizes: torch.Tensor | None = None,
    capacity: int | None = None,
    check: bool = False,
) -> BlockIndex:
    """The index of a bool map [batch or 1, heads or 1, Q blocks, KV blocks]: `BlockIndex.from_map`, the index stage by itself.

    No row is walked entry by entry: a parallel running count of the map, then for every entry of every list a binary search in
    it, log2(KV blocks) steps, all entries at once.  `select` makes its lists in its own launch and does not need this."""
    return BlockIndex.from_map(
        block_map, block_q=block_q, block_k=block_k, seq_q=seq_q, seq_k=seq_k, block_sizes=block_sizes,
        query_sizes=query_sizes, capacity=capacity, check=check,
    )  # fmt: skip


def _run(scores: torch.Tensor, call: SelectCall) -> Selected:
    """By the kernel, through the dispatcher where something watches, or by torch where rows are too long for it."""
    if scores.shape[3] > LONGEST_ROW:
        return select_long(scores, call)
    if is_traced((scores, call.force, call.block_sizes, *call.amount, *call.bounds)):
        return Selected(*SELECT.dispatched(scores, call))
    return Selected(*_select.forward(scores, call))


def is_traced(tensors: tuple[object, ...]) -> bool:
    """Whether a compiler, torch.func or somebody else has to see operators."""
    return torch.compiler.is_compiling() or is_transformed() or is_watched(tensors)
