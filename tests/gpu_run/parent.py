"""A piece of a run: many processes, and a few for the tests over several GPUs beside them; then one a GPU for the tests that fill
its memory; then one alone for those that measure.  A process that dies or hangs is replaced."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .records import LOST, rows_of

SEVERAL = 3  # processes whose tests run over several GPUs: they wait most of the time
TRIES = 3  # starts of a process that ends before any test
SAME = ("sources", "device", "torch", "triton", "selected", "tests")  # of the run that a call goes on with
WORDS = 4000  # characters of a dead process's last words
LOOK = 0.2  # seconds between looks at the processes
EVERY = 30.0  # seconds between lines that say how far it is
LEAVING = 20.0  # seconds that a process with no test left may take to end


class Process:
    """A pytest process with its number, started again where it ends in the midst of a test."""

    def __init__(self, args: Any, number: int, phase: str, until: float, env: dict[str, str]) -> None:
        self.args, self.number, self.until, self.unborn = args, number, until, 0
        self.now, self.said = args.folder / f"now-{number}.json", args.folder / f"process-{number}.log"
        orders = {"folder": str(args.folder), "number": number, "phase": phase, "until": until,
                  "slow": str(args.tests / "runs.jsonl")}  # fmt: skip
        self.env = {**env, "GPU_RUN": json.dumps(orders)}
        if phase in ("together", "large") and args.gpus > 1:
            self.env["CUDA_VISIBLE_DEVICES"] = str(number % args.gpus)
        if phase == "together":  # the cores are shared
            threads = str(max(1, len(os.sched_getaffinity(0)) // args.jobs))
            self.env |= {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self.ended = args.folder / f"end-{number}"
        self.ended.unlink(missing_ok=True)
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "pytest", str(self.args.tests), "-p", "gpu_run.worker", "-p", "no:xdist",
                   "-o", f"cache_dir={self.args.folder / 'pytest'}", "-qs", "--no-header", "--no-summary",
                   *shlex.split(self.args.pytest)]  # fmt: skip
        with self.said.open("a") as said:
            self.began = said.tell()
            self.process = subprocess.Popen(command, stdout=said, stderr=said, env=self.env, start_new_session=True,
                                            cwd=Path(__file__).parents[2])  # fmt: skip

    def running(self) -> bool:
        """False once it has ended for good.  A test that ended its process, or had to be ended, is written down."""
        code = self.process.poll()
        if code is None:
            at = self._at()
            if self.ended.exists() and time.time() - self.ended.stat().st_mtime > LEAVING:
                self.end()
                return False
            if at and time.time() - at["since"] > self.args.limit:
                self.end()
                self._note(at, "hung", f"it took more than {self.args.limit:.0f} s")
            elif time.time() > self.until + self.args.grace:
                self.end()  # what it was at is for the next piece
                return False
            else:
                return True
        else:
            self._end_group()
            if self.ended.exists():
                return False
            if at := self._at():
                self._note(at, "crashed", f"the process ended with {code}")
            elif code != LOST and not self._worth_another_start(code):
                return False
        self.now.unlink(missing_ok=True)
        if time.time() > self.until:
            return False
        self.start()
        return True

    def _at(self) -> dict[str, Any]:
        """The test that it is at; empty while there is none."""
        try:
            return dict(json.loads(self.now.read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def _worth_another_start(self, code: int) -> bool:
        """Of a process that ended with no test begun."""
        self.unborn += 1
        if self.unborn < TRIES:
            return True
        at = {"test": f"process {self.number}", "since": time.time()}
        self._note(at, "crashed", f"it ended with {code} outside of a test, {TRIES} times")
        return False

    def end(self) -> None:
        """SIGABRT makes pytest's faulthandler say where it is; the processes that it started end with it."""
        self.process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(3)
        self._end_group()
        self.process.wait()

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _note(self, at: dict[str, Any], outcome: str, why: str) -> None:
        with self.said.open(errors="replace") as said:
            said.seek(self.began)
            words = said.read()[-WORDS:]
        row = {"test": at["test"], "outcome": outcome, "seconds": round(time.time() - at["since"], 2), "phase": "",
               "why": f"{why}; its last words:\n{words}", "at": time.time()}  # fmt: skip
        with (self.args.folder / "results-parent.jsonl").open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def run_piece(args: Any, run: dict[str, Any], env: dict[str, str], begin: float) -> dict[str, Any]:
    """Run until all is done or the time, counted from `begin`, is up; returns `run` with its pieces, [seconds, tests] each, this
    one the last."""
    args.folder.mkdir(parents=True, exist_ok=True)
    run["tests"] = str(args.tests)
    run["pieces"] = [*_begun(args, run), [0.0, 0]]
    before, until = len(_ended(args.folder)), begin + args.seconds

    def tell() -> int:
        """Keep what this piece has done: a call that is killed goes on, too.  Returns the tests that have ended."""
        ended = len(_ended(args.folder))
        run["pieces"][-1] = [round(time.time() - begin, 1), ended - before]
        (args.folder / "run.json").write_text(json.dumps(run))
        return ended

    tell()
    several = {"several_gpus": SEVERAL} if args.gpus > 1 else {"several_gpus": 1}  # with one GPU they are skipped
    for jobs in ({"together": max(1, args.jobs), **several}, {"large": args.gpus}, {"alone": 1}):
        if _left(args.folder) and time.time() < until:
            _phases(args, jobs, until, env, tell)
    tell()
    return run


def _begun(args: Any, run: dict[str, Any]) -> list[Any]:
    """The pieces of the run that this one goes on with: of the same sources on the same device, and not complete."""
    told = args.folder / "run.json"
    old = json.loads(told.read_text()) if told.exists() else {}
    goes_on = not args.fresh and _left(args.folder) and all(old.get(name) == run[name] for name in SAME)
    kept = ("results-*",) if goes_on else ()
    for pattern in ("now-*", "taken-*", "process-*", "end-*", "collected*", "results-*", "run.json"):
        for path in args.folder.glob(pattern) if pattern not in kept else ():
            path.unlink()
    return list(old["pieces"]) if goes_on else []


def _phases(args: Any, jobs: dict[str, int], until: float, env: dict[str, str], tell: Callable[[], int]) -> None:
    """The tests of some phases, side by side; jobs: processes of each."""
    named = [phase for phase, number in jobs.items() for _ in range(number)]
    processes = [Process(args, number, phase, until, env) for number, phase in enumerate(named)]
    told = time.time()
    try:
        while processes:
            time.sleep(LOOK)
            processes = [process for process in processes if process.running()]
            if time.time() - told > EVERY:
                told = time.time()
                print(f"{tell()} tests ended, {len(processes)} processes, {until - told:.0f} s left", flush=True)
    finally:
        for process in processes:  # only where this one is interrupted
            process.end()


def _ended(folder: Path) -> set[str]:
    return {test for test, row in rows_of(folder).items() if row["outcome"] != "again"}


def _left(folder: Path) -> bool:
    """Whether tests have no result yet."""
    collected = folder / "collected.json"
    return not collected.exists() or bool(json.loads(collected.read_text()).keys() - _ended(folder))
