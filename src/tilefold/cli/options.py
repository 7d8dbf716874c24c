"""The options that several commands have, each said once."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Against",
    "Budget",
    "CaseFilter",
    "Compare",
    "Csv",
    "FailSlower",
    "Html",
    "Json",
    "Log",
    "Markdown",
    "Noise",
    "Peers",
    "Png",
    "Power",
    "Refresh",
    "Results",
    "Rounds",
]

Peers = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Comma-separated, or `none`; what is not installed is left out.",
        show_default="those usual here",
    ),
]
Against = Annotated[
    str | None, typer.Option(metavar="NAMES", help="As --peers, but they must be installed; `installed`: all that are.")
]
CaseFilter = Annotated[
    str | None,
    typer.Option(
        metavar="FILTER", help="Only cases whose name has these comma-separated parts; | separates alternatives."
    ),
]
Rounds = Annotated[int, typer.Option(min=1, help="Turns that each implementation gets.")]
Budget = Annotated[float | None, typer.Option(min=0, metavar="SECONDS", help="Begin no further case after so long.")]
Log = Annotated[bool, typer.Option("--log", help="A line for each step, to see where a run got stuck.")]
Csv = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as CSV.")]
Json = Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything as JSON.")]
Markdown = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the tables for a document.")]
Png = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the figures (needs matplotlib).")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write tables and drawing as one HTML file.")]
Refresh = Annotated[
    str | None,
    typer.Option(metavar="FILE[#LABEL]", help="Put them between a document's marks for the family."),
]
Results = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Append the figures of each case, when it is done, to DIR/FAMILY.jsonl."),
]
Compare = Annotated[
    Path | None,
    typer.Option(
        metavar="OLD", help="Compare with a .json or .jsonl (FILE@COMMIT: one commit's) or a folder of results."
    ),
]
FailSlower = Annotated[
    float | None,
    typer.Option(min=0, metavar="PERCENT", help="Exit code 1 if tilefold surely became slower by more."),
]
Noise = Annotated[float, typer.Option(min=0, metavar="PERCENT", help="What may differ between runs of the same code.")]
Power = Annotated[bool, typer.Option(help="Record clocks, power and temperature (NVIDIA).")]
