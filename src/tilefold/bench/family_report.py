"""A family's rows as tables, by events and by graph replays, as sentences, records and markdown."""

from collections.abc import Callable, Sequence
from typing import Any

from tilefold.bench.loop import OK
from tilefold.bench.page import Rows
from tilefold.bench.record import LABELS, digits, head, notes_text, rounds_of, tail, times, version_in
from tilefold.bench.run import METHODS, Cell, Row
from tilefold.bench.setting import Setting

OURS = "tilefold"


def family_title(rows: Sequence[Row], method: str, setting: Setting) -> str:
    """The heading of a table: "decode, CUDA-graph replays over rotating caches, on NVIDIA H200, copy 4270 GB/s"."""
    copied = sorted(row.copied for row in rows if row.copied)
    rate = f", copy {copied[len(copied) // 2] * 1e-9:.0f} GB/s" if copied else ""
    family = rows[0].family
    how = METHODS[method] + (f" {family.rotating}" if method == "graph" else "")
    how = "wall clock" if setting.backend in ("interpreter", "cpu") else how
    roof = "".join(f", {dtype} {rate * 1e-12:.0f} TFLOP/s" for dtype, rate in sorted(_roofs(rows).items()))
    return f"{family.name}, {how}, on {setting.device}{rate}{roof}"


def _roofs(rows: Sequence[Row]) -> dict[str, float]:
    """Operations a second at most, by dtype, where they count."""
    return {row.case.dtype: row.roof for row in rows if row.roof}


def family_table(rows: Sequence[Row], method: str) -> Rows:
    """A line a case: our microseconds, GB/s of the bytes that have to be moved, how many times the floor (those bytes at the
    copy's rate), how many times as fast as the best peer; of each peer its microseconds and how many times as fast we are."""
    names = list(dict.fromkeys(cell.implementation for row in rows for cell in row.cells))
    shown = [n for n in names if n != OURS and any((c := row.at(n)) and c.status != "refused" for row in rows)]
    titles = (rows[0].family.peers[name].title for name in shown)
    rate = ("GB/s", "TFLOP/s", "of roof") if _roofs(rows) else ("GB/s", "x floor")
    return Rows(("case", "us", *rate, "best", *titles), tuple(_line(row, shown, method, len(rate)) for row in rows))


def _line(row: Row, peers: Sequence[str], method: str, rates: int) -> tuple[str, ...]:
    ours = row.at(OURS)
    time = ours.by(method) if ours else None
    first = digits(time.us) if time else _label(ours)
    figures = [digits(row.case.bytes / time.ms * 1e-6)] if time else []
    if time and rates == 3:
        figures.append(digits(row.case.flops / time.ms * 1e-9))
    if time and row.floor_ms:
        figures.append(f"{100 * row.floor_ms / time.ms:.0f} %" if rates == 3 else digits(time.ms / row.floor_ms))
    figures += [""] * (rates - len(figures))
    best = best_speedup(row, method)
    return (row.case.name, first, *figures, "" if best is None else times(best), *(
        _peer(row, row.at(name), method) for name in peers
    ))  # fmt: skip


def _label(cell: Cell | None) -> str:
    return "" if cell is None or cell.status == OK else LABELS.get(cell.status, cell.status)


def _peer(row: Row, cell: Cell | None, method: str) -> str:
    time = cell.by(method) if cell else None
    if cell is None or time is None:
        return _label(cell)
    ratio = speedup(row, cell.implementation, method)
    return digits(time.us) + ("" if ratio is None else f" ({times(ratio)})")


def speedup(row: Row, implementation: str, method: str) -> float | None:
    """How many times as fast as another one tilefold is."""
    ours, other = (cell.by(method) if (cell := row.at(name)) else None for name in (OURS, implementation))
    return other.ms / ours.ms if ours and other and ours.ms else None


def best_speedup(row: Row, method: str) -> float | None:
    """The least of the speed-ups over other libraries."""
    found = [speedup(row, c.implementation, method) for c in row.cells if not row.family.peers[c.implementation].ours]
    return min((each for each in found if each is not None), default=None)


def family_lines(rows: Sequence[Row]) -> list[str]:
    """Sentences below the tables: the family's own, and why something is missing, equal reasons said once."""
    lines = list(rows[0].family.lines(rows)) if rows else []
    said = [(row.title(cell), cell.status, cell.note, row.case.name) for row in rows for cell in row.cells]
    return lines + notes_text(said, len(rows))


# --- documents and data -----------------------------------------------------------------------------------------------------


def family_records(
    rows: Sequence[Row], setting: Setting, figures: Callable[[Row, Cell], dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """One flat record per implementation and case; None where nothing was measured.  figures: of attention, whose columns of
    times are its own."""
    return [_record(row, cell, setting, (figures or _figures)(row, cell)) for row in rows for cell in row.cells]


def _record(row: Row, cell: Cell, setting: Setting, figures: dict[str, Any]) -> dict[str, Any]:
    peer = row.family.peers[cell.implementation]
    return {
        **head(setting, row.family.name, row.case.name, row.case.direction if row.family.attention else "forward"),
        **row.family.record(row.case),
        "implementation": cell.implementation,
        "ours": peer.ours,
        "version": version_in(peer.package, setting),
        "status": cell.status,
        **figures,
        "bytes": row.case.bytes,
        "flops": row.case.flops,
        **tail(setting, cell.verdict, cell.note, rounds_of({method: cell.by(method) for method in METHODS})),
    }


def _figures(row: Row, cell: Cell) -> dict[str, Any]:
    case = row.case
    timed: dict[str, Any] = {}
    for method in METHODS:
        time = cell.by(method)
        timed |= {
            f"{method}_us": time.us if time else None,
            f"{method}_us_p20": time.low * 1e3 if time else None,
            f"{method}_us_p80": time.high * 1e3 if time else None,
            f"{method}_gb_per_s": case.bytes / time.ms * 1e-6 if time and time.ms else None,
            f"{method}_tflop_per_s": case.flops / time.ms * 1e-9 if time and time.ms else None,
            f"{method}_times_floor": time.ms / row.floor_ms if time and row.floor_ms else None,
            f"{method}_tilefold_speedup": speedup(row, cell.implementation, method),
        }
    return {
        **timed,
        "copy_gb_per_s": row.copied * 1e-9 or None,
        "floor_us": row.floor_ms * 1e3 if row.floor_ms else None,
        "roof_tflop_per_s": row.roof * 1e-12 or None,
        "sets": row.sets,
    }


def methods_of(rows: Sequence[Row]) -> list[str]:
    """Those that something was timed by; the first one in any case, for what was refused."""
    found = [m for m in METHODS if any(cell.by(m) for row in rows for cell in row.cells)]
    return found or [next(iter(METHODS))]
