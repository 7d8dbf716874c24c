"""Kernels that do one thing as fast as the machine can: read, write, copy, read from L2, multiply, take exponentials, nothing.

What they reach is what other kernels can at most reach, so it is what `tilefold roofline` draws.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["blocks", "turns"])
def read_bytes(X, Out, blocks, turns, BLOCK: tl.constexpr, PASS: tl.constexpr):
    """Read X [blocks * BLOCK] int32, `turns` times over, past the L1 cache; Out [programs] <- the exclusive or of what each read.

    Grid (programs,). In one turn the programs share the blocks; with PASS each reads all of them in every turn, from a place of
    its own on, so that X comes from L2 to every SM.
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    o_x, step = tl.arange(0, BLOCK), tl.full([], BLOCK, tl.int64)
    found = tl.zeros([BLOCK], tl.int32)
    for turn in range(turns):
        if PASS:
            for i in range(blocks):
                found ^= tl.load(X + (i + pid * 7 + turn) % blocks * step + o_x, cache_modifier=".cg")
        else:
            for i in range(pid, blocks, programs):
                found ^= tl.load(X + i * step + o_x, cache_modifier=".cg")
    tl.store(Out + pid, tl.xor_sum(found))


@triton.jit(do_not_specialize=["value"])
def write_bytes(X, value, BLOCK: tl.constexpr):
    """X [programs * BLOCK] int32 <- value. Grid (programs,)."""
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(X + o_x, tl.zeros([BLOCK], tl.int32) + value)


@triton.jit
def copy_bytes(X, Y, BLOCK: tl.constexpr):
    """Y [programs * BLOCK] int32 <- X. Grid (programs,)."""
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + o_x, tl.load(X + o_x))


@triton.jit(do_not_specialize=["turns"])
def multiply_tiles(
    A, B, Out, turns, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr
):
    """acc [M, N] += A [M, K] @ B [K, N], `turns` times over with both tiles kept on the SM; B lies as [N, K]. Out [programs] of
    ACC keeps a sum. Grid (programs,). 2 M N K FLOPs a turn."""
    o_m, o_n, o_k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(A + o_m[:, None] * K + o_k[None, :])
    b = tl.load(B + o_n[None, :] * K + o_k[:, None])
    acc = tl.zeros([M, N], ACC)
    for _ in range(turns):
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=ACC)
    tl.store(Out + tl.program_id(0), tl.sum(tl.sum(acc, 1), 0))


@triton.jit(do_not_specialize=["turns"])
def multiply_add(X, Out, turns, BLOCK: tl.constexpr):
    """x = x * x0 + x0 in fp32, eight times a turn, for x0 in X [BLOCK]; Out [programs] keeps a sum. 16 BLOCK FLOPs a turn."""
    start = tl.load(X + tl.arange(0, BLOCK))
    x = start
    for _ in range(turns):
        for _ in tl.static_range(8):
            x = tl.fma(x, start, start)
    tl.store(Out + tl.program_id(0), tl.sum(x))


@triton.jit(do_not_specialize=["turns"])
def exponentials(X, Out, turns, BLOCK: tl.constexpr):
    """x = exp2(-x), eight times a turn, from X [BLOCK] fp32; Out [programs] keeps a sum. 8 BLOCK exponentials a turn."""
    x = tl.load(X + tl.arange(0, BLOCK))
    for _ in range(turns):
        for _ in tl.static_range(8):
            x = tl.exp2(-x)
    tl.store(Out + tl.program_id(0), tl.sum(x))


@triton.jit
def nothing(X):
    """No work at all: what is left is the launch."""
