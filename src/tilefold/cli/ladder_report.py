"""What `tilefold ladder` found, as tables of at most 80 columns: on the console, as Markdown, drawn."""

from collections.abc import Sequence
from typing import Any

from tilefold.bench.page import Heading, Part, Rows, Words, new_figure, to_markdown
from tilefold.bench.record import number
from tilefold.bench.setting import Setting
from tilefold.ladder.course import Result, Swept
from tilefold.ladder.profile import why

ACROSS = 5  # lengths beside one another in a sweep's table
ERRORS = ("implementation", "max error", "limit", "L2 error", "")


def parts_of(rung: str, results: Sequence[Result], swept: Sequence[Swept], gpu: bool) -> list[Part]:
    """Everything, in order."""
    found = [part for result in results for part in _problem(result, gpu)]
    for dtype in dict.fromkeys(each.problem.dtype for each in swept):
        same = [each for each in swept if each.problem.dtype == dtype]
        for start in range(0, len(same), ACROSS):
            found += _sweep(rung, same[start : start + ACROSS])
    if not gpu:
        found.append(Words("Counted in the interpreter, whose times are no speeds.", "yellow"))
    return found


def markdown(parts: Sequence[Part], setting: Setting, command: str) -> str:
    """For a document: the tables, and below them where, when and by which command they were made."""
    versions = f"torch {setting.torch}, triton {setting.triton}, Python {setting.python}"
    where = f"{setting.device}, {setting.date}, commit {setting.commit}, {versions}: `{command}`."
    return to_markdown([*parts, Words(where)])


def drawn(results: Sequence[Result], gpu: bool) -> Any:
    """A figure of each implementation over the length: milliseconds, in the interpreter MB that are loaded and stored."""
    figure = new_figure(8, 5)
    axes = figure.subplots()
    dtypes = {result.problem.dtype for result in results}
    points: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        own = f", {result.problem.dtype}" if len(dtypes) > 1 else ""
        figures = (
            {line.name: line.ms for line in result.lines}
            if gpu
            else {name: one.bytes / 1e6 for name, one in result.counts.items()}
        )
        for name, value in figures.items():
            points.setdefault(name + own, []).append((result.problem.seq_k, value))
    for name, each in points.items():
        axes.plot(*zip(*sorted(each), strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("keys of a sequence")
    axes.set_ylabel("ms" if gpu else "MB loaded and stored")
    axes.legend()
    return figure


def _problem(result: Result, gpu: bool) -> list[Part]:
    """One problem's tables, what bounds each row, what was wrong and what did not run."""
    p = result.problem
    tokens = f"{p.seq_q} queries, {p.seq_k} keys" if p.seq_q != p.seq_k else f"N={p.seq_k}"
    heads = f"{p.heads} heads" + (f" on {p.kv_heads}" if p.group > 1 else "")
    masks = ", causal" if p.causal else ""
    found: list[Part] = [Heading(f"{tokens}, {heads}, D={p.dim_qk}, batch {p.batch}, {p.dtype}{masks}")]
    if gpu:
        found += [_timed(result), _bounds(result), *(Words(why(one)) for one in result.lines if why(one))]
    else:
        found.append(_counted(result))
    found.append(_errors(result))
    found += [Words(f"{name}: {text}", "yellow") for name, text in result.notes.items()]
    wrong = {name: verdict for name, verdict in result.verdicts.items() if not verdict.ok}
    found += [Words(f"{name} is WRONG: {verdict.words}") for name, verdict in wrong.items()]
    return found if wrong else [*found, Words("all agree with fp64", "green")]


def _timed(result: Result) -> Rows:
    head = ("implementation", "ms", "GB/s", "TFLOP/s", "speed-up", "over SDPA")
    return Rows(head, tuple(
        (one.name, f"{one.ms:.3f}", number(one.gbs, ".0f"), f"{one.tflops:.1f}", f"{one.speedup:.2f}x",
         "" if one.over_torch is None else f"{one.over_torch:.2f}x")
        for one in result.lines
    ))  # fmt: skip


def _bounds(result: Result) -> Rows:
    head = ("implementation", "bound", "of bound", "FLOP/B", "FLOP/B of L2")
    return Rows(head, tuple(
        (one.name, one.bound.resource, number(one.of_bound, ".0%"), number(one.intensity, ".1f"),
         number(one.intensity_l2, ".1f"))
        for one in result.lines if one.bound is not None
    ))  # fmt: skip


def _counted(result: Result) -> Rows:
    """Interpreter: what was loaded, stored and multiplied, beside what is declared."""
    head = ("implementation", "loaded kB", "stored kB", "declared kB", "MFLOP", "declared", "FLOP/B")
    costs = result.costs
    return Rows(head, tuple(
        (name, f"{one.loaded / 1e3:.1f}", f"{one.stored / 1e3:.1f}",
         number(costs[name].l2_bytes / 1e3 if name in costs else None, ".1f"), f"{one.flops / 1e6:.2f}",
         number(costs[name].flops / 1e6 if name in costs else None, ".2f"), f"{one.flops / max(1, one.bytes):.1f}")
        for name, one in result.counts.items()
    ))  # fmt: skip


def _errors(result: Result) -> Rows:
    """From fp64, of the rows that were judged."""
    return Rows(ERRORS, tuple(
        (name, f"{one.max_error:.1e}", f"{one.max_limit:.1e}", f"{one.l2_error:.1e}", "ok" if one.ok else "WRONG")
        for name, one in result.verdicts.items()
    ))  # fmt: skip


def _sweep(rung: str, swept: Sequence[Swept]) -> list[Part]:
    """Tiles down, lengths across; the least of a length in brackets.  Below, why a cell is empty."""
    best = [min((cell for cell in each.cells.values() if isinstance(cell, float)), default=None) for each in swept]
    settings = dict.fromkeys(name for each in swept for name in each.cells)

    def cell(each: Swept, least: float | None, name: str) -> str:
        value = each.cells.get(name, "")
        if isinstance(value, str):
            return "-" if value else ""
        text = f"{value:.{max(0, 3 - max(0, len(str(int(value))) - 1))}f}"  # five characters
        return f"[{text}]" if value == least else text

    rows = tuple(
        (*_setting(name), *(cell(each, least, name) for each, least in zip(swept, best, strict=True)))
        for name in settings
    )
    title = f"{rung}, {swept[0].problem.dtype}: {swept[0].unit} by tile, [least]"
    found: list[Part] = [
        Heading(title),
        Rows(("tile", "warps", "stages", *(f"N={each.problem.seq_k}" for each in swept)), rows),
    ]
    for name in settings:
        why_not = {each.cells[name]: None for each in swept if isinstance(each.cells.get(name), str)}
        found += [Words(f"{name}: {text}", "yellow") for text in why_not]
    return found


def _setting(name: str) -> tuple[str, ...]:
    """A tile's numbers in columns of their own."""
    return tuple(part.removesuffix(" warps").removesuffix(" stages") for part in name.split(", "))
