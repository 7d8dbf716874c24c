"""Convolutions: where a tap of a pixel lies in the input, forwards and backwards; folded taps; the last step of a result.

A RUN is a number of elements that lie side by side and begin at a multiple of it: what a thread may load or store at once where
the compiler cannot see it for divisions.  Hints stand where a value is computed: on an argument they would be lost."""

import triton
import triton.language as tl

from .activation import store_activated


@triton.jit
def taps_of(phase, taps, stride, pad, dilation, inverse, common, TRANSPOSED: tl.constexpr):
    """Along one axis -> how many taps meet a place, the first of them, their step; and of the input coordinate, which is
    place * scale + shift + i * step at the i-th of them: scale, shift, step.

    Forwards a place is an output pixel, and all taps meet it.  TRANSPOSED a place stands for pixel place * stride + phase of
    the input that gets the gradient, and tap t meets it where pixel + pad - t * dilation is a multiple of the stride: where
    pixel + pad is one of common = gcd(stride, dilation), every (stride / common)-th tap.  inverse: of dilation / common modulo
    that."""
    if TRANSPOSED:
        every = stride // common
        far = phase + pad
        first = far // common * inverse % every
        count = tl.where(far % common == 0, tl.maximum((taps - first + every - 1) // every, 0), 0)
        return count, first, every, 1, (far - first * dilation) // stride, -(dilation // common)
    else:
        return taps, 0, 1, stride, -pad, dilation


@triton.jit
def place_of(row, total, high, wide, RUN: tl.constexpr = 1):
    """Row -> image, line, column of the places [., high, wide], and whether it is there, which RUN neighbours share."""
    line = row // wide
    live = row < total
    if RUN > 1:
        live = tl.max_constancy(live, RUN)
    return line // high, line % high, row % wide, live


@triton.jit
def live_of(row, total, RUN: tl.constexpr = 1):
    """Whether a row is there, as place_of says it."""
    live = row < total
    if RUN > 1:
        live = tl.max_constancy(live, RUN)
    return live


@triton.jit
def place_after(image, y, x, high, wide, ROWS: tl.constexpr):
    """The places ROWS rows on: sums with two carries in place of divisions."""
    x += ROWS % wide
    over = (x >= wide).to(tl.int32)
    x -= over * wide
    y += ROWS // wide % high + over
    over = (y >= high).to(tl.int32)
    y -= over * high
    return image + (ROWS // wide // high + over), y, x


@triton.jit
def offset_of(image, y, x, strides, RUN: tl.constexpr = 1):
    """Of pixels by strides (image, line, column, .)."""
    o = image * strides[0] + y * strides[1] + x * strides[2]
    if RUN > 1:
        o = tl.max_contiguous(tl.multiple_of(o, RUN), RUN)
    return o


@triton.jit
def offset_of_channels(o_c, stride, RUN: tl.constexpr = 1):
    """Of channels, a scalar or a vector of them, whose planes begin at multiples of RUN."""
    o = o_c * stride
    if RUN > 1:
        o = tl.multiple_of(o, RUN)
    return o


@triton.jit
def multiple(o, RUN: tl.constexpr):
    """o, a multiple of RUN, so that the compiler sees it."""
    if RUN > 1:
        o = o // RUN * RUN
    return o


@triton.jit
def tap_of(i, count_w):
    """-> line and column of tap i of lines of count_w, which may be 0: then there is no tap, but the compiler moves divisions in
    front of a loop that never runs, and concludes from them that the divisor is not 0."""
    count_w = tl.maximum(count_w, 1)
    return i // count_w, i % count_w


@triton.jit
def folded(
    p_x, p_w, k, rows, cols, y, x, live, m_n, in_high, in_wide, reduced, count_h, count_w, step_h, step_w, every_h, every_w,
    x_strides, w_strides, INSIDE: tl.constexpr, RUN: tl.constexpr, W_RUN: tl.constexpr,
):  # fmt: skip
    """-> the tiles [rows, k] of the input and [k, cols] of the weight, where taps and channels are one axis k.  RUN,
    W_RUN: channels that lie side by side in them."""
    k_h, k_w = tap_of(k // reduced, count_w)
    k_c = k % reduced
    m_k = k_h < count_h
    d_y, d_x = k_h * step_h, k_w * step_w
    o_x = k_c * x_strides[3] + d_y * x_strides[1] + d_x * x_strides[2]
    o_w = k_c * w_strides[0] + k_h * every_h * w_strides[2] + k_w * every_w * w_strides[3]
    m_b = m_k[:, None] & m_n[None, :]
    if RUN > 1:
        o_x = tl.max_contiguous(tl.multiple_of(o_x, RUN), RUN)
    if W_RUN > 1:
        o_w = tl.max_contiguous(tl.multiple_of(o_w, W_RUN), W_RUN)
        m_b = tl.max_constancy(m_b, [W_RUN, 1])
    inside = live[:, None] & m_k[None, :]
    if not INSIDE:
        y_k, x_k = y[:, None] + d_y[None, :], x[:, None] + d_x[None, :]
        inside = inside & (y_k >= 0) & (y_k < in_high) & (x_k >= 0) & (x_k < in_wide)
    if RUN > 1:
        inside = tl.max_constancy(inside, [1, RUN])
    a = tl.load(p_x + (rows[:, None] + o_x[None, :]), mask=inside, other=0.0)
    return a, tl.load(p_w + (o_w[:, None] + cols[None, :]), mask=m_b, other=0.0)


@triton.jit
def finish_pixels(
    acc, Bias, o_n, m_n, Out, Pre, p, m, ACTIVATION: tl.constexpr, EMULATE: tl.constexpr, TURNED: tl.constexpr = False
):
    """Bias, activation and stores of a tile acc [., columns], TURNED [columns, .]: p its places in Out and in Pre (or None), the
    result before the activation."""
    if Bias is not None:
        bias = tl.load(Bias + o_n, mask=m_n, other=0.0).to(tl.float32)
        acc += bias[:, None] if TURNED else bias[None, :]
    store_activated(acc, Out, Pre, p, m, ACTIVATION, EMULATE)
