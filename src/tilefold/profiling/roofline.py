"""Kernels below the roofs of a machine: points from result files, a picture by matplotlib, a page with its own script."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from tilefold.bench import page
from tilefold.errors import ValueRangeError
from tilefold.plan.device import Device
from tilefold.profiling.roofs import scaled

COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#8250df", "#bf8700", "#0a7a83", "#d4359a", "#57606a")
GREY = "#57606a"
TITLES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "e4m3"}


@dataclass(frozen=True, slots=True)
class Point:
    """One kernel: intensity (FLOPs per byte), rate (FLOP/s), what the hover says; dtype of its products, "" if not known."""

    name: str
    intensity: float
    rate: float
    seconds: float
    detail: str = ""
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """The points of one file."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A machine, whether its roofs were measured, and the runs to draw."""

    device: Device
    measured: bool
    runs: tuple[Run, ...]

    @property
    def slopes(self) -> tuple[tuple[str, float], ...]:
        """Bandwidths (name, bytes/s), the widest first."""
        l2 = self.device.measured_l2_bytes_per_s
        return (*((("L2 to SM", l2),) if l2 else ()), ("DRAM", self.device.dram_rate))

    @property
    def rates(self) -> dict[str, float]:
        """Matrix rates, FLOP/s of each dtype, from one source: all measured here, or all as the device's record has them."""
        return dict(self.device.measured_flops if self.measured else self.device.tensor_flops)

    @property
    def ceilings(self) -> tuple[tuple[str, float], ...]:
        """Matrix rates (dtypes, FLOP/s), the highest first; dtypes within 2 % share a line."""
        lines: list[tuple[str, float]] = []
        for dtype, rate in sorted(self.rates.items(), key=lambda entry: -entry[1]):
            title = TITLES.get(dtype, dtype)
            if lines and rate > 0.98 * lines[-1][1]:
                lines[-1] = (f"{lines[-1][0]}, {title}", lines[-1][1])
            else:
                lines.append((title, rate))
        return tuple(lines)

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """Decimal exponents of the axes (x from, to, y from, to) that hold all points and where roofs meet."""
        points = [point for run in self.runs for point in run.points]
        ridges = [rate / bandwidth for _, rate in self.ceilings for _, bandwidth in self.slopes]
        xs = [*(point.intensity for point in points), min(ridges) / 4, 2 * max(ridges)]
        top = self.ceilings[0][1]
        ys = [*(point.rate for point in points), top, *(() if points else (top / 1e3,))]
        edges = (min(xs), max(xs), min(ys), max(ys))
        left, right, low, high = (math.log10(edge) for edge in edges)
        return left - 0.15, right + 0.15, low - 0.25, high + 0.2


def read_run(path: Path, match: str | None = None) -> Run:
    """The points of a file that `profile --json`, `bench --json` or `--results` wrote. ValueRangeError if it has none."""
    try:
        text = path.read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines() if line] if path.suffix == ".jsonl" else json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueRangeError(f"{path} cannot be read as JSON: {error}") from None
    latest: dict[str, Point] = {}
    for point in _points(rows):
        if match is None or match.lower() in point.name.lower():
            latest[point.name] = point  # a file of results grows: the last of a case is the newest
    if not latest:
        wanted = f" whose name has {match!r}" if match else ""
        raise ValueRangeError(f"{path} has no kernel{wanted} with FLOPs, bytes and a time")
    return Run(path.stem, tuple(latest.values()))


def _points(document: Any) -> Iterator[Point]:
    if isinstance(document, list):
        for row in document:
            yield from _points(row)
    elif isinstance(document, Mapping):
        if document.get("kind") == "profiles":
            yield from _points(document["profiles"])
        elif document.get("kind") == "profile":
            yield from _points(document["points"])
        elif isinstance(document.get("rows"), list):
            yield from _points(document["rows"])
        elif (made := _point(document)) is not None:
            yield made


def _point(row: Mapping[str, Any]) -> Point | None:
    """A row of a profile, or of a benchmark."""
    milliseconds = row.get("ms") if row.get("ms") else (row.get("us") or 0) * 1e-3
    seconds = row.get("seconds") or (milliseconds or 0) * 1e-3
    flops, moved = row.get("flops"), row.get("bytes")
    if not seconds or not flops or not moved:
        return None
    case, who = row.get("case"), row.get("implementation")
    name = row.get("name") or " ".join(str(part) for part in (case, who) if part)
    verdict = f"{row['verdict']}: {row.get('detail', '')}" if isinstance(row.get("verdict"), str) else ""
    return Point(str(name), flops / moved, flops / seconds, float(seconds), verdict, str(row.get("dtype") or ""))


def figure_of(picture: Picture) -> Any:
    """It drawn by matplotlib. Unsupported if matplotlib is not installed."""
    width, height = 10.5, 6.5
    figure = page.new_figure(width, height)
    axes = figure.subplots()
    bounds = picture.bounds
    x0, x1, y0, y1 = (10.0**each for each in bounds)
    axes.set(xscale="log", yscale="log", xlim=(x0, x1), ylim=(y0, y1), xlabel="FLOPs per byte", ylabel="FLOP/s")
    top, widest = picture.ceilings[0][1], picture.slopes[0][1]
    style: dict[str, Any] = {
        "color": GREY,
        "linestyle": "-" if picture.measured else "--",
        "linewidth": 1.3,
        "zorder": 1,
    }
    # inches of a decade along each axis, of a plot that fills about so much of the figure
    rise = math.degrees(math.atan(0.87 * height / (bounds[3] - bounds[2]) / (0.8 * width / (bounds[1] - bounds[0]))))
    for name, bandwidth in picture.slopes:
        axes.plot([x0, top / bandwidth], [x0 * bandwidth, top], **style)
        at = max(x0, y0 / bandwidth) * 10 ** (0.03 * (bounds[1] - bounds[0]))
        label = f"{name} {scaled(bandwidth, 'B/s', 2)}"
        axes.text(at, at * bandwidth * 1.07, label, fontsize=8, color=GREY, rotation=rise, rotation_mode="anchor")
    labels = spread([math.log10(rate) for _, rate in picture.ceilings], (bounds[3] - bounds[2]) * 0.028)
    for (name, rate), place in zip(picture.ceilings, labels, strict=True):
        axes.plot([rate / widest, x1], [rate, rate], **style)
        text = f"{name} {scaled(rate, 'FLOP/s', 0 if rate >= 1e12 else 1)}"
        axes.annotate(text, (x1, 10**place), (4, 0), textcoords="offset points", fontsize=8, color=GREY, va="center")
    for i, run in enumerate(picture.runs):
        xs, ys = [p.intensity for p in run.points], [p.rate for p in run.points]
        axes.scatter(
            xs, ys, s=30, color=COLOURS[i % len(COLOURS)], edgecolor="white", linewidth=0.6, label=run.name, zorder=3
        )
    axes.grid(True, which="major", color="#d0d7de", linewidth=0.5, zorder=0)
    axes.set_title(_title(picture), fontsize=10)
    if picture.runs:
        axes.legend(loc="lower right", fontsize=8)
    return figure


def spread(places: list[float], apart: float) -> list[float]:
    """Places of labels, highest first, each moved down where it would touch the one above."""
    found: list[float] = []
    for place in places:
        found.append(min(place, found[-1] - apart) if found else place)
    return found


def _title(picture: Picture) -> str:
    return f"{picture.device.title}, roofs {'measured here' if picture.measured else 'as recorded'}"


def to_html(picture: Picture) -> str:
    """A page that needs nothing else: the drawing is made by its own script from the data inside."""
    data = {
        "slopes": picture.slopes, "ceilings": picture.ceilings, "bounds": picture.bounds, "measured": picture.measured,
        "rates": picture.rates, "titles": TITLES,
        "runs": [{**asdict(run), "colour": COLOURS[i % len(COLOURS)]} for i, run in enumerate(picture.runs)],
    }  # fmt: skip
    template = resources.files("tilefold.profiling").joinpath("roofline.html").read_text(encoding="utf-8")
    # "<" never stands in the data, so that no name of a kernel can end the script
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return template.replace("@TITLE@", escape(_title(picture))).replace("@DATA@", text)
