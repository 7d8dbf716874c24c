"""`tilefold bench decode`, `gemm`, `conv` and `lowbit`: a family's cases beside other libraries, each output checked first."""

import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from tilefold.cli.progress import measuring
from tilefold.cli.runtime import Runtime, prepare_runtime, table_of, user_errors, writable

if TYPE_CHECKING:
    from tilefold.bench.family import Family, Peer
    from tilefold.bench.family_run import Row
    from tilefold.bench.run import Setting

__all__ = ["EPILOGS", "FAMILIES", "family_command"]

# Command -> (where its Family is, the line that the help shows).
FAMILIES = {
    "decode": (
        "decode_serving.DECODE",
        "Time one step of generation over contiguous, paged and quantised KV caches beside other libraries.",
    ),
    "gemm": ("gemm.GEMM", "Time matrix products, batched or not, with what is fused behind them, beside torch."),
    "conv": ("conv.CONV", "Time two-dimensional convolutions beside torch."),
    "lowbit": (
        "lowbit.LOWBIT",
        "Time products with weights of 8, 4, 3 and 2 bits beside 16-bit ones and other libraries.",
    ),
}
DECODE_EPILOG = """
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

_MATRIX = """
**Columns**: us of a call, GB/s of the bytes that have to move, TFLOP/s, the share of the roof (the longer one of those bytes at
the rate of a plain copy, timed in the same rounds, and the operations at the device's rate, in the time), how many times as fast
as the fastest other library (best).

**Method**: every output is compared with fp64 in full; what is wrong is reported and not timed. Times are medians between GPU
events with a cold L2 cache, and of CUDA-graph replays over inputs of six times the L2 cache, taken in rounds whose order
alternates. Without a GPU tiny cases run in the interpreter. Exit code 1 if a result of tilefold is wrong.
"""
EPILOGS = {
    "decode": DECODE_EPILOG,
    "gemm": "**Peers**: torch (cuBLAS, bias and activation as calls of their own).\n\n    tilefold bench gemm --quick\n"
    + _MATRIX,
    "conv": "**Peers**: torch (cuDNN, with its benchmark mode).\n\n    tilefold bench conv --quick\n" + _MATRIX,
    "lowbit": "**Peers**: cublas (the dequantised weight in 16 bits), tinygemm (torch's int4, the same codes), torchao, "
    "gemlite and bitsandbytes, if installed: those that round by themselves are judged by their own weights.\n\n"
    '    tilefold bench lowbit --case "4bit,m1_" --peers cublas,tinygemm\n' + _MATRIX,
}
WIDTH = 150  # figures of several peers side by side; a narrow terminal wraps their lines rather than cut them


@user_errors
def bench_family(
    family_name: str,
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
        typer.Option(metavar="DIR", help="Append the figures of each case, when it is done, to DIR/FAMILY.jsonl."),
    ] = None,
) -> None:
    """Time the cases of a family and write what was asked for."""
    for path, name in ((json, "--json"), (markdown, "--markdown")):
        writable(path, name)
    runtime = prepare_runtime()
    from tilefold.bench import family_report
    from tilefold.bench.cases import select_cases
    from tilefold.bench.report import append_rows
    from tilefold.bench.run import setting_of

    family = _family(family_name)
    cases = select_cases(family.cases("tiny" if not runtime.gpu else "quick" if quick else "full"), case)
    names = family.defaults[runtime.device] if peers is None else _names(peers)
    chosen, console, setting = family.peers_named(names), Console(), setting_of(runtime.device)
    console.print(
        Text(f"{runtime.note}\ntorch {setting.torch}, triton {setting.triton}, commit {setting.commit}", style="dim")
    )

    def keep(row: "Row") -> None:
        if results is not None:
            append_rows(results / f"{family.name}.jsonl", family_report.family_records([row], setting))

    rows = _measure(family, cases, chosen, runtime, (rounds, budget, log), keep, console)
    if not rows:
        return
    _show(rows, setting, runtime, console)
    texts = {"json": (json, family_report.family_json), "markdown": (markdown, family_report.family_markdown)}
    for path, text in texts.values():
        if path is not None:
            path.write_text(text(rows, setting), encoding="utf-8")
            console.print(Text(f"wrote {path}", style="dim"), soft_wrap=True)
    if results is not None:
        console.print(Text(f"appended {len(rows)} cases to {results / 'decode.jsonl'}", style="dim"), soft_wrap=True)
    if family_report.ours_wrong(rows):
        raise typer.Exit(1)


def _family(name: str) -> "Family":
    module, attribute = FAMILIES[name][0].split(".")
    found: Family = getattr(importlib.import_module(f"tilefold.bench.{module}"), attribute)
    return found


def family_command(name: str) -> Callable[..., None]:
    """`bench_family` as the command of one family: its options without the first argument."""

    @functools.wraps(bench_family)
    def command(**options: Any) -> None:
        bench_family(name, **options)

    parameters = inspect.signature(bench_family).parameters.values()
    command.__signature__ = inspect.Signature([p for p in parameters if p.name != "family_name"])  # type: ignore[attr-defined]
    command.__doc__ = FAMILIES[name][1]
    return command


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip().lower() for name in text.split(",") if name.strip())


def _measure(
    family: "Family",
    cases: tuple[Any, ...],
    peers: "tuple[Peer, ...]",
    runtime: Runtime,
    how: tuple[int, float | None, bool],
    keep: "Callable[[Row], None]",
    console: Console,
) -> "list[Row]":
    """Run the cases under a progress bar; how: rounds, budget, whether to log."""
    from tilefold.bench.family_run import run_family_cases

    rounds, budget, log = how
    turns = rounds if runtime.gpu else min(rounds, 2)
    with measuring(console, len(cases) * (len(peers) + 1), log) as step:
        rows = run_family_cases(
            family, cases, peers, runtime.device, turns, lambda case, what: step(case.name, what), keep, budget
        )
    if len(rows) < len(cases):
        console.print(Text(f"{len(rows)} of {len(cases)} cases were reached", style="yellow"))
    return rows


def _show(rows: "list[Row]", setting: "Setting", runtime: Runtime, console: Console) -> None:
    """Print the tables and the sentences below them."""
    from tilefold.bench import family_report

    wide = Console(width=max(console.width, WIDTH), file=console.file)
    for method in family_report.methods_of(rows):
        table = family_report.family_table(rows, method)
        console.print(Text(family_report.family_title(rows, method, setting), style="bold"))
        wide.print(table_of(table.head, table.rows))
        console.print()
    for line in family_report.family_lines(rows):
        console.print(Text(line, style="red" if "WRONG" in line or "failed" in line else "dim"), soft_wrap=True)
    if not runtime.gpu:
        console.print(
            Text(
                "Times in the interpreter say nothing about a GPU; the outputs were checked all the same.",
                style="yellow",
            )
        )
