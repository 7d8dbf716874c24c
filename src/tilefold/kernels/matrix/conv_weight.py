"""The gradient of a convolution's weight: a GEMM whose reduction runs over the pixels of the result, shared by splits."""

import triton
import triton.language as tl

from ...device.convolution import live_of, multiple, offset_of, offset_of_channels, place_after, place_of
from ...device.product import add_product
from ...device.tile import narrow, widen

GEOMETRY = [
    "total", "high", "wide", "in_high", "in_wide", "taps_h", "taps_w", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h",
    "dilation_w",
]  # fmt: skip


@triton.jit
def pixels_of_split(total, BLOCK_K: tl.constexpr):
    """-> first and last block of this program's pixels: a share of whole blocks."""
    blocks = tl.cdiv(total, BLOCK_K)
    share = tl.cdiv(blocks, tl.num_programs(2))
    begin = tl.program_id(2) * share
    return begin, tl.minimum(begin + share, blocks)


@triton.jit
def load_rows_of(P, rows, cols, m_r, m_c, PIXELS: tl.constexpr):
    """-> [pixels, channels], or its transpose if PIXELS lie closer together than channels: in the order of memory."""
    if PIXELS:
        return tl.load(P + (cols[:, None] + rows[None, :]), mask=m_c[:, None] & m_r[None, :], other=0.0)
    else:
        return tl.load(P + (rows[:, None] + cols[None, :]), mask=m_r[:, None] & m_c[None, :], other=0.0)


@triton.jit(do_not_specialize=GEOMETRY)
def conv_weight(
    X, DY, DW, total, high, wide, in_high, in_wide, taps_h, taps_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    reduced, columns, x_strides, y_strides, w_strides, split_stride, FOLD: tl.constexpr, INSIDE: tl.constexpr,
    X_PIXELS: tl.constexpr, Y_PIXELS: tl.constexpr, X_RUN: tl.constexpr, Y_RUN: tl.constexpr, X_FLAT: tl.constexpr,
    Y_FLAT: tl.constexpr, PRECISION: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """X [images, in_high, in_wide, groups x reduced], DY [images, high, wide, groups x columns] by strides (image, line, column,
    channel); DW: strides (output channel, line, column, channel of the group), split_stride between the splits' results.
    X_RUN, Y_RUN: pixels that lie side by side, of X if there is one tap, which shifts none, or (FOLD) channels.  X_FLAT, Y_FLAT:
    all pixels are equally far apart, of X one for each of DY.  Rows are output channels, columns the group's channels of one
    tap, or (FOLD) of all taps.  The grid's second axis is groups, with taps inside unless FOLD."""
    n_cols = reduced * taps_h * taps_w if FOLD else reduced
    tiles_n = tl.cdiv(n_cols, BLOCK_N)
    o_m = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if FOLD:
        i_g = tl.program_id(1)
        tap = o_n // reduced
        c = o_n % reduced
    else:
        taps = taps_h * taps_w
        i_g = tl.program_id(1) // taps
        tap = tl.program_id(1) % taps
        c = o_n
    i_h, i_w = tap // taps_w, tap % taps_w
    d_y, d_x = i_h * dilation_h - pad_h, i_w * dilation_w - pad_w
    m_m, m_n = o_m < columns, o_n < n_cols
    p_y = DY + multiple(tl.cast(i_g, tl.int64) * columns * y_strides[3], Y_RUN)
    p_x = X + multiple(tl.cast(i_g, tl.int64) * reduced * x_strides[3], X_RUN)
    o_y = offset_of_channels(o_m.to(tl.int64) if WIDE else o_m, y_strides[3], Y_RUN)
    o_x = offset_of_channels(c.to(tl.int64) if WIDE else c, x_strides[3], 1 if FOLD else X_RUN)
    if FOLD:
        o_x += d_y * x_strides[1] + d_x * x_strides[2]
        if X_RUN > 1:
            o_x = tl.max_contiguous(tl.multiple_of(o_x, X_RUN), X_RUN)
    elif X_RUN == 1:
        o_x += d_y * x_strides[1] + d_x * x_strides[2]
    begin, end = pixels_of_split(total, BLOCK_K)
    tl.assume(begin < end)  # as in conv_implicit
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    o_k = tl.arange(0, BLOCK_K).to(tl.int64) if WIDE else tl.arange(0, BLOCK_K)
    image, line, column, _ = place_of((tl.cast(begin, tl.int64) if WIDE else begin) * BLOCK_K + o_k, total, high, wide)
    for i in range(begin, end):
        pixel = (tl.cast(i, tl.int64) if WIDE else i) * BLOCK_K + o_k
        live = live_of(pixel, total, Y_RUN if FOLD else max(X_RUN, Y_RUN))
        if Y_FLAT:
            o_pixel = pixel * y_strides[2]
        else:
            o_pixel = offset_of(image, line, column, y_strides, Y_RUN)
        dy = load_rows_of(p_y, o_pixel, o_y, live, m_m, Y_PIXELS)
        image_of, y, x = image, line * stride_h, column * stride_w
        image, line, column = place_after(image, line, column, high, wide, BLOCK_K)
        if X_FLAT:
            rows = pixel * x_strides[2]
        else:
            rows = multiple(offset_of(image_of, y, x, x_strides, 1 if FOLD else X_RUN), X_RUN if FOLD else 1)
        if FOLD and not INSIDE:
            y_k, x_k = y[:, None] + d_y[None, :], x[:, None] + d_x[None, :]
            inside = (y_k >= 0) & (y_k < in_high) & (x_k >= 0) & (x_k < in_wide) & live[:, None] & m_n[None, :]
            if X_RUN > 1:
                inside = tl.max_constancy(inside, [1, X_RUN])
            seen = tl.load(p_x + (rows[:, None] + o_x[None, :]), mask=inside, other=0.0)
        else:
            if not INSIDE:
                live = live & (y + d_y >= 0) & (y + d_y < in_high) & (x + d_x >= 0) & (x + d_x < in_wide)
            seen = load_rows_of(p_x, rows, o_x, live, m_n, X_PIXELS)
        dy, seen = widen(dy, EMULATE), widen(seen, EMULATE)
        a = dy if Y_PIXELS else tl.trans(dy)
        b = tl.trans(seen) if X_PIXELS and (INSIDE or not FOLD) else seen
        if PRECISION == "tf32":
            acc = tl.dot(a, b, acc, input_precision="tf32")
        else:
            acc = add_product(a, b, acc)
    o_row = (tl.cast(i_g, tl.int64) * columns + o_m) * w_strides[0]
    o_col = i_h * w_strides[1] + i_w * w_strides[2] + c * w_strides[3]
    p = DW + tl.program_id(2).to(tl.int64) * split_stride + o_row[:, None] + o_col[None, :]
    tl.store(p, narrow(acc, DW.dtype.element_ty, EMULATE), mask=m_m[:, None] & m_n[None, :])


@triton.jit(do_not_specialize=GEOMETRY)
def conv_weight_direct(
    X, DY, DW, total, high, wide, in_high, in_wide, taps_h, taps_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    reduced, columns, channels, x_strides, y_strides, w_strides, split_stride, EMULATE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As conv_weight, without tensor cores: a program has BLOCK_N output channels of all groups, one tap and one channel of each
    group, and adds up pixels.  Grid (channel blocks, taps x reduced, splits)."""
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < channels
    i_c = tl.program_id(1) % reduced
    i_h, i_w = tl.program_id(1) // reduced // taps_w, tl.program_id(1) // reduced % taps_w
    d_y, d_x = i_h * dilation_h - pad_h, i_w * dilation_w - pad_w
    o_x, o_y = o_n // columns * reduced + i_c, o_n
    if WIDE:
        o_x, o_y = o_x.to(tl.int64), o_y.to(tl.int64)
    o_x = o_x * x_strides[3] + d_y * x_strides[1] + d_x * x_strides[2]
    o_y = o_y * y_strides[3]
    begin, end = pixels_of_split(total, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in range(begin, end):
        pixel = i * BLOCK_M + tl.arange(0, BLOCK_M)
        if WIDE:
            pixel = tl.cast(i, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        image, y, x, live = place_of(pixel, total, high, wide)
        o_dy = image * y_strides[0] + y * y_strides[1] + x * y_strides[2]
        dy = tl.load(DY + (o_dy[:, None] + o_y[None, :]), mask=live[:, None] & m_n[None, :], other=0.0)
        y, x = y * stride_h, x * stride_w
        live = live & (y + d_y >= 0) & (y + d_y < in_high) & (x + d_x >= 0) & (x + d_x < in_wide)
        o_seen = image * x_strides[0] + y * x_strides[1] + x * x_strides[2]
        seen = tl.load(X + (o_seen[:, None] + o_x[None, :]), mask=live[:, None] & m_n[None, :], other=0.0)
        acc += widen(dy, EMULATE).to(tl.float32) * widen(seen, EMULATE).to(tl.float32)
    o_w = o_n.to(tl.int64) * w_strides[0] + i_h * w_strides[1] + i_w * w_strides[2] + i_c * w_strides[3]
    p = DW + tl.program_id(2).to(tl.int64) * split_stride + o_w
    tl.store(p, narrow(tl.sum(acc, 0), DW.dtype.element_ty, EMULATE), mask=m_n)
