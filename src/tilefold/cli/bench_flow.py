"""What every `tilefold bench` command does around a family's cases: measure, record, show, write, exit code."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from tilefold.bench import power
from tilefold.bench.engine import Engine
from tilefold.bench.loop import GPU_LOST
from tilefold.bench.power import Summary
from tilefold.bench.record import append_rows, json_text, markdown_text
from tilefold.bench.setting import Options, Setting, setting_of
from tilefold.cli.options import RunOptions
from tilefold.cli.progress import measuring
from tilefold.cli.runtime import Outputs, Runtime, print_tables, say
from tilefold.ops.device import interpreting


def header(setting: Setting, runtime: Runtime, console: Console) -> None:
    """Where, and with what, something is measured."""
    text = f"{runtime.note}\ntorch {setting.torch}, triton {setting.triton}, commit {setting.commit}"
    console.print(Text(text, style="dim"))


def warn_of_times(runtime: Runtime, console: Console) -> None:
    """What times without a GPU are worth."""
    if not runtime.gpu:
        where = "in the interpreter" if interpreting() else "of plain torch on a CPU"
        text = f"Times {where} say nothing about a GPU; the outputs were checked all the same."
        console.print(Text(text, style="yellow"))


@dataclass(slots=True)
class Done:
    """A family's part of a run.  records: of all results, with what the GPU did meanwhile; asked: how many cases."""

    engine: Engine
    asked: int
    results: list[Any] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    power: Summary | None = None
    trouble: str = ""

    @property
    def lost(self) -> bool:
        """Whether the GPU was lost: nothing runs any more."""
        return any(str(row.get("note", "")).startswith(GPU_LOST) for row in self.records)

    @property
    def wrong(self) -> bool:
        return bool(self.trouble) or self.engine.wrong(self.results)


class Session:
    """A run of a command: what it was asked, where kernels run, what it writes, where it prints.

    What cannot be written is refused when it is made, before anything is measured."""

    def __init__(self, run: RunOptions, runtime: Runtime) -> None:
        self.run, self.runtime, self.console = run, runtime, Console()
        self.outputs = Outputs(json=run.json, markdown=run.markdown)
        self.setting = setting_of(runtime.device)

    @property
    def rounds(self) -> int:
        """Turns that each implementation gets: two at most in the interpreter."""
        return min(self.run.rounds, 2) if interpreting() else self.run.rounds

    def begin(self) -> None:
        header(self.setting, self.runtime, self.console)

    def measure(
        self, engine: Engine, cases: Sequence[Any], peers: Sequence[Any], options: Options, details: bool = False
    ) -> Done:
        """Run a family's cases under a progress bar and show what was found; details: with spreads, errors and what else was
        measured.  Each case's records are kept and appended to the results as soon as they are there: a later one may fail."""
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
        """Write what was asked for, exit with 1 if a result of tilefold is wrong."""
        warn_of_times(self.runtime, self.console)
        if measured := [done for done in parts if done.results]:
            self._write(measured)
        if any(done.wrong for done in parts):
            raise typer.Exit(1)

    def _write(self, parts: Sequence[Done]) -> None:
        """Write the files that were asked for and say so; the results were appended before."""

        def json() -> str:
            whole = {done.engine.name: done.engine.findings(done.results) for done in parts}
            more: dict[str, Any] = {"command": ["tilefold", *sys.argv[1:]]}
            more["power"] = {done.engine.name: asdict(done.power) for done in parts if done.power}
            more |= next(iter(whole.values())) if len(parts) == 1 else {"families": whole}
            return json_text(self.setting, [row for done in parts for row in done.records], **more)

        def markdown() -> str:
            texts = []
            for done in parts:
                sheets, notes = done.engine.sheets(done.results, self.setting), done.engine.notes(done.results)
                meanwhile = [f"While it was measured: {done.power}", *done.power.warnings] if done.power else []
                text = markdown_text(sheets, self.setting, notes, "; ".join(meanwhile))
                texts.append(f"### {done.engine.name}\n\n{text}" if len(parts) > 1 else text)
            return "\n".join(texts)

        self.outputs.write(self.console, json=json, markdown=markdown)
        if self.run.results is not None:
            files = ((self.run.results / f"{done.engine.name}.jsonl", len(done.records)) for done in parts)
            say([f"appended {count} rows to {path}" for path, count in files], self.console)
