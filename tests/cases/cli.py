"""`tilefold`'s command line in this process, and whether what it prints fits the terminal."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from typer.testing import CliRunner

from tilefold.cli.app import app

WIDTH = 80


@contextmanager
def widths() -> Iterator[list[tuple[str, int, int]]]:
    """(first heading, how wide it wants to be, how wide the console is) of each table of figures that is printed meanwhile.

    None is wider than the terminal, so that rich has no figure to wrap or cut; a last column on the left is prose, which may be
    wrapped."""
    seen = []
    true = Console.print

    def spy(self: Console, *objects: Any, **options: Any) -> None:
        for one in objects:
            if isinstance(one, Table) and one.columns[-1].justify != "left":
                room = self.options.update(max_width=10_000)
                seen.append((str(one.columns[0].header) or "?", Measurement.get(self, room, one).maximum, self.width))
        true(self, *objects, **options)

    with patch.object(Console, "print", spy):
        yield seen


def command(*names: str, columns: int = WIDTH, **environment: str) -> Callable[..., Any]:
    """run(*arguments, code=0): the command `names` with arguments, which has to end with that exit code; None: with any.
    Strings are words, several if there are spaces, and a tuple is what it holds: run("dense --quick", ("--json", path)).

    -> the runner's result, and as `said` its output with every run of white space as one space.  Its tables have to fit."""

    def run(*arguments: Any, code: int | None = 0, **more: str) -> Any:
        given = {"COLUMNS": str(columns), "NO_COLOR": "1", **environment, **more}
        with widths() as seen:
            result: Any = CliRunner().invoke(app, [*names, *_words(arguments)], env=given)
        assert code is None or result.exit_code == code, result.output
        assert [one for one in seen if one[1] > one[2]] == []
        assert "\u2026" not in result.output
        result.said = " ".join(result.output.split())
        return result

    return run


def _words(given: Any) -> list[str]:
    if isinstance(given, tuple | list):
        return [word for one in given for word in _words(one)]
    return shlex.split(given) if isinstance(given, str) else [str(given)]


def refused(run: Callable[..., Any], *cases: tuple[Any, str]) -> None:
    """Each (arguments, message) is wrong usage, and told so."""
    for arguments, message in cases:
        result = run(arguments, code=2)
        assert message in result.said, result.output


def reports(folder: Path, name: str, *kinds: str) -> tuple[dict[str, Path], list[str]]:
    """({kind: file}, the options that ask for them)."""
    files = {kind: folder / f"{name}.{kind}" for kind in kinds}
    return files, [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
