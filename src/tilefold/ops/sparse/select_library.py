"""Block selection in torch's dispatcher: compilers, FakeTensor and tracing see two opaque operators without gradients."""

from collections.abc import Sequence
from typing import Any, cast

import torch

from ...types import ModArgs
from ..operator import Operation
from . import select
from .select import KINDS, SelectCall, Selected, Setting, result_shapes

Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _forward(
    scores: torch.Tensor, force: torch.Tensor | None, block_sizes: torch.Tensor | None, method: str, settings: ModArgs,
    capacity: int, geometry: Sequence[int], force_first: int, reach: int, gini: bool,
    softmax: float | None,
) -> Five:  # fmt: skip
    """(indices, counts, gini, tau, mass) as `ops.sparse.select.forward`; settings: as of `SelectCall`."""
    options = (method, settings, capacity, geometry, force_first, reach, gini, softmax)
    return cast("Five", tuple(select.forward(scores, _call(force, block_sizes, *options))))


def _call(
    force: Any, block_sizes: Any, method: str, settings: ModArgs, capacity: int, geometry: Any, *others: Any
) -> SelectCall:
    *amount, least, most = cast("tuple[Setting, ...]", settings)
    first, reach, gini, softmax = others
    shape = capacity, tuple(geometry), first, reach
    return SelectCall(method, tuple(amount), least, most, *shape, force, block_sizes, gini, softmax)


def _fake(scores: torch.Tensor, *given: Any) -> Five:
    shapes = result_shapes(scores, _call(*given))
    return cast("Five", tuple(scores.new_empty(s, dtype=kind) for s, kind in zip(shapes, KINDS, strict=True)))


def _fake_gini(scores: torch.Tensor, block_sizes: torch.Tensor | None) -> torch.Tensor:
    return scores.new_empty(scores.shape[:3], dtype=torch.float32)


NONE = "selections have no gradients: detach() the scores"
SELECT = Operation("select", _forward, _fake, NONE)
GINI = Operation("gini", select.gini, _fake_gini, NONE)


def select_dispatched(scores: torch.Tensor, call: SelectCall) -> Selected:
    """The same as ops.sparse.select.forward, through the dispatcher."""
    tensors, window = (scores, call.force, call.block_sizes), (list(call.geometry), call.force_first, call.reach)
    return Selected(
        *SELECT.dispatched(*tensors, call.method, call.settings, call.capacity, *window, call.gini, call.softmax)
    )
