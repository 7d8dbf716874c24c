"""Block-sparse attention's parts: the index of which blocks see which, the predicates that make one, and selection by scores."""

from .index import BlockIndex
from .predicates import Predicate, all_of, any_of, causal_blocks, dilated, sliding_tile, video_window
from .select import Selection, gini, index, select
from .tree import register

__all__ = [
    "BlockIndex",
    "Predicate",
    "Selection",
    "all_of",
    "any_of",
    "causal_blocks",
    "dilated",
    "gini",
    "index",
    "select",
    "sliding_tile",
    "video_window",
]

register()
