"""`tilefold bench`: the library beside others on named cases, every output checked before it is timed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from tilefold.cli.runtime import Runtime, dtype_named, prepare_runtime, user_errors, writable
from tilefold.errors import ValueRangeError

if TYPE_CHECKING:
    from tilefold.bench.cases import Case
    from tilefold.bench.peers import Implementation
    from tilefold.bench.run import Cell, Options, Setting

__all__ = ["EPILOG", "bench"]

EPILOG = """
**Examples**

    tilefold bench dense --quick

    tilefold bench dense --peers cudnn,flash --case d128,causal --markdown dense.md

    tilefold bench dense --host --graph --csv dense.csv --json dense.json --results benchmarks/results

**Peers**: cudnn, flash (FlashAttention-2), efficient and math are backends of torch's scaled_dot_product_attention; flex is
FlexAttention, compiled; fa4 is flash_attn.cute, if installed; none measures tilefold alone.

**Method**: all implementations get the same normally distributed inputs. Each output is compared with fp64 on sampled rows; a
wrong one is reported and not timed. Times are medians between GPU events with a cold L2 cache, taken in rounds whose order
alternates. Exit code 1 if an output of tilefold is wrong.
"""


@user_errors
def bench(
    family: Annotated[str, typer.Argument(help="Which cases: `dense`.")],
    quick: Annotated[bool, typer.Option("--quick", help="Few and small cases (tiny ones in the interpreter).")] = False,
    peers: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Comma-separated, or `none`.", show_default="those usual here")
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(metavar="FILTER", help="Only cases whose name has these comma-separated parts, as d128,causal."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    host: Annotated[bool, typer.Option("--host", help="Measure the host cost of a call, too.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Measure CUDA-graph replays, too (GPU).")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each implementation gets.")] = 5,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as CSV.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table for a document.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Append the figures to DIR/FAMILY.jsonl, which is never rewritten."),
    ] = None,
) -> None:
    """Time tilefold and other libraries on named cases, each output checked before it is timed."""
    for path, name in ((csv, "--csv"), (json, "--json"), (markdown, "--markdown")):
        writable(path, name)
    runtime = prepare_runtime()
    from tilefold.bench.run import Options, setting_of

    cases = chosen_cases(family, quick, case, dtype_named(dtype), runtime)
    implementations = chosen_peers(peers, runtime)
    console = Console()
    setting = setting_of(runtime.device)
    console.print(
        Text(f"{runtime.note}\ntorch {setting.torch}, triton {setting.triton}, commit {setting.commit}", style="dim")
    )
    options = Options(rounds=rounds if runtime.gpu else min(rounds, 2), host=host, graph=graph)
    cells = measure(cases, implementations, runtime, options, console)
    show(cells, setting, runtime, host or graph, console)
    write(cells, setting, {"csv": csv, "json": json, "markdown": markdown}, results, console)
    if any(cell.implementation == "tilefold" and cell.status in ("WRONG", "failed") for cell in cells):
        raise typer.Exit(1)


def chosen_cases(family: str, quick: bool, pattern: str | None, dtype: str, runtime: Runtime) -> "tuple[Case, ...]":
    """The cases that the options name. Raises ValueRangeError for full sizes in the interpreter, which would take days."""
    from tilefold.bench.cases import cases_of, select_cases

    if not quick and not runtime.gpu:
        cases_of(family)
        raise ValueRangeError(
            f"the full cases of {family!r} need a GPU: in the interpreter they would take days. Add --quick"
        )
    size = "full" if not quick else "quick" if runtime.gpu else "tiny"
    return select_cases(cases_of(family, size, dtype), pattern)


def chosen_peers(peers: str | None, runtime: Runtime) -> "tuple[Implementation, ...]":
    """tilefold and the peers that the option names, or those usual on this machine."""
    from tilefold.bench.peers import DEFAULT_PEERS, implementations_named

    if peers is None:
        return implementations_named(DEFAULT_PEERS[runtime.device])
    return implementations_named(tuple(name.strip().lower() for name in peers.split(",") if name.strip()))


def measure(
    cases: "tuple[Case, ...]",
    implementations: "tuple[Implementation, ...]",
    runtime: Runtime,
    options: "Options",
    console: Console,
) -> "list[Cell]":
    """Run the cases under a progress bar."""
    from tilefold.bench.run import run_cases

    columns = (
        TextColumn("measuring"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases) * (len(implementations) + 1))

        def step(case: "Case", what: str) -> None:
            progress.update(task, description=f"{case.name}: {what}")
            progress.advance(task)

        return run_cases(cases, implementations, runtime.device, options, step)


def show(cells: "list[Cell]", setting: "Setting", runtime: Runtime, details: bool, console: Console) -> None:
    """Print the tables and the notes."""
    from tilefold.bench import report

    console.print(Text(report.heading_of(cells, setting), style="bold"))
    console.print()
    for table in report.speed_tables(cells, console.width):
        console.print(table)
        console.print()
    if report.geometric_means(cells):
        console.print(Text("1.20x: tilefold takes 1 / 1.20 of that library's time", style="dim"))
    if details or not runtime.gpu:
        console.print()
        console.print(report.detail_table(cells))
        console.print()
    for note in report.notes_of(cells):
        console.print(Text(note, style="red" if "WRONG" in note or "failed" in note else "dim"), soft_wrap=True)
    if not runtime.gpu:
        console.print(
            Text(
                "Times in the interpreter say nothing about a GPU; the outputs were checked all the same.",
                style="yellow",
            )
        )


def write(
    cells: "list[Cell]", setting: "Setting", files: dict[str, Path | None], results: Path | None, console: Console
) -> None:
    """Write the files that were asked for and say so."""
    from tilefold.bench import report

    texts = {"csv": report.to_csv, "json": report.to_json, "markdown": report.to_markdown}
    for kind, path in files.items():
        if path is not None:
            path.write_text(texts[kind](cells, setting), encoding="utf-8")
            console.print(Text(f"wrote {path}", style="dim"), soft_wrap=True)
    if results is not None:
        path = report.append_results(results, cells, setting)
        console.print(Text(f"appended {len(cells)} rows to {path}", style="dim"), soft_wrap=True)
