"""`tilefold bench startup`: its processes on tiny cases, the table, what was wanted, a process that fails, a wrong result."""

import json
from dataclasses import replace

import pytest

from cases.cli import command
from tilefold.bench import startup
from tilefold.bench.startup import Start, lines_of, measure_start, rows_of, startup_cases
from tilefold.errors import TilefoldError

ONE = Start("d64", False, True, 0.5, 2.0, 3.0, 0.25, True)


@pytest.mark.interpreter
def test_processes_of_a_tiny_case() -> None:
    (case, _), told = startup_cases(gpu=False), []
    first, second = measure_start(case, "cpu", 1, step=told.append)
    assert (first.cached, second.cached) == (False, True)
    assert (first.ok, second.ok) == (True, None)
    assert min(first.importing, first.forward, first.backward, first.autograd, second.forward) > 0
    assert told == ["d16_h1_n32x1: empty cache", "d16_h1_n32x1: process 1 of 1"]


def test_the_cases_of_a_gpu() -> None:
    cases = startup_cases(gpu=True)
    assert [case.name for case in cases] == ["d64_h32_n4096x1", "d128_h16_n4096x1_causal"]
    assert {case.problem.dtype for case in cases} == {"bfloat16"}


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "CHILD", "raise SystemExit('no such device')")
    with pytest.raises(TilefoldError, match="d16_h1_n32x1: .* failed: no such device"):
        measure_start(startup_cases(gpu=False)[0], "cpu", 1)


def test_rows_are_medians() -> None:
    later = [replace(ONE, cached=True, forward=forward, ok=None) for forward in (0.1, 0.7, 0.2)]
    rows = rows_of([ONE, *later, replace(ONE, ours=False)])
    assert rows == [
        ("d64", "empty cache", "0.500", "2.000", "2.500", "3.000", "0.250"),
        ("d64", "compiled before", "0.500", "0.200", "0.700", "3.000", "0.250"),
        ("d64", "empty cache, as Triton starts", "0.500", "2.000", "2.500", "3.000", "0.250"),
    ]


def test_what_was_wanted() -> None:
    slow = replace(ONE, cached=True, ok=None)
    assert lines_of([ONE, slow, replace(ONE, case="d128", ok=False)]) == [
        "d64: first call with an empty cache 2.50 s, wanted at most 3",
        "d128: first call with an empty cache 2.50 s, wanted at most 3",
        "d64: first call with compiled kernels 2.50 s, wanted at most 0.3, MISSED",
        "d128: a result was WRONG",
    ]


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_the_command(ok: bool, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    def measured(case, device, rounds, ours, step):  # type: ignore[no-untyped-def]
        step("now")
        return (
            replace(ONE, case=case.name, ours=ours, ok=ok),
            *[replace(ONE, case=case.name, ours=ours, cached=True)] * rounds,
        )

    monkeypatch.setattr(startup, "measure_start", measured)
    path = tmp_path / "startup.json"
    result = command("bench", "startup")("--rounds", "2", "--compare", "--json", path, code=code)
    assert "empty cache, as Triton starts" in result.output
    assert ("WRONG" in result.output) is not ok
    document = json.loads(path.read_text())
    assert len(document["starts"]) == 2 * 2 * 3
    assert document["setting"]["torch"]
