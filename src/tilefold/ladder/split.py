"""Rung 5, split: few queries over many keys.  The keys are cut into parts that are folded apart, and merged.

    keys        |--- split 0 ---|--- split 1 ---|--- split 2 ---|
    partial     (O_0, lse_0)      (O_1, lse_1)    (O_2, lse_2)          one program each, at the same time
    merge       O = sum of O_s 2^(lse_s - lse),   2^lse = sum of 2^lse_s

With one query there are as many programs as heads, and most of the GPU idles.  What it teaches: (O, lse) is a state that can be
merged in any order, and an empty split, which a causal mask or a short sequence leaves, is its identity: O = 0, lse = -inf,
weight 2^-inf = 0, never NaN.  Heads that share a KV head are rows of one tile.  `attention_kvcache` is this rung grown up.

    python -m tilefold.ladder.split
"""

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl

import tilefold
from tilefold.device.tile import narrow, widen
from tilefold.errors import ValueRangeError
from tilefold.ladder.flash import LOG2E, online_step
from tilefold.ladder.inputs import Tile, checked, emulated, fitted, here, is_there, keys_read, strides
from tilefold.plan.cost import Cost

TILE = Tile(128, 64, 8, 3)
TILES = (Tile(16, 32, 4, 3), Tile(16, 64, 4, 3), Tile(16, 128, 4, 2), Tile(64, 64, 4, 3), TILE)
MOST = 64  # splits


@triton.jit
def split_kernel(
    Q, K, V, Part, Lse, lengths, batch, seq_q, seq_k, kv_heads, group, splits, chunk, scale, stride_qb, stride_qm, stride_qh,
    stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    CAUSAL: tl.constexpr, EMULATE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M rows, a row being a query and a head of the group, over keys i_s * chunk on; Part [splits, batch, seq_q, heads, DIM]."""
    pid = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(seq_q * group, M)
    i_s, i_m, i_bh = (pid % splits).to(tl.int32), (pid // splits % tiles).to(tl.int32), pid // splits // tiles
    i_b, i_kh = i_bh // kv_heads, i_bh % kv_heads
    rows, o_n, o_d = i_m * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_D)
    i_q, i_h = rows // group, i_kh * group + rows % group
    m_d, m_q = (o_d < DIM)[None, :], (rows < seq_q * group)[:, None] & (o_d < DIM)[None, :]
    p_q = Q + i_b * stride_qb + (i_q.to(tl.int64) * stride_qm + i_h * stride_qh)[:, None] + o_d[None, :]
    q = widen(tl.load(p_q, mask=m_q, other=0.0), EMULATE)
    length = seq_k
    if len(lengths) > 0:
        length = tl.load(lengths[0] + i_b)
    low, end, last = i_s * chunk, tl.minimum(length, i_s * chunk + chunk), i_q * 0 + length - 1  # last: that a row sees
    if CAUSAL:  # the tile's last query may see nothing of this split: then low >= end, and nothing is done
        end, last = tl.minimum(end, (i_m * M + M - 1) // group + 1 + length - seq_q), i_q + (length - seq_q)
    p_k = K + i_b * stride_kb + i_kh * stride_kh + (low + o_n)[:, None].to(tl.int64) * stride_kn + o_d[None, :]
    p_v = V + i_b * stride_vb + i_kh * stride_vh + (low + o_n)[:, None].to(tl.int64) * stride_vn + o_d[None, :]
    acc, m, l = tl.zeros([M, BLOCK_D], tl.float32), tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    for start in range(low, end, N):
        cols = start + o_n
        k = widen(tl.load(p_k, mask=(cols < length)[:, None] & m_d, other=0.0), EMULATE)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        v = widen(tl.load(p_v, mask=(cols < length)[:, None] & m_d, other=0.0), EMULATE)
        acc, m, l = online_step(acc, m, l, tl.where(cols[None, :] <= last[:, None], s, float("-inf")), v)
        p_k += N * tl.cast(stride_kn, tl.int64)
        p_v += N * tl.cast(stride_vn, tl.int64)
    l = tl.where(l == 0.0, 1.0, l)
    row = ((i_s * batch + i_b) * seq_q + i_q) * (kv_heads * group) + i_h
    out = narrow(acc / l[:, None], Part.dtype.element_ty, EMULATE)
    tl.store(Part + row[:, None] * DIM + o_d[None, :], out, mask=m_q)
    tl.store(Lse + row, m + tl.log2(l), mask=rows < seq_q * group)  # base 2; -inf + 0 where there was no key


@triton.jit
def merge_kernel(Part, Lse, Out, rows, splits, DIM: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
                 EMULATE: tl.constexpr):  # fmt: skip
    """M rows of Out [rows, DIM] from Part [splits, rows, DIM] and Lse [splits, rows]."""
    row, o_d = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M), tl.arange(0, BLOCK_D)
    mask = (row < rows)[:, None] & (o_d < DIM)[None, :]
    acc, m, l = tl.zeros([M, BLOCK_D], tl.float32), tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    for i in range(splits):
        lse = tl.load(Lse + i * tl.cast(rows, tl.int64) + row, mask=row < rows, other=float("-inf"))
        part = tl.load(Part + (i * tl.cast(rows, tl.int64) + row)[:, None] * DIM + o_d[None, :], mask=mask, other=0.0)
        m_new = tl.maximum(m, lse)
        anchor = tl.where(m_new == float("-inf"), 0.0, m_new)  # both empty: weights 0, not 2^(-inf + inf)
        shrink, weight = tl.exp2(m - anchor), tl.exp2(lse - anchor)
        acc, l, m = acc * shrink[:, None] + part * weight[:, None], l * shrink + weight, m_new
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    tl.store(Out + row[:, None] * DIM + o_d[None, :], narrow(acc, Out.dtype.element_ty, EMULATE), mask=mask)


def tile_for(p):
    """The tile of a problem, whose rows are queries and heads of a group."""
    return fitted(TILE, replace(p, seq_q=p.seq_q * p.group))


def planned(p, tile, sms, splits=None):
    """(splits, keys of each): so many as asked, or enough programs for two an SM, each with at least two tiles of keys."""
    programs, tiles = p.batch * p.kv_heads * -(-p.seq_q * p.group // tile.block_m), -(-p.seq_k // tile.block_n)
    wanted = splits or max(1, min(MOST, 2 * sms // max(1, programs), tiles // 2))
    return wanted, -(-tiles // wanted) * tile.block_n


def attention(q, k, v, causal=False, *, lengths=None, splits=None, tile=None):
    """q [batch, seq_q, heads, dim] over k, v [batch, seq_k, kv_heads, dim], of which the first lengths [batch] int32 are there;
    causal: query i sits at key i + length - seq_q.  splits: parts of the keys; default: as many as keep every SM busy."""
    p = checked(q, k, v, causal, tile, lengths=lengths)
    if splits is not None and (type(splits) is not int or not 1 <= splits <= MOST):
        raise ValueRangeError(f"splits must be an integer from 1 to {MOST} or None, got {splits!r}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not is_there(out, p.seq_k):
        return out
    tile, rows = tile or tile_for(p), p.batch * p.seq_q * p.heads
    splits, chunk = planned(p, tile, here().sms, splits)
    part = out if splits == 1 else torch.empty(splits, rows, p.dim_qk, dtype=torch.float32, device=q.device)
    lse = torch.empty(splits, rows, dtype=torch.float32, device=q.device)
    split_kernel[(splits * p.batch * p.kv_heads * -(-p.seq_q * p.group // tile.block_m),)](
        q, k, v, part, lse, () if lengths is None else (lengths,), p.batch, p.seq_q, p.seq_k, p.kv_heads, p.group, splits, chunk,
        1 / math.sqrt(p.dim_qk), *strides(q), *strides(k), *strides(v), CAUSAL=p.causal, EMULATE=emulated(q), DIM=p.dim_qk,
        BLOCK_D=p.block_qk, M=tile.block_m, N=tile.block_n, num_warps=tile.warps, num_stages=tile.stages)  # fmt: skip
    if splits > 1:
        merge_kernel[(-(-rows // 16),)](part, lse, out, rows, splits, DIM=p.dim_qk, BLOCK_D=p.block_qk, M=16,
                                        EMULATE=emulated(q), num_warps=4)  # fmt: skip
    return out


def library(q, k, v, causal=False, *, lengths=None):  # this rung as the library exports it
    return tilefold.attention_kvcache(q, k, v, causal=causal, cache_seqlens=lengths)


def cost(p, tile=None, splits=None):
    """Declared work: flash's, and where there are splits their partial results, written and read in fp32."""
    tile = tile or tile_for(p)
    splits, chunk = planned(p, tile, here().sms, splits)
    each, row, rows = p.batch * p.kv_heads, p.dim_qk * p.itemsize, p.batch * p.seq_q * p.heads
    read = (keys_read(p, tile.block_m, tile.block_n, p.group, s * chunk, (s + 1) * chunk) for s in range(splits))
    keys, tiles = map(sum, zip(*read, strict=True))
    partial = 2 * splits * rows * (p.dim_qk + 1) * 4 if splits > 1 else rows * 4
    own = row * (2 * rows + 2 * p.batch * p.seq_k * p.kv_heads)
    return Cost(flops=4 * each * tiles * tile.block_m * tile.block_n * p.block_qk, bytes=own + partial,
                exps=each * tiles * tile.block_m * tile.block_n,
                l2_bytes=(splits + 1) * rows * row + 2 * each * keys * row + partial)  # fmt: skip


if __name__ == "__main__":
    from tilefold.ladder.rungs import show

    show("split")
