"""What the stages of sparse video attention are asked for, and what they made."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from ..check import check_share
from ..errors import ValueRangeError
from .index import BlockIndex
from .select_arguments import METHODS, Number, check_method


@dataclass(frozen=True)
class CoarseOptions:
    """How the coarse branch reduces keys and values to one row a block; see `tilefold.sparse.coarse`.

    kind: "block" (a weight for each slot of a block), "dense" (a matrix over all tokens, as Linformer) or "pooled" (queries
    averaged, too).  reduction: a query block's score is the "mean" or the "max" over its queries."""

    kind: Literal["block", "dense", "pooled"] = "block"
    reduction: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        for name, accepted in (("kind", ("block", "dense", "pooled")), ("reduction", ("mean", "max"))):
            if getattr(self, name) not in accepted:
                raise ValueRangeError(f"{name} must be one of {', '.join(accepted)}, got {getattr(self, name)!r}")


@dataclass(frozen=True, eq=False)
class SelectOptions:
    """Which blocks of the highest scores are attended: arguments of `tilefold.sparse.select`, which describes them.

    method: "gini" (as much of a row's mass as tau, which follows from how concentrated the row is), "top_p" (mass top_p) or
    "top_k" (top_k blocks, or what `sparsity`, 0 to 1, leaves).  Settings are numbers, or tensors on the device: [heads]
    gives each head its own.

    Raises ValueRangeError for settings of another method, for a method without its own, and for shares out of range."""

    method: Literal["gini", "top_p", "top_k"] = "gini"
    tau_min: Number | None = None
    tau_max: Number | None = None
    tau: Callable[[torch.Tensor], Any] | None = None
    top_p: Number | None = None
    top_k: Number | None = None
    sparsity: Number | None = None
    min_blocks: Number = 1
    max_blocks: Number | None = None
    capacity: int | None = None
    force_self: bool = False
    force_first: int = 0
    local_window: int | None = None
    force: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_method(self.method, {name: getattr(self, name) for names in METHODS.values() for name in names})
        for name in ("tau_min", "tau_max", "top_p", "sparsity"):
            if isinstance(getattr(self, name), int | float):
                check_share(name, getattr(self, name))

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `select`."""
        return {name: getattr(self, name) for name in _SELECT_FIELDS}  # torch 2.11 does not trace dict(vars(self))


_SELECT_FIELDS = tuple(one.name for one in fields(SelectOptions))


@dataclass(frozen=True, eq=False)
class Stages:
    """What each stage of a call made; without a coarse branch everything but index, fine_out and fine_lse is None.

    coarse_out: like out, the coarse branch before its gate.
    scores: fp32 [batch, heads, Q blocks, KV blocks], the probability that a query block puts on a KV block.
    gini: fp32 [batch, heads, Q blocks], how concentrated a row of scores is, 0 to 1.
    tau: fp32 [batch, heads, Q blocks], the mass that was asked for (None for the method "top_k"); mass: that of the
        blocks which were listed.
    index: the lists that were attended.
    fine_out: like out, the fine branch before its gate; fine_lse: fp32 [batch, heads, seq], natural log."""

    coarse_out: torch.Tensor | None
    scores: torch.Tensor | None
    gini: torch.Tensor | None
    tau: torch.Tensor | None
    mass: torch.Tensor | None
    index: BlockIndex
    fine_out: torch.Tensor
    fine_lse: torch.Tensor
