"""Gradients of dense attention on sm_90, dq by additions in memory, in an order that changes from run to run or in one (ORDERED).

A program owns 128 keys, 64 for each of two consumers, whose dk and dv stay in registers, and walks over the query tiles that see
them.  Each consumer makes S, dP, dv and dk of its own keys; dS of both goes through shared memory, and each makes one half of the
tile's share of dq over all 128 keys, which is added to fp32 sums in memory (`dq_sums`).

Against `attention_backward`, which keeps dS: each tile of q and dout comes once for 128 keys, and nothing goes to memory and back
but the sums, which stay in L2 while the programs of a few heads run (heads_at_once).  For the gradient of a bias dS goes there,
too (`store_ds`), and does not come back.

ORDERED: the blocks of keys add to a query tile in ascending order, which is that of their programs' numbers.  So whoever a
program waits for was launched before it, and runs: nothing can lock up.  A warp or two (`add`, `DqSums`) issue the additions.

Source: the division of work is FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608; https://github.com/Dao-AILab/flash-attention).
"""

from .backward_config import UNIT
from .backward_epilogue import Gradient
from .backward_mask import BackwardMask, Lengths
from .backward_mods import BackwardMods, make_mod_tiles
from .backward_pipeline import first_stage, next_stage
from .dq_sums import make_dq_sums
from .gluon import fence_async_shared, gl, jit, mbarrier, narrowed, pair_barrier, wgmma_wait
from .group_sums import make_group_sums
from .recompute import Recompute
from .reduce_pipeline import ReduceConfig, make_reduce_pipeline, wait_sums, zero_sums
from .reduce_scheduler import BlockScheduler, own_keys
from .tails import Tails

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_units", "kv_units", "members", "q_tiles", "blocks", "left", "right",
           "heads_at_once", "no_tile", "stride_xb", "stride_xn", "stride_xh", "stride_yb", "stride_yn", "stride_yh", "cap",
           "slope_b", "slope_h", "mask_b", "mask_h", "lists_b", "lists_h", "sequences"]  # fmt: skip


# ---------------------------------------------------------------- the partitions


@jit
def produce(scheduler, pipe, mods, group_sums):
    """Load K and V, then q, dout, statistics and the mask of every query tile; then hand dk and dv on."""
    block = scheduler.block()
    pipe.load_keys(block)
    stage = first_stage(1)
    visit = scheduler.first_visit(block)
    for _ in range(block.visits):
        pipe.load_queries(stage, block, block.query_head + visit.head, visit.tile, visit.number, mods)
        stage = next_stage(stage, pipe.config.SLOTS)
        visit = scheduler.next_visit(visit, block)
    group_sums.publish(block)


@jit
def add(ADDER: gl.constexpr, scheduler, sums):
    """Have this adder's query tiles' dq added to memory, in the order in which the consumers make them."""
    block = scheduler.block()
    visit = scheduler.first_visit(block)
    for i in range(block.visits):
        if i % sums.ADDERS == ADDER:
            sums.add_parts(visit.number, i, scheduler.blocks_before(visit, block))
        visit = scheduler.next_visit(visit, block)


@jit
def store_ds(scheduler, pipe):
    """Have dS of every visit stored."""
    block = scheduler.block()
    visit = scheduler.first_visit(block)
    for i in range(block.visits):
        pipe.stored.store(block, visit, i)
        visit = scheduler.next_visit(visit, block)


@jit
def step(dk, dv, own, operands, block, visit, pipe, mods, recompute, sums, i, CID: gl.constexpr):
    """The i-th visit, of a query tile of a head, and this consumer's own 64 keys; operands: K and V of these.
    What is in flight behind each line:

        issue S, dP; wait for S; P                 dP
        wait for dP; dS; publish dS; issue dv      dv
        meet the other consumer; issue dq          dv  dq
        wait for dv; issue dk                      dq  dk
        wait for dq, hand it over                  dk
        wait for dk: the slot is free

    Where dS is stored, the store of two visits before has read the buffer that dS is published in.

    LATE: dP is issued behind P, since changes of scores have no registers beside it.  BESIDE: lse is read while S is made, which
    is 2 to 7 % faster; at D=80 and 96 it is slower, and at D=64 or beside changed scores there are no registers.  SOON: P is
    rounded for dv before dP is there; at D=64 behind dS, where dP's registers are free, unless P holds a derivative or functions
    mask alone.  dk and dv have one part or two; S, dP and the products of dk and dv have as many wgmma groups.

    Source: the order of the products is FlashAttention-4's (https://github.com/Dao-AILab/flash-attention, flash_bwd_sm90.py)."""
    config = pipe.config
    PARTS: gl.constexpr = config.PARTS
    tile = visit.tile
    stage = pipe.stage(i)
    ds = pipe.ds.index(i & 1)
    batch, head = block.batch, block.query_head + visit.head
    slope = mods.slope(batch, head)
    s_flying = pipe.issue_scores(operands[0], stage)
    statistics = recompute.row(stage.slot)
    BESIDE: gl.constexpr = config.D == 128 and not mods.SCORES
    if BESIDE:
        lse = recompute.lse(statistics)
    if config.LATE:
        s = wgmma_wait(0, deps=(s_flying,))
    else:
        dp_flying = pipe.issue_dp(operands[1], stage)
        s = wgmma_wait(PARTS, deps=(s_flying,))
    if mods.ON:
        s, steep = mods.apply(
            s, slope, batch, head, tile * config.QUERIES, own.tile * UNIT, own.lengths, visit.partial, stage.slot, CID
        )
    s = own.cut(s, tile)
    if not BESIDE:
        lse = recompute.lse(statistics)
    p = recompute.probabilities(s, lse)
    SOON: gl.constexpr = config.D != 64 or mods.STEEP or (config.LATE and not mods.SCORES)
    if SOON:
        p16 = narrowed(p, config.DTYPE)
    if mods.STEEP:
        p = p * steep
    if config.LATE:
        dp_flying = pipe.issue_dp(operands[1], stage)
    if SOON:
        p16 = gl.convert_layout(p16, config.LEFT)
    dp = wgmma_wait(0, deps=(dp_flying,))
    ds16 = narrowed(recompute.gradient(p, dp, statistics), config.DTYPE)
    if not SOON:
        p16 = gl.convert_layout(narrowed(p, config.DTYPE), config.LEFT)
    if pipe.stored is not None:
        pipe.stored.await_room(i)
    ds.slice(CID * UNIT, UNIT, dim=0).store(ds16)
    dv_flying = pipe.issue_sums(p16, pipe.dout(stage), dv)
    fence_async_shared()
    if pipe.stored is not None:
        pipe.stored.publish(i)
    left = gl.convert_layout(ds16, config.LEFT)
    pair_barrier(CID, i)
    dq_flying = pipe.issue_dq(ds, CID)
    dv, p16 = wait_sums(1, dv_flying, p16)
    dk_flying = pipe.issue_sums(left, pipe.q(stage), dk)
    dq = wgmma_wait(PARTS, deps=(dq_flying,))
    sums.hand_over(dq, i, CID)
    dk, left = wait_sums(0, dk_flying, left)
    pipe.release(stage)
    return dk, dv


@jit
def consume(CID: gl.constexpr, scheduler, pipe, mods, sums, group_sums, dk_out, dv_out):
    """dk and dv of 64 keys, over the program's query heads, and half of every query tile's dq."""
    config = pipe.config
    block = scheduler.block()
    own = own_keys(block.tile * 2 + CID, block, scheduler)
    dk = zero_sums(config)
    dv = zero_sums(config)
    mbarrier.wait(pipe.kv_full.index(0), 0)
    operands = (pipe.own_rows(pipe.k(), CID, config.HOLD_K), pipe.own_rows(pipe.v(), CID, config.HOLD_V))
    visit = scheduler.first_visit(block)
    for i in range(block.visits):
        recompute = Recompute(pipe.statistics, mods.to_base_2(), config.SCORES, config.QUERIES)
        dk, dv = step(dk, dv, own, operands, block, visit, pipe, mods, recompute, sums, i, CID)
        visit = scheduler.next_visit(visit, block)
    n = block.key_row(own.tile.to(gl.int64), UNIT)
    rows = own.lengths.seq_k - own.tile * UNIT
    group_sums.await_turn(block, CID)
    for part in gl.static_range(config.PARTS):
        dv_part = group_sums.add(0, dv[part], block, CID, part * config.WIDE)
        dk_part = group_sums.add(1, dk[part], block, CID, part * config.WIDE)
        if group_sums.is_last(block):
            dv_out.store(dv_part, block, n, rows, part * config.WIDE)
            dk_out.store(dk_part * mods.scale, block, n, rows, part * config.WIDE)
    group_sums.arrive(CID)


@jit(do_not_specialize=RUNTIME)
def attention_backward_reduce(
    q_desc, do_desc, k_desc, v_desc, stat_desc, sum_desc, Progress, KeySums, DK, DV,
    scale, seq_q, seq_k, heads, group, q_units, kv_units, members, q_tiles, blocks, left, right, heads_at_once, no_tile,
    stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh,
    cap, Slopes, slope_b, slope_h, score_mods, score_grads, mask_desc, mask_b, mask_h, mask_mods,
    Lists, lists_b, lists_h, Blocks, tail_desc, sequences, stored_desc,
    SOFTCAP: gl.constexpr, MASK: gl.constexpr, KIND: gl.constexpr, D: gl.constexpr, COLUMNS_QK: gl.constexpr,
    COLUMNS_V: gl.constexpr, QUERIES: gl.constexpr, SLOTS: gl.constexpr,
    ORDERED: gl.constexpr, LATE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q_desc, do_desc [B, H, Sq, D], boxes [1, 1, QUERIES, 64]; k_desc, v_desc [B, H/group, Sk, D], boxes [1, 1, 128, 64].  D,
    the width of products, is 64 with QUERIES 128, or 80, 96 or 128 with QUERIES 64; COLUMNS_QK and COLUMNS_V of them are the
    head dims, None for all, and TMA fills the others with zeros.  stat_desc: statistics (`recompute`, of QUERIES queries) as one
    dimension, box [2 * QUERIES], the last row being number no_tile = B * H * q_tiles, of a tile without queries.

    sum_desc: zeros [no_tile + 1, QUERIES * D] fp32 as [.., 32], box [128, 32], or of D = 80 and 96 as much as there are columns
    above 64, to which dq / scale is added.  ORDERED:
    Progress, zeros [no_tile + 1] int32, how many blocks of keys have added to a tile of queries.
    members: query heads of a program, all of a group or one.  Where it is not all, KeySums is the memory of GroupSums, and
    Progress has its turns behind its own numbers.
    DK, DV [B, Sk, H/group, D] by strides.  scale > 0.  q_units, kv_units: tiles of 64 queries and keys; q_tiles, blocks: tiles of
    QUERIES queries, blocks of 128 keys of a head.  KIND: FULL, CAUSAL or WINDOW (left, right).

    What changes the scores (`backward_mods`): SOFTCAP with cap, Slopes of ALiBi [B, H] by their strides or None; score_mods with
    their derivatives score_grads, mask_mods: the user's, see device.mods; () for none.  LATE: see `step`.
    MASK: rows of a tile of the mask: QUERIES, 1 where one row serves all queries, or 0.  mask_desc (8 bits, 0: not seen)
    [B or 1, H or 1, Sq or 1, Sk], boxes [1, 1, MASK, 64]; mask_b, mask_h: 1, or 0 where there is one for all.

    Lists by their strides, or None: see `BlockScheduler`.  stored_desc: where dS of all pairs goes (`StoredDs`), or None.

    Packed sequences (else Blocks and tail_desc are None): q, dout [1, H, total_q, D], k, v [1, H/group, total_k, D], gradients
    without a stride of the batch (None).  Blocks [blocks, 8]: see `BlockScheduler`; q_tiles: places of tiles of a head, no_tile =
    H * q_tiles; tail_desc, sequences: of `Tails`.  seq_q, seq_k, q_units, kv_units are not looked at.

    Grid: B * H / members * blocks, heads_at_once of the heads' programs at a time."""
    config = ReduceConfig(q_desc.dtype, D, QUERIES, SLOTS, LATE)
    tails = Tails(tail_desc, sequences, heads, heads // group, QUERIES, config.HELD)
    pipe = make_reduce_pipeline(q_desc, do_desc, k_desc, v_desc, stat_desc, tails, stored_desc, heads, blocks, config)
    ADDERS: gl.constexpr = 2 if ORDERED and D > 64 else 1
    sums = make_dq_sums(sum_desc, Progress, config, ORDERED, ADDERS)
    group_sums = make_group_sums(Progress + no_tile + 1, KeySums, blocks, heads, group, members, config)
    fence_async_shared()
    lengths = Lengths(seq_q, seq_k, q_units, kv_units)
    mask = BackwardMask(left, right, KIND)
    scheduler = BlockScheduler(
        lengths,
        heads,
        group,
        members,
        q_tiles,
        blocks,
        heads_at_once,
        no_tile,
        mask,
        Lists,
        lists_b,
        lists_h,
        Blocks,
        QUERIES,
        ORDERED,
    )
    mask_tiles = make_mod_tiles(mask_desc, mask_b, mask_h, MASK, SLOTS)
    mods = BackwardMods(
        scale, cap, Slopes, slope_b, slope_h, score_mods, score_grads, mask_tiles, mask_mods, SOFTCAP, KIND
    )
    dk = Gradient(DK, stride_xb, stride_xn, stride_xh, config.DTYPE, COLUMNS_QK)
    dv = Gradient(DV, stride_yb, stride_yn, stride_yh, config.DTYPE, COLUMNS_V)
    STORED: gl.constexpr = stored_desc is not None
    if ADDERS == 2:
        gl.warp_specialize(
            (
                (consume, (0, scheduler, pipe, mods, sums, group_sums, dk, dv)),
                (consume, (1, scheduler, pipe, mods, sums, group_sums, dk, dv)),
                (produce, (scheduler, pipe, mods, group_sums)),
                (add, (0, scheduler, sums)),
                (add, (1, scheduler, sums)),
            )
            + (((store_ds, (scheduler, pipe)),) if STORED else ()),
            (4, 1, 1, 1) + (1,) * STORED,
            (CONSUMER_REGISTERS,) + (PRODUCER_REGISTERS,) * (3 + STORED),
        )
    else:
        gl.warp_specialize(
            (
                (consume, (0, scheduler, pipe, mods, sums, group_sums, dk, dv)),
                (consume, (1, scheduler, pipe, mods, sums, group_sums, dk, dv)),
                (produce, (scheduler, pipe, mods, group_sums)),
                (add, (0, scheduler, sums)),
            )
            + (((store_ds, (scheduler, pipe)),) if STORED else ()),
            (4, 1, 1) + (1,) * STORED,
            (CONSUMER_REGISTERS,) + (PRODUCER_REGISTERS,) * (2 + STORED),
        )
