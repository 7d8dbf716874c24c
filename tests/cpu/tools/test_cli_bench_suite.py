"""Suites and the record of power, on tiny cases in the interpreter."""

import json
from dataclasses import replace

import pytest

from cases.cli import command, refused
from tilefold.bench import power
from tilefold.bench.engine import Request
from tilefold.bench.loop import run_each
from tilefold.bench.matrix.gemm import GEMM
from tilefold.bench.record import markdown_text
from tilefold.bench.setting import Options, setting_of
from tilefold.bench.suites import ENGINES, SUITES, suite_named
from tilefold.bench.timers import Timing
from tilefold.bench.video import sweep
from tilefold.errors import ValueRangeError
from tilefold.plan.sparse.video import STAGES

TINY = "b3_m20_n33_k17_sharedb"  # the cheapest case of gemm


run = command("bench")


def test_what_could_be_measured_is_listed():
    result = run("peers")
    assert "flash-attn-4" in result.output and "not installed" in result.output and "tinygemm" in result.output


# ---------------------------------------------------------------- suites


def test_suites_are_listed_and_every_part_has_cases():
    result = run("suite")
    assert all(name in result.output for name in SUITES)
    for one in SUITES.values():
        for part in one.parts:
            assert part.cases(None, gpu=True), (one.name, part.family)
            for peers in filter(None, [part.peers]):
                assert set(peers) <= set(part.engine.known)
    assert [part.family for part in SUITES["all"].parts] == list(ENGINES)
    with pytest.raises(ValueRangeError, match="suite must be one of quick, attention, matrix, readme, all, got 'slow'"):
        suite_named("slow", gpu=True)
    with pytest.raises(ValueRangeError, match="needs a GPU: .*those that run here: quick, attention, matrix"):
        suite_named("readme", gpu=False)


def test_video_is_a_family_of_suites(monkeypatch):
    """A point that raises does not cost the others theirs, and fails the run."""
    engine = ENGINES["video"]
    (quick,) = engine.cases(Request(quick=True), gpu=True)
    assert quick.name == "sparsity_d128_h12_n23296x1_b64_s80"
    points = engine.cases(Request(pattern="cached"), gpu=True)
    assert len(points) == 10 and {point.page_size for point in points} == {None, 64}
    assert "tilefold" in engine.known and set(engine.usual("cuda")) <= set(engine.known)
    timing = Timing(2.0, 2.0, 2.0, 1, "alternating", (2.0,))

    def measured(point, device, peers, rounds, graph):
        assert peers == ("cudnn",)
        if point.page_size is None:
            raise RuntimeError("no such kernel")
        return sweep.SweepRow(point, 5, dict.fromkeys((*STAGES, "pipeline", "dense cuDNN"), timing))

    monkeypatch.setattr(sweep, "measure_point", measured)
    peers, kept = engine.beside(("cudnn",), "cuda"), []
    rows = engine.run(points[4:6], peers, "cuda", Options(1), lambda *_: None, kept.append)
    assert rows == kept and [row.status for row in rows] == ["failed", "ok"]
    assert engine.wrong(rows) and not engine.wrong(rows[1:])
    setting = setting_of("cpu")
    records = [record for row in rows for record in engine.records(row, setting)]
    states = [(record["implementation"], record["status"]) for record in records]
    assert states == [("tilefold", "failed"), ("tilefold", "ok")]
    assert "no such kernel" in records[0]["note"] and any("no such kernel" in note for note in engine.notes(rows))
    assert "brackets" not in markdown_text(engine.sheets(rows, setting), setting, ())


@pytest.mark.interpreter
def test_a_suite_refuses_what_none_of_its_families_has():
    refused(
        command("bench", "suite", "matrix"),
        (
            "--peers fa4",
            "--peers must be from torch, cublas, scaled_mm, tinygemm, torchao, gemlite, bitsandbytes (or none), got 'fa4'",
        ),
        ("--case b77", "case filter 'b77' matches no case of the suite 'matrix'"),
    )


class Steady(power.Sampler):
    """Made-up readings: a clock that moves."""

    def since(self, mark=0):
        lines = ("1980, 2619, 650.0, 60, 100, 0x0", *("1755, 2619, 699.0, 64, 100, 0x4",) * 2)
        return power.summarise([power.parse_smi(line) for line in lines])


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_a_suite_writes_one_document_and_goes_on_after_a_failure(tmp_path, monkeypatch):
    """The second run has a broken product: the suite goes on to its other family, and fails."""
    monkeypatch.setattr(power, "Sampler", Steady)
    figures, table, results = (tmp_path / name for name in ("figures.json", "t.md", "results"))
    common = ("suite", "matrix", "--case", f"{TINY}|stride2", "--rounds", 1, "--peers", "torch,cublas")
    first = run(*common, "--json", figures, "--markdown", table, "--results", results)
    assert "warning: the SM clock moved between 1755 and 1980 MHz (11 %)" in first.output
    assert "no case has what the filter asks for" in first.output  # of lowbit
    document = json.loads(figures.read_text())
    assert {(row["family"], row["implementation"]) for row in document["rows"]} == {
        (family, name) for family in ("gemm", "conv") for name in ("tilefold", "torch")
    }
    assert document["power"]["gemm"]["sm_mhz"]["least"] == 1755 and set(document["families"]) == {"gemm", "conv"}
    assert all(row["rounds_ms"]["events"] and row["power"]["samples"] == 3 for row in document["rows"])
    text = table.read_text()
    assert text.startswith("### gemm\n\n| case |") and "### conv\n" in text
    assert "While it was measured: SM clock 1755 (1755 to 1980) MHz" in text
    assert f"appended 2 rows to {results / 'conv.jsonl'}" in first.said

    def broken(inputs):
        raise RuntimeError("no such kernel")

    peers = GEMM.peers | {"tilefold": replace(GEMM.peers["tilefold"], prepare=broken)}
    monkeypatch.setattr(ENGINES["gemm"], "family", replace(GEMM, peers=peers))
    second = run(*common, code=1)
    assert "gemm 1 of 1 1 failed conv 1 of 1 1 ok" in second.said


def test_a_case_that_raises_is_reported_and_the_next_one_is_begun():
    def one(case):
        if case == 2:
            raise AssertionError("no inputs")
        return case, "fine"

    kept = []
    found = run_each([1, 2, 3], one, lambda case, why: (case, why), kept.append)
    assert found == kept == [(1, "fine"), (2, "this case ended with AssertionError: no inputs"), (3, "fine")]
