"""Which of its arguments a mod looks at, by its source."""

import ast
import functools
import inspect
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from ..types import Rules

PARAMETERS = ["score", "batch", "head", "q_index", "kv_index", "args"]  # of a mod


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
    """Of a rule: a name of device.mods, or a function."""
    if not isinstance(function, str):
        return reads(function)
    rule = _functions().get(function)
    if rule is None or _parameters(rule) != PARAMETERS:
        return Reads(True, True, True)
    return Reads(*[parameter in _looked_at(function) for parameter in PARAMETERS[:3]])


@functools.cache
def _functions() -> dict[str, ast.FunctionDef]:
    """Of device.mods, also by their second names.  The file is parsed: to import it needs triton."""
    try:
        tree = ast.parse((Path(__file__).parents[1] / "device" / "mods.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {}
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:  # listed_tiles, whole_tiles = listed, whole
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            pairs = zip(node.targets[0].elts, node.value.elts, strict=True)
            found |= {ast.unparse(new): found[ast.unparse(old)] for new, old in pairs if ast.unparse(old) in found}
    return found


def _parameters(function: ast.FunctionDef) -> list[str]:
    return [arg.arg for arg in function.args.args]


@functools.cache
def _looked_at(name: str) -> set[str]:
    """Parameters of a function of device.mods whose values it uses.  One that it gives to another function there, by position,
    counts if that one uses it."""
    functions, passed = _functions(), set()
    nodes = [node for part in functions[name].body for node in ast.walk(part)]
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
            used = [parameter in _looked_at(node.func.id) for parameter in _parameters(functions[node.func.id])]
            plain = not any(isinstance(given, ast.Starred) for given in node.args)
            passed |= {given for given, counts in zip(node.args, used, strict=False) if plain and not counts}
    return {node.id for node in nodes if isinstance(node, ast.Name) and node not in passed}
