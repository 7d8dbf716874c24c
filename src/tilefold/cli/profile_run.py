"""`tilefold profile script | case | import`: kernels of a script, of a benchmark's case, or of a report of Nsight Compute."""

import runpy
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from tilefold.bench.choice import select_cases
from tilefold.cli.options import Json, Markdown
from tilefold.cli.runtime import Outputs, Runtime, prepare_runtime, show, user_errors
from tilefold.errors import DeviceError, TilefoldError, ValueRangeError
from tilefold.profiling import counters as nsight
from tilefold.profiling import session as profiling
from tilefold.profiling.cases import cases_in, prepare_case
from tilefold.profiling.report import Profile
from tilefold.profiling.roofs import load_roofs, with_roofs

Ncu = Annotated[bool, Option("--ncu", help="Run again under Nsight Compute for hardware counters.")]
Kernels = Annotated[
    str | None, Option(metavar="REGEX", help="With --ncu: only kernels whose name matches.", show_default="all")
]
Launches = Annotated[int, Option(min=1, help="With --ncu: at most so many launches, each replayed some ten times.")]


@user_errors
def script(
    path: Annotated[Path, Argument(metavar="SCRIPT.py", help="The script.")],
    arguments: Annotated[list[str] | None, Argument(help="Its arguments, after -- if they begin with a dash.")] = None,
    marked: Annotated[
        bool, Option("--marked", help="Only what runs inside the script's own `with tilefold.profile():`.")
    ] = False,
    ncu: Ncu = False,
    kernels: Kernels = None,
    launches: Launches = 40,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Profile every kernel that a script launches, whoever's they are."""
    outputs = Outputs(json=json, markdown=markdown)
    if not path.is_file():
        raise ValueRangeError(f"the script must be a file, got {str(path)!r}")
    _gpu()
    found = _run_script(path, arguments or [], marked)
    counters = _counters([sys.executable, str(path), *(arguments or [])], kernels, launches, marked) if ncu else ()
    _show(found, counters, outputs)


@user_errors
def case(
    family: Annotated[
        str, Argument(help="dense, sparse, decode, gemm, conv, lowbit or move, as `tilefold bench`, or ladder.")
    ],
    name: Annotated[str, Argument(metavar="FILTER", help="Parts of the case's name, as d128,causal; the first match.")],
    direction: Annotated[str, Option(help="forward or backward, of dense and sparse.")] = "forward",
    calls: Annotated[int, Option(min=1, help="How many calls are watched.")] = 5,
    quick: Annotated[bool, Option("--quick", help="Of the small cases that `bench --quick` runs.")] = False,
    ncu: Ncu = False,
    kernels: Kernels = None,
    launches: Launches = 10,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Profile one case of a benchmark, with the FLOPs and bytes that the benchmark counts."""
    outputs = Outputs(json=json, markdown=markdown)
    chosen = select_cases(cases_in(family, "quick" if quick else "full", direction), name)[0]
    runtime = _gpu()
    made = prepare_case(family, chosen, "cuda")
    with made.context():
        for _ in range(2):
            made.call()
        torch.cuda.synchronize()
        with profiling.profile() as session:
            for _ in range(calls):
                made.call()
    if session.marks_only:
        return
    machine = with_roofs(runtime.record(), load_roofs())
    work = profiling.Declared(chosen.flops, chosen.bytes, getattr(chosen, "l2_bytes", None), chosen.dtype)
    found = profiling.with_declared(session.profile, work, calls, machine)
    Console().print(Text(f"{family} {chosen.name}, {calls} calls", style="bold"))
    options = f"--direction {direction} {'--quick ' * quick}--calls 1".split()
    again = [sys.executable, "-m", "tilefold", "profile", "case", family, name, *options]
    counters = _counters(again, kernels, launches, True) if ncu else ()
    _show([found], counters, outputs)


@user_errors
def import_report(
    path: Annotated[Path, Argument(metavar="REPORT", help="A .ncu-rep, or what `ncu --csv --page raw` printed.")],
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Verdicts on the kernels of a report that Nsight Compute made, by its counters alone; needs no GPU."""
    outputs = Outputs(json=json, markdown=markdown)
    _show([profiling.profile_of_counters(nsight.import_report(path), f"{path.name}, counters alone")], (), outputs)


def _gpu() -> Runtime:
    runtime = prepare_runtime()
    if not runtime.gpu:
        raise DeviceError(
            "a profile needs a GPU, and none can be used here; `tilefold profile import` reads reports without"
        )
    return runtime


def _run_script(path: Path, arguments: Sequence[str], marked: bool) -> list[Profile]:
    """Run it as `python SCRIPT` would, in this process; the profiles of its own regions, or of all of it."""
    before, place = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.resolve().parent)
    done = len(profiling.FINISHED)
    try:
        with nullcontext() if marked else profiling.profile():
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
    finally:
        sys.argv, sys.path[0] = before, place
    found = profiling.FINISHED[done:]
    if not found:
        raise ValueRangeError(f"{path} has no region `with tilefold.profile():` that ran, which --marked asks for")
    return found


def _counters(program: Sequence[str], kernels: str | None, launches: int, marked: bool) -> tuple[nsight.Measured, ...]:
    """Of a second run under ncu; none, and why, where it cannot."""
    try:
        return nsight.run_ncu(program, kernels, launches, marked)
    except TilefoldError as error:
        Console(stderr=True).print(Text(f"no hardware counters: {error}", style="yellow"), soft_wrap=True)
        return ()


def _show(found: list[Profile], counters: Sequence[nsight.Measured], outputs: Outputs) -> None:
    console = Console()
    profiles = [profiling.with_counters(each, counters) if counters else each for each in found]
    for each in profiles:
        show(console, each.parts())
    documents = [each.document() for each in profiles]
    outputs.write(
        console,
        json=lambda: documents[0] if len(documents) == 1 else {"kind": "profiles", "profiles": documents},
        markdown=lambda: "\n".join(each.markdown() for each in profiles),
    )
