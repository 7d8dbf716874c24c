"""Convolution as a GEMM whose left matrix is never written: implicit GEMM, forwards and (TRANSPOSED) for the input's gradient.

Rows are pixels of the result, columns its channels, the reduction runs over the filter's taps and, inside, over channels.
A row's offset in the input is made once; a tap adds one scalar to all of them.  Of input with few channels (FOLD) taps and
channels are one axis.  Result, weight and input lie anywhere: strides of all four dimensions."""

import triton
import triton.language as tl

from ...device.convolution import finish_pixels, place_of, taps_of
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
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """X, Out: strides (image, line, column, channel); Weight: (reduced channel, column channel, line, column), w_group between
    groups.  total: places [images, high, wide]; reduced, columns: channels a group.  Pre: None, or for the result before its
    activation.  INSIDE: no tap leaves the input.  EVEN_K: reduced is a multiple of BLOCK_K.  X_PIXELS, OUT_PIXELS: neighbouring
    pixels are nearer than neighbouring channels.  Grid (tiles, columns fastest; groups x phases; splits of the reduction, each
    of which writes to Out + split * split_stride).  NEVER_EMPTY: every program has a step.  WIDE: offsets take 64 bits."""
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
    image, y, x, live = place_of(row, total, high, wide)
    y = y * scale_h + shift_h
    x = x * scale_w + shift_w
    rows = image * x_strides[0] + y * x_strides[1] + x * x_strides[2]
    p_x = X + i_g * reduced * x_strides[3]
    p_w = Weight + i_g * w_group + (first_h * w_strides[2] + first_w * w_strides[3])
    o_n += i_n * BLOCK_N
    m_n = o_n < columns
    cols = o_n * w_strides[1]
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
    i_w = tap % tl.maximum(count_w, 1)
    i_h = tap // tl.maximum(count_w, 1)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if NEVER_EMPTY:  # else ptxas sees the zeros of a sum of nothing in registers of a wgmma, and serialises all of them
        tl.assume(begin < end)
    for i in range(begin, end):
        if FOLD:
            k = i * BLOCK_K + o_k
            k_c, k_w, k_h = k % reduced, k // reduced % count_w, k // reduced // count_w
            m_k = k_h < count_h
            d_y, d_x = k_h * step_h, k_w * step_w
            o_x = k_c * x_strides[3] + d_y * x_strides[1] + d_x * x_strides[2]
            o_w = k_c * w_strides[0] + k_h * every_h * w_strides[2] + k_w * every_w * w_strides[3]
            if X_PIXELS:
                inside = m_k[:, None] & live[None, :]
                if not INSIDE:
                    y_k, x_k = y[None, :] + d_y[:, None], x[None, :] + d_x[:, None]
                    inside = inside & (y_k >= 0) & (y_k < in_high) & (x_k >= 0) & (x_k < in_wide)
                a = tl.trans(tl.load(p_x + (o_x[:, None] + rows[None, :]), mask=inside, other=0.0))
            else:
                inside = live[:, None] & m_k[None, :]
                if not INSIDE:
                    y_k, x_k = y[:, None] + d_y[None, :], x[:, None] + d_x[None, :]
                    inside = inside & (y_k >= 0) & (y_k < in_high) & (x_k >= 0) & (x_k < in_wide)
                a = tl.load(p_x + (rows[:, None] + o_x[None, :]), mask=inside, other=0.0)
            b = tl.load(p_w + (o_w[:, None] + cols[None, :]), mask=m_k[:, None] & m_n[None, :], other=0.0)
        else:
            d_y, d_x = i_h * step_h, i_w * step_w
            inside = live
            if not INSIDE:
                inside = live & (y + d_y >= 0) & (y + d_y < in_high) & (x + d_x >= 0) & (x + d_x < in_wide)
            p_tap = p_x + (
                tl.cast(d_y, tl.int64) * x_strides[1] + d_x * x_strides[2] + tl.cast(c, tl.int64) * x_strides[3]
            )
            if X_PIXELS:
                m_a = inside[None, :] if EVEN_K else inside[None, :] & (o_k < reduced - c)[:, None]
                a = tl.trans(tl.load(p_tap + ((o_k * x_strides[3])[:, None] + rows[None, :]), mask=m_a, other=0.0))
            else:
                m_a = inside[:, None] if EVEN_K else inside[:, None] & (o_k < reduced - c)[None, :]
                a = tl.load(p_tap + (rows[:, None] + (o_k * x_strides[3])[None, :]), mask=m_a, other=0.0)
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
    image, y, x, live = place_of(row, total, high, wide)
    if TRANSPOSED:
        y, x = y * stride_h + phase_h, x * stride_w + phase_w
        live = live & (y < out_high) & (x < out_wide)
    o_out = image * o_strides[0] + y * o_strides[1] + x * o_strides[2]
    far = i_g * columns * o_strides[3] + tl.program_id(2).to(tl.int64) * split_stride
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if WIDE:
        o_n = o_n.to(tl.int64)
    if OUT_PIXELS:
        acc = tl.trans(acc)
        p, m = (o_n * o_strides[3])[:, None] + o_out[None, :], (o_n < columns)[:, None] & live[None, :]
    else:
        p, m = o_out[:, None] + (o_n * o_strides[3])[None, :], live[:, None] & (o_n < columns)[None, :]
    if Bias is not None:
        Bias += i_g * columns
    if Pre is not None:
        Pre += far
    finish_pixels(acc, Bias, o_n, o_n < columns, Out + far, Pre, p, m, ACTIVATION, EMULATE, OUT_PIXELS)
