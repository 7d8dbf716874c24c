"""`tilefold bench`: the library beside others on named cases, every output checked before it is timed."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from tilefold.cli.bench_family import EPILOGS, FAMILIES, family_command
from tilefold.cli.bench_parallel import EPILOG as PARALLEL_EPILOG
from tilefold.cli.bench_parallel import parallel
from tilefold.cli.bench_startup import EPILOG as STARTUP_EPILOG
from tilefold.cli.bench_startup import startup
from tilefold.cli.bench_video import EPILOG as VIDEO_EPILOG
from tilefold.cli.bench_video import video
from tilefold.cli.progress import measuring
from tilefold.cli.runtime import Runtime, dtype_named, prepare_runtime, user_errors, writable
from tilefold.errors import ValueRangeError

if TYPE_CHECKING:
    from tilefold.bench.cases import Case
    from tilefold.bench.implementation import Implementation
    from tilefold.bench.run import Cell, Options, Setting

__all__ = ["EPILOG", "app", "bench"]

DETAIL_WIDTH = 130  # names of sparse cases are long; a narrow terminal wraps their lines rather than cut figures

EPILOG = """
**Examples**

    tilefold bench dense --quick

    tilefold bench dense --peers cudnn,flash --case d128,causal --markdown dense.md

    tilefold bench dense --host --graph --csv dense.csv --json dense.json --results benchmarks/results

    tilefold bench sparse --direction both --case "random_s80|video" --peers bsa,tk,cudnn --results benchmarks/results

    tilefold bench video --sweep length --peers cudnn,fa4

    tilefold bench startup

**Peers**: cudnn, flash (FlashAttention-2), efficient and math are backends of torch's scaled_dot_product_attention; flex is
FlexAttention, compiled; fa4 is flash_attn.cute, if installed; none measures tilefold alone. For sparse also bsa (cuDNN
block-sparse), tk and fastvideo (fastvideo-kernel's ThunderKittens and Triton), if installed, and portable (tilefold's own
portable kernel, where the plan takes another one); for gradients of dense attention also any-order (tilefold with
deterministic=False, where another kernel makes them then). Peers that know no lists compute every pair, and are judged by that.

**Method**: all implementations get the same normally distributed inputs. Each output is compared with fp64 on sampled rows; a
wrong one is reported and not timed. Times are medians between GPU events with a cold L2 cache, taken in rounds whose order
alternates. Backward, the gradients of q, k and v are computed over a graph that is kept. Rates of sparse cases count the listed
blocks only, dense peers' too. Exit code 1 if a result of tilefold is wrong.
"""


app = typer.Typer(
    no_args_is_help=True, epilog=EPILOG, help="Time tilefold and other libraries, each output checked first."
)


@user_errors
def bench(
    family: str,
    quick: Annotated[bool, typer.Option("--quick", help="Few and small cases (tiny ones in the interpreter).")] = False,
    peers: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Comma-separated, or `none`.", show_default="those usual here")
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(
            metavar="FILTER",
            help="Only cases whose name has these comma-separated parts, as d128,causal; | separates alternatives.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    direction: Annotated[str, typer.Option(help="forward, backward or both.")] = "forward",
    host: Annotated[bool, typer.Option("--host", help="Measure the host cost of a call, too.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Measure CUDA-graph replays, too (GPU).")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each implementation gets.")] = 5,
    budget: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Begin no further case after so long.")
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="A line for each step, to see where a run got stuck.")] = False,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as CSV.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table for a document.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Append the figures of each case, when it is done, to DIR/FAMILY.jsonl."),
    ] = None,
) -> None:
    """Time the cases of a family, "dense" or "sparse", and write what was asked for."""
    for path, name in ((csv, "--csv"), (json, "--json"), (markdown, "--markdown")):
        writable(path, name)
    runtime = prepare_runtime()
    from tilefold.bench.grid import is_ours
    from tilefold.bench.report import append_results
    from tilefold.bench.run import Options, setting_of

    cases = chosen_cases(family, quick, case, (dtype_named(dtype), direction), runtime)
    implementations = chosen_peers(family, peers, runtime)
    console = Console()
    setting = setting_of(runtime.device)
    console.print(
        Text(f"{runtime.note}\ntorch {setting.torch}, triton {setting.triton}, commit {setting.commit}", style="dim")
    )
    options = Options(rounds=rounds if runtime.gpu else min(rounds, 2), host=host, graph=graph, budget_s=budget)

    def keep(done: "list[Cell]") -> None:
        if results is not None:
            append_results(results, done, setting)

    cells = measure(cases, implementations, runtime, options, keep, console, log)
    if not cells:
        return
    show(cells, setting, runtime, host or graph, console)
    write(cells, setting, {"csv": csv, "json": json, "markdown": markdown}, results, console)
    if any(is_ours(cell.implementation) and cell.status in ("WRONG", "failed") for cell in cells):
        raise typer.Exit(1)


def of_family(family: str, help_text: str) -> Callable[..., None]:
    """`bench` as the command of one family: its options without the first argument."""

    @functools.wraps(bench)
    def command(**options: Any) -> None:
        bench(family, **options)

    parameters = inspect.signature(bench).parameters.values()
    command.__signature__ = inspect.Signature([each for each in parameters if each.name != "family"])  # type: ignore[attr-defined]
    command.__doc__ = help_text
    return command


app.command(name="dense", epilog=EPILOG)(
    of_family("dense", "Attention over all pairs, full and causal, beside other libraries.")
)
app.command(name="sparse", epilog=EPILOG)(of_family("sparse", "Attention over lists of blocks beside other libraries."))
for _name in FAMILIES:
    app.command(name=_name, epilog=EPILOGS[_name])(family_command(_name))
app.command(name="video", epilog=VIDEO_EPILOG)(video)
app.command(name="startup", epilog=STARTUP_EPILOG)(startup)
app.command(name="parallel", epilog=PARALLEL_EPILOG)(parallel)


def chosen_cases(
    family: str, quick: bool, pattern: str | None, how: tuple[str, str], runtime: Runtime
) -> "tuple[Case, ...]":
    """The cases that the options name, how: their dtype and direction.

    Raises ValueRangeError for full sizes in the interpreter, which would take days."""
    from tilefold.bench.cases import cases_of, select_cases

    if not quick and not runtime.gpu:
        cases_of(family)
        raise ValueRangeError(
            f"the full cases of {family!r} need a GPU: in the interpreter they would take days. Add --quick"
        )
    size = "full" if not quick else "quick" if runtime.gpu else "tiny"
    return select_cases(cases_of(family, size, *how), pattern)


def chosen_peers(family: str, peers: str | None, runtime: Runtime) -> "tuple[Implementation, ...]":
    """tilefold and the peers that the option names, or those usual on this machine."""
    from tilefold.bench.peers import DEFAULT_PEERS, implementations_named

    if peers is None:
        return implementations_named(DEFAULT_PEERS[family][runtime.device])
    return implementations_named(tuple(name.strip().lower() for name in peers.split(",") if name.strip()))


def measure(
    cases: "tuple[Case, ...]",
    implementations: "tuple[Implementation, ...]",
    runtime: Runtime,
    options: "Options",
    keep: "Callable[[list[Cell]], None]",
    console: Console,
    log: bool = False,
) -> "list[Cell]":
    """Run the cases under a progress bar; each one's cells are kept as soon as they are there, should a later one fail."""
    from tilefold.bench.run import run_cases

    with measuring(console, len(cases) * (len(implementations) + 1), log) as step:
        cells = run_cases(
            cases, implementations, runtime.device, options, lambda case, what: step(case.name, what), keep
        )
    reached = len({cell.case for cell in cells})
    if reached < len(cases):
        console.print(Text(f"{reached} of {len(cases)} cases were reached", style="yellow"))
    return cells


def show(cells: "list[Cell]", setting: "Setting", runtime: Runtime, details: bool, console: Console) -> None:
    """Print the tables and the notes."""
    from tilefold.bench import report

    for part in report.directions(cells):
        console.print(Text(report.heading_of(part, setting), style="bold"))
        console.print()
        for table in report.speed_tables(part, console.width):
            console.print(table)
            console.print()
    if report.geometric_means(cells):
        console.print(Text("1.20x: tilefold takes 1 / 1.20 of that library's time", style="dim"))
    for line in report.crossing_lines(cells):
        console.print(Text(line), soft_wrap=True)
    if details or not runtime.gpu or any(cell.case.pattern for cell in cells):
        console.print()
        wide = Console(width=max(console.width, DETAIL_WIDTH), file=console.file)
        wide.print(report.detail_table(cells))
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
    """Write the files that were asked for and say so; the results were appended before."""
    from tilefold.bench import report

    texts = {"csv": report.to_csv, "json": report.to_json, "markdown": report.to_markdown}
    for kind, path in files.items():
        if path is not None:
            path.write_text(texts[kind](cells, setting), encoding="utf-8")
            console.print(Text(f"wrote {path}", style="dim"), soft_wrap=True)
    if results is not None:
        path = report.results_path(results, cells)
        console.print(Text(f"appended {len(cells)} rows to {path}", style="dim"), soft_wrap=True)
