"""How many values a mod takes out of its args, read from its source: a wrong number is found before anything is compiled."""

import ast
import functools
import inspect
import textwrap
from typing import Any

from ..errors import ValueRangeError

LENGTHS = ("seq_q", "seq_k")  # what every mod is given behind the caller's args


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
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ()
    if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
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
