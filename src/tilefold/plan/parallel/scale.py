"""The cost model over numbers of ranks that are not here, and its formulas in words: what `tilefold explain --ranks` prints."""

from dataclasses import dataclass, replace

from tilefold.errors import PlanError

from .plan import ParallelPlan, plan_parallel
from .problem import BACKWARD_FLOPS, Links, ParallelProblem

FORMULAS = {
    "ring": (
        "sends (N-1) KV; backward (N-1) KV + N x KV more",
        "forward 2 KV + (x+2) O + 2 l; backward 2 KV + x (Q + 2 KV) + O + l + max(Q + KV/2, Q/2 + KV); of 2 ranks less",
    ),
    "all_gather": (
        "sends (N-1) KV; backward (N-1) KV + (N-1) x KV more",
        "forward (N-1) KV + 2 O + 2 l; backward Q + KV + O + l + (N-1) KV max(2+x, 2x), of more than 2 ranks (Q - KV)/2 more",
    ),
    "heads": (
        "sends (N-1)/N (Q + KV + O); backward (N-1)/N (O + Q + KV) more",
        "forward Q + KV + (3-1/N) O + l; backward 2 Q + KV + 2 O + l + max((2-1/N) Q + KV, (5-1/N)/2 KV)",
    ),
    "two_level": (
        "sends inside (U-1)/U (Q + KV + O), across (N/U-1) KV; backward the same again, and N/U x KV across",
        "forward Q + KV + the ring's; backward Q + KV + 2 O + the ring's",
    ),
}
"""By scheme: the bytes that a rank sends, and those that it needs beyond its q, k, v and dout, in the letters of LETTERS."""

LETTERS = (
    "N ranks, U a node, S tokens, H heads, G KV heads, D and Dv head dims, e bytes an element:",
    "Q = S/N H D e, KV = S/N G (D + Dv) e, O = S/N H Dv e, l = S/N H 4, x = 4/e, times the batch",
)


@dataclass(frozen=True, slots=True)
class Scaling:
    """The plans for growing numbers of ranks, of one problem; `print` it.  None where nothing fits."""

    problem: ParallelProblem
    plans: tuple[tuple[int, ParallelPlan | None], ...]

    def efficiency(self, plan: ParallelPlan) -> float:
        """Predicted: the time that the arithmetic alone takes, shared out evenly, beside the time of the plan."""
        seconds = self.problem.flops / plan.links.flops
        if self.problem.backward:
            seconds += self.problem.flops * BACKWARD_FLOPS / plan.links.backward(self.problem)
        return seconds / plan.links.ranks / plan.cost.seconds

    def __str__(self) -> str:
        head = (
            f"  {'ranks':>6} {'scheme':<11} {'ms':>12} {'linear':>7} {'inside GB':>10} {'across GB':>10} {'more GB':>9}"
        )
        lines = [head]
        for ranks, plan in self.plans:
            if plan is None:
                lines.append(f"  {ranks:>6} nothing fits the memory")
                continue
            cost = plan.cost
            if ranks == 1:
                lines.append(f"  {1:>6} {'-':<11} {cost.seconds * 1e3:>12.3f} {self.efficiency(plan):>7.0%}")
                continue
            lines.append(
                f"  {ranks:>6} {plan.scheme:<11} {cost.seconds * 1e3:>12.3f} {self.efficiency(plan):>7.0%} "
                f"{cost.inside / 1e9:>10.3f} {cost.across / 1e9:>10.3f} {cost.memory / 1e9:>9.3f}"
            )
        return "\n".join(lines)


def scaling(problem: ParallelProblem, links: Links, most: int = 64) -> Scaling:
    """Plans for 1, 2, 4, ... ranks up to `most` or links.ranks, whichever is more, over the same links; nodes fill up first."""
    counts, n = [], 1
    while n <= max(most, links.ranks):
        counts.append(n)
        n *= 2
    found: list[tuple[int, ParallelPlan | None]] = []
    for ranks in sorted({*counts, links.ranks}):
        inside = min(ranks, links.ranks_per_node)
        if ranks % inside:
            continue
        try:
            plan = plan_parallel(problem, replace(links, ranks=ranks, ranks_per_node=inside))
        except PlanError:
            found.append((ranks, None))
        else:
            found.append((ranks, plan))
    return Scaling(problem, tuple(found))
