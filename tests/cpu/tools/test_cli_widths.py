"""Tables of reports fit 80 columns: none is wider than the terminal, so that rich has no figure to wrap or cut."""

import json
from dataclasses import replace

import pytest
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from cases.bench import RIGHT, rows
from cases.cli import command
from tilefold.bench.attention import report
from tilefold.bench.attention.cases import SPARSE, Case
from tilefold.bench.attention.peers import IMPLEMENTATIONS
from tilefold.bench.run import Cell
from tilefold.bench.timers import Timing
from tilefold.cli.runtime import print_tables, tables_of

WIDTH = 80


@pytest.fixture
def widths(monkeypatch):
    """How wide each table that is printed wants to be, with its first heading."""
    seen = []
    true = Console.print

    def spy(self, *objects, **options):
        for one in objects:
            if isinstance(one, Table):
                room = self.options.update(max_width=10_000)
                seen.append((str(one.columns[0].header) or "?", Measurement.get(self, room, one).maximum))
        return true(self, *objects, **options)

    monkeypatch.setattr(Console, "print", spy)
    return seen


run = command(columns=WIDTH)


REPORTS = {
    "dense": "bench dense --quick --case d32,n40 --peers math,flash --rounds 1 --host",
    "sparse": "bench sparse --quick --case random --direction both --dtype fp32 --peers math --rounds 1 --host",
    "sparsity": "bench sparse --quick --sparsity 25,50 --peers none --rounds 1",
    "decode": "bench decode --quick --case b2 --rounds 1",
    "gemm": "bench gemm --case m70 --rounds 1",
    "conv": "bench conv --case stride2 --rounds 1",
    "lowbit": "bench lowbit --case 4bit --rounds 1",
    "move": "bench move --case strides --rounds 1",
    "video": "bench video --sweep sparsity --values 50 --peers math --shape 1,2,128,16 --dtype fp32",
    "cached": "bench video --sweep cached --values 192 --peers math --shape 1,2,128,16 --dtype fp32 --page-size 32",
    "peers": "bench peers",
    "profile": "profile video --shape 1,2,128,16 --dtype fp32 --sparsity 0.5 --peers math --backward",
    "compare": "compare tilefold fp64 --family video --shape 1,1,128,16 --dtype fp32 --seeds 3",
    "memory": "kv-memory --model qwen2.5-7b --requests 20 --budget 1",
    "memory of many": "kv-memory --model llama-3.1-70b --requests 20 --budget 100 --max-tokens 131072 --page-sizes 16,1024",
    "ladder": "ladder --rung paged --quick",
}
PROSE = ("peers",)  # their last column is a sentence, which may be wrapped


@pytest.mark.interpreter
@pytest.mark.no_poison
@pytest.mark.parametrize("name", REPORTS)
def test_tables_of_reports_fit(name, widths):
    result = run(*REPORTS[name].split())
    assert widths, "no table was printed"
    if name not in PROSE:
        assert [one for one in widths if one[1] > WIDTH] == []
    assert "\u2026" not in result.output
    tables = [line for line in result.output.splitlines() if "  " in line.strip()]
    assert max(map(len, tables)) <= WIDTH


def test_figures_of_a_gpu_fit(widths, tmp_path):
    """The longest names and figures that results hold: of the records in the repository, by comparison."""
    from pathlib import Path

    results = Path(__file__).parents[3] / "benchmarks" / "results"
    kept = [json.loads(line) for line in (results / "sparse.jsonl").read_text().splitlines()]
    newest = [row for row in kept if row["commit"] == kept[-1]["commit"]]
    files = []
    for name in ("old", "new"):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"rows": newest}))
    run("bench", "compare", *files)
    assert len(widths) > 4
    assert [one for one in widths if one[1] > WIDTH] == []


@pytest.mark.parametrize("host", [False, True])
def test_a_sparse_table_of_a_gpu_fits(host, widths):
    """All peers, the longest lists, every column that can be measured."""
    cells = []
    for problem, pattern in SPARSE["full"]:
        case = Case("sparse", problem, pattern)
        for name in IMPLEMENTATIONS:
            time = Timing(12.345, 12.123, 13.456, 5, "events")
            extra = {"host": replace(time, ms=0.1234), "graph": time, "warm": time} if host else {}
            cells.append(Cell(case, name, "ok", "", RIGHT, time, scratch=1234567890, **extra))
    found = rows(cells)
    console = Console(width=WIDTH)
    for sheet in report.sheets_of(found):
        print_tables(console, sheet.head, sheet.rows, left=sheet.left)
    for table in report.detail_tables(found, WIDTH):
        console.print(table)
    assert len(widths) > 10
    assert [one for one in widths if one[1] > WIDTH] == []


def test_a_wide_table_is_cut_between_columns():
    head = ("case", "kind", *(f"column {n}" for n in range(9)))
    lines = [("a", "first", *(str(10**n) for n in range(9))), ("the longest name", "second", *("1.25x",) * 9)]
    wide = Console(width=200)
    tables = tables_of(head, lines, 40, left=2)
    assert [len(table.columns) for table in tables] == [3, 3, 3, 3, 3, 3, 3, 3, 3]
    tables = tables_of(head, lines, 60, left=2)
    shown = [str(column.header) for table in tables for column in table.columns[2:]]
    assert shown == list(head[2:]) and all([str(c.header) for c in t.columns[:2]] == ["case", "kind"] for t in tables)
    for table in tables:
        assert Measurement.get(wide, wide.options, table).maximum <= 60
    assert len(tables_of(head, lines, 200, left=2)) == 1
    assert len(tables_of(head[:2], [line[:2] for line in lines], 10, left=2)) == 1  # nothing to cut
