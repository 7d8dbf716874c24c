"""The options that several commands have, each said once, and how their texts are read."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from tilefold.errors import DtypeError, ValueRangeError

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


# ---------------------------------------------------------------- the texts of options

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
DTYPES = _SHORT | {name: name for name in _SHORT.values()}


def dtype_named(name: str, known: Mapping[str, str] = DTYPES, accepted: str = "bf16, fp16 or fp32") -> str:
    """The full name of a dtype given in full or short ("bf16"). DtypeError if unknown."""
    if name.lower() not in known:
        raise DtypeError(f"dtype must be {accepted} (or their full names), got {name!r}")
    return known[name.lower()]


def numbers(
    text: str, accepted: str, kind: type = int, counts: tuple[int, ...] = (), above: float = float("-inf")
) -> tuple[Any, ...]:
    """Comma-separated numbers, as many as one of counts says, all above a bound.  ValueRangeError, with what is accepted."""
    try:
        found = tuple(kind(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or (counts and len(found) not in counts) or min(found) <= above:
        raise ValueRangeError(f"{accepted}, got {text!r}")
    return found


def pair_of(text: str, name: str, form: str = "LEFT,RIGHT such as 255,0 (-1 is unbounded)") -> tuple[int, int]:
    """Two integers from "L,R". ValueRangeError, with the form that is accepted, otherwise."""
    left, right = numbers(text, f"{name} must be two integers {form}", counts=(2,))
    return left, right


def integers(text: str, name: str, count: int | None = None) -> tuple[int, ...]:
    """`count` integers of at least 1 from "1,12,23296,128", any number if None. ValueRangeError otherwise."""
    how_many = f"{count} " if (count or 1) > 1 else ""
    accepted = f"{name} must be {how_many}integers of at least 1, comma-separated"
    return numbers(text, accepted, counts=() if count is None else (count,), above=0)


def one_of(value: str, name: str, known: Iterable[str]) -> str:
    """The value, one of those that are known.  ValueRangeError otherwise."""
    if value not in known:
        raise ValueRangeError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    return value


def names_from(text: str, name: str, known: Sequence[str]) -> tuple[str, ...]:
    """Comma-separated names, all of them known, or () from "none". ValueRangeError otherwise."""
    found = () if text == "none" else tuple(part.strip() for part in text.split(",") if part.strip())
    for each in found:
        if each not in known:
            raise ValueRangeError(f"{name} must be from {', '.join(known)} (or none), got {each!r}")
    return found
