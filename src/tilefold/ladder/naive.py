"""Rung 1, naive: attention as its formula reads, in three kernels.  S = Q K^T, then P = softmax(S) row by row, then O = P V.

    Q, K  --[scores]-->  S [N, N]  --[softmax]-->  P [N, N]  --[values]-->  O

Every number is fp32 and every intermediate goes through memory: S is written once, read three times by the softmax (largest
element, sum, quotient), and P is read by the second product.  What it teaches: what attention is, what a mask does, and how
many bytes a formula costs that is carried out step by step.

    python -m tilefold.ladder.naive
"""

import math

import torch
import triton
import triton.language as tl

from tilefold.device.product import add_product
from tilefold.device.tile import narrow, widen
from tilefold.ladder.inputs import Tile, checked, emulated, is_there, strides
from tilefold.ladder.masks import mask_arguments, masked
from tilefold.plan.cost import Cost

TILE = Tile(16, 16, 4, 1)  # as one would write it down; the next rung looks for better ones
ROW = 256  # scores of a row that the softmax takes at a time


@triton.jit
def score_kernel(
    Q, K, S, seq_q, seq_k, heads, group, scale, stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, bias, padding,
    CAUSAL: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One M x N tile of S [batch * heads, seq_q, seq_k].  WIDE: turn Q and K to fp32 first, away from the tensor cores."""
    pid = tl.program_id(0).to(tl.int64)
    tiles_m, tiles_n = tl.cdiv(seq_q, M), tl.cdiv(seq_k, N)
    i_bh = pid // (tiles_m * tiles_n)
    i_b, i_h = i_bh // heads, i_bh % heads
    rows = pid // tiles_n % tiles_m * M + tl.arange(0, M)
    cols = pid % tiles_n * N + tl.arange(0, N)
    o_d = tl.arange(0, BLOCK_D)
    p_q = Q + i_b * stride_qb + i_h * stride_qh + rows[:, None] * stride_qm + o_d[None, :]
    p_k = K + i_b * stride_kb + i_h // group * stride_kh + cols[:, None] * stride_kn + o_d[None, :]
    q = widen(tl.load(p_q, mask=(rows < seq_q)[:, None] & (o_d < DIM)[None, :], other=0.0), WIDE)
    k = widen(tl.load(p_k, mask=(cols < seq_k)[:, None] & (o_d < DIM)[None, :], other=0.0), WIDE)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    s = masked(s, i_b, i_h, rows, cols, seq_q, seq_k, bias, padding, CAUSAL)
    place = S + (i_bh * seq_q + rows[:, None]) * seq_k + cols[None, :]
    tl.store(place, s, mask=(rows < seq_q)[:, None] & (cols < seq_k)[None, :])


@triton.jit
def softmax_kernel(S, P, seq_k, EMULATE: tl.constexpr, BLOCK: tl.constexpr):
    """One row of any length, in three passes of BLOCK scores at a time: the largest, the sum, the quotients."""
    row = tl.program_id(0).to(tl.int64) * seq_k
    o_n = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, seq_k, BLOCK):
        top = tl.maximum(top, tl.load(S + row + start + o_n, mask=start + o_n < seq_k, other=float("-inf")))
    top = tl.max(top, 0)
    top = tl.where(
        top == float("-inf"), 0.0, top
    )  # a row without a live key: exp(-inf - 0) is 0, -inf - -inf would be NaN
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, seq_k, BLOCK):
        total += tl.exp(tl.load(S + row + start + o_n, mask=start + o_n < seq_k, other=float("-inf")) - top)
    total = tl.sum(total, 0)
    total = tl.where(total == 0.0, 1.0, total)
    for start in range(0, seq_k, BLOCK):
        p = tl.exp(tl.load(S + row + start + o_n, mask=start + o_n < seq_k, other=float("-inf")) - top) / total
        tl.store(P + row + start + o_n, narrow(p, P.dtype.element_ty, EMULATE), mask=start + o_n < seq_k)


@triton.jit
def value_kernel(
    P, V, Out, seq_q, seq_k, heads, group, stride_vb, stride_vn, stride_vh, stride_ob, stride_om, stride_oh,
    WIDE: tl.constexpr, EMULATE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M rows of O: the sum over tiles of N keys of P V."""
    pid = tl.program_id(0).to(tl.int64)
    tiles_m = tl.cdiv(seq_q, M)
    i_bh = pid // tiles_m
    i_b, i_h = i_bh // heads, i_bh % heads
    rows = pid % tiles_m * M + tl.arange(0, M)
    o_n, o_d = tl.arange(0, N), tl.arange(0, BLOCK_D)
    p_p = P + (i_bh * seq_q + rows[:, None]) * seq_k + o_n[None, :]
    p_v = V + i_b * stride_vb + i_h // group * stride_vh + o_n[:, None].to(tl.int64) * stride_vn + o_d[None, :]
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    for start in range(0, seq_k, N):
        live = start + o_n < seq_k
        p = widen(tl.load(p_p + start, mask=(rows < seq_q)[:, None] & live[None, :], other=0.0), WIDE)
        v = widen(tl.load(p_v, mask=live[:, None] & (o_d < DIM)[None, :], other=0.0), WIDE)
        acc = add_product(p, v, acc)
        p_v += N * tl.cast(stride_vn, tl.int64)
    place = Out + i_b * stride_ob + i_h * stride_oh + rows[:, None] * stride_om + o_d[None, :]
    tl.store(place, narrow(acc, Out.dtype.element_ty, EMULATE), mask=(rows < seq_q)[:, None] & (o_d < DIM)[None, :])


def attention(q, k, v, causal=False, *, bias=None, padding_mask=None, tile=None):
    """softmax(q k^T / sqrt(dim) + bias, masked) v for q [batch, seq_q, heads, dim], k and v [batch, seq_k, kv_heads, dim].

    bias: [batch or 1, heads or 1, seq_q or 1, seq_k], or without the dimensions in front, added.  padding_mask: bool [batch or 1,
    seq_k], true where there is a key.
    Any strides with a contiguous last dimension; float16, bfloat16 or float32; a row without a live key is 0."""
    p = checked(q, k, v, causal, tile, bias=bias, padding_mask=padding_mask)
    return run(q, k, v, p, mask_arguments(bias, padding_mask), tile or TILE, ROW, torch.float32)


def run(q, k, v, p, masks, tile, row, weights):
    """The three launches; weights: dtype of P.  In fp32 it takes the place of S and products are made of fp32 numbers."""
    out, emulate = torch.empty(q.shape, dtype=q.dtype, device=q.device), emulated(q)
    if not is_there(out, p.seq_k):
        return out
    wide = emulate or weights == torch.float32
    s = torch.empty(p.batch * p.heads, p.seq_q, p.seq_k, dtype=torch.float32, device=q.device)
    soft = s if weights == torch.float32 else torch.empty(s.shape, dtype=weights, device=q.device)
    tiles_m, tiles_n = -(-p.seq_q // tile.block_m), -(-p.seq_k // tile.block_n)
    common = {"DIM": p.dim_qk, "BLOCK_D": p.block_qk, "M": tile.block_m, "N": tile.block_n, "WIDE": wide,
              "num_warps": tile.warps, "num_stages": tile.stages}  # fmt: skip
    sizes = (p.seq_q, p.seq_k, p.heads, p.group)
    score_kernel[(p.batch * p.heads * tiles_m * tiles_n,)](
        q, k, s, *sizes, 1 / math.sqrt(p.dim_qk), *strides(q), *strides(k), *masks, CAUSAL=p.causal, **common)  # fmt: skip
    softmax_kernel[(p.batch * p.heads * p.seq_q,)](s, soft, p.seq_k, EMULATE=emulate, BLOCK=row, num_warps=4)
    value_kernel[(p.batch * p.heads * tiles_m,)](
        soft, v, out, *sizes, *strides(v), *strides(out), EMULATE=emulate, **common)  # fmt: skip
    return out


def tile_for(p):
    """The tile of a problem: always the same."""
    return TILE


def cost(p, tile=None, weight_bytes=4):
    """Declared work: FLOPs of whole tiles, bytes with every tensor moved once a kernel, and what the kernels load and store."""
    tile = tile or TILE
    each, tiles_m, tiles_n = p.batch * p.heads, -(-p.seq_q // tile.block_m), -(-p.seq_k // tile.block_n)
    row, scores = p.dim_qk * p.itemsize, each * p.seq_q * p.seq_k
    own = row * p.batch * (2 * p.seq_q * p.heads + 2 * p.seq_k * p.kv_heads)  # q, k, v and out
    products = row * each * (p.seq_q * tiles_n + 2 * p.seq_k * tiles_m + p.seq_q)
    return Cost(flops=4 * each * tiles_m * tile.block_m * tiles_n * tile.block_n * p.block_qk, exps=2 * scores,
                bytes=own + scores * (8 + 2 * weight_bytes), l2_bytes=products + scores * (16 + 2 * weight_bytes))  # fmt: skip


if __name__ == "__main__":
    from tilefold.ladder.rungs import show

    show("naive")
