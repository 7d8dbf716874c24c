"""Why each stage of sparse video attention takes the time it takes: its launches, what bounds each, and a sum that has to add up.

Three measurements that do not know of one another are held together: the time of a call between events, the times of its
launches in a trace, and what launching costs by empty kernels. What they leave over is shown, not shared out.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from tilefold.bench import timers
from tilefold.bench.page import Rows
from tilefold.bench.video.stages import TOTAL, Made
from tilefold.plan.device import Device
from tilefold.plan.sparse.video import STAGES, VideoShape
from tilefold.plan.sparse.video_launches import TOGETHER, LaunchWork, launch_works
from tilefold.profiling.evidence import Evidence
from tilefold.profiling.launches import Launched, by_place, code_for, codes_of, interpreted, traced
from tilefold.profiling.predict import Predicted, memory_traffic, predict
from tilefold.profiling.roofs import load_roofs, with_roofs
from tilefold.profiling.session import Declared, evidence_of
from tilefold.profiling.verdict import Verdict, judge

EMPTY, ROW = 1, 9  # empty launches of a call, to tell the first one's cost from that of those behind it
LAUNCH_HEAD = (
    "stage", "launch", "us", "inside", "GFLOP", "MB", "L2 MB", "bound", "of bound", "explained", "not", "verdict",
)  # fmt: skip
SUM_HEAD = ("adds up", "ms", "host", "device", "launches", "their ms", "gaps", "left", "left %")
INSIDE_HEAD = ("inside the pipeline", "launches", "ms", "%")


@dataclass(frozen=True, slots=True)
class LaunchRow:
    """One launch of a stage run alone. what: which of several alike. predicted: None where nobody declared its work; inside:
    seconds of the same launch in a call of the whole pipeline, None if it does not run there."""

    stage: str
    what: str
    evidence: Evidence
    verdict: Verdict
    predicted: Predicted | None
    inside: float | None

    @property
    def launch(self) -> str:
        return f"{self.evidence.kernel}{f' ({self.what})' if self.what else ''}"

    @property
    def name(self) -> str:
        return f"{self.stage}: {self.launch}"

    @property
    def unexplained(self) -> float | None:
        """Seconds measured beyond the predicted ones; below 0 if it was faster; None without a prediction."""
        if self.predicted is None or self.evidence.seconds is None:
            return None
        return self.evidence.seconds - self.predicted.seconds

    def cells(self) -> tuple[str, ...]:
        """Under `LAUNCH_HEAD`."""
        e, p = self.evidence, self.predicted
        seconds = e.seconds or 0.0
        predicted = [""] * 4
        if p is not None:
            of_bound = f"{100 * p.times[0][1] / seconds:.0f} %" if seconds else ""
            over = "" if p.explains(seconds) else _us(self.unexplained or 0.0)
            predicted = [p.resource, of_bound, _us(p.seconds), over]
        return (
            self.stage, self.launch, _us(seconds), "" if self.inside is None else _us(self.inside), _scaled(e.flops, 1e-9),
            _scaled(e.bytes, 1e-6), _scaled(e.l2_bytes, 1e-6), *predicted, self.verdict.resource,
        )  # fmt: skip

    def line(self) -> str:
        """Verdict and prediction in words."""
        return f"{self.name}: {self.verdict} {self._prediction()}"

    def _prediction(self) -> str:
        p, seconds = self.predicted, self.evidence.seconds or 0.0
        if p is None:
            return "[Its work is not declared.]"
        parts = ", ".join(f"{name} {_us(each)}" for name, each in p.times)
        words = f"{parts}, launch {_us(p.launch)} us"
        waves = self.evidence.waves
        if waves and waves.waves > 1:
            words += f"; {waves.waves:.1f} waves of {_us(seconds / waves.waves)} us"
        if p.explains(seconds):
            return f"[Explained: {words}.]"
        over = self.unexplained or 0.0
        if over < 0:
            return f"[Faster than predicted by {_us(-over)} us: {words}.]"
        overlap = p.overlap(seconds)
        apart = "" if overlap is None else f"; one after the other {_us(p.apart)} us: {100 * overlap:.0f} % overlapped"
        return f"[Not explained: {_us(over)} of {_us(seconds)} us: {words}{apart}.]"


@dataclass(frozen=True, slots=True)
class Account:
    """A stage or the whole: does the sum of what is known come to what was measured? Milliseconds.

    ms: a call as it comes, between events; device: the same with the host ahead, so that the device waits for nobody. launches:
    how many; kernels: the sum of their times in a trace; gaps: what empty launches cost beside their kernels."""

    name: str
    ms: float
    device: float
    launches: int
    kernels: float
    gaps: float

    @property
    def waits(self) -> float:
        """What the device waits for the host in a call as it comes."""
        return self.ms - self.device

    @property
    def left(self) -> float:
        """What neither the launches nor the gaps account for."""
        return self.device - self.kernels - self.gaps

    @property
    def share(self) -> float:
        """Of the time on the device, what is left over; signed."""
        return self.left / self.device if self.device else 0.0

    def cells(self) -> tuple[str, ...]:
        """Under `SUM_HEAD`."""
        times = (self.ms, self.waits, self.device), (self.kernels, self.gaps, self.left)
        first, second = ([f"{ms:.4f}" for ms in each] for each in times)
        return (self.name, *first, str(self.launches), *second, f"{100 * self.share:.1f}")


@dataclass(frozen=True, slots=True)
class Explanation:
    """launches: of each stage alone. sums: of each stage and of the pipeline. inside: (stage, launches, seconds) as they run in
    one call of the pipeline. first, next: seconds that a first launch and each one behind it cost beside their kernels."""

    launches: tuple[LaunchRow, ...]
    sums: tuple[Account, ...]
    inside: tuple[tuple[str, int, float], ...]
    first: float
    next: float
    notes: tuple[str, ...]

    def tables(self) -> tuple[Rows, ...]:
        """Of the launches, of the sums, and of the pipeline from inside."""
        total = sum(seconds for *_, seconds in self.inside)
        inside = tuple(
            (stage, str(count), f"{seconds * 1e3:.4f}", f"{100 * seconds / total:.1f}" if total else "")
            for stage, count, seconds in self.inside
        )
        return (
            Rows(LAUNCH_HEAD, tuple(row.cells() for row in self.launches), left=2),
            Rows(SUM_HEAD, tuple(row.cells() for row in self.sums)),
            Rows(INSIDE_HEAD, inside),
        )

    def lines(self) -> tuple[str, ...]:
        """A verdict and a prediction for each launch, and what else is to be known."""
        return (*(row.line() for row in self.launches), *self.notes)

    def document(self) -> dict[str, Any]:
        """Plain values for JSON."""
        launches = [
            {"name": row.name, **asdict(row), "unexplained": row.unexplained,
             "explained": bool(row.predicted and row.predicted.explains(row.evidence.seconds or 0.0))}
            for row in self.launches
        ]  # fmt: skip
        sums = [{**asdict(row), "waits": row.waits, "left": row.left, "share": row.share} for row in self.sums]
        inside = [{"stage": stage, "launches": count, "seconds": seconds} for stage, count, seconds in self.inside]
        return {"launches": launches, "sums": sums, "inside": inside, "first_launch": self.first,
                "next_launch": self.next, "notes": list(self.notes)}  # fmt: skip


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _scaled(value: float | None, scale: float) -> str:
    return "" if not value else f"{value * scale:.0f}" if value * scale >= 1000 else f"{value * scale:.4g}"


# ---------------------------------------------------------------- measuring


def explain_video(
    made: Made, device: Device, where: str, measured: Mapping[str, float], rounds: int = 5, samples: int = 5
) -> Explanation:
    """Trace each stage and the pipeline of `bench.video.stages.prepare_stages`; measured: their times (ms) as `profile_video`
    has them, by name.

    device: whose roofs count; where: "cuda" or "cpu", the interpreter, in which each call is made once more and its wall time
    is what has to add up."""
    gpu = where == "cuda"
    shape, coarse = made.shape, made.options["coarse"]
    works = launch_works(shape, made.listed, made.index.capacity, device, coarse.kind, coarse.reduction)
    names = [name for name in (*STAGES, TOGETHER, TOTAL) if name in made.calls]
    calls = {name: made.calls[name] for name in names}
    if gpu:
        for call in calls.values():
            call()
        empty = _empty_calls(device)
        rans = traced({**calls, **empty}, samples)
        queued = {name: partial(timers.queued_samples, call) for name, call in (calls | empty).items()}
        on_device = timers.time_alternating(queued, rounds)
        times = {name: timing.ms for name, timing in on_device.items()}
        first, following, nothing = _launch_costs(rans, times)
    else:
        rans, times = interpreted(calls)
        measured = times  # nobody is ahead of anybody: of the call that was watched
        first = following = nothing = 0.0
    placed = {name: by_place(rans[name]) for name in names}
    inside, notes = stages_inside({name: [each.kernel for each in placed[name]] for name in names})
    notes += [f"{name}: the trace does not hold its launches" for name in names if not placed[name]]
    judged = _Judge(shape, device, gpu, nothing, {each.kernel for name in names for each in placed[name]})
    rows = _rows(judged, works, placed, inside)
    sums = []
    for name, launches in placed.items():
        gaps = (first + following * (len(launches) - 1)) * 1e3 if launches else 0.0
        total_ms = sum(each.median for each in launches) * 1e3
        sums.append(Account(name, measured[name], times[name], len(launches), total_ms, gaps))
    total = placed[TOTAL]
    parts = tuple(
        (stage, stop - start, sum(each.median for each in total[start:stop])) for stage, start, stop in inside
    )
    return Explanation(rows, tuple(sums), parts, first, following, (*notes, *judged.notes()))


def _empty_calls(device: Device) -> dict[str, Callable[[], object]]:
    """A call of one empty launch and one of several; the kernel is compiled."""
    from tilefold.profiling.roof_launches import Work, sizes_of

    launch = Work(device, torch.device("cuda", torch.cuda.current_device()), sizes_of(device)).nothing()

    def several(count: int) -> None:
        for _ in range(count):
            launch()

    launch()
    return {f"{count} empty": partial(several, count) for count in (EMPTY, ROW)}


def _launch_costs(
    rans: Mapping[str, Sequence[Sequence[Launched]]], times: Mapping[str, float]
) -> tuple[float, float, float]:
    """Seconds between events beside the kernels for a first launch and for each one behind it; and of an empty kernel."""
    one, row = f"{EMPTY} empty", f"{ROW} empty"
    durations = [ran.median for name in (one, row) for sample in rans[name] for ran in sample]
    nothing = statistics.median(durations) if durations else 0.0
    alone, many = times[one] * 1e-3, times[row] * 1e-3
    return max(0.0, alone - nothing), max(0.0, (many - alone) / (ROW - EMPTY) - nothing), nothing


def stages_inside(names: Mapping[str, Sequence[str]]) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Which launches of the pipeline belong to which stage, as (stage, from, to); and what could not be told.

    names: of the kernels that each stage launches alone, and of those of the whole, in order. The pipeline is its stages one
    after the other, so its launches are theirs, in their order: fine and fuse by themselves or in one."""
    whole = list(names[TOTAL])
    for last in ((TOGETHER,), ("fine", "fuse")):
        stages = ("coarse", "select", *last)
        if all(stage in names for stage in stages) and whole == [each for stage in stages for each in names[stage]]:
            ends = [0, *accumulate(len(names[stage]) for stage in stages)]
            return [*zip(stages, ends[:-1], ends[1:], strict=True)], []
    note = "the pipeline launches something else than its stages do alone: its launches are not attributed"
    return [("not attributed", 0, len(whole))], [note]


class _Judge:
    """Evidence, verdict and prediction for launches on one machine."""

    def __init__(self, shape: VideoShape, device: Device, gpu: bool, nothing: float, kernels: Iterable[str]) -> None:
        self.shape, self.device, self.gpu, self.nothing = shape, device, gpu, nothing
        # Recorded rates where they hold one of the way from L2: it was measured by boxes, as these kernels load, and the stages'
        # bounds are of it. What `tilefold roofline --measure` reaches by plain loads is more than they can.
        self.roofs = load_roofs() if gpu and not device.measured_l2_bytes_per_s else None
        self.codes = codes_of(kernels) if gpu else ()
        self.machine = with_roofs(device, self.roofs)

    def notes(self) -> list[str]:
        if self.roofs is not None or not self.gpu:
            return []
        if self.device.measured_l2_bytes_per_s:
            return ["roofs are those recorded of this kind of device, as in the table of the stages"]
        return ["roofs are recorded ones, not measured here: run `tilefold roofline --measure`"]

    def predicted(self, works: Sequence[LaunchWork | None]) -> list[Predicted | None]:
        """Of the launches of one call that finds the cache full of what cleared it."""
        cache = self.device.l2_bytes if self.gpu else 0
        exps = self.roofs.exps if self.roofs else None
        traffic = memory_traffic(works, cache, cache)
        return [
            None if work is None else predict(work, self.machine, self.shape.dtype, self.nothing, exps, moved)
            for work, moved in zip(works, traffic, strict=True)
        ]

    def evidence(self, launched: Launched, work: LaunchWork | None, share: float) -> Evidence:
        declared = Declared(dtype=self.shape.dtype)
        if work is not None:
            declared = Declared(work.flops or None, work.bytes or None, work.l2_bytes or None, self.shape.dtype)
        code = code_for(launched, self.codes)
        made = evidence_of(launched, code, self.device, self.roofs, declared)
        return replace(made, share=share, launch_seconds=made.launch_seconds or self.nothing or None)


def _rows(
    judged: _Judge,
    works: Mapping[str, Sequence[LaunchWork]],
    placed: Mapping[str, Sequence[Launched]],
    inside: Sequence[tuple[str, int, int]],
) -> tuple[LaunchRow, ...]:
    """The launches of every stage alone, with what is declared of those whose kernels are the expected ones."""
    starts = {stage: start for stage, start, _ in inside}
    rows = []
    for stage, launches in placed.items():
        if stage == TOTAL or not launches:
            continue
        same = [work.kernel for work in works[stage]] == [each.kernel for each in launches]
        given: list[LaunchWork | None] = [*works[stage]] if same else [None] * len(launches)
        total = sum(each.median for each in launches)
        for place, (launched, work, predicted) in enumerate(zip(launches, given, judged.predicted(given), strict=True)):
            evidence = judged.evidence(launched, work, launched.median / total if total else 0.0)
            there = placed[TOTAL][starts[stage] + place].median if stage in starts else None
            rows.append(LaunchRow(stage, work.what if work else "", evidence, judge(evidence), predicted, there))
    return tuple(rows)
