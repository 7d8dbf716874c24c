"""PyTorch's own tests of FlexAttention on tilefold's functions: test/inductor/test_flex_attention.py of the torch installed.

    python scripts/flex_tests.py FILE --out FOLDER [--sample 520] [--shard 1/3] [--seconds 540]
    python scripts/flex_tests.py --table FOLDER/flex_tests_*.jsonl

What a test compiles by torch.compile runs tilefold, what it calls as it is runs torch: the tests compare the two.  torch.compile
itself is left out where its backend is inductor, so tests that look at what it makes cannot pass: EXPECTED names these, and
others that cannot, with reasons.  A result that is not near enough is a failure, whatever its test is called.  The sample takes
the tests in turns, with parameters at random.  FILE is read where it is.
"""

import argparse
import ast
import collections
import functools
import importlib.util
import json
import random
import re
import sys
import threading
import time
import types
import unittest
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

EXPECTED = {
    "looks at what torch.compile makes, or counts its graphs": (
        r"epilogue_fused|logsumexp_only_return|fw_bw_graph|symbol_closure|free_symbol|no_recompile|recompile_changed|"
        r"dynamic_shapes|score_mods(_automatic)?_dynamic|max_autotune|kernel_options_argument|layout_freeze|logging|"
        r"inspect_bug|compile_counts|tracing|make_fx|export|cudagraph|cuda_graphable|_tma|tensor_subclass|aot_eager"
    ),
    "float64": r"gradcheck|float64|fp64|graph_correctness",
    "expects an error, where tilefold computes or has other words": (
        r"error_message|error_with|_fails$|invalid_block|mismatched|same_device|wrong_device|cant_lower|vs_sequence_lengths|"
        r"unsupported|raises|validate"
    ),
    "the mod has a reduction, or a tensor of several elements": r"reduction_unrolled|dist_pos",
    "the mod is a torch.autograd.Function": r"autograd_function",
    "max_scores": r"max_scores|return_max|return_aux",
    "FlashAttention as a backend of FlexAttention": r"flash|_cute",
    "several GPUs": r"multi_?gpu|cuda_1",
}
"""Why tests of which names cannot pass."""
FAR = re.compile(r"error .* is greater than|not close|Mismatched elements|Flex eager Error", re.IGNORECASE)
OURS, THEIRS, REFUSED, EXPECTED_ALSO = (
    "passed",
    "passed, without a call of tilefold",
    "refused by name",
    "failed as listed",
)
FAILED, SKIPPED, LATE = "failed", "skipped by the file", "not run: no time left"
OUTCOMES = (OURS, THEIRS, REFUSED, EXPECTED_ALSO, FAILED, SKIPPED, LATE)


# ---------------------------------------------------------------- the two FlexAttentions


class Doors:
    """flex_attention as the tests see it, and torch.compile: inside of what is compiled tilefold's, outside of it torch's."""

    def __init__(self, file: Path) -> None:
        from torch.nn.attention import flex_attention as module

        from tilefold.compat import flex_attention as ours

        self.module, self.file = module, str(file)
        self.theirs, self.compile, self.compile_module = module.flex_attention, torch.compile, torch.nn.Module.compile
        ours.install()
        self.ours = ours.flex_attention
        self.inside = threading.local()
        self.calls = 0
        module.flex_attention = torch.compiler.disable(self.flex_attention)
        torch.compile = self.compiled
        torch.nn.Module.compile = functools.partialmethod(compile_module, self)  # type: ignore[method-assign, assignment]

    def flex_attention(self, *args: Any, **options: Any) -> Any:
        if not getattr(self.inside, "depth", 0):
            return self.theirs(*args, **options)
        self.calls += 1
        return self.ours(*args, **options)

    def compiled(self, model: Any = None, **options: Any) -> Any:
        """torch.compile: of the tests by inductor the function as it is, inside of which tilefold is called."""
        if sys._getframe(1).f_code.co_filename != self.file or options.get("backend", "inductor") != "inductor":
            return self.compile(model, **options)
        return self.entering if model is None else self.entering(model)

    def entering(self, function: Callable[..., Any]) -> Any:
        def entered(*args: Any, **options: Any) -> Any:
            self.inside.depth = getattr(self.inside, "depth", 0) + 1
            try:
                return function(*args, **options)
            finally:
                self.inside.depth -= 1

        return functools.wraps(function)(entered) if hasattr(function, "__name__") else entered


def compile_module(model: torch.nn.Module, doors: Doors, *_: Any, **options: Any) -> None:
    """torch.nn.Module.compile, as `Doors.compiled`."""
    if options.get("backend", "inductor") != "inductor":
        doors.compile_module(model, **options)
    else:
        model._compiled_call_impl = doors.entering(model._call_impl)


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

    def __init__(self, doors: Doors, results: Path, args: argparse.Namespace) -> None:
        self.doors, self.results, self.args = doors, results, args
        self.end = time.monotonic() + args.seconds
        self.tests = names_of(args.file)
        self.before = 0
        self.cases = 0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.cases = len(items)
        chosen = sampled([item.name for item in items], self.tests, self.args.sample)
        at, of = map(int, self.args.shard.split("/"))
        chosen = chosen[at - 1 :: of]
        items[:] = [items[i] for i in chosen]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.before = self.doors.calls
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
        kind, why = judged(test, report, error, self.doors.calls > self.before)
        line = {"case": item.name, "test": test, "outcome": kind, "why": why, "seconds": round(report.duration, 2)}
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


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


def judged(test: str, report: pytest.TestReport, error: BaseException | None, called: bool) -> tuple[str, str]:
    """(outcome, why) of a case."""
    from tilefold.errors import TilefoldError

    if report.passed:
        return (OURS if called else THEIRS), ""
    if report.skipped:
        why = str(error)
        return (LATE, "") if LATE in why else (SKIPPED, shortened(why))
    listed = next((why for why, pattern in EXPECTED.items() if re.search(pattern, test, re.IGNORECASE)), None)
    if (
        isinstance(error, AssertionError)
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


def main() -> int:
    parser = argparse.ArgumentParser(description="PyTorch's own tests of FlexAttention on tilefold's functions")
    parser.add_argument(
        "file", type=Path, nargs="?", help="test/inductor/test_flex_attention.py of the torch installed"
    )
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the results")
    parser.add_argument("--sample", type=int, default=520, help="cases")
    parser.add_argument("--shard", default="1/1", help="which part of the sample, such as 2/3")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which no case is begun")
    parser.add_argument("--table", type=Path, nargs="+", help="results to show instead")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(line) for path in args.table for line in path.read_text().splitlines()]))
        return 0
    if args.file is None or not args.file.is_file():
        parser.error(f"FILE must be a file of tests, got {args.file}")
    args.file = args.file.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / f"flex_tests_{args.shard.replace('/', '_of_')}.jsonl"
    results.unlink(missing_ok=True)
    without_expecttest()
    del sys.argv[1:]  # which torch's test cases read
    runner = Runner(Doors(args.file), results, args)
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--no-header",
        "--tb=short",
        "--rootdir",
        str(args.file.parent),
    ]
    pytest.main([str(args.file), *options, "-c", "/dev/null"], plugins=[runner])
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    print(f"\n{runner.cases} cases in the file, {len(runner.tests)} tests; torch {torch.__version__}\n\n{table(lines)}")
    return int(not lines or any(line["outcome"] == FAILED for line in lines))


if __name__ == "__main__":
    sys.exit(main())
