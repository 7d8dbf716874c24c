"""Benchmarks that nobody ran: a setting, times and rows of them, and what a terminal shows of them."""

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from tilefold.bench.attention.peers import DENSE, SPARSE
from tilefold.bench.record import Sheet
from tilefold.bench.run import Cell, Row
from tilefold.bench.setting import Setting
from tilefold.bench.timers import Timing
from tilefold.cli.runtime import print_tables
from tilefold.reference import Comparison

SETTING = Setting("NVIDIA H200", "cuda", "2026-11-21T00:00:00+00:00", "abc123", "0.1.0", "2.11.0", "3.6.0", "3.12.3")
RIGHT = Comparison(1e-3, 2e-3, 3e-3, 6e-3, True)
FAMILIES = {"dense": DENSE, "sparse": SPARSE}


def timing(ms: float) -> Timing:
    return Timing(ms, ms * 0.99, ms * 1.01, 5, "alternating")


def rows(cells: Sequence[Cell]) -> list[Row]:
    """Cells of attention, a row a case."""
    cases = dict.fromkeys(cell.case for cell in cells)
    return [Row(FAMILIES[case.family], case, tuple(cell for cell in cells if cell.case == case)) for case in cases]


def shown(*parts: Any, width: int = 100) -> str:
    """What a terminal shows of sheets and of what rich prints."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    for part in parts:
        if isinstance(part, Sheet):
            print_tables(console, part.head, part.rows, left=part.left)
        else:
            console.print(part)
    return console.file.getvalue()
