"""The memory that context parallelism takes on one rank: what is alive at the worst moment, tensor by tensor.

Beyond the rank's own q, k and v and the gradient of its output; results are included, and what kernels take for themselves while
they run."""

from dataclasses import dataclass

__all__ = ["Parts", "memory_of"]


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes of one rank: q, kv (K and V together) and out in their dtype; lse; exact: how many times as large they are in fp32.
    kv is that after KV heads were repeated, where they are.

    own, others: what the backward kernels of own and of others' keys have while they run beyond the gradients that they return;
    piece: such gradients of one other rank's keys together with that, at the most; None: the gradients alone."""

    q: float
    kv: float
    out: float
    lse: float
    exact: float
    own: float = 0.0
    others: float = 0.0
    piece: float | None = None

    @property
    def summand(self) -> float:
        """While a backward kernel of one other rank's keys runs: half of the queries and all keys, or the other way round."""
        return max(self.q + self.kv / 2, self.q / 2 + self.kv) if self.piece is None else self.piece


def memory_of(scheme: str, p: Parts, ranks: int, steps: int, backward: bool) -> float:
    """Bytes at the worst moment of a forward pass, and of the backward pass after it.

    ranks: between which K and V are gathered; steps: of the ring, 1 if there is none."""
    passes = {"ring": _ring, "all_gather": _all_gather, "heads": _heads, "two_level": _two_level}[scheme](
        p, ranks, steps
    )
    return max(passes) if backward else passes[0]


def _ring(p: Parts, ranks: int, steps: int) -> tuple[float, float]:
    """Forward: messages that are folded and that arrive, the first result, that in fp32, and the next one; of two steps the two
    results and their merge.  Backward: the sums for this rank's queries, two for keys (arriving, leaving), and a piece's own
    gradients; of two steps, where the sums for queries need no fp32, the first summand and the result instead."""
    messages = min(2, steps - 1) * p.kv
    first = p.out + p.lse + min(2, steps) * p.kv + p.exact * p.kv + p.q + p.kv + p.own
    if steps == 1:
        return p.kv + p.out + p.lse, first
    if steps == 2:
        forward = max(2 * p.kv + p.out + p.lse, p.kv + 3 * p.out + 3 * p.lse)
        return forward, max(first, p.out + p.lse + messages + 2 * p.q + 2 * p.exact * p.kv + p.summand)
    forward = messages + (p.exact + 2) * p.out + 3 * p.lse
    return forward, max(first, p.out + p.lse + messages + p.exact * (p.q + 2 * p.kv) + p.summand)


def _all_gather(p: Parts, ranks: int, steps: int) -> tuple[float, float]:
    """Forward: the others' keys, two results and their merge.  Backward: those keys, gradients of own keys and queries, and while
    it folds the sums for the others' keys and a piece's own gradients, or when it sends those sums what comes."""
    others = (ranks - 1) * p.kv
    forward = others + 3 * p.out + 3 * p.lse
    adding = (2 + p.exact) * others
    running = others + p.summand
    if ranks > 2:  # in the last piece, the sums have begun
        running = (2 + p.exact) * others + 1.5 * p.q - p.kv / 2 + p.others
    sending = 2 * p.exact * others
    kept = p.out + p.lse + p.q + p.kv
    return forward, max(kept + max(adding, running, sending), kept + others + p.own)


def _heads(p: Parts, ranks: int, steps: int) -> tuple[float, float]:
    """Forward: q, k, v and out of a share of the heads, and out as it comes and is put together.  Backward: those, and the
    gradients of queries, or of keys, as they leave, come and are put together."""
    held = p.q + p.kv + p.out + p.lse
    running = p.out + p.kv + p.own
    return held + 2 * p.out, held + p.out + p.q + max(running, 2 * p.q + p.kv, 3 * p.kv)


def _two_level(p: Parts, ranks: int, steps: int) -> tuple[float, float]:
    """A ring between two head exchanges."""
    forward, backward = _ring(p, ranks, steps)
    return p.q + p.kv + forward, p.q + p.kv + 2 * p.out + backward
