"""Torch modules: around the attention of tilefold and what they are made of, and linear layers in few bits."""

from .coarse import CoarseProjection
from .convert import quantize
from .gate import Gate
from .lowbit import LowBitLinear
from .quantize_report import QuantizeReport
from .quantized_files import load_quantized, save_quantized
from .rotary import Rotary3D, default_split, rotary_3d
from .sparse_video import SparseVideoAttention

__all__ = [
    "CoarseProjection",
    "Gate",
    "LowBitLinear",
    "QuantizeReport",
    "Rotary3D",
    "SparseVideoAttention",
    "default_split",
    "load_quantized",
    "quantize",
    "rotary_3d",
    "save_quantized",
]
