"""Sweeps of the video pipeline as one table, as records and as a drawing."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilefold.bench import page
from tilefold.bench.attention.crossing import Crossing, crossing_of
from tilefold.bench.record import digits, finite, head, times, version_in
from tilefold.bench.setting import Setting
from tilefold.bench.video.stages import TOTAL, implementations
from tilefold.bench.video.sweep import FINE, SWEEPS, SweepRow
from tilefold.reference import Comparison


def sweeps_of(rows: Sequence[SweepRow]) -> list[list[SweepRow]]:
    """The rows of each sweep, which are tables of their own."""
    return [some for sweep in SWEEPS if (some := [row for row in rows if row.point.sweep == sweep])]


def title_of(rows: Sequence[SweepRow], setting: Setting) -> str:
    """What one sweep's table shows: "sparsity: 23296 tokens, batch 1, 12 heads on 12 KV heads, D=128, bfloat16,
    on NVIDIA H200"."""
    point = rows[0].point
    shape = point.shape
    series = list(dict.fromkeys(row.point.series for row in rows))
    fixed = f"{series[0]}, " if len(series) == 1 else ""
    queries = "" if point.queries is None else f"{point.queries} queries, "
    return (
        f"{point.sweep}: {fixed}{queries}batch {shape.batch}, {shape.heads} heads on {shape.kv_heads} KV heads, "
        f"D={shape.dim}, {shape.dtype}, on {setting.device}"
    )


def table_of(rows: Sequence[SweepRow]) -> page.Rows:
    """One sweep: the swept value; KV blocks that a list keeps, of how many; ms of the fine stage, of all stages one by one, and
    of the whole; what the fine stage computes and draws of K and V a second; of each dense peer its ms and how many times as fast
    the fine stage and the whole are; of each peer over the same lists its ms and how many times as fast the fine stage is."""
    dense = list(dict.fromkeys(name for row in rows for name in row.dense))
    series = list(dict.fromkeys(row.point.series for row in rows))
    unit = SWEEPS[rows[0].point.sweep]
    titles = [
        unit,
        *(["line"] if len(series) > 1 else []),
        "kept",
        "fine ms",
        "stages ms",
        "total ms",
        "TFLOP/s",
        "TB/s",
    ]
    for name in dense:
        titles += [f"{name} ms", "fine", "total"]
    others = list(dict.fromkeys(name for row in rows for name in row.listed_peers))
    for name in others:
        titles += [f"{name} ms", "fine"]
    return page.Rows((*titles, "max error"), tuple(_cells(row, dense, others, len(series) > 1) for row in rows))


def _cells(row: SweepRow, dense: list[str], others: list[str], several: bool) -> tuple[str, ...]:
    fine = row.ms(FINE)
    value = f"{row.value:.1f}" if row.point.sweep == "sparsity" else f"{row.value:.0f}"
    rates = (row.cost.flops, row.cost.l2_bytes)
    cells = [
        value,
        *([row.point.series] if several else []),
        "" if row.failure else row.kept,
        *map(_ms, (fine, row.sum_ms, row.ms(TOTAL))),
    ]
    cells += ["" if not fine else digits(each / fine * 1e-9) for each in rates]
    for name in dense:
        gains = [row.speedup(what, name) for what in (FINE, TOTAL)]
        cells += [_ms(row.ms(name)), *("" if gain is None else times(gain) for gain in gains)]
    for name in others:
        gain = row.speedup(FINE, name)
        cells += [_ms(row.ms(name)), "" if gain is None else times(gain)]
    errors = [f"{v.max_error:.0e}" if v.ok else "WRONG" for n, v in row.verdicts.items() if n in (FINE, TOTAL)]
    return (*cells, ", ".join(errors))


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


def lines_of(rows: Sequence[SweepRow]) -> list[str]:
    """Sentences below the tables: the crossovers, what is missing and why."""
    found = [str(each) for each in overtakes(rows)]
    return [*found, *dict.fromkeys(note for row in rows for note in row.notes)]


@dataclass(frozen=True, slots=True)
class Overtake:
    """From where on a line of a sweep the fine stage, or the whole, is faster than a dense peer."""

    sweep: str
    series: str
    what: str
    dense: str
    crossing: Crossing

    def __str__(self) -> str:
        at, unit = self.crossing, SWEEPS[self.sweep]
        name = "the whole" if self.what == TOTAL else f"the {self.what} stage"
        digits = ".1f" if self.sweep == "sparsity" else ".0f"
        least, most = f"{at.least:{digits}}", f"{at.most:{digits}}"
        if at.sparsity is not None:
            where = f"overtakes {self.dense} at {at.sparsity:{digits}} {unit} (between {least} and {most})"
        elif at.always:
            where = f"is faster than {self.dense} at every point, from {most} {unit} on"
        else:
            where = f"does not overtake {self.dense} up to {least} {unit}"
        return f"{self.series}: {name} {where}"

    def record(self) -> dict[str, Any]:
        """As a document keeps it."""
        at = self.crossing
        most = at.most if at.always or at.sparsity is not None else None
        where = {"value": at.sparsity, "least": None if at.always else at.least, "most": most, "always": at.always}
        return {"sweep": self.sweep, "series": self.series, "what": self.what, "dense": self.dense, **where}


def overtakes(rows: Sequence[SweepRow]) -> list[Overtake]:
    """The crossovers of every line with two points at least, times between points taken as straight lines."""
    lines: dict[tuple[str, str, str, str], list[tuple[float, float, float]]] = {}
    for row in rows:
        for dense in row.dense:
            for what in (FINE, TOTAL):
                mine, other = row.ms(what), row.ms(dense)
                if mine is not None and other is not None:
                    line = (row.point.sweep, row.point.series, what, dense)
                    lines.setdefault(line, []).append((row.value, mine, other))
    found = ((line, crossing_of(points)) for line, points in lines.items())
    return [Overtake(*line, crossing) for line, crossing in found if crossing is not None]


# ---------------------------------------------------------------- documents and data


def record_of(row: SweepRow, setting: Setting) -> dict[str, Any]:
    """A point, of ours and the peers together: setting, point, times in ms, rates of the fine stage, errors beside their
    limits."""
    point, fine = row.point, row.ms(FINE)
    shape = asdict(point.shape)
    timed = [
        one for one in implementations().values() if {f"dense {one.title}", f"lists {one.title}"} & row.timings.keys()
    ]
    return {
        **head(setting, "video", point.name, "forward"),
        "implementation": "tilefold",
        "status": row.status,
        "note": row.notes[0] if row.failure and row.notes else "",
        "sweep": point.sweep,
        "value": row.value,
        **shape,
        "queries": shape["seq"] if point.queries is None else point.queries,
        "sparsity": point.sparsity,
        "page_size": point.page_size,
        "density": row.density,
        "kept": row.kept,
        "ms": {name: timing.ms for name, timing in row.timings.items()},
        "rounds_ms": {name: list(timing.values) for name, timing in row.timings.items()},
        "spread": {name: (timing.low, timing.high) for name, timing in row.timings.items()},
        "stages_ms": row.sum_ms,
        "fine_flops": row.cost.flops,
        "fine_l2_bytes": row.cost.l2_bytes,
        "fine_tflops": row.cost.flops / fine * 1e-9 if fine else None,
        "speedup": {name: {what: row.speedup(what, name) for what in (FINE, TOTAL)} for name in row.dense}
        | {name: {FINE: row.speedup(FINE, name)} for name in row.listed_peers},
        "errors": {name: _error(verdict) for name, verdict in row.verdicts.items()},
        "notes": row.notes,
        "versions": {each.title: version_in(each.package, setting) for each in timed},
        "tilefold": setting.tilefold,
        "torch": setting.torch,
        "triton": setting.triton,
        "python": setting.python,
    }  # fmt: skip


def _error(verdict: Comparison) -> dict[str, Any]:
    return {
        "ok": verdict.ok,
        "max_abs": finite(verdict.max_error),
        "max_abs_limit": finite(verdict.max_limit),
        "relative_l2": finite(verdict.l2_error),
    }


def findings(rows: Sequence[SweepRow]) -> dict[str, Any]:
    """{"lines", "overtakes"}: what a document says of all rows together."""
    return {"lines": lines_of(rows), "overtakes": [each.record() for each in overtakes(rows)]}


def to_html(rows: Sequence[SweepRow], setting: Setting) -> str:
    """Tables, sentences and the drawing as one document."""
    parts: list[page.Words | page.Rows | page.Picture] = []
    for some in sweeps_of(rows):
        parts += [page.Words(title_of(some, setting)), table_of(some)]
    parts += [page.Words(line) for line in lines_of(rows)]
    where = f"{setting.date}, tilefold {setting.commit}, torch {setting.torch}, triton {setting.triton}"
    return page.to_html("sparse video attention", [*parts, page.Words(where), picture_of(rows)])


def picture_of(rows: Sequence[SweepRow]) -> page.Picture:
    """Times over the swept value, one drawing a sweep: ours solid (fine) and dashed (the whole), dense dotted."""
    sweeps = sweeps_of(rows)
    figure = page.new_figure(9, 4.5 * max(1, len(sweeps)))
    for axes, some in zip(figure.subplots(max(1, len(sweeps)), 1, squeeze=False)[:, 0], sweeps, strict=False):
        series = list(dict.fromkeys(row.point.series for row in some))
        for number, line in enumerate(series):
            mine = sorted((row for row in some if row.point.series == line), key=lambda row: row.value)
            dense = dict.fromkeys(name for row in mine for name in row.dense)
            styles = {FINE: "-o", TOTAL: "--s", **dict.fromkeys(dense, ":^")}
            for which, (name, style) in enumerate(styles.items()):
                points = [(row.value, ms) for row in mine if (ms := row.ms(name))]
                title = {FINE: "fine", TOTAL: "total"}.get(name, name)
                colour = f"C{number}" if name in (FINE, TOTAL) else f"C{len(series) + which - 2}"
                # Dense times of several lines are the same measurement again: one entry in the legend is enough.
                label = f"{title}, {line}" if name in (FINE, TOTAL) else title if not number else None
                axes.plot(
                    *zip(*points, strict=True) if points else ((), ()), style, color=colour, label=label, markersize=4
                )
        axes.set_yscale("log")
        if some[0].point.sweep != "sparsity":
            axes.set_xscale("log", base=2)
            tokens = sorted({int(row.value) for row in some})
            axes.set_xticks(tokens, [str(each) for each in tokens])
        axes.set_xlabel(SWEEPS[some[0].point.sweep])
        axes.set_ylabel("ms")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return page.Picture(
        figure, "Time of the fine stage, of the whole pipeline and of dense attention over the swept value."
    )
