"""What every `tilefold bench` command does around a family's cases: measure, record, show, write, compare, exit code."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from tilefold.bench.loop import GPU_LOST
from tilefold.cli.options import RunOptions
from tilefold.cli.progress import measuring
from tilefold.cli.runtime import Outputs, Runtime, header, print_tables, say, warn_of_times
from tilefold.errors import ValueRangeError
from tilefold.ops.device import interpreting

if TYPE_CHECKING:
    from tilefold.bench.engine import Engine
    from tilefold.bench.power import Summary
    from tilefold.bench.records.changes import Comparison
    from tilefold.bench.setting import Options


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


class Session:
    """A run of a command: what it was asked, where kernels run, what it writes and compares with, where it prints.

    All that can be refused is refused when it is made, before anything is measured."""

    def __init__(self, run: RunOptions, families: Sequence[str], runtime: Runtime) -> None:
        from tilefold.bench.records.readme import place_of
        from tilefold.bench.records.runs import read_rows
        from tilefold.bench.setting import setting_of

        self.run, self.runtime, self.console = run, runtime, Console()
        self.place = place_of(run.refresh) if run.refresh else None
        self.outputs = Outputs(csv=run.csv, json=run.json, markdown=run.markdown)
        if self.place is not None:
            Outputs(refresh=self.place.path)
            self.place.check(families)
        if run.fail_slower is not None and run.compare is None:
            raise ValueRangeError(f"--fail-slower {run.fail_slower:g} needs --compare, which says slower than what")
        self.old = read_rows(run.compare) if run.compare else None
        self.setting = setting_of(runtime.device)
        if self.old is not None and run.fail_slower is not None:
            here, devices = self.setting.device, {str(row.get("device")) for row in self.old}
            if here not in devices:
                raise ValueRangeError(
                    f"--fail-slower cannot judge {here} by times of {' and '.join(sorted(devices))}; leave it out to see them"
                )

    @property
    def rounds(self) -> int:
        """Turns that each implementation gets: two at most in the interpreter."""
        return min(self.run.rounds, 2) if interpreting() else self.run.rounds

    def begin(self) -> None:
        header(self.setting, self.runtime, self.console)

    def measure(
        self, engine: "Engine", cases: Sequence[Any], peers: Sequence[Any], options: "Options", details: bool = False
    ) -> Done:
        """Run a family's cases under a progress bar and show what was found; details: with spreads, errors and what else was
        measured.  Each case's records are kept and appended to the results as soon as they are there: a later one may fail."""
        from tilefold.bench import power
        from tilefold.bench.records.record import append_rows

        done, device = Done(engine, len(cases)), self.runtime.device
        with power.Sampler(power.gpu_id() if self.run.power else None) as sampler:
            begin = sampler.mark()

            def keep(result: Any) -> None:
                nonlocal begin
                meanwhile = sampler.since(begin)
                more = {"power": asdict(meanwhile)} if meanwhile else {}
                rows = [row | more for row in engine.records(result, self.setting)]
                done.records += rows
                if self.run.results is not None:
                    append_rows(self.run.results / f"{engine.name}.jsonl", rows)
                begin = sampler.mark()

            with measuring(self.console, len(cases) * (len(peers) + 1), self.run.log) as step:
                done.results = engine.run(cases, peers, device, options, lambda case, what: step(case.name, what), keep)
            done.power = sampler.since()
        if len(done.results) < len(cases):
            self.console.print(Text(f"{len(done.results)} of {len(cases)} cases were reached", style="yellow"))
        if done.results:
            self._show(done, details)
        return done

    def _show(self, done: Done, details: bool) -> None:
        """The tables, the notes and what the GPU's clock did."""
        console = self.console
        for sheet in done.engine.sheets(done.results, self.setting):
            console.print(Text(sheet.title, style="bold"))
            print_tables(console, sheet.head, sheet.rows, left=sheet.left)
        for piece in done.engine.details(done.results, console.width, details or not self.runtime.gpu):
            console.print(piece)
        say(done.engine.notes(done.results), console)
        if done.power is not None:
            say([str(done.power)], console)
            say([f"warning: {line}" for line in done.power.warnings], console, "yellow")

    def finish(self, parts: Sequence[Done]) -> None:
        """Write what was asked for, compare with the old run, exit with 1 if a result of tilefold is wrong or became slower."""
        warn_of_times(self.runtime, self.console)
        measured = [done for done in parts if done.results]
        if measured:
            self._write(measured)
        worse = False
        if self.old is not None:
            from tilefold.bench.records.changes import compare
            from tilefold.bench.records.runs import latest, read_measured

            new = latest(read_measured([row for done in parts for row in done.records]))
            families = {done.engine.name for done in parts}
            before = read_measured([row for row in self.old if row.get("family") in families])
            self.console.print(Text("\nCompared with the old run", style="bold"))
            found = compare(latest(before, self.setting.device), new, self.run.noise / 100)
            worse = show_comparison(found, self.run.fail_slower, self.console)
        if worse or any(done.wrong for done in parts):
            raise typer.Exit(1)

    def _write(self, parts: Sequence[Done]) -> None:
        """Write the files that were asked for and say so; the results were appended before."""
        from tilefold.bench.records.record import csv_text, json_text, markdown_text

        rows = [row for done in parts for row in done.records]
        marked = {}
        for done in parts:
            sheets, notes = done.engine.sheets(done.results, self.setting), done.engine.notes(done.results)
            meanwhile = [f"While it was measured: {done.power}", *done.power.warnings] if done.power else []
            marked[done.engine.name] = markdown_text(sheets, self.setting, notes, "; ".join(meanwhile))
        more: dict[str, Any] = {"command": ["tilefold", *sys.argv[1:]]}
        more["power"] = {done.engine.name: asdict(done.power) for done in parts if done.power}
        whole = {done.engine.name: done.engine.findings(done.results) for done in parts}
        more |= next(iter(whole.values())) if len(parts) == 1 else {"families": whole}
        several = "\n".join(f"### {name}\n\n{text}" for name, text in marked.items())
        self.outputs.write(
            self.console,
            csv=lambda: csv_text(rows),
            json=lambda: json_text(self.setting, rows, **more),
            markdown=lambda: several if len(parts) > 1 else next(iter(marked.values())),
        )
        said = []
        if self.place is not None:
            names = self.place.write(marked)
            said.append(f"refreshed {', '.join(names) or 'nothing'} in {self.place.path}")
        if self.run.results is not None:
            files = ((self.run.results / f"{done.engine.name}.jsonl", len(done.records)) for done in parts)
            said += [f"appended {count} rows to {path}" for path, count in files]
        say(said, self.console)


def peer_names(run: RunOptions) -> tuple[tuple[str, ...] | None, bool]:
    """The names of --peers or --against, None if neither is given, and whether they have to be installed."""
    from tilefold.bench.choice import names_in

    if run.peers is not None and run.against is not None:
        raise ValueRangeError(
            "give --against or --peers, not both: they name the same, --against insists that it is there"
        )
    text = run.peers if run.against is None else run.against
    return None if text is None else names_in(text), run.against is not None


def show_comparison(found: "Comparison", fail_slower: float | None, console: Console) -> bool:
    """Print what became of each figure; whether that is a regression. fail_slower: per cent, None: times fail nothing;
    with it a comparison of nothing fails, too."""
    from tilefold.bench.records.changes import change_lines, change_table

    say([f"NOT THE SAME SETTING: {line}" for line in found.differences], console, "bold yellow")
    table = change_table(found)
    if table.rows:
        print_tables(console, table.head, table.rows, table.left)
    say(change_lines(found), console)
    bad = []
    for one in found.regressions(None if fail_slower is None else fail_slower / 100):
        ratio = f"{one.ratio:.3f} times as long" if one.verdict != "worse" and one.ratio else one.note
        bad.append(f"{one.key}, {one.method}: {ratio}")
    if fail_slower is not None and not any(one.ours for one in found.changes):
        bad.append("nothing of tilefold was compared, so nothing was found to be as fast")
    say((f"regression: {line}" for line in bad), console, "bold red")
    return bool(bad)
