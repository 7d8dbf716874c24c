"""From fp32 to what a cache stores: floats as they are, e4m3 or int8 with a factor; to nearest even, saturating."""

import triton
import triton.language as tl

from .tile import narrow

# How a cache holds numbers (constexpr CODE of the kernels that write one).
PLAIN = tl.constexpr(0)  # in a float type, without a factor
E4M3 = tl.constexpr(1)  # by the conversion of the hardware
E4M3_BY_HAND = tl.constexpr(
    2
)  # where there is none (before sm_89, elsewhere, in the interpreter): the cache comes as uint8
INT8 = tl.constexpr(3)


@triton.jit
def e4m3_bits(x):
    """x fp32, at most 448 in size, or NaN -> the uint8 of e4m3, to nearest even."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Three bits of mantissa stay of 23; the exponents' biases are 127 and 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 numbers are multiples of 2^-9, which is the last place of what begins at 2^14.
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    return (tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_encoded(Out, offsets, x, factor, m, CODE: tl.constexpr, EMULATE: tl.constexpr):
    """Store x fp32 [M, N] at Out + offsets where m holds.  CODE not PLAIN: x / factor [M] (a quotient rounded once), by
    store_code."""
    if CODE == PLAIN:
        tl.store(Out + offsets, narrow(x, Out.dtype.element_ty, EMULATE), mask=m)
    else:
        store_code(Out, offsets, tl.math.div_rn(x, tl.broadcast_to(factor[:, None], x.shape)), m, CODE)


@triton.jit
def store_code(Out, offsets, x, m, CODE: tl.constexpr):
    """Store x fp32 at Out + offsets where m holds, as e4m3 (NaN stays NaN) or int8 (-128 to 127, NaN is 0)."""
    if CODE == INT8:
        near = tl.minimum(tl.maximum(x, -128.0), 127.0)
        # 1.5 * 2^23, whose last place is 1, so the sum is rounded there; and 128 more, so that its last byte is the code with the
        # sign's bit turned.  The exclusive or must stay: ptxas 12.8 and 12.9 make of a store of the low byte of a register that a
        # float instruction wrote a store of the float's value, converted and saturated: 255, which is -1, whatever the code is.
        near = tl.where(x == x, near, 0.0) + 12583040.0
        tl.store(Out + offsets, (near.to(tl.int32, bitcast=True) ^ 0x80).to(tl.int8), mask=m)
    else:
        near = tl.where(x == x, tl.minimum(tl.maximum(x, -448.0), 448.0), x)
        tl.store(Out + offsets, near.to(tl.float8e4nv) if CODE == E4M3 else e4m3_bits(near), mask=m)
