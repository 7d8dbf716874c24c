"""Matrix products: one kernel for [M, K] @ [K, N] and for batches of them, and the two that go with it.

    matmul               a tile of activation(A B scale + bias), or of one share of the sum over K
    finish_splits        adds those shares up in their order, then bias and activation
    activation_gradient  dout * activation'(what it was applied to)

Bound: 2 M N K operations on (M K + K N + M N) elements.  A tile reads BLOCK_M + BLOCK_N elements for each of K and makes
BLOCK_M * BLOCK_N of the result, so large tiles and neighbours in L2 (grouped_place) keep the tensor cores fed.
"""

import triton
import triton.language as tl

from ...device.activation import RELU, slope
from ...device.epilogue import finish_tile, grouped_place, tile_offsets
from ...device.product import add_product
from ...device.tile import narrow, widen

# Strides are not among these: loads and stores are wide only where strides are known to be multiples of 16.
RUNTIME = ["tiles_m", "tiles_n", "tiles_k", "folds", "splits"]
PROMOTE = tl.constexpr(128)  # fp8: tensor cores add this many products with about 14 bits before they go into fp32


@triton.jit
def multiply_tiles(a, b, acc, TF32: tl.constexpr, EMULATE: tl.constexpr):
    """acc + a b."""
    if EMULATE:
        return add_product(a.to(tl.float32), b.to(tl.float32), acc)
    elif a.dtype == tl.float8e4nv:
        return tl.dot(a, b, acc, max_num_imprecise_acc=min(PROMOTE, a.shape[1]))
    elif TF32:
        return tl.dot(a, b, acc, input_precision="tf32")
    else:
        return add_product(a, b, acc)


@triton.jit(do_not_specialize=RUNTIME)
def matmul(
    A, B, Out, Pre, Bias, ScaleA, ScaleB, m, n, k, tiles_m, tiles_n, tiles_k, folds, splits,
    stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn, stride_ob, stride_om, stride_os,
    stride_cb, stride_cm, stride_cn, stride_sa, stride_sb, EMULATE: tl.constexpr, TF32: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, FOLD: tl.constexpr,
    WIDE: tl.constexpr, EVEN_K: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A [batch, m, k], B [batch, k, n] by strides (0: one for all); Out, Pre [batch, m, n], columns side by side; Bias by
    strides (c) or None; ScaleA, ScaleB fp32, a factor a row and a column (stride 0: one), or None.  FOLD: the batch is summed
    over, `folds` entries of it, and Out has one.  splits > 1: Out is [splits, batch, m, n], each a share of the
    sum's tiles, nothing else.
    WIDE: offsets inside a tile reach 2^31.  Grid (tiles_m * tiles_n * batch * splits,), tiles fastest."""
    pid = tl.program_id(0)
    tiles = tiles_m * tiles_n
    i_m, i_n = grouped_place(pid % tiles, tiles_m, tiles_n, GROUP)
    i_bs = pid // tiles
    i_s = i_bs % splits
    i_b = (i_bs // splits).to(tl.int64)
    first_m, first_n = i_m.to(tl.int64) * BLOCK_M, i_n.to(tl.int64) * BLOCK_N
    a = A + first_m * stride_am
    b = B + first_n * stride_bn
    if not FOLD:
        a += i_b * stride_ab
        b += i_b * stride_bb
    o_a = tile_offsets(BLOCK_M, stride_am, BLOCK_K, stride_ak, WIDE)
    o_b = tile_offsets(BLOCK_K, stride_bk, BLOCK_N, stride_bn, WIDE)
    o_k = tl.arange(0, BLOCK_K)
    m_rows = (tl.arange(0, BLOCK_M) < m - first_m)[:, None]
    m_columns = (tl.arange(0, BLOCK_N) < n - first_n)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = tiles_k * folds
    for t in range(
        (total * i_s.to(tl.int64) // splits).to(tl.int32), (total * (i_s + 1).to(tl.int64) // splits).to(tl.int32)
    ):
        if FOLD:
            i_f = (t // tiles_k).to(tl.int64)
            first_k = (t % tiles_k).to(tl.int64) * BLOCK_K
            p_a = a + (i_f * stride_ab + first_k * stride_ak)
            p_b = b + (i_f * stride_bb + first_k * stride_bk)
        else:
            first_k = tl.cast(t, tl.int64) * BLOCK_K
            p_a = a + first_k * stride_ak
            p_b = b + first_k * stride_bk
        m_a, m_b = m_rows, m_columns
        if not EVEN_K:
            m_a = m_a & (o_k < k - first_k)[None, :]
            m_b = m_b & (o_k < k - first_k)[:, None]
        x = tl.load(p_a + o_a, mask=m_a, other=0.0)
        y = tl.load(p_b + o_b, mask=m_b, other=0.0)
        acc = multiply_tiles(x, y, acc, TF32, EMULATE)
    rows = first_m + tl.arange(0, BLOCK_M)
    columns = first_n + tl.arange(0, BLOCK_N)
    if ScaleA is not None:
        acc *= tl.load(ScaleA + rows * stride_sa, mask=rows < m, other=0.0)[:, None]
    if ScaleB is not None:
        acc *= tl.load(ScaleB + columns * stride_sb, mask=columns < n, other=0.0)[None, :]
    o_out = i_s.to(tl.int64) * stride_os + i_b * stride_ob + (rows * stride_om)[:, None] + columns[None, :]
    finish_tile(acc, Out, Pre, o_out, Bias, i_b * stride_cb, stride_cm, stride_cn, rows, columns, m, n, BIAS, ACTIVATION,
                EMULATE)  # fmt: skip


@triton.jit
def place_of_program(tiles_m, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """-> this program's batch entry, rows and columns, int64, of a grid of (tiles_m * tiles_n * batch,), columns fastest."""
    pid = tl.program_id(0)
    tile = pid % (tiles_m * tiles_n)
    i_b = (pid // (tiles_m * tiles_n)).to(tl.int64)
    rows = (tile // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tile % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    return i_b, rows, columns


@triton.jit(do_not_specialize=["tiles_m", "tiles_n", "splits"])
def finish_splits(
    Part, Out, Pre, Bias, m, n, tiles_m, tiles_n, splits, stride_ps, stride_pb, stride_pm, stride_ob, stride_om,
    stride_cb, stride_cm, stride_cn, EMULATE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Part [splits, batch, m, n] fp32 -> Out, Pre [batch, m, n] as of matmul.  Grid (tiles_m * tiles_n * batch,)."""
    i_b, rows, columns = place_of_program(tiles_m, tiles_n, BLOCK_M, BLOCK_N)
    m_tile = (rows < m)[:, None] & (columns < n)[None, :]
    p_part = Part + i_b * stride_pb + (rows * stride_pm)[:, None] + columns[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_s in range(splits):
        acc += tl.load(p_part + tl.cast(i_s, tl.int64) * stride_ps, mask=m_tile, other=0.0)
    o_out = i_b * stride_ob + (rows * stride_om)[:, None] + columns[None, :]
    finish_tile(acc, Out, Pre, o_out, Bias, i_b * stride_cb, stride_cm, stride_cn, rows, columns, m, n, BIAS, ACTIVATION,
                EMULATE)  # fmt: skip


@triton.jit(do_not_specialize=["tiles_m", "tiles_n"])
def activation_gradient(
    Dout, Saved, Dz, m, n, tiles_m, tiles_n, stride_db, stride_dm, stride_dn, stride_sb, stride_sm, stride_zb, stride_zm,
    EMULATE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Dz = Dout * slope(Saved), [batch, m, n] each by its strides; Saved: what the activation was applied to (of ReLU also its
    result).  Grid (tiles_m * tiles_n * batch,)."""
    i_b, rows, columns = place_of_program(tiles_m, tiles_n, BLOCK_M, BLOCK_N)
    m_tile = (rows < m)[:, None] & (columns < n)[None, :]
    o_dout = i_b * stride_db + (rows * stride_dm)[:, None] + (columns * stride_dn)[None, :]
    dout = widen(tl.load(Dout + o_dout, mask=m_tile, other=0.0), EMULATE).to(tl.float32)
    o_saved = i_b * stride_sb + (rows * stride_sm)[:, None] + columns[None, :]
    saved = widen(tl.load(Saved + o_saved, mask=m_tile, other=0.0), EMULATE).to(tl.float32)
    o_dz = i_b * stride_zb + (rows * stride_zm)[:, None] + columns[None, :]
    if ACTIVATION == RELU:  # not by a factor: 0 times infinity is NaN
        dz = tl.where(saved <= 0, 0.0, dout)
    else:
        dz = dout * slope(saved, ACTIVATION)
    tl.store(Dz + o_dz, narrow(dz, Dz.dtype.element_ty, EMULATE), mask=m_tile)
