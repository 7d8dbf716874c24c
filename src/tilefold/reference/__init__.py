"""Oracles in plain torch, fp64, on any device: the same names and arguments as the public functions."""

from .attention import attention, attention_varlen
from .select import gini, select
from .sparse import sparse_attention, sparse_attention_paged, sparse_attention_varlen
from .tolerance import Comparison, compare

__all__ = [
    "Comparison",
    "attention",
    "attention_varlen",
    "compare",
    "gini",
    "select",
    "sparse_attention",
    "sparse_attention_paged",
    "sparse_attention_varlen",
]
