"""flash_attn.bert_padding: between padded batches and sequences packed one after the other.

How many tokens there are decides shapes, so `unpad_input` makes the host wait for the mask, once, as flash_attn's does.
"""

from typing import Any

import torch
import torch.nn.functional as F

from ...errors import DtypeError, ShapeError, ValueRangeError
from .arguments import check_tensor, flash_errors, host_int

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


@flash_errors()
def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """input[indices]: rows [total, ...] of input [rows, ...]; differentiable."""
    _check_rows("input", input, indices)
    return input.index_select(0, indices)


@flash_errors()
def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """[first_axis_dim, ...] that is 0 but for the rows `indices`, which are `values`; differentiable.  Indices differ."""
    _check_rows("values", values, indices)
    if indices.shape[0] != values.shape[0]:
        raise ShapeError(f"indices has shape {tuple(indices.shape)}, expected one for each of {values.shape[0]} rows")
    empty = torch.zeros((first_axis_dim, *values.shape[1:]), dtype=values.dtype, device=values.device)
    return empty.index_put((indices,), values)  # transformers gives int32 indices, which index_copy does not take


@flash_errors()
def index_first_axis_residual(input: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(input[indices], input); the gradients of both add up."""
    _check_rows("input", input, indices)
    return input.index_select(0, indices), input.view_as(input)


@flash_errors()
def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """(packed [total, ...], indices [total], cu_seqlens [batch + 1] int32, longest, seqused [batch] int32) of hidden_states
    [batch, seqlen, ...].

    attention_mask: [batch, seqlen] bool or a number, not 0 where a token counts; unused_mask: the same, not 0 where a token is
    kept without counting; seqused counts the former."""
    _check_mask("attention_mask", hidden_states, attention_mask)
    counted = kept = attention_mask != 0
    if unused_mask is not None:
        _check_mask("unused_mask", hidden_states, unused_mask)
        kept = counted | (unused_mask != 0)
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, cu_seqlens, longest, counted.sum(-1, dtype=torch.int32)


@flash_errors()
def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """(packed, indices, cu_seqlens, longest) where a row of the batch holds several sequences: attention_mask_in_length [batch,
    seqlen] int lists their lengths, then zeros."""
    _check_mask("attention_mask_in_length", hidden_states, attention_mask_in_length)
    if attention_mask_in_length.is_floating_point() or attention_mask_in_length.dtype == torch.bool:
        raise DtypeError(f"attention_mask_in_length has dtype {attention_mask_in_length.dtype}, expected integers")
    filled = attention_mask_in_length.sum(-1, keepdim=True)
    place = torch.arange(attention_mask_in_length.shape[-1], device=filled.device)
    indices = (place < filled).flatten().nonzero().flatten()
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths.nonzero().flatten()]
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = 0
    if lengths.numel():
        shortest, longest, fullest = torch.stack((lengths.min(), lengths.max(), filled.max())).tolist()
        if shortest < 0 or fullest > hidden_states.shape[1]:
            raise ValueRangeError(
                f"attention_mask_in_length must hold lengths of at least 0, in a row at most {hidden_states.shape[1]}, the "
                f"seqlen, together, got {shortest} and a row with {fullest}"
            )
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


@flash_errors(values="hidden_states")
def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """[batch, seqlen, ...] of packed [total, ...] and their places, 0 elsewhere."""
    for name, value in (("batch", batch), ("seqlen", seqlen)):
        if host_int(name, value) < 0:
            raise ValueRangeError(f"{name} must be at least 0, got {value}")
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *padded.shape[1:])


def _check_mask(name: str, hidden_states: Any, mask: Any) -> None:
    check_tensor("hidden_states", hidden_states)
    check_tensor(name, mask)
    if hidden_states.dim() < 2 or mask.shape != hidden_states.shape[:2]:
        raise ShapeError(
            f"{name} has shape {tuple(mask.shape)}, expected the [batch, seqlen] of hidden_states {tuple(hidden_states.shape)}"
        )


def _check_rows(name: str, rows: Any, indices: Any) -> None:
    check_tensor(name, rows)
    check_tensor("indices", indices, (1,), "[total]")
    if rows.dim() < 1:
        raise ShapeError(f"{name} has shape (), expected [rows, ...]")
    if indices.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"indices has dtype {indices.dtype}, accepted: int32, int64")
