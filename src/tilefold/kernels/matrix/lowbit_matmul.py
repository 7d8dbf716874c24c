"""Products with weights of few bits, unpacked in registers: y [M, N] = x [M, K] W^T, W [N, K] in planes of slabs.

The operands are swapped: acc [BLOCK_N, BLOCK_M] = W tile times x tile, since the left operand of the tensor instructions may
lie in registers.  Each word of weights is loaded once.  A slab of 32 columns is one product, or
(JOIN) all that share a scale are.
"""

import triton
import triton.language as tl

from ...device.grid import let_next_kernel_start, wait_for_previous_kernel
from ...device.lowbit import elements, finish, group_terms, shifted_high, weight_slabs

RUNTIME = ["M", "groups", "blocks", "each"]  # N and K known to be multiples of 16: wide stores


@triton.jit(do_not_specialize=RUNTIME)
def lowbit_matmul(
    X, Packed, High, Scales, Zeros, Table, Lanes, Bias, Out, Part, Arrived, M, N, K, rows, groups, blocks, each, stride_xm,
    stride_sg, stride_sn, stride_om, BITS: tl.constexpr, HOW: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, ATOMIC: tl.constexpr, ASM: tl.constexpr, EMULATE: tl.constexpr, EVEN: tl.constexpr, WORDS: tl.constexpr,
    EARLY: tl.constexpr, JOIN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """X [M, K] (stride m), planes [blocks, rows, 16] int32, Scales, Zeros (strides g, n), Out [M, N] (stride m).
    GROUP: columns that share a scale, 0: a whole row does.  CHUNK: slabs that do; groups hold whole chunks, chunks divide a
    block.  EVEN: K is a multiple of the block.  WORDS: see group_terms.
    Grid (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N), SPLITS), rows of X fastest; a split makes `each` blocks.
    Part [SPLITS, M, N] fp32 (ATOMIC: [M, N], zeros), Arrived int32 zeros, one an item.  EARLY: a dependent launch."""
    DTYPE: tl.constexpr = X.dtype.element_ty
    COMPUTE: tl.constexpr = tl.float32 if EMULATE and DTYPE == tl.bfloat16 else DTYPE
    SLABS: tl.constexpr = 8 if BITS == 3 else 16 // BITS
    COLUMNS: tl.constexpr = SLABS * 32
    WIDTH: tl.constexpr = CHUNK * 32 if JOIN else 32
    AFTER: tl.constexpr = HOW == 0 and GROUP > 0
    tiles_m = tl.cdiv(M, BLOCK_M)
    item, i_k = tl.program_id(0), tl.program_id(1)
    o_n = (item // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = (item % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_s = tl.minimum(o_n, N - 1).to(tl.int64)
    m_n, m_m = o_n < N, (o_m < M)[None, :]
    o_row = tl.minimum(o_n, rows - 1)[:, None] * 32 + tl.arange(0, 32)[None, :]
    o_k = tl.arange(0, WIDTH)[:, None]
    wait_for_previous_kernel(EARLY)
    p_x = X + o_m[None, :].to(tl.int64) * stride_xm + o_k
    first = i_k * each
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    lane = tl.load(Lanes + (o_s & 3)) if WORDS else None
    if GROUP == 0:
        zeros, scales = group_terms(
            Scales, Zeros, lane, tl.cast(0, tl.int64), o_s, m_n, stride_sg, stride_sn, BITS, HOW, ASM, WORDS, DTYPE
        )
    for block in tl.range(first, tl.minimum(first + each, blocks), num_stages=STAGES):
        low = tl.load(elements(Packed) + tl.cast(block, tl.int64) * rows * 32 + o_row)
        high = None
        if BITS == 3:
            high = shifted_high(tl.load(elements(High) + tl.cast(block // 2, tl.int64) * rows * 32 + o_row), block, ASM)
        for c in tl.static_range(SLABS // CHUNK):
            column = block * COLUMNS + c * CHUNK * 32
            if GROUP > 0:
                i_g = tl.minimum(column // GROUP, groups - 1).to(tl.int64)
                zeros, scales = group_terms(
                    Scales, Zeros, lane, i_g, o_s, m_n, stride_sg, stride_sn, BITS, HOW, ASM, WORDS, DTYPE
                )
            part = acc
            if AFTER:
                part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for j in tl.static_range(CHUNK * 32 // WIDTH):
                k = column + j * 32
                if EVEN:
                    x = tl.load(p_x + k, mask=m_m, other=0.0)
                else:
                    x = tl.load(p_x + k, mask=m_m & (k + o_k < K), other=0.0)
                w = weight_slabs(low, high, zeros[:, None], scales[:, None], Table, c * CHUNK + j, WIDTH // 32, BITS, HOW, ASM,
                                 DTYPE, COMPUTE)  # fmt: skip
                part = tl.dot(w, x.to(COMPUTE), part)
            acc = acc + part * scales.to(tl.float32)[:, None] if AFTER else part
        if (
            ASM and not AFTER
        ):  # the accumulator leaves the tensor cores: their left operand's registers may be used again
            acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=False, pack=1)
    let_next_kernel_start(EARLY)  # any sooner, and the next kernel's programs lie unevenly beside those that still run
    if HOW == 0 and GROUP == 0:
        acc = acc * scales.to(tl.float32)[:, None]
    finish(acc, Out, Bias, Part, Arrived, item, i_k, o_m, o_n, M, N, stride_om, SPLITS, ATOMIC, EMULATE)
