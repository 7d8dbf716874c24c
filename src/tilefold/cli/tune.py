"""`tilefold tune`: measures candidate plans on this GPU, shows what they gain, and writes a table that later processes use."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from tilefold.bench.loop import OK, WRONG
from tilefold.cli.options import integers, names_from
from tilefold.cli.progress import measuring
from tilefold.cli.runtime import Runtime, prepare_runtime, say, table_of, user_errors
from tilefold.errors import DeviceError, ValueRangeError
from tilefold.plan.device import Device
from tilefold.plan.table import OFF, VARIABLE, Table, read_table, table_path, write_table
from tilefold.tune import measure
from tilefold.tune.candidates import shown
from tilefold.tune.problems import PARTS, Tunable, problems_of_cases, problems_of_model

EPILOG = """
**Examples**

    tilefold tune --model config.json --seconds 110

    tilefold tune --model config.json --take

    tilefold tune d128_h32k4,causal --table h200.json --take

    tilefold tune --show

CASE is what `tilefold bench` names its cases of dense, decode and gemm by, in part or whole. Every candidate is compared with the
fp64 oracle before it is timed. Measurements are kept beside the table: the same command again goes on where the first one ended,
and with --take it writes what was measured. TILEFOLD_TUNED names another table or folder, or none: the rules alone.
"""


@user_errors
def tune(
    case: Annotated[str | None, Argument(metavar="CASE", help="Part of cases' names, or dense, decode, gemm.")] = None,
    model: Annotated[Path | None, Option(metavar="FILE", help="A model's config.json of Hugging Face.")] = None,
    batches: Annotated[str, Option(metavar="N,N", help="With --model: sequences of a step.")] = "1,32",
    prompts: Annotated[str, Option(metavar="N,N", help="With --model: tokens of a prompt.")] = "2048",
    caches: Annotated[str, Option(metavar="N,N", help="With --model: keys that a cache has room for.")] = "8192",
    only: Annotated[
        str | None, Option(metavar="PARTS", help="With --model: of attention, decode, linear.", show_default="all")
    ] = None,
    seconds: Annotated[float, Option(min=1, help="No candidate is begun later.")] = 120.0,
    quick: Annotated[bool, Option("--quick", help="Half of the candidates, those that promise most.")] = False,
    take: Annotated[bool, Option("--take", help="Write the table; without it nothing changes.")] = False,
    table: Annotated[Path | None, Option(metavar="FILE", help="The table.", show_default="in the user's cache")] = None,
    show: Annotated[bool, Option("--show", help="Print the table, measure nothing.")] = False,
    forget: Annotated[bool, Option("--forget", help="Delete the table and what was measured.")] = False,
) -> None:
    """Measure which plans are fastest on this GPU, for cases or for a model's shapes, and keep them for later processes.

    Nothing is ever measured when an operation is called: plans come from the rules, and from a table that this command wrote."""
    console = Console()
    if sum((show, forget, bool(case or model))) != 1 or (case and model):
        raise ValueRangeError("tune takes one of CASE, --model, --show and --forget")
    if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        raise DeviceError(
            "tilefold tune measures plans on a GPU, and torch sees none here; a table from another machine of the same GPU is "
            "used where TILEFOLD_TUNED names it"
        )
    runtime = prepare_runtime()
    device = runtime.record()
    path = _path(device, table)
    if show:
        _show(path, console)
    elif forget:
        for each in (path, _log(path)):
            there = each.exists()
            each.unlink(missing_ok=True)
            say([f"deleted {each}" if there else f"there is no {each}"], console, "")
    else:
        found = _tunables(case, model, (batches, prompts, caches), only, runtime)
        _tune(found, device, runtime, path, (seconds, quick, take), console)


def _path(device: Device, table: Path | None) -> Path:
    path = table_path(device.name, table)
    if path is None:
        raise ValueRangeError(f"{VARIABLE}={OFF} switches tables off: name one by --table, or unset it")
    return path


def _log(path: Path) -> Path:
    return path.with_suffix(".measured.jsonl")


def _tunables(
    case: str | None, model: Path | None, sizes: tuple[str, str, str], only: str | None, runtime: Runtime
) -> tuple[Tunable, ...]:
    if case is not None:
        return problems_of_cases(case, runtime.gpu)
    assert model is not None
    parts = PARTS if only is None else names_from(only, "--only", PARTS)
    names = ("--batches", "--prompts", "--caches")
    batches, prompts, caches = (integers(text, name) for text, name in zip(sizes, names, strict=True))
    found = problems_of_model(model, batches, prompts, caches, parts)
    if not found:
        raise ValueRangeError(f"--only must name at least one of {', '.join(PARTS)}, got {only!r}")
    return found


def _tune(
    tunables: Sequence[Tunable],
    device: Device,
    runtime: Runtime,
    path: Path,
    how: tuple[float, bool, bool],
    console: Console,
) -> None:
    seconds, quick, take = how
    console.print(Text(runtime.note, style="dim"))
    identity = measure.identity_of(device)
    with measuring(console, len(tunables), verb="tuning", by_case=True) as step:
        log = measure.Log(_log(path), identity)
        limits = measure.Limits(seconds, quick)
        found = measure.tune(tunables, device, runtime.device, log, limits, lambda one, what: step(one.title, what))
    _print(found, console)
    worth = [one for one in found if one.worth]
    if not take:
        what = "with --take they go to" if worth else "nothing to take for"
        say([f"Nothing has changed: {len(worth)} plans are faster, {what} {path}."], console, "bold")
        return
    before = _read(path) if path.exists() else None
    made = measure.table_of_outcomes(found, identity, before)
    dropped = 0 if before is None else len(before.entries) - sum(entry in made.entries for entry in before.entries)
    write_table(path, made)
    say([f"Wrote {path}: {len(made.entries)} plans; later processes use them."], console, "bold")
    if dropped:
        why = "measured again, or with other versions"
        say([f"{dropped} earlier ones are replaced or left out: {why}."], console)


def _print(found: Sequence[measure.Outcome], console: Console) -> None:
    """A row a problem, then what was wrong and what is left."""
    rows = []
    for one in found:
        if not one.tuned_us:
            rows.append((one.tunable.title, "-", "-", "-", "-", one.note))
            continue
        stays = "the rules' plan stays" if one.searched else "nothing better yet"
        what = shown(one.planned, one.best) if one.worth else stays
        times = f"{one.planned_us:.2f}", f"{one.tuned_us:.2f}" if one.worth else f"{one.planned_us:.2f}"
        rows.append((one.tunable.title, *times, f"{one.gain if one.worth else 1:.2f}x", str(one.tried), what))
    console.print(table_of(("problem", "planned us", "best us", "gain", "tried", "what changed"), rows))
    for one in found:
        for trial in one.trials:
            if trial.status not in (OK, "refused"):
                style = "bold red" if trial.status == WRONG else "dim"
                fields = shown(one.planned, trial.fields) if one.planned else str(trial.fields)
                line = f"{one.tunable.name}: {fields}: {trial.status}{f': {trial.note}' if trial.note else ''}"
                console.print(Text(line, style=style), soft_wrap=True)
    left = sum(not one.searched and not (one.note and one.note != "not reached") for one in found)
    if left:
        console.print(
            Text(f"The time was over before {left} of {len(found)} problems were searched: the same again goes on.")
        )


def _read(path: Path) -> Table:
    try:
        return read_table(path)
    except (OSError, ValueRangeError) as error:
        raise ValueRangeError(f"{path} cannot be read: {error}; `tilefold tune --forget` deletes it") from None


def _show(path: Path, console: Console) -> None:
    if not path.exists():
        say([f"There is no table {path}: plans come from the rules."], console, "")
        return
    table = _read(path)
    versions = f"torch {table.torch}, triton {table.triton}, tilefold {table.tilefold}"
    say([f"{path}: {len(table.entries)} plans measured on {table.title} ({versions})"], console, "bold")
    rows = [
        (entry.name, f"{entry.planned_us:.2f}", f"{entry.tuned_us:.2f}", f"{entry.gain:.2f}x", entry.date[:10],
         shown(dict(entry.instead_of), dict(entry.plan)))
        for entry in table.entries
    ]  # fmt: skip
    console.print(table_of(("problem", "planned us", "best us", "gain", "date", "what changed"), rows))
