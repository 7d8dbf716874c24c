"""A GPU's figures fit 80 columns, too; that tables fit is asked of whatever `cases.cli.command` runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.measure import Measurement

from cases.bench import RIGHT, rows
from cases.cli import WIDTH, command, widths
from tilefold.bench.attention import report
from tilefold.bench.attention.cases import SPARSE, Case
from tilefold.bench.attention.peers import IMPLEMENTATIONS
from tilefold.bench.page import columns_that_fit
from tilefold.bench.run import Cell
from tilefold.bench.timers import Timing
from tilefold.cli.runtime import print_tables, table_of


def fit(seen):
    """Many tables, none too wide."""
    return len(seen) > 4 and not [one for one in seen if one[1] > WIDTH]


def test_figures_of_a_gpu_fit(tmp_path):
    """The longest names and figures that results hold: of the records in the repository, by comparison."""
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    kept = [json.loads(line) for line in (results / "sparse.jsonl").read_text().splitlines()]
    newest = [row for row in kept if row["commit"] == kept[-1]["commit"]]
    files = []
    for name in ("old", "new"):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"rows": newest}))
    with widths() as seen:
        command("bench", "compare")(*files)
    assert fit(seen)


@pytest.mark.parametrize("host", [False, True])
def test_a_sparse_table_of_a_gpu_fits(host):
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
    with widths() as seen:
        for sheet in report.sheets_of(found):
            print_tables(console, sheet.head, sheet.rows, left=sheet.left)
        for table in report.detail_tables(found, WIDTH):
            console.print(table)
    assert fit(seen)


def test_a_wide_table_is_cut_between_columns():
    head = ("case", "kind", *(f"column {n}" for n in range(9)))
    lines = [("a", "first", *(str(10**n) for n in range(9))), ("the longest name", "second", *("1.25x",) * 9)]
    wide = Console(width=200)
    assert [len(at) for at in columns_that_fit(head, lines, 40, 2)] == [3, 3, 3, 3, 3, 3, 3, 3, 3]
    cut = columns_that_fit(head, lines, 60, 2)
    assert [i for at in cut for i in at[2:]] == list(range(2, len(head))) and all(at[:2] == (0, 1) for at in cut)
    for at in cut:
        table = table_of([head[i] for i in at], [[line[i] for i in at] for line in lines], 2)
        assert Measurement.get(wide, wide.options, table).maximum <= 60
    assert len(columns_that_fit(head, lines, 200, 2)) == 1
    assert len(columns_that_fit(head[:2], [line[:2] for line in lines], 10, 2)) == 1  # nothing to cut
