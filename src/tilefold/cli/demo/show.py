"""The report on a terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tilefold.cli.demo import judge
from tilefold.cli.demo.options import Check, Stage
from tilefold.cli.demo.report import Report, Variant, links, shape_of

__all__ = ["heading", "report"]


def heading() -> Panel:
    """What will happen, before anything runs."""
    return Panel(
        "A trained sentence encoder embeds real sentences. Its attention layers run through tilefold; every layer is "
        "compared with fp64, the embeddings and the nearest-sentence ranking with PyTorch.",
        title="tilefold demo",
        title_align="left",
        border_style="blue",
    )


def report(found: Report, files: Sequence[Path], stages: Sequence[Stage], console: Console) -> None:
    """Print everything, the verdict last."""
    console.print(_section("Environment"), _pairs(found.environment))
    tokens = sum(found.lengths)
    console.print(
        f"\n{len(found.sentences)} sentences, {min(found.lengths)} to {max(found.lengths)} tokens, {tokens} in all"
    )
    for variant in found.variants:
        console.print(_section(f"tilefold.{variant.function}: {variant.note} ({shape_of(variant.plans)})"))
        console.print(Text(str(variant.plans[-1]), style="dim"), soft_wrap=True)
        console.print(_layers(variant))
    console.print(_section("Nearest sentences"), _nearest(found))
    console.print(_section(f"Layer {found.head.layer}, head {found.head.head}: what its words look at"), _links(found))
    console.print(_section("Time"), _times(stages))
    console.print(_section("Checks"), _checks(found.checks))
    console.print()
    for path in files:
        console.print(Text(f"wrote {path}"), soft_wrap=True)
    total = sum(stage.seconds for stage in stages)
    if found.ok:
        console.print(Text(f"All {len(found.checks)} checks hold. {total:.0f} s.", style="bold green"))
    else:
        wrong = sum(not check.ok for check in found.checks)
        console.print(Text(f"{wrong} of {len(found.checks)} checks FAILED. {total:.0f} s.", style="bold red"))


def _section(title: str) -> Text:
    return Text(f"\n{title}", style="bold blue")


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _layers(variant: Variant) -> Group:
    """Every layer's error against fp64 beside its limit."""
    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "max err", "limit", "rel. L2", "limit", "lse err", "limit", "ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for layer in variant.layers:
        figures = (
            layer.out.max_error,
            layer.out.max_limit,
            layer.out.l2_error,
            layer.out.l2_limit,
            layer.lse.max_error,
            layer.lse.max_limit,
        )
        verdict = Text("ok", style="green") if layer.ok else Text("WRONG", style="bold red")
        table.add_row(str(layer.layer), *(f"{x:.1e}" for x in figures), _ms(layer.seconds), verdict)
    note = "Limit: some of an element's standard deviations on the same q, k, v, plus its rounding; shown is the worst element."
    return Group(Text(), table, Text(note, style="dim"))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.2f}"


def _nearest(found: Report) -> Table:
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("sentence", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("nearest", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("cosine", justify="right", min_width=6)
    for sentence, (j, cosine) in zip(found.sentences, judge.nearest(found.ranking), strict=True):
        other = found.sentences[j]
        style = "" if other.topic == sentence.topic else "yellow"
        table.add_row(Text(sentence.text), Text(other.text, style=style), f"{cosine:.3f}")
    return table


def _links(found: Report) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for query, key, p in links(found.head, 4):
        table.add_row(Text(query), "->", Text(key), f"{p:.0%}", Text("█" * round(20 * p), style="blue"))
    return table


def _times(stages: Sequence[Stage]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for stage in stages:
        table.add_row(stage.name, f"{stage.seconds:.2f} s")
    return table


def _checks(checks: Sequence[Check]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        verdict = Text("ok", style="green") if check.ok else Text("FAILED", style="bold red")
        table.add_row(verdict, Group(Text(check.name), Text(check.detail, style="dim")))
    return table
