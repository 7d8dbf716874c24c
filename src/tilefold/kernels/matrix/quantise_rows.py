"""Activations in 8 bits, a factor a row, for products of 8-bit numbers: a row is read twice, the second time from L2."""

import triton
import triton.language as tl

from ...device.encode import store_encoded
from ...device.grid import let_next_kernel_start, wait_for_previous_kernel


@triton.jit(do_not_specialize=["K"])
def quantise_rows(
    X, Codes, Scales, K, stride_xm, stride_cm, CODE: tl.constexpr, LARGEST: tl.constexpr, EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """X [M, K] (stride m) -> Codes [M, K] int8 or e4m3 by CODE (stride m) and Scales [M] fp32: x is about code * scale; the
    largest number of a row in size becomes LARGEST, the scale of a row of zeros is 1.  Grid (M,)."""
    let_next_kernel_start(EARLY)
    wait_for_previous_kernel(EARLY)
    row = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    p_x = X + row * stride_xm
    most = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, K, BLOCK):
        x = tl.load(p_x + first + o_k, mask=first + o_k < K, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
    largest = tl.max(most, 0)
    if tl.sum((most != most).to(tl.int32), 0) > 0:  # a maximum of numbers leaves NaN out
        largest = float("nan")
    scale = tl.where(
        largest == 0.0, 1.0, tl.math.div_rn(largest + tl.zeros((1,), tl.float32), LARGEST + tl.zeros((1,), tl.float32))
    )
    tl.store(Scales + row + tl.arange(0, 1), scale)
    for first in range(0, K, BLOCK):
        m = first + o_k < K
        x = tl.load(p_x + first + o_k, mask=m, other=0.0).to(tl.float32)
        store_encoded(Codes, (row * stride_cm + first + o_k)[None, :], x[None, :], scale, m[None, :], CODE, False)
