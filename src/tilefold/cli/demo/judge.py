"""What the demo claims, computed: every layer against fp64, embeddings and rankings against PyTorch, a head's probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilefold import reference
from tilefold.cli.demo.model import LayerCall
from tilefold.reference import Comparison


@dataclass(frozen=True, slots=True)
class Check:
    """One claim of the demo: whether it holds, and the figures that say so."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class LayerError:
    """One layer's outputs and lse against fp64 on the q, k and v that the layer really had, within the limits that follow from
    the rounding of the layer's dtype."""

    layer: int
    out: Comparison
    lse: Comparison
    seconds: float

    @property
    def ok(self) -> bool:
        return self.out.ok and self.lse.ok


def layer_errors(calls: Sequence[LayerCall], layers: int) -> list[LayerError]:
    """Judge every layer over all of its batches; `calls` holds the layers of the first batch, then of the next."""
    found = []
    for layer in range(layers):
        mine = calls[layer::layers]
        exact, plain = (
            [getattr(reference, call.function)(call.q, call.k, call.v, **call.options, dtype=dtype) for call in mine]
            for dtype in (torch.float64, mine[0].q.dtype)
        )
        got = [(call.out, call.lse) for call in mine]
        out, lse = (
            [torch.cat([one[side].flatten() for one in each]) for each in (got, exact, plain)] for side in (0, 1)
        )
        judged = reference.compare(out[0], out[1], out[2]), reference.compare(lse[0], lse[1], lse[2], unit=1.0)
        found.append(LayerError(layer, *judged, sum(call.seconds for call in mine)))
    return found


@dataclass(frozen=True, slots=True)
class Ranking:
    """similarity: [n, n] cosines, fp64. order: [n, n - 1], for every sentence the others, nearest first. gap: the smallest
    difference between two neighbours in any row of `order`, so by how much the ranking is decided."""

    similarity: torch.Tensor
    order: torch.Tensor
    gap: float

    @property
    def nearest(self) -> list[tuple[int, float]]:
        """The nearest other sentence of each, and its cosine."""
        return [(j, float(self.similarity[i, j])) for i, j in enumerate(self.order[:, 0].tolist())]


def rank(embeddings: torch.Tensor) -> Ranking:
    """Rank all other sentences for every sentence by the cosine of their normalised embeddings [n, hidden], n at least 2."""
    e = embeddings.detach().cpu().double()
    similarity = e @ e.T
    others = similarity.clone().fill_diagonal_(-torch.inf)
    values, order = others.sort(dim=1, descending=True, stable=True)
    values = values[:, :-1]
    gaps = values[:, :-1] - values[:, 1:]
    return Ranking(similarity, order[:, :-1], float(gaps.min()) if gaps.numel() else float("inf"))


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
    scores = call.options["scale"] * q.double() @ k.double().T
    return torch.exp(scores - lse.double()[:, None]).cpu()
