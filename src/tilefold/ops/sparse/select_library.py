"""Block selection in torch's dispatcher: compilers, FakeTensor and tracing see two opaque operators without gradients."""

from collections.abc import Sequence
from typing import cast

import torch

from . import select as _select
from .select import SelectCall, Selected, Setting, result_shapes

__all__ = ["gini_dispatched", "gini_op", "is_watched", "select_dispatched", "select_op"]

Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("tilefold::select", mutates_args=())
def select_op(
    scores: torch.Tensor,
    force: torch.Tensor | None,
    block_sizes: torch.Tensor | None,
    method: str,
    per_row: Sequence[torch.Tensor],
    numbers: Sequence[float],
    order: str,
    capacity: int,
    geometry: Sequence[int],
    force_first: int,
    reach: int,
) -> Five:
    """(indices, counts, gini, tau, mass) as `ops.sparse.select.forward`; order: for each setting "t", the next of per_row, or
    "f", the next of numbers."""
    call = _call(force, block_sizes, method, per_row, numbers, order, capacity, geometry, force_first, reach)
    return cast("Five", tuple(_select.forward(scores, call)))


@select_op.register_fake
def _(
    scores: torch.Tensor, force: torch.Tensor | None, block_sizes: torch.Tensor | None, method: str,
    per_row: Sequence[torch.Tensor], numbers: Sequence[float], order: str, capacity: int, geometry: Sequence[int],
    force_first: int, reach: int,
) -> Five:  # fmt: skip
    call = _call(force, block_sizes, method, per_row, numbers, order, capacity, geometry, force_first, reach)
    kinds = (torch.int32, torch.int32, torch.float32, torch.float32, torch.float32)
    shapes = result_shapes(scores, call)
    return cast("Five", tuple(scores.new_empty(s, dtype=kind) for s, kind in zip(shapes, kinds, strict=True)))


@torch.library.custom_op("tilefold::gini", mutates_args=())
def gini_op(scores: torch.Tensor, block_sizes: torch.Tensor | None) -> torch.Tensor:
    """The Gini coefficient of each row, as `ops.sparse.select.gini`."""
    return _select.gini(scores, block_sizes)


@gini_op.register_fake
def _(scores: torch.Tensor, block_sizes: torch.Tensor | None) -> torch.Tensor:
    return scores.new_empty(scores.shape[:3], dtype=torch.float32)


def _call(
    force: torch.Tensor | None,
    block_sizes: torch.Tensor | None,
    method: str,
    per_row: Sequence[torch.Tensor],
    numbers: Sequence[float],
    order: str,
    capacity: int,
    geometry: Sequence[int],
    force_first: int,
    reach: int,
) -> SelectCall:
    left = {"t": iter(per_row), "f": iter(numbers)}
    *amount, least, most = cast("list[Setting]", [next(left[kind]) for kind in order])
    block_q, block_k, seq_q, seq_k = geometry
    return SelectCall(method, tuple(amount), least, most, capacity, (block_q, block_k, seq_q, seq_k), force_first, reach, force,
                      block_sizes)  # fmt: skip


def select_dispatched(scores: torch.Tensor, call: SelectCall) -> Selected:
    """The same as ops.sparse.select.forward, through the dispatcher."""
    per_row = [s for s in call.settings if isinstance(s, torch.Tensor)]
    numbers = [s for s in call.settings if not isinstance(s, torch.Tensor)]
    order = "".join("t" if isinstance(s, torch.Tensor) else "f" for s in call.settings)
    made = select_op(scores, call.force, call.block_sizes, call.method, per_row, numbers, order, call.capacity,
                     list(call.geometry), call.force_first, call.reach)  # fmt: skip
    return Selected(*made)


def gini_dispatched(scores: torch.Tensor, block_sizes: torch.Tensor | None) -> torch.Tensor:
    """The same as ops.sparse.select.gini, through the dispatcher."""
    return cast("torch.Tensor", gini_op(scores, block_sizes))


def is_watched(*tensors: object) -> bool:
    """Does something watch this call that has to see an operator: a compiler, a dispatch mode, functorch, a tensor subclass?"""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    plain = (torch.Tensor, torch.nn.Parameter)
    return any(isinstance(t, torch.Tensor) and (type(t) not in plain or t.is_meta) for t in tensors)
