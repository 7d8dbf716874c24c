"""The stages of sparse video attention: rows for blocks, coarse attention with scores, selection, and the mix by gates."""

from typing import Any

import torch

from ..plan.torch_cpu import cut_of
from . import dense
from .dense import Gradients
from .state import LOG2E
from .terms import Terms
from .tiles import delta_of, heads_first, rows_of, spans

MEAN, WEIGHTED = 0, 1
Tensor = torch.Tensor
Maybe = torch.Tensor | None


def sizes_by_head(sizes: Tensor) -> Tensor:
    """[blocks], [batch or 1, blocks] or [batch or 1, heads or 1, blocks] as [batch or 1, heads or 1, blocks]."""
    return sizes[:, None] if sizes.dim() == 2 else sizes[(None,) * (3 - sizes.dim())]


# ---------------------------------------------------------------- rows for blocks


def _factors(weight: Maybe, sizes: Maybe, seq: int, blocks: int, block: int, kind: int) -> tuple[Tensor, Tensor]:
    """(f [batch or 1, heads or 1, blocks, block]: what each token is multiplied with; bool of that shape: which are valid)."""
    token = torch.arange(block)
    size = (seq - torch.arange(blocks) * block).clamp(0, block).view(1, 1, -1)
    if sizes is not None:
        size = torch.minimum(size, sizes_by_head(sizes).clamp_min(0))
    size = size[..., None]
    valid = token < size
    factor = (
        torch.ones(()) if kind > WEIGHTED else (1.0 / size.clamp_min(1).float()) * (block if kind == WEIGHTED else 1)
    )
    if kind == WEIGHTED and weight is not None:
        factor = factor * weight.float().view(1, -1, 1, block)
    return factor.expand(torch.broadcast_shapes(factor.shape, valid.shape)), valid


def _in_blocks(x: Tensor, blocks: int, block: int) -> Tensor:
    """[batch, heads, seq, dim] as [batch, heads, blocks, block, dim] fp32, 0 behind the end."""
    wide = x.new_zeros((*x.shape[:2], blocks * block, x.shape[3]), dtype=torch.float32)
    wide[:, :, : x.shape[2]] = x
    return wide.view(*x.shape[:2], blocks, block, x.shape[3])


def gather(x: Tensor, weight: Maybe, sizes: Maybe, rows: Tensor, layout: str, block: int, kind: int) -> None:
    """rows, of blocks: weighted sums over the valid tokens of x; what lies past them is not looked at.  layout: of both."""
    x, rows = heads_first(x, layout), heads_first(rows, layout)
    blocks = rows.shape[2]
    factor, valid = _factors(weight, sizes, x.shape[2], blocks, block, kind)
    tokens = _in_blocks(x, blocks, block).masked_fill_(~valid[..., None], 0.0)
    rows.copy_((tokens * factor[..., None]).sum(3))


def spread(rows: Tensor, weight: Maybe, sizes: Maybe, x: Tensor, layout: str, block: int, kind: int) -> None:
    """x of rows, the transpose of `gather`: 0 for tokens that are not valid."""
    rows, x = heads_first(rows, layout), heads_first(x, layout)
    factor, valid = _factors(weight, sizes, x.shape[2], rows.shape[2], block, kind)
    tokens = (rows.float()[:, :, :, None] * factor[..., None]).masked_fill(~valid[..., None], 0.0)
    x.copy_(tokens.flatten(2, 3)[:, :, : x.shape[2]])


def weight_gradient(x: Tensor, drows: Tensor, sizes: Maybe, part: Tensor, layout: str, block: int) -> None:
    """part [batch, blocks, heads, block] fp32: x_t . drow * block / size for the valid tokens of each block, 0 for the others."""
    x, drows = heads_first(x, layout), heads_first(drows, layout)
    blocks = drows.shape[2]
    factor, valid = _factors(None, sizes, x.shape[2], blocks, block, WEIGHTED)
    tokens = _in_blocks(x, blocks, block).masked_fill_(~valid[..., None], 0.0)
    part.copy_((torch.einsum("bhntd,bhnd->bhnt", tokens, drows.float()) * factor).transpose(1, 2))


# ---------------------------------------------------------------- coarse attention


def _dead_queries(query_sizes: Maybe, seq: int, block: int) -> Maybe:
    """bool [batch or 1, heads or 1, seq]: queries that their block does not have."""
    if query_sizes is None:
        return None
    token = torch.arange(seq)
    return token % block >= sizes_by_head(query_sizes)[..., token // block]


def _coarse_terms(scale: float, block_sizes: Maybe, heads: int) -> Terms:
    """Rows of size 0 are dead; sizes are those of KV heads."""
    if block_sizes is None:
        return Terms(scale)
    live = sizes_by_head(block_sizes) > 0
    if live.shape[1] > 1:
        live = live.repeat_interleave(heads // live.shape[1], 1)
    return Terms(scale, mask=live[:, :, None])


def _live_rows(t: Tensor, terms: Terms, group: int) -> Tensor:
    """Rows [batch, kv_heads, rows, dim] with 0 for the dead ones, which may hold anything."""
    if terms.mask is None:
        return t
    live = terms.mask[:, :: group if terms.mask.shape[1] > 1 else 1].mT
    return torch.where(live, t, 0.0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Tensor, block_sizes: Maybe, query_sizes: Maybe,
    plan: Any, layout: str, scale: float,
) -> None:  # fmt: skip
    """out, lse of every query over the rows k and v, and scores [1, batch, heads, blocks, rows]: the mean or the maximum of the
    weights of a block's valid queries; "each": [1, batch, heads, seq_q, rows]."""
    scores, block, reduction = scores[0], plan.problem.block, plan.problem.reduction
    q, k, v, out = (heads_first(t, layout) for t in (q, k, v, out))
    terms = _coarse_terms(scale, block_sizes, q.shape[1])
    group = q.shape[1] // k.shape[1]
    k, v = (_live_rows(t, terms, group) for t in (k, v))
    dense.forward(q, k, v, terms, cut_of(q.shape[0], k.shape[1], group, q.shape[2], k.shape[2]), out, lse)
    dead = _dead_queries(query_sizes, q.shape[2], block)
    if dead is not None:
        out.masked_fill_(dead[..., None], 0.0)
        lse.masked_fill_(dead, -torch.inf)
    step = block * max(1, (1 << 19) // (block * q.shape[1] * max(1, k.shape[2])))
    for b in range(q.shape[0]):
        keys = rows_of(k[b : b + 1])
        for rows in spans(0, q.shape[2], step):
            tile = rows_of(q[b : b + 1, :, rows].unflatten(1, (-1, group)).flatten(2, 3))
            s = torch.bmm(tile, keys.mT).mul_(scale * LOG2E).view(q.shape[1], -1, keys.shape[1])
            log = lse[b, :, rows, None] * LOG2E
            p = s.sub_(log.masked_fill(log == -torch.inf, torch.inf)).exp2_()
            if dead is not None:
                p.masked_fill_(dead[b if dead.shape[0] > 1 else 0][:, rows, None], 0.0)
            if terms.mask is not None:
                p.masked_fill_(~terms.mask[b if terms.mask.shape[0] > 1 else 0], 0.0)
            own = slice(rows.start // block, -(-rows.stop // block))
            scores[b, :, own] = p if reduction == "each" else _reduced(p, query_sizes, b, own, block, reduction)


def _reduced(p: Tensor, query_sizes: Maybe, b: int, own: slice, block: int, reduction: str) -> Tensor:
    """p [heads, queries, rows] by blocks of queries."""
    blocks = own.stop - own.start
    length = p.shape[1]
    wide = torch.nn.functional.pad(p, (0, 0, 0, blocks * block - length)).view(p.shape[0], blocks, block, -1)
    if reduction == "max":
        return wide.amax(2)
    count = (length - torch.arange(blocks) * block).clamp(1, block)
    if query_sizes is not None:
        given = sizes_by_head(query_sizes)
        count = torch.minimum(count, given[b if given.shape[0] > 1 else 0][:, own].clamp_min(1))
    return wide.sum(2) / count[..., None]


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Maybe, block_sizes: Maybe,
    wanted: tuple[bool, ...], layout: str, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of `attend`'s out and lse by q, k and v, empty where not wanted; queries that a block does not have have lse
    -inf, and no gradient."""
    made = [torch.empty(t.shape if w else (0,), dtype=t.dtype) for t, w in zip((q, k, v), wanted, strict=True)]
    grads = (heads_first(t, layout) if w else None for t, w in zip(made, wanted, strict=True))
    delta = delta_of(out, dout, dlse, layout)
    q, k, v, dout = (heads_first(t, layout) for t in (q, k, v, dout))
    cut = cut_of(q.shape[0], k.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2])
    dead = lse == -torch.inf
    dout, delta = torch.where(dead[..., None], 0.0, dout.float()), torch.where(dead, 0.0, delta)
    q = torch.where(dead[..., None], 0.0, q.float())
    terms = _coarse_terms(scale, block_sizes, q.shape[1])
    k, v = (_live_rows(t, terms, q.shape[1] // k.shape[1]) for t in (k, v))
    dense.backward(q, k, v, terms, cut, (lse, delta), dout, Gradients(*grads))
    return made


# ---------------------------------------------------------------- selection


def _scored(scores: Tensor, sizes: Maybe) -> tuple[Tensor, Tensor]:
    """(which blocks have a score, the mass of each in fp64): infinities are scores without a mass."""
    scored = scores >= 0  # false for NaN
    if sizes is not None:
        scored = scored & (sizes > 0)[:, :, None]
    return scored, torch.where(scored & scores.isfinite(), scores, 0.0).double()


def gini(scores: Tensor, sizes: Maybe, made: Tensor) -> None:
    """made [batch, heads, Q blocks]: the Gini coefficient of each row's finite scores."""
    scored, mass = _scored(scores, sizes)
    many = (scored & scores.isfinite()).sum(-1)
    ranked = mass.sort(-1, descending=True).values
    rank = torch.arange(1, scores.shape[-1] + 1)
    spread_ = ((many[..., None] + 1 - 2 * rank) * ranked).sum(-1)
    total = mass.sum(-1) * many
    made.copy_(torch.where(total > 0, spread_ / total, 0.0).clamp_min(0.0))


def _forced(scores: Tensor, call: Any) -> Tensor:
    """bool [batch or 1, heads or 1, Q blocks, KV blocks]."""
    q_blocks, kv_blocks = scores.shape[2:]
    column = torch.arange(kv_blocks)
    forced: Tensor = (column < call.force_first).expand(q_blocks, -1)
    block_q, block_k, seq_q, seq_k = call.geometry
    first = torch.arange(q_blocks) * block_q
    low, high = first + seq_k - seq_q, (first + block_q).clamp_max(seq_q) - 1 + seq_k - seq_q
    near = (column >= (low // block_k - call.reach)[:, None]) & (column <= (high // block_k + call.reach)[:, None])
    forced = (forced | near)[None, None]
    return forced if call.force is None else forced | call.force


def _number(value: Any) -> Tensor:
    return value.double() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)


def _whole(value: Any, blocks: int) -> Tensor:
    """A number of blocks."""
    return _number(value).clamp(0, blocks).long()


def _wanted(
    call: Any, scores: Tensor, order: Tensor, parts: tuple[Tensor, Tensor, Tensor], gini_of: Tensor, tau_of: Tensor
) -> Tensor:
    """How many blocks each row asks for, forced ones among them; writes tau_of.  parts: forced, scored, mass, by columns."""
    forced, scored, mass = (t.gather(-1, order) for t in parts)
    held = forced.sum(-1)
    if call.method == "count":
        blocks = _whole(call.amount[0], scores.shape[-1])
        return torch.minimum(blocks, (scored & ~forced).sum(-1) + held)
    tau = _number(call.amount[0])
    if call.method == "gini":
        high = _number(call.amount[1])
        tau = high - (high - tau) * gini_of.double()
    tau = tau.nan_to_num(1.0).clamp(0.0, 1.0).expand(tau_of.shape)
    tau_of.copy_(tau)
    goal = torch.where(tau < 1.0, tau * mass.sum(-1), torch.inf)
    before = mass.cumsum(-1) - mass
    positive = scores.gather(-1, order) > 0
    return (~forced & scored & positive & (before < goal[..., None])).sum(-1) + held


def select(
    scores: Tensor, sizes: Maybe, force: Maybe, indices: Tensor, counts: Tensor, gini_of: Tensor, tau: Tensor, mass_of: Tensor,
    amount: tuple[Any, ...], least: tuple[Any, ...], most: tuple[Any, ...], call: Any,
) -> None:  # fmt: skip
    """Write what `ops`' Selected has: blocks in the order of their scores until a share of the mass, or a number, is reached.

    amount, least, most: what the kernel's settings are, first their value.  call: `ops`' SelectCall without tensors."""
    call = call._replace(amount=tuple(one[0] for one in amount), force=force)
    scored, mass = _scored(scores, sizes)
    if call.gini:
        gini(scores, sizes, gini_of)
    forced = _forced(scores, call).expand(scores.shape)
    empty = torch.zeros((), dtype=torch.bool) if sizes is None else (sizes <= 0)[:, :, None]
    key = torch.where(scored, scores.double(), torch.where(empty, -2.0, -1.0))
    order = key.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, (~forced.gather(-1, order)).to(torch.uint8).argsort(dim=-1, stable=True))
    held, blocks = forced.sum(-1), scores.shape[-1]
    wanted = _wanted(call, scores, order, (forced, scored, mass), gini_of, tau)
    count = torch.maximum(wanted, _whole(least[0], blocks))
    count = torch.maximum(torch.minimum(count, _whole(most[0], blocks)), held).clamp_max(call.capacity)
    ranked = torch.arange(blocks) < count[..., None]
    keep = torch.zeros_like(forced).scatter(-1, order, ranked)
    indices.copy_((~keep).to(torch.uint8).argsort(dim=-1, stable=True)[..., : call.capacity])
    counts.copy_(count)
    total = mass.sum(-1)
    share = torch.where(keep, mass, 0.0).sum(-1) / torch.where(total > 0, total, 1.0)
    mass_of.copy_(torch.where(total > 0, share, 1.0))


# ---------------------------------------------------------------- gates


def _gated(x: Tensor, gate: Maybe, layout: str) -> Tensor:
    """x in fp32, times its gate [heads], [.., .., ..] or [.., .., .., dim or 1]."""
    wide = x.float()
    if gate is None or gate.dim() == 4:
        return wide if gate is None else wide * gate
    return wide * (gate[:, None, None] if gate.dim() == 1 and layout == "bhsd" else gate[..., None])


def mix(coarse: Maybe, fine: Maybe, gate_coarse: Maybe, gate_fine: Maybe, out: Tensor, layout: str) -> None:
    """out: the sum of the branches, each times its gate, in fp32."""
    parts = [_gated(x, gate, layout) for x, gate in ((coarse, gate_coarse), (fine, gate_fine)) if x is not None]
    out.copy_(parts[0] if len(parts) == 1 else parts[0] + parts[1])


def mix_backward(
    coarse: Maybe, fine: Maybe, gate_coarse: Maybe, gate_fine: Maybe, dout: Tensor, dcoarse: Maybe, dfine: Maybe,
    dgate_coarse: Maybe, dgate_fine: Maybe, layout: str,
) -> None:  # fmt: skip
    """Gradients of both branches, then of both gates, the latter for every row; None: not wanted."""
    do = dout.float()
    for target, gate in ((dcoarse, gate_coarse), (dfine, gate_fine)):
        if target is not None:
            target.copy_(_gated(do, gate, layout))
    for target, branch in ((dgate_coarse, coarse), (dgate_fine, fine)):
        if target is not None and branch is not None:
            product = branch.float() * do
            target.copy_(product if target.shape[-1] > 1 or product.shape[-1] == 1 else product.sum(-1, keepdim=True))
