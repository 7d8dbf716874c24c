"""Products of 8-bit numbers with a factor a row on either side: int8 into int32, or e4m3 into fp32."""

import triton
import triton.language as tl

from ...device.grid import let_next_kernel_start, wait_for_previous_kernel
from ...device.partials import arrive
from ...device.tile import narrow

RUNTIME = ["M", "N", "each", "group"]
PROMOTE = tl.constexpr(
    128
)  # e4m3: tensor cores of sm_90 add this many products with about 14 bits before they go into fp32


@triton.jit
def tile_of_program(M, N, group, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """-> row and column of the program's tile: `group` rows of tiles at a time, so that programs at work share both operands."""
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = pid // (group * columns) * group
    height = tl.minimum(rows - first, group)
    inside = pid % (group * columns)
    return first + inside % height, inside // height


@triton.jit(do_not_specialize=RUNTIME)
def matmul_eight(
    A, B, ScaleA, ScaleB, Bias, Out, Part, Arrived, M, N, K, each, group, stride_am, stride_bn, stride_sb, stride_om,
    SPLIT: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr, EMULATE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A [M, K], B [N, K] int8 or e4m3 (strides m, n), Out [M, N] = (A B^T) ScaleA[m] ScaleB[n] + Bias[n]; scales fp32, ScaleB's
    stride 0 where one is for all.  EVEN: K is a multiple of BLOCK_K.
    Grid (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N), splits); a split makes `each` tiles of K.  Part [splits, M, N] of the accumulator's
    type, Arrived int32 zeros, one a tile."""
    let_next_kernel_start(EARLY)
    INTEGER: tl.constexpr = A.dtype.element_ty == tl.int8
    ACC: tl.constexpr = tl.int32 if INTEGER else tl.float32
    i_m, i_n = tile_of_program(M, N, group, BLOCK_M, BLOCK_N)
    i_k = tl.program_id(1)
    o_m, o_n, o_k = i_m * BLOCK_M + tl.arange(0, BLOCK_M), i_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # rows past the end read the last one, and are not stored
    p_a = A + tl.minimum(o_m, M - 1).to(tl.int64)[:, None] * stride_am + o_k[None, :]
    p_b = B + tl.minimum(o_n, N - 1).to(tl.int64)[None, :] * stride_bn + o_k[:, None]
    wait_for_previous_kernel(EARLY)
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for i in tl.range(i_k * each, tl.minimum(i_k * each + each, tl.cdiv(K, BLOCK_K)), num_stages=STAGES):
        k = tl.cast(i, tl.int64) * BLOCK_K
        if EVEN:
            a, b = tl.load(p_a + k), tl.load(p_b + k)
        else:
            a = tl.load(p_a + k, mask=(k + o_k < K)[None, :], other=0.0)
            b = tl.load(p_b + k, mask=(k + o_k < K)[:, None], other=0.0)
        if INTEGER:
            acc = tl.dot(a, b, acc, out_dtype=ACC)
        else:
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=min(PROMOTE, BLOCK_K))
    inside = (o_m < M)[:, None] & (o_n < N)[None, :]
    last = True
    if SPLIT:
        place = o_m[:, None].to(tl.int64) * N + o_n[None, :]
        size = M.to(tl.int64) * N
        tl.store(Part + i_k * size + place, acc, mask=inside)
        last = arrive(Arrived, tl.program_id(0), tl.num_programs(1))
        if last:
            acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
            for s in range(tl.num_programs(1)):
                acc += tl.load(Part + s * size + place, mask=inside, other=0, cache_modifier=".cg")
    if last:
        out = acc.to(tl.float32) * tl.load(ScaleA + o_m, mask=o_m < M, other=0.0)[:, None]
        out = out * tl.load(ScaleB + o_n.to(tl.int64) * stride_sb, mask=o_n < N, other=0.0)[None, :]
        if Bias is not None:
            out += tl.load(Bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
        p_out = Out + o_m[:, None].to(tl.int64) * stride_om + o_n[None, :]
        tl.store(p_out, narrow(out, Out.dtype.element_ty, EMULATE), mask=inside)
