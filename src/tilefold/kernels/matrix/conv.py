"""Convolution as a GEMM whose left matrix is never written: implicit GEMM, forwards and (TRANSPOSED) for the input's gradient.

Rows are pixels of the result, columns its channels, the reduction runs over the filter's taps and, inside, over channels.
A row's offset in the input is made once; a tap adds one scalar to all of them.  Of input with few channels (FOLD) taps and
channels are one axis.  Result, weight and input lie anywhere: strides of all four dimensions."""

import triton
import triton.language as tl

from ...device.convolution import (
    finish_pixels,
    folded,
    multiple,
    offset_of,
    offset_of_channels,
    place_of,
    tap_of,
    taps_of,
)
from ...device.product import add_product
from ...device.tile import widen

GEOMETRY = [
    "total", "high", "wide", "in_high", "in_wide", "out_high", "out_wide", "taps_h", "taps_w", "stride_h", "stride_w", "pad_h",
    "pad_w", "dilation_h", "dilation_w", "inverse_h", "inverse_w", "common_h", "common_w", "phases_w", "groups",
]  # fmt: skip


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b; of fp32 factors by PRECISION: "ieee" or "tf32"."""
    if PRECISION == "tf32":
        return tl.dot(a, b, acc, input_precision="tf32")
    else:
        return add_product(a, b, acc)


@triton.jit(do_not_specialize=GEOMETRY)
def conv_implicit(
    X, Weight, Bias, Out, Pre, total, high, wide, in_high, in_wide, out_high, out_wide, taps_h, taps_w, stride_h, stride_w, pad_h,
    pad_w, dilation_h, dilation_w, inverse_h, inverse_w, common_h, common_w, phases_w, groups, reduced, columns, x_strides,
    w_strides, o_strides, w_group, split_stride, TRANSPOSED: tl.constexpr, FOLD: tl.constexpr, INSIDE: tl.constexpr,
    EVEN_K: tl.constexpr, NEVER_EMPTY: tl.constexpr, X_PIXELS: tl.constexpr, OUT_PIXELS: tl.constexpr,
    X_RUN: tl.constexpr, W_RUN: tl.constexpr, OUT_RUN: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """X, Out: strides (image, line, column, channel); Weight: (reduced channel, column channel, line, column), w_group between
    groups.  total: places [images, high, wide]; reduced, columns: channels a group.  Pre: None, or for the result before its
    activation.  INSIDE: no tap leaves the input.  EVEN_K: reduced is a multiple of BLOCK_K.  X_RUN: elements of X that lie side
    by side from a multiple of it on, channels if FOLD, else pixels; W_RUN: channels of Weight, if FOLD; OUT_RUN: pixels of Out.
    X_PIXELS, OUT_PIXELS: those are pixels, and more than one (else lanes lie along the first axis, pixels, too: that is
    Triton's choice where neither axis is contiguous).  Grid (tiles, columns fastest; groups x phases; splits of the reduction,
    each of which writes to Out + split * split_stride). NEVER_EMPTY: every program has a step. WIDE: offsets take 64 bits."""
    tiles_n = tl.cdiv(columns, BLOCK_N)
    i_n = tl.program_id(0) % tiles_n
    i_m = tl.program_id(0) // tiles_n
    i_g = (tl.program_id(1) % groups).to(tl.int64)
    phase_h, phase_w = tl.program_id(1) // groups // phases_w, tl.program_id(1) // groups % phases_w
    count_h, first_h, every_h, scale_h, shift_h, step_h = taps_of(
        phase_h, taps_h, stride_h, pad_h, dilation_h, inverse_h, common_h, TRANSPOSED
    )
    count_w, first_w, every_w, scale_w, shift_w, step_w = taps_of(
        phase_w, taps_w, stride_w, pad_w, dilation_w, inverse_w, common_w, TRANSPOSED
    )
    o_m, o_n, o_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row = i_m * BLOCK_M + o_m
    if WIDE:  # a plane of one channel may be so large that those of a tile lie 2^31 apart
        row = i_m.to(tl.int64) * BLOCK_M + o_m
        o_n, o_k = o_n.to(tl.int64), o_k.to(tl.int64)
    PIXELS_RUN: tl.constexpr = 1 if FOLD else X_RUN
    image, y, x, live = place_of(row, total, high, wide, PIXELS_RUN)
    y = y * scale_h + shift_h
    x = x * scale_w + shift_w
    rows = multiple(offset_of(image, y, x, x_strides, PIXELS_RUN), X_RUN if FOLD else 1)
    p_x = X + multiple(i_g * reduced * x_strides[3], X_RUN)
    p_w = Weight + multiple(i_g * w_group + (first_h * w_strides[2] + first_w * w_strides[3]), W_RUN)
    o_n += i_n * BLOCK_N
    m_n = o_n < columns
    cols = multiple(o_n * w_strides[1], W_RUN)
    if FOLD:
        blocks = tl.cdiv(count_h * count_w * reduced, BLOCK_K)
    else:
        blocks = tl.cdiv(reduced, BLOCK_K)
    steps = blocks if FOLD else blocks * count_h * count_w
    share = tl.cdiv(steps, tl.num_programs(2))
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, steps)
    tap = begin // blocks if not FOLD else 0
    c = (begin % blocks) * BLOCK_K if not FOLD else 0
    i_h, i_w = tap_of(tap, count_w)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if NEVER_EMPTY:  # else ptxas sees the zeros of a sum of nothing in registers of a wgmma, and serialises all of them
        tl.assume(begin < end)
    for i in range(begin, end):
        if FOLD:
            a, b = folded(p_x, p_w, i * BLOCK_K + o_k, rows, cols, y, x, live, m_n, in_high, in_wide, reduced, count_h, count_w,
                          step_h, step_w, every_h, every_w, x_strides, w_strides, INSIDE, X_RUN, W_RUN)  # fmt: skip
        else:
            d_y, d_x = i_h * step_h, i_w * step_w
            inside = live
            if not INSIDE:
                inside = live & (y + d_y >= 0) & (y + d_y < in_high) & (x + d_x >= 0) & (x + d_x < in_wide)
            o_tap = tl.cast(d_y, tl.int64) * x_strides[1] + d_x * x_strides[2] + tl.cast(c, tl.int64) * x_strides[3]
            if X_RUN > 1:  # there is one tap, which moves nothing
                o_tap = tl.multiple_of(tl.cast(c, tl.int64) * x_strides[3], X_RUN)
            p_tap = p_x + o_tap
            o_c = offset_of_channels(o_k, x_strides[3], X_RUN)
            if X_PIXELS:
                m_a = inside[None, :] if EVEN_K else inside[None, :] & (o_k < reduced - c)[:, None]
                a = tl.trans(tl.load(p_tap + (o_c[:, None] + rows[None, :]), mask=m_a, other=0.0))
            else:
                m_a = inside[:, None] if EVEN_K else inside[:, None] & (o_k < reduced - c)[None, :]
                a = tl.load(p_tap + (rows[:, None] + o_c[None, :]), mask=m_a, other=0.0)
            p_b = p_w + (i_h * every_h * w_strides[2] + i_w * every_w * w_strides[3] + c * w_strides[0])
            m_b = m_n[None, :] if EVEN_K else m_n[None, :] & (o_k < reduced - c)[:, None]
            b = tl.load(p_b + ((o_k * w_strides[0])[:, None] + cols[None, :]), mask=m_b, other=0.0)
            c += BLOCK_K
            turned = c >= reduced
            c = tl.where(turned, 0, c)
            i_w += turned.to(tl.int32)
            ended = i_w == count_w
            i_w = tl.where(ended, 0, i_w)
            i_h += ended.to(tl.int32)
        acc = multiply(widen(a, EMULATE), widen(b, EMULATE), acc, PRECISION)
    row = tl.program_id(0) // tiles_n * BLOCK_M + o_m
    if WIDE:
        row = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + o_m
    image, y, x, live = place_of(row, total, high, wide, OUT_RUN)
    if TRANSPOSED:
        y, x = y * stride_h + phase_h, x * stride_w + phase_w
        if OUT_RUN == 1:  # else every place is a pixel
            live = live & (y < out_high) & (x < out_wide)
    o_out = offset_of(image, y, x, o_strides, OUT_RUN)
    far = multiple(i_g * columns * o_strides[3], OUT_RUN) + tl.program_id(2).to(tl.int64) * split_stride
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if WIDE:
        o_n = o_n.to(tl.int64)
    o_far = offset_of_channels(o_n, o_strides[3], OUT_RUN)
    if OUT_PIXELS:
        acc = tl.trans(acc)
        p, m = o_far[:, None] + o_out[None, :], (o_n < columns)[:, None] & live[None, :]
    else:
        p, m = o_out[:, None] + o_far[None, :], live[:, None] & (o_n < columns)[None, :]
    if Bias is not None:
        Bias += i_g * columns
    if Pre is not None:
        Pre += far
    finish_pixels(acc, Bias, o_n, o_n < columns, Out + far, Pre, p, m, ACTIVATION, EMULATE, OUT_PIXELS)
