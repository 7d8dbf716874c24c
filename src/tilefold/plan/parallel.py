"""Which scheme of context parallelism: predicted bytes on the links, time and memory of each, as values with reasons."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from tilefold.errors import PlanError, Unsupported, ValueRangeError

from .parallel_memory import Parts, memory_of

__all__ = [
    "SCHEMES",
    "Links",
    "ParallelPlan",
    "ParallelProblem",
    "SchemeCost",
    "head_refusal",
    "memory_with",
    "plan_parallel",
]

SCHEMES = ("heads", "two_level", "ring", "all_gather")
"""In the order of preference where predictions are equal."""

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
BACKWARD_FLOPS = 2.5  # of the forward pass: five products instead of two


@dataclass(frozen=True, slots=True)
class Links:
    """The machine, as far as it decides.  Rates are assumptions until they are measured: give your own.

    ranks: GPUs that share a sequence; ranks_per_node: of those with fast links to each other, 1 if not known.
    inside, across: bytes/s that one rank sends, within a node and between nodes.  latency: seconds a message takes at least.
    flops: attention FLOP/s of one rank.  memory: bytes that one rank can spare for what the scheme adds, None: not limited.
    """

    ranks: int
    ranks_per_node: int = 1
    inside: float = (
        290e9  # over NVLink 4 (450 by its data sheet) as NCCL sends on four H200: to all at once 409, to the next 288
    )
    across: float = 50e9  # one 400 Gb/s port a GPU
    latency: float = 10e-6
    flops: float = 450e12  # bfloat16 attention on an H200, about
    memory: float | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_node"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueRangeError(f"{name} must be an int, at least 1, got {value!r}")
        if self.ranks % self.ranks_per_node:
            raise ValueRangeError(f"ranks_per_node must divide ranks={self.ranks}, got {self.ranks_per_node}")
        for name in ("inside", "across", "flops"):
            if not getattr(self, name) > 0:
                raise ValueRangeError(f"{name} must be greater than 0, got {getattr(self, name)!r}")

    @property
    def nodes(self) -> int:
        """Nodes; one if all ranks lie in one, or where nodes are not known: then every link counts as `inside`."""
        return self.ranks // self.ranks_per_node if self.ranks_per_node > 1 else 1


@dataclass(frozen=True, slots=True)
class ParallelProblem:
    """What is asked: sizes of the whole attention over all ranks.  window: (left, right), -1 for unbounded; (-1, 0) is causal.
    kind: how tokens are sharded.  backward: gradients follow.  sequences: packed ones, of which seq_q and seq_k are the sums."""

    batch: int
    seq_q: int
    seq_k: int
    heads: int
    kv_heads: int
    dim_qk: int
    dim_v: int
    dtype: str = "bfloat16"
    window: tuple[int, int] = (-1, -1)
    kind: str = "contiguous"
    backward: bool = False
    sequences: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in BYTES:
            raise ValueRangeError(f"dtype must be one of {', '.join(BYTES)}, got {self.dtype!r}")

    @property
    def flops(self) -> float:
        """Of the forward pass on all ranks, sequences taken as equally long."""
        left, right = self.window
        rows, keys = self.seq_q, self.seq_k / max(1, self.sequences)
        band = (keys if left < 0 else min(keys, left)) + (keys if right < 0 else min(keys, right))
        seen = keys if left < 0 and right < 0 else min(keys, band / 2 if self.window == (-1, 0) else band)
        return 2.0 * self.batch * self.heads * rows * seen * (self.dim_qk + self.dim_v)

    def imbalance(self, ranks: int) -> float:
        """The busiest rank's work beside the mean: one causal sequence in contiguous shards leaves the last rank most of it."""
        uneven = self.kind == "contiguous" and self.window == (-1, 0) and self.sequences == 1
        return 2.0 - 1.0 / ranks if uneven else 1.0


@dataclass(frozen=True, slots=True)
class SchemeCost:
    """The prediction for one scheme, of one rank: bytes sent within the node and between nodes, messages one after the other,
    seconds of forward and, if asked for, backward; bytes of memory beyond the rank's q, k, v and dout, results included; why it
    is impossible, "" if it is not."""

    scheme: str
    inside: float
    across: float
    messages: int
    seconds: float
    memory: float
    refusal: str = ""

    def __str__(self) -> str:
        if self.refusal:
            return f"{self.scheme}: {self.refusal}"
        return (
            f"{self.scheme}: {self.seconds * 1e3:.3f} ms, sends {_size(self.inside)} inside and {_size(self.across)} across, "
            f"{_size(self.memory)} more memory"
        )


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """The decision; `print` it.  heads: ranks that share out heads; ring: ranks round which, or from which, K and V come."""

    problem: ParallelProblem
    links: Links
    cost: SchemeCost
    reason: str
    rejected: tuple[SchemeCost, ...]

    @property
    def scheme(self) -> str:
        """One of SCHEMES."""
        return self.cost.scheme

    @property
    def heads(self) -> int:
        """Ranks that exchange heads."""
        return {"heads": self.links.ranks, "two_level": self.links.ranks_per_node}.get(self.scheme, 1)

    @property
    def ring(self) -> int:
        """Ranks, or nodes, between which K and V travel."""
        return self.links.ranks // self.heads

    def __str__(self) -> str:
        n, links = self.problem, self.links
        lines = [
            f"Context-parallel plan for {links.ranks} ranks, {links.nodes} nodes: {self.scheme}",
            f"  problem   {n.batch} x {n.seq_q} queries, {n.seq_k} keys, {n.heads} heads on {n.kv_heads} KV heads, D={n.dim_qk} "
            f"(V {n.dim_v}), {n.dtype}, window {n.window}, {n.kind}{', with backward' if n.backward else ''}",
            f"  assumed   {links.inside / 1e9:.0f} GB/s inside, {links.across / 1e9:.0f} GB/s across, "
            f"{links.latency * 1e6:.0f} us a message, {links.flops / 1e12:.0f} TFLOP/s a rank",
            f"  predicted {self.cost}",
            f"  reason    {self.reason}",
            *(f"  rejected  {one}" for one in self.rejected),
        ]
        return "\n".join(lines)


def head_refusal(heads: int, kv_heads: int, ranks: int) -> str:
    """Why heads cannot be shared out over so many ranks, "" if they can: KV heads are repeated where ranks are a multiple."""
    if heads % ranks:
        return f"{heads} query heads are not a multiple of {ranks} ranks"
    if kv_heads and kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} KV heads are neither a multiple of {ranks} ranks nor a divisor"
    return ""


@lru_cache(maxsize=4096)
def plan_parallel(problem: ParallelProblem, links: Links, scheme: str = "auto") -> ParallelPlan:
    """The scheme for a problem on a machine: the fastest by prediction of those that are possible and fit the memory.

    scheme: one of SCHEMES to ask for it; then Unsupported says why it is impossible, whatever the memory.  Pure, for any number
    of ranks, here or not.  Raises PlanError if nothing fits, ValueRangeError for another scheme."""
    if scheme not in ("auto", *SCHEMES):
        raise ValueRangeError(f"scheme must be 'auto' or one of {', '.join(map(repr, SCHEMES))}, got {scheme!r}")
    costs = {name: _COSTS[name](problem, links) for name in SCHEMES}
    others = tuple(cost for name, cost in costs.items() if name != scheme)
    if scheme != "auto":
        if costs[scheme].refusal:
            possible = [cost.scheme for cost in others if not cost.refusal]
            raise Unsupported(f"scheme {scheme!r}: {costs[scheme].refusal}; possible here: {', '.join(possible)}")
        return ParallelPlan(problem, links, costs[scheme], "asked for", others)
    fits = [c for c in costs.values() if not c.refusal and (links.memory is None or c.memory <= links.memory)]
    if not fits:
        raise PlanError(f"no scheme fits {_size(links.memory or 0)} a rank: {'; '.join(map(str, costs.values()))}")
    best = min(fits, key=lambda cost: cost.seconds)
    rejected = tuple(_why_not(cost, links) for cost in costs.values() if cost is not best)
    return ParallelPlan(problem, links, best, _reason(best, fits), rejected)


def _why_not(cost: SchemeCost, links: Links) -> SchemeCost:
    if cost.refusal or links.memory is None or cost.memory <= links.memory:
        return cost
    text = f"needs {_size(cost.memory)}, {_size(links.memory)} are free"
    return SchemeCost(cost.scheme, cost.inside, cost.across, cost.messages, cost.seconds, cost.memory, text)


def _reason(best: SchemeCost, fits: list[SchemeCost]) -> str:
    if len(fits) == 1:
        return "the only one that is possible and fits"
    second = min((c for c in fits if c is not best), key=lambda cost: cost.seconds)
    return f"predicted {second.seconds / best.seconds:.2f} times as fast as {second.scheme}, the next"


# ---------------------------------------------------------------- the model, for one rank


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of a rank's Q, K with V, and out in the tensors' dtype, those of K's and V's gradients and of lse in fp32."""

    q: float
    kv: float
    out: float
    dkv: float
    lse: float
    fold: float  # seconds of the forward fold of the busiest rank

    def memory(self, n: ParallelProblem, scheme: str, ranks: int, steps: int, scratch: float = 0.0) -> float:
        """Bytes at the worst moment."""
        parts = Parts(self.q, self.kv, self.out, self.lse, self.dkv / self.kv if self.kv else 1.0, scratch)
        return memory_of(scheme, parts, ranks, steps, n.backward)


def _sizes(n: ParallelProblem, links: Links, spread: int = 1) -> _Sizes:
    """spread: how often KV heads are repeated."""
    each, rows, keys = BYTES[n.dtype], n.batch * n.seq_q / links.ranks, n.batch * n.seq_k / links.ranks
    kv = keys * n.kv_heads * spread * (n.dim_qk + n.dim_v)
    out = rows * n.heads * n.dim_v
    fold = n.flops / links.ranks / links.flops * n.imbalance(links.ranks)
    return _Sizes(rows * n.heads * n.dim_qk * each, kv * each, out * each, kv * 4, rows * n.heads * 4, fold)


def _turns(steps: int, fold: float, bytes_: float, rate: float, latency: float) -> float:
    """Seconds of a ring: each of its folds hides the transfer of the next keys, or the transfer the fold."""
    return fold / steps + (steps - 1) * max(fold / steps, bytes_ / rate + latency)


def _reach(n: ParallelProblem, parts: int) -> int:
    """Steps of a ring of so many parts: a causal window over contiguous shards needs the nearest ones only."""
    near = n.kind == "contiguous" and n.window[0] >= 0 and n.window[1] == 0 and n.sequences == 1 and n.seq_q == n.seq_k
    return min(parts, -(-n.window[0] * parts // max(1, n.seq_k)) + 1) if near else parts


def _ring(n: ParallelProblem, links: Links) -> SchemeCost:
    s, steps = _sizes(n, links), _reach(n, links.ranks)
    rate = links.across if links.nodes > 1 else links.inside  # the slowest link of the ring sets its pace
    seconds = _turns(steps, s.fold, s.kv, rate, links.latency)
    sent, messages = (steps - 1) * s.kv, steps - 1
    if n.backward:
        seconds += _turns(steps, BACKWARD_FLOPS * s.fold, s.kv + s.dkv, rate, links.latency) + s.dkv / rate
        sent, messages = 2 * sent + steps * s.dkv * (steps > 1), messages * 2 + steps
    share = 1 / links.ranks_per_node if links.nodes > 1 else 0.0  # of the ranks that have the next one in another node
    return SchemeCost(
        "ring", sent * (1 - share), sent * share, messages, seconds, s.memory(n, "ring", links.ranks, steps)
    )


def _all_gather(n: ParallelProblem, links: Links) -> SchemeCost:
    s, others = _sizes(n, links), links.ranks - 1
    rate = links.across if links.nodes > 1 else links.inside
    sent, own = others * s.kv, s.fold / links.ranks  # own keys are folded while the others' come
    gather = sent / rate + links.latency * (others > 0)
    seconds = s.fold - own + max(own, gather)
    if n.backward:
        seconds += BACKWARD_FLOPS * (s.fold - own) + max(BACKWARD_FLOPS * own, gather)
        seconds += others * s.dkv / rate + links.latency * (others > 0)
        sent = 2 * sent + others * s.dkv
    messages = 3 if n.backward else 1
    share = 1 / links.ranks_per_node if links.nodes > 1 else 0.0
    memory = s.memory(n, "all_gather", links.ranks, 1)
    return SchemeCost("all_gather", sent * (1 - share), sent * share, messages, seconds, memory)


def _exchange(n: ParallelProblem, s: _Sizes, ranks: int) -> tuple[float, int]:
    """Bytes and messages of head exchanges between so many ranks."""
    sent = (s.q + s.kv + s.out) * (ranks - 1) / ranks
    return (2 * sent, 6) if n.backward else (sent, 3)


def _spread(n: ParallelProblem, ranks: int) -> int:
    return max(1, ranks // n.kv_heads) if n.kv_heads and n.kv_heads % ranks else 1


def _heads(n: ParallelProblem, links: Links) -> SchemeCost:
    refusal = head_refusal(n.heads, n.kv_heads, links.ranks)
    s = _sizes(n, links, _spread(n, links.ranks))
    sent, messages = _exchange(n, s, links.ranks)
    memory = s.memory(n, "heads", 1, 1)
    balanced = s.fold / n.imbalance(links.ranks)  # every rank has all tokens
    share = (links.ranks - links.ranks_per_node) / max(1, links.ranks - 1) if links.nodes > 1 else 0.0
    inside, across = sent * (1 - share), sent * share
    seconds = balanced * (1 + BACKWARD_FLOPS * n.backward) + max(inside / links.inside, across / links.across)
    return SchemeCost("heads", inside, across, messages, seconds + messages * links.latency, memory, refusal)


def _two_level(n: ParallelProblem, links: Links) -> SchemeCost:
    inner, outer = links.ranks_per_node, links.nodes
    steps, refusal = _reach(n, outer), head_refusal(n.heads, n.kv_heads, inner)
    if inner == 1:
        refusal = "the ranks of a node are not known (ranks_per_node), or are one"
    elif outer == 1:
        refusal = "all ranks lie in one node"
    s = _sizes(n, links, _spread(n, inner))
    inside, messages = _exchange(n, s, inner)
    memory = s.memory(n, "two_level", outer, steps)
    fold = s.fold / n.imbalance(links.ranks) * n.imbalance(outer)
    seconds = _turns(steps, fold, s.kv, links.across, links.latency)
    across = (steps - 1) * s.kv
    if n.backward:
        seconds += (
            _turns(steps, BACKWARD_FLOPS * fold, s.kv + s.dkv, links.across, links.latency) + s.dkv / links.across
        )
        across = 2 * across + steps * s.dkv * (steps > 1)
    seconds += inside / links.inside + messages * links.latency
    messages += (steps - 1) * (2 if n.backward else 1)
    return SchemeCost("two_level", inside, across, messages, seconds, memory, refusal)


_COSTS: dict[str, Callable[[ParallelProblem, Links], SchemeCost]] = {
    "heads": _heads,
    "two_level": _two_level,
    "ring": _ring,
    "all_gather": _all_gather,
}


def memory_with(plan: ParallelPlan, scratch: float) -> float:
    """The memory of a plan whose kernels take `scratch` bytes for themselves while they run backward."""
    n, links = plan.problem, plan.links
    spread = _spread(n, plan.heads) if plan.heads > 1 else 1
    steps = 1 if plan.scheme in ("heads", "all_gather") else _reach(n, plan.ring)
    return _sizes(n, links, spread).memory(n, plan.scheme, plan.ring, steps, scratch)


def _size(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"
