"""`tilefold bench video`: the sparse video pipeline over sparsity, length and cached tokens, beside dense attention."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from tilefold.cli.runtime import (
    Runtime,
    dtype_named,
    header,
    integers,
    names_from,
    prepare_runtime,
    print_tables,
    say,
    user_errors,
    warn_of_times,
    writable,
    write_files,
)
from tilefold.errors import ValueRangeError

if TYPE_CHECKING:
    from tilefold.bench.setting import Setting
    from tilefold.bench.video.sweep import Point, SweepRow
    from tilefold.plan.video import VideoShape

__all__ = ["EPILOG", "video"]

EPILOG = """
**Examples**

    tilefold bench video

    tilefold bench video --sweep sparsity --peers cudnn,fa4 --html video.html --results benchmarks/results

    tilefold bench video --sweep length --values 8192,32768 --sparsity 80,90 --budget 90

    tilefold bench video --sweep cached --values 8192,131072 --page-size 128 --json cached.json

**Sweeps**: sparsity leaves out so many per cent of the blocks (top-k by the coarse scores); length is self-attention over so many
tokens; cached is one step of streaming, the newest block's queries over a cache of so many tokens, in one piece and in pages.

**Columns**: fine is block-sparse attention alone; stages the sum of coarse, select, fine and fuse (and append to the cache), each
called by itself; total the whole pipeline as a user calls it. TFLOP/s are the fine stage's on the listed blocks, TB/s what it
draws of K and V. Beside each dense peer: how many times as fast the fine stage and the total are; beside each that follows the
fine stage's lists (bsa, tk, fastvideo, flex, fa4-lists): how many times as fast the fine stage is.

**Method**: sampled rows of each output are compared with fp64; what is wrong is not timed. Times are medians between GPU events
with a cold L2 cache, in rounds whose order alternates; cached, and all with --graph, as replays of CUDA graphs. Exit code 1 if a
result of tilefold is wrong.
"""


@user_errors
def video(
    sweep: Annotated[
        str, typer.Option(metavar="NAMES", help="Comma-separated: sparsity, length, cached.")
    ] = "sparsity,cached",
    values: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS", help="What one sweep goes through: per cent, or tokens.", show_default="usual ones"
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The first value of each sweep, one turn.")] = False,
    sparsity: Annotated[
        str | None,
        typer.Option(metavar="NUMBERS", help="Per cent, of length and cached.", show_default="80,90; cached 90"),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="B,H,N,D", help="Batch, heads, tokens (of sparsity), head dim.", show_default="1,12,23296,128"
        ),
    ] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads.", show_default="as many as heads")] = None,
    block: Annotated[int, typer.Option(help="Tokens of a block.")] = 64,
    page_size: Annotated[int, typer.Option(min=0, help="Of the paged caches; 0: only contiguous ones.")] = 64,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    peers: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Dense attention, comma-separated, or none.", show_default="cudnn,fa4"),
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="Time CUDA-graph replays everywhere (GPU).")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each call gets.")] = 3,
    budget: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Begin no further point after so long.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the tables for a document.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw times over the swept values.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write tables and drawing as one HTML file.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Append the figures of each point to DIR/video.jsonl.")
    ] = None,
) -> None:
    """Sweep the sparse video pipeline over sparsity, length or cached tokens, beside dense attention."""
    files = {"json": json, "markdown": markdown, "png": png, "html": html}
    writable(files)
    runtime = prepare_runtime()
    from tilefold.bench.records.record import append_rows
    from tilefold.bench.setting import setting_of
    from tilefold.bench.video import report as video_report
    from tilefold.bench.video.engine import SHAPES
    from tilefold.bench.video.stages import LISTED, PEERS, USUAL
    from tilefold.bench.video.sweep import measure_point, run_points
    from tilefold.plan.video import VideoShape

    batch, heads, seq, dim = integers(shape, "--shape", 4) if shape else SHAPES[runtime.gpu]
    made = VideoShape(batch, heads, kv_heads or heads, seq, dim, dtype_named(dtype), block)
    points = _points(sweep, made, (values, sparsity), page_size, runtime, quick)
    names = USUAL[runtime.device] if peers is None else names_from(peers, "--peers", (*PEERS, *LISTED))
    console, setting = Console(), setting_of(runtime.device)
    header(setting, runtime, console)

    def measure(point: "Point") -> "SweepRow":
        with console.status(Text(f"measuring {point.name}")):
            return measure_point(point, runtime.device, names, rounds if runtime.gpu and not quick else 1, graph)

    def keep(row: "SweepRow") -> None:
        if results is not None:
            append_rows(results / "video.jsonl", video_report.records_of([row], setting))

    rows, left = run_points(points, measure, budget, keep)
    _show(rows, left, setting, console)
    warn_of_times(runtime, console)
    if rows:
        makers = {
            "json": lambda: video_report.to_json(rows, left, setting),
            "markdown": lambda: video_report.to_markdown(rows, left, setting),
            "png": lambda: video_report.picture_of(rows).figure,
            "html": lambda: video_report.to_html(rows, left, setting),
        }
        write_files(files, makers, console)
        if results is not None:
            say([f"appended {len(rows)} rows to {results / 'video.jsonl'}"], console)
    if any(row.wrong for row in rows):
        raise typer.Exit(1)


def _points(
    sweep: str, shape: "VideoShape", given: tuple[str | None, str | None], page_size: int, runtime: Runtime, quick: bool
) -> "tuple[Point, ...]":
    """All points of the sweeps; given: the options --values and --sparsity; quick: one value and one sparsity of each."""
    from tilefold.bench.choice import figures_in
    from tilefold.bench.video.engine import DEFAULTS
    from tilefold.bench.video.sweep import SWEEPS, points_of

    sweeps = names_from(sweep, "--sweep", tuple(SWEEPS))
    if not sweeps:
        raise ValueRangeError(f"--sweep must name at least one of {', '.join(SWEEPS)}, got {sweep!r}")
    values, sparsities = (
        () if text is None else figures_in(text, name)
        for text, name in zip(given, ("--values", "--sparsity"), strict=True)
    )
    if values and len(sweeps) > 1:
        raise ValueRangeError(f"--values needs one --sweep that they belong to, got {sweep!r}")
    if sparsities and sweeps == ("sparsity",):
        raise ValueRangeError(f"--sparsity is for length and cached; --sweep sparsity takes --values, got {given[1]!r}")
    pages = (None, page_size) if page_size else (None,)
    found: list[Point] = []
    for name in dict.fromkeys(sweeps):
        usual, fixed = DEFAULTS[name][runtime.gpu]
        most = 1 if quick else None
        found += points_of(name, shape, (values or usual)[:most], (sparsities or fixed)[:most], pages)
    return tuple(found)


def _show(rows: "list[SweepRow]", left: "list[Point]", setting: "Setting", console: Console) -> None:
    """Print a table for each sweep and the sentences below them."""
    from tilefold.bench.video import report as video_report

    for some in video_report.sweeps_of(rows):
        table = video_report.table_of(some)
        console.print(Text(video_report.title_of(some, setting), style="bold"))
        keys = 2 if "line" in table.head else 1
        print_tables(console, table.head, table.rows, keys=keys)
    say(video_report.lines_of(rows, left), console, "")
