"""The fold: take in KV tiles one after the other.  Sources, ranges, mods and state meet here; in fold_cache with few rows."""

import triton
import triton.language as tl

from .dropout import dropout_factor
from .mods import mask, mask_band, modify
from .ranges import WINDOW
from .state import LOG2E, state_step


@triton.jit
def shape_scores(s, kv_index, live, place, scale, score_mods, mask_mods, band, KIND: tl.constexpr, EDGE: tl.constexpr):
    """Products s [M, N] of one tile as the state takes them in: modified (then the scale is applied), masked, cut at the
    edges."""
    if len(score_mods) > 0:
        s = modify(s * scale, place, kv_index, score_mods)
    if EDGE:
        s = tl.where(live[None, :], s, float("-inf"))
        s = mask_band(s, place, kv_index, band, KIND)
    return mask(s, place, kv_index, mask_mods)


@triton.jit
def fold_tiles(
    q, state, lo, hi, place, scale, source, k_side, v_side, score_mods, mask_mods, band, LOCATE: tl.constexpr,
    FETCH: tl.constexpr, KIND: tl.constexpr, EDGE: tl.constexpr, EMULATE: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr, dropout,
):  # fmt: skip
    """Fold tiles lo..hi into state = (acc, m, l).  q [M, BLOCK_QK]; place = (batch, head, q_index [M, 1], (seq_q, seq_k)).

    EDGE tiles are cut at the sequence's end and by the band (KIND of device.ranges; band = (left, right)); interior tiles are
    not.  score_mods and mask_mods apply to both, and dropout of device.dropout, () for none."""
    acc, m, l = state
    for i in tl.range(lo, hi):
        rows, cols, live = LOCATE(i, source, BLOCK_N)
        # [N, BLOCK_QK]
        k = FETCH(k_side, rows, live, EDGE, EMULATE, BLOCK_N, DIM_QK, BLOCK_QK)
        # [M, N]
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        kv_index = (tl.minimum(cols, place[3][1] - 1) if EDGE else cols)[None, :]
        s = shape_scores(s, kv_index, live, place, scale, score_mods, mask_mods, band, KIND, EDGE)
        # [N, BLOCK_V]
        v = FETCH(v_side, rows, live, EDGE, EMULATE, BLOCK_N, DIM_V, BLOCK_V)
        unit = LOG2E if len(score_mods) > 0 else scale * LOG2E
        if len(dropout) > 0:
            acc, m, l = state_step(acc, m, l, s, v, unit, dropout_factor(place, kv_index, dropout))
        else:
            acc, m, l = state_step(acc, m, l, s, v, unit, None)
    return acc, m, l


@triton.jit
def fold_range(
    q, state, tiles, place, scale, source, k_side, v_side, score_mods, mask_mods, band, LOCATE: tl.constexpr,
    FETCH: tl.constexpr, KIND: tl.constexpr, EMULATE: tl.constexpr, BLOCK_N: tl.constexpr, DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr, dropout,
):  # fmt: skip
    """Edge, interior, edge: the tiles of a range as device.ranges gives it."""
    lo, full_lo, full_hi, hi = tiles
    if KIND == WINDOW:
        state = fold_tiles(q, state, lo, full_lo, place, scale, source, k_side, v_side, score_mods, mask_mods, band,
                           LOCATE, FETCH, KIND, True, EMULATE, BLOCK_N, DIM_QK, DIM_V, BLOCK_QK, BLOCK_V, dropout)  # fmt: skip
    state = fold_tiles(q, state, full_lo, full_hi, place, scale, source, k_side, v_side, score_mods, mask_mods, band,
                       LOCATE, FETCH, KIND, False, EMULATE, BLOCK_N, DIM_QK, DIM_V, BLOCK_QK, BLOCK_V, dropout)  # fmt: skip
    state = fold_tiles(q, state, full_hi, hi, place, scale, source, k_side, v_side, score_mods, mask_mods, band,
                       LOCATE, FETCH, KIND, True, EMULATE, BLOCK_N, DIM_QK, DIM_V, BLOCK_QK, BLOCK_V, dropout)  # fmt: skip
    return state
