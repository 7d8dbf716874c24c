"""What the bindings of all Gluon kernels of the backward pass share: their record, descriptors and statistics."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...types import Layout
from ..bound import Bound, Box, Slot, contiguous, stand_in
from ..call import Call
from ..dense.attention_parts import head_strides
from ..first_call import in_background
from ..hopper import box_of, descriptor
from .backward_parts import side_strides

UNIT = 64  # tokens of a tile
STATISTICS = 2 * UNIT  # fp32 numbers of a tile of queries
SIDES = ("Q", "K", "V", "Out", "DOut", "Lse", "DLse", "call")
"""What a dense call gives to every launch, before its scratch and its gradients."""
Tensors = tuple[torch.Tensor, ...]


class Scratch(NamedTuple):
    """A tensor that a call allocates."""

    shape: Sequence[int]
    dtype: torch.dtype
    zeroed: bool = False

    def made(self, device: Any) -> torch.Tensor:
        shape = tuple(self.shape)
        if self.zeroed:
            return torch.zeros(shape, dtype=self.dtype, device=device)
        return torch.empty_strided(
            shape, contiguous(shape), dtype=self.dtype, device=device
        )  # half the time of shapes alone


@dataclass(slots=True)
class GluonBound:
    """The launches of a backward pass, one behind the other."""

    plan: Any  # of the call, or of one that makes the same tiles
    buffers: tuple[Scratch, ...]  # scratch, then dq, dk and dv, then what `run` gives besides
    first: Bound
    main: Bound
    last: Bound | None = None
    results: int = field(default=3, kw_only=True)  # of the buffers

    def of_lengths(self, tensors: Tensors, dout: torch.Tensor, call: Call) -> "GluonBound | None":
        """The launches of a call that differs in its lengths, which make the same tiles; None if they are others."""
        values = values_of_lengths(tensors, dout, call)
        first, main = (one.with_values(values, None, (*tensors, dout)) for one in (self.first, self.main))
        return GluonBound(self.plan, (*self.buffers[:-3], *gradients_of(tensors)), first, main)

    def scratch(self, device: Any) -> Tensors:
        """New tensors for all of them."""
        return tuple([one.made(device) for one in self.buffers])

    def run(
        self, tensors: Tensors, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, call: Call
    ) -> Tensors:
        """(dq, dk, dv), contiguous, and dS if it is stored; tensors: q, k, v, out; dlse like lse or None."""
        made = self.scratch(dout.device)
        given = (*tensors, dout, lse, dlse, call, *made)
        self.first(given)
        self.main(given)
        if self.last is not None:
            self.last(given)
        return made[-self.results :]

    def compile(
        self, tensors: Tensors, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, call: Call
    ) -> None:
        """Compile for a call; raises what the compiler raises."""
        given = (*tensors, dout, lse, dlse, call, *[stand_in(one.dtype) for one in self.buffers])
        if not self.first.found(given):
            in_background(lambda: self.first.compile(given))  # 0.3 s while the other one takes 2
        self.main.compile(given)


def values_of_lengths(tensors: Tensors, dout: torch.Tensor, call: Call) -> dict[str, Any]:
    """Numbers that differ with the lengths of a call, among those that make the same tiles; tensors: q, k, v, out."""
    q, k, v, out = tensors
    values: dict[str, Any] = {}
    if call.packed is not None:
        values |= {"max_q": call.packed.max_q, "max_k": call.packed.max_k, "total_q": q.shape[0], "total_k": k.shape[0]}
        return values | packed_strides(o=out, d=dout)
    at = 2 if call.layout == "bhsd" else 1
    values |= {"seq_q": q.shape[at], "seq_k": k.shape[at]}
    return values | side_strides(call.layout, g=q.shape, x=k.shape, y=v.shape, o=out, d=dout)


def packed_strides(**sides: torch.Tensor | tuple[int, ...]) -> dict[str, int]:
    """`side_strides` of packed tensors; of keys the kernels call a row m, and n."""
    made: dict[str, int] = {}
    for letter, t in sides.items():
        row, head = head_strides(t, "bshd")
        made |= {f"stride_{letter}m": row, f"stride_{letter}n": row, f"stride_{letter}h": head}
    return made


def gradients_of(tensors: Tensors, keys: torch.dtype | None = None) -> tuple[Scratch, Scratch, Scratch]:
    """dq, dk and dv; keys: the dtype of dk and dv, if not theirs."""
    q, k, v = tensors[:3]
    return Scratch(q.shape, q.dtype), Scratch(k.shape, keys or k.dtype), Scratch(v.shape, keys or v.dtype)


def boxed_sides(sides: Tensors, layout: Layout, queries: int = UNIT, keys: int = UNIT) -> dict[str, Slot]:
    """The descriptors of q, dout, k and v by the kernels' names; queries, keys: of a tile."""
    named = (("q", "Q", queries), ("do", "DOut", queries), ("k", "K", keys), ("v", "V", keys))
    boxes = zip(named, sides, strict=True)
    return {f"{name}_desc": Slot(of, box_of(t, layout, rows).over) for (name, of, rows), t in boxes}


def panels_of(problem: Any) -> dict[str, int]:
    """Constants of the kernels for head dims wider than 128: panels of 64 columns.  Three beside four count as four: ptxas has
    too few registers for what is left."""
    panels = [-(-dim // UNIT) for dim in (problem.dim_qk, problem.dim_v)]
    if 4 in panels:
        panels = [4 if each == 3 else each for each in panels]
    return {"PANELS_QK": panels[0], "PANELS_V": panels[1]}


def columns_of(problem: Any) -> dict[str, int | None]:
    """Columns of their gradients; None: all that a product makes."""
    made = panels_of(problem).values()
    dims = ("columns_qk", problem.dim_qk), ("columns_v", problem.dim_v)
    return {name: None if dim == panels * UNIT else dim for (name, dim), panels in zip(dims, made, strict=True)}


def softcap_kind(problem: Any) -> int:
    """SOFTCAP of the kernels."""
    return 0 if "softcap" not in problem.score_mods else 2 if problem.dtype == "bfloat16" else 1


def statistics_box(rows: int, numbers: int = STATISTICS) -> Any:
    """Of fp32 [rows * numbers], a row at a time."""
    return Box(stand_in(torch.float32), [rows * numbers], [1], [numbers], *_flat_descriptor())


@functools.cache
def _flat_descriptor() -> tuple[Any, Any]:
    """Gluon's descriptor, and the layout of fp32 numbers in a row."""
    from ...kernels.hopper.gluon import TensorDescriptor, gl

    return TensorDescriptor, gl.NVMMASharedLayout(0, 32, 1)


def kept_box(rows: int, dtype: torch.dtype) -> Any:
    """Of the ring of dS [rows, 64], a tile of 64 rows at a time."""
    return Box(stand_in(dtype), [rows, UNIT], [UNIT, 1], [UNIT, UNIT], *descriptor((UNIT, UNIT), dtype))


def statistics_bound(
    problem: Any,
    out: torch.Tensor,
    dout: torch.Tensor,
    layout: Layout,
    q_units: int,
    counters: int,
    given: Sequence[str],
    values: Mapping[str, Any] | None = None,
    per: int = 1,
    unit: int = UNIT,
) -> Bound:
    """The launch that makes the statistics and clears the counters.

    problem: of the forward pass, an AttentionProblem.  q_units: tiles of a head.  values: of the sizes of query blocks, where
    there are some.  per: tiles of a query block.  unit: queries of a tile."""
    from ...kernels.backward.backward_statistics import backward_statistics

    n = problem
    constants = {
        "WIDE": max(head_strides(out, layout)[1], head_strides(dout, layout)[1]) * unit >= 1 << 31,
        "DIM": n.dim_v,
        "BLOCK_D": n.block_v,
        "UNIT": unit,
        "PER": per,
    }
    unsized = {"QuerySizes": None, "stride_pb": 0, "stride_ph": 0}
    sizes = {"seq_q": n.seq_q, "heads": n.heads, "q_units": q_units, "counters": counters}
    values = {**unsized, **(values or {}), **sizes, **side_strides(layout, o=out, d=dout)}
    return Bound.of(backward_statistics, n.batch * n.heads * q_units + 1, given, values, constants, out.device)
