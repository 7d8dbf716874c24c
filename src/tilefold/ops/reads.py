"""What the source of a mod says: which of its arguments it looks at, and how many values it takes out of its args."""

import ast
import functools
import inspect
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ValueRangeError
from ..types import Rules

LENGTHS = ("seq_q", "seq_k")  # what every mod is given behind the caller's args
PARAMETERS = ["score", "batch", "head", "q_index", "kv_index", "args"]  # of a mod


def definition_of(function: Any) -> ast.FunctionDef | None:
    """A function's definition, anew in each call; None where its source cannot be read."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return None
    return next((each for each in body if isinstance(each, ast.FunctionDef)), None)


# ---------------------------------------------------------------- which arguments


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
    tree = definition_of(getattr(mask_mod, "fn", mask_mod))
    if tree is None:
        return Reads(True, True, True)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return Reads(*[name in names for name in _parameters(tree)[:3]])


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


# ---------------------------------------------------------------- how many values


def check_unpacking(name: str, fn: Any, argument: str, given: int) -> None:
    """ValueRangeError if the mod `name` unpacks another number of values than its args hold: `given` of the caller's `argument`,
    then the lengths.  A mod whose source cannot be read, or that uses its args in another way, is left to the compiler."""
    found = _unpacked(getattr(fn, "fn", fn))
    total = given + len(LENGTHS)
    for line, wanted, exactly in found:
        if wanted == total or (not exactly and wanted < total):
            continue
        least = "" if exactly else "at least "
        raise ValueRangeError(
            f"{name} takes {least}{wanted} values out of args ({line}), but there are {total}: the {given} of {argument}, then "
            f"{' and '.join(LENGTHS)}; {argument} must hold {least}{max(0, wanted - len(LENGTHS))}"
        )


@functools.lru_cache(maxsize=256)
def _unpacked(function: Any) -> tuple[tuple[str, int, bool], ...]:
    """(the line, how many values, whether exactly so many) of each place that takes the last parameter apart."""
    tree = definition_of(function)
    if tree is None or not tree.args.args:
        return ()
    args = tree.args.args[-1].arg
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if args in stored:  # it is something else from there on
        return ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is(node.value, args):
            for target in node.targets:
                if isinstance(target, ast.Tuple | ast.List):
                    starred = any(isinstance(each, ast.Starred) for each in target.elts)
                    found.append((ast.unparse(node), len(target.elts) - starred, not starred))
        elif isinstance(node, ast.Subscript) and _is(node.value, args) and isinstance(node.slice, ast.Constant):
            place = node.slice.value
            found += [(ast.unparse(node), place + 1, False)] if type(place) is int else []
    return tuple(found)


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
