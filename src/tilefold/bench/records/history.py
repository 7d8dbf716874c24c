"""Results files over time: what each case took at each commit on each device, as a table and as pictures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilefold.bench.attention.grid import title_of
from tilefold.bench.page import Rows, new_figure, save_png
from tilefold.bench.records.changes import CONFIDENCE, ratio_interval, verdict_of
from tilefold.bench.records.record import digits
from tilefold.bench.records.runs import Key, Measured

__all__ = ["Mark", "Series", "draw", "history_table", "median_interval", "series_of"]

PANELS, COLUMNS = 12, 3  # of a picture: more cases go into further ones
PANEL = (4.5, 2.5)  # inches
LABELS = 5  # of runs below a panel
OURS_COLOUR = "#0b5394"
COLOURS = ("#c55a11", "#38761d", "#7b3f9e", "#8a6d00", "#b3245b", "#4a7f8c", "#7f6000", "#666666")
BAD = "#cc0000"
CAPTION = "median of the rounds, and its interval by order statistics (all rounds where they are few); lower is faster"


@dataclass(frozen=True, slots=True)
class Mark:
    """One run of one case.  ms: its median, None if it failed; low, high: its interval.  rough: values are percentiles."""

    date: str
    commit: str
    status: str
    ms: float | None
    low: float
    high: float
    values: tuple[float, ...]
    rough: bool = False

    @property
    def label(self) -> str:
        """The commit and the day with its time."""
        return f"{self.commit[:7]}{'+' if self.commit.endswith('+') else ''}\n{self.date[5:16].replace('T', ' ')}"


@dataclass(frozen=True, slots=True)
class Series:
    """All runs of one implementation on one case, by one method, on one device, oldest first."""

    device: str
    key: Key
    method: str
    ours: bool
    marks: tuple[Mark, ...]

    @property
    def case(self) -> str:
        """The case, with its dtype where that is not the usual one and its name does not say it."""
        dtype = self.key.dtype
        said = dtype in ("", "bfloat16") or dtype in self.key.case
        return self.key.case + ("" if said else f" {dtype}")

    @property
    def timed(self) -> list[Mark]:
        return [mark for mark in self.marks if mark.ms is not None]


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Where the median of what was sampled lies, by order statistics; all samples where they are too few for the confidence."""
    ordered, count = sorted(values), len(values)
    rank, below = 0, 0
    while 2 * (below + math.comb(count, rank)) <= (1 - confidence) * 2**count and 2 * (rank + 1) <= count:
        below += math.comb(count, rank)
        rank += 1
    rank = max(1, rank)
    return ordered[rank - 1], ordered[-rank]


def series_of(found: Sequence[Measured], methods: Sequence[str], peers: bool = False) -> list[Series]:
    """The series of tilefold's rows, with peers of all, that have a time by the first of the methods that they have at all."""
    grouped: dict[tuple[str, Key], list[Measured]] = {}
    for one in found:
        if one.ours or peers:
            grouped.setdefault((one.setting.get("device", "unknown"), one.key), []).append(one)
    made = []
    for (device, key), runs in grouped.items():
        method = next((m for m in methods if any(m in run.times for run in runs)), None)
        if method is None:
            continue
        runs.sort(key=lambda run: run.setting.get("date", ""))
        made.append(Series(device, key, method, runs[0].ours, tuple(_mark(run, method) for run in runs)))
    return made


def _mark(run: Measured, method: str) -> Mark:
    values = tuple(run.times.get(method, ())) if run.status == "ok" else ()
    low, high = median_interval(values) if values else (0.0, 0.0)
    date, commit = (run.setting.get(name, "") for name in ("date", "commit"))
    return Mark(date, commit, run.status, run.ms(method) if values else None, low, high, values, run.rough)


def history_table(series: Sequence[Series], noise: float) -> Rows:
    """A line a case and implementation: runs, the first, the best and the latest time, and the latest over the first."""
    head = (
        "case",
        "implementation",
        "by",
        "runs",
        "first ms",
        "best ms",
        "latest ms",
        "latest / first",
        "interval",
        "",
    )
    lines = []
    for one in series:
        timed = one.timed
        if not timed:
            continue
        first, last = timed[0], timed[-1]
        row = [one.case, title_of(one.key.implementation), one.method, str(len(one.marks)), digits(first.ms or 0.0)]
        row += [digits(min(mark.ms or math.inf for mark in timed)), digits(last.ms or 0.0)]
        if len(timed) > 1:
            interval = ratio_interval(first.values, last.values)
            rough = "~ " if first.rough or last.rough else ""
            row += [f"{(last.ms or 0.0) / (first.ms or 1.0):.3f}", f"{rough}{interval.low:.3f} to {interval.high:.3f}"]
            row.append(verdict_of(interval, noise))
        else:
            row += ["", "", ""]
        if one.marks[-1].ms is None:
            row[-1] = f"{one.marks[-1].status} since {one.marks[-1].commit[:7]}"
        lines.append(tuple(row))
    return Rows(head, tuple(lines))


# --- pictures ---------------------------------------------------------------------------------------------------------------


def draw(series: Sequence[Series], path: Path, note: str = "") -> list[Path]:
    """A panel a case, a picture for each device and family, and further ones where a dozen panels do not do; the files made: the
    first is the path itself, further ones are FILE-DEVICE-FAMILY-NUMBER.

    note: stands in every title.  Unsupported if matplotlib is not installed."""
    pages: list[tuple[list[str], list[list[Series]]]] = []
    groups: dict[tuple[str, str], dict[tuple[str, str, str], list[Series]]] = {}
    for one in series:
        if one.timed:
            cases = groups.setdefault((one.device, one.key.family), {})
            cases.setdefault((one.key.case, one.key.dtype, one.method), []).append(one)
    for (device, family), cases in groups.items():
        panels = list(cases.values())
        for start in range(0, len(panels), PANELS):
            number = [str(start // PANELS + 1)] if len(panels) > PANELS else []
            pages.append(([device, family, *number], panels[start : start + PANELS]))
    made: list[Path] = []
    for words, panels in pages:
        own = "-".join("".join(c if c.isalnum() else "-" for c in word) for word in words)
        file = path if not made else path.with_name(f"{path.stem}-{own}{path.suffix}")
        save_png(_page(words, panels, note), file)
        made.append(file)
    return made


def _page(words: Sequence[str], panels: Sequence[Sequence[Series]], note: str) -> Any:
    """One picture."""
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure: Any = new_figure(max(PANEL[0] * columns, 7.5), PANEL[1] * rows + 1.1)
    whole = figure.subplots(rows, columns, squeeze=False)
    runs = sorted({(m.date, m.commit, m.label) for panel in panels for one in panel for m in one.marks})
    places = {run[:2]: turn for turn, run in enumerate(runs)}
    names = list(dict.fromkeys(one.key.implementation for panel in panels for one in panel if not one.ours))
    colours = {name: COLOURS[turn % len(COLOURS)] for turn, name in enumerate(names)}
    for turn, axes in enumerate(whole.flat):
        if turn >= len(panels):
            axes.set_visible(False)
            continue
        _panel(axes, panels[turn], places, colours)
        step = -(-len(runs) // LABELS)
        axes.set_xticks(range(0, len(runs), step), [run[2] for run in runs[::step]], fontsize=8)
        axes.set_xlim(-0.4, len(runs) - 0.6)
    page = f" ({words[2]})" if len(words) > 2 else ""
    figure.suptitle(f"{words[1]} on {words[0]}{page}{f', {note}' if note else ''}\n{CAPTION}", fontsize=11)
    handles = {
        text: handle for axes in figure.axes for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    order = sorted(handles, key=lambda text: text != title_of("tilefold"))
    figure.legend(
        [handles[text] for text in order], order, loc="outside lower center", ncols=6, fontsize=9, frameon=False
    )
    return figure


def _panel(axes: Any, some: Sequence[Series], places: dict[tuple[str, str], int], colours: dict[str, str]) -> None:
    """One case: tilefold in front, each run's median with its interval, a cross where a run of tilefold has none."""
    highest = max(mark.high for one in some for mark in one.timed)
    scale, unit = (1.0, "ms") if highest >= 1 else (1e3, "us")
    for one in sorted(some, key=lambda each: each.ours):
        plain = one.key.implementation == "tilefold"
        colour = OURS_COLOUR if plain else colours.get(one.key.implementation, "#5b8db8")
        at = [places[mark.date, mark.commit] for mark in one.marks]
        middle = [
            math.nan if mark.ms is None else mark.ms * scale for mark in one.marks
        ]  # a line breaks where a run failed
        below = [m - mark.low * scale for m, mark in zip(middle, one.marks, strict=True)]
        above = [mark.high * scale - m for m, mark in zip(middle, one.marks, strict=True)]
        axes.errorbar(
            at, middle, [below, above], color=colour, marker="o" if plain else ".", markersize=5, capsize=3,
            linewidth=1.8 if plain else 1.0, label=title_of(one.key.implementation), zorder=3 if plain else 2,
        )  # fmt: skip
        failed = [places[mark.date, mark.commit] for mark in one.marks if mark.status in ("WRONG", "failed")]
        if failed:
            axes.plot(
                failed, [0.06] * len(failed), "x", color=BAD, markersize=9, markeredgewidth=2,
                transform=axes.get_xaxis_transform(), label="wrong or failed", zorder=4,
            )  # fmt: skip
    low, high = axes.get_ylim()
    room = max(0.0, 0.1 * high - (high - low))  # a tenth at least: noise must not fill a panel
    axes.set_ylim(low - room / 2, high + room / 2)
    axes.set_title(f"{some[0].case}, {some[0].method}", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
