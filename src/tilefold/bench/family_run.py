"""Run a family's cases: check every implementation, time those that are right, in turns with a plain copy."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tilefold.bench import timers
from tilefold.bench.family import Calls, Case, Family, Judge, Peer
from tilefold.bench.loop import FAILED, MEMORY, OK, REFUSED, checked, first_line, run_each, untimed
from tilefold.bench.timers import Timing, l2_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from tilefold.reference import Comparison

__all__ = ["METHODS", "Cell", "Row", "run_family_case", "run_family_cases"]

METHODS = {"events": "between GPU events, cold L2 cache", "graph": "CUDA-graph replays over rotating"}
COPY = "copy"
COPY_BYTES = {"cuda": 1 << 29, "cpu": 1 << 22}  # copied: read once, written once; many times what a cache holds
# Replays go around buffers of so many times twice the L2 cache: a cache that does not replace the oldest first keeps, of c times
# its size read in turn, about one part in e^c.
TIMES_L2 = 3
REP_MS = 30.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One implementation on one case.

    status: "ok"; "WRONG" (fails the tolerance, never timed); "refused"; "no memory"; "failed" (raised something else); note: why.
    events: calls between GPU events with a cold L2 cache, on the CPU by the wall; graph: CUDA-graph replays over rotating inputs.
    """

    implementation: str
    status: str
    note: str = ""
    verdict: "Comparison | None" = None
    events: Timing | None = None
    graph: Timing | None = None

    def timing(self, method: str) -> Timing | None:
        """By "events" or "graph"."""
        return self.graph if method == "graph" else self.events


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

    @property
    def floor_ms(self) -> float | None:
        """What moving the case's bytes takes at the rate of the copy, or its operations at the device's, whichever is longer."""
        if not self.copied:
            return None
        seconds: float = max(self.case.bytes / self.copied, self.case.flops / self.roof if self.roof else 0.0)
        return seconds * 1e3


def run_family_cases(
    family: Family,
    cases: Iterable[Case],
    peers: Sequence[Peer],
    device: str,
    rounds: int,
    progress: Callable[[Case, str], None],
    finished: Callable[[Row], None] = lambda row: None,
    budget_s: float | None = None,
) -> list[Row]:
    """`run_family_case` for each case; progress(case, what) before each step, one per implementation and one, "timing", per case;
    finished(row) after each case.  No case is begun after budget_s seconds, or after the GPU's context was lost."""

    def failed(case: Case, note: str) -> Row:
        return Row(family, case, tuple(Cell(one.name, FAILED, note) for one in peers))

    return run_each(
        cases,
        lambda case: run_family_case(family, case, peers, device, rounds, progress),
        failed,
        finished,
        budget_s,
    )


def run_family_case(
    family: Family,
    case: Case,
    peers: Sequence[Peer],
    device: str,
    rounds: int,
    progress: Callable[[Case, str], None],
) -> Row:
    """Check every implementation on a case and time those that passed, alternating."""
    import torch

    cells: dict[str, Cell] = {}
    ready: dict[str, Calls] = {}
    copied, count = 0.0, 1
    try:
        with torch.no_grad():
            count = timers.rotations(case.bytes, TIMES_L2 * l2_bytes()) if device == "cuda" else 1
            sets = [family.inputs(case, device, seed) for seed in range(count)]
            judge = family.judge(sets[0])
            for peer in peers:
                progress(case, peer.title)
                cells[peer.name], calls = check_one(case, peer, sets, judge, device)
                if calls is not None:
                    ready[peer.name] = calls
            progress(case, "timing")
            copied = _timed(cells, ready, device, rounds)
    except torch.OutOfMemoryError as error:
        for peer in peers:
            if peer.name not in cells or cells[peer.name].status == OK:
                cells[peer.name] = Cell(peer.name, MEMORY, first_line(error))
    finally:
        ready.clear()
        if device == "cuda":
            torch.cuda.empty_cache()
    roof = family.roof(case, device)
    return Row(family, case, tuple(cells[peer.name] for peer in peers), copied, count, roof)


def check_one(case: Case, peer: Peer, sets: Sequence[Any], judge: Judge, device: str) -> tuple[Cell, Calls | None]:
    """Prepare an implementation, run it once on the first inputs and judge that; what is ready to be timed comes back too."""
    if reason := peer.refuses(case, device):
        return Cell(peer.name, REFUSED, reason), None

    def attempt() -> "tuple[Comparison, Calls]":
        calls = peer.prepare(sets)
        with calls.context():
            return (calls.judge or judge).verdict(calls.calls[0]()), calls

    status, note, verdict, ready = checked(attempt)
    return Cell(peer.name, status, note, verdict), ready


def _timed(cells: dict[str, Cell], ready: dict[str, Calls], device: str, rounds: int) -> float:
    """Put times into the cells; the copy's bytes a second."""
    copy = plain_copy(device)
    samplers = {name: _sampler(calls, device) for name, calls in ready.items()}
    failed: dict[str, Exception] = {}
    found = timers.time_alternating({**samplers, COPY: _sampler(Calls([copy]), device)}, rounds, "events", failed)
    for name, (status, note) in untimed(failed).items():
        if name != COPY:
            cells[name] = replace(cells[name], status=status, note=note)
            del ready[name]
    for name in ready:
        cells[name] = replace(cells[name], events=found[name])
    if device == "cuda":
        replays: dict[str, timers.Sampler] = {}
        for name, calls in ready.items():
            try:
                with calls.context():
                    replays[name] = timers.graph_sampler(calls.calls)
            except Exception as error:  # a library that cannot be captured still has its other figure
                if "CUDA error" in str(error) and "captur" not in str(error):
                    raise
                cells[name] = replace(cells[name], note=f"no graph: {first_line(error)}")
        for name, timing in timers.time_alternating(replays, rounds, method="graph").items():
            cells[name] = replace(cells[name], graph=timing)
    return 2 * COPY_BYTES[device] / (found[COPY].ms * 1e-3) if COPY in found else 0.0


def _sampler(calls: Calls, device: str) -> timers.Sampler:
    def sample() -> list[float]:
        with calls.context():
            if device == "cuda":
                return timers.event_samples(calls.calls[0], REP_MS / 4, REP_MS)
            return timers.wall_samples(calls.calls[0], budget_s=0.01, least=1)

    return sample


def plain_copy(device: str) -> "Callable[[], Tensor]":
    """A copy that is far larger than the caches: what memory gives to those who read and write in order."""
    import torch

    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    into = torch.zeros_like(source)
    return lambda: into.copy_(source)
