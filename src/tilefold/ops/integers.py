"""Integers in tuples of arguments, of which a compilation needs only the width."""

from collections.abc import Sequence
from typing import Any


class RuntimeInt(int):
    """An integer in a tuple of arguments of which only the width, 32 or 64 bits, decides a compilation."""

    __slots__ = ()


STAND_INS = 17, (1 << 32) + 17  # what is compiled for: neither 1 nor a multiple of 16


def runtime_ints(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments whose integers are RuntimeInts."""
    return tuple([RuntimeInt(arg) if type(arg) is int else arg for arg in args])


def general(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments as a kernel is compiled for them: any number for a RuntimeInt."""
    return tuple([
        general(arg) if type(arg) is tuple else STAND_INS[is_wide(arg)] if type(arg) is RuntimeInt else arg for arg in args
    ])  # fmt: skip


def is_wide(value: int) -> bool:
    """Whether it takes 64 bits."""
    return not -(1 << 31) <= value < 1 << 31
