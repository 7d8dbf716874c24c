"""What every `tilefold bench` command does around a family's cases: measure, record, show, write, compare, exit code."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from tilefold.bench.loop import GPU_LOST
from tilefold.cli.options import RunOptions
from tilefold.cli.progress import measuring
from tilefold.cli.runtime import Runtime, print_tables, say, warn_of_times, writable
from tilefold.errors import ValueRangeError

if TYPE_CHECKING:
    from tilefold.bench.engine import Engine
    from tilefold.bench.power import Summary
    from tilefold.bench.records.changes import Comparison
    from tilefold.bench.records.readme import Place
    from tilefold.bench.setting import Options, Setting


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a command writes and compares with.  fail_slower and noise in per cent; old: the records that --compare named."""

    csv: Path | None = None
    json: Path | None = None
    markdown: Path | None = None
    refresh: "Place | None" = None
    results: Path | None = None
    old: tuple[dict[str, Any], ...] | None = None
    fail_slower: float | None = None
    noise: float = 2.0
    power: bool = True

    @classmethod
    def asked(cls, run: RunOptions, families: Sequence[str]) -> "Outputs":
        """From a command's options, all of them checked before anything is measured."""
        from tilefold.bench.records.readme import place_of
        from tilefold.bench.records.runs import read_rows

        place = place_of(run.refresh) if run.refresh else None
        files = {"csv": run.csv, "json": run.json, "markdown": run.markdown}
        writable({**files, "refresh": place.path if place else None})
        if place is not None:
            place.check(families)
        if run.fail_slower is not None and run.compare is None:
            raise ValueRangeError(f"--fail-slower {run.fail_slower:g} needs --compare, which says slower than what")
        old = tuple(read_rows(run.compare)) if run.compare else None
        return cls(
            **files, refresh=place, results=run.results, old=old, fail_slower=run.fail_slower, noise=run.noise,
            power=run.power,
        )  # fmt: skip

    def check_device(self, device: str) -> None:
        """ValueRangeError if --fail-slower would judge this device by another one's times."""
        if self.old is None or self.fail_slower is None:
            return
        devices = {str(row.get("device")) for row in self.old}
        if device not in devices:
            raise ValueRangeError(
                f"--fail-slower cannot judge {device} by times of {' and '.join(sorted(devices))}; leave it out to see them"
            )


@dataclass(slots=True)
class Done:
    """A family's part of a run.  records: of all results, with what the GPU did meanwhile; asked: how many cases."""

    engine: "Engine"
    asked: int
    results: list[Any] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    power: "Summary | None" = None
    trouble: str = ""

    @property
    def lost(self) -> bool:
        """Whether the GPU was lost: nothing runs any more."""
        return any(str(row.get("note", "")).startswith(GPU_LOST) for row in self.records)

    @property
    def wrong(self) -> bool:
        return bool(self.trouble) or self.engine.wrong(self.results)


def peer_names(run: RunOptions) -> tuple[tuple[str, ...] | None, bool]:
    """The names of --peers or --against, None if neither is given, and whether they have to be installed."""
    from tilefold.bench.choice import names_in

    if run.peers is not None and run.against is not None:
        raise ValueRangeError(
            "give --against or --peers, not both: they name the same, --against insists that it is there"
        )
    text = run.peers if run.against is None else run.against
    return None if text is None else names_in(text), run.against is not None


def measure(
    engine: "Engine",
    cases: Sequence[Any],
    peers: Sequence[Any],
    runtime: Runtime,
    options: "Options",
    outputs: Outputs,
    setting: "Setting",
    console: Console,
    log: bool = False,
) -> Done:
    """Run a family's cases under a progress bar; each one's records are kept, and appended to the results, as soon as they are
    there, should a later one fail."""
    from tilefold.bench import power
    from tilefold.bench.records.record import append_rows

    done = Done(engine, len(cases))
    with power.Sampler(power.source_of(runtime.device) if outputs.power else None) as sampler:
        begin = time.perf_counter()

        def keep(result: Any) -> None:
            nonlocal begin
            meanwhile = sampler.since(begin)
            more = {"power": meanwhile.record()} if meanwhile else {}
            rows = [row | more for row in engine.records(result, setting)]
            done.records += rows
            if outputs.results is not None:
                append_rows(outputs.results / f"{engine.name}.jsonl", rows)
            begin = time.perf_counter()

        with measuring(console, len(cases) * (len(peers) + 1), log) as step:
            done.results = engine.run(
                cases, peers, runtime.device, options, lambda case, what: step(case.name, what), keep
            )
        done.power = sampler.since()
    if len(done.results) < len(cases):
        console.print(Text(f"{len(done.results)} of {len(cases)} cases were reached", style="yellow"))
    return done


# --- on the terminal --------------------------------------------------------------------------------------------------------


def show(done: Done, setting: "Setting", runtime: Runtime, details: bool, console: Console) -> None:
    """Print the tables, the notes and what the GPU's clock did; details: with spreads, errors and what else was measured."""
    for sheet in done.engine.sheets(done.results, setting):
        console.print(Text(sheet.title, style="bold"))
        print_tables(console, sheet.head, sheet.rows, left=sheet.left)
    for piece in done.engine.details(done.results, console.width, details or not runtime.gpu):
        console.print(piece)
    say(done.engine.notes(done.results), console)
    if done.power is not None:
        say([str(done.power)], console)
        say([f"warning: {line}" for line in done.power.warnings], console, "yellow")


def show_comparison(found: "Comparison", fail_slower: float | None, console: Console) -> bool:
    """Print what became of each figure; whether that is a regression. fail_slower: per cent, None: times fail nothing;
    with it a comparison of nothing fails, too."""
    from tilefold.bench.records.changes import change_lines, change_table

    say([f"NOT THE SAME SETTING: {line}" for line in found.differences], console, "bold yellow")
    table = change_table(found)
    if table.rows:
        print_tables(console, table.head, table.rows, left=3)
    say(change_lines(found), console)
    bad = found.regressions(None if fail_slower is None else fail_slower / 100)
    for one in bad:
        ratio = f"{one.ratio:.3f} times as long" if one.verdict != "worse" and one.ratio else one.note
        console.print(Text(f"regression: {one.key}, {one.method}: {ratio}", style="bold red"), soft_wrap=True)
    nothing = fail_slower is not None and not any(one.ours for one in found.changes)
    if nothing:
        console.print(
            Text("regression: nothing of tilefold was compared, so nothing was found to be as fast", style="bold red")
        )
    return bool(bad) or nothing


# --- the end of a run -------------------------------------------------------------------------------------------------------


def finish(parts: Sequence[Done], setting: "Setting", runtime: Runtime, outputs: Outputs, console: Console) -> None:
    """Write what was asked for, compare with the old run, and exit with 1 if a result of tilefold is wrong or became slower."""
    warn_of_times(runtime, console)
    measured = [done for done in parts if done.results]
    if measured:
        _write(measured, setting, outputs, console)
    worse = False
    if outputs.old is not None:
        from tilefold.bench.records.changes import compare
        from tilefold.bench.records.runs import latest, read_measured

        new = latest(read_measured([row for done in parts for row in done.records]))
        families = {done.engine.name for done in parts}
        old = latest(read_measured([row for row in outputs.old if row.get("family") in families]), setting.device)
        console.print()
        console.print(Text("Compared with the old run", style="bold"))
        worse = show_comparison(compare(old, new, outputs.noise / 100), outputs.fail_slower, console)
    if worse or any(done.wrong for done in parts):
        raise typer.Exit(1)


def _write(parts: Sequence[Done], setting: "Setting", outputs: Outputs, console: Console) -> None:
    """Write the files that were asked for and say so; the results were appended before."""
    from tilefold.bench.records.record import csv_text, json_text, markdown_text

    rows = [row for done in parts for row in done.records]
    marked = {
        done.engine.name: markdown_text(
            done.engine.sheets(done.results, setting), setting, done.engine.notes(done.results), _power_line(done)
        )
        for done in parts
    }
    if outputs.csv is not None:
        outputs.csv.write_text(csv_text(rows), encoding="utf-8")
    if outputs.json is not None:
        more: dict[str, Any] = {"command": ["tilefold", *sys.argv[1:]]}
        more["power"] = {done.engine.name: done.power.record() for done in parts if done.power}
        whole = {done.engine.name: done.engine.findings(done.results) for done in parts}
        more |= next(iter(whole.values())) if len(parts) == 1 else {"families": whole}
        outputs.json.write_text(json_text(setting, rows, **more), encoding="utf-8")
    if outputs.markdown is not None:
        several = "\n".join(f"### {name}\n\n{text}" for name, text in marked.items())
        outputs.markdown.write_text(several if len(parts) > 1 else next(iter(marked.values())), encoding="utf-8")
    said = [f"wrote {path}" for path in (outputs.csv, outputs.json, outputs.markdown) if path is not None]
    if outputs.refresh is not None:
        names = outputs.refresh.write(marked)
        said.append(f"refreshed {', '.join(names) or 'nothing'} in {outputs.refresh.path}")
    if outputs.results is not None:
        files = ((outputs.results / f"{done.engine.name}.jsonl", len(done.records)) for done in parts)
        said += [f"appended {count} rows to {path}" for path, count in files]
    say(said, console)


def _power_line(done: Done) -> str:
    if done.power is None:
        return ""
    return "; ".join([f"While it was measured: {done.power}", *done.power.warnings])
