"""Products with weights of few bits, unpacked in registers: y [M, N] = x [M, K] W^T, W [N, K] in planes of slabs.

The operands are swapped: acc [BLOCK_N, BLOCK_M] = W tile times x tile, since the left operand of the tensor instructions may
lie in registers.  Each word of weights is loaded once.  A slab of 32 columns is one product, or
(JOIN) all that share a scale are.
"""

import triton
import triton.language as tl

from ...device.grid import let_next_kernel_start, wait_for_previous_kernel
from ...device.lowbit import elements, group_terms, shifted_high, weight_slabs
from ...device.partials import arrive
from ...device.tile import narrow

RUNTIME = ["M", "N", "K", "rows", "groups", "blocks", "each"]
FEW = tl.constexpr(8192)  # elements of a tile whose parts are added by code without a loop: all loads at once


@triton.jit
def finish(acc, Out, Bias, Part, Arrived, item, i_k, o_m, o_n, M, N, stride_om, SPLITS: tl.constexpr, ATOMIC: tl.constexpr,
           EMULATE: tl.constexpr):  # fmt: skip
    """Store acc [BLOCK_N, BLOCK_M]; or all SPLITS' sum, made by the last to arrive, in order unless ATOMIC."""
    inside = (o_m[None, :] < M) & (o_n[:, None] < N)
    last = True
    if SPLITS > 1:
        place = o_m[None, :].to(tl.int64) * N + o_n[:, None]
        size = M.to(tl.int64) * N
        if ATOMIC:
            tl.atomic_add(Part + place, acc, mask=inside, sem="relaxed")
        else:
            tl.store(Part + i_k * size + place, acc, mask=inside)
        last = arrive(Arrived, item, SPLITS)
        if last:
            acc = tl.zeros(acc.shape, tl.float32)
            if ATOMIC:
                acc = tl.load(Part + place, mask=inside, other=0.0, cache_modifier=".cg")
            elif acc.shape[0] * acc.shape[1] < FEW:
                for s in tl.static_range(SPLITS):
                    acc += tl.load(Part + s * size + place, mask=inside, other=0.0, cache_modifier=".cg")
            else:
                for s in range(tl.num_programs(1)):
                    acc += tl.load(Part + s * size + place, mask=inside, other=0.0, cache_modifier=".cg")
    if last:
        if Bias is not None:
            acc += tl.load(Bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[:, None]
        p_out = Out + o_m[None, :].to(tl.int64) * stride_om + o_n[:, None]
        tl.store(p_out, narrow(acc, Out.dtype.element_ty, EMULATE), mask=inside)


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
    let_next_kernel_start(EARLY)
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
    if HOW == 0 and GROUP == 0:
        acc = acc * scales.to(tl.float32)[:, None]
    finish(acc, Out, Bias, Part, Arrived, item, i_k, o_m, o_n, M, N, stride_om, SPLITS, ATOMIC, EMULATE)
