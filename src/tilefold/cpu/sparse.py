"""Block-sparse attention over lists of KV blocks, forward and backward: blocks are gathered, many query blocks at once."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from . import state as fold
from .terms import Terms, capped
from .tiles import rows_of, spans

SCORES = 1 << 19  # that are folded at once: 2 MiB in fp32
KEYS = 512  # that one step takes in, at least a block


class Blocks(NamedTuple):
    """A call in units: one query block of a head (or, where all heads share a list, of the heads of a KV head).

    q: [units, rows, dim] fp32, 0 behind a sequence's end; k, v: [sequences * kv_heads * blocks, block_k, ..] fp32.
    indices [units, capacity], counts [units]: the lists; home [units]: the number of each unit's first KV block.
    sizes [units, blocks], live [units, rows]: valid tokens of each KV block, and which rows are queries; None: all.
    positions: [units, rows] of the queries among the keys.  lengths: the keys there are."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor
    home: torch.Tensor
    sizes: torch.Tensor | None
    live: torch.Tensor | None
    positions: torch.Tensor
    length: int
    block_k: int

    def steps(self) -> Iterator[tuple[slice, int]]:
        """Units that are folded at once, and the most blocks of their lists."""
        step = max(1, SCORES // (self.q.shape[1] * max(self.block_k, KEYS)))
        for units in spans(0, self.q.shape[0], step):
            yield units, int(self.counts[units].max())


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms, lists: Any, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Write out [batch, heads, seq_q, dim_v] and lse [batch, heads, seq_q].

    q: [batch, heads, seq_q, dim]; k, v: [batch, kv_heads, seq_k, ..]; lists: as `ops`' Lists, for at least these lengths."""
    blocks = _blocks(q, k, v, lists)
    made = q.new_empty((*blocks.q.shape[:2], v.shape[-1]), dtype=torch.float32)
    logs = made.new_empty(blocks.q.shape[:2])
    for units, most in blocks.steps():
        tile = blocks.q[units]
        state = fold.init(tile.shape[:2], v.shape[-1])
        for entries in spans(0, most, max(1, KEYS // blocks.block_k)):
            step = _step(blocks, units, entries)
            scores, _ = _scores(blocks, units, _gathered(blocks.k, step), step, terms)
            state = fold.step(state, scores, _gathered(blocks.v, step))
        made[units], logs[units] = fold.finish(state)
    _write(out, made, lists.block_q)
    _write(lse[..., None], logs[..., None], lists.block_q)


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms, lists: Any, statistics: tuple[torch.Tensor, torch.Tensor],
    dout: torch.Tensor, grads: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
) -> None:  # fmt: skip
    """Write the gradients of q, k and v (None: not wanted); statistics: lse, and delta as for `dense.backward`."""
    blocks = _blocks(q, k, v, lists)
    own_do, lse, delta = (_units(t, lists, _folded(lists, q, k)) for t in (dout, *(s[..., None] for s in statistics)))
    lse = lse.masked_fill(lse == -torch.inf, torch.inf) * fold.LOG2E
    if blocks.live is not None:
        own_do = own_do.masked_fill(~blocks.live[..., None], 0.0)
        delta = delta.masked_fill(~blocks.live[..., None], 0.0)
    dq, dk, dv = torch.zeros_like(blocks.q), torch.zeros_like(blocks.k), torch.zeros_like(blocks.v)
    for units, most in blocks.steps():
        tile, do = blocks.q[units], own_do[units]
        for entries in spans(0, most, max(1, KEYS // blocks.block_k)):
            step = _step(blocks, units, entries)
            keys = _gathered(blocks.k, step)
            scores, slope = _scores(blocks, units, keys, step, terms, True)
            weights = scores.sub_(lse[units]).exp2_()
            _scatter(dv, step.numbers, torch.bmm(weights.mT, do))
            ds = torch.bmm(do, _gathered(blocks.v, step).mT).sub_(delta[units]).mul_(weights)
            if slope is not None:
                ds.mul_(slope)
            dq[units] += torch.bmm(ds, keys).mul_(terms.scale)
            _scatter(dk, step.numbers, torch.bmm(ds.mT, tile).mul_(terms.scale))
    if grads[0] is not None:
        _write(grads[0], dq, lists.block_q)
    for target, total in zip(grads[1:], (dk, dv), strict=True):
        if target is not None:
            whole = total.view(*target.shape[:2], -1, total.shape[-1])
            target.copy_(whole[:, :, : target.shape[2]])


# ---------------------------------------------------------------- units


def _folded(lists: Any, q: torch.Tensor, k: torch.Tensor) -> int:
    """Query heads whose blocks make one unit: those of a KV head where no list is of one head alone."""
    per_head = [lists.indices.shape[1], lists.counts.shape[1]]
    per_head += [t.shape[1] for t in (lists.block_sizes, lists.query_sizes) if t is not None and t.dim() == 3]
    return q.shape[1] // k.shape[1] if max(per_head) == 1 else 1


def _blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: Any) -> Blocks:
    group, (batch, heads, seq_q) = _folded(lists, q, k), q.shape[:3]
    kv_heads, seq_k = k.shape[1:3]
    units, q_blocks, kv_blocks = heads // group, -(-seq_q // lists.block_q), max(1, -(-seq_k // lists.block_k))
    head = torch.arange(units) // (units // kv_heads)
    home = (torch.arange(batch)[:, None] * kv_heads + head)[:, :, None].expand(-1, -1, q_blocks) * kv_blocks

    def each(t: torch.Tensor) -> torch.Tensor:
        """[units, ..] of a tensor [batch or 1, heads or 1, Q blocks, ..]."""
        return t[:, :, :q_blocks].expand(batch, units, q_blocks, *t.shape[3:]).flatten(0, 2)

    sizes = live = None
    if lists.block_sizes is not None:
        sizes = each(_by_head(lists.block_sizes)[:, :, None].expand(-1, -1, q_blocks, -1))
    rows = torch.arange(lists.block_q).repeat(group)
    if lists.query_sizes is not None:
        live = rows < each(_by_head(lists.query_sizes))[:, None]
    own = _units(q, lists, group)
    if live is not None:  # the others may hold anything
        own = own.masked_fill_(~live[..., None], 0.0)
    first = each(torch.arange(q_blocks).view(1, 1, -1) * lists.block_q + seq_k - seq_q)
    return Blocks(own, _key_blocks(k, lists.block_k, kv_blocks), _key_blocks(v, lists.block_k, kv_blocks),
                  each(lists.indices), each(lists.counts), home.flatten(), sizes, live, first[:, None] + rows, seq_k,
                  lists.block_k)  # fmt: skip


def _by_head(sizes: torch.Tensor) -> torch.Tensor:
    """[blocks], [batch or 1, blocks] or [batch or 1, heads or 1, blocks] as three dimensions."""
    return sizes[:, None] if sizes.dim() == 2 else sizes[(None,) * (3 - sizes.dim())]


def _units(t: torch.Tensor, lists: Any, group: int) -> torch.Tensor:
    """[batch, heads, seq, dim] as [units, group * block_q, dim] fp32, 0 behind the end."""
    batch, heads, seq, dim = t.shape
    blocks = -(-seq // lists.block_q)
    wide = t.new_zeros((batch, heads, blocks * lists.block_q, dim), dtype=torch.float32)
    wide[:, :, :seq] = t
    wide = wide.view(batch, heads // group, group, blocks, lists.block_q, dim).transpose(2, 3)
    return wide.reshape(-1, group * lists.block_q, dim)


def _write(target: torch.Tensor, units: torch.Tensor, block_q: int) -> None:
    """What `_units` took apart, put together in `target`."""
    batch, heads, seq, dim = target.shape
    group = units.shape[1] // block_q
    whole = units.view(batch, heads // group, -1, group, block_q, dim).transpose(2, 3).reshape(batch, heads, -1, dim)
    target.copy_(whole[:, :, :seq])


def _key_blocks(t: torch.Tensor, block_k: int, blocks: int) -> torch.Tensor:
    """[batch, kv_heads, seq, dim] as [batch * kv_heads * blocks, block_k, dim] fp32, 0 behind the end."""
    rows = rows_of(t)
    missing = blocks * block_k - rows.shape[1]
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)).view(-1, block_k, rows.shape[2])


def _gathered(t: torch.Tensor, step: "Step") -> torch.Tensor:
    """[units, entries * block_k, dim] of a step's blocks; 0 for tokens that are not valid, which may hold anything."""
    found = t.index_select(0, step.numbers.flatten()).view(step.numbers.shape[0], -1, t.shape[2])
    return found if step.hidden is None else found.masked_fill_(step.hidden.mT, 0.0)


def _scatter(total: torch.Tensor, numbers: torch.Tensor, parts: torch.Tensor) -> None:
    """Add parts [units, entries * block_k, dim] to the blocks of these numbers, in order."""
    total.index_add_(0, numbers.flatten(), parts.view(-1, *total.shape[1:]))


class Step(NamedTuple):
    """Blocks that are taken in at once: their numbers [units, entries]; hidden [units, 1, entries * block_k]: tokens that are not
    valid, None if all are; their places among the keys [units, 1, entries * block_k]."""

    numbers: torch.Tensor
    hidden: torch.Tensor | None
    places: torch.Tensor


def _step(blocks: Blocks, units: slice, entries: slice) -> Step:
    index = blocks.indices[units, entries].long()
    listed = torch.arange(entries.start, entries.stop) < blocks.counts[units][:, None]
    listed &= index * blocks.block_k < blocks.length  # a shorter sequence of a packed batch
    index = torch.where(listed, index, 0)
    token = torch.arange(blocks.block_k)
    places = index[..., None] * blocks.block_k + token
    seen = listed[..., None] & (places < blocks.length)
    if blocks.sizes is not None:
        seen &= token < blocks.sizes[units].gather(1, index)[..., None]
    hidden = None if bool(seen.all()) else ~seen.flatten(1)[:, None]
    return Step(blocks.home[units][:, None] + index, hidden, places.flatten(1)[:, None])


def _scores(
    blocks: Blocks, units: slice, keys: torch.Tensor, step: Step, terms: Terms, with_slope: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scores [units, rows, keys] in base 2, -inf where masked; their slope by q k^T * scale, None for 1)."""
    tile = blocks.q[units]
    scores = tile.new_empty(tile.shape[0], tile.shape[1], keys.shape[1])
    alpha = terms.scale if terms.softcap else terms.scale * fold.LOG2E
    torch.baddbmm(scores, tile, keys.mT, beta=0.0, alpha=alpha, out=scores)
    slope = None
    if terms.softcap:
        slope = capped(scores, terms.softcap, with_slope)
        scores.mul_(fold.LOG2E)
    if step.hidden is not None:
        scores.masked_fill_(step.hidden, -torch.inf)
    if blocks.live is not None:
        scores.masked_fill_(~blocks.live[units][..., None], -torch.inf)
    if terms.right is not None:
        scores.masked_fill_(step.places > blocks.positions[units][..., None] + terms.right, -torch.inf)
    return scores, slope
