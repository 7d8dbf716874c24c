"""Convolutions without tensor cores: depthwise and other narrow groups, forwards and backwards; sums over splits; im2col."""

import triton
import triton.language as tl

from ...device.convolution import finish_pixels, offset_of, offset_of_channels, place_of, tap_of, taps_of
from ...device.tile import widen

GEOMETRY = [
    "total", "high", "wide", "in_high", "in_wide", "out_high", "out_wide", "taps_h", "taps_w", "stride_h", "stride_w", "pad_h",
    "pad_w", "dilation_h", "dilation_w", "inverse_h", "inverse_w", "common_h", "common_w", "phases_w", "groups",
]  # fmt: skip


@triton.jit(do_not_specialize=GEOMETRY)
def conv_direct(
    X, Weight, Bias, Out, Pre, total, high, wide, in_high, in_wide, out_high, out_wide, taps_h, taps_w, stride_h, stride_w, pad_h,
    pad_w, dilation_h, dilation_w, inverse_h, inverse_w, common_h, common_w, phases_w, groups, reduced, columns, x_strides,
    w_strides, o_strides, w_group, TRANSPOSED: tl.constexpr, ACTIVATION: tl.constexpr, EMULATE: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As conv_implicit, but a tile's columns are channels of all groups: each adds up its own group's channels one by one.
    Grid (tiles, columns fastest; phases)."""
    channels = groups * columns
    tiles_n = tl.cdiv(channels, BLOCK_N)
    i_m = tl.program_id(0) // tiles_n
    phase_h, phase_w = tl.program_id(1) // phases_w, tl.program_id(1) % phases_w
    count_h, first_h, every_h, scale_h, shift_h, step_h = taps_of(
        phase_h, taps_h, stride_h, pad_h, dilation_h, inverse_h, common_h, TRANSPOSED
    )
    count_w, first_w, every_w, scale_w, shift_w, step_w = taps_of(
        phase_w, taps_w, stride_w, pad_w, dilation_w, inverse_w, common_w, TRANSPOSED
    )
    o_n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < channels
    row = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if WIDE:
        row = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    image, a, b, live = place_of(row, total, high, wide)
    y, x = a * scale_h + shift_h, b * scale_w + shift_w
    o_x = o_n // columns * reduced
    if WIDE:
        o_x = o_x.to(tl.int64)
    p_x = X + ((image * x_strides[0] + y * x_strides[1] + x * x_strides[2])[:, None] + (o_x * x_strides[3])[None, :])
    o_w = o_n // columns * w_group + o_n % columns * w_strides[1]
    p_w = Weight + (o_w + first_h * w_strides[2] + first_w * w_strides[3])
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in range(count_h * count_w):
        i_h, i_w = tap_of(i, count_w)
        d_y, d_x = i_h * step_h, i_w * step_w
        inside = live & (y + d_y >= 0) & (y + d_y < in_high) & (x + d_x >= 0) & (x + d_x < in_wide)
        at_x = tl.cast(d_y, tl.int64) * x_strides[1] + d_x * x_strides[2]
        at_w = i_h * every_h * w_strides[2] + i_w * every_w * w_strides[3]
        for c in range(reduced):
            seen = tl.load(
                p_x + (at_x + tl.cast(c, tl.int64) * x_strides[3]), mask=inside[:, None] & m_n[None, :], other=0.0
            )
            w = tl.load(p_w + (at_w + c * w_strides[0]), mask=m_n, other=0.0)
            acc += widen(seen, EMULATE).to(tl.float32) * widen(w, EMULATE).to(tl.float32)[None, :]
    if TRANSPOSED:
        a, b = a * stride_h + phase_h, b * stride_w + phase_w
        live = live & (a < out_high) & (b < out_wide)
    p = (image * o_strides[0] + a * o_strides[1] + b * o_strides[2])[:, None]
    o_c = o_n.to(tl.int64) if WIDE else o_n
    finish_pixels(
        acc,
        Bias,
        o_n,
        m_n,
        Out,
        Pre,
        p + (o_c * o_strides[3])[None, :],
        live[:, None] & m_n[None, :],
        ACTIVATION,
        EMULATE,
    )


@triton.jit(do_not_specialize=["total", "high", "wide", "splits"])
def conv_combine(
    Parts, Bias, Out, Pre, total, high, wide, channels, splits, split_stride, o_strides, RUN: tl.constexpr,
    ACTIVATION: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum over splits, in their order: Parts [splits, images, high, wide, channels] fp32 -> Out, with the last step of a result.
    SPLITS: how many are read at once.  RUN: pixels of Out that lie side by side.  Grid (tiles,
    channels fastest)."""
    tiles_n = tl.cdiv(channels, BLOCK_N)
    o_n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    if WIDE:
        row = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    image, y, x, live = place_of(row, total, high, wide, RUN)
    m = live[:, None] & (o_n < channels)[None, :]
    o = row[:, None] * channels + o_n[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, splits, SPLITS):
        i = first + tl.arange(0, SPLITS)
        p = Parts + (i.to(tl.int64) * split_stride)[:, None, None] + o[None, :, :]
        acc += tl.sum(tl.load(p, mask=(i < splits)[:, None, None] & m[None, :, :], other=0.0), 0)
    pixels = offset_of(image, y, x, o_strides, RUN)
    o_c = offset_of_channels(o_n.to(tl.int64) if WIDE else o_n, o_strides[3], RUN)
    if RUN > 1:
        acc = tl.trans(acc)
        p, m = o_c[:, None] + pixels[None, :], (o_n < channels)[:, None] & live[None, :]
    else:
        p = pixels[:, None] + o_c[None, :]
    finish_pixels(acc, Bias, o_n, o_n < channels, Out, Pre, p, m, ACTIVATION, EMULATE, RUN > 1)


@triton.jit(do_not_specialize=["total", "high", "wide", "in_high", "in_wide", "taps_h", "taps_w", "stride_h", "stride_w",
                               "pad_h", "pad_w", "dilation_h", "dilation_w", "groups"])  # fmt: skip
def im2col(
    X, Columns, total, high, wide, in_high, in_wide, taps_h, taps_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    groups, reduced, x_strides, width, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns [pixels of the result, width], contiguous: a row has, group by group, all taps x channels of its pixel; what lies
    outside the input, and what lies beyond the last of them, is 0.  Grid (cdiv(total, BLOCK_M), cdiv(width, BLOCK_K))."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    image, y, x, live = place_of(row, total, high, wide)
    y, x = y * stride_h - pad_h, x * stride_w - pad_w
    tap = k // reduced
    i_w, i_h, i_g = tap % taps_w, tap // taps_w % taps_h, tap // (taps_w * taps_h)
    d_y, d_x = i_h * dilation_h, i_w * dilation_w
    o_k = (
        d_y.to(tl.int64) * x_strides[1] + d_x * x_strides[2] + (i_g.to(tl.int64) * reduced + k % reduced) * x_strides[3]
    )
    rows = image * x_strides[0] + y * x_strides[1] + x * x_strides[2]
    m_k = i_g < groups
    y_k, x_k = y[:, None] + d_y[None, :], x[:, None] + d_x[None, :]
    inside = (y_k >= 0) & (y_k < in_high) & (x_k >= 0) & (x_k < in_wide) & live[:, None] & m_k[None, :]
    b = tl.load(X + (rows[:, None] + o_k[None, :]), mask=inside, other=0.0)
    tl.store(Columns + row[:, None] * width + k[None, :], b, mask=live[:, None] & (k < width)[None, :])
