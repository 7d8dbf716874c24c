"""Block-sparse attention as operations: eager, with autograd functions of its own, and in torch's dispatcher.

The lists of an eager call are transposed when a backward pass asks for them.  Where a gradient may be asked for of a traced call,
the transposed lists come along as inputs: they are made in front of the operator, where the compiler sees them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...errors import Unsupported
from ..call import Call, args_of, check_options, result_shapes, sizes_of
from ..dense.library import resolved
from ..operator import Gradient, Operation
from ..source import Lists, Packed, Paged
from ..watch import (
    in_forward_mode,
    is_open,
    is_transformed,
    is_watched,
    refuse_gradients,
    refuse_tangents,
    wants_gradient,
)
from . import sparse

Pair = tuple[torch.Tensor, torch.Tensor]


class Turned(NamedTuple):
    """The transposed lists, which the backward pass alone reads."""

    indices: torch.Tensor
    counts: torch.Tensor


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, turned: Turned | None) -> Pair:
    return _fake_paged(q, k, v, call)


def _fake_paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Pair:
    _before(q, k, v, call)
    out_shape, lse_shape = result_shapes(call, sizes_of(q, k, v, call))
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=torch.float32)


def _gradients(
    args: tuple[Any, ...], results: Pair, grads: tuple[Any, Any], wanted: tuple[bool, ...]
) -> Sequence[torch.Tensor | None]:
    from .sparse_backward import backward  # here: `import tilefold` stays light

    q, k, v, call, turned = args
    lists = call.lists
    back = Lists(turned.indices, turned.counts, lists.query_sizes, lists.block_sizes, lists.block_k, lists.block_q, lists.seq_k,
                 lists.seq_q)  # fmt: skip
    dout = torch.zeros_like(results[0]) if grads[0] is None else grads[0]
    return backward((q, k, v, *results), dout, grads[1], call, back, wanted)


def _require(q: Any, k: Any, v: Any, call: Call, turned: Turned | None) -> None:
    from ..backward.backward_parts import score_slope

    score_slope(call.score_mod, call.score_grad)
    if turned is None:
        raise Unsupported("a gradient of tilefold::sparse_attention needs the transposed lists")


def _ready(*args: Any) -> None:
    """The eager form has an autograd function of its own."""


def _before(q: Any, k: Any, v: Any, call: Call, *turned: Any) -> None:
    check_options(call)


class SparseOperation(Operation):
    """An eager call gives, in the place of the transposed lists, what transposes its `BlockIndex`."""

    def first(self, *given: Any, key: Any = None) -> Any:
        q, k, v, whole, transpose = given
        args = args_of(whole)
        wanted = (torch.is_grad_enabled() or in_forward_mode()) and wants_gradient((q, k, v, *args.values()))
        compiling = torch.compiler.is_compiling()
        transformed = not compiling and is_transformed()
        if compiling or (not transformed and is_watched((q, k, v))):
            return self.dispatched(q, k, v, whole, Turned(*transpose().tensors()[:2]) if wanted else None)
        call = resolved(whole)
        if not wanted and not transformed:
            return self.plain((q, k, v, call), whole is call and not is_open(), key)
        refuse_tangents({"q": q, "k": k, "v": v, **args})
        refuse_gradients(args.items(), "q, k and v")
        from .sparse_backward import (
            TRANSFORMED,
            check_differentiable,
            differentiated,
        )  # here: `import tilefold` stays light

        if transformed:
            return TRANSFORMED.apply(q, k, v, call, lambda: Lists.of(transpose()), None)
        found = check_differentiable(q, k, v, call)
        if whole is call and not is_open():
            found.ways[True] = differentiated
        return differentiated(found, q, k, v, call, transpose)


SPARSE = SparseOperation(
    "sparse_attention",
    sparse.prepare,
    _fake,
    Gradient(("q", "k", "v"), _gradients, _require, _ready),
    _before,
    (Packed, Lists),
)
"""(out, lse) of `tilefold.sparse_attention` and `sparse_attention_varlen`."""
SPARSE_PAGED = Operation(
    "sparse_attention_paged",
    sparse.prepare,
    _fake_paged,
    "gradients of tilefold::sparse_attention_paged are not implemented: pages have no backward pass",
    _before,
    (Paged, Lists),
)
"""(out, lse) of `tilefold.sparse_attention_paged`."""
