"""Dense attention over tiles of queries and keys, forward and backward (FlashAttention-2, Dao 2023, arXiv:2307.08691)."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..plan.torch_cpu import Cut
from . import ordered
from . import state as fold
from .terms import Place, Terms, band_of, factor_of, hide, modify
from .tiles import chunks, rows_of, spans


class Chunk(NamedTuple):
    """Sequences and KV heads that are folded at once: q [b, h, group, seq_q, dim] as it lies, k and v [b * h, seq_k, dim] in
    fp32."""

    batch: slice
    heads: slice
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def lead(self) -> tuple[int, int, int]:
        b, h, group = self.q.shape[:3]
        return b, h, group


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms, cut: Cut, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Write out [batch, heads, seq_q, dim_v] and lse [batch, heads, seq_q] fp32, natural log.

    q: [batch, heads, seq_q, dim]; k, v: [batch, kv_heads, seq_k, ..]; any strides and float dtypes."""
    if terms.ordered:
        ordered.forward(q, k, v, terms, out, lse)
        return
    seq_k = k.shape[2]
    out, lse = (_grouped(t, k.shape[1]) for t in (out, lse))
    for chunk in _chunks(q, k, v, cut):
        for rows in spans(0, q.shape[2], cut.block_m):
            tile = rows_of(chunk.q[..., rows, :])
            state = fold.init(tile.shape[:2], v.shape[-1], _sinks(terms, chunk, rows))
            for place, band in _places(chunk, rows, q.shape[2], seq_k, terms, cut.block_n):
                scores, _ = _scores(tile, chunk, place, band, terms)
                factor = factor_of(terms, place, chunk.lead[0])
                state = fold.step(
                    state, scores, chunk.v[:, place.keys], None if factor is None else factor.view_as(scores)
                )
            made, log = fold.finish(state)
            out[chunk.batch, chunk.heads, :, rows] = made.view(*chunk.lead, -1, v.shape[-1])
            lse[chunk.batch, chunk.heads, :, rows] = log.view(*chunk.lead, -1)


def _grouped(t: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[batch, heads, ..] as [batch, kv_heads, group, ..]."""
    made: torch.Tensor = t.unflatten(1, (kv_heads, t.shape[1] // kv_heads))
    return made


def _chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: Cut) -> Iterator[Chunk]:
    grouped = _grouped(q, k.shape[1])
    for b, h in chunks(k.shape[0], k.shape[1], cut):
        yield Chunk(b, h, grouped[b, h], rows_of(k[b, h]), rows_of(v[b, h]))


def _sinks(terms: Terms, chunk: Chunk, rows: slice) -> torch.Tensor | None:
    """[pairs, rows of the group, 1] fp32."""
    if terms.sinks is None:
        return None
    b, h, group = chunk.lead
    own: torch.Tensor = terms.sinks.float().unflatten(0, (-1, group))[chunk.heads]
    return own[None, :, :, None].expand(b, h, group, rows.stop - rows.start).reshape(b * h, -1, 1)


def _places(
    chunk: Chunk, rows: slice, seq_q: int, seq_k: int, terms: Terms, block_n: int
) -> Iterator[tuple[Place, tuple[int, int, int, int]]]:
    """The tiles of keys that some query of `rows` may see, with the queries' band."""
    shift = seq_k - seq_q
    band = band_of(terms, rows.start + shift, rows.stop - 1 + shift, seq_k)
    for keys in spans(band[0], band[3], block_n):
        yield Place(chunk.batch, chunk.heads, chunk.lead[2], rows, keys, shift), band


def _scores(
    tile: torch.Tensor,
    chunk: Chunk,
    place: Place,
    band: tuple[int, int, int, int],
    terms: Terms,
    with_slope: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores [pairs, rows of the group, keys] of a tile of queries in base 2, -inf where masked, and their slope by
    q k^T * scale, None for 1."""
    k = chunk.k[:, place.keys]
    scores = tile.new_empty(tile.shape[0], tile.shape[1], k.shape[1])
    alpha = terms.scale * fold.LOG2E if terms.bare else terms.scale
    torch.baddbmm(scores, tile, k.mT, beta=0.0, alpha=alpha, out=scores)
    slope = None
    whole = scores.view(*chunk.lead, -1, k.shape[1])
    if not terms.bare:
        slope = modify(whole, terms, place, with_slope)
    hide(whole, terms, place, band)
    return scores, None if slope is None else slope.view_as(scores)


# ---------------------------------------------------------------- backward


class Gradients(NamedTuple):
    """Where gradients are written or added; None where not wanted.  q, k, v like the tensors; bias fp32, sinks [heads] fp32."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    terms: Terms,
    cut: Cut,
    statistics: tuple[torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    grads: Gradients,
) -> None:
    """Gradients of `forward`: those of q, k and v are written, those of bias and sinks added to.

    statistics: lse [batch, heads, seq_q], and delta of the same shape, the row sums of dout * out less the gradient of lse."""
    dout, lse, delta = (_grouped(t, k.shape[1]) for t in (dout, *statistics))
    target_q = None if grads.q is None else _grouped(grads.q, k.shape[1])
    for chunk in _chunks(q, k, v, cut):
        b, h = chunk.batch, chunk.heads
        sums = torch.zeros_like(chunk.k), torch.zeros_like(chunk.v)
        for rows in spans(0, q.shape[2], cut.block_m):
            tile = Tile(
                *(rows_of(t[..., rows, :]) for t in (chunk.q, dout[b, h])),
                *(t[b, h, :, rows].float().reshape(sums[0].shape[0], -1, 1) for t in (lse, delta)),
            )
            dq = _backward_tile(tile, chunk, rows, (q.shape[2], k.shape[2]), terms, sums, grads, cut.block_n)
            if target_q is not None:
                target_q[b, h, :, rows] = dq.view(*chunk.lead, -1, q.shape[-1])
        for target, total in zip(grads[1:3], sums, strict=True):
            if target is not None:
                target[b, h] = total.view(*chunk.lead[:2], *total.shape[1:])


class Tile(NamedTuple):
    """A tile of query rows [pairs, rows of the group, ..] in fp32: q, the gradient of out, lse (-inf for a row without a live
    key), delta."""

    q: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor


def _backward_tile(
    tile: Tile,
    chunk: Chunk,
    rows: slice,
    lengths: tuple[int, int],
    terms: Terms,
    sums: tuple[torch.Tensor, torch.Tensor],
    grads: Gradients,
    block_n: int,
) -> torch.Tensor:
    """dq of a tile of queries; adds to the sums of dk and dv, and to the gradients of bias and sinks."""
    dq = torch.zeros_like(tile.q)
    if grads.sinks is not None and terms.sinks is not None:
        _add_sinks(grads.sinks, tile, chunk, rows, terms)
    lse = tile.lse.masked_fill(tile.lse == -torch.inf, torch.inf) * fold.LOG2E
    for place, band in _places(chunk, rows, *lengths, terms, block_n):
        k, v = chunk.k[:, place.keys], chunk.v[:, place.keys]
        scores, slope = _scores(tile.q, chunk, place, band, terms, True)
        weights = scores.sub_(lse).exp2_()
        dweights = torch.bmm(tile.dout, v.mT)
        factor = factor_of(terms, place, chunk.lead[0])
        kept = weights
        if factor is not None:
            factor = factor.view_as(weights)
            kept = weights * factor
            dweights.mul_(factor)
        if grads.v is not None or grads.k is not None:
            sums[1][:, place.keys].baddbmm_(kept.mT, tile.dout)
        dscores = dweights.sub_(tile.delta).mul_(weights)
        if grads.bias is not None:
            _add_bias(grads.bias, dscores.view(*chunk.lead, -1, k.shape[1]), place)
        if slope is not None:
            dscores.mul_(slope)
        if grads.q is not None:
            dq.baddbmm_(dscores, k, alpha=terms.scale)
        if grads.k is not None:
            sums[0][:, place.keys].baddbmm_(dscores.mT, tile.q, alpha=terms.scale)
    return dq


def _add_bias(total: torch.Tensor, dscores: torch.Tensor, place: Place) -> None:
    """Add what a tile gives to the gradient of the bias, fp32 and of the bias' shape."""
    part = place.cut(total)
    over = [d for d in range(5) if part.shape[d] == 1 and dscores.shape[d] > 1]
    part.add_(dscores.sum(over, keepdim=True) if over else dscores)


def _add_sinks(total: torch.Tensor, tile: Tile, chunk: Chunk, rows: slice, terms: Terms) -> None:
    """Add what a tile's rows give to the gradient of the sinks: their weight is a key's without a value."""
    sinks = _sinks(terms, chunk, rows)
    if sinks is None:
        return
    live = tile.lse != -torch.inf
    share = torch.where(live, (sinks - tile.lse).exp() * tile.delta, 0.0)
    part = share.view(*chunk.lead, -1).sum((0, 3))
    total.unflatten(0, (-1, chunk.lead[2]))[chunk.heads].sub_(part)
