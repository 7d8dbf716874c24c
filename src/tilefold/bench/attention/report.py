"""What reports of dense and sparse attention say beyond those of other families: rates, shapes, means, where sparse overtakes."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tilefold.bench.attention.crossing import Crossing, crossing_of
from tilefold.bench.family_report import OURS, family_records, speedup
from tilefold.bench.loop import OK
from tilefold.bench.page import grouped_tables
from tilefold.bench.record import LABELS, Sheet, digits, times
from tilefold.bench.run import Cell, Row
from tilefold.bench.setting import Setting
from tilefold.bench.video import reported

if TYPE_CHECKING:
    from rich.console import RenderableType

DENSE_PEER = "cudnn"  # what sparse attention has to overtake


def directions(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each direction, which are tables of their own."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.case.direction, []).append(row)
    return list(found.values())


def peers_in(rows: Sequence[Row]) -> list[str]:
    """All but tilefold, in the order in which they were measured."""
    return [name for name in dict.fromkeys(cell.implementation for row in rows for cell in row.cells) if name != OURS]


def unit_of(cells: Iterable[Cell]) -> tuple[float, str]:
    """The FLOP/s unit in which the fastest cell is at least 1, or the smallest."""
    fastest = max((cell.flops_per_s or 0.0 for cell in cells), default=0.0)
    return next(
        ((size, name) for size, name in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s")) if fastest >= size), (1e6, "MFLOP/s")
    )


def shape_of(case: Any) -> tuple[str, str, str]:
    """(D and H, N x B, mask or lists) of a case, as the tables show it."""
    p = case.problem
    tokens = f"{p.seq_q}" if p.seq_q == p.seq_k else f"{p.seq_q}/{p.seq_k}"
    heads = f"{p.heads}" if p.heads == p.kv_heads else f"{p.heads}/{p.kv_heads}"
    size = f"{sum(case.lengths)} in {p.batch}" if case.lengths else f"{tokens} x {p.batch}"
    return f"{p.dim_qk}, {heads}", size, what_of(case)


def what_of(case: Any) -> str:
    """The mask of a case, or its lists."""
    p, pattern = case.problem, case.pattern
    if pattern is None:
        if p.window != (-1, -1):
            return "window {}, {}".format(*p.window)
        return "causal" if p.causal else "full"
    title: str = pattern.title + (f" {100 * (1 - case.density):.1f} %" if pattern.kind == "uneven" else "")
    return title + {"bfloat16": "", "float16": " fp16", "float32": " fp32"}[p.dtype]


# --- ratios over cases ------------------------------------------------------------------------------------------------------


def best_ratio(row: Row) -> float | None:
    """How many times as fast as the fastest peer that follows the lists tilefold is; None without lists, or without times."""
    others = (cell.implementation for cell in row.cells if row.case.pattern is not None)
    same_work = (name for name in others if (peer := row.family.peers[name]).lists and not peer.ours)
    return min((ratio for name in same_work if (ratio := speedup(row, name, "events")) is not None), default=None)


def geometric_means(rows: Sequence[Row]) -> dict[str, tuple[float, int]]:
    """Peer -> geometric mean of how many times as fast as it tilefold is over the cases that both ran, and how many those were.
    Peers without any are left out."""
    ratios = {name: [r for row in rows if (r := speedup(row, name, "events")) is not None] for name in peers_in(rows)}
    return {name: (statistics.geometric_mean(some), len(some)) for name, some in ratios.items() if some}


def crossings(rows: Sequence[Row]) -> list[tuple[str, Crossing]]:
    """(what, where) of every problem, block size and direction that was measured with random lists at several sparsities beside
    the dense peer."""
    points: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        case, times = row.case, [cell.timing if (cell := row.at(name)) else None for name in (OURS, DENSE_PEER)]
        ours, dense = times
        if case.pattern is None or case.pattern.kind != "random" or ours is None or dense is None:
            continue
        what = case.name.replace(f"_{case.pattern.name}", f", blocks of {case.pattern.blocks}").replace("_backward", "")
        point = 100 * (1 - case.density), ours.ms, dense.ms
        points.setdefault(f"{case.direction}, {what}", []).append(point)
    found = ((what, crossing_of(some)) for what, some in points.items())
    return [(what, crossing) for what, crossing in found if crossing is not None]


def crossing_lines(rows: Sequence[Row]) -> list[str]:
    """Sentences that say from which sparsity on tilefold is faster than dense cuDNN."""
    return [f"tilefold overtakes dense cuDNN {where}: {what}" for what, where in crossings(rows)]


# --- tables -----------------------------------------------------------------------------------------------------------------


def detail_tables(rows: Sequence[Row], width: int = 100) -> "list[RenderableType]":
    """Under each case a row an implementation: median and spread, error beside its limit, and if measured: graph replays, memory
    that a call takes beyond inputs and results.  Columns that do not fit the width follow in a table of their own."""
    measured: dict[str, Callable[[Cell], str]] = {
        "replay us": lambda cell: digits(cell.graph.us) if cell.graph else "",
        "MB more": lambda cell: "" if cell.scratch is None else f"{cell.scratch / 1e6:.1f}",
    }
    judged = [(row, cell) for row in rows for cell in row.cells if cell.verdict is not None]
    extra = [heading for heading, text in measured.items() if any(text(cell) for _, cell in judged)]
    lines = [
        (row.case.name, row.title(cell), *_detail(cell, [measured[heading] for heading in extra]))
        for row, cell in judged
    ]
    return grouped_tables(("case", "", "ms", "20-80 %", *extra, "max error", "limit"), lines, width, keys=2)


def _detail(cell: Cell, extra: Sequence[Callable[[Cell], str]]) -> tuple[str, ...]:
    time, verdict = cell.timing, cell.verdict
    assert verdict is not None
    times = (digits(time.ms), f"{digits(time.low)}-{digits(time.high)}") if time else ("WRONG", "")
    return (*times, *(text(cell) for text in extra), f"{verdict.max_error:.1e}", f"{verdict.max_limit:.1e}")


def sheets_of(rows: Sequence[Row]) -> list[Sheet]:
    """A table a direction, for documents, and one of what others report."""
    theirs = reported_sheet(rows)
    return [*(_sheet(part) for part in directions(rows)), *([theirs] if theirs else [])]


def reported_sheet(rows: Sequence[Row]) -> Sheet | None:
    """Our forward times beside what the authors of the block-sparse video pipeline report of theirs, at the shape and the
    sparsities that both have; None where there is none."""
    lines = []
    for row in rows:
        p, pattern, ours = row.case.problem, row.case.pattern, row.at(OURS)
        if ours is None or row.case.backward or pattern is None or pattern.kind != "random":
            continue
        square = p.seq_q == p.seq_k and p.dim_qk == p.dim_v and pattern.block_q == pattern.block_k
        shape = (p.batch, p.heads, p.kv_heads, p.seq_k, p.dim_qk, p.dtype, pattern.block_k)
        theirs = reported.FINE_MS.get(pattern.sparsity) if square and shape == reported.SHAPE else None
        if theirs is not None:
            ms = digits(ours.timing.ms) if ours.timing else LABELS.get(ours.status, ours.status)
            lines.append((f"{pattern.sparsity:g} %", row.case.kept, ms, *(f"{ms:g}" for ms in theirs)))
    head = ("sparsity", "kept", "tilefold ms", f"Triton ms ({reported.DEVICE})", f"TK ms ({reported.DEVICE})")
    return Sheet(reported.SAID, head, tuple(lines), brackets=False) if lines else None


def _sheet(rows: Sequence[Row]) -> Sheet:
    """A row a case: our time and rate, each peer's rate and how many times as fast as it we are; geometric means below.

    Peers that refused every case are left out (the notes say why)."""
    means, listed = geometric_means(rows), any(row.case.pattern for row in rows)
    best = [best_ratio(row) for row in rows]
    scale, unit = unit_of(cell for row in rows for cell in row.cells)
    peers = [name for name in peers_in(rows) if any((c := row.at(name)) and c.status != "refused" for row in rows)]
    kept, middle = ["kept"] if listed else [], ["best peer"] if any(best) else []
    titles = (rows[0].family.peers[name].title for name in peers)
    head = ("D, H", "N x B", "lists" if listed else "mask", *kept, "ms", OURS, *middle, *titles)

    def bracketed(cell: str, relative: float | None) -> str:
        return cell if relative is None else f"{cell} ({times(relative)})".strip()

    lines: list[tuple[str, ...]] = []
    for row, most in zip(rows, best, strict=True):
        ours = row.at(OURS)
        line = [*shape_of(row.case), *(row.case.kept for _ in kept)]
        line += [digits(ours.timing.ms) if ours and ours.timing else "", plain_cell(ours, scale)]
        line += [bracketed("", most) for _ in middle]
        line += [bracketed(plain_cell(row.at(name), scale), speedup(row, name, "events")) for name in peers]
        lines.append(tuple(line))
    if means:
        whole = [bracketed("", statistics.geometric_mean(filter(None, best))) for _ in middle]
        figures = (bracketed("", means[name][0]) if name in means else "" for name in peers)
        lines.append(("mean", "(geom.)", "", *("" for _ in kept), "", "", *whole, *figures))
    case = rows[0].case
    dtypes = ", ".join(dict.fromkeys(row.case.dtype for row in rows))
    title = (
        f"{case.family} attention, {case.direction}, {dtypes}, {unit}{' on the listed blocks' if case.pattern else ''}"
    )
    return Sheet(title, head, tuple(lines), left=3)


def plain_cell(cell: Cell | None, scale: float) -> str:
    """A rate, or what there is instead of one."""
    if cell is None:
        return ""
    rate = cell.flops_per_s
    return LABELS.get(cell.status, cell.status) if cell.status != OK or rate is None else digits(rate / scale)


# --- data -------------------------------------------------------------------------------------------------------------------


def records_of(rows: Sequence[Row], setting: Setting) -> list[dict[str, Any]]:
    """One flat record per cell. Times in ms and us, rates in TFLOP/s; None where nothing was measured."""
    return family_records(rows, setting, _figures)


def _figures(row: Row, cell: Cell) -> dict[str, Any]:
    time, rate = cell.timing, cell.flops_per_s
    return {
        "ms": time.ms if time else None,
        "ms_p20": time.low if time else None,
        "ms_p80": time.high if time else None,
        "samples": time.samples if time else None,
        "method": time.method if time else None,
        "tflops": rate / 1e12 if rate else None,
        "tilefold_speedup": speedup(row, cell.implementation, "events"),
        "graph_us": cell.graph.us if cell.graph else None,
        "scratch_bytes": cell.scratch,
    }


def findings(rows: Sequence[Row]) -> dict[str, Any]:
    """{"geometric_means", "crossings"}: what a document says of all its rows together."""
    means = {
        name if part[0].case.direction == "forward" else f"{name}, backward": {"tilefold_speedup": mean, "cases": count}
        for part in directions(rows)
        for name, (mean, count) in geometric_means(part).items()
    }
    return {"geometric_means": means, "crossings": {what: asdict(where) for what, where in crossings(rows)}}
