"""A weight of few bits to a matrix of floats, for products with many rows.

Memory-bound: it reads the codes and writes N K floats.
"""

import triton
import triton.language as tl

from ...device.lowbit import elements, exact_values, high_tile, slab_codes
from ...device.tile import narrow


@triton.jit(do_not_specialize=["N", "rows", "group", "groups", "blocks"])
def lowbit_dequantise(
    Packed, High, Scales, Zeros, Table, Out, N, K, rows, group, groups, blocks, stride_sg, stride_sn, stride_on,
    BITS: tl.constexpr, EMULATE: tl.constexpr, EVEN: tl.constexpr, SLABS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Packed (and High at 3 bits) int32 planes [blocks, rows, 16]; Scales, Zeros (strides g, n) or Zeros None: symmetric, unless
    there is a Table [2^BITS].  Out [N, K] (stride n), columns as stored.  WHOLE: `group` is a multiple of 32;
    EVEN: K of the block.
    A program makes BLOCK_N rows of one block, SLABS slabs of 32 columns.  Grid (blocks * cdiv(N, BLOCK_N),), blocks fastest."""
    pid = tl.program_id(0)
    i_b = (pid % blocks).to(tl.int64)
    o_n = (pid // blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_l = tl.arange(0, 32)
    o_row = tl.minimum(o_n, rows - 1).to(tl.int64)
    live = o_n < N
    low = tl.load(elements(Packed) + (i_b * rows + o_row)[:, None] * 32 + o_l[None, :])
    high = None
    if High is not None:
        high = high_tile(
            tl.load(elements(High) + ((i_b // 2) * rows + o_row)[:, None] * 32 + o_l[None, :]), i_b.to(tl.int32)
        )
    p_out = Out + o_n.to(tl.int64)[:, None] * stride_on
    for J in tl.static_range(SLABS):
        k = i_b * (SLABS * 32) + J * 32
        columns = k + o_l
        if WHOLE:
            i_g = tl.minimum(k // group, groups - 1)
            at = i_g * stride_sg + o_n[:, None].to(tl.int64) * stride_sn
            m_at = live[:, None]
        else:
            i_g = tl.minimum(columns // group, groups - 1)
            at = i_g[None, :] * stride_sg + o_n[:, None].to(tl.int64) * stride_sn
            m_at = live[:, None] & (columns < K)[None, :]
        scales = tl.load(Scales + at, mask=m_at, other=0.0).to(tl.float32)
        zeros = 1 << (BITS - 1)
        if Zeros is not None:
            zeros = tl.load(Zeros + at, mask=m_at, other=0).to(tl.float32)
        values = exact_values(slab_codes(low, high, J, BITS), zeros, scales, Table)
        inside = live[:, None]
        if not EVEN:
            inside = inside & (columns < K)[None, :]
        tl.store(p_out + columns[None, :], narrow(values, Out.dtype.element_ty, EMULATE), mask=inside)
