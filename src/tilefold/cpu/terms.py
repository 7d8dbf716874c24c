"""What changes the scores of a tile and which of them count: softcap, ALiBi, bias, band, mask, dropout."""

from typing import Any, NamedTuple

import torch

from .philox import uniform
from .state import LOG2E


class Terms(NamedTuple):
    """The options of a call, for all its sequences.

    scale: of q k^T.  left, right: the window, None where unbounded.  softcap: 0.0 for none.  slopes: [batch or 1, heads] fp32.
    bias, mask: [batch or 1, heads or 1, seq_q or 1, seq_k].  sinks: [heads].  drop: probability, and seed [1] int64.
    first: the number of the first sequence, by which dropout and rules go.  rules: pairs (function of `cpu.rules`, its args) that
    have to hold.  ordered: by `cpu.ordered`."""

    scale: float
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    drop: float = 0.0
    seed: torch.Tensor | None = None
    first: int = 0
    rules: tuple[tuple[Any, tuple[Any, ...]], ...] = ()
    ordered: bool = False

    @property
    def bare(self) -> bool:
        """Whether nothing changes the scores: then the product can scale them to base 2."""
        return not self.softcap and self.slopes is None and self.bias is None

    def sequence(self, b: int, seq_q: int, seq_k: int) -> "Terms":
        """Those of sequence b alone, of a packed call: bias and mask are indexed within each sequence."""

        def own(t: torch.Tensor | None) -> torch.Tensor | None:
            if t is None:
                return None
            t = t[b : b + 1] if t.shape[0] > 1 else t
            return t[:, :, : seq_q if t.shape[2] > 1 else 1, :seq_k]

        slopes = self.slopes
        if slopes is not None and slopes.shape[0] > 1:
            slopes = slopes[b : b + 1]
        return self._replace(slopes=slopes, bias=own(self.bias), mask=own(self.mask), first=self.first + b)


class Place(NamedTuple):
    """Where a tile of scores [sequences, kv heads, group, rows, keys] lies: the parts of each dimension, and seq_k - seq_q.
    Sequences are those of the call, heads those of K and V."""

    batch: slice
    heads: slice
    group: int
    rows: slice
    keys: slice
    shift: int

    def cut(self, t: torch.Tensor) -> torch.Tensor:
        """The part of a bias or mask [batch or 1, heads or 1, seq_q or 1, seq_k], as it broadcasts with the tile."""
        own = slice(self.heads.start * self.group, self.heads.stop * self.group)
        t = t[self.batch if t.shape[0] > 1 else slice(None), own if t.shape[1] > 1 else slice(None),
              self.rows if t.shape[2] > 1 else slice(None), self.keys]  # fmt: skip
        return t.unflatten(1, (-1, self.group)) if t.shape[1] > 1 or self.group == 1 else t.unsqueeze(2)

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the queries among the keys [rows, 1], and of the keys [1, keys]."""
        rows = torch.arange(self.rows.start, self.rows.stop)[:, None]
        return rows + self.shift, torch.arange(self.keys.start, self.keys.stop)[None, :]


def band_of(terms: Terms, first: int, last: int, seq_k: int) -> tuple[int, int, int, int]:
    """(lo, full_lo, full_hi, hi): keys lo to hi may be seen by queries at the positions first to last among the keys, and those
    from full_lo to full_hi by all of them; full_lo may be the greater one: then each key is hidden from some."""
    left, right = terms.left, terms.right
    lo = 0 if left is None else min(max(first - left, 0), seq_k)
    hi = seq_k if right is None else min(max(last + right + 1, lo), seq_k)
    full_lo = lo if left is None else min(max(last - left, lo), hi)
    full_hi = hi if right is None else min(max(first + right + 1, lo), hi)
    return lo, full_lo, full_hi, hi


def modify(scores: torch.Tensor, terms: Terms, place: Place, with_slope: bool = False) -> torch.Tensor | None:
    """Change scores [sequences, kv heads, group, rows, keys] fp32 in place: softcap, ALiBi, bias, in this order;
    then to base 2.

    with_slope: return the derivative of the new scores by the given ones, None for 1."""
    slope = capped(scores, terms.softcap, with_slope) if terms.softcap else None
    if terms.slopes is not None:
        positions, keys = place.numbers()
        per_head = terms.slopes[:, :, None, None]
        part = Place(*place[:3], slice(None), slice(None), 0).cut(per_head)
        scores.addcmul_(part.float(), (positions - keys).abs().float(), value=-1.0)
    if terms.bias is not None:
        scores.add_(place.cut(terms.bias))
    scores.mul_(LOG2E)
    return slope


def capped(scores: torch.Tensor, cap: float, with_slope: bool = False) -> torch.Tensor | None:
    """Make cap * tanh(score / cap) of the scores, in place; the derivative, if wanted."""
    curve = scores.div_(cap).tanh_()
    slope = torch.addcmul(torch.ones(()), curve, curve, value=-1.0) if with_slope else None
    curve.mul_(cap)
    return slope


def hide(scores: torch.Tensor, terms: Terms, place: Place, band: tuple[int, int, int, int]) -> None:
    """-inf where a query does not see a key; band: of the tile's queries, outside of which nothing is looked at."""
    _, full_lo, full_hi, _ = band
    keys = place.keys
    if terms.left is not None and keys.start < full_lo:
        end = min(full_lo, keys.stop)
        positions, at = place._replace(keys=slice(keys.start, end)).numbers()
        scores[..., : end - keys.start].masked_fill_(at < positions - terms.left, -torch.inf)
    if terms.right is not None and keys.stop > full_hi:
        begin = max(full_hi, keys.start)
        positions, at = place._replace(keys=slice(begin, keys.stop)).numbers()
        scores[..., begin - keys.start :].masked_fill_(at > positions + terms.right, -torch.inf)
    if terms.mask is not None:
        scores.masked_fill_(place.cut(terms.mask).logical_not(), -torch.inf)
    if terms.rules:
        batch, heads = numbers_of(terms, place, scores.shape[0])
        positions, at = place.numbers()
        for rule, args in terms.rules:
            seen = rule(None, batch, heads, positions - place.shift, at, (*args, 0, place.shift))
            scores.masked_fill_(~seen, -torch.inf)


def numbers_of(terms: Terms, place: Place, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the sequences and of the query heads of a tile, as they broadcast with it."""
    first = terms.first + (place.batch.start or 0)
    batch = torch.arange(first, first + sequences)[:, None, None, None, None]
    heads = torch.arange(place.heads.start * place.group, place.heads.stop * place.group)
    return batch, heads.view(1, -1, place.group, 1, 1)


def factor_of(terms: Terms, place: Place, sequences: int) -> torch.Tensor | None:
    """What dropout multiplies the weights of a tile by: 0, or 1 / (1 - p); None without dropout."""
    if not terms.drop or terms.seed is None:
        return None
    batch, heads = numbers_of(terms, place, sequences)
    rows = torch.arange(place.rows.start, place.rows.stop)[:, None]
    keys = torch.arange(place.keys.start, place.keys.stop)[None, :]
    number = uniform(int(terms.seed), rows, keys, batch, heads)
    return torch.where(number < terms.drop, 0.0, 1.0 / (1.0 - terms.drop))
