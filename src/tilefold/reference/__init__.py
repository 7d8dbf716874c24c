"""Oracles in plain torch, fp64, on any device: the same names and arguments as the public functions.

Where one takes a `dtype` below float64 it says what computing in that dtype may do: results, and gradients through them, are
one standard deviation of rounding off (`rounding`), in float64."""

from .attention import attention, attention_varlen
from .coarse import attend_rows, coarse, project
from .fp8 import attention_fp8
from .matrix import bmm, lowbit_matmul, matmul, matmul_w8a8, rms_norm, rms_norm_rotary
from .rounding import deviating
from .select import gini, select
from .sparse import sparse_attention, sparse_attention_paged, sparse_attention_varlen
from .tolerance import Comparison, compare
from .video import fuse, sparse_video_attention

__all__ = [
    "Comparison",
    "attend_rows",
    "attention",
    "attention_fp8",
    "attention_varlen",
    "bmm",
    "coarse",
    "compare",
    "deviating",
    "fuse",
    "gini",
    "lowbit_matmul",
    "matmul",
    "matmul_w8a8",
    "project",
    "rms_norm",
    "rms_norm_rotary",
    "select",
    "sparse_attention",
    "sparse_attention_paged",
    "sparse_attention_varlen",
    "sparse_video_attention",
]
