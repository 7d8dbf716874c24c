"""The memory that context parallelism takes on one rank: what is alive at the worst moment, tensor by tensor.

Beyond the rank's own q, k and v and the gradient of its output; results are included, and what kernels take for themselves while
they run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One backward call.  queries, keys: those that it has, in rows and keys of a rank; later: the sums for these keys have
    summands already.

    extra: bytes that its kernel has while it runs beyond the gradients that it returns, these counted in the dtype of q; exact:
    it returns dk and dv in fp32."""

    queries: float
    keys: float
    later: bool = False
    extra: float = 0.0
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Bytes:
    """Of one rank: q, kv (K and V together) and out in their dtype; lse; exact: how many times as large they are in fp32.
    kv is that after KV heads were repeated, where they are.  others: of what a rank has after a head exchange, the share that
    came from others."""

    q: float
    kv: float
    out: float
    lse: float
    exact: float
    others: float

    def running(self, part: Part) -> float:
        """What a call makes while its kernel runs."""
        return part.queries * self.q + part.keys * self.kv + part.extra

    def found(self, part: Part) -> float:
        """dk and dv as they come."""
        return part.keys * self.kv * (self.exact if part.exact else 1.0)

    def alone(self, part: Part) -> float:
        """dq, dk and dv of own keys, which nothing is added to soon: while the kernel runs, or as dk, then dv, are rounded."""
        return max(self.running(part), self.q + self.found(part) + self.kv / 2 * part.exact)


def parts_of(scheme: str, ring: int, halves: bool, smaller: bool = False) -> tuple[Part, ...]:
    """The largest backward calls of any rank: of its own keys, then of others'.

    ring: ranks, or nodes, between which keys travel.  halves: a causal mask over zigzag shards, of which the second half of the
    queries sees all of an earlier rank's keys, or all queries see the first half of a later rank's keys.  smaller: those of other
    ranks with fewer keys too, for which a plan may take another kernel, with more memory."""
    own = Part(1.0, 1.0)
    others = {"ring": 1.0, "two_level": 1.0, "all_gather": ring - 1.0}.get(scheme, 0.0) if ring > 1 else 0.0
    if not others:
        return (own,)
    if not halves:
        found: tuple[Part, ...] = own, Part(1.0, others)
    else:
        found = own, Part(0.5, others), Part(1.0, others / 2)
        if scheme == "all_gather" and ring > 2:
            found += (Part(0.5, others - 0.5, later=True),)
    if scheme != "all_gather" or not smaller:
        return found
    if not halves:
        return found + tuple(Part(1.0, float(n)) for n in range(1, ring - 1))
    return found + tuple(Part(0.5, n / 2, later=n >= ring) for n in range(1, 2 * ring - 3))


def memory_of(scheme: str, s: Bytes, ranks: int, steps: int, parts: tuple[Part, ...], backward: bool) -> float:
    """Bytes at the worst moment of a forward pass, and of the backward pass after it.

    ranks: between which K and V are gathered; steps: of the ring, 1 if there is none; parts: as of `parts_of`."""
    passes = {"ring": _ring, "all_gather": _all_gather, "heads": _heads, "two_level": _two_level}[scheme](
        s, ranks, steps, parts
    )
    return max(passes) if backward else passes[0]


def _ring(s: Bytes, ranks: int, steps: int, parts: tuple[Part, ...]) -> tuple[float, float]:
    """Forward: messages that are folded and that arrive, the first result, where all are merged, and the next one; of more than
    two steps the merge in fp32.  Backward: the sums for this rank's queries, two for keys (arriving, leaving), and a piece's own
    gradients; of two steps the sums for queries need no fp32."""
    own, *others = parts
    kept, packed = s.out + s.lse, min(2, steps) * s.kv
    sums = s.exact * s.q if steps > 2 else 0.0
    first = kept + packed + s.exact * s.kv + max(s.running(own), sums + s.q + s.found(own))
    if steps == 1:
        return s.kv + kept, first
    messages = min(2, steps - 1) * s.kv
    forward = max(2 * s.kv + kept, messages + 2 * kept + (s.exact * s.out if steps > 2 else 0.0))
    later = kept + messages + (sums or s.q) + 2 * s.exact * s.kv
    return forward, max(first, *(later + s.running(one) for one in others))


def _all_gather(s: Bytes, ranks: int, steps: int, parts: tuple[Part, ...]) -> tuple[float, float]:
    """Forward: the others' keys and two results, merged in the first.  Backward: those keys, gradients of own queries and keys,
    and a piece's own gradients, while it runs or as they are added to the sums for the others' keys; or those sums as they
    leave, and what comes."""
    own, *far = parts
    others, kept = (ranks - 1) * s.kv, s.out + s.lse
    sums = s.exact * others
    moments = [others + s.alone(own), s.q + s.kv + 2 * sums]
    for one in far:
        running = s.running(one) + sums * one.later
        moments.append(others + s.q + s.kv + max(running, sums + s.found(one)))
    return others + 2 * kept, kept + max(moments)


def _heads(s: Bytes, ranks: int, steps: int, parts: tuple[Part, ...]) -> tuple[float, float]:
    """Forward: q, k, v and out of a share of the heads, and out as it comes and is put together.  Backward: those, and the
    gradients of queries, or of keys, as they leave, come and are put together."""
    (own,) = parts
    held = s.q + s.kv + s.out + s.lse
    leaving = max((2 + s.others) * s.q + s.kv, s.q + (2 + s.others / 2) * s.kv)
    return held + (1 + s.others) * s.out, held + s.out + max(s.out + s.alone(own), leaving)


def _two_level(s: Bytes, ranks: int, steps: int, parts: tuple[Part, ...]) -> tuple[float, float]:
    """A ring between two head exchanges."""
    forward, backward = _ring(s, ranks, steps, parts)
    held = s.q + s.kv
    return held + max(forward, (2 + s.others) * s.out + s.lse), held + 2 * s.out + backward
