"""Block-sparse attention and its backward pass in torch's dispatcher; what `library` says of the dense operator holds here.

The index travels as its tensors and its geometry.  Where a gradient may be asked for, the transposed lists come along as inputs:
they are made in front of the operator, in the graph, where the compiler sees them.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch

from ...errors import Unsupported
from ...types import Layout
from ..call import Packed, Paged, check_options, result_shapes, shapes_of, sizes_of
from ..dense.library import HOOKS, describe_args, named, named_values, refuse_unserved
from ..hopper import inside_operator
from . import sparse
from .sparse import Lists, SparseCall, dense_call

__all__ = [
    "paged_dispatched",
    "sparse_attention_backward_op",
    "sparse_attention_op",
    "sparse_attention_paged_op",
    "sparse_dispatched",
]

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("tilefold::sparse_attention", mutates_args=())
def sparse_attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    block_sizes: torch.Tensor | None,
    query_sizes: torch.Tensor | None,
    t_indices: torch.Tensor | None,
    t_counts: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    geometry: Sequence[int],
    causal: bool,
    scale: float | None,
    softcap: float,
    layout: str,
    hooks: str,
    mod_tensors: Sequence[torch.Tensor],
    mod_ints: Sequence[int],
    mod_floats: Sequence[float],
    mod_order: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `tilefold.sparse_attention`, or of `sparse_attention_varlen` if cu_seqlens are given; geometry: block_q,
    block_k, seq_q, seq_k; t_indices, t_counts: the transposed lists, which only the backward pass reads; hooks: names of
    constants, in the order of HOOKS."""
    lists = (indices, counts, block_sizes, query_sizes)
    call = _call(lists, geometry, causal, scale, softcap, layout, cu_seqlens_q, cu_seqlens_k)
    mods = named_values(HOOKS, hooks, mod_tensors, mod_ints, mod_floats, mod_order)
    with inside_operator():
        return sparse.forward(q, k, v, call._replace(**mods))


@sparse_attention_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor, counts: torch.Tensor,
    block_sizes: torch.Tensor | None, query_sizes: torch.Tensor | None, t_indices: torch.Tensor | None,
    t_counts: torch.Tensor | None, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None,
    geometry: Sequence[int], causal: bool, scale: float | None, softcap: float, layout: str, hooks: str,
    mod_tensors: Sequence[torch.Tensor], mod_ints: Sequence[int], mod_floats: Sequence[float], mod_order: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    lists = (indices, counts, block_sizes, query_sizes)
    call = _call(lists, geometry, causal, scale, softcap, layout, cu_seqlens_q, cu_seqlens_k)
    out_shape, lse_shape = shapes_of(q, k, v, dense_call(call))
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=torch.float32)


@torch.library.custom_op("tilefold::sparse_attention_backward", mutates_args=())
def sparse_attention_backward_op(
    dout: torch.Tensor,
    dlse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    block_sizes: torch.Tensor | None,
    query_sizes: torch.Tensor | None,
    t_indices: torch.Tensor,
    t_counts: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    geometry: Sequence[int],
    causal: bool,
    scale: float | None,
    softcap: float,
    layout: str,
    hooks: str,
    mod_tensors: Sequence[torch.Tensor],
    mod_ints: Sequence[int],
    mod_floats: Sequence[float],
    mod_order: str,
) -> Tensors:
    """(dq, dk, dv) of `tilefold::sparse_attention` from the gradients of out and lse."""
    lists = (indices, counts, block_sizes, query_sizes)
    call = _call(lists, geometry, causal, scale, softcap, layout, cu_seqlens_q, cu_seqlens_k)
    mods = named_values(HOOKS, hooks, mod_tensors, mod_ints, mod_floats, mod_order)
    turned = Lists(t_indices, t_counts, query_sizes, block_sizes, *(geometry[i] for i in (1, 0, 3, 2)))
    from .sparse_backward import backward  # here: `import tilefold` stays light

    return cast("Tensors", backward((q, k, v, out, lse), dout, dlse, call._replace(**mods), turned))


@sparse_attention_backward_op.register_fake
def _(dout: torch.Tensor, dlse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> Tensors:
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    qkv, lists, rest = inputs[:3], inputs[3:11], inputs[11:]
    tensors = inputs[17]
    ctx.save_for_backward(*qkv, *output, *lists, *tensors)
    ctx.rest = *rest[:6], *rest[7:]


def _differentiate(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    if saved[9] is None:
        raise Unsupported("a gradient of tilefold::sparse_attention needs the transposed lists: t_indices and t_counts")
    refuse_unserved("sparse_attention", "q, k and v", ctx.rest[5], saved[13:])
    rest = (*ctx.rest[:6], list(saved[13:]), *ctx.rest[6:])
    grads = sparse_attention_backward_op(dout, dlse, *saved[:13], *rest)
    # torch takes an empty list for a list of tensors and wants one back.
    numbers: list[Any] = [[] if len(given) == 0 else None for given in rest[7:9]]
    return *grads, *(None,) * 14, [None] * len(saved[13:]), *numbers, None


sparse_attention_op.register_autograd(_differentiate, setup_context=_keep)


def _call(
    lists: tuple[Any, ...],
    geometry: Sequence[int],
    causal: bool,
    scale: float | None,
    softcap: float,
    layout: str,
    cu_q: torch.Tensor | None = None,
    cu_k: torch.Tensor | None = None,
) -> SparseCall:
    packed = None if cu_q is None or cu_k is None else Packed(cu_q, cu_k, geometry[2], geometry[3])
    return SparseCall(Lists(*lists, *geometry), causal, scale, softcap, cast("Layout", layout), packed=packed)


def sparse_dispatched(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SparseCall, transposed: Lists | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as ops.sparse.forward, through the dispatcher; transposed: where a gradient may be asked for."""
    check_options(dense_call(call))
    t_indices, t_counts = (None, None) if transposed is None else transposed[:2]
    hooks = named(*(getattr(call, name) for name in HOOKS))
    cu_q, cu_k = (None, None) if call.packed is None else call.packed[:2]
    result = sparse_attention_op(q, k, v, *call.lists[:4], t_indices, t_counts, cu_q, cu_k, list(call.lists[4:8]), call.causal,
                                 call.scale, call.softcap, call.layout, hooks,
                                 *describe_args(call.score_args, call.mask_args))  # fmt: skip
    return cast("tuple[torch.Tensor, torch.Tensor]", result)


# ---------------------------------------------------------------- paged: no gradient


@torch.library.custom_op("tilefold::sparse_attention_paged", mutates_args=())
def sparse_attention_paged_op(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    block_sizes: torch.Tensor | None,
    query_sizes: torch.Tensor | None,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    geometry: Sequence[int],
    causal: bool,
    scale: float | None,
    softcap: float,
    layout: str,
    hooks: str,
    mod_tensors: Sequence[torch.Tensor],
    mod_ints: Sequence[int],
    mod_floats: Sequence[float],
    mod_order: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `tilefold.sparse_attention_paged`; the rest as for `tilefold::sparse_attention`."""
    call = _call((indices, counts, block_sizes, query_sizes), geometry, causal, scale, softcap, layout)
    mods = named_values(HOOKS, hooks, mod_tensors, mod_ints, mod_floats, mod_order)
    return sparse.forward(q, k_pages, v_pages, call._replace(paged=Paged(block_table, cache_seqlens), **mods))


@sparse_attention_paged_op.register_fake
def _(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lists, where, geometry, options = args[:4], args[4:6], args[6], args[7:11]
    call = _call(lists, geometry, *options)
    check_options(dense_call(call))
    sizes = sizes_of(q, k_pages, v_pages, dense_call(call), Paged(*where))
    out_shape, lse_shape = result_shapes(dense_call(call), sizes)
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=torch.float32)


def _refuse_gradient(ctx: Any, *gradients: Any) -> Any:
    raise Unsupported("gradients of tilefold::sparse_attention_paged are not implemented: pages have no backward pass")


sparse_attention_paged_op.register_autograd(_refuse_gradient)


def paged_dispatched(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SparseCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as ops.sparse.forward of a paged call, through the dispatcher."""
    check_options(dense_call(call))
    hooks = named(*(getattr(call, name) for name in HOOKS))
    result = sparse_attention_paged_op(q, k, v, *call.lists[:4], *call.placement, list(call.lists[4:8]), call.causal, call.scale,
                                       call.softcap, call.layout, hooks,
                                       *describe_args(call.score_args, call.mask_args))  # fmt: skip
    return cast("tuple[torch.Tensor, torch.Tensor]", result)
