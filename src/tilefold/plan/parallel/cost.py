"""The model of context parallelism, for one rank: bytes on the links, seconds and memory of each scheme, as formulas."""

from collections.abc import Callable
from dataclasses import dataclass

from .memory import Bytes, Part, memory_of, parts_of
from .problem import BACKWARD_FLOPS, BYTES, Links, ParallelProblem, SchemeCost


def head_refusal(heads: int, kv_heads: int, ranks: int) -> str:
    """Why heads cannot be shared out over so many ranks, "" if they can: KV heads are repeated where ranks are a multiple."""
    if heads % ranks:
        return f"{heads} query heads are not a multiple of {ranks} ranks"
    if kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} KV heads are neither a multiple of {ranks} ranks nor a divisor"
    return ""


@dataclass(frozen=True, slots=True)
class _Sizes(Bytes):
    """What a rank has, and its time."""

    fold: float  # seconds of the forward fold of the busiest rank
    back: float  # of its backward folds, 0 without
    later: float  # share of the rows, or keys, of a piece of others' keys: in causal zigzag shards it is half of them or all

    @property
    def dkv(self) -> float:
        """Bytes of K's and V's gradients in fp32."""
        return self.kv * self.exact

    def memory(
        self, n: ParallelProblem, scheme: str, ranks: int, steps: int, parts: tuple[Part, ...] | None = None
    ) -> float:
        """Bytes at the worst moment; parts: None for gradients alone."""
        return memory_of(scheme, self, ranks, steps, parts or parts_of(scheme, ranks, n.halves), n.backward)


def _sizes(n: ParallelProblem, links: Links, sharing: int = 1) -> _Sizes:
    """sharing: ranks that share out heads."""
    each, rows, keys = BYTES[n.dtype], n.batch * n.seq_q / links.ranks, n.batch * n.seq_k / links.ranks
    kv = keys * n.kv_heads * _spread(n, sharing) * (n.dim_qk + n.dim_v)
    out = rows * n.heads * n.dim_v
    flops = n.flops / links.ranks * n.imbalance(links.ranks)
    back = flops * BACKWARD_FLOPS / links.backward(n) if n.backward else 0.0
    later, exact = 0.75 if n.halves else 1.0, max(4, each) / each
    held = rows * n.heads * n.dim_qk * each, kv * each, out * each, rows * n.heads * 4
    return _Sizes(*held, exact, 1.0 - 1.0 / sharing, flops / links.flops, back, later)


def _merged(s: _Sizes, pieces: int, backward: bool) -> float:
    """Bytes that a rank's memory moves beside the kernels of a ring: the message is packed; results of pieces are merged, sums of
    gradients added to, all in fp32 if there are more than two, and rounded; rows' statistics are made for each piece."""
    if pieces == 1:
        return 2 * s.kv * (1 + backward)
    more, exact = (pieces - 1) * s.later, s.exact
    each = 2 * exact + 1 if pieces > 2 else 3
    found = 2 * s.kv + more * each * s.out
    if backward:
        queries = more * each + 2 * (1 + exact) * (pieces > 2)
        found += s.q * queries + s.kv * (2 + 2 * exact + more * 3 * exact + exact + 1) + (1 + more) * 2 * s.out
    return found


def _turns(steps: int, fold: float, bytes_: float, rate: float, latency: float) -> float:
    """Seconds of a ring: each of its folds hides the transfer of the next keys, or the transfer the fold."""
    return fold / steps + (steps - 1) * max(fold / steps, bytes_ / rate + latency)


def _reach(n: ParallelProblem, parts: int) -> int:
    """Steps of a ring of so many parts: a causal window over contiguous shards needs the nearest ones only."""
    near = n.kind == "contiguous" and n.window[0] >= 0 and n.window[1] == 0 and n.sequences == 1 and n.seq_q == n.seq_k
    return min(parts, -(-n.window[0] * parts // max(1, n.seq_k)) + 1) if near else parts


def _slowest(links: Links) -> float:
    """Bytes/s of the slowest link of a ring, which sets its rate."""
    return links.across if links.nodes > 1 else links.inside


def _shared_out(links: Links, sent: float) -> tuple[float, float]:
    """Bytes inside and across nodes of what ranks send to the next, which some have in another node."""
    share = 1 / links.ranks_per_node if links.nodes > 1 else 0.0
    return sent * (1 - share), sent * share


def _ring(n: ParallelProblem, links: Links) -> SchemeCost:
    s, steps = _sizes(n, links), _reach(n, links.ranks)
    rate = _slowest(links)
    seconds = _turns(steps, s.fold, s.kv, rate, links.latency)
    sent, messages = (steps - 1) * s.kv, steps - 1
    seconds += _merged(s, steps, n.backward) / links.dram
    if n.backward:
        seconds += _turns(steps, s.back, s.kv + s.dkv, rate, links.latency) + s.dkv / rate * (steps > 1)
        sent, messages = 2 * sent + steps * s.dkv * (steps > 1), messages * 2 + steps
    memory = s.memory(n, "ring", links.ranks, steps)
    return SchemeCost("ring", *_shared_out(links, sent), messages, seconds, memory)


def _all_gather(n: ParallelProblem, links: Links) -> SchemeCost:
    s, others = _sizes(n, links), links.ranks - 1
    rate = _slowest(links)
    sent, own = others * s.kv, s.fold / links.ranks  # own keys are folded while the others' come
    gather = sent / rate + links.latency * (others > 0)
    seconds = s.fold - own + max(own, gather)
    moved = 3 * s.out * s.later * (others > 0)
    if n.backward:
        seconds += s.back - s.back / links.ranks + max(s.back / links.ranks, gather)
        moved += (3 * s.q * s.later + 2 * s.out) * (others > 0) + 4 * others * s.dkv
        seconds += others * s.dkv / rate + links.latency * (others > 0)
        sent = 2 * sent + others * s.dkv
    seconds += moved / links.dram
    messages = 3 if n.backward else 1
    memory = s.memory(n, "all_gather", links.ranks, 1)
    return SchemeCost("all_gather", *_shared_out(links, sent), messages, seconds, memory)


def _exchange(n: ParallelProblem, s: _Sizes, ranks: int) -> tuple[float, int]:
    """Bytes and messages of head exchanges between so many ranks."""
    sent = (s.q + s.kv + s.out) * (ranks - 1) / ranks
    return (2 * sent, 6) if n.backward else (sent, 3)


def _copied(n: ParallelProblem, s: _Sizes, links: Links) -> float:
    """Seconds in which shares of heads are made contiguous, and results put together; each is read and written."""
    return 2 * (s.q + s.kv + s.out) * (1 + n.backward) / links.dram * (links.ranks > 1)


def _spread(n: ParallelProblem, ranks: int) -> int:
    """How often KV heads are repeated so that each of so many ranks gets one."""
    return max(1, ranks // n.kv_heads) if n.kv_heads % ranks else 1


def _heads(n: ParallelProblem, links: Links) -> SchemeCost:
    refusal = head_refusal(n.heads, n.kv_heads, links.ranks)
    s = _sizes(n, links, links.ranks)
    sent, messages = _exchange(n, s, links.ranks)
    memory = s.memory(n, "heads", 1, 1)
    balanced = (s.fold + s.back) / n.imbalance(links.ranks)  # every rank has all tokens
    share = (links.ranks - links.ranks_per_node) / max(1, links.ranks - 1) if links.nodes > 1 else 0.0
    inside, across = sent * (1 - share), sent * share
    seconds = balanced + max(inside / links.inside, across / links.across) + _copied(n, s, links)
    return SchemeCost("heads", inside, across, messages, seconds + messages * links.latency, memory, refusal)


def _two_level(n: ParallelProblem, links: Links) -> SchemeCost:
    inner, outer = links.ranks_per_node, links.nodes
    steps, refusal = _reach(n, outer), head_refusal(n.heads, n.kv_heads, inner)
    if inner == 1:
        refusal = "the ranks of a node are not known (ranks_per_node), or are one"
    elif outer == 1:
        refusal = "all ranks lie in one node"
    s = _sizes(n, links, inner)
    inside, messages = _exchange(n, s, inner)
    memory = s.memory(n, "two_level", outer, steps)
    uneven = n.imbalance(outer) / n.imbalance(links.ranks)
    seconds = _turns(steps, s.fold * uneven, s.kv, links.across, links.latency)
    seconds += _merged(s, steps, n.backward) / links.dram + _copied(n, s, links)
    across = (steps - 1) * s.kv
    if n.backward:
        seconds += _turns(steps, s.back * uneven, s.kv + s.dkv, links.across, links.latency)
        seconds += s.dkv / links.across * (steps > 1)
        across = 2 * across + steps * s.dkv * (steps > 1)
    seconds += inside / links.inside + messages * links.latency
    messages += (steps - 1) * (2 if n.backward else 1)
    return SchemeCost("two_level", inside, across, messages, seconds, memory, refusal)


COSTS: dict[str, Callable[[ParallelProblem, Links], SchemeCost]] = {
    "heads": _heads,
    "two_level": _two_level,
    "ring": _ring,
    "all_gather": _all_gather,
}


def memory_bytes(n: ParallelProblem, links: Links, scheme: str, heads: int, parts: tuple[Part, ...]) -> float:
    """The memory of a scheme of whose backward calls it is known what their kernels take; heads: ranks that exchange heads."""
    ring = links.ranks // heads
    steps = 1 if scheme in ("heads", "all_gather") else _reach(n, ring)
    return _sizes(n, links, heads).memory(n, scheme, ring, steps, parts)
