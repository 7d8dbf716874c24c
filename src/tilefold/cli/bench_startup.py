"""`tilefold bench startup`: how long a first call takes, with an empty cache of kernels and with compiled ones."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from tilefold.cli.runtime import prepare_runtime, print_tables, user_errors, writable

if TYPE_CHECKING:
    from tilefold.bench.startup import Start

__all__ = ["EPILOG", "startup"]

EPILOG = """
**Examples**

    tilefold bench startup

    tilefold bench startup --rounds 5 --compare --json startup.json

**Method**: each line is a process, or the median of several, that had imported torch and made its inputs before the clock ran.
*import* is that of tilefold, *forward* the first call of `tilefold.attention`, *first call* the two together, *backward* its
gradients; *torch* is torch's own first backward pass, done before. Results are compared with fp64 after the clock stopped. Exit
code 1 if one is wrong.
"""
HEAD = ("case", "process", "import s", "forward s", "first call s", "backward s", "torch s")


@user_errors
def startup(
    rounds: Annotated[int, typer.Option(min=1, help="Processes of each case that find compiled kernels.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="One such process of each case.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also with TILEFOLD_DISABLE_STARTUP=1, as Triton starts by itself.")
    ] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.")] = None,
) -> None:
    """Time the first call of a process, with an empty cache of kernels and with compiled ones."""
    writable(json, "--json")
    runtime = prepare_runtime()
    from tilefold.bench.setting import setting_of
    from tilefold.bench.startup import lines_of, measure_start, rows_of, startup_cases, to_json

    console = Console()
    setting = setting_of(runtime.device)
    console.print(
        Text(f"{runtime.note}\ntorch {setting.torch}, triton {setting.triton}, commit {setting.commit}", style="dim")
    )
    starts: list[Start] = []
    with console.status("") as status:
        for case in startup_cases(runtime.gpu):
            for ours in (True, False) if compare else (True,):
                starts += measure_start(
                    case, runtime.device, 1 if quick else rounds, ours, lambda what: status.update(what)
                )
    print_tables(console, HEAD, rows_of(starts))
    for line in lines_of(starts):
        if not runtime.gpu and "WRONG" not in line:
            continue  # what is wanted holds for a GPU
        console.print(Text(line, style="red" if "WRONG" in line else "dim"), soft_wrap=True)
    if not runtime.gpu:
        console.print(
            Text("Times in the interpreter say nothing about a GPU; nothing is compiled there.", style="yellow")
        )
    if json is not None:
        json.write_text(to_json(starts, asdict(setting)), encoding="utf-8")
        console.print(Text(f"wrote {json}", style="dim"), soft_wrap=True)
    if any(each.ok is False for each in starts):
        raise typer.Exit(1)
