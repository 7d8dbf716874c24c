"""flash_attn.bert_padding: between padded batches and sequences packed one after the other.

How many tokens there are decides shapes, so `unpad_input` makes the host wait for the mask, once, as flash_attn's does.
"""

from typing import Any

import torch
import torch.nn.functional as F

from ...errors import ShapeError
from .arguments import flash_errors

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """input[indices]: rows [total, ...] of input [rows, ...]; differentiable."""
    return input.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """[first_axis_dim, ...] that is 0 but for the rows `indices`, which are `values`; differentiable.  Indices differ."""
    empty = torch.zeros((first_axis_dim, *values.shape[1:]), dtype=values.dtype, device=values.device)
    return empty.index_put((indices,), values)  # transformers gives int32 indices, which index_copy does not take


def index_first_axis_residual(input: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(input[indices], input); the gradients of both add up."""
    return input.index_select(0, indices), input.view_as(input)


@flash_errors
def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """(packed [total, ...], indices [total], cu_seqlens [batch + 1] int32, longest, seqused [batch] int32) of hidden_states
    [batch, seqlen, ...].

    attention_mask: [batch, seqlen] bool or int, 1 where a token counts; unused_mask: the same, 1 where a token is kept without
    counting; seqused counts the former."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    _check_mask(hidden_states, kept)
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, cu_seqlens, longest, attention_mask.sum(-1, dtype=torch.int32)


@flash_errors
def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """(packed, indices, cu_seqlens, longest) where a row of the batch holds several sequences: attention_mask_in_length [batch,
    seqlen] int lists their lengths, then zeros."""
    _check_mask(hidden_states, attention_mask_in_length)
    filled = attention_mask_in_length.sum(-1, keepdim=True)
    place = torch.arange(attention_mask_in_length.shape[-1], device=filled.device)
    indices = (place < filled).flatten().nonzero().flatten()
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths.nonzero().flatten()]
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """[batch, seqlen, ...] of packed [total, ...] and their places, 0 elsewhere."""
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *padded.shape[1:])


def _check_mask(hidden_states: Any, mask: Any) -> None:
    if hidden_states.dim() < 2 or mask.shape != hidden_states.shape[:2]:
        raise ShapeError(
            f"attention_mask has shape {tuple(mask.shape)}, expected the [batch, seqlen] of hidden_states "
            f"{tuple(hidden_states.shape)}"
        )
