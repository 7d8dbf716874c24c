"""The sweeps of `tilefold bench video` as a family of a suite: a case is a point, a peer dense attention."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tilefold.bench.choice import select_cases
from tilefold.bench.engine import Engine, Request
from tilefold.bench.loop import FAILED, MEMORY, WRONG, first_line
from tilefold.bench.record import Sheet
from tilefold.bench.run import Progress
from tilefold.bench.setting import Options, Setting
from tilefold.bench.video import report, sweep
from tilefold.bench.video.stages import USUAL, implementations
from tilefold.bench.video.sweep import Point, SweepRow, points_of
from tilefold.plan.sparse.video import VideoShape

# Batch, heads, tokens and head dim, on a GPU and without.
SHAPES = {True: (1, 12, 23296, 128), False: (1, 2, 256, 16)}
# Sweep -> values and, unless sparsity is what is swept, the sparsities, on a GPU and without.
DEFAULTS: dict[str, dict[bool, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "sparsity": {True: ((10, 25, 50, 65.1, 80, 90, 95, 99), ()), False: ((25, 50, 75), ())},
    "length": {True: ((8192, 16384, 32768, 65536, 131072), (80, 90)), False: ((128, 256), (50,))},
    "cached": {True: ((8192, 16384, 32768, 65536, 131072), (90,)), False: ((128, 256), (50,))},
}
QUICK = {True: (80,), False: (50,)}  # sparsities, on a GPU and without


class PipelineEngine(Engine):
    """Cases that are measured with all their peers at once.  A result is the row of a case, of the class `row`."""

    row: type[Any]

    def __init__(self) -> None:
        pass

    def timed(self, case: Any, device: str, names: tuple[str, ...], options: Options) -> Any:
        """The row of a case beside peers by their names."""
        raise NotImplementedError

    def measured(self, case: Any, peers: Sequence[Any], device: str, options: Options, progress: Progress) -> Any:
        """A case that the memory is too small for is a row with a note, too."""
        progress(case, "checked and timed")
        try:
            return self.timed(case, device, tuple(one.name for one in peers if one.name != "tilefold"), options)
        except torch.OutOfMemoryError as error:
            return self.row(case, notes=(f"{case.name}: no memory: {first_line(error)}",), failure=MEMORY)
        finally:
            if device == "cuda":
                torch.cuda.empty_cache()

    def failed(self, case: Any, peers: Sequence[Any], why: str) -> Any:
        return self.row(case, notes=(why,), failure=FAILED)

    def wrong(self, results: Sequence[Any]) -> bool:
        return any(row.status in (WRONG, FAILED) for row in results)


class VideoEngine(PipelineEngine):
    """A case is a point of a sweep."""

    name, row = "video", SweepRow

    @property
    def known(self) -> Mapping[str, Any]:
        return implementations()

    def usual(self, device: str) -> tuple[str, ...]:
        return USUAL[device]

    def cases(self, request: Request, gpu: bool) -> tuple[Point, ...]:
        """The usual sparsities and cached lengths; quick and without a GPU one sparsity."""
        batch, heads, seq, dim = SHAPES[gpu]
        shape = VideoShape(batch, heads, heads, seq, dim, request.dtype)
        if request.quick or not gpu:
            return select_cases(points_of("sparsity", shape, QUICK[gpu]), request.pattern)
        found: list[Point] = []
        for name in ("sparsity", "cached"):
            values, sparsities = DEFAULTS[name][gpu]
            found += points_of(name, shape, values, sparsities, (None, shape.block))
        return select_cases(tuple(found), request.pattern)

    def timed(self, case: Point, device: str, names: tuple[str, ...], options: Options) -> SweepRow:
        return sweep.measure_point(case, device, names, options.rounds, options.graph)

    def records(self, result: SweepRow, setting: Setting) -> list[dict[str, Any]]:
        return [report.record_of(result, setting)]

    def findings(self, results: Sequence[SweepRow]) -> dict[str, Any]:
        return report.findings(results)

    def sheets(self, results: Sequence[SweepRow], setting: Setting) -> list[Sheet]:
        sheets = []
        for some in report.sweeps_of(results):
            table = report.table_of(some)
            gains = "fine and total of a peer how many times as fast as it these are"
            left = 2 if "line" in table.head else 1
            sheets.append(
                Sheet(f"{report.title_of(some, setting)}; {gains}", table.head, table.rows, left, brackets=False)
            )
        return sheets

    def notes(self, results: Sequence[SweepRow]) -> list[str]:
        return report.lines_of(results)
