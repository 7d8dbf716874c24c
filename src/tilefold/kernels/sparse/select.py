"""Block scores to lists of blocks in one launch: Gini, tau, which blocks are kept, and their numbers in ascending order.

Only the Gini coefficient needs a sort.  Where there is none the score of the last block that is kept is searched bit by bit."""

import triton
import triton.language as tl

from ...device.ordering import (
    FIRST_SCORE,
    any_row,
    concentration,
    count_bound,
    earlier_columns,
    load_flat,
    mass_bound,
    order_sum,
    positions,
    quanta,
    row_max,
    row_sum,
    rows_of_program,
    score_codes,
    sort_descending,
)
from ...device.settings import setting, whole_setting

RUNTIME = ["scale", "rows", "heads", "q_blocks", "kv_blocks", "capacity", "seq_q", "shift", "log_q", "log_k", "force_first",
           "reach", "stride_b", "stride_h", "stride_q", "stride_fb", "stride_fh", "stride_fq", "stride_fk", "stride_sb",
           "stride_sh", "stride_sk"]  # fmt: skip


@triton.jit
def forced_blocks(
    Force, p_force, stride_fk, i_q, column, inside, capacity, seq_q, shift, log_q, log_k, force_first, reach
):
    """Blocks kept whatever their score: the first ones, those within `reach` of the query block's own, those that Force names."""
    low = ((i_q << log_q) + shift) >> log_k  # shifts round down, below 0 too
    high = (tl.minimum((i_q + 1) << log_q, seq_q) - 1 + shift) >> log_k
    forced = (column < force_first) | ((column >= low - reach) & (column <= high + reach))
    if Force is not None:
        forced |= load_flat(Force, p_force + column.to(tl.int64) * stride_fk, inside) != 0
        forced &= inside
        forced &= earlier_columns(forced.to(tl.int32)) < capacity  # there may be more of them than room
    return forced & inside


@triton.jit
def blocks_of_mass(code, mass, goal):
    """int32 a row: of the blocks with a score above 0, highest first, how many have less than `goal` before them.

    mass: int32 of each block, equal for equal codes."""
    last = mass_bound(code, mass, goal)
    above = code > tl.maximum(last, FIRST_SCORE)
    each = row_max(tl.where(code == last, mass, 0))
    left = goal - row_sum(tl.where(above, mass, 0))
    return row_sum(above.to(tl.int32)) + tl.where(each > 0, (left - 1) // tl.maximum(each, 1) + 1, 0)


@triton.jit
def ranked_blocks_of_mass(ranked, mass, goal, LOG: tl.constexpr):
    """The same of sorted codes [ROWS, LANES, REGS]."""
    before = order_sum(mass, LOG) - mass
    return row_sum(((ranked > FIRST_SCORE) & (before < goal)).to(tl.int32))


@triton.jit
def ranked_bound(ranked, take, REGS: tl.constexpr, LANES: tl.constexpr):
    """The code of sorted codes' place `take`, from 1; above all codes for 0."""
    last = row_max(tl.where(positions(REGS, LANES) == take - 1, ranked, 0))
    return tl.where(take > 0, last, 0x7FFFFFFF)


@triton.jit
def highest(code, take, last):
    """bool [ROWS, REGS, LANES]: the `take` blocks of highest code, of which `last` is the lowest; of equal codes the first."""
    last = tl.maximum(last, 1)
    counts = row_sum((code > last).to(tl.int32) + ((code == last).to(tl.int32) << 16))  # at most 4096 each
    ties = take - (counts & 0xFFFF)
    if any_row(counts >> 16 > ties):
        tie = code == last
        code = tl.where(tie & (earlier_columns(tie.to(tl.int32)) >= ties), 0, code)
    return code >= last


@triton.jit(do_not_specialize=RUNTIME)
def select(
    Scores, Sizes, Force, Index, Count, Gini, Tau, Mass, amount, least, most,
    scale, rows, heads, q_blocks, kv_blocks, capacity, seq_q, shift, log_q, log_k, force_first, reach,
    stride_b, stride_h, stride_q, stride_fb, stride_fh, stride_fq, stride_fk, stride_sb, stride_sh, stride_sk,
    METHOD: tl.constexpr, FORCED: tl.constexpr, RANKED: tl.constexpr,
    ROWS: tl.constexpr, REGS: tl.constexpr, LANES: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Scores [B, H, Qb, KVb], Sizes int32 [B, H, KVb] or None, Force bool [B, H, Qb, KVb] or None -> Index int32 [B, H, Qb,
    capacity], Count int32, Gini (or None, unless METHOD is "gini"), Tau (unless METHOD is "count"), Mass fp32 [B, H, Qb], all
    contiguous.

    amount: the settings of METHOD: "gini" (tau_min, tau_max), "mass" (tau,), "count" (blocks,); least, most: blocks a list;
    each as `setting` has it.  scale: None, or Scores are logits, see `score_codes`.  shift: seq_k - seq_q tokens; log_q, log_k:
    of the blocks' tokens; reach: blocks, very negative for none.

    RANKED: sorted rows, without forced blocks, are cut by their order, which is faster within a warp; others are searched.
    Grid (ceil(rows / ROWS),), rows = B * H * Qb; 2 ** LOG = REGS * LANES >= KVb columns.  Sums that decide are sums
    of integers.  What is listed past a row's count are the blocks that are not kept."""
    column = tl.arange(0, REGS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    row = rows_of_program(ROWS)
    live = row < rows
    i_q = row % q_blocks
    i_h = (row // q_blocks % heads).to(tl.int64)
    i_b = (row // q_blocks // heads).to(tl.int64)
    inside = (column < kv_blocks) & live
    p_row = i_b * stride_b + i_h * stride_h + i_q.to(tl.int64) * stride_q
    code = score_codes(Scores, Sizes, p_row, i_b * stride_sb + i_h * stride_sh, column, inside, stride_sk, scale)
    if FORCED:
        p_force = i_b * stride_fb + i_h * stride_fh + i_q.to(tl.int64) * stride_fq
        forced = forced_blocks(Force, p_force, stride_fk, i_q, column, inside, capacity, seq_q, shift, log_q, log_k,
                               force_first, reach)  # fmt: skip
        held = row_sum(forced.to(tl.int32))
        loose = tl.where(forced, 0, code)  # of the blocks that may be left out
    else:
        held = 0
        loose = code
    if Gini is not None:
        ranked = sort_descending(code, REGS, LANES, LOG)
        gini = concentration(ranked, REGS, LANES)
        tl.store(Gini + row, gini, mask=live)
    mass = quanta(ranked if RANKED else code)
    whole = row_sum(mass)
    if METHOD == "count":
        blocks = whole_setting(amount[0], i_b, i_h, i_q, live, kv_blocks)
        scored = row_sum((loose >= FIRST_SCORE).to(tl.int32))
        wanted = tl.minimum(blocks, scored + held)
    else:
        tau = setting(amount[0], i_b, i_h, i_q, live)
        if METHOD == "gini":  # written so that equal scores ask for exactly tau_max
            high = setting(amount[1], i_b, i_h, i_q, live)
            tau = high - (high - tau) * gini
        tau = tl.where(tau < 1.0, tl.maximum(tau, 0.0), 1.0)  # NaN asks for everything
        tl.store(Tau + row, tau, mask=live)
        goal = ((tau * 2147483648.0).to(tl.int64) * whole + 0x7FFFFFFF) >> 31  # of integers: exact, and rounded up
        goal = tl.where(tau < 1.0, goal.to(tl.int32), 0x7FFFFFFF)
        if FORCED:
            goal -= row_sum(tl.where(forced, mass, 0))
        if RANKED:
            wanted = ranked_blocks_of_mass(ranked, mass, goal, LOG)
        else:
            wanted = held + blocks_of_mass(loose, mass, goal)
    count = tl.maximum(wanted, whole_setting(least, i_b, i_h, i_q, live, kv_blocks))
    count = tl.minimum(count, whole_setting(most, i_b, i_h, i_q, live, kv_blocks))
    count = tl.minimum(tl.maximum(count, held), capacity)
    take = tl.maximum(count - held, 0)
    if RANKED:
        last = ranked_bound(ranked, take, REGS, LANES)
        share = row_sum(tl.where(positions(REGS, LANES) < take, mass, 0))
    else:
        last = count_bound(loose, take)
    kept = highest(loose, take, last)
    if FORCED:
        kept |= forced
    if not RANKED:
        share = row_sum(tl.where(kept, mass, 0))
    share = share.to(tl.float32) / tl.maximum(whole, 1).to(tl.float32)
    tl.store(Mass + row, tl.where(whole > 0, share, 1.0), mask=live)
    earlier = earlier_columns(kept.to(tl.int32))
    place = tl.where(kept, earlier, count + column - earlier)  # outside of the row: the column's own number
    N: tl.constexpr = ROWS * REGS * LANES
    entry = (row.to(tl.int64) * capacity + place).reshape(N)  # flat, as they lie in the lanes
    listed = ((place < capacity) & live).reshape(N)
    tl.store(Index + entry, (column + tl.zeros(place.shape, tl.int32)).reshape(N), mask=listed)
    tl.store(Count + row, count, mask=live)
