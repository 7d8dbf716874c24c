"""What the records, documents and notes of every family have in common, so that one reader understands them all.

A record is one implementation on one case: where and when (`head`), the family's own columns, what the check found and with what
versions (`tail`).  `rounds_ms` holds every round's time by method.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilefold.bench.loop import FAILED, MEMORY, OK, REFUSED, WRONG
from tilefold.bench.page import table_lines
from tilefold.bench.setting import Setting
from tilefold.bench.timers import Timing
from tilefold.ops.environment import installed as version_of
from tilefold.reference import Comparison

LABELS = {WRONG: "WRONG", REFUSED: "-", MEMORY: "OOM", FAILED: "failed"}  # instead of a figure


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table of a document.  title: what it shows, as a sentence without its full stop; left: how many columns are aligned to
    the left; brackets: whether figures of peers have ours over theirs in brackets."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1
    brackets: bool = True


def head(setting: Setting, family: str, case: str, direction: str) -> dict[str, Any]:
    """Where, when and on what a record was measured: its first columns."""
    return {
        "commit": setting.commit,
        "device": setting.device,
        "date": setting.date,
        "family": family,
        "case": case,
        "direction": direction,
    }


def tail(setting: Setting, verdict: Comparison | None, note: str, rounds: dict[str, list[float]]) -> dict[str, Any]:
    """What the check found, every round's time, and the versions: a record's last columns."""
    return {
        "max_abs_error": finite(verdict.max_error) if verdict else None,
        "max_abs_limit": finite(verdict.max_limit) if verdict else None,
        "relative_l2": finite(verdict.l2_error) if verdict else None,
        "note": note,
        "rounds_ms": rounds,
        "tilefold": setting.tilefold,
        "torch": setting.torch,
        "triton": setting.triton,
        "python": setting.python,
    }


def rounds_of(timings: Mapping[str, Timing | None]) -> dict[str, list[float]]:
    """Method -> milliseconds of each round, of the methods that something was timed by."""
    return {method: list(timing.values) for method, timing in timings.items() if timing is not None and timing.values}


def version_in(package: str, setting: Setting) -> str | None:
    """The version of the distribution that an implementation comes in, None if it is not installed."""
    if package == "tilefold":
        return setting.tilefold
    return setting.torch if package == "torch" else version_of(package)


def finite(value: float) -> float | None:
    """The value, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None


def notes_text(notes: Iterable[tuple[str, str, str, str]], cases: int) -> list[str]:
    """(title, status, why, case) as sentences, equal ones said once: "Flex (6 cases): needs a GPU"; cases: of all."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for title, status, note, case in notes:
        if note:
            grouped.setdefault((title, status, note), []).append(case)
    lines = []
    for (title, status, note), some in grouped.items():
        where = "" if len(some) == cases else f" ({', '.join(some) if len(some) <= 2 else f'{len(some)} cases'})"
        word = "" if status in (OK, REFUSED) else f"{status}: "
        lines.append(f"{title}{where}: {word}{note}")
    return lines


def number(value: float | None, form: str) -> str:
    """A figure in a format, empty where there is none."""
    return "" if value is None or math.isnan(value) else format(value, form)


def digits(value: float) -> str:
    """About three significant digits without an exponent."""
    places = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{places}f}"


def times(value: float) -> str:
    """A ratio with two decimals, three below 0.1."""
    return f"{value:.{2 if value >= 0.1 else 3}f}x"


# --- documents --------------------------------------------------------------------------------------------------------------


def json_text(setting: Setting, rows: Sequence[Mapping[str, Any]], **more: Any) -> str:
    """{"setting", ..., "rows"} as JSON; more: what else a family or a run has to say."""
    return json.dumps({"setting": asdict(setting), **more, "rows": list(rows)}, indent=2, allow_nan=False) + "\n"


def markdown_text(sheets: Sequence[Sheet], setting: Setting, notes: Sequence[str], power: str = "") -> str:
    """Tables for a document, each with the sentence that says what it shows, then where and with what all were measured."""
    parts = []
    for sheet in sheets:
        parts += table_lines(sheet.head, sheet.rows, sheet.left)
        gains = "; in brackets how many times as fast as the peer tilefold is" if sheet.brackets else ""
        parts += ["", f"{sheet.title}{gains}.", ""]
    where = f"{setting.device}, {setting.date[:10]}, tilefold {setting.commit}, torch {setting.torch}, triton {setting.triton}."
    said = [power] if power else []
    return "\n".join([*parts, where, *(f"\n{note}." for note in [*said, *notes])]) + "\n"


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Append records to a file, one JSON line each; its folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    return path
