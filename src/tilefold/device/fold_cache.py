"""The fold over a KV cache whose rows are few: page numbers are asked a tile ahead, K may be two pieces, V a part of K.

Softmax, masks and modifications are those of device.fold; what differs is how a tile is brought.
"""

import triton
import triton.language as tl

from .cache import fetch_cache, fetch_pairs
from .fold import shape_scores
from .product import add_product
from .ranges import WINDOW
from .state import LOG2E, add_sums, partial_sums, state_step, state_weights, state_weights_slowly


@triton.jit
def fold_cache_tiles(
    q, rest, state, ahead, lo, hi, place, scale, source, k_side, rest_side, v_side, score_mods, mask_mods,
    band, NEXT: tl.constexpr, LOCATE: tl.constexpr, KIND: tl.constexpr, EDGE: tl.constexpr, EMULATE: tl.constexpr,
    QUANT: tl.constexpr, SHARED: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, DIM_K: tl.constexpr, DIM_REST:
    tl.constexpr,
    DIM_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, SLOWLY: tl.constexpr,
):  # fmt: skip
    """Fold tiles lo..hi into state = (acc, m, l) -> (state, ahead of tile hi); q [M, BLOCK_K], rest [M, BLOCK_REST] q's columns
    past DIM_K (not read if BLOCK_REST = 0).  SHARED: V is K's first DIM_K columns, and they are loaded once.  PAIRS: V is bytes
    in pairs; state = (acc of the even columns, m, l, acc of the odd ones).  SLOWLY: by state_weights_slowly, l [M, 4]."""
    if PAIRS:
        acc, m, l, odd = state
    else:
        acc, m, l = state
    for i in tl.range(lo, hi):
        rows, cols, live = LOCATE(i, ahead, source, BLOCK_N)
        ahead = NEXT(i + 1, source, BLOCK_N)
        # [N, BLOCK_K]
        k = fetch_cache(k_side, rows, live, q, EDGE, EMULATE, QUANT, DIM_K, BLOCK_K)
        # [M, N]
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if BLOCK_REST > 0:
            # [N, BLOCK_REST]
            r = fetch_cache(rest_side, rows, live, q, EDGE, EMULATE, QUANT, DIM_REST, BLOCK_REST)
            s = tl.dot(rest, tl.trans(r), s, input_precision="ieee")
        kv_index = (tl.minimum(cols, place[3][1] - 1) if EDGE else cols)[None, :]
        s = shape_scores(s, kv_index, live, place, scale, score_mods, mask_mods, band, KIND, EDGE)
        unit = LOG2E if len(score_mods) > 0 else scale * LOG2E
        if PAIRS:
            # [N, BLOCK_V / 2]
            v_even, v_odd = fetch_pairs(v_side, rows, live, q, EDGE, QUANT, DIM_V, BLOCK_V)
            if SLOWLY:
                p, alpha, m = state_weights_slowly(m, s, unit)
                l = add_sums(l, alpha[:, None], partial_sums(p))
            else:
                p, alpha, m, l = state_weights(m, l, s, unit)
            p = p.to(v_even.dtype)
            acc = add_product(p, v_even, acc * alpha[:, None])
            odd = add_product(p, v_odd, odd * alpha[:, None])
        else:
            # [N, BLOCK_V]
            if SHARED:
                v = k
            else:
                v = fetch_cache(v_side, rows, live, q, EDGE, EMULATE, QUANT, DIM_V, BLOCK_V)
            if SLOWLY:
                p, alpha, m = state_weights_slowly(m, s, unit)
                l = add_sums(l, alpha[:, None], partial_sums(p))
                acc = add_product(p.to(v.dtype), v, acc * alpha[:, None])
            else:
                acc, m, l = state_step(acc, m, l, s, v, unit, None)
    if PAIRS:
        return (acc, m, l, odd), ahead
    else:
        return (acc, m, l), ahead


@triton.jit
def fold_cache_range(
    q, rest, state, tiles, place, scale, source, k_side, rest_side, v_side, score_mods, mask_mods,
    band, NEXT: tl.constexpr, LOCATE: tl.constexpr, KIND: tl.constexpr, EMULATE: tl.constexpr, QUANT: tl.constexpr,
    SHARED: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, DIM_K: tl.constexpr, DIM_REST: tl.constexpr, DIM_V:
    tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, SLOWLY: tl.constexpr = False,
):  # fmt: skip
    """Edge, interior, edge: the tiles of a range as device.ranges gives it."""
    lo, full_lo, full_hi, hi = tiles
    ahead = NEXT(lo, source, BLOCK_N)
    if KIND == WINDOW:
        state, ahead = fold_cache_tiles(
            q, rest, state, ahead, lo, full_lo, place, scale, source, k_side, rest_side, v_side, score_mods, mask_mods, band,
            NEXT, LOCATE, KIND, True, EMULATE, QUANT, SHARED, PAIRS, BLOCK_N, DIM_K, DIM_REST,
            DIM_V, BLOCK_K, BLOCK_REST, BLOCK_V, SLOWLY)  # fmt: skip
    state, ahead = fold_cache_tiles(
        q, rest, state, ahead, full_lo, full_hi, place, scale, source, k_side, rest_side, v_side, score_mods, mask_mods, band,
        NEXT, LOCATE, KIND, False, EMULATE, QUANT, SHARED, PAIRS, BLOCK_N, DIM_K, DIM_REST,
        DIM_V, BLOCK_K, BLOCK_REST, BLOCK_V, SLOWLY)  # fmt: skip
    state, ahead = fold_cache_tiles(
        q, rest, state, ahead, full_hi, hi, place, scale, source, k_side, rest_side, v_side, score_mods, mask_mods, band,
        NEXT, LOCATE, KIND, True, EMULATE, QUANT, SHARED, PAIRS, BLOCK_N, DIM_K, DIM_REST,
        DIM_V, BLOCK_K, BLOCK_REST, BLOCK_V, SLOWLY)  # fmt: skip
    return state
