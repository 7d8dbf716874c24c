"""Block-sparse attention's parts: the index of which blocks see which, the predicates that make one, a video's grid in blocks."""

from .index import BlockIndex
from .predicates import Predicate, all_of, any_of, causal_blocks, dilated, sliding_tile, video_window
from .tiling import GridTiling
from .tree import register

__all__ = [
    "BlockIndex",
    "GridTiling",
    "Predicate",
    "all_of",
    "any_of",
    "causal_blocks",
    "dilated",
    "sliding_tile",
    "video_window",
]

register()
