"""A pytest plugin: take the next test that no other process has and write down how it ended, until none is left or time is up."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .records import LOST, key_of, rows_of, slow_ones

ROOM = 2 << 30  # bytes of the device's memory that a process keeps between tests
OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory")
MOST = 6000  # characters of a failure that are kept
GONE = "no GPU that torch can use"  # conftest.py's reason: here it means that the device went away
PARTS = {"passed": 0, "skipped": 1, "failed": 2}


def phase_of(item: pytest.Item) -> str:
    """When a test runs: in processes of their own if it runs over several GPUs, after the others if it fills a GPU's memory, last
    if it measures what other processes would disturb."""
    return next((name for name in ("alone", "several_gpus", "large") if item.get_closest_marker(name)), "together")


class Worker:
    """One process.  Its orders are in the environment: folder, number, phase ("together", "large", "several_gpus" or "alone"),
    until (seconds since the epoch)."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.folder, self.number = Path(orders["folder"]), orders["number"]
        self.phase, self.until = orders["phase"], orders["until"]
        self.now = self.folder / f"now-{self.number}.json"
        self.parent = os.getppid()  # without it nobody would end this one
        self.slow = slow_ones(Path(orders["slow"]))
        self.parts: list[pytest.TestReport] = []

    def write(self, test: str, outcome: str, seconds: float, why: str) -> None:
        row = {"test": test, "outcome": outcome, "seconds": round(seconds, 2), "why": why[-MOST:], "phase": self.phase,
               "at": time.time()}  # fmt: skip
        with (self.folder / f"results-{self.number}.jsonl").open("a") as lines:
            lines.write(json.dumps(row) + "\n")

    # ------------------------------------------------------------ pytest's hooks

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported, or skips itself."""
        if report.outcome != "passed":
            self.write(report.nodeid, report.outcome, 0.0, reason_of(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.parts.append(report)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        everything = self.folder / "collected.json"
        if not everything.exists():
            part = everything.with_suffix(f".{self.number}")
            part.write_text(json.dumps({item.nodeid: phase_of(item) for item in session.items}))
            part.replace(everything)
        done = rows_of(self.folder)
        for item in in_order(session.items, self.slow):
            row = done.get(item.nodeid)
            again = row is not None and row["outcome"] == "again"
            if ("large" if again else phase_of(item)) != self.phase or (row is not None and not again):
                continue
            if time.time() > self.until or os.getppid() != self.parent:
                break
            if self.take(item.nodeid):
                self.run(item)
        (self.folder / f"end-{self.number}").touch()
        return True

    # ------------------------------------------------------------ one test

    def take(self, test: str) -> bool:
        """Whether no other process has it; then it is ours."""
        try:
            (self.folder / f"taken-{key_of(test)}-{self.phase}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def run(self, item: pytest.Item) -> None:
        self.now.write_text(json.dumps({"test": item.nodeid, "since": time.time()}))
        print(f"\n{item.nodeid}", flush=True)
        self.parts, begin = [], time.monotonic()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        outcome, why = outcome_of(self.parts)
        if outcome == "failed" and self.phase == "together" and any(text in why for text in OUT_OF_MEMORY):
            outcome = "again"  # others had the memory
        if outcome == "skipped" and why == GONE:
            outcome = "failed"
        lost = context_lost()
        if lost:
            outcome, why = "crashed", f"{why}\nthe device's context is gone: {lost}"
        self.write(item.nodeid, outcome, time.monotonic() - begin, why)
        self.now.unlink()
        if lost:
            os._exit(LOST)  # nothing that would touch the device


def in_order(items: list[pytest.Item], slow: set[str]) -> list[pytest.Item]:
    """Slow ones first, else in an order of no meaning, the same in every process: tests that compile the same kernel are seldom
    at it at the same time."""
    late = {item.nodeid: item.nodeid not in slow and item.get_closest_marker("long") is None for item in items}
    return sorted(items, key=lambda item: (late[item.nodeid], key_of(item.nodeid)))


def outcome_of(parts: list[pytest.TestReport]) -> tuple[str, str]:
    """(outcome, why) of a test, of its setup, call and teardown."""
    if not parts:
        return "failed", "pytest reported nothing"
    worst = max(parts, key=lambda part: PARTS[part.outcome])
    why = "" if worst.outcome == "passed" else reason_of(worst)
    return worst.outcome, f"expected to fail: {worst.wasxfail}" if hasattr(worst, "wasxfail") else why


def reason_of(report: Any) -> str:
    """Why a test was skipped, or the text of its failure."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)


def context_lost() -> str:
    """What the device says, if it says no more than an error; also gives memory back."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).item()
        if torch.cuda.memory_reserved() > ROOM:
            torch.cuda.empty_cache()
    except RuntimeError as error:
        text = str(error)
        return "" if any(said in text for said in OUT_OF_MEMORY) else text.splitlines()[0]
    return ""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Worker(json.loads(os.environ["GPU_RUN"])), "gpu_run worker at work")
