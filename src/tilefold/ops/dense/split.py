"""Calls of attention that several launches make: parts and their merge, or one kernel beside another."""

import math
from typing import Any, NamedTuple

import torch

from ...types import Layout
from ..bound import Bound, Slot, strides_named
from .attention_parts import sequence_strides

GIVEN = ("part", "part_lse", "out", "lse")
"""What a call gives to the launch that merges."""


class Split(NamedTuple):
    """A launch that leaves `splits` parts in fp32, and the one that merges them; called as a `Bound` of attention is."""

    launch: Bound
    merge: Bound
    splits: int

    def __call__(self, given: tuple[Any, ...]) -> None:
        q, k, v, out, lse, call = given
        parts = [torch.empty((self.splits, *t.shape), dtype=torch.float32, device=q.device) for t in (out, lse)]
        self.launch((q, k, v, *parts, call))
        self.merge((*parts, out, lse))


class Both(NamedTuple):
    """Two launches, each of some sequences, one after the other; called as a `Bound` of attention is."""

    first: Any
    second: Any

    def __call__(self, given: tuple[Any, ...]) -> None:
        self.first(given)
        self.second(given)


def bind_merge(
    out_shape: tuple[int, ...], layout: Layout, splits: int, blocks: tuple[int, int], emulate: bool, device: torch.device,
    early: bool = False,
) -> Bound:  # fmt: skip
    """The launch that merges parts of `out_shape`; a packed batch is one sequence to it.  blocks: columns, and parts of one step.
    early: it may start before the launch in front of it has ended."""
    from ...kernels.cache.combine import combine

    batch, rows, heads, dim = (1, *out_shape) if len(out_shape) == 3 else out_shape
    if layout == "bhsd":
        rows, heads = heads, rows
    constants = {"EMULATE": emulate, "DIM": dim, "BLOCK_D": blocks[0], "BLOCK_S": blocks[1], "EARLY": early}
    each = sequence_strides(out_shape, layout)
    values = {
        **{name: Slot(of) for name, of in zip(("Part", "PartLse", "Out", "Lse"), GIVEN, strict=True)},
        "splits": splits,
        "batch": batch,
        "seq_q": rows,
        "heads": heads,
        **strides_named("p", (math.prod(out_shape), *each), "sbmh"),
        **strides_named("o", each, "bmh"),
    }
    warps = max(1, blocks[0] // 128)
    return Bound.of(combine, rows * heads * batch, GIVEN, values, constants, device, num_warps=warps)
