"""The rungs as cases to profile: `tilefold profile case ladder flash_n4096`.

LADDER is a family of benchmarks for `tilefold.profiling`: cases by size, inputs, and the call."""

from collections.abc import Sequence
from dataclasses import dataclass

from tilefold.bench.attention.cases import Case
from tilefold.bench.choice import of_size
from tilefold.bench.family import Calls, Family, Peer
from tilefold.bench.implementation import Inputs, make_inputs
from tilefold.bench.judge import Judge
from tilefold.ladder.rungs import RUNGS
from tilefold.plan.cost import Cost
from tilefold.plan.problem import AttentionProblem

FEW = ("flash", "split")  # measured with one query, too: what the last rung is for
SHAPES = {"full": ((512, 1024, 2048, 4096, 8192), 16, 128), "quick": ((1024,), 16, 128), "tiny": ((24,), 2, 16)}


@dataclass(frozen=True, slots=True)
class LadderCase:
    """One rung on one problem.  Its cost imports triton, so it is asked for late."""

    rung: str
    problem: AttentionProblem

    @property
    def name(self) -> str:
        p = self.problem
        queries = f"_q{p.seq_q}" if p.seq_q != p.seq_k else ""
        return f"{self.rung}{queries}_n{p.seq_k}" + ("_causal" if p.causal else "")

    @property
    def cost(self) -> Cost:
        return RUNGS[self.rung].cost(self.problem)

    @property
    def flops(self) -> int:
        return self.cost.flops

    @property
    def bytes(self) -> int:
        return self.cost.bytes

    @property
    def l2_bytes(self) -> int:
        return self.cost.l2_bytes

    @property
    def dtype(self) -> str:
        """That its products are made in: naive turns everything to fp32."""
        return "float32" if self.rung == "naive" else self.problem.dtype


def _prepare(sets: Sequence[tuple[LadderCase, Inputs]]) -> Calls:
    return Calls([RUNGS[case.rung].prepare(i.q, i.k, i.v, case.problem.causal) for case, i in sets])


def ladder_cases(size: str) -> tuple[LadderCase, ...]:
    """Of size "full", "quick" or "tiny" every rung at each length, plain and causal, those without a mask first; those in FEW
    with one query, too.  ValueRangeError for another size."""
    lengths, heads, dim = of_size(size, SHAPES)
    found = []
    for n in lengths:
        square = [(rung, n, causal) for causal in (False, True) for rung in RUNGS]
        for rung, queries, causal in (*square, *((rung, 1, False) for rung in FEW)):
            problem = AttentionProblem(1, queries, n, heads, heads, dim, dim, causal=causal)
            found.append(LadderCase(rung, problem))
    return tuple(found)


_OWN = Peer("tilefold", "the ladder", "a rung of the ladder", "tilefold", _prepare)
LADDER = Family(
    "ladder",
    ladder_cases,
    lambda case, device, seed: (case, make_inputs(Case("dense", case.problem), device, seed)),
    lambda one: Judge(one[1]),
    {_OWN.name: _OWN},
    {},
)
