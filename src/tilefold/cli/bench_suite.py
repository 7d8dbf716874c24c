"""`tilefold bench suite`: named sets of families and cases, one after the other, whatever becomes of one of them."""

import time
from typing import Annotated

from rich.console import Console
from rich.text import Text
from typer import Argument

from tilefold.bench.setting import Options
from tilefold.bench.suites import SUITES, Part, Suite, suite_named
from tilefold.cli.bench_flow import Done, Session
from tilefold.cli.options import RunOptions, names_from, with_run
from tilefold.cli.runtime import prepare_runtime, say, table_of, user_errors
from tilefold.errors import ValueRangeError

EPILOG = """
**Examples**

    tilefold bench suite

    tilefold bench suite quick --json quick.json

    tilefold bench suite readme --results benchmarks/results --markdown figures.md

Without a name the suites are listed. A case that fails is reported, and the next one begun; so is a family. --budget is for the
whole. Options mean what they mean for one family (`tilefold bench dense --help`); peers that a family does not know are left out
there. Exit code 1 if a result of tilefold is wrong or failed.
"""


@with_run
@user_errors
def suite(
    run: RunOptions,
    name: Annotated[str | None, Argument(metavar="NAME", help="Which one.", show_default="list them")] = None,
) -> None:
    """Run a named set of families and cases."""
    if name is None:
        Console().print(table_of(("suite", "what"), [(one.name, one.what) for one in SUITES.values()], left=2))
        return
    runtime = prepare_runtime(kernels=False)
    chosen = suite_named(name, runtime.gpu)
    known = dict.fromkeys(peer for part in chosen.parts for peer in part.engine.known if peer != "tilefold")
    names = None if run.peers is None else names_from(run.peers.lower(), "--peers", tuple(known))
    session = Session(run, runtime)
    if run.case is not None and not any(part.cases(run.case, runtime.gpu) for part in chosen.parts):
        raise ValueRangeError(f"case filter {run.case!r} matches no case of the suite {name!r}")
    session.begin()
    parts = _parts(chosen, names, session)
    rows = []
    for done in parts:
        ours = [row["status"] for row in done.records if row["implementation"] == "tilefold"]
        counts = ", ".join(f"{ours.count(status)} {status}" for status in dict.fromkeys(ours))
        rows.append((done.engine.name, f"{len(done.results)} of {done.asked}", counts or done.trouble or "not reached"))
    session.console.print()
    session.console.print(table_of(("family", "cases", "tilefold"), rows, left=3))
    session.finish(parts)


def _parts(chosen: Suite, names: tuple[str, ...] | None, session: Session) -> list[Done]:
    """Every part that has cases; names: of the peers."""
    parts: list[Done] = []
    begin = time.perf_counter()
    for part in chosen.parts:
        session.console.print(Text(f"\n{part.family}", style="bold underline"))
        try:
            done = _part(part, names, time.perf_counter() - begin, session)
        except Exception as error:  # a family that cannot even begin must not cost the others their figures
            done = Done(part.engine, 0, trouble=f"{part.family} failed: {type(error).__name__}: {error}")
            say([done.trouble], session.console)
        if done.asked or done.trouble:
            parts.append(done)
        if done.lost:
            left = [each.family for each in chosen.parts[chosen.parts.index(part) + 1 :]]
            done.trouble = f"the GPU was lost in {part.family}: {', '.join(left) or 'nothing'} was not reached"
            say([done.trouble], session.console)
            break
    return parts


def _part(part: Part, names: tuple[str, ...] | None, spent: float, session: Session) -> Done:
    """One family; names: of the peers, of which those count that it knows; spent: seconds of the budget."""
    run, runtime = session.run, session.runtime
    cases = part.cases(run.case, runtime.gpu)
    if not cases:
        session.console.print(Text("no case has what the filter asks for", style="dim"))
        return Done(part.engine, 0)
    peers = part.peers if names is None else [name for name in names if name in part.engine.known]
    options = Options(session.rounds, budget_s=None if run.budget is None else max(0.0, run.budget - spent))
    return session.measure(part.engine, cases, part.engine.beside(peers, runtime.device), options)
