"""`tilefold ladder`: the five rungs, listed, measured beside one another, swept over tiles, and beside a student's kernel."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer import Option
from typer.core import TyperCommand

from tilefold.bench.setting import setting_of
from tilefold.cli.options import Json, Markdown, Png, dtype_named, integers
from tilefold.cli.progress import measuring
from tilefold.cli.runtime import Outputs, Runtime, prepare_runtime, show, table_of, user_errors
from tilefold.errors import ShapeError, ValueRangeError
from tilefold.ladder.rungs import RUNGS, rung_named, up_to
from tilefold.ladder.student import StudentError
from tilefold.plan.problem import AttentionProblem

if TYPE_CHECKING:
    from tilefold.ladder.course import Result, Swept

EPILOG = """
**Examples**

    tilefold ladder

    tilefold ladder --rung flash --quick

    tilefold ladder --rung flash --seq 1024,4096

    tilefold ladder --rung split --queries 1 --seq 4096 --splits 1,4,16,64

    tilefold ladder --rung flash --seq 4096 --dtype fp16,bf16 --vary --markdown flash.md

    tilefold ladder --new my_kernel.py --rung flash --causal

`my_kernel.py` defines `attention(q, k, v, causal=False)` for q, k, v [batch, seq, heads, dim]. It is compared with fp64 by the
library's tolerance, then timed.

**Columns**: ms is the median of a call; GB/s counts what has to move between memory and the GPU once a kernel, TFLOP/s the
formula's operations, the same for all; speed-up is over the first row, over SDPA over torch's own choice of kernel. FLOP/B is
what a kernel computes for each byte of memory, and of L2 cache. Errors are from fp64, over 64 rows: the largest and its limit,
and the norm relative to the result's (L2 error). Without a GPU the kernels are counted, not
timed: bytes and operations of what really ran, beside those declared.

**Sweep**: the rung's tiles; with `--vary` also its own with queries, keys, warps or stages changed alone. In the interpreter only
where asked for, and counted.

Exit codes: 0 ok, 1 something is wrong, 2 wrong usage.
"""

COMMAND = "tilefold.ladder.command"  # the command line, for what is published
MOST_SPLITS = 64
GPU_SHAPE, CPU_SHAPE = ("1024,4096", 16, 128), ("64,128", 2, 32)


class Ladder(TyperCommand):
    """Keeps the command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[COMMAND] = shlex.join(["tilefold", "ladder", *args])
        return super().parse_args(ctx, args)


@user_errors
def ladder(
    context: typer.Context,
    rung: Annotated[
        str | None, Option(metavar="NAME", help="Measure the rungs up to this one.", show_default="a list")
    ] = None,
    seq: Annotated[
        str | None, Option(metavar="N,N", help="Keys of a sequence.", show_default="1024,4096; no GPU: 64,128")
    ] = None,
    queries: Annotated[
        int | None, Option(min=0, help="Queries of a sequence; 0: one a key.", show_default="0; split: 1")
    ] = None,
    batch: Annotated[int, Option(min=1, help="Sequences.")] = 1,
    heads: Annotated[int | None, Option(min=1, help="Query heads.", show_default="16; no GPU: 2")] = None,
    kv_heads: Annotated[int | None, Option(min=1, help="KV heads.", show_default="as many as heads")] = None,
    dim: Annotated[int | None, Option(min=1, max=256, help="Head dim.", show_default="128; no GPU: 32")] = None,
    dtype: Annotated[str, Option(metavar="NAME,NAME", help="bf16, fp16 or fp32, or several.")] = "bf16",
    causal: Annotated[bool, Option("--causal", help="Queries see no later keys.")] = False,
    splits: Annotated[
        str | None, Option(metavar="N,N", help="Parts that split cuts the keys into.", show_default="as the rung plans")
    ] = None,
    sweep: Annotated[
        bool | None,
        Option("--sweep/--no-sweep", help="Also the rung with other tiles.", show_default="on a GPU, off with --quick"),
    ] = None,
    vary: Annotated[bool, Option("--vary", help="Sweep, too, each of tile, warps and stages changed alone.")] = False,
    quick: Annotated[bool, Option("--quick", help="The shortest length, and no sweep unless asked for.")] = False,
    new: Annotated[
        Path | None, Option(metavar="FILE", help="Check and measure your own kernel, the attention of this file.")
    ] = None,
    json: Json = None,
    markdown: Markdown = None,
    png: Png = None,
) -> None:
    """Attention in five rungs (naive, profile, paged, flash, split): read, run, check and measure them."""
    outputs = Outputs(json=json, markdown=markdown, png=png)
    console = Console()
    if rung is None and new is None:
        rows = [(str(i), each.name, each.lesson, each.best_use) for i, each in enumerate(RUNGS.values(), 1)]
        console.print(table_of(("", "rung", "what it teaches", "best use"), rows, left=4))
        console.print(
            Text("Measure one: tilefold ladder --rung flash. The course: docs/tutorials/ladder/.", style="dim")
        )
        return
    runtime = prepare_runtime()
    name = rung_named(rung or "flash").name
    parts = () if splits is None else tuple(dict.fromkeys(integers(splits, "--splits")))  # each a row of split
    if max(parts, default=1) > MOST_SPLITS:
        raise ValueRangeError(f"--splits must be integers from 1 to {MOST_SPLITS}, comma-separated, got {splits!r}")
    if parts and name != "split":
        raise ValueRangeError(f"--splits needs --rung split, got --rung {name}")
    texts, own_heads, own_dim = GPU_SHAPE if runtime.gpu else CPU_SHAPE
    lengths = tuple(dict.fromkeys(integers(seq or texts, "--seq")))
    few = (1 if name == "split" else 0) if queries is None else queries
    problems = []
    for kind in dict.fromkeys(dtype_named(part.strip()) for part in dtype.split(",")):
        for keys in sorted(lengths)[:1] if quick else lengths:
            if causal and few > keys:
                raise ShapeError(f"--queries must be at most --seq under --causal, got {few} and {keys}")
            count = heads or own_heads
            shape = (batch, few or keys, keys, count, kv_heads or count, dim or own_dim, dim or own_dim)
            problems.append(AttentionProblem(*shape, dtype=kind, causal=causal))
    console.print(Text(runtime.note, style="dim"), soft_wrap=True)
    if sweep is None:
        sweep = runtime.gpu and not quick  # in the interpreter the times of tiles say nothing
    found = _measure(console, runtime, name, problems, parts, new, sweep or vary, vary)
    _report(console, runtime, name, *found, outputs, context.meta[COMMAND])


def _measure(
    console: Console, runtime: Runtime, name: str, problems: list[AttentionProblem], splits: tuple[int, ...],
    new: Path | None, sweep: bool, vary: bool,
) -> "tuple[list[Result], list[Swept]]":  # fmt: skip
    """Run everything under a progress bar.  Exit code 1 if the student's file cannot run."""
    from tilefold.ladder import course

    rung = rung_named(name)
    swept_problems = problems if sweep else []
    tiles = sum(len(course.tiles_of(rung, p, vary)) for p in swept_problems)
    rows = len(up_to(name)) + len(splits or (0,)) + len(course.TORCH) + 1 + (new is not None)
    try:
        with measuring(console, len(problems) * rows + tiles, log=False) as step:
            results = [course.run(p, name, runtime.gpu, step, new, splits) for p in problems]
            swept = [course.sweep(p, rung, runtime.gpu, step, vary) for p in swept_problems]
    except StudentError as error:
        Console(stderr=True).print(Text(str(error), style="bold red"), soft_wrap=True)
        raise typer.Exit(1) from None
    return results, swept


def _report(
    console: Console, runtime: Runtime, name: str, results: "list[Result]", swept: "list[Swept]", outputs: Outputs,
    command: str,
) -> None:  # fmt: skip
    """Print, write what was asked for, end with exit code 1 if something is wrong."""
    from tilefold.cli import ladder_report

    parts = ladder_report.parts_of(name, results, swept, runtime.gpu)
    show(console, parts)
    setting = setting_of(runtime.device)

    def document() -> dict[str, Any]:
        each = {"results": [one.as_json() for one in results], "sweeps": [asdict(one) for one in swept]}
        return {"rung": name, "command": command, "setting": asdict(setting), **each}

    outputs.write(
        console,
        json=document,
        markdown=lambda: ladder_report.markdown(parts, setting, command),
        png=lambda: ladder_report.drawn(results, runtime.gpu),
    )
    if not (all(each.ok for each in results) and all(each.ok for each in swept)):
        raise typer.Exit(1)
