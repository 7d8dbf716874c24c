"""The derivative of a score_mod by the numbers that it loads from its args, made from its source.

Each tl.load from a tensor that needs a gradient becomes a statement of its own.  What it loads is then a variable, by which
`ops.derivative` differentiates what follows.  Where it lies is the difference of two addresses.
"""

import ast
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton.language as tl

from ..device.loads import place_of
from .derivative import OWN, Derivative, Node, assign, expression, tangent

SCORE = -1  # what an expression depends on: the score, or args by their numbers
BASE, PLACE, PLACE_OF = "_base", "_place", "_derived_place"


class Load(NamedTuple):
    """A tl.load of a score_mod.  arg: from which of its args.  function: (derivative of the new score, place), of the mod's
    arguments and the tensor, as device.loads has it."""

    arg: int
    function: Any


@functools.lru_cache(maxsize=256)
def loads_of(mod: Any, count: int, tensors: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[Load, ...]:
    """All tl.load of a score_mod from those of its `count` args that are `wanted`; tensors: those that are any.

    Raises Unsupported, naming the mod, the line and the expression: for a load in a branch, a loop, a conditional expression or
    another function; at a place that depends on the score or on what one of these loads found; of a pointer that may be several
    tensors; for a `return` that is not the last statement; and for what `derivative_of` refuses of the score."""
    first = _ByLoad(mod, count, tensors, wanted, None)
    made = [_ByLoad(mod, count, tensors, wanted, i) for i in range(len(first.loads))]
    return tuple(Load(each.args_loaded[i], each.finish(f"load_{i}")) for i, each in enumerate(made))


class _ByLoad(Derivative):
    """The derivative by one of the loads; with None these are only found."""

    def __init__(
        self, mod: Any, count: int, tensors: tuple[int, ...], wanted: tuple[int, ...], which: int | None
    ) -> None:
        names = " and ".join(f"score_args[{i}]" for i in wanted)
        super().__init__(mod, f"what it loads from {names}", f"detach() {names}")
        self.count, self.tensors, self.wanted = count + 2, frozenset(tensors), frozenset(wanted)
        parameters = [each.arg for each in self.tree.args.args]
        self.args, self.zero = parameters[5], self.full(parameters[0], 0.0)
        self.origins: dict[str, frozenset[int]] = {parameters[0]: frozenset({SCORE})}
        self.args_loaded: list[int] = []
        self.loads: list[ast.stmt] = []
        self.places: list[Node] = []
        *body, last = self.tree.body
        if not isinstance(last, ast.Return) or last.value is None:
            self.refuse(last, "it is no `return` with a value at the end of the function")
        self.tree.body = [each for statement in body for each in self._hoisted(statement)]
        value = self._without_loads(last.value, self.tree.body)
        self.tree.body.append(ast.Return(value))
        if which is not None:
            self.mine, self.place = self.loads[which], self.places[which]
            self.tree.args.args.append(ast.arg(BASE))
            self.space[PLACE_OF] = place_of
            self.ones = self.full(parameters[0], 1.0)
            self.tree.body = self._block(self.tree.body)

    # ------------------------------------------------------------ loads as statements

    def _hoisted(self, node: ast.stmt) -> list[ast.stmt]:
        """The statement, and before it the loads that are in it."""
        before: list[ast.stmt] = []
        if isinstance(node, ast.Expr | ast.Pass):
            return []
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
            node.value = self._without_loads(node.value, before)
            self._follow(node)
            return [*before, node]
        for each in ast.walk(node):
            if isinstance(each, ast.Return):
                self.refuse(each, "it is not the last statement of the function")
        for _ in range(2):  # in a loop something may come from the turn before
            for each in ast.walk(node):
                if isinstance(each, ast.Assign | ast.AugAssign | ast.AnnAssign) and each.value is not None:
                    self._follow(each, also=True)
        for each in ast.walk(node):
            if isinstance(each, ast.Call):
                self._refuse_use(each, "a load in a branch or a loop is not served")
        return [node]

    def _without_loads(self, node: Node, before: list[ast.stmt]) -> Node:
        owner = self

        class Hoist(ast.NodeTransformer):
            def visit_Call(self, call: ast.Call) -> Node:
                self.generic_visit(call)
                if owner._is_load(call):
                    return owner._load(call, before)
                owner._refuse_use(call, "another function gets the tensor, whose loads are not followed")
                return call

            def visit_IfExp(self, node: ast.IfExp) -> Node:
                for each in ast.walk(node):
                    if isinstance(each, ast.Call):
                        owner._refuse_use(each, "a load in a conditional expression is not served (tl.where is)")
                return node

        made: Node = Hoist().visit(node)
        return made

    def _refuse_use(self, call: ast.Call, why: str) -> None:
        """Raises if a call takes a pointer that gets a gradient."""
        given = [call.func, *call.args, *(each.value for each in call.keywords)]
        if any(self._origin(each) & self.wanted for each in given):
            self.refuse(call, why)

    def _is_load(self, call: ast.Call) -> bool:
        try:
            return (
                eval(compile(ast.Expression(ast.fix_missing_locations(call.func)), "<called>", "eval"), self.space)
                is tl.load
            )
        except Exception:  # a method of what only a kernel has
            return False

    def _load(self, call: ast.Call, before: list[ast.stmt]) -> Node:
        names = ("pointer", "mask")
        given = dict(zip(names, call.args, strict=False)) | {each.arg: each.value for each in call.keywords if each.arg}
        found = self._origin(given["pointer"])
        if not found & self.wanted:
            return call
        if len(found & self.tensors) > 1:
            several = ", ".join(f"score_args[{i}]" for i in sorted(found & self.tensors))
            self.refuse(call, f"it may be of any of {several}")
        if any(SCORE in self._origin(each) for each in given.values()):
            self.refuse(call, "where it lies depends on the score")
        name = f"_load_{len(self.loads)}"
        place: Node = ast.Call(expression(PLACE_OF), [given["pointer"], expression(BASE)], [])
        if "mask" in given:
            place = ast.Call(expression(f"{OWN}.where"), [given["mask"], place, expression("-1")], [])
        self.loads.append(assign(name, call))
        self.places.append(place)
        (arg,) = found & self.tensors
        self.args_loaded.append(arg)
        before.append(self.loads[-1])
        self.origins[name] = frozenset()
        return expression(name)

    # ------------------------------------------------------------ where pointers come from

    def _follow(self, node: Any, also: bool = False) -> None:
        """What the names depend on to which a statement gives a value; also: they may as well keep theirs."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        also = also or isinstance(node, ast.AugAssign)
        for target in targets:
            if isinstance(target, ast.Tuple):
                names, values = target.elts, self._items(node.value, target.elts)
            else:
                names, values = [target], [self._origin(node.value)]
            for name, value in zip(names, values, strict=True):
                each = name.value if isinstance(name, ast.Starred) else name
                if not isinstance(each, ast.Name):
                    continue
                known = self._origin(each) if also else frozenset()
                self.origins[each.id] = value | known

    def _items(self, value: Node, names: Sequence[Node]) -> list[frozenset[int]]:
        """What each of several names depends on that a value is taken apart into."""
        if isinstance(value, ast.Tuple) and len(value.elts) == len(names):
            return [self._origin(each) for each in value.elts]
        whole = self._origin(value)
        if not self._is_args(value):
            return [whole] * len(names)
        starred = [at for at, name in enumerate(names) if isinstance(name, ast.Starred)]
        if not starred:
            return [frozenset({at}) for at in range(len(names))]
        first, behind = starred[0], len(names) - starred[0] - 1
        rest = frozenset(range(first, self.count - behind))
        ends = [frozenset({self.count - behind + at}) for at in range(behind)]
        return [*[frozenset({at}) for at in range(first)], rest, *ends]

    def _is_args(self, node: Node) -> bool:
        return isinstance(node, ast.Name) and node.id == self.args and self.args not in self.origins

    def _origin(self, node: ast.AST) -> frozenset[int]:
        """What an expression depends on: the score, and those args whose addresses it may be."""
        if isinstance(node, ast.Attribute) and node.attr in ("dtype", "shape"):
            return frozenset()
        if isinstance(node, ast.expr) and self._is_args(node):
            return frozenset(range(self.count))
        if isinstance(node, ast.Name):
            return self.origins.get(node.id, frozenset())
        if isinstance(node, ast.Subscript) and self._is_args(node.value):
            try:
                return frozenset({ast.literal_eval(node.slice) % self.count})
            except (ValueError, TypeError):
                return frozenset(range(self.count))
        inside = frozenset().union(*[self._origin(each) for each in ast.iter_child_nodes(node)])
        return inside & {SCORE} if isinstance(node, ast.Call) and self._is_load(node) else inside

    # ------------------------------------------------------------ the derivative by one load

    def _statement(self, node: ast.stmt) -> list[ast.stmt]:
        if node is not self.mine:
            return super()._statement(node)
        name = node.targets[0].id  # type: ignore[attr-defined]
        self.active.add(name)
        return [node, assign(PLACE, self.place), assign(tangent(name), self.ones)]

    def returned(self, value: Node) -> Node:
        """The derivative, and the place of the load."""
        return ast.Tuple([super().returned(value), expression(PLACE)], ast.Load())
