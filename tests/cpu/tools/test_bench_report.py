"""Reports of made-up measurements: ratios, means, widths, and data that can be read back."""

import json

import pytest

from cases.bench import RIGHT, SETTING, rows, shown, timing
from tilefold.bench import record
from tilefold.bench.attention import report
from tilefold.bench.attention.cases import cases_of
from tilefold.bench.family_report import family_lines
from tilefold.bench.run import Cell
from tilefold.reference import Comparison


def measured(peers=("cudnn", "flash", "flex", "efficient", "math")):
    """tilefold at 600 TFLOP/s, cuDNN at 750 and 480 in turn, the others at 300; FA4 missing; math without memory at 16384."""
    cells = []
    for turn, case in enumerate(cases_of("dense")[:12]):

        def cell(name, tflops, case=case):
            return Cell(case, name, "ok", "", RIGHT, timing(case.flops / (tflops * 1e9)))

        cells.append(cell("tilefold", 600))
        for name in peers:
            if name == "math" and case.problem.seq_q == 16384:
                cells.append(Cell(case, name, "no memory", "CUDA out of memory"))
            else:
                cells.append(cell(name, (750, 480)[turn % 2] if name == "cudnn" else 300))
        cells.append(Cell(case, "fa4", "refused", "flash-attn-4 is not installed"))
    return rows(cells)


def test_geometric_means_are_over_the_cases_that_both_ran():
    means = report.geometric_means(measured())
    assert means["cudnn"] == (pytest.approx(1.0), 12)
    assert means["flash"] == (pytest.approx(2.0), 12)
    assert means["math"] == (pytest.approx(2.0), 6)
    assert "fa4" not in means
    assert "tilefold" not in means


@pytest.mark.parametrize("width", [80, 100, 140])
def test_tables_fit_the_terminal_and_cut_nothing(width):
    text = shown(*report.sheets_of(measured()), width=width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for title in ("cuDNN", "FA2", "Flex", "efficient", "math"):
        assert sum(title in line for line in text.splitlines()) == 1
    assert "FA4" not in text
    assert "750 (0.80x)" in text
    assert "480 (1.25x)" in text
    assert "OOM" in text


def test_a_table_without_peers():
    assert "600" in shown(*report.sheets_of(measured(peers=())))


def test_wrong_and_failed_cells_are_loud_and_noted():
    case = cases_of("dense")[0]
    wrong = Cell(case, "tilefold", "WRONG", "max error 1", Comparison(1.0, 1e-3, 1.0, 1e-3, False))
    failed, right = (
        Cell(case, "flash", "failed", "RuntimeError: boom"),
        Cell(case, "math", "ok", "", RIGHT, timing(3.0)),
    )
    found = rows([wrong, failed, right])
    text = shown(*report.sheets_of(found))
    assert "WRONG" in text
    assert "failed" in text
    assert "x" not in text.splitlines()[1].replace("16384 x 1", "")  # no ratio to a wrong result
    assert family_lines(found) == ["tilefold: WRONG: max error 1", "FA2: failed: RuntimeError: boom"]
    assert report.geometric_means(found) == {}


def test_equal_notes_are_said_once():
    assert family_lines(measured()) == [
        "math (6 cases): no memory: CUDA out of memory",
        "FA4: flash-attn-4 is not installed",
    ]


def test_details_show_replays_only_where_measured():
    found = measured()
    assert "replay us" not in shown(*report.detail_tables(found))
    cell = Cell(found[0].case, "tilefold", "ok", "", RIGHT, timing(1.0), graph=timing(0.0213))
    text = shown(*report.detail_tables(rows([cell])))
    assert "replay us" in text and "21.3" in text
    (row,) = report.records_of(rows([cell]), SETTING)
    assert row["graph_us"] == pytest.approx(21.3)


@pytest.mark.parametrize(("ms", "unit"), [(1.0, "TFLOP/s"), (1e4, "GFLOP/s"), (1e9, "MFLOP/s")])
def test_units_follow_the_fastest(ms, unit):
    case = cases_of("dense")[0]
    cell = Cell(case, "tilefold", "ok", "", RIGHT, timing(ms))
    assert report.unit_of([cell])[1] == unit


def test_a_record_per_cell():
    found = measured()
    written = report.records_of(found, SETTING)
    assert len(written) == sum(len(row.cells) for row in found)
    first = written[0]
    assert first["tflops"] == pytest.approx(600)
    where = [first[name] for name in ("commit", "device", "torch", "triton")]
    assert where == ["abc123", "NVIDIA H200", "2.11.0", "3.6.0"]
    assert written[1]["tilefold_speedup"] == pytest.approx(0.8)
    assert written[-1]["ms"] is None


def test_json_can_be_read_even_where_an_error_is_infinite():
    wrong = Comparison(float("inf"), 0.0, float("nan"), 0.0, False)
    broken = rows([Cell(cases_of("dense")[0], "tilefold", "WRONG", "x", wrong)])
    document = json.loads(record.json_text(SETTING, report.records_of(broken, SETTING), **report.findings(broken)))
    assert document["setting"]["device"] == "NVIDIA H200"
    assert document["rows"][0]["max_abs_error"] is None
    document = json.loads(
        record.json_text(SETTING, report.records_of(measured(), SETTING), **report.findings(measured()))
    )
    assert document["geometric_means"]["flash"] == {"tilefold_speedup": pytest.approx(2.0), "cases": 12}


def test_markdown_says_where_it_was_measured():
    text = record.markdown_text(report.sheets_of(measured()), SETTING, report.crossing_lines(measured()))
    lines = text.splitlines()
    assert lines[0] == "| D, H | N x B | mask | ms | tilefold | cuDNN | FA2 | Flex | efficient | math |"
    assert len({line.count("|") for line in lines[:15]}) == 1
    assert "750 (0.80x)" in lines[2]
    assert "NVIDIA H200, 2026-11-21, tilefold abc123, torch 2.11.0, triton 3.6.0." in text


def test_results_only_grow(tmp_path):
    folder = tmp_path / "results"
    path = record.append_rows(folder / "dense.jsonl", report.records_of(measured(), SETTING))
    before = path.read_text()
    assert record.append_rows(path, report.records_of(measured(), SETTING)) == path
    after = path.read_text()
    assert after.startswith(before)
    kept = [json.loads(line) for line in after.splitlines()]
    assert len(kept) == 2 * len(report.records_of(measured(), SETTING))
    assert kept[0]["case"] == "d128_h16_n16384x1"
