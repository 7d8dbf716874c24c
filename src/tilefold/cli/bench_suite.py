"""`tilefold bench suite`: named sets of families and cases, one after the other, whatever becomes of one of them."""

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from tilefold.cli.bench_flow import Done, Outputs, finish, measure, peer_names, show
from tilefold.cli.options import RunOptions, with_run
from tilefold.cli.runtime import Runtime, header, prepare_runtime, say, table_of, user_errors
from tilefold.errors import ValueRangeError

if TYPE_CHECKING:
    from tilefold.bench.setting import Setting
    from tilefold.bench.suites import Part, Suite

EPILOG = """
**Examples**

    tilefold bench suite

    tilefold bench suite quick --json before.json

    tilefold bench suite quick --compare before.json --fail-slower 5

    tilefold bench suite readme --results benchmarks/results --refresh docs/performance/overview.md

Without a name the suites are listed. A case that fails is reported, and the next one begun; so is a family. --budget is for the
whole. Options mean what they mean for one family (`tilefold bench dense --help`); peers that a family does not know are left out
there. Exit code 1 if a result of tilefold is wrong or failed, or became so.
"""


@with_run
@user_errors
def suite(
    run: RunOptions,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which one.", show_default="list them")] = None,
) -> None:
    """Run a named set of families and cases."""
    from tilefold.bench.suites import SUITES, peers_for, suite_named

    if name is None:
        Console().print(table_of(("suite", "what"), [(one.name, one.what) for one in SUITES.values()], left=2))
        return
    names, must = peer_names(run)
    runtime = prepare_runtime()
    from tilefold.bench.engine import peers_of
    from tilefold.bench.setting import setting_of

    chosen = suite_named(name, runtime.gpu)
    outputs = Outputs.asked(run, [part.family for part in chosen.parts])
    for part in chosen.parts:
        peers_of(part.engine, peers_for(part, names, chosen), runtime.device, must)
    if run.case is not None and not any(part.cases(run.case, runtime.gpu) for part in chosen.parts):
        raise ValueRangeError(f"case filter {run.case!r} matches no case of the suite {name!r}")
    console, setting = Console(), setting_of(runtime.device)
    outputs.check_device(setting.device)
    header(setting, runtime, console)
    parts = _parts(chosen, names, run, runtime, outputs, setting, console)
    _summary(parts, console)
    finish(parts, setting, runtime, outputs, console)


def _parts(
    chosen: "Suite",
    names: tuple[str, ...] | None,
    run: RunOptions,
    runtime: Runtime,
    outputs: Outputs,
    setting: "Setting",
    console: Console,
) -> list[Done]:
    """Every part that has cases; names: of the peers."""
    from tilefold.bench.suites import peers_for

    parts: list[Done] = []
    begin = time.perf_counter()
    for part in chosen.parts:
        spent = time.perf_counter() - begin
        console.print(Text(f"\n{part.family}", style="bold underline"))
        try:
            done = _part(part, peers_for(part, names, chosen), run, spent, runtime, outputs, setting, console)
        except Exception as error:  # a family that cannot even begin must not cost the others their figures
            done = Done(part.engine, 0, trouble=f"{part.family} failed: {type(error).__name__}: {error}")
            say([done.trouble], console)
        if done.asked or done.trouble:
            parts.append(done)
        if done.lost:
            left = [each.family for each in chosen.parts[chosen.parts.index(part) + 1 :]]
            done.trouble = f"the GPU was lost in {part.family}: {', '.join(left) or 'nothing'} was not reached"
            say([done.trouble], console)
            break
    return parts


def _part(
    part: "Part",
    names: tuple[str, ...] | None,
    run: RunOptions,
    spent: float,
    runtime: Runtime,
    outputs: Outputs,
    setting: "Setting",
    console: Console,
) -> Done:
    """One family; names: of the peers that it is to be beside; spent: seconds of the budget."""
    from tilefold.bench.engine import peers_of
    from tilefold.bench.setting import Options

    cases = part.cases(run.case, runtime.gpu)
    if not cases:
        console.print(Text("no case has what the filter asks for", style="dim"))
        return Done(part.engine, 0)
    peers = peers_of(part.engine, names, runtime.device)
    rounds = run.rounds if runtime.gpu else min(run.rounds, 2)
    options = Options(rounds, budget_s=None if run.budget is None else max(0.0, run.budget - spent))
    done = measure(part.engine, cases, peers, runtime, options, outputs, setting, console, run.log)
    if done.results:
        show(done, setting, runtime, False, console)
    return done


def _summary(parts: list[Done], console: Console) -> None:
    """A line a family: cases, and what became of tilefold's rows."""
    rows = []
    for done in parts:
        ours = [row["status"] for row in done.records if row["implementation"] == "tilefold"]
        counts = ", ".join(f"{ours.count(status)} {status}" for status in dict.fromkeys(ours))
        rows.append((done.engine.name, f"{len(done.results)} of {done.asked}", counts or done.trouble or "not reached"))
    console.print()
    console.print(table_of(("family", "cases", "tilefold"), rows, left=3))
