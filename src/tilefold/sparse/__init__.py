"""Block-sparse attention's parts: the index of which blocks see which, what makes one, and the stages of video attention."""

from .coarse import CoarseResult, attend_rows, coarse, project
from .fuse import fuse
from .index import BlockIndex
from .pipeline import sparse_video_attention
from .predicates import MaskFunction, Predicate, all_of, any_of, causal_blocks, dilated, sliding_tile, video_window
from .select import Selection, gini, index, select
from .stages import CoarseOptions, SelectOptions, Stages
from .streaming import VideoCache
from .tiling import GridTiling
from .tree import register

__all__ = [
    "BlockIndex",
    "CoarseOptions",
    "CoarseResult",
    "GridTiling",
    "MaskFunction",
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
    "gini",
    "index",
    "project",
    "select",
    "sliding_tile",
    "sparse_video_attention",
    "video_window",
]

register()
