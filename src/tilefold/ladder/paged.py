"""Rung 3, paged: keys and values in blocks that lie anywhere, found through a table; no score ever reaches memory.

    logical keys of a sequence   0 .. 15 | 16 .. 31 | 32 .. 40            (the last block is partly used)
    block table                     7    |    2     |    5
    physical blocks              ... 2: keys 16 .. 31 ... 5: keys 32 .. 40 ... 7: keys 0 .. 15 ...

A contiguous cache reserves the longest length for every sequence; blocks are given out as a sequence grows, so less than one
block of each is wasted.  The kernel goes over the keys twice, for the largest score of a row and then for its sum and its
values: computing scores again costs half as many FLOPs more, and spares writing and reading them.  What it teaches: one level of
indirection, and that arithmetic is cheaper than memory.

    python -m tilefold.ladder.paged
"""

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl

from tilefold.device.product import add_product
from tilefold.device.tile import narrow, widen
from tilefold.errors import DtypeError
from tilefold.ladder.cache import PagedCache, paged_cache
from tilefold.ladder.inputs import Tile, checked, emulated, fitted, is_there, keys_read, strides
from tilefold.plan.cost import Cost

TILE = Tile(128, 64, 8, 2)
TILES = (Tile(64, 32, 4, 2), Tile(64, 64, 4, 2), TILE, Tile(128, 64, 4, 2), Tile(128, 128, 8, 2))


@triton.jit
def scores(q, K, block, cols, rows, seq_q, length, page, scale, stride_kp, stride_kn, CAUSAL: tl.constexpr,
           EMULATE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Scores [M, N] of the keys cols, which are rows cols % page of the blocks `block` [N]; -inf where masked."""
    o_d = tl.arange(0, BLOCK_D)
    p_k = K + (block * stride_kp + cols % page * stride_kn)[:, None] + o_d[None, :]
    k = widen(tl.load(p_k, mask=(cols < length)[:, None] & (o_d < DIM)[None, :], other=0.0), EMULATE)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    alive = (cols < length)[None, :]
    if CAUSAL:
        alive = alive & (cols[None, :] <= rows[:, None] + (length - seq_q))
    return tl.where(alive, s, float("-inf"))


@triton.jit
def paged_kernel(
    Q, K, V, Out, Table, Lengths, seq_q, heads, group, page, scale, stride_qb, stride_qm, stride_qh, stride_kp, stride_kn,
    stride_kh, stride_vp, stride_vn, stride_vh, stride_ob, stride_om, stride_oh, stride_tb,
    CAUSAL: tl.constexpr, EMULATE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M rows of O.  Key j of sequence b is row j % page of block Table[b, j // page]; scale: of scores in base 2."""
    pid = tl.program_id(0).to(tl.int64)
    i_bh, i_m = pid // tl.cdiv(seq_q, M), pid % tl.cdiv(seq_q, M)
    i_b, i_h = i_bh // heads, i_bh % heads
    rows, o_n, o_d = i_m * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_D)
    m_q = (rows < seq_q)[:, None] & (o_d < DIM)[None, :]
    p_q = Q + i_b * stride_qb + i_h * stride_qh + rows[:, None] * stride_qm + o_d[None, :]
    q = widen(tl.load(p_q, mask=m_q, other=0.0), EMULATE)
    K += i_h // group * stride_kh
    V += i_h // group * stride_vh
    Table += i_b * stride_tb
    length = tl.load(Lengths + i_b)
    end = tl.minimum(length, (i_m * M).to(tl.int32) + M + length - seq_q) if CAUSAL else length
    top = tl.full([M], float("-inf"), tl.float32)
    for start in range(0, end, N):  # once for the largest score of each row
        cols = start + o_n
        block = tl.load(Table + cols // page, mask=cols < length, other=0).to(tl.int64)
        s = scores(
            q, K, block, cols, rows, seq_q, length, page, scale, stride_kp, stride_kn, CAUSAL, EMULATE, DIM, BLOCK_D
        )
        top = tl.maximum(top, tl.max(s, 1))
    top = tl.where(top == float("-inf"), 0.0, top)
    total, acc = tl.zeros([M], tl.float32), tl.zeros([M, BLOCK_D], tl.float32)
    for start in range(0, end, N):  # and once more for sums and values
        cols = start + o_n
        block = tl.load(Table + cols // page, mask=cols < length, other=0).to(tl.int64)
        s = scores(
            q, K, block, cols, rows, seq_q, length, page, scale, stride_kp, stride_kn, CAUSAL, EMULATE, DIM, BLOCK_D
        )
        weights = tl.exp2(s - top[:, None])
        p_v = V + (block * stride_vp + cols % page * stride_vn)[:, None] + o_d[None, :]
        v = widen(tl.load(p_v, mask=(cols < length)[:, None] & (o_d < DIM)[None, :], other=0.0), EMULATE)
        total += tl.sum(weights, 1)
        acc = add_product(weights.to(v.dtype), v, acc)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = Out + i_b * stride_ob + i_h * stride_oh + rows[:, None] * stride_om + o_d[None, :]
    tl.store(place, narrow(acc, Out.dtype.element_ty, EMULATE), mask=m_q)


def attention(q, cache, causal=False, *, tile=None):
    """q [batch, seq_q, heads, dim] over a PagedCache; causal: query i of a sequence sits at key i + its length - seq_q."""
    if not isinstance(cache, PagedCache):
        raise DtypeError(f"cache must be a ladder.PagedCache, got {type(cache).__name__}; ladder.paged_cache makes one")
    k, v = (t[:1].expand(len(cache.table), *t.shape[1:]) for t in (cache.k, cache.v))  # shapes alone: nothing is copied
    p = checked(q, k, v, causal, tile, lengths=cache.lengths)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not is_there(out, cache.capacity):
        return out
    tile = tile or tile_for(replace(p, seq_k=cache.capacity))
    paged_kernel[(p.batch * p.heads * -(-p.seq_q // tile.block_m),)](
        q, cache.k, cache.v, out, cache.table, cache.lengths, p.seq_q, p.heads, p.group, cache.k.shape[1],
        math.log2(math.e) / math.sqrt(p.dim_qk), *strides(q), *cache.k.stride()[:3], *cache.v.stride()[:3], *strides(out),
        cache.table.stride(0), CAUSAL=p.causal, EMULATE=emulated(q), DIM=p.dim_qk, BLOCK_D=p.block_qk, M=tile.block_m,
        N=tile.block_n, num_warps=tile.warps, num_stages=tile.stages)  # fmt: skip
    return out


def prepare(q, k, v, causal, tile=None):
    """The call over k and v copied into blocks in random order, as the tables measure it."""
    cache = paged_cache(k, v)
    return lambda: attention(q, cache, causal, tile=tile)


def tile_for(p):
    """The tile of a problem."""
    return fitted(TILE, p)


def cost(p, tile=None):
    """Declared work: three products of whole tiles; K read twice and V once, and for each key its entry of the table."""
    tile = tile or tile_for(p)
    each, row = p.batch * p.heads, p.dim_qk * p.itemsize
    keys, tiles = keys_read(p, tile.block_m, tile.block_n)
    tiles_m = -(-p.seq_q // tile.block_m)
    drawn = 2 * p.seq_q * row + 3 * keys * row + 2 * keys * 4 + tiles_m * 4
    own = row * p.batch * (2 * p.seq_q * p.heads + 2 * p.seq_k * p.kv_heads)
    return Cost(flops=6 * each * tiles * tile.block_m * tile.block_n * p.block_qk, bytes=own,
                exps=each * tiles * tile.block_m * tile.block_n, l2_bytes=each * drawn)  # fmt: skip


if __name__ == "__main__":
    from tilefold.ladder.rungs import show

    show("paged")
