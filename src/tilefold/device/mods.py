"""Score and mask modifications: one mechanism for softcap, ALiBi, bias, boolean masks, causal, window and the user's own.

A mod is a pair (function, args).  The function is a @triton.jit function of

    score     [M, N] fp32    q . k times the softmax scale, as changed by the mods before this one
    batch     int32          index of the sequence in the batch
    head      int32          query head
    q_index   [M, 1] int32   index of the query in its sequence, 0 <= q_index < seq_q
    kv_index  [1, N] int32   index of the key in its sequence, 0 <= kv_index < seq_k
    args      tuple          the mod's own args, then seq_q and seq_k of this sequence

A score mod returns the new score; a mask mod returns a boolean [M, N] (or a shape that broadcasts to it), true where the
query sees the key; the slope of a score mod, which the backward pass needs, takes the same arguments and returns the derivative
of the new score by the given one.  The indices are always inside the sequence, also for the padding lanes of a tile, so a mod
may load with them without a mask.

A mod has to work element by element: the backward pass also calls it on transposed tiles, score [N, M], q_index [1, M],
kv_index [N, 1].
"""

import triton
import triton.language as tl

from .ranges import CAUSAL, PREFIX, WINDOW


@triton.jit
def modify(score, place, kv_index, mods):
    """Apply the score mods in order; place = (batch, head, q_index, (seq_q, seq_k))."""
    batch, head, q_index, extent = place
    for i in tl.static_range(len(mods)):
        score = mods[i][0](score, batch, head, q_index, kv_index, mods[i][1] + extent)
    return score


@triton.jit
def modify_with_slope(score, place, kv_index, mods, slopes):
    """`modify`, and the derivative of its result by the score: the product of the slopes (one pair for each mod)."""
    batch, head, q_index, extent = place
    slope = tl.full(score.shape, 1.0, tl.float32)
    for i in tl.static_range(len(mods)):
        args = mods[i][1] + extent
        slope = slope * slopes[i][0](score, batch, head, q_index, kv_index, args)
        score = mods[i][0](score, batch, head, q_index, kv_index, args)
    return score, slope


@triton.jit
def mask(score, place, kv_index, mods):
    """Set the score to -inf wherever one of the mask mods is false."""
    batch, head, q_index, extent = place
    for i in tl.static_range(len(mods)):
        keep = mods[i][0](score, batch, head, q_index, kv_index, mods[i][1] + extent)
        tl.static_assert(keep.dtype == tl.int1, "a mask_mod has to return booleans (a comparison), not scores")
        score = tl.where(keep, score, float("-inf"))
    return score


@triton.jit
def mask_band(score, place, kv_index, band, KIND: tl.constexpr):
    """`mask` for an edge tile of a range: KIND of device.ranges, band = (left, right)."""
    if KIND == CAUSAL:
        score = mask(score, place, kv_index, ((causal, ()),))
    elif KIND == WINDOW:
        score = mask(score, place, kv_index, ((window, band),))
    elif KIND == PREFIX:
        score = mask(score, place, kv_index, ((prefix, (band[0],)),))
    return score


# ---------------------------------------------------------------- score mods


@triton.jit
def softcap(score, batch, head, q_index, kv_index, args):
    """cap * tanh(score / cap) (Gemma 2, arXiv:2408.00118, section 2), right to 3e-7; args = (cap,).

    tanh(x) / x is a quotient of polynomials in x^2, fitted on [0, 8] in relative error (1.9e-8; fp32 rounding dominates); past
    8 tanh is 1 to 2e-7.  5 to 7 % faster on an H200 than (1 - e) / (1 + e) with e = exp(-2x)."""
    cap = args[0]
    x = tl.maximum(score * (1.0 / cap), -8.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, 8.0, propagate_nan=tl.PropagateNan.ALL)
    u = x * x
    p = 1.0 + u * (0.129792333 + u * (0.00298587279 + u * (9.87875683e-6 + u * (-1.47044998e-8 + u * 2.35093126e-11))))
    q = 1.0 + u * (0.463125497 + u * (0.0240279697 + u * 0.000237204717))
    return cap * x * (p / q)


@triton.jit
def softcap_exact(score, batch, head, q_index, kv_index, args):
    """softcap to the last bits of fp32, for fp32 inputs; args = (cap,)."""
    cap = args[0]
    x = score / cap
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    # Near 0 the quotient cancels: the Taylor series is exact to fp32 there.
    u = x * x
    near = x * (1.0 + u * (-1.0 / 3.0 + u * (2.0 / 15.0 + u * (-17.0 / 315.0))))
    return cap * tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0.0, -far, far))


@triton.jit
def softcap_slope(score, batch, head, q_index, kv_index, args):
    """1 - tanh(score / cap)^2; args = (cap,)."""
    t = softcap(score, batch, head, q_index, kv_index, args) / args[0]
    return 1.0 - t * t


@triton.jit
def softcap_exact_slope(score, batch, head, q_index, kv_index, args):
    """softcap_slope to the last bits of fp32."""
    t = softcap_exact(score, batch, head, q_index, kv_index, args) / args[0]
    return 1.0 - t * t


@triton.jit
def alibi(score, batch, head, q_index, kv_index, args):
    """score - slope * |distance|, aligned to the bottom right (Press et al. 2022, arXiv:2108.12409);
    args = (slopes fp32, batch stride, head stride)."""
    slopes, stride_b, stride_h, seq_q, seq_k = args
    slope = tl.load(slopes + batch * stride_b + head * stride_h)
    return score - slope * tl.abs((q_index + (seq_k - seq_q)).to(tl.float32) - kv_index.to(tl.float32))


@triton.jit
def bias(score, batch, head, q_index, kv_index, args):
    """score + bias[batch, head, q, kv]; args = (bias, its four strides, 0 where it is broadcast)."""
    p = element_pointers(batch, head, q_index, kv_index, args)
    return score + tl.load(p).to(tl.float32)


@triton.jit
def near_bias(score, batch, head, q_index, kv_index, args):
    """`bias` of less than 2 ** 31 elements from a head's first to its last: half the registers for their places."""
    p = element_pointers(batch, head, q_index, kv_index, args, True)
    return score + tl.load(p).to(tl.float32)


@triton.jit
def held_bias(score, batch, head, q_index, kv_index, args):
    """score + a tile in registers, or a row of it; args = (tile,)."""
    return score + args[0]


@triton.jit
def unit_slope(score, batch, head, q_index, kv_index, args):
    """The slope of a mod that only adds: ALiBi, bias."""
    return tl.full(score.shape, 1.0, tl.float32)


# ---------------------------------------------------------------- mask mods


@triton.jit
def causal(score, batch, head, q_index, kv_index, args):
    """The key is not after the query, aligned to the bottom right; args = ()."""
    seq_q, seq_k = args
    return kv_index <= q_index + (seq_k - seq_q)


@triton.jit
def window(score, batch, head, q_index, kv_index, args):
    """left keys before to right keys after the query, both inclusive; args = (left, right)."""
    left, right, seq_q, seq_k = args
    position = q_index + (seq_k - seq_q)
    return (kv_index >= position - left) & (kv_index <= position + right)


@triton.jit
def prefix(score, batch, head, q_index, kv_index, args):
    """The key is one of the first n, or not after the query (prefix-LM: Raffel et al. 2020, arXiv:1910.10683, section 3.2.1);
    args = (n,)."""
    n, seq_q, seq_k = args
    return (kv_index < n) | (kv_index <= q_index + (seq_k - seq_q))


@triton.jit
def prefix_each(score, batch, head, q_index, kv_index, args):
    """`prefix` with a length for each sequence; args = (n int32 [batch],)."""
    n, seq_q, seq_k = args
    return prefix(score, batch, head, q_index, kv_index, (tl.load(n + batch), seq_q, seq_k))


@triton.jit
def keys(score, batch, head, q_index, kv_index, args):
    """The key is one of the sequence's first; args = (lengths int32 [batch],)."""
    return kv_index < tl.load(args[0] + batch)


@triton.jit
def between(score, batch, head, q_index, kv_index, args):
    """first <= key < last, by the query's position among the keys; no key for a query before the first one; args = (first, last,
    both int32 [seq_k])."""
    first, last, seq_q, seq_k = args
    position = q_index + (seq_k - seq_q)
    place = tl.maximum(position, 0)
    return (position >= 0) & (kv_index >= tl.load(first + place)) & (kv_index < tl.load(last + place))


@triton.jit
def keep(score, batch, head, q_index, kv_index, args):
    """mask[batch, head, q, kv] is true; args = (mask, its four strides, 0 where it is broadcast)."""
    return tl.load(element_pointers(batch, head, q_index, kv_index, args)) != 0


# Rules of rules: args are pairs (function, args), as `mask` takes them, then seq_q and seq_k.


@triton.jit
def every(score, batch, head, q_index, kv_index, args):
    """All of the rules hold."""
    found = holds(args[0], score, batch, head, q_index, kv_index, args)
    for i in tl.static_range(1, len(args) - 2):
        found = found & holds(args[i], score, batch, head, q_index, kv_index, args)
    return found


@triton.jit
def either(score, batch, head, q_index, kv_index, args):
    """One of the rules holds."""
    found = holds(args[0], score, batch, head, q_index, kv_index, args)
    for i in tl.static_range(1, len(args) - 2):
        found = found | holds(args[i], score, batch, head, q_index, kv_index, args)
    return found


@triton.jit
def inverse(score, batch, head, q_index, kv_index, args):
    """The rule does not hold."""
    return holds(args[0], score, batch, head, q_index, kv_index, args) == 0


@triton.jit
def holds(rule, score, batch, head, q_index, kv_index, args):
    """Whether one of the rules in args holds, whose last two are seq_q and seq_k."""
    extent = (args[len(args) - 2], args[len(args) - 1])
    found = rule[0](score, batch, head, q_index, kv_index, rule[1] + extent)
    tl.static_assert(found.dtype == tl.int1, "a mask_mod has to return booleans (a comparison), not scores")
    return found


@triton.jit
def element_pointers(batch, head, q_index, kv_index, args, NEAR: tl.constexpr = False):
    """Addresses of tensor[batch, head, q, kv] for a tensor given as (pointer, four strides, seq_q, seq_k).  NEAR: less than
    2 ** 31 elements from a head's first to its last."""
    pointer, stride_b, stride_h, stride_q, stride_k, seq_q, seq_k = args
    base = pointer + tl.cast(batch, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h
    if NEAR:
        return base + (q_index * stride_q + kv_index * stride_k)
    return base + q_index.to(tl.int64) * stride_q + kv_index.to(tl.int64) * stride_k


# ---------------------------------------------------------------- tables of blocks


@triton.jit
def listed(score, batch, head, q_index, kv_index, args):
    """The block of query and key is not of kind 0; args as of `kind_of_block`."""
    return kind_of_block(batch, head, q_index, kv_index, args) != 0


@triton.jit
def whole(score, batch, head, q_index, kv_index, args):
    """The block of query and key is of kind 2; args as of `kind_of_block`."""
    return kind_of_block(batch, head, q_index, kv_index, args) == 2


@triton.jit
def kind_of_block(batch, head, q_index, kv_index, args):
    """kinds[batch, head, q // block_q, kv // block_k]; args = (kinds, its four strides, 0 where it is broadcast, block_q,
    block_k)."""
    kinds, stride_b, stride_h, stride_q, stride_k, block_q, block_k, seq_q, seq_k = args
    rows = kinds + (tl.cast(batch, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h)
    rows += (q_index // block_q).to(tl.int64) * stride_q
    return tl.load(rows + kv_index // block_k * stride_k)


# The same, of blocks that have multiples of 128 queries and keys: no tile of a kernel has parts of two.
listed_tiles, whole_tiles = listed, whole
