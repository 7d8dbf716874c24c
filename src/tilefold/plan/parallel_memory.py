"""The memory that context parallelism takes on one rank: what is alive at the worst moment, tensor by tensor.

Beyond the rank's own q, k and v and the gradient of its output; results are included.  What a kernel takes for itself while it
runs is not: its scratch is the same without other ranks."""

from dataclasses import dataclass

__all__ = ["Parts", "memory_of"]


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes of one rank: q, kv (K and V together) and out in their dtype; lse; exact: how many times as large they are in fp32.
    kv is that after KV heads were repeated, where they are."""

    q: float
    kv: float
    out: float
    lse: float
    exact: float
    repeated: bool = False


def memory_of(scheme: str, p: Parts, ranks: int, steps: int, backward: bool) -> float:
    """Bytes at the worst moment of a forward pass, and of the backward pass after it.

    ranks: between which K and V are gathered; steps: of the ring, 1 if there is none."""
    passes = {"ring": _ring, "all_gather": _all_gather, "heads": _heads, "two_level": _two_level}[scheme](
        p, ranks, steps
    )
    return max(passes) if backward else passes[0]


def _ring(p: Parts, ranks: int, steps: int) -> tuple[float, float]:
    """Forward: messages that are folded and that arrive, the first result, that in fp32, and the next one.  Backward: the sums
    for this rank's queries, three for keys (being made, arriving, leaving), and a piece's own gradients."""
    messages = min(2, steps - 1) * p.kv
    piece = max(p.q + p.kv / 2, p.q / 2 + p.kv)
    forward = messages + (p.exact + 2) * p.out + 3 * p.lse if steps > 1 else p.kv + 2 * p.out + p.lse
    sums = p.exact * (p.q + (3 if steps > 1 else 1) * p.kv)
    return forward, p.out + p.lse + messages + sums + piece


def _all_gather(p: Parts, ranks: int, steps: int) -> tuple[float, float]:
    """Forward: all keys as they come and in order, or in order beside the state and its pieces.  Backward: the sums for all keys,
    as one message, and what comes."""
    gathered = ranks * p.kv
    forward = max(2 * gathered, gathered + (p.exact + 1) * p.out + 2 * p.lse)
    folding = gathered * (2 + p.exact) + p.q / 2
    sending = 3 * p.exact * gathered
    return forward, p.out + p.lse + p.exact * p.q + max(folding, sending)


def _heads(p: Parts, ranks: int, steps: int) -> tuple[float, float]:
    """Forward: q, k, v and out of a share of the heads, and out as it leaves and comes.  Backward: those and the gradients, at
    the kernel's end or as those of repeated KV heads leave and come."""
    held = p.q + p.kv + p.out + p.lse
    making = 2 * p.out + p.exact * (p.q + p.kv) + p.q + p.kv
    leaving = p.out + p.q + (3 * p.exact if p.repeated else 3) * p.kv
    return held + 2 * p.out, held + max(making, leaving)


def _two_level(p: Parts, ranks: int, steps: int) -> tuple[float, float]:
    """A ring between two head exchanges."""
    forward, backward = _ring(p, ranks, steps)
    return p.q + p.kv + forward, p.q + p.kv + 2 * p.out + backward
