"""Run benchmark cases: make inputs, check every implementation, time those that are right, one against the other."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tilefold.bench import timers
from tilefold.bench.attention.cases import Case
from tilefold.bench.implementation import Implementation, Inputs, Prepared, Result, make_inputs
from tilefold.bench.judge import Judge
from tilefold.bench.loop import FAILED, MEMORY, OK, REFUSED, checked, first_line, run_each, untimed
from tilefold.bench.setting import Options
from tilefold.bench.timers import Timing, l2_bytes

if TYPE_CHECKING:
    from tilefold.reference import Comparison

__all__ = ["Cell", "run_case", "run_cases"]

Progress = Callable[[Case, str], None]
Finished = Callable[["list[Cell]"], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One implementation on one case.

    status: "ok"; "WRONG" (the output fails the tolerance, never timed); "refused" (cannot take the case here); "no memory";
    "failed" (raised something else). note: why. timing is there only for "ok", host and graph where they were asked for.
    graph: replays over so many buffers that none is in the L2 cache when its turn comes; warm: replays over one set of buffers,
    of which stays in L2 what fits. scratch: bytes that a call allocates at its peak beyond its inputs and results (GPU only).
    """

    case: Case
    implementation: str
    status: str
    note: str = ""
    verdict: "Comparison | None" = None
    timing: Timing | None = None
    host: Timing | None = None
    graph: Timing | None = None
    warm: Timing | None = None
    scratch: int | None = None

    @property
    def flops_per_s(self) -> float | None:
        """Achieved FLOP/s, or None where nothing was timed."""
        return self.case.flops / (self.timing.ms * 1e-3) if self.timing and self.timing.ms else None


def run_cases(
    cases: Iterable[Case],
    implementations: tuple[Implementation, ...],
    device: str,
    options: Options,
    progress: Progress,
    finished: Finished = lambda cells: None,
) -> list[Cell]:
    """`run_case` for each case; cells in order. progress(case, what) is called before each step: one per implementation to
    check and one, "timing", per case; finished(cells) after each case. Cases that the budget does not reach have no cells, nor
    have those after one in which some implementation broke the GPU's context: nothing runs there any more."""

    def failed(case: Case, note: str) -> list[Cell]:
        return [Cell(case, each.name, FAILED, note) for each in implementations]

    done = run_each(
        cases,
        lambda case: run_case(case, implementations, device, options, progress),
        failed,
        finished,
        options.budget_s,
    )
    return [cell for cells in done for cell in cells]


def run_case(
    case: Case, implementations: tuple[Implementation, ...], device: str, options: Options, progress: Progress
) -> list[Cell]:
    """Check every implementation on a case and time those that passed, alternating. One cell each, in the order given."""
    import torch

    cells: dict[str, Cell] = {}
    ready: dict[str, Prepared] = {}
    try:
        inputs = make_inputs(case, device, options.seed)
        judge_of = judges(inputs)
        for implementation in implementations:
            progress(case, implementation.title)
            cell, prepared = check_one(case, implementation, inputs, judge_of, device)
            cells[implementation.name] = cell
            if prepared is not None:
                ready[implementation.name] = prepared
        progress(case, "timing")
        failed: dict[str, Exception] = {}
        for name, timing in time_all(ready, device, options, failed).items():
            cells[name] = replace(cells[name], timing=timing)
        for name, (status, note) in untimed(failed).items():
            cells[name] = replace(cells[name], status=status, note=note)
            del ready[name]
        for implementation in implementations:
            if implementation.name in ready:
                cells[implementation.name] = extras(cells[implementation.name], implementation, ready, device, options)
    except torch.OutOfMemoryError as error:
        for implementation in implementations:
            if implementation.name not in cells or cells[implementation.name].status == OK:
                cells[implementation.name] = Cell(case, implementation.name, MEMORY, first_line(error))
    finally:
        ready.clear()
        if device == "cuda":
            torch.cuda.empty_cache()
    return [cells[implementation.name] for implementation in implementations]


def judges(inputs: Inputs) -> Callable[[Implementation], Judge]:
    """The judge of an implementation's result, made when first needed: one for those that follow the case's lists, another for
    those that compute every pair."""

    @functools.cache
    def judge(lists: bool) -> Judge:
        return Judge(inputs, lists=lists)

    return lambda implementation: judge(implementation.lists or inputs.index is None)


def check_one(
    case: Case, implementation: Implementation, inputs: Inputs, judge_of: Callable[[Implementation], Judge], device: str
) -> tuple[Cell, Prepared | None]:
    """Prepare and run an implementation once and judge its result; what is ready to be timed comes back too."""
    reason = implementation.refuses(case, device)
    if reason is not None:
        return Cell(case, implementation.name, REFUSED, reason), None
    judge = judge_of(implementation)
    scratch: int | None = None

    def attempt() -> "tuple[Comparison, Prepared]":
        nonlocal scratch
        prepared = implementation.prepare(inputs)
        with prepared.context():
            verdict = judge.verdict(prepared.call())
            if device == "cuda":
                scratch = scratch_bytes(prepared.call)
        return verdict, prepared

    status, note, verdict, ready = checked(attempt)
    return Cell(case, implementation.name, status, note, verdict, scratch=scratch), ready


def scratch_bytes(call: Callable[[], Result]) -> int:
    """Bytes that a (warmed) call allocates at its peak beyond what is still there when it has returned: its results."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    scratch = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result  # alive until here, so that the second figure counts it
    return int(scratch)


def extras(
    cell: Cell, implementation: Implementation, ready: dict[str, Prepared], device: str, options: Options
) -> Cell:
    """The cell with the host cost and the graph replay that the options ask for."""
    if options.host:
        cell = replace(
            cell, host=host_timing(ready[implementation.name], device, cell.timing.ms if cell.timing else 1.0)
        )
    if (options.graph or cell.case.replayed) and device == "cuda":
        graphs = graph_timings(implementation, cell.case, options)
        if isinstance(graphs, str):
            return replace(cell, note=graphs)
        cell = replace(cell, graph=graphs[0], warm=graphs[1], note=warm_note(cell.case.bytes, l2_bytes()))
    return cell


def warm_note(touched: int, cache: int) -> str:
    """What has to be said of warm replays that touch more than the cache holds; "" if they fit."""
    if touched <= cache:
        return ""
    return f"a replay touches {touched / 1e6:.0f} MB, L2 holds {cache / 1e6:.0f}: warm, too, reads from memory"


def time_all(
    ready: dict[str, Prepared], device: str, options: Options, failed: dict[str, Exception]
) -> dict[str, Timing]:
    """Time the prepared calls of one case against each other; what one of them raises goes into failed."""

    def sampler(prepared: Prepared) -> timers.Sampler:
        def sample() -> list[float]:
            with prepared.context():
                if device == "cuda":
                    return timers.event_samples(prepared.call, options.rep_ms / 4, options.rep_ms)
                return timers.wall_samples(prepared.call, options.rep_ms * 1e-3)

        return sample

    samplers = {name: sampler(prepared) for name, prepared in ready.items()}
    return timers.time_alternating(samplers, options.rounds, failed=failed)


def host_timing(prepared: Prepared, device: str, ms: float) -> Timing:
    """The host cost of a call that takes `ms`: of as many calls at a time as about 50 ms hold, 10 to 100; in the interpreter,
    where it is the whole cost, of one."""
    import torch

    with prepared.context():
        if device == "cuda":
            return timers.time_host(
                prepared.call, torch.cuda.synchronize, calls=min(100, max(10, round(50 / max(ms, 0.01))))
            )
        return timers.time_host(prepared.call, torch.cpu.synchronize, calls=1, repetitions=2)


def graph_timings(implementation: Implementation, case: Case, options: Options) -> tuple[Timing, Timing] | str:
    """CUDA-graph replays, cold (over as many input sets as overflow the L2 cache twice) and warm (over one), or why the
    implementation cannot be captured."""
    # Three at least: a cache that does not replace the oldest first keeps part of a single set that is larger than itself.
    sets = max(3, timers.rotations(case.bytes, l2_bytes()))
    try:
        prepared = [implementation.prepare(make_inputs(case, "cuda", options.seed + turn)) for turn in range(sets)]
        with prepared[0].context():
            calls = [each.call for each in prepared]
            return timers.time_graph(calls), timers.time_graph(calls[:1])
    except Exception as error:  # a library that cannot be captured still has its eager figure
        return f"no graph: {first_line(error)}"
