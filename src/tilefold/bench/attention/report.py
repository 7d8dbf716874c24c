"""Measurements as tables for a terminal and for documents, as CSV and JSON, and as lines of a results file that only grows."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tilefold.bench.attention.grid import (
    OURS,
    Grid,
    best_peer,
    crossings,
    geometric_means,
    is_ours,
    mean_of,
    ratio,
    title_of,
)
from tilefold.bench.attention.peers import IMPLEMENTATIONS
from tilefold.bench.loop import OK
from tilefold.bench.page import grouped_tables
from tilefold.bench.records.record import (
    LABELS,
    Sheet,
    digits,
    head,
    notes_text,
    rounds_of,
    tail,
    times,
    version_in,
)
from tilefold.bench.run import Cell
from tilefold.bench.setting import Setting
from tilefold.bench.video import reported

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "crossing_lines",
    "detail_tables",
    "directions",
    "findings",
    "geometric_means",
    "notes_of",
    "ratio",
    "reported_sheet",
    "rows_of",
    "sheets_of",
]


def directions(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells of each direction, which are tables of their own."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.case.direction, []).append(cell)
    return list(found.values())


def unit_of(cells: Iterable[Cell]) -> tuple[float, str]:
    """The FLOP/s unit in which the fastest cell is at least 1, or the smallest."""
    fastest = max((cell.flops_per_s or 0.0 for cell in cells), default=0.0)
    return next(
        ((size, name) for size, name in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s")) if fastest >= size), (1e6, "MFLOP/s")
    )


def shape_of(cell: Cell) -> tuple[str, str, str]:
    """(D and H, N x B, mask or lists) of a case, as the tables show it."""
    p = cell.case.problem
    tokens = f"{p.seq_q}" if p.seq_q == p.seq_k else f"{p.seq_q}/{p.seq_k}"
    heads = f"{p.heads}" if p.heads == p.kv_heads else f"{p.heads}/{p.kv_heads}"
    if cell.case.lengths:
        tokens = f"{sum(cell.case.lengths)} in {p.batch}"
        return f"{p.dim_qk}, {heads}", tokens, what_of(cell)
    return f"{p.dim_qk}, {heads}", f"{tokens} x {p.batch}", what_of(cell)


def what_of(cell: Cell) -> str:
    """The mask of a case, or its lists."""
    p, pattern = cell.case.problem, cell.case.pattern
    if pattern is None:
        if p.window != (-1, -1):
            return "window {}, {}".format(*p.window)
        return "causal" if p.causal else "full"
    title: str = pattern.title + (f" {100 * (1 - cell.case.density):.1f} %" if pattern.kind == "uneven" else "")
    return title + {"bfloat16": "", "float16": " fp16", "float32": " fp32"}[p.dtype]


def best_ratios(grid: Grid) -> dict[str, float]:
    """Case -> how many times as fast as the best peer we are; with lists only, where the best is not always the same."""
    found = {}
    for case in grid.cases:
        best = best_peer(grid.of(case)) if grid.of(case)[0].case.pattern else None
        relative = ratio(grid.at(case, OURS), best) if best else None
        if relative is not None:
            found[case] = relative
    return found


def third_heading(grid: Grid) -> str:
    return "lists" if any(cell.case.pattern for cell in grid.cells) else "mask"


def kept_heading(grid: Grid) -> list[str]:
    """The heading of the column of kept and all KV blocks, where there are lists."""
    return ["kept"] if any(cell.case.pattern for cell in grid.cells) else []


def crossing_lines(cells: Sequence[Cell]) -> list[str]:
    """Sentences that say from which sparsity on tilefold is faster than dense cuDNN."""
    return [f"tilefold overtakes dense cuDNN {where}: {what}" for what, where in crossings(cells)]


def detail_tables(cells: Sequence[Cell], width: int = 100) -> "list[RenderableType]":
    """Under each case a row an implementation: median and spread, error beside its limit, and if measured: host cost, graph
    replays (cold: K and V come from memory; warm: what fits stays in the L2 cache), memory that a call takes beyond inputs and
    results.  Columns that do not fit the width follow in a table of their own."""
    measured: dict[str, Callable[[Cell], str]] = {
        "host us": lambda cell: digits(cell.host.us) if cell.host else "",
        "cold us": lambda cell: digits(cell.graph.us) if cell.graph else "",
        "warm us": lambda cell: digits(cell.warm.us) if cell.warm else "",
        "MB more": lambda cell: "" if cell.scratch is None else f"{cell.scratch / 1e6:.1f}",
    }
    extra = [heading for heading, text in measured.items() if any(text(cell) for cell in cells)]
    head = ("", "ms", "20-80 %", *extra, "max error", "limit")
    rows = [
        (cell.case.name, *_detail(cell, [measured[heading] for heading in extra]))
        for cell in cells
        if cell.verdict is not None
    ]
    return grouped_tables(("case", *head), rows, width, keys=2)


def _detail(cell: Cell, extra: "Sequence[Callable[[Cell], str]]") -> tuple[str, ...]:
    time, verdict = cell.timing, cell.verdict
    assert verdict is not None
    times = (digits(time.ms), f"{digits(time.low)}-{digits(time.high)}") if time else ("WRONG", "")
    errors = f"{verdict.max_error:.1e}", f"{verdict.max_limit:.1e}"
    return (title_of(cell.implementation), *times, *(text(cell) for text in extra), *errors)


def notes_of(cells: Sequence[Cell]) -> list[str]:
    """Why cells have no time (or no graph), equal reasons said once: "Flex: needs a GPU (6 cases)"."""
    said = ((cell.implementation, cell.status, cell.note, cell.case.name) for cell in cells)
    return notes_text(said, len({cell.case.name for cell in cells}), title_of)


# --- documents and data -----------------------------------------------------------------------------------------------------


def rows_of(cells: Sequence[Cell], setting: Setting) -> list[dict[str, Any]]:
    """One flat record per cell: setting, case, figures. Times in ms and us, rates in TFLOP/s; None where nothing was measured."""
    grid = Grid(tuple(cells))
    rows = []
    for cell in cells:
        p, time, verdict, rate = cell.case.problem, cell.timing, cell.verdict, cell.flops_per_s
        relative = ratio(grid.at(cell.case.name, OURS), cell) if OURS in grid.implementations else None
        rounds = rounds_of({"events": time, "graph": cell.graph, "warm": cell.warm, "host": cell.host})
        rows.append(
            {
                **head(setting, cell.case.family, cell.case.name, cell.case.direction),
                "density": cell.case.density,
                "kept": cell.case.kept,
                "dtype": p.dtype,
                "implementation": cell.implementation,
                "ours": is_ours(cell.implementation),
                "version": version_named(cell.implementation, setting),
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
                "graph_warm_us": cell.warm.us if cell.warm else None,
                "scratch_bytes": cell.scratch,
                "flops": cell.case.flops,
                "bytes": cell.case.bytes,
                **tail(setting, verdict, cell.note, rounds),
            }
        )
    return rows


def version_named(implementation: str, setting: Setting) -> str | None:
    """The version of the distribution that an implementation comes in, "" if it is not installed."""
    known = IMPLEMENTATIONS.get(implementation)
    return version_in("tilefold" if known is None else known.package, setting) or ""


def findings(cells: Sequence[Cell]) -> dict[str, Any]:
    """{"geometric_means", "crossings"}: what a document says of all its rows together."""
    means = {
        name if part[0].case.direction == "forward" else f"{name}, backward": {"tilefold_speedup": mean, "cases": count}
        for part in directions(cells)
        for name, (mean, count) in geometric_means(part).items()
    }
    return {"geometric_means": means, "crossings": {what: asdict(where) for what, where in crossings(cells)}}


def sheets_of(cells: Sequence[Cell]) -> list[Sheet]:
    """A table a direction, for documents, and one of what others report."""
    theirs = reported_sheet(cells)
    return [*(_sheet(part) for part in directions(cells)), *([theirs] if theirs else [])]


def reported_sheet(cells: Sequence[Cell]) -> Sheet | None:
    """Our forward times beside what the authors of the block-sparse video pipeline report of theirs, at the shape and the
    sparsities that both have; None where there is none."""
    rows = []
    for cell in cells:
        p, pattern = cell.case.problem, cell.case.pattern
        if cell.implementation != OURS or cell.case.backward or pattern is None or pattern.kind != "random":
            continue
        square = p.seq_q == p.seq_k and p.dim_qk == p.dim_v and pattern.block_q == pattern.block_k
        shape = (p.batch, p.heads, p.kv_heads, p.seq_k, p.dim_qk, p.dtype, pattern.block_k)
        theirs = reported.fine_ms(shape, pattern.sparsity) if square else None
        if theirs is not None:
            ours = digits(cell.timing.ms) if cell.timing else LABELS.get(cell.status, cell.status)
            rows.append((f"{pattern.sparsity:g} %", cell.case.kept, ours, *(f"{ms:g}" for ms in theirs)))
    head = ("sparsity", "kept", "tilefold ms", f"Triton ms ({reported.DEVICE})", f"TK ms ({reported.DEVICE})")
    return Sheet(reported.SAID, head, tuple(rows), brackets=False) if rows else None


def _sheet(cells: Sequence[Cell]) -> Sheet:
    """A row a case: our time and rate, each peer's rate and how many times as fast as it we are; geometric means below.

    Peers that refused every case are left out (`notes_of` says why)."""
    grid = Grid(tuple(cells))
    best, means, kept = best_ratios(grid), geometric_means(cells), kept_heading(grid)
    scale, unit = unit_of(cells)
    peers = [
        name
        for name in grid.implementations
        if name != OURS and any(grid.at(case, name).status != "refused" for case in grid.cases)
    ]
    middle = ["best peer"] if best else []
    heads = ("D, H", "N x B", third_heading(grid), *kept, "ms", "tilefold", *middle, *map(title_of, peers))

    def bracketed(cell: str, relative: float | None) -> str:
        return cell if relative is None else f"{cell} ({times(relative)})".strip()

    rows: list[tuple[str, ...]] = []
    for case in grid.cases:
        ours = grid.at(case, OURS)
        row = [*shape_of(ours), *([ours.case.kept] if kept else []), digits(ours.timing.ms) if ours.timing else ""]
        row += [plain_cell(ours, scale), *([bracketed("", best.get(case))] if best else [])]
        row += [bracketed(plain_cell(peer, scale), ratio(ours, peer)) for peer in (grid.at(case, n) for n in peers)]
        rows.append(tuple(row))
    if means:
        whole = [bracketed("", mean_of(list(best.values())))] if best else []
        figures = (bracketed("", means[n][0]) if n in means else "" for n in peers)
        rows.append(("mean", "(geom.)", "", *([""] if kept else []), "", "", *whole, *figures))
    dtypes = ", ".join(dict.fromkeys(cell.case.problem.dtype for cell in cells))
    listed = " on the listed blocks" if cells[0].case.pattern else ""
    title = f"{cells[0].case.family} attention, {cells[0].case.direction}, {dtypes}, {unit}{listed}"
    return Sheet(title, heads, tuple(rows), left=3)


def plain_cell(cell: Cell, scale: float) -> str:
    rate = cell.flops_per_s
    return LABELS.get(cell.status, cell.status) if cell.status != OK or rate is None else digits(rate / scale)
