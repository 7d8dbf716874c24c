"""RMSNorm of rows, with a residual added first, and its gradients.  Memory-bound: a row stays in registers.

With s = x + residual as its dtype holds it, r = (mean(s^2) + eps)^(-1/2) of each row and y = s r,

    out = y w        ds = r (w dout - y mean(w dout y)) + dsum        dw = sum over the rows of dout y

dx and dresidual are both ds.  Zhang and Sennrich 2019 (arXiv:1910.07467).
"""

import triton
import triton.language as tl

from ...device.tile import load_rows, narrow, store_rows, widen


@triton.jit(do_not_specialize=["rows", "eps"])
def rms_norm_forward(
    X, Residual, Weight, Out, Sum, Rstd, rows, eps, stride_x, stride_r,
    EMULATE: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """X, Residual [rows, DIM] with these strides, or None; Weight [DIM]; Out, Sum [rows, DIM] contiguous, Sum None without
    Residual; Rstd [rows] fp32.  Grid (cdiv(rows, ROWS),)."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    o_r = first + tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    s = widen(load_rows(X, first, rows, stride_x, WIDE, ROWS, DIM, BLOCK_D), EMULATE).to(tl.float32)
    if Residual is not None:
        s += widen(load_rows(Residual, first, rows, stride_r, WIDE, ROWS, DIM, BLOCK_D), EMULATE).to(tl.float32)
        store_rows(Sum, o_r, DIM, o_r < rows, s, DIM, BLOCK_D, EMULATE)
        # What is stored is what is normalised: the backward pass reads it.
        s = widen(narrow(s, Sum.dtype.element_ty, EMULATE), EMULATE).to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(s * s, 1) / DIM + eps)
    weight = widen(tl.load(Weight + o_d, mask=o_d < DIM, other=0.0), EMULATE).to(tl.float32)
    store_rows(Out, o_r, DIM, o_r < rows, s * rstd[:, None] * weight[None, :], DIM, BLOCK_D, EMULATE)
    tl.store(Rstd + o_r, rstd, mask=o_r < rows)


@triton.jit(do_not_specialize=["rows", "tiles"])
def rms_norm_backward(
    DOut, DSum, S, Weight, Rstd, DX, Parts, rows, tiles, stride_d, stride_g, stride_s,
    EMULATE: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """DOut, S [rows, DIM] with strides, DSum likewise or None; Rstd [rows] fp32; DX [rows, DIM] contiguous, Parts [programs, DIM]
    fp32: what the rows of a program give of dw, for the host to add.  A program owns `tiles` tiles of ROWS rows, one behind the
    other.  Grid (programs,)."""
    o_d = tl.arange(0, BLOCK_D)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i in range(tiles):
        first = (tl.program_id(0).to(tl.int64) * tiles + i) * ROWS
        o_r = first + tl.arange(0, ROWS)
        dout = widen(load_rows(DOut, first, rows, stride_d, WIDE, ROWS, DIM, BLOCK_D), EMULATE).to(tl.float32)
        y = widen(load_rows(S, first, rows, stride_s, WIDE, ROWS, DIM, BLOCK_D), EMULATE).to(tl.float32)
        rstd = tl.load(Rstd + o_r, mask=o_r < rows, other=0.0)[:, None]
        y *= rstd
        total += dout * y
        # Loaded again for each tile: beside a row's dout, y and share of dw there are no registers for it.
        weight = tl.load(Weight + o_d, mask=o_d < DIM, other=0.0)
        dout *= widen(weight, EMULATE).to(tl.float32)[None, :]
        ds = (dout - y * (tl.sum(dout * y, 1) / DIM)[:, None]) * rstd
        if DSum is not None:
            ds += widen(load_rows(DSum, first, rows, stride_g, WIDE, ROWS, DIM, BLOCK_D), EMULATE).to(tl.float32)
        store_rows(DX, o_r, DIM, o_r < rows, ds, DIM, BLOCK_D, EMULATE)
    tl.store(Parts + tl.program_id(0).to(tl.int64) * DIM + o_d, tl.sum(total, 0), mask=o_d < DIM)
