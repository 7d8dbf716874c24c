"""Frozen records and aliases that users of tilefold hold or pass."""

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

from .errors import DtypeError, Unsupported

__all__ = ["TILE", "Constant", "Layout", "ModArgs", "ModFunction", "Numerics", "Rule", "Rules", "Window", "constant"]

TILE = 128
"""Queries and keys of which blocks of a table may have multiples: the rules of such tables end in "_tiles"."""

Layout: TypeAlias = Literal["bshd", "bhsd"]
"""Order of the dimensions of q, k, v and out: [batch, seq, heads, dim] or [batch, heads, seq, dim]."""

Numerics: TypeAlias = Literal["fast", "invariant"]
"""What may move a result's bits: anything, or the query's own sequence alone (docs/invariance.md)."""

Window: TypeAlias = tuple[int | None, int | None]
"""(left, right): how many keys before and after its own position a query sees, inclusive; None or -1 is unbounded."""

ModFunction: TypeAlias = Callable[..., Any]
"""A @triton.jit function of (score, batch, head, q_index, kv_index, args); see `tilefold.attention`."""

ModArgs: TypeAlias = tuple[Any, ...]
"""What a mod function gets as its args: tensors and numbers; seq_q and seq_k are appended to them."""


class Constant(NamedTuple):
    """A name for an object that torch.compile cannot carry through a graph; made by `constant`."""

    key: str

    @property
    def value(self) -> Any:
        """The object that `constant` was given; Unsupported if this process has not named it."""
        if self.key.startswith("("):
            return _rules_of(self.key)
        if self.key not in _CONSTANTS:
            raise Unsupported(
                f"this graph uses {self.key!r}, which this process does not know: call tilefold.constant(...) on the same object "
                f"before running it"
            )
        return _CONSTANTS[self.key]


_CONSTANTS: dict[str, Any] = {}


def constant(value: Any) -> Constant:
    """Name a mod function or a plan, so that it can be passed inside torch.compile: `score_mod=tilefold.constant(fn)`.

    Make it once, outside the compiled function: the object is kept for good.  The name follows from the object's source or
    value, so a graph that was exported with it runs in another process that has named the same object.  Eager calls take it."""
    if isinstance(value, Constant):
        return value
    if isinstance(value, Rules):
        return Constant(value.text)
    name = getattr(value, "__name__", type(value).__name__)
    if callable(value):
        function = getattr(value, "fn", value)
        text = getattr(value, "cache_key", None) or f"{inspect.getsource(function)} {function.__module__}"
    elif hasattr(value, "to_json"):
        text = value.to_json()
    else:
        raise DtypeError(f"constant() takes a mod function or a plan, got {value!r}")
    key = f"{name}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    _CONSTANTS[key] = value
    return Constant(key)


# ---------------------------------------------------------------- masks of several rules


class Rule(NamedTuple):
    """One rule of a mask: a name of tilefold.device.mods and of tilefold.cpu.rules, a @triton.jit function or its `Constant`; and
    how many args it has."""

    function: Any
    takes: int


class Rules(NamedTuple):
    """What a call has in place of a mask_mod where a mask has several rules; their args follow one another in mask_args.

    tree: ("all", ..), ("any", ..) or ("not", one), of trees and of `Rule`s; an "all" outside."""

    tree: tuple[Any, ...]

    @property
    def first(self) -> Any:
        """The function of the first rule that has to hold; None where that is made of several."""
        return self.tree[1].function if type(self.tree[1]) is Rule else None

    @property
    def rules(self) -> Iterator[Rule]:
        """All of them, in the order of their args."""
        return _leaves(self.tree)

    @property
    def text(self) -> str:
        """The tree as a word that a graph can hold; functions by the names of their constants."""
        return _text(self.tree)

    def bound(self, mods: Any, args: ModArgs, first: int = 0) -> tuple[Any, ...]:
        """Pairs (function, args) as kernels take them, from rule number `first` of the outer "all" on; mods: the module
        tilefold.device.mods."""
        given = iter(args)
        return tuple(_pair(tree, mods, given) for tree in self.tree[1:])[first:]


_COMBINED = {"all": "every", "any": "either", "not": "inverse"}


def _pair(tree: Any, mods: Any, args: Iterator[Any]) -> tuple[Any, Any]:
    if type(tree) is Rule:
        function = getattr(mods, tree.function) if isinstance(tree.function, str) else tree.function
        return function, tuple(islice(args, tree.takes))
    return getattr(mods, _COMBINED[tree[0]]), tuple(_pair(part, mods, args) for part in tree[1:])


def _leaves(tree: Any) -> Iterator[Rule]:
    if type(tree) is Rule:
        yield tree
        return
    for part in tree[1:]:
        yield from _leaves(part)


def _text(tree: Any) -> str:
    if type(tree) is Rule:
        function, takes = tree
        return f"{function if isinstance(function, str) else '@' + constant(function).key} {takes}"
    return f"({tree[0]} {' '.join([_text(part) for part in tree[1:]])})"


@functools.lru_cache(maxsize=4096)
def _rules_of(text: str) -> Rules:
    """What `Rules.text` said; always the same object."""
    words = iter(re.findall(r"[()]|[^() ]+", text))

    def tree(word: str) -> Any:
        if word == "(":
            parts = [next(words)]
            while (word := next(words)) != ")":
                parts.append(tree(word))
            return tuple(parts)
        function = Constant(word[1:]).value if word.startswith("@") else word
        return Rule(function, int(next(words)))

    return Rules(tree(next(words)))
