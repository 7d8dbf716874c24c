"""The state of the fold: (acc, m, l), and the softmax update of all portable kernels: state_weights, or state_weights_slowly.

For one row and the keys seen so far, with scores s_j in base 2 (natural scores times log2 e):

    m   = max_j s_j                    [M]     -inf if no live key was seen
    l   = sum_j 2^(s_j - m)            [M]
    acc = sum_j 2^(s_j - m) v_j        [M, D]

`state_init` is the identity of `state_merge`, which is associative and commutative, and `state_step` equals merging with
the state of one tile.  Online softmax: Milakov and Gimelshein 2018 (arXiv:1805.02867); the order of operations is
FlashAttention-2's (Dao 2023, arXiv:2307.08691, section 3.1).
"""

import triton
import triton.language as tl

from .product import add_product

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GROWTH = tl.constexpr(8.0)  # by how much (base 2) a row's maximum may pass m in next_maximum


@triton.jit
def state_init(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The identity: nothing seen yet."""
    acc = tl.zeros([ROWS, DIM], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    return acc, m, l


@triton.jit
def state_init_sink(sink, ROWS: tl.constexpr, DIM: tl.constexpr):
    """A fold that has already seen one key with score `sink` (scalar, natural units) and value 0: an attention sink."""
    acc = tl.zeros([ROWS, DIM], tl.float32)
    m = tl.zeros([ROWS], tl.float32) + sink * LOG2E
    l = tl.where(m == float("-inf"), 0.0, 1.0)
    return acc, m, l


@triton.jit
def state_anchor(m):
    """What the exponent subtracts: m, or 0 for a row without a live key, so that -inf - -inf never happens."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def state_weights(m, l, s, scale):
    """The softmax update for one tile of scores s [M, N] (-inf where masked); scale > 0 turns s into base 2.
    -> weights p [M, N], alpha [M] by which what was summed before shrinks, m and l with the tile in them."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    anchor = state_anchor(m_new)
    alpha = tl.exp2(m - anchor)
    # [M, N]
    p = tl.exp2(s * scale - anchor[:, None])
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def next_maximum(m, top):
    """What weights are relative to after a tile whose scores have the maxima top (base 2): m until a row's have grown by GROWTH,
    then a whole number.  So factors are powers of two, and multiply without rounding."""
    return tl.where(top - m > GROWTH, tl.ceil(top), m)


@triton.jit
def partial_sums(p):
    """p [M, N], N to 64 -> [M, 4]: of each thread of a quad, of the columns that it has in an accumulator.  Two numbers are
    added at a time, so that one order is kept in any layout."""
    M: tl.constexpr = p.shape[0]
    GROUPS: tl.constexpr = p.shape[1] // 8
    x = tl.sum(tl.reshape(p, (M, GROUPS, 4, 2)), 3)
    if GROUPS > 4:
        x = tl.sum(tl.reshape(x, (M, 2, 4, 4)), 1)
    if GROUPS > 2:
        x = tl.sum(tl.reshape(x, (M, 2, 2, 4)), 1)
    return tl.sum(x, 1)


@triton.jit
def add_sums(l, alpha, sums):
    """l [M, 4] times alpha [M, 1], and a tile's sums: in one rounding, which every kernel has."""
    return tl.fma(l, tl.broadcast_to(alpha, l.shape), sums)


@triton.jit
def sum_of_quad(l):
    """l [M, 4] -> [M], in one order whatever the layout."""
    return tl.sum(tl.sum(tl.reshape(l, (l.shape[0], 2, 2)), 2), 1)


@triton.jit
def state_weights_slowly(m, s, scale):
    """state_weights by next_maximum, without the sums (see add_sums): most factors alpha are 1, and weights reach 2^GROWTH."""
    m_new = next_maximum(m, tl.max(s, 1) * scale)
    anchor = state_anchor(m_new)
    alpha = tl.exp2(m - anchor)
    # [M, N]
    p = tl.exp2(s * scale - anchor[:, None])
    return p, alpha, m_new


@triton.jit
def state_step(acc, m, l, s, v, scale, factor):
    """Fold one tile: scores s [M, N] (-inf where masked) and values v [N, D]; scale > 0 turns s into base 2.
    factor [M, N], or None, is upon what probabilities weigh values with, not upon their sum."""
    p, alpha, m, l = state_weights(m, l, s, scale)
    if factor is not None:
        p = p * factor
    acc = add_product(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, m, l


@triton.jit
def state_merge(acc_a, m_a, l_a, acc_b, m_b, l_b):
    """The state of the union of two disjoint key sets."""
    m = tl.maximum(m_a, m_b)
    anchor = state_anchor(m)
    a = tl.exp2(m_a - anchor)
    b = tl.exp2(m_b - anchor)
    return acc_a * a[:, None] + acc_b * b[:, None], m, l_a * a + l_b * b


@triton.jit
def merge_next(acc, m, l, acc_b, m_b, l_b):
    """The state of all chunks up to one more: state_merge with its roundings written down, so that each kernel has the same."""
    top = tl.maximum(m, m_b)
    anchor = state_anchor(top)
    a = tl.exp2(m - anchor)
    b = tl.exp2(m_b - anchor)
    return tl.fma(acc, tl.broadcast_to(a[:, None], acc.shape), acc_b * b[:, None]), top, tl.fma(l, a, l_b * b)


@triton.jit
def state_finish(acc, m, l):
    """(acc, m, l) -> out [M, D] fp32, lse [M] in natural log.  No live key: out 0, lse -inf."""
    # l is 0 only if no key was live (the largest one adds 2^0); a NaN score makes l NaN and must stay visible.
    l = tl.where(l == 0.0, 1.0, l)
    return acc / l[:, None], (m + tl.log2(l)) * LN2
