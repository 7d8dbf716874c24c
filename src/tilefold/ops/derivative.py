"""The derivative of a score_mod by its score, made from its source: forward-mode differentiation of Triton code.

Beside each variable x that depends on the score stands one more, its derivative.  What does not depend on the score has none, so
that it costs nothing.  The result is a @triton.jit function of the mod's arguments, as score_grad is.  `ops.loads` does the same
by a number that the mod loads."""

import ast
import functools
import inspect
import itertools
import linecache
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import triton
import triton.language as tl
from triton.language import math

from ..device import approximate
from ..errors import Unsupported
from .reads import definition_of

Node = ast.expr
NUMBER = itertools.count()
OWN = "_derived_tl"  # what triton.language is called in the functions that are made
HINT = "give score_grad, a @triton.jit function of the same arguments that returns the derivative"


@functools.lru_cache(maxsize=256)
def derivative_of(mod: Any) -> Any:
    """The derivative of a score_mod by the score, in its own arguments.

    Differentiable: + - * /, unary minus, tl.where, exp, exp2, log, log2, sqrt, rsqrt, sin, cos, erf, abs, minimum, maximum, clamp
    and fma; libdevice's tanh, exp, expm1, log1p; device.approximate's tanh; conditional expressions and statements whose
    condition does not depend on the score; .to(dtype); other @triton.jit functions of these.  Of two equal arguments of maximum
    and minimum the first counts; abs has derivative 0 at 0, clamp 1 at its limits.

    Raises Unsupported, naming the mod, the line and the expression, for anything else that depends on the score."""
    function = getattr(mod, "fn", mod)
    score, *_ = inspect.signature(function).parameters
    made = Derivative(mod)
    made.start((score,), tangents=False)
    derived = made.finish("derivative")
    derived.is_one = made.is_one(score)
    return derived


def is_one(derivative: Any) -> bool:
    """Whether it is 1 for all scores, as of a mod that only adds; False where nobody knows."""
    return getattr(derivative, "is_one", False)


class Derivative(ast.NodeVisitor):
    """The derivative of one function by `what`: `start` and `finish` make it by some of its parameters.

    hint: what its errors advise."""

    def __init__(self, mod: Any, what: str = "the score", hint: str = HINT) -> None:
        self.source, self.what, self.hint = getattr(mod, "fn", mod), what, hint
        self.name = self.source.__name__
        tree = definition_of(self.source)
        if tree is None:
            raise Unsupported(f"the source of {self.name} cannot be read, so it has no derivative: {hint}")
        self.tree = tree
        self.space = {**self.source.__globals__, **_closure(self.source), OWN: tl}
        self.active: set[str] = set()
        self.calls = 0

    def start(self, by: Sequence[str], tangents: bool) -> None:
        """Differentiate by these parameters.  tangents: their derivatives are given as further arguments; otherwise it is by the
        only one of them."""
        self.active = set(by)
        self.zero = self.full(by[0], 0.0)
        body = self._block(self.tree.body)
        if tangents:
            self.tree.args.args += [ast.arg(tangent(name)) for name in by]
        else:
            body.insert(0, assign(tangent(by[0]), self.full(by[0], 1.0)))
        self.tree.body = body

    def finish(self, suffix: str) -> Any:
        """The function that the tree is now."""
        tree = self.tree
        tree.decorator_list, tree.name, tree.returns = [], f"{self.name}_{suffix}", None
        text = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
        file = f"<{suffix} {next(NUMBER)} of {self.name}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # Triton reads the source
        exec(compile(text, file, "exec"), self.space)
        made = self.space[tree.name]
        made.__module__ = self.source.__module__
        return triton.jit(made)

    def is_one(self, score: str) -> bool:
        """Whether the tree returns the derivative of the score itself, which is 1 from the beginning to the end."""
        own, (_, *rest) = tangent(score), self.tree.body
        found = [node for each in rest for node in ast.walk(each)]
        bound = [node.value for node in found if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == own]
        ends = [node.value for node in found if isinstance(node, ast.Return)]
        return all(value is not None and ast.unparse(value) == own for value in (*bound, *ends))

    def full(self, like: str, value: float) -> Node:
        """A number as a tile, which takes its shape from another: one of its own would have no layout in Gluon."""
        return expression(f"{OWN}.where({like} == {like}, {value}, {value})")

    def refuse(self, node: ast.AST, why: str) -> NoReturn:
        """Unsupported, naming the function and the expression."""
        raise Unsupported(
            f"{self.name}, `{ast.unparse(node)}`: {why}, so tilefold derives no derivative of it: {self.hint}"
        )

    # ------------------------------------------------------------ statements

    def _block(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        made = [each for statement in body for each in self._statement(statement)]
        return made or [ast.Pass()]

    def _statement(self, node: ast.stmt) -> list[ast.stmt]:
        if isinstance(node, ast.Expr | ast.Pass):  # docstrings, assertions: the mod has them
            return []
        if isinstance(node, ast.Return):
            if node.value is None:
                self.refuse(node, "it returns nothing")
            return [ast.Return(self.returned(node.value))]
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
            return self._bind(node.target.id, value)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found = self._bind(node.target.id, node.value)
            return [*found[:-1], node]
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            (target,) = node.targets
            if isinstance(target, ast.Name):
                return self._bind(target.id, node.value)
            if isinstance(target, ast.Tuple):
                return self._unpack(node, target)
        if isinstance(node, ast.If):
            return self._if(node)
        if any(isinstance(each, ast.Name) and each.id in self.active for each in ast.walk(node)):
            self.refuse(node, f"only assignments, `if` and `return` may depend on {self.what}")
        return [node]

    def returned(self, value: Node) -> Node:
        """What is returned instead of this value."""
        return self.of(value) or self.zero

    def _bind(self, name: str, value: Node) -> list[ast.stmt]:
        """name = value, and its derivative first: value may hold what `name` was before."""
        derived = self.of(value)
        self.active.discard(name)
        if derived is None:
            return [assign(name, value)]
        self.active.add(name)
        return [assign(tangent(name), derived), assign(name, value)]

    def _unpack(self, node: ast.Assign, target: ast.Tuple) -> list[ast.stmt]:
        names = [each.value if isinstance(each, ast.Starred) else each for each in target.elts]
        if self.of(node.value) is not None or not all(isinstance(each, ast.Name) for each in names):
            self.refuse(node, f"a tuple depends on {self.what}")
        self.active -= {each.id for each in names if isinstance(each, ast.Name)}
        return [node]

    def _if(self, node: ast.If) -> list[ast.stmt]:
        if self.depends(node.test):
            self.refuse(node.test, f"a condition depends on {self.what}")
        before = set(self.active)
        then, of_then = self._block(node.body), self.active
        self.active = set(before)
        other, of_other = self._block(node.orelse) if node.orelse else [], self.active
        self.active = of_then | of_other
        for block, own in ((then, of_then), (other, of_other)):
            if not (block and isinstance(block[-1], ast.Return)):
                block += [assign(tangent(name), self.zero) for name in sorted(self.active - own)]
        return [ast.If(node.test, then, other)]

    # ------------------------------------------------------------ expressions

    def depends(self, node: ast.AST) -> bool:
        """Whether a variable that has a derivative is in it, but for its dtype or shape."""
        if isinstance(node, ast.Attribute) and node.attr in ("dtype", "shape"):
            return False
        if isinstance(node, ast.Name):
            return node.id in self.active
        return any(self.depends(each) for each in ast.iter_child_nodes(node))

    def of(self, node: Node) -> Node | None:
        """The derivative of an expression, None where it has none."""
        if isinstance(node, ast.Compare) or not self.depends(node):
            return None
        if isinstance(node, ast.Name):
            return _name(tangent(node.id))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.of(node.operand)
            return None if inner is None else ast.UnaryOp(node.op, inner)
        if isinstance(node, ast.BinOp):
            return self._operator(node)
        if isinstance(node, ast.IfExp):
            if self.depends(node.test):
                self.refuse(node.test, f"a condition depends on {self.what}")
            return ast.IfExp(node.test, self.of(node.body) or self.zero, self.of(node.orelse) or self.zero)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.UnaryOp) and not self._number(node.operand):
            return None
        self.refuse(node, "this is not differentiated")

    def _number(self, node: Node) -> bool:
        """Whether it has a derivative: a comparison has none."""
        return self.of(node) is not None

    def _operator(self, node: ast.BinOp) -> Node | None:
        a, b = node.left, node.right
        if isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor):
            if self._number(a) or self._number(b):
                self.refuse(node, "bits have no derivative")
            return None
        da, db = self.of(a), self.of(b)
        if da is None and db is None:
            return None
        if isinstance(node.op, ast.Add):
            return _sum(da, db)
        if isinstance(node.op, ast.Sub):
            return da if db is None else ast.UnaryOp(ast.USub(), db) if da is None else _binary(da, ast.Sub(), db)
        if isinstance(node.op, ast.Mult):
            return _sum(_times(da, b), _times(db, a))
        if isinstance(node.op, ast.Div):
            first = None if da is None else _binary(da, ast.Div(), b)
            if db is None:
                return first
            second = _binary(ast.UnaryOp(ast.USub(), _times(node, db) or db), ast.Div(), b)
            return second if first is None else _binary(first, ast.Add(), second)
        self.refuse(node, "this operator is not differentiated")

    def _call(self, node: ast.Call) -> Node | None:
        if isinstance(node.func, ast.Attribute) and self.depends(node.func.value):
            inner = self.of(node.func.value)
            if inner is None:
                return None
            if node.func.attr != "to":
                self.refuse(node, f"the method {node.func.attr} is not differentiated")
            return inner
        called = self.object_of(node.func)
        rule = _rule(called)
        if rule is not None:
            return rule(self, node)
        if hasattr(called, "arg_names"):
            return self._inner(node, called)
        self.refuse(node, f"{ast.unparse(node.func)} is not differentiated")

    def object_of(self, node: Node) -> Any:
        """What a name of a function means."""
        try:
            return eval(compile(ast.Expression(ast.fix_missing_locations(node)), "<called>", "eval"), self.space)
        except AttributeError as error:
            instead = " (tanh is 2 * tl.sigmoid(2 * x) - 1)" if getattr(node, "attr", "") == "tanh" else ""
            self.refuse(node, f"{error}{instead}")
        except Exception:
            self.refuse(node, "what is called is not known")

    def _inner(self, node: ast.Call, called: Any) -> Node:
        """A call of another jit function: one of its derivative, with those of the arguments behind them."""
        names = list(called.arg_names)
        given = dict(zip(names, node.args, strict=False)) | {each.arg: each.value for each in node.keywords if each.arg}
        derived = {name: self.of(value) for name, value in given.items()}
        by = tuple(name for name in names if derived.get(name) is not None)
        if not by:
            return self.zero
        inner = (
            f"_{called.__name__}_{self.calls}"  # the same in every process: compiled kernels are found by their source
        )
        self.calls += 1
        try:
            made = Derivative(called, self.what, self.hint)
            made.start(by, tangents=True)
            self.space[inner] = made.finish("derivative")
        except Unsupported as error:
            raise Unsupported(f"{self.name}, `{ast.unparse(node)}`: in {error}") from None
        named = [ast.keyword(each.arg, each.value) for each in node.keywords]
        named += [ast.keyword(tangent(name), derived[name] or self.zero) for name in by]
        return ast.Call(_name(inner), node.args, named)

    def arguments(self, node: ast.Call, *names: str) -> list[Node]:
        """The arguments of a call by their names; what is not given is refused."""
        given = dict(zip(names, node.args, strict=False)) | {each.arg: each.value for each in node.keywords if each.arg}
        if not all(name in given for name in names):
            self.refuse(node, f"its arguments are not {', '.join(names)}")
        return [given[name] for name in names]


# ---------------------------------------------------------------- rules

Rule = Callable[[Derivative, ast.Call], Node | None]


def _unary(template: str) -> Rule:
    """The derivative of a function of one argument.  In the template x is the argument, d its derivative, y the call."""

    def rule(of: Derivative, node: ast.Call) -> Node | None:
        (x,) = node.args[:1] or [each.value for each in node.keywords[:1]]
        derived = of.of(x)
        return None if derived is None else _filled(template, x=x, y=node, d=derived)

    return rule


def _where(of: Derivative, node: ast.Call) -> Node | None:
    condition, a, b = of.arguments(node, "condition", "x", "y")
    da, db = of.of(a), of.of(b)
    if da is None and db is None:
        return None
    return _filled(f"{OWN}.where(c, a, b)", c=condition, a=da or of.zero, b=db or of.zero)


def _extreme(sign: str) -> Rule:
    def rule(of: Derivative, node: ast.Call) -> Node | None:
        a, b = of.arguments(node, "x", "y")
        da, db = of.of(a), of.of(b)
        if da is None and db is None:
            return None
        return _filled(f"{OWN}.where(a {sign} b, p, q)", a=a, b=b, p=da or of.zero, q=db or of.zero)

    return rule


def _clamp(of: Derivative, node: ast.Call) -> Node | None:
    x, low, high = of.arguments(node, "x", "min", "max")
    if of.of(low) is not None or of.of(high) is not None:
        of.refuse(node, f"its limits depend on {of.what}")
    derived = of.of(x)
    return None if derived is None else _filled(
        f"{OWN}.where((x >= low) & (x <= high), d, z)", x=x, low=low, high=high, d=derived, z=of.zero
    )  # fmt: skip


def _fma(of: Derivative, node: ast.Call) -> Node | None:
    a, b, c = of.arguments(node, "x", "y", "z")
    return of.of(_binary(_binary(a, ast.Mult(), b), ast.Add(), c))


def _divided(of: Derivative, node: ast.Call) -> Node | None:
    a, b = of.arguments(node, "x", "y")
    return of.of(_binary(a, ast.Div(), b))


def _nothing(of: Derivative, node: ast.Call) -> Node | None:
    """Of what counts, or steps."""
    return None


UNARY = {
    "exp": "y * d",
    "exp2": "y * 0.6931471805599453 * d",
    "log": "d / x",
    "log2": "d * 1.4426950408889634 / x",
    "sqrt": "0.5 * d / y",
    "sqrt_rn": "0.5 * d / y",
    "rsqrt": "-0.5 * y / x * d",
    "sin": f"{OWN}.cos(x) * d",
    "cos": f"-{OWN}.sin(x) * d",
    "erf": f"1.1283791670955126 * {OWN}.exp(-(x * x)) * d",
    "abs": f"{OWN}.where(x > 0, d, {OWN}.where(x < 0, -d, 0.0))",
}
TANH = "(1.0 - y * y) * d"
LIBDEVICE = {
    **{name: UNARY[name] for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "erf")},
    "tanh": TANH,
    "expm1": "(y + 1.0) * d",
    "log1p": "d / (1.0 + x)",
    "abs": UNARY["abs"],
    "fabs": UNARY["abs"],
}
RULES: dict[Any, Rule] = {
    tl.where: _where,
    tl.maximum: _extreme(">="),
    tl.minimum: _extreme("<="),
    tl.clamp: _clamp,
    tl.zeros_like: _nothing,
    **{getattr(math, name): _unary(template) for name, template in UNARY.items()},
    math.fma: _fma,
    math.div_rn: _divided,
    math.fdiv: _divided,
    approximate.tanh: _unary(TANH),
}


def _rule(called: Any) -> Rule | None:
    try:
        found = RULES.get(called)
    except TypeError:  # it has no hash
        return None
    name = getattr(called, "__name__", "")
    if found is None and getattr(called, "__module__", "").endswith("libdevice") and name in LIBDEVICE:
        return _unary(LIBDEVICE[name])
    return found


# ---------------------------------------------------------------- trees


def tangent(name: str) -> str:
    return f"_d_{name}"


def _name(name: str) -> Node:
    return ast.Name(name, ast.Load())


def expression(text: str) -> Node:
    return ast.parse(text, mode="eval").body


def assign(name: str, value: Node) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _binary(a: Node, operator: ast.operator, b: Node) -> Node:
    return ast.BinOp(a, operator, b)


def _sum(a: Node | None, b: Node | None) -> Node | None:
    return b if a is None else a if b is None else _binary(a, ast.Add(), b)


def _times(a: Node | None, b: Node) -> Node | None:
    return None if a is None else _binary(a, ast.Mult(), b)


def _filled(template: str, **parts: Node) -> Node:
    """The expression with its names replaced."""

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> Node:
            return parts.get(node.id, node)

    filled: Node = Fill().visit(expression(template))
    return filled


def _closure(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
