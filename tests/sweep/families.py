"""All families of problems, by name."""

from .axes import Family
from .dense import DENSE

__all__ = ["FAMILIES", "chosen"]

ALL = (DENSE,)
FAMILIES: dict[str, Family] = {family.name: family for family in ALL}


def chosen(names: str) -> list[Family]:
    """Those named, separated by commas; all if none is."""
    return [FAMILIES[name] for name in names.split(",")] if names else list(ALL)
