"""The ladder: the same attention in five small programs to read, run, check and measure, each with what it teaches.

    from tilefold import ladder
    ladder.naive.attention(q, k, v, causal=True)     # also profile, flash, split; paged takes a cache
    with ladder.counting() as counts: ...            # in the interpreter: bytes and FLOPs of what runs inside

`tilefold ladder` is its command, docs/tutorials/ladder/ its course."""

import importlib
from typing import TYPE_CHECKING, Any

from tilefold.ladder.rungs import RUNGS, Rung, rung_named, up_to

if TYPE_CHECKING:
    from tilefold.ladder import flash, naive, paged, profile, split
    from tilefold.ladder.cache import PagedCache, paged_cache
    from tilefold.ladder.count import counting
    from tilefold.ladder.inputs import Tile

__all__ = [
    "RUNGS",
    "PagedCache",
    "Rung",
    "Tile",
    "counting",
    "flash",
    "naive",
    "paged",
    "paged_cache",
    "profile",
    "rung_named",
    "split",
    "up_to",
]

_ELSEWHERE = {"Tile": "inputs", "PagedCache": "cache", "paged_cache": "cache", "counting": "count"}


def __getattr__(name: str) -> Any:
    """The programs load when they are used: they import triton."""
    if name in RUNGS:
        return importlib.import_module(f".{name}", __name__)
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(f".{_ELSEWHERE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
