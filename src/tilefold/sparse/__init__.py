"""Block-sparse attention's parts: the index of which blocks see which, the predicates that make one, the stages around it."""

from .coarse import CoarseResult, attend_rows, coarse, project
from .fuse import fuse
from .index import BlockIndex
from .pipeline import CoarseOptions, SelectOptions, Stages, sparse_video_attention
from .predicates import Predicate, all_of, any_of, causal_blocks, dilated, sliding_tile, video_window
from .select import Selection, gini, index, select
from .streaming import VideoCache
from .tiling import GridTiling
from .tree import register

__all__ = [
    "BlockIndex",
    "CoarseResult",
    "Predicate",
    "SelectOptions",
    "Selection",
    "Stages",
    "VideoCache",
    "all_of",
    "any_of",
    "attend_rows",
    "causal_blocks",
    "coarse",
    "dilated",
    "fuse",
    "project",
    "sliding_tile",
    "sparse_video_attention",
    "video_window",
]

register()
