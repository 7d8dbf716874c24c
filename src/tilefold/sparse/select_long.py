"""Selection in torch operators, for rows that are too long for the kernel: the same rules in a dozen passes over the scores.

Nothing is read on the host.  Masses are whole 2^-40ths of a row's sum in int64, so that running sums are exact in any order."""

import torch

from ..ops.sparse.select import NOWHERE, SelectCall, Selected, Setting, check_forced, scores_of
from .lists import map_to_lists

PARTS = float(2**40)  # leaves room for 2^23 roundings in a row


def gini_long(scores: torch.Tensor, block_sizes: torch.Tensor | None) -> torch.Tensor:
    """fp32 [B, H, Qb]; block_sizes int32 [B, H, KVb] or None.  Memory: about 60 bytes a score while it runs."""
    return _gini(_scores(scores, block_sizes))


def select_long(scores: torch.Tensor, call: SelectCall) -> Selected:
    """As `ops.sparse.select.forward`.  Memory: about 120 bytes a score while it runs."""
    check_forced(scores, call)
    scores = scores_of(scores, call.block_sizes, call.softmax)
    x = _scores(scores, call.block_sizes)
    gini, blocks = _gini(x) if call.gini else x.new_empty(x.shape[:3], dtype=torch.float32), scores.shape[3]
    forced = _forced(scores, call)
    order = torch.where(x.isposinf(), 1e300, x).masked_fill_(forced, float("inf"))
    place = order.sort(dim=-1, descending=True, stable=True).indices  # forced blocks first; ties to the lower block
    x, mass = x.gather(-1, place), _masses(x).gather(-1, place)
    held = forced.sum(-1)
    rank = torch.arange(blocks, device=scores.device)
    free = rank >= held[..., None]
    tau = scores.new_empty(0, dtype=torch.float32)
    if call.method == "count":
        needed = free & (x >= 0) & (rank < _blocks(call.amount[0], gini, blocks)[..., None])
    else:
        tau = _tau(call, gini)
        goal = (tau.double() * mass.sum(-1)).ceil().masked_fill(tau >= 1, float("inf"))
        needed = free & (x > 0) & ((mass.cumsum(-1) - mass) < goal[..., None])
    count = torch.maximum(needed.sum(-1) + held, _blocks(call.bounds[0], gini, blocks))
    count = torch.maximum(torch.minimum(count, _blocks(call.bounds[1], gini, blocks)), held).clamp(max=call.capacity)
    kept = rank < count[..., None]
    whole = mass.sum(-1)
    share = (mass * kept).sum(-1).double() / whole.clamp(min=1)
    lists, counts, _ = map_to_lists(torch.zeros_like(forced).scatter_(-1, place, kept), call.capacity)
    return Selected(
        lists, counts, gini if call.gini else gini.new_empty(0), tau, torch.where(whole > 0, share, 1.0).float()
    )


def _scores(scores: torch.Tensor, block_sizes: torch.Tensor | None) -> torch.Tensor:
    """fp64: the score where there is one, -1 where not, -2 where the block has no tokens."""
    x = scores.double()
    x = torch.where(x >= 0, x, -1.0)
    return x if block_sizes is None else x.masked_fill(block_sizes[:, :, None] <= 0, -2.0)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """The finite scores, 0 for everything else."""
    return torch.where((x >= 0) & x.isfinite(), x, 0.0)


def _masses(x: torch.Tensor) -> torch.Tensor:
    """int64, whole parts of the row's sum."""
    finite = _finite(x)
    total = finite.sum(-1, keepdim=True)
    return (finite * (PARTS / total.masked_fill(total == 0, 1.0))).round().to(torch.int64)


def _gini(x: torch.Tensor) -> torch.Tensor:
    scored = (x >= 0) & x.isfinite()
    n = scored.sum(-1)
    ranked = _finite(x).sort(dim=-1, descending=True).values  # what is no score ranks with the zeros: no weight
    weight = n[..., None] - 1 - 2 * torch.arange(x.shape[-1], device=x.device)
    total = ranked.sum(-1)
    low = x.masked_fill(~scored, float("inf")).amin(-1)
    some = (total > 0) & (ranked[..., 0] > low)
    spread = (weight * ranked).sum(-1) / torch.where(some, n * total, 1.0)
    return torch.where(some, spread, 0.0).clamp_(min=0.0).float()


def _tau(call: SelectCall, gini: torch.Tensor) -> torch.Tensor:
    """The share asked for, fp32, as the kernel makes it."""
    tau = _number(call.amount[0], gini)
    if call.method == "gini":
        high = _number(call.amount[1], gini)
        tau = high - (high - tau) * gini
    return torch.where(tau < 1.0, tau.clamp(min=0.0), 1.0)


def _number(value: Setting, like: torch.Tensor) -> torch.Tensor:
    return value.float() if isinstance(value, torch.Tensor) else torch.full_like(like, value)


def _blocks(value: Setting, like: torch.Tensor, blocks: int) -> torch.Tensor:
    """int64 of each row: whole blocks, 0 to `blocks`."""
    return _number(value, like).nan_to_num(float(blocks)).clamp(0, blocks).long()


def _forced(scores: torch.Tensor, call: SelectCall) -> torch.Tensor:
    """bool [B, H, Qb, KVb]."""
    block_q, block_k, seq_q, seq_k = call.geometry
    column = torch.arange(scores.shape[3], device=scores.device)
    forced = column < call.force_first
    if call.reach != NOWHERE:
        first = torch.arange(scores.shape[2], device=scores.device) * block_q
        last = (first + block_q).clamp(max=seq_q) - 1
        low, high = ((t + seq_k - seq_q).div(block_k, rounding_mode="floor")[:, None] for t in (first, last))
        forced = forced | ((column >= low - call.reach) & (column <= high + call.reach))
    return forced.expand(scores.shape) if call.force is None else forced | call.force
