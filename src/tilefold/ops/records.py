"""What the first call of a kind leaves for all later ones: records by key, in a bounded cache."""

from collections.abc import Hashable
from typing import TypeVar

__all__ = ["remember"]

LIMIT = 4096  # records of one operation; a program that needs more makes new shapes all the time, and begins anew
Record = TypeVar("Record")


def remember(cache: dict[Hashable, Record], key: Hashable, record: Record) -> Record:
    """Keep the record, after emptying the cache if it is full; returns it."""
    if len(cache) >= LIMIT:
        cache.clear()
    cache[key] = record
    return record
