"""Decoding steps as tables, by events and by graph replays, as sentences, records and markdown."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tilefold.bench.decode_run import DecodeCell, DecodeRow
from tilefold.bench.decode_serving import DECODE_PEERS
from tilefold.bench.implementation import version_of
from tilefold.bench.page import Rows
from tilefold.bench.report import LABELS, digits, finite, times
from tilefold.bench.run import OK, WRONG, Setting

__all__ = [
    "METHODS",
    "decode_json",
    "decode_lines",
    "decode_markdown",
    "decode_records",
    "decode_table",
    "decode_title",
    "methods_of",
    "ours_wrong",
]

METHODS = {"events": "between GPU events, cold L2 cache", "graph": "CUDA-graph replays over rotating caches"}
OURS = "tilefold"


def decode_title(rows: Sequence[DecodeRow], method: str, setting: Setting) -> str:
    """The heading of a table: "decode, CUDA-graph replays over rotating caches, on NVIDIA H200, copy 4270 GB/s"."""
    copied = sorted(row.copied for row in rows if row.copied)
    rate = f", copy {copied[len(copied) // 2] * 1e-9:.0f} GB/s" if copied else ""
    how = "wall clock" if setting.backend == "interpreter" else METHODS[method]
    return f"decode, {how}, on {setting.device}{rate}"


def decode_table(rows: Sequence[DecodeRow], method: str) -> Rows:
    """A line a case: our microseconds, GB/s of the bytes that have to be moved, how many times the floor (those bytes at the
    copy's rate), how many times as fast as the best peer; of each peer its microseconds and how many times as fast we are."""
    names = list(dict.fromkeys(cell.implementation for row in rows for cell in row.cells))
    shown = [n for n in names if n != OURS and any((c := row.at(n)) and c.status != "refused" for row in rows)]
    head = ("case", "us", "GB/s", "x floor", "best", *(DECODE_PEERS[name].title for name in shown))
    return Rows(head, tuple(_line(row, shown, method) for row in rows))


def _line(row: DecodeRow, peers: Sequence[str], method: str) -> tuple[str, ...]:
    ours = row.at(OURS)
    time = ours.timing(method) if ours else None
    first = digits(time.us) if time else _label(ours)
    rate = digits(row.case.bytes / time.ms * 1e-6) if time else ""
    floor = digits(time.ms / row.floor_ms) if time and row.floor_ms else ""
    best = best_speedup(row, method)
    return (row.case.name, first, rate, floor, "" if best is None else times(best), *(
        _peer(row, row.at(name), method) for name in peers
    ))  # fmt: skip


def _label(cell: DecodeCell | None) -> str:
    return "" if cell is None or cell.status == OK else LABELS.get(cell.status, cell.status)


def _peer(row: DecodeRow, cell: DecodeCell | None, method: str) -> str:
    time = cell.timing(method) if cell else None
    if cell is None or time is None:
        return _label(cell)
    ratio = speedup(row, cell.implementation, method)
    return digits(time.us) + ("" if ratio is None else f" ({times(ratio)})")


def speedup(row: DecodeRow, implementation: str, method: str) -> float | None:
    """How many times as fast as another one tilefold is."""
    ours, other = (cell.timing(method) if (cell := row.at(name)) else None for name in (OURS, implementation))
    return other.ms / ours.ms if ours and other and ours.ms else None


def best_speedup(row: DecodeRow, method: str) -> float | None:
    """The least of the speed-ups over other libraries."""
    found = [speedup(row, c.implementation, method) for c in row.cells if not DECODE_PEERS[c.implementation].ours]
    return min((each for each in found if each is not None), default=None)


def decode_lines(rows: Sequence[DecodeRow]) -> list[str]:
    """Sentences below the tables: uneven batches beside balanced ones, and why something is missing, equal reasons said once."""
    lines = []
    for row in rows:
        for other in rows:
            same = row.case.uneven and not other.case.uneven and row.case.batch == other.case.batch
            if same and abs(row.case.bytes / other.case.bytes - 1) < 1e-2 and row.case.page == other.case.page:
                lines += _beside(row, other)
    missing: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for cell in row.cells:
            if cell.note:
                missing.setdefault((cell.implementation, cell.status, cell.note), []).append(row.case.name)
    for (name, status, note), cases in missing.items():
        some = ", ".join(cases) if len(cases) <= 2 else f"{len(cases)} cases"
        where = "" if len(cases) == len(rows) else f" ({some})"
        word = "" if status in (OK, "refused") else f"{status}: "
        lines.append(f"{DECODE_PEERS[name].title}{where}: {word}{note}")
    return lines


def _beside(uneven: DecodeRow, balanced: DecodeRow) -> list[str]:
    found = []
    for name in (cell.implementation for cell in uneven.cells):
        cells = uneven.at(name), balanced.at(name)
        for method in METHODS:
            mine, other = (cell.timing(method) if cell else None for cell in cells)
            if mine and other and other.ms:
                title = DECODE_PEERS[name].title
                found.append(
                    f"{title}, {method}: {uneven.case.name} takes {mine.ms / other.ms:.2f} times {balanced.case.name}"
                )
    return found


def ours_wrong(rows: Sequence[DecodeRow]) -> bool:
    """Whether a result of tilefold failed its check, or failed."""
    return any(DECODE_PEERS[c.implementation].ours and c.status in (WRONG, "failed") for r in rows for c in r.cells)


# --- documents and data -----------------------------------------------------------------------------------------------------


def decode_records(rows: Sequence[DecodeRow], setting: Setting) -> list[dict[str, Any]]:
    """One flat record per implementation and case; None where nothing was measured."""
    return [_record(row, cell, setting) for row in rows for cell in row.cells]


def _record(row: DecodeRow, cell: DecodeCell, setting: Setting) -> dict[str, Any]:
    case, peer = row.case, DECODE_PEERS[cell.implementation]
    shape = {key: value for key, value in asdict(case).items() if key != "lengths"}
    timed: dict[str, Any] = {}
    for method in METHODS:
        time = cell.timing(method)
        timed |= {
            f"{method}_us": time.us if time else None,
            f"{method}_us_p20": time.low * 1e3 if time else None,
            f"{method}_us_p80": time.high * 1e3 if time else None,
            f"{method}_gb_per_s": case.bytes / time.ms * 1e-6 if time and time.ms else None,
            f"{method}_times_floor": time.ms / row.floor_ms if time and row.floor_ms else None,
            f"{method}_tilefold_speedup": speedup(row, cell.implementation, method),
        }
    verdict = cell.verdict
    return {
        "commit": setting.commit,
        "device": setting.device,
        "date": setting.date,
        "family": "decode",
        "case": case.name,
        "direction": "forward",
        "batch": case.batch,
        "keys": sum(case.lengths),
        "shortest": min(case.lengths),
        "longest": case.longest,
        **shape,
        "implementation": cell.implementation,
        "version": setting.tilefold if peer.ours else setting.torch if peer.package == "torch" else version_of(peer.package),
        "status": cell.status,
        **timed,
        "copy_gb_per_s": row.copied * 1e-9 or None,
        "floor_us": row.floor_ms * 1e3 if row.floor_ms else None,
        "sets": row.sets,
        "bytes": case.bytes,
        "flops": case.flops,
        "max_abs_error": finite(verdict.max_error) if verdict else None,
        "max_abs_limit": finite(verdict.max_limit) if verdict else None,
        "relative_l2": finite(verdict.l2_error) if verdict else None,
        "note": cell.note,
        "tilefold": setting.tilefold,
        "torch": setting.torch,
        "triton": setting.triton,
        "python": setting.python,
    }  # fmt: skip


def decode_json(rows: Sequence[DecodeRow], setting: Setting) -> str:
    """{"setting", "lines", "rows"} as JSON."""
    document = {"setting": asdict(setting), "lines": decode_lines(rows), "rows": decode_records(rows, setting)}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def decode_markdown(rows: Sequence[DecodeRow], setting: Setting) -> str:
    """The tables for a document, with the sentences that say where they were measured."""
    parts = []
    for method in methods_of(rows):
        table = decode_table(rows, method)
        dashes = ("---", *("---:",) * (len(table.head) - 1))
        parts.append(f"{decode_title(rows, method, setting)}; in brackets how many times as fast tilefold is\n")
        parts += [f"| {' | '.join(cells)} |" for cells in (table.head, dashes, *table.rows)]
        parts.append("")
    where = f"{setting.date[:10]}, tilefold {setting.commit}, torch {setting.torch}, triton {setting.triton}."
    return "\n".join([*parts, where, *(f"\n{line}." for line in decode_lines(rows))]) + "\n"


def methods_of(rows: Sequence[DecodeRow]) -> list[str]:
    """Those that something was timed by; the first one in any case, for what was refused."""
    found = [m for m in METHODS if any(cell.timing(m) for row in rows for cell in row.cells)]
    return found or [next(iter(METHODS))]
