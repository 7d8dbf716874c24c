"""Tries candidates on the present device: each is checked against the oracle, then timed in turns with the rules' plan.

Whatever is found is appended to a file at once, so that a second call goes on where the first one ended, or was ended."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tilefold.bench import setting, timers
from tilefold.bench.loop import FAILED, MEMORY, OK, checked, first_line, gpu_lost
from tilefold.bench.record import append_rows
from tilefold.bench.run import TIMES_L2
from tilefold.errors import DeviceError, PlanError, TilefoldError
from tilefold.plan.device import Device
from tilefold.plan.table import Entry, Table, key_of
from tilefold.tune.candidates import Changes, Plan, applied, fields_of, groups_of, rules_plan
from tilefold.tune.problems import Tunable

LEAST_GAIN = 1.02  # times as fast: what is less is within what two runs differ by
SLOW = 1.15  # times the planned plan's time, after one turn: not looked at again
TURNS, LAST_TURNS = 3, 9  # of a candidate, and of the best one when the search is over
ENDED = "ended the process"
FINAL, BEGUN, INTERRUPTED = "final", "begun", "interrupted"
ALL, HALF = "all", "half"

Sampling = Callable[[Plan, Sequence[Callable[[], object]]], timers.Sampler]
"""(plan, its call over each set of inputs) -> what takes samples of one call in ms."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate: its fields; status "ok", "WRONG" (never timed), "refused", "no memory", "failed" or ENDED; note: why.
    ratio: its time over that of the rules' plan in the same turns, 0 where it was not timed."""

    fields: Changes
    status: str
    note: str = ""
    ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a problem.

    planned: fields of the rules' plan; best: of the fastest, the rules' own where none was faster.
    planned_us, tuned_us: of both, in the same turns; 0 where nothing was timed.
    searched: ALL candidates, HALF (what quick searches), or "" if the time was over.
    clear: all but the slowest fifth of the best plan's turns were faster than all but the fastest fifth of the other's.
    note: why nothing could be measured, or ""."""

    tunable: Tunable
    problem: Changes = field(default_factory=dict)
    planned: Changes = field(default_factory=dict)
    best: Changes = field(default_factory=dict)
    planned_us: float = 0.0
    tuned_us: float = 0.0
    trials: tuple[Trial, ...] = ()
    searched: str = ""
    date: str = ""
    clear: bool = False
    note: str = ""

    @property
    def gain(self) -> float:
        """How many times as fast as the rules' plan; 1 where nothing is."""
        return self.planned_us / self.tuned_us if self.tuned_us else 1.0

    @property
    def worth(self) -> bool:
        """Whether the table is to have it."""
        return self.clear and self.best != self.planned and self.gain >= LEAST_GAIN

    def over(self, quick: bool) -> bool:
        """Whether there is nothing left to try."""
        return self.searched == ALL or (quick and self.searched == HALF)

    @property
    def tried(self) -> int:
        """Candidates that were right and timed."""
        return sum(one.status == OK for one in self.trials)


@dataclass(frozen=True, slots=True)
class Limits:
    """seconds: no candidate is begun later, but the first of a problem; quick: half of the candidates of each group.

    now: the clock that both follow."""

    seconds: float = 120.0
    quick: bool = False
    now: Callable[[], float] = time.monotonic


class Log:
    """The lines of a file that were measured with this device and these versions: by problem, then by a candidate's fields.

    identity: what a line has to agree with.  A candidate that was begun and never ended took its process along."""

    def __init__(self, path: Path, identity: dict[str, str]) -> None:
        self.path, self.identity = path, identity
        self.trials: dict[str, dict[str, Trial]] = {}
        self.finals: dict[str, dict[str, Any]] = {}
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in text.splitlines():
            # a line may have been cut off when a process ended
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                self._take(json.loads(line))

    def _take(self, row: dict[str, Any]) -> None:
        if any(row[name] != value for name, value in self.identity.items()):
            return
        if row["state"] == FINAL:
            self.finals[row["case"]] = row
            return
        fields = _plain(row["fields"])
        if row["state"] == INTERRUPTED:
            self.trials[row["case"]].pop(_key(fields))
            return
        what = (ENDED,) if row["state"] == BEGUN else (row["state"], row["note"], row["ratio"])
        self.trials.setdefault(row["case"], {})[_key(fields)] = Trial(fields, *what)

    def write(self, case: str, state: str, **values: Any) -> None:
        """Append a line."""
        append_rows(self.path, [{**self.identity, "date": setting.now(), "case": case, "state": state, **values}])

    def outcome(self, tunable: Tunable) -> Outcome | None:
        """What the file says of a problem whose search ended, or was ended by the clock."""
        row = self.finals.get(_case(tunable))
        if row is None:
            return None
        trials = tuple(self.trials.get(_case(tunable), {}).values())
        return Outcome(tunable, row["problem"], _plain(row["planned"]), _plain(row["best"]), row["planned_us"], row["tuned_us"],
                       trials, row["searched"], row["date"], row["clear"])  # fmt: skip


def tune(
    tunables: Sequence[Tunable],
    device: Device,
    torch_device: str,
    log: Log,
    limits: Limits,
    progress: Callable[[Tunable, str], None] = lambda one, what: None,
    sampling: Sampling | None = None,
) -> list[Outcome]:
    """Tune each problem, in at most its share of the seconds that are left; what the log has is not measured again.

    torch_device: "cuda" or "cpu".  progress: (problem, what is done now).  DeviceError if the GPU was lost; the candidate that
    did it is in the log, and the next call leaves it out."""
    if sampling is None:  # replays of CUDA graphs over all sets of inputs; on the CPU the wall's clock

        def sampling(plan: Plan, calls: Sequence[Callable[[], object]]) -> timers.Sampler:
            if torch_device == "cuda":
                return timers.graph_sampler(calls, target_ms=4.0)
            return lambda: timers.wall_samples(calls[0], budget_s=0.01, least=1)

    end, found = limits.now() + limits.seconds, []
    kept = {one: log.outcome(one) for one in tunables}
    waiting = sum(known is None or not known.over(limits.quick) for known in kept.values())
    for one, known in kept.items():
        if known is not None and known.over(limits.quick):
            found.append(known)
            continue
        left = end - limits.now()
        if left <= 0:
            found.append(known or Outcome(one, note="not reached"))
            continue
        until, waiting = limits.now() + left / waiting, waiting - 1
        search = _Search(one, device, torch_device, log, limits, until, sampling)
        found.append(_guarded(search, lambda what, one=one: progress(one, what)))  # type: ignore[misc]
    return found


def _guarded(search: "_Search", progress: Callable[[str], None]) -> Outcome:
    """A search; what only this problem cannot do is its outcome's note."""
    try:
        with torch.no_grad():
            return search.run(progress)
    except torch.OutOfMemoryError as error:
        return Outcome(search.tunable, note=f"{MEMORY}: {first_line(error)}")
    except TilefoldError as error:
        return Outcome(search.tunable, note=first_line(error))
    except RuntimeError as error:
        if not gpu_lost(error):
            return Outcome(search.tunable, note=f"{FAILED}: {first_line(error)}")
        raise DeviceError(
            f"the GPU was lost while {search.tunable.name} was tried; tune again: the log leaves it out"
        ) from None
    finally:
        search.work = search.judge = search.reference = None
        if search.torch_device == "cuda":
            with suppress(RuntimeError):  # of a GPU that was lost
                torch.cuda.empty_cache()


class _Search:
    """One problem: groups of candidates, each group on the best plan of those before it."""

    def __init__(self, tunable: Tunable, device: Device, torch_device: str, log: Log, limits: Limits, until: float,
                 sampling: Sampling) -> None:  # fmt: skip
        self.tunable, self.device, self.torch_device, self.log = tunable, device, torch_device, log
        self.limits, self.until, self.sampling = limits, until, sampling
        self.case = _case(tunable)
        self.trials = dict(log.trials.get(self.case, {}))
        self.work: Any = None
        self.judge: Any = None
        self.reference: Any = None

    def run(self, progress: Callable[[str], None]) -> Outcome:
        """Search, then time the best against the rules' plan once more: the least of many figures is too good by chance."""
        tunable = self.tunable
        progress("inputs")
        count = timers.rotations(tunable.case.bytes, TIMES_L2 * timers.l2_bytes()) if self.torch_device == "cuda" else 1
        self.work = tunable.work(self.torch_device, count)
        self.planned = rules_plan(tunable.kind, self.work.problem, self.device)
        ruled = fields_of(tunable.kind, self.planned)
        problem = json.loads(json.dumps(asdict(self.work.problem)))
        progress("the rules' plan")
        status, note, _, calls = self._checked(self.planned)
        if calls is None:
            return Outcome(tunable, problem, ruled, ruled, note=f"the rules' plan: {status}: {note}")
        self.reference = self.sampling(self.planned, calls)
        complete = self._searched(ruled, progress)
        progress("the best once more")
        best, before, after = self._last(ruled)
        clear = after.high < before.low
        trials = tuple(self.trials.values())
        searched = "" if not complete else HALF if self.limits.quick else ALL
        made = Outcome(tunable, problem, ruled, best, before.us, after.us, trials, searched, setting.now(), clear)
        self.log.write(self.case, FINAL, problem=problem, planned=ruled, best=best, planned_us=before.us, tuned_us=after.us,
                       searched=searched, clear=clear)  # fmt: skip
        return made

    def _searched(self, ruled: Changes, progress: Callable[[str], None]) -> bool:
        """Try the candidates; whether the time was enough for all."""
        best, ratio = ruled, 1.0
        for group in groups_of(self.tunable.kind):
            base = best
            for plan in self._candidates(group, ruled, base):
                fields = fields_of(self.tunable.kind, plan)
                if _key(fields) not in self.trials:
                    if self.trials and self.limits.now() >= self.until:
                        return False
                    progress(f"candidate {len(self.trials) + 1}")
                    self._try(plan, fields)
                trial = self.trials[_key(fields)]
                if trial.status == OK and trial.ratio < ratio:
                    best, ratio = fields, trial.ratio
        return True

    def _candidates(self, group: Any, ruled: Changes, base: Changes) -> Iterator[Plan]:
        """The plans of a group that fit the device, each once, and not the rules' own."""
        changes = list(group(self.planned if base == ruled else applied(self.planned, base)))
        seen = {_key(ruled)}
        for each in changes[: -(-len(changes) // 2)] if self.limits.quick else changes:
            try:
                plan = applied(self.planned, {**base, **each})
            except PlanError:
                continue
            key = _key(fields_of(self.tunable.kind, plan))
            if key not in seen:
                seen.add(key)
                yield plan

    def _try(self, plan: Plan, fields: Changes) -> None:
        """Check a candidate, time it if it is right, keep and log what came of it."""
        self.log.write(self.case, BEGUN, fields=fields)
        try:
            status, note, ratio = self._measured(plan)
        except KeyboardInterrupt:  # not the candidate's doing
            self.log.write(self.case, INTERRUPTED, fields=fields)
            raise
        self._keep(Trial(fields, status, note, ratio))

    def _keep(self, trial: Trial) -> None:
        self.trials[_key(trial.fields)] = trial
        self.log.write(self.case, trial.status, fields=trial.fields, note=trial.note, ratio=trial.ratio)

    def _measured(self, plan: Plan) -> tuple[str, str, float]:
        """(status, note, ratio)."""
        status, note, _, calls = self._checked(plan)
        if calls is None:
            return status, note, 0.0
        try:
            return status, note, self._ratio(self.sampling(plan, calls))
        except Exception as error:  # a candidate that cannot be captured or runs out of something is no candidate
            if gpu_lost(error):
                raise
            return FAILED, f"while it was timed: {first_line(error)}", 0.0

    def _checked(self, plan: Plan) -> Any:
        """(status, note, verdict, the calls over all inputs if it is right)."""

        def attempt() -> Any:
            calls = [self.work.call(one, plan) for one in self.work.sets]
            self.judge = self.judge or self.work.judge()
            return self.judge.verdict(calls[0]()), calls

        return checked(attempt)

    def _ratio(self, sampler: timers.Sampler) -> float:
        """Of a candidate's time to that of the rules' plan; one turn is enough for a slow one."""
        for turns in (1, TURNS):
            found = timers.time_alternating({"rules": self.reference, "candidate": sampler}, turns)
            ratio = found["candidate"].ms / found["rules"].ms
            if ratio > SLOW:
                break
        return ratio

    def _last(self, ruled: Changes) -> tuple[Changes, timers.Timing, timers.Timing]:
        """(the best fields, times of the rules' plan and of the best one): of all trials, checked and timed once more."""
        while faster := [one for one in self.trials.values() if one.status == OK and one.ratio < 1]:
            best = min(faster, key=lambda one: one.ratio).fields
            plan = applied(self.planned, best)
            status, note, _, calls = self._checked(plan)
            if calls is None:
                self._keep(Trial(best, status, note))
                continue
            samplers = {"rules": self.reference, "best": self.sampling(plan, calls)}
            found = timers.time_alternating(samplers, LAST_TURNS)
            return best, found["rules"], found["best"]
        alone = timers.time_alternating({"rules": self.reference}, TURNS)["rules"]
        return ruled, alone, alone


def identity_of(device: Device) -> dict[str, str]:
    """What a measurement holds for: the present GPU, whose record is `device`, and the versions of what runs on it."""
    here = setting.setting_of("cpu" if device.backend == "interpreter" else "cuda")
    ours = here.tilefold if here.commit == "unknown" else here.commit
    torch = str(here.torch)  # it is of a class of its own
    return {"device": device.name, "title": here.device, "triton": here.triton, "torch": torch, "tilefold": ours}


def table_of_outcomes(outcomes: Sequence[Outcome], identity: dict[str, str], before: Table | None) -> Table:
    """The table with what is worth it; of the one before those entries that were measured alike and are not measured here."""
    made = {}
    for one in outcomes:
        if one.worth:
            plans, times = (one.best, one.planned), (one.planned_us, one.tuned_us)
            entry = Entry(one.tunable.kind, one.tunable.title, one.problem, *plans, *times, one.tried, one.date)
            made[entry.key] = entry
    kept: dict[str, Entry] = {}
    if before is not None and all(getattr(before, name) == value for name, value in identity.items()):
        again = {key_of(one.tunable.kind, one.problem) for one in outcomes if one.problem}
        kept = {entry.key: entry for entry in before.entries if entry.key not in again}
    return Table(entries=tuple({**kept, **made}.values()), **identity)  # type: ignore[arg-type]


def _case(tunable: Tunable) -> str:
    return f"{tunable.kind} {tunable.case!r}"


def _key(fields: Changes) -> str:
    return json.dumps(fields, sort_keys=True)


def _plain(fields: Changes) -> Changes:
    """Fields as plans have them: JSON knows no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
