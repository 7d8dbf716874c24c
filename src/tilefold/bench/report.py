"""Measurements as tables for a terminal and for documents, as CSV and JSON, and as lines of a results file that only grows."""

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.bench.peers import IMPLEMENTATIONS
from tilefold.bench.run import OK, WRONG, Cell, Setting

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "append_results",
    "detail_table",
    "geometric_means",
    "heading_of",
    "notes_of",
    "ratio",
    "rows_of",
    "speed_tables",
    "to_csv",
    "to_json",
    "to_markdown",
]

OURS = "tilefold"
# Columns of a speed table, in characters: those that are always there, and one peer's.
FIXED_WIDTH, PEER_WIDTH = 45, 13
LABELS = {WRONG: "WRONG", "refused": "-", "no memory": "OOM", "failed": "failed"}


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells by case and implementation, in the order in which they were measured."""

    cells: tuple[Cell, ...]

    @property
    def implementations(self) -> list[str]:
        return list(dict.fromkeys(cell.implementation for cell in self.cells))

    @property
    def cases(self) -> list[str]:
        return list(dict.fromkeys(cell.case.name for cell in self.cells))

    def at(self, case: str, implementation: str) -> Cell:
        return next(c for c in self.cells if c.case.name == case and c.implementation == implementation)


def title_of(implementation: str) -> str:
    known = IMPLEMENTATIONS.get(implementation)
    return known.title if known else implementation


def ratio(ours: Cell, peer: Cell) -> float | None:
    """How many times as fast as the peer we are (above 1: we are faster), or None where one of the two has no time."""
    return peer.timing.ms / ours.timing.ms if ours.timing and peer.timing else None


def geometric_means(cells: Sequence[Cell]) -> dict[str, tuple[float, int]]:
    """Peer -> geometric mean of `ratio` over the cases that both ran, and how many those were. Peers without any are left out."""
    grid = Grid(tuple(cells))
    means: dict[str, tuple[float, int]] = {}
    for name in grid.implementations:
        if name == OURS:
            continue
        ratios = [r for case in grid.cases if (r := ratio(grid.at(case, OURS), grid.at(case, name))) is not None]
        if ratios:
            means[name] = math.exp(sum(map(math.log, ratios)) / len(ratios)), len(ratios)
    return means


def unit_of(cells: Iterable[Cell]) -> tuple[float, str]:
    """The FLOP/s unit in which the fastest cell is at least 1, or the smallest."""
    fastest = max((cell.flops_per_s or 0.0 for cell in cells), default=0.0)
    return next(
        ((size, name) for size, name in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s")) if fastest >= size), (1e6, "MFLOP/s")
    )


def digits(value: float) -> str:
    """About three significant digits without an exponent."""
    places = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{places}f}"


def shape_of(cell: Cell) -> tuple[str, str, str]:
    """(D and H, N x B, mask) of a case, as the tables show it."""
    p = cell.case.problem
    tokens = f"{p.seq_q}" if p.seq_q == p.seq_k else f"{p.seq_q}/{p.seq_k}"
    heads = f"{p.heads}" if p.heads == p.kv_heads else f"{p.heads}/{p.kv_heads}"
    return f"{p.dim_qk}, {heads}", f"{tokens} x {p.batch}", "causal" if p.causal else "full"


# --- terminal ---------------------------------------------------------------------------------------------------------------


def times(value: float) -> str:
    """A ratio with two decimals, three below 0.1."""
    return f"{value:.{2 if value >= 0.1 else 3}f}x"


def coloured(value: float) -> str:
    """A ratio with its colour: green from 1, yellow from 0.9, red below."""
    colour = "green" if value >= 1 else "yellow" if value >= 0.9 else "red"
    return f"[{colour}]{times(value)}[/]"


def speed_cell(cell: Cell, scale: float) -> str:
    """The rate of a cell, or its status."""
    if cell.status != OK or cell.flops_per_s is None:
        colour = "bold red" if cell.status in (WRONG, "failed") else "dim"
        return f"[{colour}]{LABELS.get(cell.status, cell.status)}[/]"
    return digits(cell.flops_per_s / scale)


def peer_cell(ours: Cell, peer: Cell, scale: float) -> str:
    """A peer's rate, and how many times as fast as it we are."""
    relative = ratio(ours, peer)
    return speed_cell(peer, scale) + (f" {coloured(relative)}" if relative is not None else "")


def heading_of(cells: Sequence[Cell], setting: Setting) -> str:
    """What the speed tables show: "dense attention, forward, bfloat16, TFLOP/s, on NVIDIA H200"."""
    dtypes = ", ".join(dict.fromkeys(cell.case.problem.dtype for cell in cells))
    return f"{cells[0].case.family} attention, forward, {dtypes}, {unit_of(cells)[1]}, on {setting.device}"


def speed_tables(cells: Sequence[Cell], width: int = 100) -> "list[Table]":
    """One row per case: our time and rate, each peer's rate and how many times as fast as it we are; geometric means below.

    Peers that refused every case are left out (`notes_of` says why). More peers than fit `width` columns go into further tables.
    """
    grid = Grid(tuple(cells))
    peers = [
        name
        for name in grid.implementations
        if name != OURS and any(grid.at(case, name).status != "refused" for case in grid.cases)
    ]
    fit = max(1, (width - FIXED_WIDTH) // PEER_WIDTH)
    groups = [peers[start : start + fit] for start in range(0, len(peers), fit)] or [[]]
    return [_speed_table(grid, group, unit_of(cells)[0]) for group in groups]


def _speed_table(grid: Grid, peers: list[str], scale: float) -> "Table":
    from rich.table import Table

    means = geometric_means(grid.cells)
    table = Table(pad_edge=False, box=None)
    table.add_column("D, H", no_wrap=True)
    for heading in ("N x B", "mask", "ms", "tilefold", *(title_of(name) for name in peers)):
        style = "bold" if heading == "tilefold" else ""
        table.add_column(heading, justify="left" if heading == "mask" else "right", no_wrap=True, style=style)
    shown = ("", "")
    for case in grid.cases:
        ours = grid.at(case, OURS)
        dims, tokens, mask = shape_of(ours)
        if shown[0] not in ("", dims):
            table.add_row()
        row = [dims if shown[0] != dims else "", tokens if shown != (dims, tokens) else "", mask]
        row += [digits(ours.timing.ms) if ours.timing else "", speed_cell(ours, scale)]
        table.add_row(*row, *(peer_cell(ours, grid.at(case, name), scale) for name in peers))
        shown = (dims, tokens)
    if any(name in means for name in peers):
        table.add_row()
        table.add_row("mean", "(geom.)", "", "", "", *(coloured(means[n][0]) if n in means else "" for n in peers))
    return table


def detail_table(cells: Sequence[Cell]) -> "Table":
    """One row per case and implementation: median and spread, host cost and graph replay if measured, error beside its limit."""
    from rich.table import Table

    host, graph = any(cell.host for cell in cells), any(cell.graph for cell in cells)
    table = Table(pad_edge=False, box=None)
    table.add_column("case", no_wrap=True)
    table.add_column("implementation", no_wrap=True)
    for heading in (
        "ms",
        "20-80 %",
        *(["host us"] if host else []),
        *(["graph us"] if graph else []),
        "max error",
        "limit",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = ""
    for cell in cells:
        if cell.verdict is None:
            continue
        name = cell.case.name if cell.case.name != shown else ""
        shown = cell.case.name
        time = cell.timing
        row = [name, title_of(cell.implementation), digits(time.ms) if time else "[bold red]WRONG[/]"]
        row.append(f"{digits(time.low)}-{digits(time.high)}" if time else "")
        row += [digits(cell.host.us) if cell.host else ""] if host else []
        row += [digits(cell.graph.us) if cell.graph else ""] if graph else []
        table.add_row(*row, f"{cell.verdict.max_error:.1e}", f"{cell.verdict.max_limit:.1e}")
    return table


def notes_of(cells: Sequence[Cell]) -> list[str]:
    """Why cells have no time (or no graph), equal reasons said once: "Flex: needs a GPU (6 cases)"."""
    total = len({cell.case.name for cell in cells})
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        if cell.note:
            grouped.setdefault((cell.implementation, cell.status, cell.note), []).append(cell.case.name)
    notes = []
    for (implementation, status, note), cases in grouped.items():
        where = "" if len(cases) == total else f" ({', '.join(cases) if len(cases) <= 2 else f'{len(cases)} cases'})"
        word = "" if status in (OK, "refused") else f"{status}: "
        notes.append(f"{title_of(implementation)}{where}: {word}{note}")
    return notes


# --- documents and data -----------------------------------------------------------------------------------------------------


def rows_of(cells: Sequence[Cell], setting: Setting) -> list[dict[str, Any]]:
    """One flat record per cell: setting, case, figures. Times in ms and us, rates in TFLOP/s; None where nothing was measured."""
    grid = Grid(tuple(cells))
    rows = []
    for cell in cells:
        p, time, verdict, rate = cell.case.problem, cell.timing, cell.verdict, cell.flops_per_s
        relative = ratio(grid.at(cell.case.name, OURS), cell) if OURS in grid.implementations else None
        rows.append(
            {
                "commit": setting.commit,
                "device": setting.device,
                "date": setting.date,
                "family": cell.case.family,
                "case": cell.case.name,
                "dtype": p.dtype,
                "implementation": cell.implementation,
                "status": cell.status,
                "ms": time.ms if time else None,
                "ms_p20": time.low if time else None,
                "ms_p80": time.high if time else None,
                "samples": time.samples if time else None,
                "method": time.method if time else None,
                "tflops": rate / 1e12 if rate else None,
                "tilefold_speedup": relative,
                "host_us": cell.host.us if cell.host else None,
                "graph_us": cell.graph.us if cell.graph else None,
                "flops": cell.case.flops,
                "bytes": cell.case.bytes,
                "max_abs_error": finite(verdict.max_error) if verdict else None,
                "max_abs_limit": finite(verdict.max_limit) if verdict else None,
                "relative_l2": finite(verdict.l2_error) if verdict else None,
                "note": cell.note,
                "tilefold": setting.tilefold,
                "torch": setting.torch,
                "triton": setting.triton,
                "python": setting.python,
            }
        )
    return rows


def finite(value: float) -> float | None:
    """The value, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None


def to_csv(cells: Sequence[Cell], setting: Setting) -> str:
    """The rows as CSV with a heading; empty where nothing was measured."""
    rows = rows_of(cells, setting)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def to_json(cells: Sequence[Cell], setting: Setting) -> str:
    """{"setting", "geometric_means", "rows"} as JSON."""
    means = {name: {"tilefold_speedup": mean, "cases": count} for name, (mean, count) in geometric_means(cells).items()}
    document = {"setting": asdict(setting), "geometric_means": means, "rows": rows_of(cells, setting)}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def to_markdown(cells: Sequence[Cell], setting: Setting) -> str:
    """The speed table for a document, with the sentence that says where it was measured."""
    grid = Grid(tuple(cells))
    scale, unit = unit_of(cells)
    means = geometric_means(cells)
    peers = [name for name in grid.implementations if name != OURS]
    heads = ["D, H", "N x B", "mask", "tilefold ms", "tilefold", *(title_of(name) for name in peers)]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * 3 + " ---: |" * (len(heads) - 3)]
    for case in grid.cases:
        ours = grid.at(case, OURS)
        row = [*shape_of(ours), digits(ours.timing.ms) if ours.timing else "", plain_cell(ours, scale)]
        for name in peers:
            relative = ratio(ours, grid.at(case, name))
            row.append(
                plain_cell(grid.at(case, name), scale) + (f" ({times(relative)})" if relative is not None else "")
            )
        lines.append(f"| {' | '.join(row)} |")
    if means:
        last = ["geometric mean", "", "", "", "", *(f"({times(means[n][0])})" if n in means else "" for n in peers)]
        lines.append(f"| {' | '.join(last)} |")
    dtypes = ", ".join(dict.fromkeys(cell.case.problem.dtype for cell in cells))
    where = (
        f"{unit}, {dtypes}; in brackets how many times as fast as the peer tilefold is. {setting.device}, {setting.date[:10]}, "
        f"tilefold {setting.commit}, torch {setting.torch}, triton {setting.triton}."
    )
    return "\n".join([*lines, "", where, *(f"\n{note}." for note in notes_of(cells))]) + "\n"


def plain_cell(cell: Cell, scale: float) -> str:
    rate = cell.flops_per_s
    return LABELS.get(cell.status, cell.status) if cell.status != OK or rate is None else digits(rate / scale)


def append_results(folder: Path, cells: Sequence[Cell], setting: Setting) -> Path:
    """Append one JSON line per cell to `folder`/FAMILY.jsonl, which is never rewritten; the path of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{cells[0].case.family}.jsonl"
    lines = [json.dumps(row, allow_nan=False) for row in rows_of(cells, setting)]
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return path
