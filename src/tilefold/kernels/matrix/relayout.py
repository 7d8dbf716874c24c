"""Channels beside one another, as a convolution reads them fast, of a tensor that lies pixel by pixel.  One read, one write."""

import triton
import triton.language as tl

from ...device.convolution import multiple, offset_of, offset_of_channels, place_of


@triton.jit(do_not_specialize=["total", "high", "wide", "channels"])
def channels_last(
    X, Out, total, high, wide, channels, width, x_strides, RUN: tl.constexpr, OUT_RUN: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """X by strides (image, line, column, channel) -> Out [total, width], contiguous, where total are the pixels of all images: a
    tile is loaded pixel by pixel, turned, and stored channel by channel.  Elements are integers of their size; what lies beyond
    the channels is 0.  RUN: pixels that lie side by side in X; OUT_RUN: a divisor of width.  Grid (tiles, channels fastest)."""
    width = multiple(width, OUT_RUN)
    tiles_n = tl.cdiv(width, BLOCK_N)
    i_m, i_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    o_m, o_n = tl.arange(0, BLOCK_M), i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = i_m * BLOCK_M + o_m
    if WIDE:
        row, o_n = i_m.to(tl.int64) * BLOCK_M + o_m, o_n.to(tl.int64)
    image, y, x, live = place_of(row, total, high, wide, RUN)
    rows = offset_of(image, y, x, x_strides, RUN)
    planes = offset_of_channels(o_n, x_strides[3], RUN)
    if RUN > 1:
        b = tl.trans(
            tl.load(X + (planes[:, None] + rows[None, :]), mask=(o_n < channels)[:, None] & live[None, :], other=0)
        )
    else:  # of two axes without contiguity Triton takes the first for the lanes of a warp: pixels here, too
        b = tl.load(X + (rows[:, None] + planes[None, :]), mask=live[:, None] & (o_n < channels)[None, :], other=0)
    p = Out + i_m.to(tl.int64) * BLOCK_M * width + ((o_m * width)[:, None] + o_n[None, :])
    tl.store(p, b, mask=(o_m < total - i_m.to(tl.int64) * BLOCK_M)[:, None] & (o_n < width)[None, :])
