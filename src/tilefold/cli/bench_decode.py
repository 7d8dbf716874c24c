"""`tilefold bench decode`: one step of generation over a KV cache beside other libraries, each output checked first."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from tilefold.cli.progress import measuring
from tilefold.cli.runtime import Runtime, prepare_runtime, table_of, user_errors, writable

if TYPE_CHECKING:
    from tilefold.bench.decode import DecodeCase
    from tilefold.bench.decode_peers import DecodePeer
    from tilefold.bench.decode_run import DecodeRow
    from tilefold.bench.run import Setting

__all__ = ["EPILOG", "decode"]

EPILOG = """
**Examples**

    tilefold bench decode --quick

    tilefold bench decode --case "b1,n8192|b32,page16" --peers plain,cudnn,fa4 --markdown decode.md

    tilefold bench decode --case "mla|fp8|int8|uneven" --rounds 3 --budget 120 --results benchmarks/results

**Peers**: cudnn, flash (FlashAttention-2) and math are backends of torch's scaled_dot_product_attention; flex is FlexAttention,
compiled; fa4 is flash_attn.cute, flashinfer and vllm (its Triton kernel) are used if installed; plain is tilefold itself over
the same numbers, contiguous and in the queries' dtype: what pages cost and what one byte a number gains. none measures tilefold
alone. Peers without pages or quantised caches get the plain numbers.

**Columns**: us of a call, GB/s of the bytes that a step has to move, how many times as long as a plain copy of as many bytes,
timed in the same rounds, would take (x floor), how many times as fast as the fastest other library (best).

**Method**: every output is compared with fp64, all sequences and heads; what is wrong is reported and not timed. Times are
medians between GPU events with a cold L2 cache, and of CUDA-graph replays over caches of six times the L2 cache, taken in rounds
whose order alternates. Without a GPU tiny cases run in the interpreter. Exit code 1 if a result of tilefold is wrong.
"""
WIDTH = 150  # figures of several peers side by side; a narrow terminal wraps their lines rather than cut them


@user_errors
def decode(
    quick: Annotated[bool, typer.Option("--quick", help="Few cases.")] = False,
    peers: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Comma-separated, or `none`.", show_default="those usual here")
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(
            metavar="FILTER",
            help="Only cases whose name has these comma-separated parts, as b32,page16; | separates alternatives.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each implementation gets.")] = 5,
    budget: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Begin no further case after so long.")
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="A line for each step, to see where a run got stuck.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the tables for a document.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Append the figures of each case, when it is done, to DIR/decode.jsonl."),
    ] = None,
) -> None:
    """Time one step of generation over contiguous, paged and quantised KV caches beside other libraries."""
    for path, name in ((json, "--json"), (markdown, "--markdown")):
        writable(path, name)
    runtime = prepare_runtime()
    from tilefold.bench import decode_report
    from tilefold.bench.cases import select_cases
    from tilefold.bench.decode import decode_cases
    from tilefold.bench.decode_serving import DECODE_DEFAULTS, decode_peers_named
    from tilefold.bench.report import append_rows
    from tilefold.bench.run import setting_of

    cases = select_cases(decode_cases("tiny" if not runtime.gpu else "quick" if quick else "full"), case)
    names = DECODE_DEFAULTS[runtime.device] if peers is None else _names(peers)
    chosen, console, setting = decode_peers_named(names), Console(), setting_of(runtime.device)
    console.print(
        Text(f"{runtime.note}\ntorch {setting.torch}, triton {setting.triton}, commit {setting.commit}", style="dim")
    )

    def keep(row: "DecodeRow") -> None:
        if results is not None:
            append_rows(results / "decode.jsonl", decode_report.decode_records([row], setting))

    rows = _measure(cases, chosen, runtime, (rounds, budget, log), keep, console)
    if not rows:
        return
    _show(rows, setting, runtime, console)
    texts = {"json": (json, decode_report.decode_json), "markdown": (markdown, decode_report.decode_markdown)}
    for path, text in texts.values():
        if path is not None:
            path.write_text(text(rows, setting), encoding="utf-8")
            console.print(Text(f"wrote {path}", style="dim"), soft_wrap=True)
    if results is not None:
        console.print(Text(f"appended {len(rows)} cases to {results / 'decode.jsonl'}", style="dim"), soft_wrap=True)
    if decode_report.ours_wrong(rows):
        raise typer.Exit(1)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip().lower() for name in text.split(",") if name.strip())


def _measure(
    cases: "tuple[DecodeCase, ...]",
    peers: "tuple[DecodePeer, ...]",
    runtime: Runtime,
    how: tuple[int, float | None, bool],
    keep: "Callable[[DecodeRow], None]",
    console: Console,
) -> "list[DecodeRow]":
    """Run the cases under a progress bar; how: rounds, budget, whether to log."""
    from tilefold.bench.decode_run import run_decode_cases

    rounds, budget, log = how
    turns = rounds if runtime.gpu else min(rounds, 2)
    with measuring(console, len(cases) * (len(peers) + 1), log) as step:
        rows = run_decode_cases(
            cases, peers, runtime.device, turns, lambda case, what: step(case.name, what), keep, budget
        )
    if len(rows) < len(cases):
        console.print(Text(f"{len(rows)} of {len(cases)} cases were reached", style="yellow"))
    return rows


def _show(rows: "list[DecodeRow]", setting: "Setting", runtime: Runtime, console: Console) -> None:
    """Print the tables and the sentences below them."""
    from tilefold.bench import decode_report

    wide = Console(width=max(console.width, WIDTH), file=console.file)
    for method in decode_report.methods_of(rows):
        table = decode_report.decode_table(rows, method)
        console.print(Text(decode_report.decode_title(rows, method, setting), style="bold"))
        wide.print(table_of(table.head, table.rows))
        console.print()
    for line in decode_report.decode_lines(rows):
        console.print(Text(line, style="red" if "WRONG" in line or "failed" in line else "dim"), soft_wrap=True)
    if not runtime.gpu:
        console.print(
            Text(
                "Times in the interpreter say nothing about a GPU; the outputs were checked all the same.",
                style="yellow",
            )
        )
