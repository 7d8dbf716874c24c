"""Convolutions: where a tap of a pixel lies in the input, forwards and backwards; the last step of a result."""

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
def place_of(row, total, high, wide):
    """Row -> image, line, column of the places [., high, wide], and whether it is there."""
    line = row // wide
    return line // high, line % high, row % wide, row < total


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
