"""`tilefold ladder`: the five rungs, listed, measured beside one another, swept over tiles, and beside a student's kernel."""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from tilefold.cli.progress import measuring
from tilefold.cli.runtime import Runtime, dtype_named, prepare_runtime, print_tables, table_of, user_errors, writable
from tilefold.errors import ShapeError, ValueRangeError
from tilefold.plan.problem import AttentionProblem

if TYPE_CHECKING:
    from tilefold.ladder.course import Result
    from tilefold.ladder.inputs import Tile

__all__ = ["EPILOG", "Ladder", "ladder"]

EPILOG = """
**Examples**

    tilefold ladder

    tilefold ladder --rung flash --quick

    tilefold ladder --rung flash --seq 1024,4096

    tilefold ladder --rung split --queries 1 --seq 4096 --no-sweep

    tilefold ladder --new my_kernel.py --rung flash --causal

`my_kernel.py` defines `attention(q, k, v, causal=False)` for q, k, v [batch, seq, heads, dim]. It is compared with fp64 by the
library's tolerance, then timed.

**Columns**: ms is the median of a call; GB/s counts what has to move between memory and the GPU once a kernel, TFLOP/s the
formula's operations, the same for all; FLOP/B is what a kernel computes for each byte of memory, and of L2 cache. Without a GPU
the kernels are counted, not timed: bytes and operations of what really ran, beside those declared.

Exit codes: 0 ok, 1 something is wrong, 2 wrong usage.
"""

FORM = "it defines attention(q, k, v, causal=False)"
GPU_SHAPE, CPU_SHAPE = ("1024,4096", 16, 128), ("64,128", 2, 32)


class Ladder(TyperCommand):
    """Says what `--new` alone lacks."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for given, following in zip(args, [*args, "-"][1:], strict=True):
            if given == "--new" and following.startswith("-"):
                raise typer.BadParameter(f"--new needs a file, as in `tilefold ladder --new my_kernel.py`: {FORM}", ctx)
        return super().parse_args(ctx, args)


@user_errors
def ladder(
    rung: Annotated[
        str | None, typer.Option(metavar="NAME", help="Measure the rungs up to this one.", show_default="a list")
    ] = None,
    seq: Annotated[
        str | None, typer.Option(metavar="N,N", help="Keys of a sequence.", show_default="1024,4096; no GPU: 64,128")
    ] = None,
    queries: Annotated[
        int | None, typer.Option(min=0, help="Queries of a sequence; 0: one a key.", show_default="0; split: 1")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads.", show_default="16; no GPU: 2")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads.", show_default="as many as heads")] = None,
    dim: Annotated[int | None, typer.Option(min=1, max=256, help="Head dim.", show_default="128; no GPU: 32")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    causal: Annotated[bool, typer.Option("--causal", help="Queries see no later keys.")] = False,
    sweep: Annotated[bool, typer.Option(help="Also the rung with other tiles.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="The shortest length, without other tiles.")] = False,
    new: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Check and measure your own kernel, the attention of this file.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.")] = None,
) -> None:
    """Attention in five rungs (naive, profile, paged, flash, split): read, run, check and measure them."""
    writable(json, "--json")
    console = Console()
    if rung is None and new is None:
        _list(console)
        return
    runtime = prepare_runtime()
    from tilefold.ladder.rungs import rung_named

    name = rung_named(rung or "flash").name
    texts, own_heads, own_dim = GPU_SHAPE if runtime.gpu else CPU_SHAPE
    few = (1 if name == "split" else 0) if queries is None else queries
    problems = []
    for keys in sorted(_numbers(seq or texts))[:1] if quick else _numbers(seq or texts):
        if causal and few > keys:
            raise ShapeError(f"--queries must be at most --seq under --causal, got {few} and {keys}")
        count = heads or own_heads
        shape = (batch, few or keys, keys, count, kv_heads or count, dim or own_dim, dim or own_dim)
        problems.append(AttentionProblem(*shape, dtype=dtype_named(dtype), causal=causal))
    console.print(Text(runtime.note, style="dim"))
    _measure(console, runtime, name, problems, sweep and not quick, new, json)


def _list(console: Console) -> None:
    from tilefold.ladder.rungs import RUNGS

    rows = [(str(i), each.name, each.lesson) for i, each in enumerate(RUNGS.values(), 1)]
    table = table_of(("", "rung", "what it teaches"), rows)
    for column in table.columns[1:]:
        column.justify = "left"
    console.print(table)
    console.print(Text("Measure one: tilefold ladder --rung flash. The course: docs/ladder/README.md.", style="dim"))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ValueRangeError(f"--seq must be integers of at least 1, comma-separated, got {text!r}")
    return found


def _measure(
    console: Console, runtime: Runtime, name: str, problems: list[AttentionProblem], sweep: bool, new: Path | None,
    json: Path | None,
) -> None:  # fmt: skip
    """Run, print, write; exit code 1 if something is wrong."""
    from tilefold.ladder import course
    from tilefold.ladder.rungs import rung_named, up_to
    from tilefold.ladder.student import StudentError

    sweep = sweep and runtime.gpu  # in the interpreter the times of tiles say nothing
    rung = rung_named(name)
    tiles = len(getattr(rung.program, "TILES", (0,))) if sweep else 0
    steps = len(problems) * (len(up_to(name)) + 2 + (new is not None) + tiles)
    results: list[Result] = []
    swept: dict[int, dict[Tile, float | str]] = {}
    try:
        with measuring(console, steps, log=False) as step:
            for p in problems:
                results.append(course.run(p, name, runtime.gpu, step, new))
            for p in problems if sweep else ():
                swept[p.seq_k] = course.sweep(p, rung, runtime.gpu, step)
    except StudentError as error:
        Console(stderr=True).print(Text(str(error), style="bold red"), soft_wrap=True)
        raise typer.Exit(1) from None
    for result in results:
        _show(console, result, runtime.gpu)
    if swept:
        _show_sweep(console, name, swept)
    if json is not None:
        document: dict[str, Any] = {
            "device": runtime.note,
            "rung": name,
            "results": [each.as_json() for each in results],
        }
        document["sweep"] = {keys: {str(tile): ms for tile, ms in found.items()} for keys, found in swept.items()}
        json.write_text(jsonlib.dumps(document, indent=2) + "\n", encoding="utf-8")
        console.print(Text(f"wrote {json}", style="dim"), soft_wrap=True)
    if not all(result.ok for result in results):
        raise typer.Exit(1)


def _show(console: Console, result: "Result", gpu: bool) -> None:
    """One problem's table, what bounds each row, and what was wrong."""
    from tilefold.bench.loop import complaint
    from tilefold.ladder.profile import why

    p = result.problem
    tokens = f"{p.seq_q} queries, {p.seq_k} keys" if p.seq_q != p.seq_k else f"N={p.seq_k}"
    masks = ", causal" if p.causal else ""
    heads = f"{p.heads} heads" + (f" on {p.kv_heads}" if p.group > 1 else "")
    console.print(Text(f"\n{tokens}, {heads}, D={p.dim_qk}, batch {p.batch}, {p.dtype}{masks}", style="bold"))
    print_tables(console, *(_timed(result) if gpu else _counted(result)))
    for line in result.lines if gpu else ():
        if text := why(line):
            console.print(Text(text, style="dim"), soft_wrap=True)
    for name, verdict in result.verdicts.items():
        if not verdict.ok:
            console.print(Text(f"{name} is WRONG: {complaint(verdict)}", style="bold red"), soft_wrap=True)
    if all(verdict.ok for verdict in result.verdicts.values()):
        console.print(Text("all agree with fp64", style="green"))
    if not gpu:
        console.print(Text("Counted in the interpreter, whose times are no speeds.", style="yellow"))


def _timed(result: "Result") -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    head: tuple[str, ...] = (
        "implementation",
        "ms",
        "GB/s",
        "TFLOP/s",
        "speed-up",
        "bound",
        "of bound",
        "FLOP/B",
        "FLOP/B of L2",
    )
    rows: list[tuple[str, ...]] = [
        (line.name, f"{line.ms:.3f}", "" if line.gbs is None else f"{line.gbs:.0f}", f"{line.tflops:.1f}", f"{line.speedup:.2f}x",
         "" if line.bound is None else line.bound.resource, "" if line.of_bound is None else f"{line.of_bound:.0%}",
         "" if line.intensity is None else f"{line.intensity:.1f}",
         "" if line.intensity_l2 is None else f"{line.intensity_l2:.1f}")
        for line in result.lines
    ]  # fmt: skip
    return head, rows


def _counted(result: "Result") -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Interpreter: what was loaded and stored, what is declared, the error and its limit."""
    head = (
        "implementation",
        "loaded kB",
        "stored kB",
        "declared kB",
        "MFLOP",
        "declared",
        "FLOP/B",
        "error",
        "limit",
        "",
    )
    rows: list[tuple[str, ...]] = []
    for name, verdict in result.verdicts.items():
        counts, cost = result.counts[name], result.costs.get(name)
        rows.append((
            name, f"{counts.loaded / 1e3:.1f}", f"{counts.stored / 1e3:.1f}",
            "" if cost is None else f"{cost.l2_bytes / 1e3:.1f}", f"{counts.flops / 1e6:.2f}",
            "" if cost is None else f"{cost.flops / 1e6:.2f}", f"{counts.flops / max(1, counts.bytes):.1f}",
            f"{verdict.max_error:.1e}", f"{verdict.max_limit:.1e}", "ok" if verdict.ok else "WRONG",
        ))  # fmt: skip
    return head, rows


def _show_sweep(console: Console, name: str, swept: "dict[int, dict[Tile, float | str]]") -> None:
    """Tiles down, lengths across; the fastest of a length in brackets."""
    keys = list(swept)
    best = {n: min((ms for ms in swept[n].values() if isinstance(ms, float)), default=None) for n in keys}

    def cell(n: int, tile: "Tile") -> str:
        ms = swept[n].get(tile, "")
        return ms if isinstance(ms, str) else f"[{ms:.3f}]" if ms == best[n] else f"{ms:.3f}"

    tiles = list(dict.fromkeys(tile for found in swept.values() for tile in found))
    console.print(Text(f"\n{name}: ms with other tiles (queries x keys)", style="bold"))
    table = table_of(("tile", *(f"N={n}" for n in keys)), [])
    for tile in tiles:
        table.add_row(str(tile), *(Text(cell(n, tile)) for n in keys))
    console.print(table)
