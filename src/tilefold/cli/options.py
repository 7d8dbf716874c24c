"""The options that several commands have, each said once."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from typer import Option

Budget = Annotated[float | None, Option(min=0, metavar="SECONDS", help="Begin no further case after so long.")]
Json = Annotated[Path | None, Option(metavar="FILE", help="Write everything as JSON.")]
Markdown = Annotated[Path | None, Option(metavar="FILE", help="Write the tables for a document.")]
Png = Annotated[Path | None, Option(metavar="FILE", help="Draw the figures (needs matplotlib).")]
Html = Annotated[Path | None, Option(metavar="FILE", help="Write tables and drawing as one HTML file.")]
Results = Annotated[
    Path | None, Option(metavar="DIR", help="Append the figures of each case, when it is done, to DIR/FAMILY.jsonl.")
]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run of one family is asked, and one of a suite."""

    peers: Annotated[
        str | None,
        Option(
            metavar="NAMES",
            help="Comma-separated, or `none`; what is not installed is left out.",
            show_default="those usual here",
        ),
    ] = None
    case: Annotated[
        str | None,
        Option(
            metavar="FILTER", help="Only cases whose name has these comma-separated parts; | separates alternatives."
        ),
    ] = None
    rounds: Annotated[int, Option(min=1, help="Turns that each implementation gets.")] = 5
    budget: Budget = None
    log: Annotated[bool, Option("--log", help="A line for each step, to see where a run got stuck.")] = False
    json: Json = None
    markdown: Markdown = None
    results: Results = None
    power: Annotated[bool, Option(help="Record clocks, power and temperature (NVIDIA).")] = True


def with_run(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `run` is a RunOptions, with those options in its place."""
    names = [field.name for field in fields(RunOptions)]
    own = [one for one in inspect.signature(command).parameters.values() if one.name != "run"]

    @functools.wraps(command)
    def spread(**given: Any) -> None:
        shared = {name: given.pop(name) for name in names if name in given}
        command(**given, run=RunOptions(**shared))

    every = [*own, *inspect.signature(RunOptions).parameters.values()]
    spread.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    spread.__annotations__ = {one.name: one.annotation for one in every}
    return spread
