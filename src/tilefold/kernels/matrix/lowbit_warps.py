"""Products of few rows with weights of few bits, unpacked in registers, each warp with a part of K of its own.

A batched product [W, BLOCK_N, 32] x [W, 32, BLOCK_M]: with as many batches as warps each warp gets one, so that warp w walks
blocks w, w + W, .. of K with tensor instructions of its own; the warps' sums are added once at the end, in order.
"""

import triton
import triton.language as tl

from ...device.grid import let_next_kernel_start, wait_for_previous_kernel
from ...device.lowbit import elements, finish, group_terms, shifted_high, weight_slab

RUNTIME = ["M", "N", "K", "rows", "groups", "blocks", "each"]


@triton.jit(do_not_specialize=RUNTIME)
def lowbit_warps(
    X, Packed, High, Scales, Zeros, Table, Lanes, Bias, Out, Part, Arrived, M, N, K, rows, groups, blocks, each, stride_xm,
    stride_sg, stride_sn, stride_om, BITS: tl.constexpr, HOW: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, ATOMIC: tl.constexpr, ASM: tl.constexpr, EMULATE: tl.constexpr, EVEN: tl.constexpr, WORDS: tl.constexpr,
    EARLY: tl.constexpr, FULL: tl.constexpr, WARPS: tl.constexpr, UNROLL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Arguments as lowbit_matmul has them.  WARPS: num_warps.  UNROLL: blocks that a warp takes at a step.
    FULL: every warp of every split has the same number of blocks, a multiple of UNROLL."""
    DTYPE: tl.constexpr = X.dtype.element_ty
    COMPUTE: tl.constexpr = tl.float32 if EMULATE and DTYPE == tl.bfloat16 else DTYPE
    SLABS: tl.constexpr = 8 if BITS == 3 else 16 // BITS
    COLUMNS: tl.constexpr = SLABS * 32
    AFTER: tl.constexpr = HOW == 0 and GROUP > 0
    tiles_m = tl.cdiv(M, BLOCK_M)
    item, i_k = tl.program_id(0), tl.program_id(1)
    o_n = (item // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = (item % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_s = tl.minimum(o_n, N - 1).to(tl.int64)[None, :]
    m_n, m_m = (o_n < N)[None, :], (o_m < M)[None, None, :]
    o_l = tl.arange(0, 32)
    i_w = tl.arange(0, WARPS)
    # [W, BLOCK_N, 32]
    o_row = tl.minimum(o_n, rows - 1)[None, :, None] * 32 + o_l[None, None, :]
    let_next_kernel_start(EARLY)
    wait_for_previous_kernel(EARLY)
    # [1, 32, BLOCK_M]
    p_x = X + o_m[None, None, :].to(tl.int64) * stride_xm + o_l[None, :, None]
    first = i_k * each
    end = tl.minimum(first + each, blocks)
    acc = tl.zeros((WARPS, BLOCK_N, BLOCK_M), tl.float32)
    lane = tl.load(Lanes + (o_s & 3)) if WORDS else None
    if GROUP == 0:
        zeros, scales = group_terms(Scales, Zeros, lane, tl.zeros((WARPS, 1), tl.int64), o_s, m_n, stride_sg, stride_sn, BITS,
                                    HOW, ASM, WORDS, DTYPE)  # fmt: skip
    for begin in tl.range(first, end, WARPS * UNROLL, num_stages=STAGES):
        for u in tl.static_range(UNROLL):
            block = (begin + i_w * UNROLL + u)[:, None, None]
            live = block < end
            p_low = elements(Packed) + block.to(tl.int64) * rows * 32 + o_row
            low = tl.load(p_low) if FULL else tl.load(p_low, mask=live, other=0)
            high = None
            if BITS == 3:
                p_high = elements(High) + (block // 2).to(tl.int64) * rows * 32 + o_row
                high = shifted_high(tl.load(p_high) if FULL else tl.load(p_high, mask=live, other=0), block, ASM)
            for c in tl.static_range(SLABS // CHUNK):
                column = block * COLUMNS + c * CHUNK * 32
                if GROUP > 0:
                    i_g = tl.minimum(tl.reshape(column, (WARPS, 1)) // GROUP, groups - 1).to(tl.int64)
                    zeros, scales = group_terms(
                        Scales, Zeros, lane, i_g, o_s, m_n, stride_sg, stride_sn, BITS, HOW, ASM, WORDS, DTYPE
                    )
                part = acc
                if AFTER:
                    part = tl.zeros((WARPS, BLOCK_N, BLOCK_M), tl.float32)
                for j in tl.static_range(CHUNK):
                    k = column + j * 32
                    inside = m_m
                    if not FULL:
                        inside = inside & live
                    if not EVEN:
                        inside = inside & (k + o_l[None, :, None] < K)
                    x = tl.load(p_x + k, mask=inside, other=0.0)
                    w = weight_slab(low, high, zeros[:, :, None], scales[:, :, None], Table, c * CHUNK + j, BITS, HOW, ASM, DTYPE,
                                    COMPUTE)  # fmt: skip
                    part = tl.dot(w, x.to(COMPUTE), part)
                acc = acc + part * scales.to(tl.float32)[:, :, None] if AFTER else part
    total = tl.sum(acc, 0)
    if HOW == 0 and GROUP == 0:
        o_s = tl.minimum(o_n, N - 1).to(tl.int64)
        lane = tl.load(Lanes + (o_s & 3)) if WORDS else None
        _, scales = group_terms(Scales, None, lane, tl.cast(0, tl.int64), o_s, o_n < N, stride_sg,
                                stride_sn, BITS, HOW, ASM, WORDS, DTYPE)  # fmt: skip
        total = total * scales.to(tl.float32)[:, None]
    finish(total, Out, Bias, Part, Arrived, item, i_k, o_m, o_n, M, N, stride_om, SPLITS, ATOMIC, EMULATE)
