"""Weights in 8, 4, 3 or 2 bits: quantise, pack, keep and read them, and take over those that other tools have written."""

from .compressed import from_compressed_tensors
from .gptq import from_awq, from_gptq
from .nf4 import NF4_CODE, from_nf4
from .packing import block_columns, pack, unpack
from .rounding import dequantize, quantize_weight
from .tensor import QuantizedTensor

__all__ = [
    "NF4_CODE",
    "QuantizedTensor",
    "block_columns",
    "dequantize",
    "from_awq",
    "from_compressed_tensors",
    "from_gptq",
    "from_nf4",
    "pack",
    "quantize_weight",
    "unpack",
]
