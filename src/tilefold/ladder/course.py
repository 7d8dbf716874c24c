"""One problem measured by every rung up to one: judged against fp64, timed in turns, and in the interpreter counted."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilefold
from tilefold.bench.attention.cases import Case
from tilefold.bench.implementation import Inputs, make_inputs
from tilefold.bench.judge import Judge
from tilefold.bench.loop import first_line
from tilefold.ladder import profile, student
from tilefold.ladder.count import Counts, counting
from tilefold.ladder.inputs import Tile, here
from tilefold.ladder.rungs import RUNGS, Rung, up_to
from tilefold.plan.cost import Cost
from tilefold.plan.problem import AttentionProblem
from tilefold.reference import Comparison

LIBRARY = "tilefold"
TORCH = ("torch math", profile.SDPA)
Step = Callable[[str, str], None]


@dataclass
class Result:
    """A problem's rows.  verdicts and counts (interpreter only, not of torch) by implementation; notes: why one did
    not run; lines: of those that are right."""

    problem: AttentionProblem
    lines: list[profile.Line] = field(default_factory=list)
    verdicts: dict[str, Comparison] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether everything that ran is right."""
        return all(verdict.ok for verdict in self.verdicts.values())

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        verdicts = {name: {**asdict(one), "ok": one.ok} for name, one in self.verdicts.items()}
        return {**asdict(self), "verdicts": verdicts}


@dataclass
class Swept:
    """One rung on one problem with other tiles.  cells: in `unit` by tile, or why there is none."""

    problem: AttentionProblem
    unit: str
    cells: dict[str, float | str]

    @property
    def ok(self) -> bool:
        """Whether no setting gave a wrong result."""
        return not any(isinstance(cell, str) and cell.startswith(WrongError.__name__) for cell in self.cells.values())


def _library(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """What the library exports for such a call: `attention`, and for few queries what the last rung ends in."""
    split: Any = RUNGS["split"].program
    p, (q, k, v) = inputs.problem, (inputs.q, inputs.k, inputs.v)
    if p.seq_q * p.group <= 128 < p.seq_k:
        return lambda: split.library(q, k, v, p.causal)
    return lambda: tilefold.attention(q, k, v, causal=p.causal)


def _torch(inputs: Inputs, backend: SDPBackend | None) -> Callable[[], torch.Tensor]:
    """torch's scaled_dot_product_attention by one backend, or by the one that it chooses itself."""
    p, (q, k, v) = inputs.problem, (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    square, mask = p.seq_q == p.seq_k, None
    if p.causal and 1 < p.seq_q != p.seq_k:
        from torch.nn.attention.bias import causal_lower_right  # loads Dynamo, which takes seconds

        mask = causal_lower_right(p.seq_q, p.seq_k)

    def call() -> torch.Tensor:
        out: torch.Tensor = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=p.causal and square, enable_gqa=p.group > 1
        )
        return out.transpose(1, 2)

    def alone() -> torch.Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return call()

    return alone


def _rows(
    inputs: Inputs, rungs: tuple[Rung, ...], splits: Sequence[int]
) -> tuple[dict[str, Callable[[], Any]], dict[str, Cost]]:
    """The calls of all rows by name, the slowest rung first, and what the rungs among them declare."""
    q, k, v, p = inputs.q, inputs.k, inputs.v, inputs.problem
    calls: dict[str, Callable[[], Any]] = {}
    costs: dict[str, Cost] = {}
    for rung in rungs:
        for count in splits if rung.name == "split" and splits else (None,):
            options: dict[str, Any] = {} if count is None else {"splits": count}
            name = rung.name if count is None else f"{rung.name} {count}"
            calls[name] = rung.prepare(q, k, v, p.causal, **options)
            costs[name] = rung.cost(p, **options)
    for name, backend in zip(TORCH, (SDPBackend.MATH, None), strict=True):
        calls[name] = _torch(inputs, backend)
    calls[LIBRARY] = _library(inputs)
    return calls, costs


def run(
    p: AttentionProblem, name: str, gpu: bool, step: Step, new: Path | None = None, splits: Sequence[int] = ()
) -> Result:
    """Check and time the rungs up to `name`, torch, the library and, if there is one, the student's file; what is wrong is
    never timed.  splits: parts of the keys, a row of split for each; none: as many as it plans.

    student.StudentError and errors.py's if the student's file cannot run."""
    inputs = make_inputs(Case("dense", p), "cuda" if gpu else "cpu")
    judge, found = Judge(inputs), Result(p)
    calls, found.costs = _rows(inputs, up_to(name), splits)
    if new is not None:
        function, file = student.load(new), new
        q, k, v = inputs.q, inputs.k, inputs.v
        calls[new.name] = lambda: student.called(function, file, q, k, v, p.causal)
    for each, call in calls.items():
        step(f"N={p.seq_k}", each)
        try:
            out, counts = _counted(call, gpu)
        except torch.OutOfMemoryError as error:
            found.notes[each] = f"too little memory: {first_line(error)}"
            continue
        found.verdicts[each] = judge.verdict(out)
        if not gpu and each not in TORCH:
            found.counts[each] = counts
        del out
    right = {each: call for each, call in calls.items() if each in found.verdicts and found.verdicts[each].ok}
    if new is not None and new.name in right:  # timed as it is, without the checks of its result
        right[new.name] = lambda: function(q, k, v, causal=p.causal)
    step(f"N={p.seq_k}", "timing")
    found.lines = profile.table(profile.measure(right, gpu), found.costs, p, here()) if right else []
    return found


def _counted(call: Callable[[], Any], gpu: bool) -> tuple[Any, Counts]:
    """Its result, and what the interpreter counts; on a GPU nothing."""
    if gpu:
        return call(), Counts()
    with counting() as counts:
        return call(), counts


def tiles_of(rung: Rung, p: AttentionProblem, vary: bool) -> tuple[Tile, ...]:
    """Those of its sweep; vary: also the problem's own with one number changed."""
    program = rung.program
    more = program.tile_for(p).around() if vary else ()
    return tuple(dict.fromkeys((*getattr(program, "TILES", (program.TILE,)), *more)))


def sweep(p: AttentionProblem, rung: Rung, gpu: bool, step: Step, vary: bool = False) -> Swept:
    """The rung with other tiles on one problem, each checked before it is measured: milliseconds on a GPU; in the interpreter,
    which times say nothing of, kB that are loaded and stored."""
    inputs = make_inputs(Case("dense", p), "cuda" if gpu else "cpu")
    judge = Judge(inputs)

    def prepared(tile: Tile) -> Callable[[], Any]:
        call = rung.prepare(inputs.q, inputs.k, inputs.v, p.causal, tile)
        verdict = judge.verdict(call())
        if not verdict.ok:
            raise WrongError(verdict.words)
        return call

    def measured(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        if gpu:
            return profile.measure(calls, gpu)
        return {name: _counted(call, gpu)[1].bytes / 1e3 for name, call in calls.items()}

    settings = {str(tile): partial(prepared, tile) for tile in tiles_of(rung, p, vary)}
    return Swept(p, "ms" if gpu else "kB", profile.sweep(settings, measured, lambda name: step(f"N={p.seq_k}", name)))


class WrongError(Exception):
    """A setting whose result is not within the tolerance: its cell says so."""
