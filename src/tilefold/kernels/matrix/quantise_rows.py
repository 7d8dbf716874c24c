"""Activations in 8 bits, a factor a row, for products of 8-bit numbers.

A row that a program can hold is read once; a longer one twice, the second time from L2.  Bound: DRAM, 3 bytes a number."""

import triton
import triton.language as tl

from ...device.encode import store_code
from ...device.grid import let_next_kernel_start, wait_for_previous_kernel

SMALLEST = tl.constexpr(2.0**-120)  # scale: its inverse is a number


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """[1] fp32: what makes the largest number of a row LARGEST, 1 of a row of zeros, at least SMALLEST; and its inverse."""
    one = tl.full((1,), 1.0, tl.float32)
    scale = tl.maximum(tl.math.div_rn(largest * one, LARGEST * one), SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.where(largest == 0.0, one, scale)
    return scale, tl.math.div_rn(one, scale)


@triton.jit
def largest_of(most):
    """The largest of most [BLOCK], NaN where one is."""
    largest = tl.max(most, 0)
    if tl.sum((most != most).to(tl.int32), 0) > 0:  # a maximum of numbers leaves NaN out
        largest = float("nan")
    return largest


@triton.jit
def quantise_rows(
    X, Codes, Scales, K, stride_xm, stride_cm, CODE: tl.constexpr, LARGEST: tl.constexpr, EARLY: tl.constexpr,
    ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """X [M, K] (stride m) -> Codes [M, K] int8 or e4m3 by CODE (stride m) and Scales [M] fp32: x is about code * scale; the
    largest number of a row in size becomes LARGEST, the scale of a row of zeros is 1.  A code is x times the rounded inverse of
    the scale: an exact division a number took 34 instructions, and all of them three times as long as memory.
    ONCE: K is at most BLOCK.  Grid (M,).

    EARLY: the next kernel may start when all that came before this one is through, so what else it reads it need not wait for.
    K is specialised on, or loads and stores would be of one number each."""
    wait_for_previous_kernel(EARLY)
    let_next_kernel_start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    p_x = X + row * stride_xm
    if ONCE:
        m_k = o_k < K
        x = tl.load(p_x + o_k, mask=m_k, other=0.0).to(tl.float32)
        scale, inverse = scale_of(largest_of(tl.abs(x)), LARGEST)
        tl.store(Scales + row + tl.arange(0, 1), scale)
        store_code(Codes, row * stride_cm + o_k, x * inverse, m_k, CODE)
    else:
        most = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, K, BLOCK):
            x = tl.load(p_x + first + o_k, mask=first + o_k < K, other=0.0).to(tl.float32)
            most = tl.maximum(most, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
        scale, inverse = scale_of(largest_of(most), LARGEST)
        tl.store(Scales + row + tl.arange(0, 1), scale)
        for first in range(0, K, BLOCK):
            m_k = first + o_k < K
            x = tl.load(p_x + first + o_k, mask=m_k, other=0.0).to(tl.float32)
            store_code(Codes, row * stride_cm + first + o_k, x * inverse, m_k, CODE)
