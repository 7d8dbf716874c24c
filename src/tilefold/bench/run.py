"""Run a family's cases: check every implementation, time those that are right, in turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilefold.bench import timers
from tilefold.bench.family import Calls, Case, Family, Judge
from tilefold.bench.loop import MEMORY, OK, REFUSED, checked, first_line, untimed
from tilefold.bench.setting import Options
from tilefold.bench.timers import Timing, l2_bytes
from tilefold.reference import Comparison

METHODS = {"events": "between GPU events, cold L2 cache", "graph": "CUDA-graph replays over rotating"}
COPY = "copy"
COPY_BYTES = {"cuda": 1 << 29, "cpu": 1 << 22}  # copied: read once, written once; many times what a cache holds
# Replays go around buffers of so many times twice the L2 cache: a cache that does not replace the oldest first keeps, of c times
# its size read in turn, about one part in e^c.
TIMES_L2 = 3

Progress = Callable[[Any, str], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One implementation on one case.

    status: "ok"; "WRONG" (the output fails the tolerance, never timed); "refused" (cannot take the case here); "no memory";
    "failed" (raised something else). note: why. timing: calls between GPU events with a cold L2 cache, on the CPU by the wall,
    there only for "ok".
    graph: replays over so many buffers that none is in the L2 cache when its turn comes, where they were asked for.
    scratch: bytes that a call allocates at its peak beyond its inputs and results (GPU only).
    """

    case: Any  # a Case
    implementation: str
    status: str
    note: str = ""
    verdict: Comparison | None = None
    timing: Timing | None = None
    graph: Timing | None = None
    scratch: int | None = None

    def by(self, method: str) -> Timing | None:
        """By "events" or "graph"."""
        return self.graph if method == "graph" else self.timing

    @property
    def flops_per_s(self) -> float | None:
        """Achieved FLOP/s, or None where nothing was timed."""
        return self.case.flops / (self.timing.ms * 1e-3) if self.timing and self.timing.ms else None


@dataclass(frozen=True, slots=True)
class Row:
    """A case with a cell for each implementation.

    copied: bytes a second, read and written, of a plain copy of 512 MiB, in the same rounds; 0 if it was not reached.
    sets: how many sets of inputs the replays went around.  roof: operations a second of the device at most, 0: not asked."""

    family: Family
    case: Any  # a Case
    cells: tuple[Cell, ...]
    copied: float = 0.0
    sets: int = 1
    roof: float = 0.0

    def at(self, implementation: str) -> Cell | None:
        return next((cell for cell in self.cells if cell.implementation == implementation), None)

    def title(self, cell: Cell) -> str:
        """What tables call the implementation of a cell."""
        return str(self.family.peers[cell.implementation].title)

    @property
    def floor_ms(self) -> float | None:
        """What moving the case's bytes takes at the rate of the copy, or its operations at the device's, whichever is longer."""
        if not self.copied:
            return None
        seconds: float = max(self.case.bytes / self.copied, self.case.flops / self.roof if self.roof else 0.0)
        return seconds * 1e3


def run_case(
    family: Family, case: Case, peers: Sequence[Any], device: str, options: Options, progress: Progress
) -> Row:
    """Check every implementation on a case and time those that passed, alternating; progress(case, what) before each step, one
    for each implementation to check and one, "timing", for all."""
    cells: dict[str, Cell] = {}
    ready: dict[str, Calls] = {}
    copied, count = 0.0, 1
    replayed = device == "cuda" and (options.graph or family.replayed(case))
    try:
        with torch.no_grad():
            count = timers.rotations(case.bytes, TIMES_L2 * l2_bytes()) if replayed else 1
            sets = [family.inputs(case, device, turn) for turn in range(count)]
            judge = family.judge(sets[0])
            for peer in peers:
                progress(case, peer.title)
                cells[peer.name], calls = check_one(family, case, peer, sets, judge, device)
                if calls is not None:
                    ready[peer.name] = calls
            progress(case, "timing")
            copied = _timed(cells, ready, family, device, options)
            if replayed:
                _replayed(cells, ready, options.rounds)
    except torch.OutOfMemoryError as error:
        for peer in peers:
            if peer.name not in cells or cells[peer.name].status == OK:
                cells[peer.name] = Cell(case, peer.name, MEMORY, first_line(error))
    finally:
        ready.clear()
        if device == "cuda":
            torch.cuda.empty_cache()
    roof = family.roof(case, device)
    return Row(family, case, tuple(cells[peer.name] for peer in peers), copied, count, roof)


def check_one(
    family: Family, case: Case, peer: Any, sets: Sequence[Any], judge: Judge, device: str
) -> tuple[Cell, Calls | None]:
    """Prepare an implementation, run it once on the first inputs and judge that; what is ready to be timed comes back too."""
    if reason := peer.refuses(case, device):
        return Cell(case, peer.name, REFUSED, reason), None
    scratch: int | None = None

    def attempt() -> tuple[Comparison, Calls]:
        nonlocal scratch
        calls = family.prepare(peer, sets)
        with calls.context():
            verdict = (calls.judge or judge).verdict(calls.calls[0]())
            if family.attention and device == "cuda":
                scratch = scratch_bytes(calls.calls[0])
        return verdict, calls

    status, note, verdict, ready = checked(attempt)
    return Cell(case, peer.name, status, note, verdict, scratch=scratch), ready


def scratch_bytes(call: Callable[[], Any]) -> int:
    """Bytes that a (warmed) call allocates at its peak beyond what is still there when it has returned: its results."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # or a larger block that was left is handed out whole, and counts
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    scratch = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result  # alive until here, so that the second figure counts it
    return int(scratch)


def _timed(cells: dict[str, Cell], ready: dict[str, Calls], family: Family, device: str, options: Options) -> float:
    """Put times into the cells, take out of ready what raised; bytes a second of the copy that was timed beside, if one was."""
    samplers = {name: _sampler(calls, device, options.rep_ms) for name, calls in ready.items()}
    if not family.attention:
        samplers[COPY] = _sampler(Calls([plain_copy(device)]), device, options.rep_ms)
    failed: dict[str, Exception] = {}
    found = timers.time_alternating(samplers, options.rounds, failed=failed)
    for name, (status, note) in untimed(failed).items():
        if name != COPY:
            cells[name] = replace(cells[name], status=status, note=note)
            del ready[name]
    for name in ready:
        cells[name] = replace(cells[name], timing=found[name])
    return 2 * COPY_BYTES[device] / (found[COPY].ms * 1e-3) if COPY in found else 0.0


def _replayed(cells: dict[str, Cell], ready: dict[str, Calls], rounds: int) -> None:
    """Put replays over all sets of inputs into the cells."""
    samplers: dict[str, timers.Sampler] = {}
    for name, calls in ready.items():
        try:
            with calls.context():
                samplers[name] = timers.graph_sampler(calls.calls)
        except Exception as error:  # a library that cannot be captured still has its other figure
            if "CUDA error" in str(error) and "captur" not in str(error):
                raise
            cells[name] = replace(cells[name], note=f"no graph: {first_line(error)}")
    for name, timing in timers.time_alternating(samplers, rounds, method="graph").items():
        cells[name] = replace(cells[name], graph=timing)


def _sampler(calls: Calls, device: str, rep_ms: float) -> timers.Sampler:
    def sample() -> list[float]:
        with calls.context():
            if device == "cuda":
                return timers.event_samples(calls.calls[0], rep_ms / 4, rep_ms)
            return timers.wall_samples(calls.calls[0], rep_ms * 1e-3, least=1)

    return sample


def plain_copy(device: str) -> Callable[[], Tensor]:
    """A copy that is far larger than the caches: what memory gives to those who read and write in order."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    into = torch.zeros_like(source)
    return lambda: into.copy_(source)
