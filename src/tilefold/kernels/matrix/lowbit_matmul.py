"""Products with weights of few bits, unpacked in registers: y [M, N] = x [M, K] W^T, W [N, K] in planes of slabs.

The operands are swapped: acc [BLOCK_N, BLOCK_M] = W tile times x tile, since the left operand of the tensor instructions may
lie in registers.  Each word of weights is loaded once; a slab of 32 columns of it is one product.
"""

import triton
import triton.language as tl

from ...device.lowbit import elements, shifted_high, weight_slab, zero_term
from ...device.partials import arrive
from ...device.tile import narrow

RUNTIME = ["M", "N", "K", "rows", "group", "groups", "blocks", "each"]


@triton.jit
def group_of(Scales, Zeros, column, o_n, m_n, group, groups, stride_sg, stride_sn, BITS: tl.constexpr, HOW: tl.constexpr,
             ASM: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """-> zeros as weight_slab takes them, and scales, both [BLOCK_N, 1], of the group that `column` lies in."""
    i_g = tl.minimum(column // group, groups - 1).to(tl.int64)
    at = i_g * stride_sg + o_n * stride_sn
    scales = tl.load(Scales + at, mask=m_n, other=0.0)
    if Zeros is None:
        zeros = tl.full(scales.shape, 1 << (BITS - 1), tl.float32)
    else:
        zeros = tl.load(Zeros + at, mask=m_n, other=0).to(tl.float32)
    return zero_term(zeros, BITS, HOW, ASM, DTYPE)[:, None], scales[:, None]


@triton.jit
def finish(acc, Out, Bias, Part, Arrived, item, i_k, splits, o_m, o_n, M, N, stride_om, SPLIT: tl.constexpr,
           ATOMIC: tl.constexpr, EMULATE: tl.constexpr):  # fmt: skip
    """Store acc [BLOCK_N, BLOCK_M]; or, with SPLIT, all splits' sum, made by the last to arrive, in order unless ATOMIC."""
    inside = (o_m[None, :] < M) & (o_n[:, None] < N)
    last = True
    if SPLIT:
        place = o_m[None, :].to(tl.int64) * N + o_n[:, None]
        size = M.to(tl.int64) * N
        if ATOMIC:
            tl.atomic_add(Part + place, acc, mask=inside, sem="relaxed")
        else:
            tl.store(Part + i_k * size + place, acc, mask=inside)
        last = arrive(Arrived, item, splits)
        if last:
            acc = tl.zeros(acc.shape, tl.float32)
            if ATOMIC:
                acc = tl.load(Part + place, mask=inside, other=0.0, cache_modifier=".cg")
            else:
                for s in range(splits):
                    acc += tl.load(Part + s * size + place, mask=inside, other=0.0, cache_modifier=".cg")
    if last:
        if Bias is not None:
            acc += tl.load(Bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[:, None]
        p_out = Out + o_m[None, :].to(tl.int64) * stride_om + o_n[:, None]
        tl.store(p_out, narrow(acc, Out.dtype.element_ty, EMULATE), mask=inside)


@triton.jit(do_not_specialize=RUNTIME)
def lowbit_matmul(
    X, Packed, High, Scales, Zeros, Table, Bias, Out, Part, Arrived, M, N, K, rows, group, groups, blocks, each, stride_xm,
    stride_sg, stride_sn, stride_om, BITS: tl.constexpr, HOW: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr,
    ATOMIC: tl.constexpr, ASM: tl.constexpr, EMULATE: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """X [M, K] (stride m), planes [blocks, rows, 16] int32, Scales, Zeros (strides g, n), Out [M, N] (stride m).
    CHUNK: slabs that share a scale; groups hold whole chunks, chunks divide a block.  EVEN: K is a multiple of the block.
    Grid (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N), splits), rows of X fastest; a split makes `each` blocks.
    Part [splits, M, N] fp32 (ATOMIC: [M, N], zeros), Arrived int32 zeros, one an item."""
    DTYPE: tl.constexpr = X.dtype.element_ty
    COMPUTE: tl.constexpr = tl.float32 if EMULATE and DTYPE == tl.bfloat16 else DTYPE
    SLABS: tl.constexpr = 8 if BITS == 3 else 16 // BITS
    COLUMNS: tl.constexpr = SLABS * 32
    tiles_m = tl.cdiv(M, BLOCK_M)
    item, i_k = tl.program_id(0), tl.program_id(1)
    o_n = ((item // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    o_m = (item % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_l = tl.arange(0, 32)
    m_n, m_m = o_n < N, (o_m < M)[None, :]
    o_row = tl.minimum(o_n, rows - 1)[:, None] * 32 + o_l[None, :]
    p_x = X + o_m[None, :].to(tl.int64) * stride_xm + o_l[:, None]
    first = i_k * each
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in tl.range(first, tl.minimum(first + each, blocks), num_stages=STAGES):
        low = tl.load(elements(Packed) + tl.cast(block, tl.int64) * rows * 32 + o_row)
        high = None
        if BITS == 3:
            high = shifted_high(tl.load(elements(High) + tl.cast(block // 2, tl.int64) * rows * 32 + o_row), block, ASM)
        for c in tl.static_range(SLABS // CHUNK):
            column = block * COLUMNS + c * CHUNK * 32
            zeros, scales = group_of(
                Scales, Zeros, column, o_n, m_n, group, groups, stride_sg, stride_sn, BITS, HOW, ASM, DTYPE
            )
            part = acc
            if HOW == 0:
                part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for j in tl.static_range(CHUNK):
                k = column + j * 32
                if EVEN:
                    x = tl.load(p_x + k, mask=m_m, other=0.0)
                else:
                    x = tl.load(p_x + k, mask=m_m & (k + o_l[:, None] < K), other=0.0)
                w = weight_slab(low, high, zeros, scales, Table, c * CHUNK + j, BITS, HOW, ASM, DTYPE, COMPUTE)
                part = tl.dot(w, x.to(COMPUTE), part)
            acc = acc + part * scales.to(tl.float32) if HOW == 0 else part
        if ASM:  # the accumulator leaves the tensor cores: their left operand's registers may be used again
            acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=False, pack=1)
    finish(
        acc, Out, Bias, Part, Arrived, item, i_k, tl.num_programs(1), o_m, o_n, M, N, stride_om, SPLIT, ATOMIC, EMULATE
    )
