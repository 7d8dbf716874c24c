"""The Gini coefficient of every row of block scores, for a map from it to tau that is the caller's own."""

import triton
import triton.language as tl

from ...device.ordering import concentration, rows_of_program, score_codes, sort_descending

RUNTIME = [
    "rows",
    "heads",
    "q_blocks",
    "kv_blocks",
    "stride_b",
    "stride_h",
    "stride_q",
    "stride_sb",
    "stride_sh",
    "stride_sk",
]


@triton.jit(do_not_specialize=RUNTIME)
def gini(
    Scores, Sizes, Gini,
    rows, heads, q_blocks, kv_blocks,
    stride_b, stride_h, stride_q, stride_sb, stride_sh, stride_sk,
    ROWS: tl.constexpr, REGS: tl.constexpr, LANES: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Scores [B, H, Qb, KVb], Sizes int32 [B, H, KVb] or None -> Gini fp32 [B, H, Qb], contiguous.

    Grid (ceil(rows / ROWS),), rows = B * H * Qb; 2 ** LOG = REGS * LANES >= KVb columns."""
    column = tl.arange(0, REGS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    row = rows_of_program(ROWS)
    i_q = (row % q_blocks).to(tl.int64)
    i_h = (row // q_blocks % heads).to(tl.int64)
    i_b = (row // q_blocks // heads).to(tl.int64)
    p_row = i_b * stride_b + i_h * stride_h + i_q * stride_q
    inside = (column < kv_blocks) & (row < rows)
    code = score_codes(Scores, Sizes, p_row, i_b * stride_sb + i_h * stride_sh, column, inside, stride_sk, None)
    found = concentration(sort_descending(code, REGS, LANES, LOG), REGS, LANES)
    tl.store(Gini + row, found, mask=row < rows)
