"""Plans that `tilefold tune` measured on a device, read from a file and preferred to the rules for exactly their problems.

The only thing beside problem and device that a plan depends on.  The file is read once a process, when the first plan is made;
a call that is made again asks nobody."""

import importlib.util
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tilefold.errors import TilefoldError, ValueRangeError
from tilefold.plan.device import Device

VARIABLE, OFF = "TILEFOLD_TUNED", "none"
"""Environment variable: a table's file, a folder of `<device>.json`, or "none" for the rules alone."""
FORMAT = 1
KINDS = ("attention", "decode", "matmul")
RULE = "measured here"


@dataclass(frozen=True, slots=True)
class Entry:
    """One problem of a kind whose measured plan was faster than the rules'.

    name: for people.  problem: the problem's fields.  plan: the fields that make the plan (tile, kernel, cut), as the rules' plan
    is changed by; instead_of: those fields as the rules had them.  planned_us, tuned_us: microseconds of both, measured in
    turns.  tried: candidates that were right and timed.  date: ISO."""

    kind: str
    name: str
    problem: Mapping[str, Any]
    plan: Mapping[str, Any]
    instead_of: Mapping[str, Any]
    planned_us: float
    tuned_us: float
    tried: int
    date: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueRangeError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name, kind in (
            ("name", str),
            ("problem", dict),
            ("plan", dict),
            ("instead_of", dict),
            ("tried", int),
            ("date", str),
        ):
            if type(getattr(self, name)) is not kind:
                raise ValueRangeError(f"{name} must be of type {kind.__name__}, got {getattr(self, name)!r}")
        for name in ("planned_us", "tuned_us"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise ValueRangeError(f"{name} must be a time in microseconds, got {value!r}")

    @property
    def key(self) -> str:
        """What a plan looks it up by."""
        return key_of(self.kind, self.problem)

    @property
    def gain(self) -> float:
        """How many times as fast as the rules' plan."""
        return self.planned_us / self.tuned_us


@dataclass(frozen=True, slots=True)
class Table:
    """device: the short name of its record; title: as the driver calls it.  triton, torch: versions.  tilefold: the commit, or
    the version.  entries: at most one a problem."""

    device: str
    title: str
    triton: str
    torch: str
    tilefold: str
    entries: tuple[Entry, ...]
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueRangeError(f"format must be {FORMAT}, got {self.format!r}")
        for name in ("device", "title", "triton", "torch", "tilefold"):
            if type(getattr(self, name)) is not str:
                raise ValueRangeError(f"{name} must be a string, got {getattr(self, name)!r}")

    def evidence(self, entry: Entry) -> str:
        """What was measured, as a sentence."""
        return (
            f"Measured {entry.date[:10]} on {self.title} (torch {self.torch}, triton {self.triton}, tilefold {self.tilefold}): "
            f"{entry.tuned_us:.2f} us, the rules' plan {entry.planned_us:.2f} us in the same turns; best of {entry.tried} tried."
        )


class _Plan(Protocol):
    @property
    def problem(self) -> Any: ...

    @property
    def device(self) -> Device: ...


PlanKind = TypeVar("PlanKind", bound=_Plan)


def measured(kind: str, ruled: PlanKind, follow: Callable[[PlanKind, dict[str, Any], str], PlanKind]) -> PlanKind:
    """The plan that the table has for a problem, else the rules' plan.

    follow: (the rules' plan, fields of the entry, evidence) -> the plan; if it raises, the rules' plan stays, with a warning."""
    found = _in_use(ruled.device)
    if found is None:
        return ruled
    path, table, entries = found
    entry = entries.get(key_of(kind, ruled.problem))
    if entry is None:
        return ruled
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.plan.items()}
    try:
        return follow(ruled, fields, table.evidence(entry))
    except (TilefoldError, TypeError, ValueError) as error:
        _warn(path, f"a plan of it does not fit: {error}")
        return ruled


def in_use(device: Device) -> bool:
    """Whether plans of this device are looked up in a table, which has single problems."""
    return _in_use(device) is not None


def key_of(kind: str, problem: Any) -> str:
    """What is the same of two problems exactly if one plan serves both alike: their fields, without what changes no launch."""
    fields = json.loads(json.dumps(asdict(problem) if is_dataclass(problem) else problem))  # type: ignore[arg-type]
    attention = fields.get("attention")
    for each in (fields, attention):
        if isinstance(each, dict) and not each.get("mean_q"):
            each.pop("mean_q", None)  # as tables have it that were written before there was one
    if kind == "decode" and isinstance(attention, dict):
        if attention.get("seq_q") == 1:  # the only query is the last key's: it sees every key before it
            attention["causal"], attention["window"] = False, [attention.get("window", [-1])[0], -1]
        if attention.get("batch") == 1:
            fields["equal"] = True
    return f"{kind} {json.dumps(fields, sort_keys=True)}"


# ---------------------------------------------------------------- the file


def table_path(device: str, chosen: Path | None = None) -> Path | None:
    """The file of a device's table: `chosen`, else what TILEFOLD_TUNED says, else tilefold/tuned in the user's cache; None if
    tables are switched off."""
    if chosen is None:
        asked = os.environ.get(VARIABLE, "")
        if asked == OFF:
            return None
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        chosen = Path(asked) if asked else home / "tilefold" / "tuned"
        if not asked:
            return chosen / f"{device}.json"
    return chosen / f"{device}.json" if chosen.is_dir() else chosen


def read_table(path: Path) -> Table:
    """The table of a file.  OSError if it cannot be read; ValueRangeError, saying what is wrong, if it is no table."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        fields = json.loads(text)
        return Table(**{**fields, "entries": tuple(Entry(**each) for each in fields["entries"])})
    except ValueRangeError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise ValueRangeError(f"it is no table of `tilefold tune`: {type(error).__name__}: {error}") from None


def write_table(path: Path, table: Table) -> None:
    """Write a file that `read_table` reads, at once or not at all; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(asdict(table), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


def why_unusable(table: Table, device: Device) -> str:
    """Why the rules decide for a device all the same, or "" if the table does."""
    if table.device != device.name:
        return f"it was measured on {table.device}, plans are asked for {device.name}"
    here = triton_here()
    if _minor(table.triton) != _minor(here):
        return (
            f"it was measured with triton {table.triton}, {f'triton {here}' if here else 'no triton'} is installed here"
        )
    return ""


def triton_here() -> str:
    """Triton's version, "" without Triton; it is not imported for that."""
    if "triton" in sys.modules:
        return str(getattr(sys.modules["triton"], "__version__", ""))
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return ""
    found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", Path(spec.origin).read_text(encoding="utf-8"), re.MULTILINE)
    return found.group(1) if found else ""


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


# ---------------------------------------------------------------- of this process

Found = tuple[Path, Table, dict[str, Entry]]
_FOUND: dict[str, Found | None] = {}
_SAID: set[str] = set()


def _in_use(device: Device) -> Found | None:
    if device.name not in _FOUND:
        _FOUND[device.name] = _load(device)
    return _FOUND[device.name]


def _load(device: Device) -> Found | None:
    path = table_path(device.name)
    if path is None or (not path.exists() and not os.environ.get(VARIABLE)):
        return None
    try:
        table = read_table(path)
    except (OSError, ValueRangeError) as error:
        _warn(path, str(error))
        return None
    if why := why_unusable(table, device):
        _warn(path, why)
        return None
    return path, table, {entry.key: entry for entry in table.entries}


def _warn(path: Path, why: str) -> None:
    """Once a file and process."""
    if str(path) not in _SAID:
        _SAID.add(str(path))
        warnings.warn(f"the table of measured plans {path} is not used: {why}; the rules decide", stacklevel=2)


def table_in_use(device: Device) -> tuple[Path, Table] | None:
    """The file and table that plans for a device are made with in this process, or None."""
    found = _in_use(device)
    return None if found is None else found[:2]


def reset() -> None:
    """Forget what was read, so that the next plan reads again; plans that were made stay in their functions' caches."""
    _FOUND.clear()
    _SAID.clear()
