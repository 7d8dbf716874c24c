"""Block-sparse attention's parts: the index of which blocks see which, the predicates that make one, a video's grid in blocks."""

from .index import BlockIndex
from .pipeline import CoarseOptions, SelectOptions, Stages, sparse_video_attention
from .predicates import Predicate, all_of, any_of, causal_blocks, dilated, sliding_tile, video_window
from .tiling import GridTiling
from .tree import register

__all__ = [
    "BlockIndex",
    "CoarseOptions",
    "GridTiling",
    "Predicate",
    "SelectOptions",
    "Stages",
    "all_of",
    "any_of",
    "causal_blocks",
    "dilated",
    "sliding_tile",
    "sparse_video_attention",
    "video_window",
]

register()
