"""Torch modules around the attention of tilefold, and what they are made of."""

from .coarse import CoarseProjection
from .gate import Gate
from .rotary import Rotary3D, default_split, rotary_3d
from .sparse_video import SparseVideoAttention

__all__ = ["CoarseProjection", "Gate", "Rotary3D", "SparseVideoAttention", "default_split", "rotary_3d"]
