"""Conditions on program ids, written as text: which programs of a grid are meant.

One condition per grid axis, separated by commas: `0`, `=0` or `==0`, `!=3`, `<4`, `<=4`, `>1`, `>=1`, and `*` or nothing for any
program. Axes that are not mentioned are any, too: `"0,>1"` is program 0 of the first axis and 2, 3, ... of the second.
"""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilefold.errors import DtypeError, ValueRangeError

AXES = 3  # of a grid
LARGEST = 2**31 - 1  # program ids are int32
FORM = re.compile(r"(==|=|!=|<=|>=|<|>)?\s*(\d+)", re.ASCII)
HOLDS: dict[str, Callable[[int, int], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
ACCEPTED = "a number from 0 with =, ==, !=, <, <=, > or >= before it or nothing, or * for any program"


@dataclass(frozen=True, slots=True)
class AxisCondition:
    """What holds of a program id on one axis. relation: one of = != < <= > >=; value: at least 0."""

    axis: int
    relation: str
    value: int

    def __str__(self) -> str:
        return f"{self.relation}{self.value}"


@dataclass(frozen=True, slots=True)
class ProgramCondition:
    """The conditions that all have to hold, in the order of their axes; none at all is true of every program."""

    parts: tuple[AxisCondition, ...]

    def holds(self, program: Sequence[int]) -> bool:
        """Whether the program of these ids, one per axis, is meant; axes that are not given count as 0, as in a launch."""
        ids = (*program, *(0,) * AXES)
        return all(HOLDS[part.relation](ids[part.axis], part.value) for part in self.parts)

    def __str__(self) -> str:
        given = {part.axis: str(part) for part in self.parts}
        return ",".join(given.get(axis, "*") for axis in range(max(given, default=0) + 1))


def parse_condition(text: object) -> ProgramCondition:
    """Read a condition on program ids; DtypeError if it is no string, ValueRangeError with the part that cannot be read."""
    if not isinstance(text, str):
        raise DtypeError(f"condition must be a string like '0,>1', got {text!r} of type {type(text).__name__}")
    fields = [field.strip() for field in text.split(",")]
    if len(fields) > AXES:
        raise ValueRangeError(f"condition {text!r} is about {len(fields)} grid axes, a grid has at most {AXES}")
    parts = []
    for axis, field in enumerate(fields):
        if field in ("", "*"):
            continue
        match = FORM.fullmatch(field)
        if match is None:
            raise ValueRangeError(f"condition {text!r}: axis {axis} says {field!r}, accepted: {ACCEPTED}")
        relation, value = match[1] or "=", int(match[2])
        if value > LARGEST:
            raise ValueRangeError(f"condition {text!r}: axis {axis} says {value}, program ids are at most {LARGEST}")
        parts.append(AxisCondition(axis, "=" if relation == "==" else relation, value))
    return ProgramCondition(tuple(parts))
