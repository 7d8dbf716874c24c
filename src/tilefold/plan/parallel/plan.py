"""Which scheme of context parallelism: predicted bytes on the links, time and memory of each, as values with reasons."""

from dataclasses import dataclass
from functools import lru_cache

from tilefold.errors import DtypeError, PlanError, Unsupported, ValueRangeError

from ..base import Shown, said_sizes
from ..words import counted
from .cost import COSTS
from .problem import Links, ParallelProblem, SchemeCost, size_text

SCHEMES = ("heads", "two_level", "ring", "all_gather")
"""In the order of preference where predictions of time and memory are equal."""

CLOSE = 1.005  # of the fastest's time: as fast


@dataclass(frozen=True, slots=True)
class ParallelPlan(Shown):
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
        backward = f" ({links.backward(n) / 1e12:.0f} backward)" if n.backward else ""
        gradients = (
            "" if not n.backward else ", with backward" if n.deterministic else ", with non-deterministic backward"
        )
        lines = [
            f"Context-parallel plan for {counted(links.ranks, 'rank')}, {counted(links.nodes, 'node')}: {self.scheme}",
            f"  problem   {said_sizes(n)}, window {n.window}, {n.kind}{gradients}",
            f"  assumed   {links.inside / 1e9:.0f} GB/s inside, {links.across / 1e9:.0f} GB/s across, "
            f"{links.latency * 1e6:.0f} us a message, {links.flops / 1e12:.0f} TFLOP/s a rank{backward}, "
            f"{links.dram / 1e12:g} TB/s of its memory",
            f"  predicted {self.cost}",
            f"  reason    {self.reason}",
            *(f"  rejected  {one}" for one in self.rejected),
        ]
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def plan_parallel(problem: ParallelProblem, links: Links, scheme: str = "auto") -> ParallelPlan:
    """The scheme for a problem on a machine: the fastest by prediction of those that are possible and fit the memory; of several
    that are as fast within CLOSE the one that takes least memory.

    scheme: one of SCHEMES to ask for it; then Unsupported says why it is impossible, whatever the memory.  Pure, for any number
    of ranks, here or not.  Raises PlanError if nothing fits, ValueRangeError for another scheme."""
    for name, value, kind in (("problem", problem, ParallelProblem), ("links", links, Links)):
        if not isinstance(value, kind):
            raise DtypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    if scheme not in ("auto", *SCHEMES):
        raise ValueRangeError(f"scheme must be 'auto' or one of {', '.join(map(repr, SCHEMES))}, got {scheme!r}")
    costs = {name: COSTS[name](problem, links) for name in SCHEMES}
    others = tuple(cost for name, cost in costs.items() if name != scheme)
    if scheme != "auto":
        if costs[scheme].refusal:
            possible = [cost.scheme for cost in others if not cost.refusal]
            raise Unsupported(f"scheme {scheme!r}: {costs[scheme].refusal}; possible here: {', '.join(possible)}")
        return ParallelPlan(problem, links, costs[scheme], "asked for", others)
    fits = [c for c in costs.values() if not c.refusal and (links.memory is None or c.memory <= links.memory)]
    if not fits:
        raise PlanError(f"no scheme fits {size_text(links.memory or 0)} a rank: {'; '.join(map(str, costs.values()))}")
    fastest = min(fits, key=lambda cost: cost.seconds)
    best = min((c for c in fits if c.seconds <= CLOSE * fastest.seconds), key=lambda cost: cost.memory)
    rejected = tuple(_why_not(cost, links) for cost in costs.values() if cost is not best)
    return ParallelPlan(problem, links, best, _reason(best, fastest, fits), rejected)


def _why_not(cost: SchemeCost, links: Links) -> SchemeCost:
    if cost.refusal or links.memory is None or cost.memory <= links.memory:
        return cost
    text = f"needs {size_text(cost.memory)}, {size_text(links.memory)} are free"
    return SchemeCost(cost.scheme, cost.inside, cost.across, cost.messages, cost.seconds, cost.memory, text)


def _reason(best: SchemeCost, fastest: SchemeCost, fits: list[SchemeCost]) -> str:
    if len(fits) == 1:
        return "the only one that is possible and fits"
    if best is not fastest:
        slower, less = best.seconds / fastest.seconds - 1, fastest.memory - best.memory
        memory = f"{size_text(less)} less" if less else "the same"
        return f"predicted within {slower:.1%} of {fastest.scheme}, the fastest, with {memory} memory"
    second = min((c for c in fits if c is not best), key=lambda cost: cost.seconds)
    if not best.seconds:
        return "predicted to take no time"
    return f"predicted {second.seconds / best.seconds:.2f} times as fast as {second.scheme}, the next"
