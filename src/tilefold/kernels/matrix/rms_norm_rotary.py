"""RMSNorm of heads, or of tokens, whose pairs of channels are then turned, and its gradients.  Memory-bound: x is read once.

With r = (mean(x^2) + eps)^(-1/2) of each row, y = x r, and R the turn of a row's pairs by its token's angles,

    out = R (y w)        g = R^T dout        dx = r (w g - y mean(w g y))        dw = sum over the rows of g y

Zhang and Sennrich 2019 (arXiv:1910.07467), Su et al. 2021 (arXiv:2104.09864).
"""

import triton
import triton.language as tl

from ...device.rotary import load_angles_of_heads, load_pairs, store_pairs

RUNTIME = ["rows", "row_heads", "seq", "eps", "tiles"]


@triton.jit(do_not_specialize=RUNTIME)
def rms_norm_rotary_forward(
    X, Weight, Cos, Sin, Out, Rstd, eps, rows, row_heads, seq,
    stride_xb, stride_xm, stride_xh, stride_w, stride_cb, stride_cm, stride_sb, stride_sm,
    INTERLEAVED: tl.constexpr, EMULATE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """X [B, S, H, DIM] with strides, Weight [DIM] or [H, DIM]; Cos, Sin [B, S or more, PAIRS]; Out like X, contiguous; Rstd
    [rows] fp32.  A row holds HEADS heads, 1 or H, and a token row_heads rows, H or 1.  Grid (cdiv(rows, ROWS),)."""
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = o_r < rows
    i_b, i_m, i_h = _places(o_r, row_heads, seq)
    rows_x = i_b * stride_xb + i_m * stride_xm + i_h * stride_xh
    first, second = load_pairs(X, rows_x, live, stride_xh, INTERLEAVED, HEADS, DIM, PAIRS, BLOCK_P)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(first * first + second * second, 1) / (HEADS * DIM) + eps)
    tl.store(Rstd + o_r, rstd, mask=live)
    one = tl.arange(0, 1)
    w_first, w_second = load_pairs(Weight, one, one == 0, stride_w, INTERLEAVED, HEADS, DIM, PAIRS, BLOCK_P)
    first = first * rstd[:, None] * w_first
    second = second * rstd[:, None] * w_second
    cos = load_angles_of_heads(Cos, i_b * stride_cb + i_m * stride_cm, live, 1.0, HEADS, DIM, PAIRS, BLOCK_P)
    sin = load_angles_of_heads(Sin, i_b * stride_sb + i_m * stride_sm, live, 0.0, HEADS, DIM, PAIRS, BLOCK_P)
    rows_o = o_r.to(tl.int64) * (HEADS * DIM)
    store_pairs(Out, rows_o, live, DIM, first * cos - second * sin, first * sin + second * cos, EMULATE, INTERLEAVED, HEADS,
                DIM, PAIRS, BLOCK_P)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def rms_norm_rotary_backward(
    DOut, X, Weight, Cos, Sin, Rstd, DX, Parts, tiles, rows, row_heads, seq,
    stride_xb, stride_xm, stride_xh, stride_w, stride_cb, stride_cm, stride_sb, stride_sm,
    INTERLEAVED: tl.constexpr, EMULATE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """As above; DOut, DX like X, contiguous; Parts [programs, HEADS * DIM] fp32: what the rows of a program give of dw, for the
    host to add.  A program owns `tiles` tiles of ROWS rows, one behind the other.  Grid (programs,)."""
    one = tl.arange(0, 1)
    total_first = tl.zeros([ROWS, BLOCK_P], tl.float32)
    total_second = tl.zeros([ROWS, BLOCK_P], tl.float32)
    for i in range(tiles):
        o_r = (tl.program_id(0) * tiles + i) * ROWS + tl.arange(0, ROWS)
        live = o_r < rows
        i_b, i_m, i_h = _places(o_r, row_heads, seq)
        rows_o = o_r.to(tl.int64) * (HEADS * DIM)
        first, second = load_pairs(DOut, rows_o, live, DIM, INTERLEAVED, HEADS, DIM, PAIRS, BLOCK_P)
        cos = load_angles_of_heads(Cos, i_b * stride_cb + i_m * stride_cm, live, 1.0, HEADS, DIM, PAIRS, BLOCK_P)
        sin = load_angles_of_heads(Sin, i_b * stride_sb + i_m * stride_sm, live, 0.0, HEADS, DIM, PAIRS, BLOCK_P)
        g_first, g_second = first * cos + second * sin, second * cos - first * sin
        rows_x = i_b * stride_xb + i_m * stride_xm + i_h * stride_xh
        y_first, y_second = load_pairs(X, rows_x, live, stride_xh, INTERLEAVED, HEADS, DIM, PAIRS, BLOCK_P)
        rstd = tl.load(Rstd + o_r, mask=live, other=0.0)[:, None]
        y_first *= rstd
        y_second *= rstd
        total_first += g_first * y_first
        total_second += g_second * y_second
        # Loaded again for each tile, as in rms_norm_backward.
        w_first, w_second = load_pairs(Weight, one, one == 0, stride_w, INTERLEAVED, HEADS, DIM, PAIRS, BLOCK_P)
        g_first *= w_first
        g_second *= w_second
        mean = (tl.sum(g_first * y_first + g_second * y_second, 1) / (HEADS * DIM))[:, None]
        d_first, d_second = (g_first - y_first * mean) * rstd, (g_second - y_second * mean) * rstd
        store_pairs(DX, rows_o, live, DIM, d_first, d_second, EMULATE, INTERLEAVED, HEADS, DIM, PAIRS, BLOCK_P)
    part = tl.program_id(0).to(tl.int64) * (HEADS * DIM) + one
    sum_first, sum_second = tl.sum(total_first, 0)[None, :], tl.sum(total_second, 0)[None, :]
    store_pairs(Parts, part, one == 0, DIM, sum_first, sum_second, EMULATE, INTERLEAVED, HEADS, DIM, PAIRS, BLOCK_P)


@triton.jit
def _places(o_r, row_heads, seq):
    """-> batch, token and head int64 at which the rows [M] int32 begin."""
    token = o_r // row_heads
    return (token // seq).to(tl.int64), (token % seq).to(tl.int64), (o_r % row_heads).to(tl.int64)
