"""Which of its arguments a mod looks at, by its source."""

import ast
import functools
import inspect
import textwrap
from typing import Any, NamedTuple

from ..types import Rules

__all__ = ["Reads", "reads"]


class Reads(NamedTuple):
    """Which of its arguments a mod may look at."""

    score: bool
    batch: bool
    head: bool


@functools.lru_cache(maxsize=256)
def reads(mask_mod: Any) -> Reads:
    """What the source of a mod names.  All of it where the source cannot be read."""
    if isinstance(mask_mod, Rules):
        parts = [_read_of(rule.function) for rule in mask_mod.rules]
        return Reads(*[any(which) for which in zip(*parts, strict=True)])
    function = getattr(mask_mod, "fn", mask_mod)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        parameters = list(inspect.signature(function).parameters)[:3]
    except (OSError, TypeError, ValueError, SyntaxError):
        return Reads(True, True, True)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return Reads(*[name in names for name in parameters])


def _read_of(function: Any) -> Reads:
    """Of a rule; names are those of device.mods."""
    if not isinstance(function, str):
        return reads(function)
    by_head = function == "keep" or function.startswith(("listed", "whole"))
    return Reads(False, by_head or function in ("keys", "prefix_each"), by_head)
