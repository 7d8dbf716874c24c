"""Rung 4, flash: tiling and online softmax.  One pass over the keys, and nothing of the size of S anywhere.

    for each tile of queries Q_i:  (acc, m, l) = (0, -inf, 0)
        for each tile of keys K_j, V_j:
            S   = Q_i K_j^T                           in registers
            m'  = max(m, largest of S)                the largest so far
            l   = l 2^(m - m') + sum of 2^(S - m')    what was summed before shrinks
            acc = acc 2^(m - m') + 2^(S - m') V_j
        O_i = acc / l

What it teaches: a softmax can be taken in pieces, since a sum relative to one maximum becomes one relative to another by a
factor.  Each tile of Q meets all of K and V from the L2 cache: arithmetic intensity grows from that of S, written and read, to
that of Q, K, V and O alone.

    python -m tilefold.ladder.flash
"""

import math

import torch
import triton
import triton.language as tl

from tilefold.device.product import add_product
from tilefold.device.tile import narrow, widen
from tilefold.ladder.inputs import Tile, checked, emulated, fitted, is_there, keys_read, strides
from tilefold.ladder.masks import mask_arguments, masked
from tilefold.plan.cost import Cost

TILE = Tile(128, 64, 8, 3)
TILES = (Tile(64, 32, 4, 2), Tile(64, 64, 4, 3), TILE, Tile(128, 64, 4, 3), Tile(128, 128, 8, 2))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def online_step(acc, m, l, s, v):
    """Take scores s [M, N] in base 2 and values v [N, D] into (acc, m, l)."""
    m_new = tl.maximum(m, tl.max(s, 1))
    anchor = tl.where(
        m_new == float("-inf"), 0.0, m_new
    )  # no live key yet: 2^(-inf - 0) is 0, -inf - -inf would be NaN
    p, shrink = tl.exp2(s - anchor[:, None]), tl.exp2(m - anchor)
    return add_product(p.to(v.dtype), v, acc * shrink[:, None]), m_new, l * shrink + tl.sum(p, 1)


@triton.jit
def flash_kernel(
    Q, K, V, Out, seq_q, seq_k, heads, group, scale, stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh, stride_ob, stride_om, stride_oh, bias, padding,
    CAUSAL: tl.constexpr, EMULATE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M rows of O."""
    pid = tl.program_id(0).to(tl.int64)
    i_bh, i_m = pid // tl.cdiv(seq_q, M), (pid % tl.cdiv(seq_q, M)).to(tl.int32)
    i_b, i_h = i_bh // heads, i_bh % heads
    rows, o_n, o_d = i_m * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_D)
    m_d, m_q = (o_d < DIM)[None, :], (rows < seq_q)[:, None] & (o_d < DIM)[None, :]
    p_q = Q + i_b * stride_qb + i_h * stride_qh + rows[:, None].to(tl.int64) * stride_qm + o_d[None, :]
    q = widen(tl.load(p_q, mask=m_q, other=0.0), EMULATE)
    p_k = K + i_b * stride_kb + i_h // group * stride_kh + o_n[:, None].to(tl.int64) * stride_kn + o_d[None, :]
    p_v = V + i_b * stride_vb + i_h // group * stride_vh + o_n[:, None].to(tl.int64) * stride_vn + o_d[None, :]
    m, l = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    # No query of the tile sees a key behind its last query's: whole tiles of a causal mask are never touched.
    end = tl.minimum(seq_k, i_m * M + M + seq_k - seq_q) if CAUSAL else seq_k
    for start in range(0, end, N):
        cols = start + o_n
        k = widen(tl.load(p_k, mask=(cols < seq_k)[:, None] & m_d, other=0.0), EMULATE)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = masked(s, i_b, i_h, rows, cols, seq_q, seq_k, bias, padding, CAUSAL) * LOG2E
        v = widen(tl.load(p_v, mask=(cols < seq_k)[:, None] & m_d, other=0.0), EMULATE)
        acc, m, l = online_step(acc, m, l, s, v)
        p_k += N * tl.cast(stride_kn, tl.int64)
        p_v += N * tl.cast(stride_vn, tl.int64)
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    place = Out + i_b * stride_ob + i_h * stride_oh + rows[:, None].to(tl.int64) * stride_om + o_d[None, :]
    tl.store(place, narrow(acc, Out.dtype.element_ty, EMULATE), mask=m_q)


def attention(q, k, v, causal=False, *, bias=None, padding_mask=None, tile=None):
    """As `ladder.naive.attention`, to the same tolerance: other sums, the same formula."""
    p = checked(q, k, v, causal, tile, bias=bias, padding_mask=padding_mask)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not is_there(out, p.seq_k):
        return out
    tile = tile or tile_for(p)
    flash_kernel[(p.batch * p.heads * -(-p.seq_q // tile.block_m),)](
        q, k, v, out, p.seq_q, p.seq_k, p.heads, p.group, 1 / math.sqrt(p.dim_qk), *strides(q), *strides(k), *strides(v),
        *strides(out), *mask_arguments(bias, padding_mask), CAUSAL=p.causal, EMULATE=emulated(q), DIM=p.dim_qk,
        BLOCK_D=p.block_qk, M=tile.block_m, N=tile.block_n, num_warps=tile.warps, num_stages=tile.stages)  # fmt: skip
    return out


def tile_for(p):
    """The tile of a problem."""
    return fitted(TILE, p)


def cost(p, tile=None):
    """Declared work: two products of the tiles that are visited; in memory q, k, v and out alone."""
    tile = tile or tile_for(p)
    each, row = p.batch * p.heads, p.dim_qk * p.itemsize
    keys, tiles = keys_read(p, tile.block_m, tile.block_n)
    own = row * p.batch * (2 * p.seq_q * p.heads + 2 * p.seq_k * p.kv_heads)
    return Cost(flops=4 * each * tiles * tile.block_m * tile.block_n * p.block_qk, bytes=own,
                exps=each * tiles * tile.block_m * tile.block_n, l2_bytes=each * row * (2 * p.seq_q + 2 * keys))  # fmt: skip


if __name__ == "__main__":
    from tilefold.ladder.rungs import show

    show("flash")
