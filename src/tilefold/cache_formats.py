"""What a KV cache holds beside floats: one row a format, the only place that lists them.

`device/cache.py` reads a format and `device/encode.py` writes it, by the names of the constants there."""

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["FORMATS", "Format", "format_named", "listed"]


class Format(NamedTuple):
    """name: of torch's dtype, and what plans call it.  short: what commands call it.  itemsize: bytes of an element.
    limits: the least and the largest number, to which others are clamped.
    feature: of a device that converts it itself.  read, written: names in device.cache and device.encode, with the feature and
    without it.  needs_factors: reading asks for factors; else they are 1 where none are given."""

    name: str
    short: str
    itemsize: int
    limits: tuple[float, float]
    feature: str
    read: tuple[str, str]
    written: tuple[str, str]
    needs_factors: bool

    def read_by(self, has: Callable[[str], bool]) -> str:
        """The name in device.cache; has: whether the device has a feature."""
        return self.read[not has(self.feature)]


FORMATS = (
    Format("float8_e4m3fn", "e4m3", 1, (-448.0, 448.0), "e4m3", ("E4M3", "E4M3_BITS"), ("E4M3", "E4M3_BY_HAND"), False),
    Format("int8", "int8", 1, (-128.0, 127.0), "ptx", ("INT8", "INT8_CAST"), ("INT8", "INT8"), True),
)


def format_named(name: str) -> Format:
    """The row of a dtype's name."""
    return next(each for each in FORMATS if each.name == name)


def listed(word: str) -> str:
    """Their names in a sentence; word: "and" or "or"."""
    *first, last = [each.name for each in FORMATS]
    return f"{', '.join(first)} {word} {last}" if first else last
