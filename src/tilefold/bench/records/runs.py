"""What earlier runs left, read back: documents of --json and results files that only grow, of any family and of any age."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilefold.errors import ValueRangeError

METHODS = ("events", "graph", "warm", "host")
# Method -> the columns of its median, 20th and 80th percentile and what makes milliseconds of them, of either kind of record.
COLUMNS: dict[str, tuple[tuple[str, str, str, float], ...]] = {
    "events": (("ms", "ms_p20", "ms_p80", 1.0), ("events_us", "events_us_p20", "events_us_p80", 1e-3)),
    "graph": (("graph_us", "graph_us_p20", "graph_us_p80", 1e-3),),
    "warm": (("graph_warm_us", "", "", 1e-3),),
    "host": (("host_us", "", "", 1e-3),),
}
OURS = ("tilefold", "portable", "non-deterministic", "plain")  # of records that do not say whose an implementation is


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What has to be the same for two figures to be of the same thing."""

    family: str
    case: str
    direction: str
    dtype: str
    implementation: str

    def __str__(self) -> str:
        return f"{self.family} {self.case} {self.implementation}"


@dataclass(frozen=True, slots=True)
class Measured:
    """One implementation on one case in one run.

    times: method -> each round's milliseconds.  rough: its record is of before rounds were kept, and of more than three of them,
    so `times` holds the 20th percentile, the median and the 80th in their place.  setting: device, commit, date, versions, FLOPs.
    clock: median of the SM's in MHz."""

    key: Key
    status: str
    note: str
    ours: bool
    times: Mapping[str, tuple[float, ...]]
    rough: bool
    setting: Mapping[str, str]
    clock: float | None = None

    def ms(self, method: str) -> float | None:
        times = self.times.get(method)
        return statistics.median(times) if times else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The records of a document, of a results file, or of all results files of a folder; PATH@COMMIT: only that commit's.

    ValueRangeError if it cannot be read, or has none."""
    commit = ""
    if not path.exists() and "@" in path.name:
        name, _, commit = path.name.rpartition("@")
        path = path.with_name(name)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    try:
        rows = [row for file in files for row in _rows_in(file)]
    except (OSError, ValueError) as error:
        raise ValueRangeError(f"{path} cannot be read as benchmark results: {error}") from None
    if commit:
        rows = [row for row in rows if str(row.get("commit", "")).startswith(commit)]
    if not rows:
        raise ValueRangeError(f"{path} has no benchmark results" + (f" of commit {commit!r}" if commit else ""))
    return rows


def _rows_in(file: Path) -> Iterator[dict[str, Any]]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    else:
        document = json.loads(text)
        found = document.get("rows", []) if isinstance(document, dict) else document
    yield from (row for row in found if isinstance(row, dict) and row.get("case"))


def read_measured(rows: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """The figures of records, in their order; a record of the video pipeline gives one for each of its calls."""
    found: list[Measured] = []
    for row in rows:
        found += _of_video(row) if isinstance(row.get("ms"), dict) else [_one(row)]
    return found


def _one(row: Mapping[str, Any]) -> Measured:
    who = str(row.get("implementation", ""))
    times, rough = _times(row)
    ours = bool(row.get("ours", who in OURS))
    status, note = str(row.get("status", "ok")), str(row.get("note") or "")
    return Measured(_key(row, who), status, note, ours, times, rough, _setting(row), _clock(row))


def _times(row: Mapping[str, Any]) -> tuple[dict[str, tuple[float, ...]], bool]:
    """Those of a record, and whether they are percentiles only."""
    kept = row.get("rounds_ms")
    if isinstance(kept, dict):
        return {method: tuple(map(float, values)) for method, values in kept.items() if values}, False
    times, rough = {}, False
    for method, places in COLUMNS.items():
        for middle, low, high, unit in places:
            if not row.get(middle):
                continue
            spread = [float(row[name]) * unit for name in (low, middle, high) if row.get(name) is not None]
            rounds = _rounds(spread, row.get("samples") if method == "events" else None)
            times[method] = rounds or tuple(spread)
            rough = rough or rounds is None
    return times, rough


def _rounds(spread: Sequence[float], count: Any) -> tuple[float, ...] | None:
    """One to three rounds from their 20th percentile, median and 80th, which are straight lines between them; None for more."""
    if len(spread) != 3 or count not in (1, 2, 3):
        return None
    low, middle, high = spread
    if count == 1:
        return (middle,)
    if count == 2:
        half = (high - low) / 1.2
        return middle - half, middle + half
    return middle - (middle - low) / 0.6, middle, middle + (high - middle) / 0.6


def _of_video(row: Mapping[str, Any]) -> Iterator[Measured]:
    wrong = {name for name, error in (row.get("errors") or {}).items() if not error.get("ok", True)}
    if not row["ms"] and row.get("status") and not wrong:  # a point that raised: nothing was timed
        yield Measured(
            _key(row, "pipeline"), str(row["status"]), str(row.get("note") or ""), True, {}, False, _setting(row)
        )
    for name, ms in row["ms"].items():
        low, high = (row.get("spread") or {}).get(name, (ms, ms))
        status, kept = "WRONG" if name in wrong else "ok", (row.get("rounds_ms") or {}).get(name)
        times = {"events": tuple(kept or (float(low), float(ms), float(high)))}
        yield Measured(
            _key(row, name), status, "", not name.startswith(("dense ", "lists ")), times, not kept, _setting(row)
        )


def _key(row: Mapping[str, Any], who: str) -> Key:
    family, case, dtype = (str(row.get(name) or "") for name in ("family", "case", "dtype"))
    return Key(family, case, str(row.get("direction") or "forward"), dtype, who)


def _setting(row: Mapping[str, Any]) -> dict[str, str]:
    names = ("device", "commit", "date", "torch", "triton", "version")
    flops = row.get("flops") or row.get("fine_flops")
    return {name: str(row[name]) for name in names if row.get(name)} | ({"flops": str(flops)} if flops else {})


def _clock(row: Mapping[str, Any]) -> float | None:
    power = row.get("power") or {}
    clock = power.get("sm_mhz") if isinstance(power, dict) else None
    return float(clock["median"]) if clock else None


def latest(found: Sequence[Measured], device: str | None = None) -> dict[Key, Measured]:
    """The newest figures of each key; those of the device, if it has any, and of every device if it has none."""
    here = [one for one in found if device is None or one.setting.get("device") == device] or list(found)
    newest: dict[Key, Measured] = {}
    for one in here:
        before = newest.get(one.key)
        if before is None or one.setting.get("date", "") >= before.setting.get("date", ""):
            newest[one.key] = one
    return newest
