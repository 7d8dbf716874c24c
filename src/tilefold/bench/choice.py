"""Which cases take part: by parts of their names, or by a list of figures; and which peers are installed."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from tilefold.bench.family import Peer
from tilefold.errors import ValueRangeError
from tilefold.ops.environment import installed as version_of

Cases = TypeVar("Cases")
OneCase = TypeVar("OneCase", bound="Named")


class Named(Protocol):
    """What a filter of names needs to know of a case."""

    @property
    def name(self) -> str: ...


def select_cases(cases: tuple[OneCase, ...], pattern: str | None) -> tuple[OneCase, ...]:
    """The cases whose name contains every part of a pattern ("d128,causal"), or of one of several ("random_s50|video").

    Raises ValueRangeError if none is left."""
    if pattern is None:
        return cases
    chosen = tuple(case for case in cases if fits(case.name, pattern))
    if not chosen:
        raise ValueRangeError(f"case filter {pattern!r} matches none of: {', '.join(case.name for case in cases)}")
    return chosen


def of_size(size: str, known: Mapping[str, Cases]) -> Cases:
    """The cases of a size: "full", "quick" or "tiny".  ValueRangeError for another one."""
    if size not in known:
        raise ValueRangeError(f"size must be one of {', '.join(known)}, got {size!r}")
    return known[size]


def fits(name: str, pattern: str) -> bool:
    """Whether a name has every part of a pattern, or of one of several."""
    choices = ([part.strip().lower() for part in one.split(",") if part.strip()] for one in pattern.split("|"))
    return any(parts and all(part in name.lower() for part in parts) for parts in choices)


def figures_in(text: str, option: str) -> tuple[float, ...]:
    """Comma-separated numbers; "1,10,20,...,99" goes on in the last step (10) below the number behind the dots (1, 10, 20, 30 ...
    90, 99).  ValueRangeError names the option."""
    parts = [part.strip() for part in text.split(",")]
    found: list[float] = []
    try:
        for at, part in enumerate(parts):
            if part == "...":
                found += _between(found, float(parts[at + 1]))
            else:
                found.append(float(part))
    except (ValueError, IndexError):
        raise ValueRangeError(
            f"{option} must be comma-separated numbers, or two numbers that rise, ... and a last one, got {text!r}"
        ) from None
    return tuple(found)


def _between(found: Sequence[float], last: float) -> list[float]:
    """The numbers behind found, in the step of its last two, below last."""
    step = found[-1] - found[-2]
    if step <= 0 or not last < float("inf"):
        raise ValueError(step)
    count = max(0, math.ceil((last - found[-1]) / step - 1e-9) - 1)
    return [round(found[-1] + step * n, 9) for n in range(1, count + 1)]


def installed(one: Peer) -> bool:
    """Whether the distribution that an implementation comes in is installed."""
    return one.package in ("torch", "tilefold") or version_of(one.package) is not None
