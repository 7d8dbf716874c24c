"""`tilefold bench compare` and `peers`: runs beside one another, and who could be measured.

Neither needs a GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from tilefold.cli.bench_flow import show_comparison
from tilefold.cli.options import CaseFilter, FailSlower, Json, Markdown, Noise
from tilefold.cli.runtime import Outputs, print_tables, user_errors
from tilefold.errors import ValueRangeError

if TYPE_CHECKING:
    from tilefold.bench.records.runs import Measured

COMPARE_EPILOG = """
**Examples**

    tilefold bench compare before.json after.json --fail-slower 3

    tilefold bench compare benchmarks/results/dense.jsonl@3ea52ebb benchmarks/results/dense.jsonl@3eee9d43 --case causal

A file of results holds many runs: the newest figures of each case count, of one commit with FILE@COMMIT. The interval is that of
the ratio of the medians, from all pairs of an old and a new round; *faster* and *slower* are intervals wholly beyond --noise,
*same* those within it, *unclear* what more rounds would tell. Exit code 1 if a result of tilefold was right and is not any more,
or with --fail-slower if its whole interval is beyond that.
"""


def _filtered(found: "list[Measured]", family: str | None, case: str | None) -> "list[Measured]":
    """Those of a family, and whose case has a filter's parts. ValueRangeError if none is left."""
    from tilefold.bench.choice import fits

    kept = [one for one in found if family in (None, one.key.family) and (case is None or fits(one.key.case, case))]
    if not kept:
        known = ", ".join(dict.fromkeys(one.key.family for one in found))
        raise ValueRangeError(f"no results of family {family!r} and case {case!r}; families there: {known}")
    return kept


@user_errors
def compare_runs(
    old: Annotated[Path, Argument(metavar="OLD", help="A .json, a .jsonl, FILE@COMMIT or a folder.")],
    new: Annotated[Path, Argument(metavar="NEW", help="The same.")],
    family: Annotated[str | None, Option(metavar="NAME", help="Only this one.")] = None,
    case: CaseFilter = None,
    fail_slower: FailSlower = None,
    noise: Noise = 2.0,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Compare two runs: ratios with intervals, what became slower, what is missing."""
    outputs = Outputs(json=json, markdown=markdown)
    from tilefold.bench.records.changes import change_markdown, compare
    from tilefold.bench.records.runs import latest, read_measured, read_rows

    before, after = (_filtered(read_measured(read_rows(path)), family, case) for path in (old, new))
    newest = latest(after)
    devices = {one.setting.get("device") for one in newest.values()}
    found = compare(latest(before, next(iter(devices)) if len(devices) == 1 else None), newest, noise / 100)
    if fail_slower is not None and found.other_device:
        raise ValueRangeError(f"--fail-slower cannot judge: {found.differences[0]}")
    console = Console()
    bad = show_comparison(found, fail_slower, console)
    outputs.write(console, json=found.record, markdown=lambda: change_markdown(found))
    if bad:
        raise typer.Exit(1)


@user_errors
def peers() -> None:
    """List the implementations that could be measured, and which of them are installed here."""
    from tilefold.bench.choice import installed
    from tilefold.bench.suites import ENGINES
    from tilefold.ops.environment import installed as version_of

    rows = []
    for engine in ENGINES.values():
        for one in engine.known.values():
            if one.name != "tilefold":
                there = version_of(one.package) or ("here" if installed(one) else "not installed")
                rows.append((engine.name, one.name, one.package, there, one.what))
    print_tables(Console(), ("family", "name", "package", "version", "what"), rows, left=5, keys=2)
