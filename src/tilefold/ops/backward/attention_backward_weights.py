"""Backward attention in fp32: the probabilities that are computed again are divided by their sum.

Both of their products, p^T dout and p * (dp - delta), are linear in dout and delta, so it is these that are multiplied by one
number a row, and every kernel that follows stays as it is.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..bound import Bound
from ..call import Call
from .backward_parts import tiled

if TYPE_CHECKING:
    from ...plan.backward.attention_backward import AttentionBackwardPlan

GIVEN = ("Q", "K", "Lse2", "Weight", "call")
"""What a call gives to the kernel."""


def bind_weights(
    plan: "AttentionBackwardPlan", constants: Mapping[str, Any], values: Mapping[str, Any], device: int
) -> Bound | None:
    """The launch that makes the weights of an fp32 call; None of any other call."""
    from ...kernels.backward.attention_backward_weights import attention_backward_weights

    if plan.problem.dtype != "float32":
        return None
    chosen = {name: constants[name] for name in ("KIND", "EMULATE", "WIDE", "DIM_QK", "BLOCK_QK")}
    return Bound(tiled(attention_backward_weights, plan.queries, plan.grids[0], chosen, device), GIVEN, values)


def weighted(
    bound: Bound, tensors: tuple[torch.Tensor, ...], dout: torch.Tensor, delta: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """dout, contiguous, and delta [batch, heads, rows] or packed, times the weights of their rows; tensors: q, k, and lse in base
    2."""
    q, k, lse2 = tensors
    packed = call.packed is not None
    weight = torch.ones_like(lse2) if packed else torch.empty_like(lse2)  # rows of no sequence have no program
    bound((q, k, lse2, weight, call))
    rows = weight if call.layout == "bhsd" and not packed else weight.transpose(-2, -1)
    scaled = torch.empty_like(dout, memory_format=torch.contiguous_format)
    torch.mul(dout, rows[..., None], out=scaled)
    return scaled, delta * weight
