"""Merge what attention_decode left in parts, where the last of its programs does not do it: the same sums, in the same order."""

import triton
import triton.language as tl

from ...device.grid import let_next_kernel_start, wait_for_previous_kernel
from ...device.partials import merge_parts
from ...device.state import state_finish
from ...device.tile import store_rows
from ...device.work import extent_of_sequence, slices, tiles_of_chunk, tiles_of_sequence, width_of_item

RUNTIME = ["batch", "max_q", "capacity", "more", "kv_heads", "group", "left", "right", "blocks", "splits", "least", "programs",
           "stride_lb", "stride_lh"]  # fmt: skip


@triton.jit
def tiles_before(
    i_b, lengths, batch, PAGE: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr
):
    """-> tiles, counted once a sequence, of sequences before i_b, of all, and of the longest."""
    if BLOCK_B == 1:
        total = tiles_of_sequence(lengths, 0, PAGE, KIND, BLOCK_N)
        return 0, total, total
    else:
        before = 0
        total = 0
        most = 0
        for first in range(0, batch, BLOCK_B):
            tiles = tiles_of_chunk(lengths, first, batch, PAGE, KIND, BLOCK_N, BLOCK_B)
            before += tl.sum(tl.where(first + tl.arange(0, BLOCK_B) < i_b, tiles, 0), 0)
            total += tl.sum(tiles, 0)
            most = tl.maximum(most, tl.max(tiles, 0))
        return before, total, most


@triton.jit(do_not_specialize=RUNTIME)
def decode_combine(
    Part, Stat, Out, Lse, CuQ, CuK, Lengths, Pads, batch, max_q, capacity, more, kv_heads, group, left, right, blocks, splits,
    least, programs, stride_lb, stride_lh, stride_ob, stride_om, stride_oh,
    PAGE: tl.constexpr, KIND: tl.constexpr, EMULATE: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
    DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Part, Stat, the index tensors and the numbers as attention_decode had them, `programs` of its grid.  One row a program,
    grid (BLOCK_M, row blocks * KV heads, batch); a row of an item that one program made alone is left as it is.
    EARLY: a dependent kernel of attention_decode, which has seen what came before complete: lengths may be read at once."""
    let_next_kernel_start(EARLY)
    row = tl.program_id(0)
    i_r = tl.program_id(1)
    i_b = tl.program_id(2)
    each = kv_heads * blocks
    lengths = (CuQ, CuK, Lengths, Pads, max_q, capacity, more, left, right)
    first_q, seq_q, _, _ = extent_of_sequence(lengths, i_b, PAGE)
    i_h = i_r // blocks
    first_row = (i_r - i_h * blocks) * BLOCK_M
    if first_row + row >= tl.minimum(seq_q, max_q) * group:
        wait_for_previous_kernel(EARLY)  # this kernel is through only when that one is
        return
    if EVEN:
        before, total, most = tiles_before(i_b, lengths, batch, PAGE, KIND, BLOCK_N, BLOCK_B)
        count = tiles_of_sequence(lengths, i_b, PAGE, KIND, BLOCK_N)
        length, span = slices(total, most, batch, each, programs, least)
        first = tl.where(span > 0, i_b * span, before) * each + i_r * width_of_item(count, span)
        origin = first // length
        parts = (first + count - 1) // length - origin + 1
    else:
        length = 0
        first = 0
        origin = (i_b * each + i_r) * splits
        parts = splits
    wait_for_previous_kernel(EARLY)
    if parts > 1:
        acc, m, l = merge_parts(Part + row * DIM_V, Stat + row, origin, length, first, parts, 1, EVEN, DIM_V, BLOCK_M, BLOCK_V, 1,
                                BLOCK_S)  # fmt: skip
        out, lse = state_finish(acc, m, l)
        token = (first_row + row) // group
        head = i_h * group + (first_row + row - token * group)
        b = tl.cast(i_b, tl.int64)
        o_1 = tl.arange(0, 1)
        p_out = Out + b * stride_ob + (first_q + token) * stride_om + head.to(tl.int64) * stride_oh
        store_rows(p_out, o_1.to(tl.int64), 0, o_1 == 0, out, DIM_V, BLOCK_V, EMULATE)
        tl.store(Lse + b * stride_lb + head.to(tl.int64) * stride_lh + first_q + token + o_1, lse)
