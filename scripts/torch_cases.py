"""What the scripts that run PyTorch's own tests on tilefold share: a sample of a file's cases, what became of each, a table."""

import argparse
import ast
import collections
import importlib.util
import json
import random
import re
import sys
import time
import types
import unittest
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

FAR = re.compile(r"error .* is greater than|with NaN|not close|Mismatched elements|Flex eager Error", re.IGNORECASE)
OURS, THEIRS, REFUSED, EXPECTED_ALSO = (
    "passed",
    "passed, without a call of tilefold",
    "refused by name",
    "failed as listed",
)
FAILED, BOTH, SKIPPED, LATE = "failed", "failed, without tilefold too", "skipped by the file", "not run: no time left"
NO_MEMORY = "OutOfMemoryError"
OUTCOMES = (OURS, THEIRS, REFUSED, EXPECTED_ALSO, FAILED, BOTH, SKIPPED, LATE)


@dataclass(frozen=True)
class Suite:
    """A file of PyTorch's tests, and how tilefold comes into it.

    expected: why tests of which names cannot pass.  begin(FILE, without): puts tilefold in its place, or does not, and returns
    what counts its calls.  wanted: the cases to sample.  kept: why torch took calls, since it was last asked.  shuffled: cases
    run in any order, so that those which no time is left for are not the last of the file."""

    name: str
    title: str
    file: str
    sample: int
    expected: dict[str, str]
    begin: Callable[[Path, bool], Callable[[], int]]
    wanted: Callable[[pytest.Item], bool] = lambda _: True
    kept: Callable[[], str] = lambda: ""
    shuffled: bool = False


def without_expecttest() -> None:
    """A stand-in where that package is not installed, which torch's test cases derive from."""
    if importlib.util.find_spec("expecttest") is None:

        class TestCase(unittest.TestCase):
            def assertExpectedInline(self, actual: Any, expect: str, skip: int = 0) -> None:
                assert str(actual) == expect

        made = types.ModuleType("expecttest")
        made.TestCase = TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = made


# ---------------------------------------------------------------- the sample and what became of it


class Runner:
    """A plugin of pytest: chooses the cases, and writes a line for each."""

    def __init__(self, suite: Suite, calls: Callable[[], int], results: Path, args: argparse.Namespace) -> None:
        self.suite, self.calls, self.results, self.args = suite, calls, results, args
        self.again: set[str] | None = None
        self.end = time.monotonic() + args.seconds
        self.tests = names_of(args.file)
        self.before = 0
        self.cases = 0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self.suite.wanted(item)]
        self.cases = len(items)
        if self.again is not None:
            items[:] = [item for item in items if place_of(item) in self.again]
            return
        chosen = sampled([item.name for item in items], self.tests, self.args.sample)
        at, of = map(int, self.args.shard.split("/"))
        chosen = chosen[at - 1 :: of]
        if self.suite.shuffled:
            random.Random(at).shuffle(chosen)
        items[:] = [items[i] for i in chosen]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.before = self.calls()
        self.suite.kept()
        if time.monotonic() > self.end:
            pytest.skip(LATE)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        outcome = yield
        report = outcome.get_result()
        if not (report.when == "call" or report.skipped or report.failed):
            return
        test = test_of(item.name, self.tests)
        error = call.excinfo.value if call.excinfo else None
        kind, why = judged(test, report, error, self.calls() > self.before, self.suite.expected)
        why = why or self.suite.kept()
        seconds = round(report.duration, 2)
        line = {
            "place": place_of(item),
            "case": item.name,
            "test": test,
            "outcome": kind,
            "why": why,
            "seconds": seconds,
        }
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def place_of(item: pytest.Item) -> str:
    """The class and the name of a case: several classes may have the name."""
    return item.nodeid.partition("::")[2]


def names_of(file: Path) -> list[str]:
    """The tests of a file, without their parameters, the longest first."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}
    return sorted(found, key=lambda name: (-len(name), name))


def test_of(case: str, tests: Iterable[str]) -> str:
    """The test that a case is of."""
    return next((test for test in tests if case.startswith(test)), case)


def sampled(cases: list[str], tests: list[str], number: int) -> list[int]:
    """Which cases: of each test one, then of each another, until there are enough."""
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for i, case in enumerate(cases):
        groups[test_of(case, tests)].append(i)
    for name, group in groups.items():
        random.Random(name).shuffle(group)
    turns = max(map(len, groups.values()), default=0)
    dealt = [group[turn] for turn in range(turns) for group in groups.values() if turn < len(group)]
    return sorted(dealt[:number])


def judged(
    test: str, report: pytest.TestReport, error: BaseException | None, called: bool, expected: dict[str, str]
) -> tuple[str, str]:
    """(outcome, why) of a case; expected: as `Suite`'s."""
    from tilefold.errors import TilefoldError

    if report.passed:
        return (OURS if called else THEIRS), ""
    if report.skipped:
        why = str(error)
        return (LATE, "") if LATE in why else (SKIPPED, shortened(why))
    listed = next((why for why, pattern in expected.items() if re.search(pattern, test, re.IGNORECASE)), None)
    if (
        isinstance(error, AssertionError | ValueError)
        and FAR.search(str(error))
        and not re.search(r"counters|frame_count", str(error))
    ):
        listed = None
    if isinstance(error, TilefoldError) and not listed:
        return REFUSED, shortened(f"{type(error).__name__}: {error}")
    return (EXPECTED_ALSO, listed) if listed else (FAILED, shortened(f"{type(error).__name__}: {error}"))


def shortened(text: str) -> str:
    """The first line, with numbers as N, so that alike reasons are one."""
    line = next((line for line in text.splitlines() if line.strip()), "").strip()
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", line)[:160]


def table(lines: list[dict[str, Any]]) -> str:
    """What became of the cases, and why, as Markdown."""
    count = collections.Counter(line["outcome"] for line in lines)
    rows = ["| outcome | cases | tests |", "|---|---:|---:|"]
    for outcome in OUTCOMES:
        of_tests = {line["test"] for line in lines if line["outcome"] == outcome}
        rows.append(f"| {outcome} | {count[outcome]} | {len(of_tests)} |")
    rows += [f"| together | {len(lines)} | {len({line['test'] for line in lines})} |", ""]
    reasons: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for line in lines:
        if line["why"]:
            reasons[line["outcome"], line["why"]].append(line["test"])
    rows += ["| outcome | why | cases | tests |", "|---|---|---:|---|"]
    for (outcome, why), tests in sorted(reasons.items(), key=lambda pair: (OUTCOMES.index(pair[0][0]), -len(pair[1]))):
        named = ", ".join(f"`{test}`" for test in sorted(set(tests))[:6])
        more = f" and {len(set(tests)) - 6} more" if len(set(tests)) > 6 else ""
        rows.append(f"| {outcome} | {why.replace('|', '/')} | {len(tests)} | {named}{more} |")
    return "\n".join(rows)


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.is_file() else []


def main(suite: Suite) -> int:
    parser = argparse.ArgumentParser(description=suite.title)
    parser.add_argument("file", type=Path, nargs="?", help=suite.file)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the results")
    parser.add_argument("--sample", type=int, default=suite.sample, help="cases")
    parser.add_argument("--shard", default="1/1", help="which part of the sample, such as 2/3")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which no case is begun")
    parser.add_argument(
        "--again", action="store_true", help="run what failed of an earlier run into FOLDER, without tilefold"
    )
    parser.add_argument(
        "--rest", action="store_true", help="run what an earlier run into FOLDER had no time or no memory for"
    )
    parser.add_argument("--table", type=Path, nargs="+", help="results to show instead")
    args = parser.parse_args()
    if args.table:
        print(table([line for path in args.table for line in read(path)]))
        return 0
    if args.file is None or not args.file.is_file():
        parser.error(f"FILE must be a file of tests, got {args.file}")
    args.file = args.file.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / f"{suite.name}_{args.shard.replace('/', '_of_')}.jsonl"
    earlier = read(results) if args.again or args.rest else []
    if not earlier:
        results.unlink(missing_ok=True)
    without_expecttest()
    del sys.argv[1:]  # which torch's test cases read
    runner = Runner(suite, suite.begin(args.file, args.again), results, args)
    if args.again:
        runner.again = {line["place"] for line in earlier if line["outcome"] == FAILED}
        runner.results = results.with_suffix(".again")
        runner.results.unlink(missing_ok=True)
    elif args.rest:
        runner.again = {line["place"] for line in earlier if line["outcome"] == LATE or NO_MEMORY in line["why"]}
        kept = [line for line in earlier if line["place"] not in runner.again]
        results.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=short"]
    pytest.main([str(args.file), *options, "--rootdir", str(args.file.parent), "-c", "/dev/null"], plugins=[runner])
    if args.again:
        both = {line["place"] for line in read(runner.results) if line["outcome"] in (FAILED, EXPECTED_ALSO)}
        lines = [{**line, "outcome": BOTH} if line["place"] in both else line for line in earlier]
        results.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    lines = read(results)
    print(f"\n{runner.cases} cases in the file, {len(runner.tests)} tests; torch {torch.__version__}\n\n{table(lines)}")
    return int(not lines or any(line["outcome"] == FAILED for line in lines))
