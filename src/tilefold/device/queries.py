"""The rows of a KV head: all its query heads, for each query token; how they are loaded, and how their results are stored."""

import triton
import triton.language as tl

from .state import state_finish
from .tile import store_rows


@triton.jit
def rows_of_item(o_m, i_h, group):
    """Row r of a KV head is head r % group of token r // group -> (token, query head), both like o_m."""
    token = o_m // group
    return token, i_h * group + (o_m - token * group)


@triton.jit
def load_queries(Q, token, head, inside, stride_qm, stride_qh, first: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                 WIDE: tl.constexpr):  # fmt: skip
    """Columns first to first + DIM of rows, [M, BLOCK_D]; int32 offsets unless WIDE, for the reason that device.tile gives."""
    o_d = tl.arange(0, BLOCK_D)
    if WIDE:
        token = token.to(tl.int64)
        head = head.to(tl.int64)
    p = Q + first + ((token * stride_qm + head * stride_qh)[:, None] + o_d[None, :])
    return tl.load(p, mask=inside[:, None] & (o_d < DIM)[None, :], other=0.0)


@triton.jit
def store_results(Out, Lse, acc, m, l, first_row, rows, i_h, group, stride_om, stride_oh, stride_lh, EMULATE: tl.constexpr,
                  DIM_V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr):  # fmt: skip
    """Finish ROWS rows from first_row on, of which `rows` are some, and store them; Out and Lse begin at the sequence."""
    out, lse = state_finish(acc, m, l)
    o_r = tl.arange(0, ROWS)
    inside = o_r < rows
    token, head = rows_of_item(first_row + o_r, i_h, group)
    offsets = token.to(tl.int64) * stride_om + head.to(tl.int64) * stride_oh
    store_rows(Out, offsets, 1, inside, out, DIM_V, BLOCK_V, EMULATE)
    tl.store(Lse + head.to(tl.int64) * stride_lh + token, lse, mask=inside)
