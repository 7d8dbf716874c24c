"""What the demo claims, computed: every layer against fp64, embeddings and rankings against PyTorch, a head's probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilefold import reference
from tilefold.cli.demo.capture import LayerCall
from tilefold.reference import Comparison


@dataclass(frozen=True, slots=True)
class LayerError:
    """One layer's outputs and lse against fp64 on the q, k and v that the layer really had."""

    layer: int
    out: Comparison
    lse: Comparison
    seconds: float

    @property
    def ok(self) -> bool:
        """Both within the limits that follow from the rounding of the layer's dtype."""
        return self.out.ok and self.lse.ok


def _oracle(call: LayerCall, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with every score written out, computed in `dtype`."""
    q, k, v = call.q, call.k, call.v
    if call.offsets is None:
        return reference.attention(q, k, v, mask=call.mask, scale=call.scale, dtype=dtype)
    packing = (call.offsets, call.offsets, call.longest, call.longest)
    return reference.attention_varlen(q, k, v, *packing, scale=call.scale, dtype=dtype)


def layer_errors(calls: Sequence[LayerCall], layers: int) -> list[LayerError]:
    """Judge every layer over all of its batches; `calls` holds the layers of the first batch, then of the next."""
    found = []
    for layer in range(layers):
        mine = calls[layer::layers]
        exact = [_oracle(call, torch.float64) for call in mine]
        plain = [_oracle(call, call.q.dtype) for call in mine]
        got = [(call.out, call.lse) for call in mine]
        out, lse = (
            reference.compare(_flat(got, side), _flat(exact, side), _flat(plain, side), unit=float(side))
            for side in (0, 1)
        )
        found.append(LayerError(layer, out, lse, sum(call.seconds for call in mine)))
    return found


def _flat(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], side: int) -> torch.Tensor:
    return torch.cat([pair[side].flatten() for pair in pairs])


@dataclass(frozen=True, slots=True)
class Ranking:
    """similarity: [n, n] cosines, fp64. order: [n, n - 1], for every sentence the others, nearest first. gap: the smallest
    difference between two neighbours in any row of `order`, so by how much the ranking is decided."""

    similarity: torch.Tensor
    order: torch.Tensor
    gap: float


def rank(embeddings: torch.Tensor) -> Ranking:
    """Rank all other sentences for every sentence by the cosine of their normalised embeddings [n, hidden], n at least 2."""
    e = embeddings.detach().cpu().double()
    similarity = e @ e.T
    others = similarity.clone().fill_diagonal_(-torch.inf)
    values, order = others.sort(dim=1, descending=True, stable=True)
    values = values[:, :-1]
    gaps = values[:, :-1] - values[:, 1:]
    return Ranking(similarity, order[:, :-1], float(gaps.min()) if gaps.numel() else float("inf"))


def same_ranking(one: Ranking, other: Ranking) -> bool:
    """Whether every sentence ranks all others in the same order."""
    return torch.equal(one.order, other.order)


def nearest(ranking: Ranking) -> list[tuple[int, float]]:
    """The nearest other sentence of each, and its cosine."""
    first = ranking.order[:, 0].tolist()
    return [(j, float(ranking.similarity[i, j])) for i, j in enumerate(first)]


def probabilities(call: LayerCall, row: int, tokens: int, head: int) -> torch.Tensor:
    """One head's attention probabilities of one sentence, [tokens, tokens] fp64, from tilefold's lse: exp(scale q k^T - lse).

    row: the sentence's row in the call's batch. The kernel never wrote these: the lse is all that is needed to get them back.
    """
    if call.offsets is None:
        q, k, lse = call.q[row, :tokens, head], call.k[row, :tokens, head], call.lse[row, head, :tokens]
    else:
        start = int(call.offsets[row])
        part = slice(start, start + tokens)
        q, k, lse = call.q[part, head], call.k[part, head], call.lse[head, part]
    scores = call.scale * q.double() @ k.double().T
    return torch.exp(scores - lse.double()[:, None]).cpu()
