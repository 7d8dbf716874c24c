"""The three masks of the ladder in one place: additive, causal, padding.  A masked score is -inf, an added one is added.

Each is there or not when a kernel is compiled: `bias` and `padding` are tuples, empty where there is none."""

import torch
import triton
import triton.language as tl


@triton.jit
def masked(s, i_b, i_h, rows, cols, seq_q, seq_k, bias, padding, CAUSAL: tl.constexpr):
    """Scores s [M, N] in natural units of queries rows [M] and keys cols [N] -> the same with masks.

    bias: () or (pointer, four strides); padding: () or (pointer to uint8, two strides): 0 where there is no key.
    Causal: query i sits at key i + seq_k - seq_q, so that the last query sees the last key."""
    alive = (rows < seq_q)[:, None] & (cols < seq_k)[None, :]
    if CAUSAL:
        alive = alive & (cols[None, :] <= rows[:, None] + (seq_k - seq_q))
    if len(padding) > 0:
        there = tl.load(padding[0] + i_b * padding[1] + cols * padding[2], mask=cols < seq_k, other=0)
        alive = alive & (there != 0)[None, :]
    if len(bias) > 0:
        place = bias[0] + i_b * bias[1] + i_h * bias[2]
        added = tl.load(place + rows[:, None] * bias[3] + cols[None, :] * bias[4], mask=alive, other=0.0)
        s += added.to(tl.float32)
    return tl.where(alive, s, float("-inf"))


def mask_arguments(bias: torch.Tensor | None, padding_mask: torch.Tensor | None) -> tuple[tuple, tuple]:
    """(bias, padding) as `masked` takes them; a dimension of 1, or one that bias lacks in front, is read again and again, with
    stride 0."""

    def given(t, dims):
        strides = (0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True))
        return (t, *(0,) * (dims - t.dim()), *strides)

    padding = () if padding_mask is None else given(padding_mask.view(torch.uint8), 2)
    return (() if bias is None else given(bias, 4)), padding
