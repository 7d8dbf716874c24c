"""All families of problems, by name."""

from .append import APPEND, ROTARY
from .axes import Family
from .cached import KVCACHE, PREFIX
from .coarse import COARSE
from .conv import CONV
from .dense import DENSE
from .eight import EIGHT
from .filling import FLASHNEW, PAGED
from .products import LOWBIT, MATMUL, W8A8
from .small import ADD, MERGE, QUANTISE, TRANSPOSE
from .sparse import SPARSE
from .stages import FUSE, SELECT

ALL = (DENSE, EIGHT, KVCACHE, PREFIX, APPEND, ROTARY, SPARSE, MATMUL, CONV, LOWBIT, W8A8, MERGE, TRANSPOSE, ADD, QUANTISE, COARSE,
       SELECT, FUSE, FLASHNEW, PAGED)  # fmt: skip
FAMILIES: dict[str, Family] = {family.name: family for family in ALL}


def chosen(names: str, light: bool = False) -> list[Family]:
    """Those named, separated by commas; all if none is.  light: without what takes the interpreter long."""
    some = [FAMILIES[name] for name in names.split(",")] if names else list(ALL)
    return [family.lighter() for family in some] if light else some
