"""One problem measured by every rung up to one: judged against fp64, timed in turns, and in the interpreter counted."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import tilefold
from tilefold.bench.attention.cases import Case
from tilefold.bench.implementation import Inputs, make_inputs
from tilefold.bench.judge import Judge, Verdict
from tilefold.ladder import profile, student
from tilefold.ladder.count import Counts, counting
from tilefold.ladder.inputs import Tile, here
from tilefold.ladder.rungs import RUNGS, Rung, up_to
from tilefold.plan.cost import Cost
from tilefold.plan.problem import AttentionProblem

__all__ = ["LIBRARY", "Result", "declared", "run", "sweep"]

LIBRARY = "tilefold"
Step = Callable[[str, str], None]


@dataclass
class Result:
    """A problem's rows.  verdicts, counts (interpreter only) and notes by implementation; lines: of those that are right."""

    problem: AttentionProblem
    lines: list[profile.Line] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether everything that ran is right."""
        return not self.notes and all(verdict.ok for verdict in self.verdicts.values())

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def declared(rungs: tuple[Rung, ...], p: AttentionProblem) -> dict[str, Cost]:
    """What each rung declares of a problem."""
    return {rung.name: rung.cost(p) for rung in rungs}


def _library(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """What the library exports for such a call: `attention`, and for few queries what the last rung ends in."""
    split: Any = RUNGS["split"].program
    p, (q, k, v) = inputs.problem, (inputs.q, inputs.k, inputs.v)
    if p.seq_q * p.group <= 128 < p.seq_k:
        return lambda: split.library(q, k, v, p.causal)
    return lambda: tilefold.attention(q, k, v, causal=p.causal)


def run(p: AttentionProblem, name: str, gpu: bool, step: Step, new: Path | None = None) -> Result:
    """Check and time the rungs up to `name`, the library and, if there is one, the student's file.

    student.StudentError and errors.py's if the student's file cannot run; what is wrong is never timed."""
    case = Case("dense", p)
    inputs = make_inputs(case, "cuda" if gpu else "cpu")
    judge, found, rungs = Judge(inputs), Result(p), up_to(name)
    q, k, v = inputs.q, inputs.k, inputs.v
    calls: dict[str, Callable[[], Any]] = {rung.name: rung.prepare(q, k, v, p.causal) for rung in rungs}
    calls[LIBRARY] = _library(inputs)
    if new is not None:
        function, file = student.load(new), new
        calls[new.name] = lambda: student.called(function, file, q, k, v, p.causal)
    for each, call in calls.items():
        step(f"N={p.seq_k}", each)
        if gpu:
            found.verdicts[each] = judge.verdict(call())
        else:
            with counting() as counts:
                out = call()
            found.verdicts[each], found.counts[each] = judge.verdict(out), counts
    found.costs = declared(rungs, p)
    right = {each: call for each, call in calls.items() if found.verdicts[each].ok}
    if new is not None and new.name in right:  # timed as it is, without the checks of its result
        right[new.name] = lambda: function(q, k, v, causal=p.causal)
    step(f"N={p.seq_k}", "timing")
    times = profile.measure(right, gpu)
    found.lines = profile.table({each: times[each] for each in right}, found.costs, p, here())
    return found


def sweep(p: AttentionProblem, rung: Rung, gpu: bool, step: Step) -> dict[Tile, float | str]:
    """The rung with each of its tiles, on one problem."""
    inputs = make_inputs(Case("dense", p), "cuda" if gpu else "cpu")
    tiles = rung.program.TILES if hasattr(rung.program, "TILES") else (rung.program.TILE,)

    def made(tile: Tile) -> Callable[[], Any]:
        return rung.prepare(inputs.q, inputs.k, inputs.v, p.causal, tile)

    return profile.sweep(made, tiles, gpu, lambda tile: step(f"N={p.seq_k}", str(tile)))
