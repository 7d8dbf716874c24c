"""What the first call of a kind leaves for all later ones: one bounded cache of records, by operation and key."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

from .first_call import without_collector
from .source import facts_of_values

LIMIT = 1 << 14  # records; a program that needs more makes new shapes all the time, and begins anew
CACHE: dict[Any, Any] = {}
"""Records of all operations, by (operation, key)."""

Arguments = ParamSpec("Arguments")
Record = TypeVar("Record")


def recorded(
    operation: str,
    key_of: Callable[..., Hashable] = facts_of_values,
    near: Callable[..., Any] | None = None,
) -> Callable[[Callable[Arguments, Record]], Callable[Arguments, Record]]:
    """Of a function that checks, plans and binds a call: one that does so for the first call of a key, and looks its record up
    for all others.  An `Operation` looks a call up itself, and has the record made by `near_at`, else by `made_at`.

    key_of: of the same arguments, everything that the record depends on.  Where no key can be made (an argument is no tensor,
    has no memory or no hash) nothing is kept: the checks say which argument is wrong.
    near: of the same arguments and the key, as `key`: the record of a call that differs from others in lengths alone, made from
    theirs; None if there are none.  Then the function takes the key as well."""

    def decorate(prepare: Callable[Arguments, Record]) -> Callable[Arguments, Record]:
        @functools.wraps(prepare)
        def record_of(*args: Any) -> Any:  # no keywords: each call would make a dict of them
            try:
                key = operation, key_of(*args)
                found = CACHE.get(key)
            except (AttributeError, RuntimeError, TypeError):
                return prepare(*args)  # type: ignore[call-arg]
            return (near_at(key, args) or made_at(key, args)) if found is None else found

        def near_at(key: tuple[str, Any], args: tuple[Any, ...]) -> Any:
            made = None if near is None else near(*args, key=key[1])
            return made and remember(CACHE, key, made)

        def made_at(key: tuple[str, Any], args: tuple[Any, ...]) -> Any:
            with without_collector():
                return remember(CACHE, key, prepare(*args, **({"key": key[1]} if near else {})))

        record_of.operation, record_of.key_of = operation, key_of  # type: ignore[attr-defined]
        record_of.near_at, record_of.made_at = near_at, made_at  # type: ignore[attr-defined]
        return record_of  # type: ignore[return-value]

    return decorate


def remember(cache: dict[Any, Record], key: Hashable, record: Record) -> Record:
    """Keep the record, after emptying the cache if it is full; returns it."""
    if len(cache) >= LIMIT:
        cache.clear()
    cache[key] = record
    return record
