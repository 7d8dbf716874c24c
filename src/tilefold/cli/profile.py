"""`tilefold profile`: a group of commands; and `tilefold profile video`: the video pipeline, stage by stage."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.text import Text
from typer import Option

from tilefold.bench import page
from tilefold.bench.video.reported import DEVICE, FASTEST_MS, SAID, SHAPE, STAGE_MS
from tilefold.bench.video.stages import ALONE, PEERS, StageRow, VideoRun, prepare_stages, profile_video
from tilefold.cli import profile_run
from tilefold.cli.options import Html, Json, Png, names_from, numbers, one_of
from tilefold.cli.runtime import Outputs, prepare_runtime, show, user_errors, video_shape
from tilefold.profiling.video import Explanation, explain_video
from tilefold.sparse import CoarseOptions, SelectOptions

EPILOG = """
**Examples**

    tilefold profile video

    tilefold profile video --shape 1,12,23296,128 --sparsity 0.651 --peers cudnn,fa4 --backward --html profile.html

    tilefold profile video --method gini --tau 0.5,0.95 --json profile.json

**Columns**: ms is the median of a call of its own (the stages' inputs are made before), % its share of the four stages' sum; GB
what has to move between memory and the GPU once; L2 GB what tiles draw from the L2 cache; bound the resource that is busy
longest, and "of bound" how much of the time that accounts for: 100 % is the roof. Roofs are of `tilefold.plan.device_named`,
measured where known. Attention over blocks of 64 is bound by the way from L2, not by either axis of the usual roofline.

*index alone* makes the lists of a map of blocks, which select does in its launch. At the published shape a column has what the
pipeline's authors report of theirs on an H800.

**Launches**: each launch of each stage by itself, in us, and *inside* the pipeline. *explained* is the time of the resource that
is busy longest, by what the launch does with its tiles' padding, times the uneven end of its grid, plus an empty launch;
*not* is what it leaves, where that is more than 10 %. **adds up**: *ms* is a call as it comes, *host* what of it is gone
when its launches are queued before, *device* the rest; the launches' own times and the *gaps* between them (measured by
empty launches) should come to that, and *left* is what they do not. `--no-explain` leaves all of this out.
"""
HEAD = ("", "ms", "%", "TFLOP", "GB", "L2 GB", "TFLOP/s", "bound", "of bound")

GROUP_EPILOG = """
**Examples**

    tilefold profile train.py -- --steps 3

    tilefold profile train.py --marked --ncu --kernels "attention|fold" --json profile.json

    tilefold profile case dense d128,n16384x1,causal --ncu

    tilefold profile case ladder flash_n4096 --ncu --markdown flash.md

    tilefold profile import report.ncu-rep

    tilefold profile video

`tilefold profile FILE.py` is short for `tilefold profile script FILE.py`.
"""


class ScriptsToo(typer.core.TyperGroup):
    """Takes a Python file where a command is expected."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].endswith(".py"):
            args = ["script", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ScriptsToo, no_args_is_help=True, epilog=GROUP_EPILOG, help="Where the time goes, and what bounds it."
)
app.command(name="script")(profile_run.script)
app.command(name="case")(profile_run.case)
app.command(name="import")(profile_run.import_report)


@app.callback()
def profile() -> None:
    """Where the time goes, and what bounds it."""


@app.command(epilog=EPILOG)
@user_errors
def video(
    shape: Annotated[
        str | None, Option(metavar="B,H,N,D", help="Batch, heads, tokens, head dim.", show_default="1,12,23296,128")
    ] = None,
    kv_heads: Annotated[int | None, Option(min=1, help="KV heads.", show_default="as many as heads")] = None,
    block: Annotated[int, Option(help="Tokens of a block.")] = 64,
    dtype: Annotated[str, Option(help="bf16, fp16 or fp32.")] = "bf16",
    coarse: Annotated[str, Option(help="How the coarse branch reduces k and v: block, dense or pooled.")] = "block",
    method: Annotated[str, Option(help="How blocks are selected: top_k, top_p or gini.")] = "top_k",
    sparsity: Annotated[float, Option(min=0, max=1, help="With top_k: the share of blocks left out.")] = 0.651,
    top_p: Annotated[float, Option(min=0, max=1, help="With top_p: the mass to keep.")] = 0.9,
    tau: Annotated[str, Option(metavar="MIN,MAX", help="With gini: the range of the mass to keep.")] = "0.5,0.95",
    peers: Annotated[
        str, Option(metavar="NAMES", help="Dense attention beside it, comma-separated, or none.")
    ] = "cudnn",
    backward: Annotated[bool, Option("--backward", help="Also forward + backward.")] = False,
    rounds: Annotated[int, Option(min=1, help="Turns that each call gets.")] = 5,
    quick: Annotated[bool, Option("--quick", help="4096 tokens unless --shape says more, one turn.")] = False,
    explain: Annotated[
        bool,
        Option(
            "--explain/--no-explain", help="Trace each stage's launches: what bounds each, and whether they add up."
        ),
    ] = True,
    json: Json = None,
    png: Png = None,
    html: Html = None,
) -> None:
    """Time each stage of sparse video attention, the whole of it, and dense attention beside it."""
    outputs = Outputs(json=json, png=png, html=html)
    runtime = prepare_runtime()
    usual = (1, 12, 4096 if quick else 23296, 128) if runtime.gpu else (1, 2, 256, 32)
    made = video_shape(shape, usual, dtype, kv_heads, block)
    low, high = numbers(tau, "--tau must be two numbers MIN,MAX from 0 to 1", float, (2,))
    options = {"top_k": {"sparsity": sparsity}, "top_p": {"top_p": top_p}, "gini": {"tau_min": low, "tau_max": high}}
    select = SelectOptions(method=method, **options[one_of(method, "--method", options)])  # type: ignore[arg-type]
    names = names_from(peers, "--peers", PEERS)
    device = runtime.record()
    console = Console()
    console.print(Text(runtime.note, style="dim"))
    turns = rounds if runtime.gpu and not quick else 1
    ready = prepare_stages(made, runtime.device, CoarseOptions(kind=coarse), select)  # type: ignore[arg-type]
    found = profile_video(ready, device, runtime.device, names, backward, turns)
    title = (
        f"sparse video attention, {made.batch} x {made.seq} tokens, {made.heads} heads on {made.kv_heads} KV heads, "
        f"D={made.dim}, {made.dtype}, {100 * (1 - found.density):.1f} % sparse, "
        f"{found.density * made.blocks:.4g} of {made.blocks} blocks kept, on {device.title}"
    )
    why = None
    if explain:
        why = explain_video(ready, device, runtime.device, {row.name: row.timing.ms for row in found.rows}, turns)
    parts = _parts(found, why)
    show(console, [page.Heading(title), *parts])
    if not runtime.gpu:
        console.print(Text("Times in the interpreter say nothing about a GPU.", style="yellow"))
    outputs.write(
        console,
        json=lambda: _document(found, why, title),
        png=lambda: _picture(found, why).figure,
        html=lambda: page.to_html(title, [*parts, _picture(found, why)]),
    )


def _row(row: StageRow) -> tuple[str, ...]:
    """Under `HEAD`."""
    ms, cost = row.timing.ms, row.cost
    first = row.name, f"{ms:.3f}", "" if row.share is None else f"{100 * row.share:.1f}"
    if cost is None or row.bound is None:
        return (*first, "", "", "", "", "", "")
    drawn = f"{cost.l2_bytes * 1e-9:.2f}" if cost.l2_bytes else ""
    rate = f"{cost.flops / ms * 1e-9:.0f}" if ms else ""
    of_bound = f"{100 * (row.of_bound or 0):.0f} %"
    return (*first, f"{cost.flops * 1e-12:.3f}", f"{cost.bytes * 1e-9:.3f}", drawn, rate, row.bound.resource, of_bound)


def _reported(found: VideoRun) -> Mapping[str, float]:
    """Milliseconds that others report of the stages of this shape."""
    s = found.shape
    return STAGE_MS if (s.batch, s.heads, s.kv_heads, s.seq, s.dim, s.dtype, s.block) == SHAPE else {}


def _table(found: VideoRun) -> page.Rows:
    """The stages; behind the time what others report, where they do."""
    rows, theirs = tuple(map(_row, found.rows)), _reported(found)
    if not theirs:
        return page.Rows(HEAD, rows)
    head = (*HEAD[:2], f"reported ({DEVICE})", *HEAD[2:])
    texts = (f"{theirs[name]:.3f}" if (name := row[0]) in theirs else "" for row in rows)
    return page.Rows(head, tuple((*row[:2], text, *row[2:]) for row, text in zip(rows, texts, strict=True)))


def _notes(found: VideoRun) -> tuple[str, ...]:
    """The sentences below the table."""
    lines = []
    for whole, suffix in (("pipeline", ""), ("pipeline, forward + backward", ", forward + backward")):
        mine = found.row(whole)
        for row in found.rows:
            dense = row.name.startswith("dense") and row.name.endswith("backward") == bool(suffix)
            if mine is not None and dense and row.timing.ms:
                lines.append(f"{whole} takes {mine.timing.ms / row.timing.ms:.2f} of {row.name}")
    lines.append(
        f"{ALONE}: from a map of blocks; select makes its lists in its own launch, so it is no part of the sum"
    )
    if _reported(found):
        lines.append(f"{SAID}; {FASTEST_MS} ms in all with their fastest kernels; the sparsity of theirs is not known")
    return (*lines, *found.notes)


def _document(found: VideoRun, why: Explanation | None, title: str) -> dict[str, Any]:
    explained = None if why is None else why.document()
    return {"title": title, **asdict(found), "reported_ms": dict(_reported(found)), "explained": explained}


def _parts(found: VideoRun, why: Explanation | None) -> list[page.Part]:
    """Of a document but for its picture."""
    parts: list[page.Part] = [_table(found), *map(page.Words, _notes(found))]
    if why is not None:
        parts += [*why.tables(), *map(page.Words, why.lines())]
    return parts


def _picture(found: VideoRun, why: Explanation | None) -> page.Picture:
    """The time of each row, and beside it what its slowest resource needs; below, the same of each launch."""
    rows = [(row.name, row.timing.ms, row.bound.seconds * 1e3 if row.bound else 0.0) for row in found.rows]
    launches = [
        (row.name, (row.evidence.seconds or 0.0) * 1e6, row.predicted.seconds * 1e6 if row.predicted else 0.0)
        for row in (why.launches if why else ())
    ]
    figure = page.new_figure(9, 1 + 0.45 * (len(rows) + len(launches)))
    caption = "Time of each stage, of the whole, and of dense attention"
    if launches:
        axes, below = figure.subplots(2, height_ratios=(len(rows), len(launches)))
        _draw(below, launches, "explained", "us")
        caption += "; below, of each launch"
    else:
        axes = figure.subplots()
    _draw(axes, rows, "least, by the slowest resource", "ms")
    return page.Picture(figure, f"{caption}.")


def _draw(axes: Any, rows: Sequence[tuple[str, float, float]], inner: str, unit: str) -> None:
    """Two bars of each (name, time taken, a part of it), the first one on top; inner: what the part is."""
    names, taken, parts = zip(*rows[::-1], strict=True)
    places = range(len(rows))
    axes.barh(places, taken, height=0.7, label="taken")
    axes.barh(places, parts, height=0.3, label=inner)
    axes.set_yticks(places, names)
    axes.set_xlabel(unit)
    axes.legend()
