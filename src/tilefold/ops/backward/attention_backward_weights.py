"""Backward attention in fp32: the probabilities that are computed again are divided by their sum.

Both of their products, p^T dout and p * (dp - delta), are linear in dout and delta, so it is these that are multiplied by one
number a row, and every kernel that follows stays as it is.
"""

from typing import TYPE_CHECKING, Any

import torch

from ..call import Call
from .backward_parts import tiled

if TYPE_CHECKING:
    from ...plan.attention_backward import AttentionBackwardPlan

__all__ = ["bind_weights", "weighted"]


def bind_weights(
    scale: float,
    call: Call,
    plan: "AttentionBackwardPlan",
    constants: dict[str, Any],
    band: tuple[int, ...],
    inputs: tuple[int, ...],
    lse_strides: tuple[int, int],
    device: int,
) -> tuple[Any, tuple[Any, ...]]:
    """The launch that makes the weights of an fp32 call, with the arguments that do not change; (None, ()) of any other call.
    inputs: strides of q, k and more."""
    from ...kernels.attention_backward_weights import attention_backward_weights

    n = plan.problem
    if n.dtype != "float32":
        return None, ()
    names = ("KIND", "EMULATE", "WIDE", "DIM_QK", "BLOCK_QK")
    chosen = {name: constants[name] for name in names}
    launch = tiled(attention_backward_weights, plan.queries, plan.grids[0], chosen, device)
    sinks = 0 if call.sinks is None else call.sinks.stride(0)
    return launch, (scale, n.seq_q, n.seq_k, n.heads, n.group, *band, sinks, *inputs[:6], *lse_strides)


def weighted(
    launch: Any,
    tail: tuple[Any, ...],
    tensors: tuple[torch.Tensor, ...],
    call: Call,
    hooks: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """dout, contiguous, and delta [batch, heads, rows] or packed, times the weights of their rows; tensors: q, k, dout, lse in
    base 2, delta; hooks: score mods and mask mods."""
    q, k, dout, lse2, delta = tensors
    packed = call.packed is not None
    weight = torch.ones_like(lse2) if packed else torch.empty_like(lse2)  # rows of no sequence have no program
    offsets = call.packed[:2] if call.packed is not None else (None, None)
    launch((q, k, lse2, weight, call.sinks, *offsets, *tail, *hooks))
    rows = weight if call.layout == "bhsd" and not packed else weight.transpose(-2, -1)
    scaled = torch.empty_like(dout, memory_format=torch.contiguous_format)
    torch.mul(dout, rows[..., None], out=scaled)
    return scaled, delta * weight
