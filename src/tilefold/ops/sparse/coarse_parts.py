"""What forward and backward of coarse attention have in common: the call, its record, the kernels' constants."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..bound import strides_named
from ..device import interpreting
from .project import size_strides

if TYPE_CHECKING:
    from ...plan.sparse.coarse import CoarsePlan


class CoarseCall(NamedTuple):
    """Everything but q and the rows of k and v.

    reduction: "mean", "max", or "each" if every query is a block of its own (query_sizes then says which are live).
    finite: dead rows of k and v hold finite numbers.  names: of the rows of k and v, for errors."""

    block_sizes: torch.Tensor | None
    query_sizes: torch.Tensor | None
    block: int
    scale: float | None
    reduction: str
    layout: str
    finite: bool
    names: str = "k v"


@dataclass(slots=True)
class Prepared:
    """All that follows from a call's key; plan None: nothing to compute."""

    plan: "CoarsePlan | None"
    out_shape: tuple[int, ...]
    scores_shape: tuple[int, ...]  # with the parts in front
    lse_shape: tuple[int, ...]
    scale: float = 1.0
    bound: Any = None
    backward: dict[Any, Any] = field(default_factory=dict)


def constants_of(plan: "CoarsePlan", dtype: torch.dtype, wide: bool) -> dict[str, Any]:
    """Compile-time constants that the three kernels share; wide: rows of one tile lie 2^31 elements or more apart."""
    n = plan.problem.attention
    return {
        "EMULATE": interpreting() and dtype == torch.bfloat16,
        "WIDE": wide,
        "DIM_QK": n.dim_qk,
        "DIM_V": n.dim_v,
        "Q_BLOCK": plan.problem.block,
        "BLOCK_QK": n.block_qk,
        "BLOCK_V": n.block_v,
    }


def values_of(plan: "CoarsePlan", call: CoarseCall, scale: float) -> dict[str, Any]:
    """Lengths and strides of sizes by the names that the three kernels share."""
    n = plan.problem.attention
    return {
        **{name: getattr(n, name) for name in ("seq_q", "seq_k", "heads", "group", "batch")},
        "scale": scale,
        **strides_named("s", size_strides(call.block_sizes), "bh"),
        **strides_named("p", size_strides(call.query_sizes), "bh"),
    }
