"""Block-sparse forward attention on sm_90: a producer that loads the blocks which a list names, and consumers that fold them.

    producer    1 warp     issues TMA loads of Q, and of K and V unit by unit, into pipelines of shared memory
    consumers   4 warps    64 rows of a query tile: S = Q K^T, online softmax, O += P V, one unit after the other

A unit is 128 keys: one listed block of 128 or two of 64, the second beside the first in shared memory.  A query tile of
64 rows has one consumer, and two programs share an SM; one of 128 rows has two consumers, which read the same units.  Q
lives in registers, so that shared memory is read for K and V alone.

It has a main loop of its own: Q is in registers, a unit may have holes, whose sizes are looked up ahead and whose values are
cleared, K and V have different numbers of slots, and what a branch adds passes through V's ring.  Where blocks lie (in one
tensor, in a packed batch, in pages) and what a causal mask cuts off them is `block_list`'s.

In iteration j the products S_j and P_(j-1) V_(j-1) are issued together, and the softmax of S_j runs under the second.

There are as many programs as the device has places.  Each draws the number of its next query tile from a counter while it
still loads for the one before.  The next loads run under the end of the fold, and lists of different lengths share the
device evenly.  Which program folds a query tile changes no bit of it.

Source: the pipeline is FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608, section 3.2).
"""

from .block_list import POSTED, UNIT, BlockLists, ListScheduler, Pages, clear_unit, cut_unit, whole_of
from .config import Config, Problem
from .epilogue import Epilogue
from .gluon import (
    aggregate,
    constexpr_function,
    descriptor,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma_load,
    wgmma_wait,
)
from .parts import LOG2E, cut_columns, reciprocal
from .pipeline import Stage, make_pipeline
from .producer import acquire_all, signal_all
from .products import issue_output, issue_scores, rescale_output, wait_output, zero_output
from .scheduler import WorkCounter
from .softmax import Softmax

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_blocks", "items", "stride_ob", "stride_om", "stride_oh", "stride_ib",
           "stride_ih", "stride_iq", "stride_cb", "stride_ch", "stride_sb", "stride_sh", "stride_pb", "stride_ph",
           "stride_yb", "stride_ym", "stride_yh", "stride_zb", "stride_zm", "stride_zh", "batch", "total_q",
           "stride_tb"]  # fmt: skip
BRANCH = gl.constexpr(1)  # bits of MIXED: add another branch,
BRANCH_GATE = gl.constexpr(2)  # times a gate,
GATE = gl.constexpr(4)  # to this one's times a gate


@aggregate
class Mix:
    """What the result is mixed with.  MIXED is the sum of BRANCH, BRANCH_GATE and GATE.

    branch_desc [B, H, Sq, D] with boxes [1, 1, KV_BLOCK, 64]; GateB, Gate [B, Sq, H] by their strides."""

    branch_desc: descriptor
    GateB: gl.tensor
    Gate: gl.tensor
    strides: gl.tuple
    MIXED: gl.constexpr
    WARPGROUPS: gl.constexpr

    @constexpr_function
    def __init__(self, branch_desc, GateB, Gate, strides, MIXED, WARPGROUPS):
        self.branch_desc, self.GateB, self.Gate, self.strides = branch_desc, GateB, Gate, strides
        self.MIXED, self.WARPGROUPS = gl.constexpr(MIXED), gl.constexpr(WARPGROUPS)

    @jit
    def units(self, i):
        """How many units of V were the other branch's, in i query tiles."""
        return i * (self.MIXED & BRANCH)

    @jit
    def load(self, v, t, work):
        """Issue the TMA loads of the other branch's rows of a query tile, as if they were one more unit of V, the t-th."""
        BLOCKS: gl.constexpr = UNIT // v.BOX
        BOXES: gl.constexpr = self.WARPGROUPS if BLOCKS == 2 else 1
        stage = v.write_stage(t)
        bar = v.full.index(stage.slot)
        v.acquire(stage)
        mbarrier.expect(bar, BOXES * v.BOX * v.DIM * 2)
        for p in gl.static_range(v.DIM // 64):
            for c in gl.static_range(BOXES):
                row = work.block * (64 * self.WARPGROUPS) + c * v.BOX
                panel = v.panels[0].index((stage.slot * (v.DIM // 64) + p) * BLOCKS + c)
                tma_load(self.branch_desc, [work.batch, work.head, row, p * 64], bar, panel)

    @jit
    def gates(self, otherwise, work, row, rows, ROW: gl.constexpr):
        """-> the gates of 64 rows of the other branch and of this one, `otherwise` where there is none."""
        gate_branch = otherwise
        gate = otherwise
        if self.MIXED & BRANCH_GATE:
            gate_branch = _gate_rows(self.GateB, work, row, rows, self.strides[0:3], ROW)
        if self.MIXED & GATE:
            gate = _gate_rows(self.Gate, work, row, rows, self.strides[3:6], ROW)
        return gate_branch, gate

    @jit
    def branch(self, v, stage, otherwise, CID: gl.constexpr):
        """The other branch's rows of consumer CID in registers, like the accumulator `otherwise`, when they have arrived."""
        if self.MIXED & BRANCH:
            v.wait(stage)
            return v.part(stage, 0).slice(CID * 64, 64).load(otherwise.type.layout).to(gl.float32)
        else:
            return otherwise

    @jit
    def apply(self, acc, l, branch, gates):
        """The result: acc / l, times its gate, and the other branch, times its own."""
        factor = reciprocal(l, gl.SliceLayout(1, acc.type.layout))
        if self.MIXED & GATE:
            factor = factor * gates[1]
        acc = acc * gl.expand_dims(factor, 1)
        if self.MIXED & BRANCH:
            if self.MIXED & BRANCH_GATE:
                branch = branch * gl.expand_dims(gates[0], 1)
            acc = acc + branch
        return acc


@jit
def _gate_rows(gate, work, row, rows, strides, ROW: gl.constexpr):
    """A gate of 64 rows from `row` on; 0 past the end.  gate [B, rows, H] by strides."""
    o_r = gl.arange(0, 64, layout=ROW)
    begin = (
        gate
        + work.batch.to(gl.int64) * strides[0]
        + work.head.to(gl.int64) * strides[2]
        + row.to(gl.int64) * strides[1]
    )
    return gl.load(begin + o_r.to(gl.int64) * strides[1], mask=o_r < rows, other=0.0).to(gl.float32)


@jit
def produce(scheduler, lists, q, k, v, mix):
    """The producer: chooses the work tiles and issues every load, in the order in which the consumers need them."""
    programs = gl.num_programs(0)
    item = gl.program_id(0)
    count = lists.count(scheduler.locate(item))
    following = scheduler.counter.items
    count_following = count
    number = 0
    i = 0  # query tiles that were begun
    t = 0  # units that were loaded
    while item < scheduler.counter.items:
        work = scheduler.locate(item)
        if work.live:
            listed = lists.of(work, count)
            ahead = listed.begin()
            acquire_all(q, i, q.SLOTS)
            scheduler.post(item, count, work)
            for c in gl.static_range(q.SLOTS):
                row = work.first_q + (work.block * q.SLOTS + c) * 64
                q.load(Stage(c, i & 1), work.batch, work.head, row)
            kv_head = work.head // scheduler.problem.group
            for j in range(listed.units):
                places, ahead = listed.take(ahead, j)
                stage = k.write_stage(t)
                k.acquire(stage)
                listed.load(k, stage, kv_head, places)
                stage = v.write_stage(t + mix.units(i))
                v.acquire(stage)
                listed.load(v, stage, kv_head, places)
                t += 1
                # As late as hides the answers: who draws early may hold two long lists while others have none.
                if j == gl.maximum(listed.units - 4, 0):
                    number = scheduler.counter.draw()
                if j == gl.maximum(listed.units - 2, 0):
                    following = scheduler.counter.drawn(number, programs)
                    count_following = lists.count(scheduler.locate(gl.minimum(following, scheduler.counter.items - 1)))
            if mix.MIXED & BRANCH:
                mix.load(v, t + i, work)
            i += 1
        else:
            following = scheduler.counter.drawn(scheduler.counter.draw(), programs)
            count_following = lists.count(scheduler.locate(gl.minimum(following, scheduler.counter.items - 1)))
        item = following
        count = count_following
    acquire_all(q, i, q.SLOTS)
    scheduler.post_end()
    signal_all(q, i, q.SLOTS)
    scheduler.counter.end(item, programs)


@jit
def consume(CID: gl.constexpr, config, scheduler, lists, q, k, v, mix, softmax, epilogue, scale):
    """Consumer number CID: rows CID * 64 on of each query tile of this program."""
    MASKED: gl.constexpr = lists.MASKED
    KV_BLOCK: gl.constexpr = lists.KV_BLOCK
    WHOLE: gl.constexpr = whole_of(KV_BLOCK, lists.CAUSAL)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, config.SCORES, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, config.OUT)
    scale = scale * LOG2E
    nothing = gl.zeros([64, UNIT], gl.float32, config.SCORES)  # use_acc=False: never read
    i = 0  # query tiles that were begun
    begun = 0  # units of those before this one
    q.wait(Stage(CID, 0))
    item, count = scheduler.read()
    while item >= 0:
        work = scheduler.work(item)
        listed = lists.of(work, count)
        first_row = work.block * (64 * config.CONSUMERS) + CID * 64 if lists.CAUSAL else 0
        live_0 = listed.first_live(0)
        live_1 = listed.first_live(1) if KV_BLOCK < UNIT else 0
        if MASKED:  # sizes are looked up one unit ahead, block numbers two
            lives = live_0 + live_1 * 256
            if lists.CAUSAL:
                ahead_0, ahead_1 = listed.blocks(0)
                lives = listed.lives(ahead_0, ahead_1, first_row)
            ahead_0, ahead_1 = listed.blocks(1)
            lives_next = listed.lives(ahead_0, ahead_1, first_row)
            ahead_0, ahead_1 = listed.blocks(2)
        m, l = softmax.begin(nothing, work.head)
        acc = zero_output(config)

        q_tile = (q.part(Stage(CID, 0), 0).load(Q_LAYOUT),)
        ks = k.stage(begun)
        first_v = begun + mix.units(i)
        stage = v.stage(first_v)
        k.wait(ks)
        s = issue_scores(q_tile, k, ks, nothing)
        s = wgmma_wait(0, deps=(s,))
        k.release(ks)
        # Not before: a load from shared memory may be on its way still when its warp has passed a barrier, beside a busy
        # wgmma for long enough to see the next query tile's Q.  The product had to wait for it.
        q.release(Stage(CID, 0))
        s = cut_unit(s, lives, lists) if lists.CAUSAL else cut_columns(s, live_0, live_1, KV_BLOCK)
        p, m, l, alpha = softmax.step(s, m, l, scale)

        for j in range(1, listed.units):
            ks = k.stage(begun + j)
            ahead = v.stage(first_v + j)
            if MASKED:
                clear_unit(v, stage, lives, lists)
                lives = lives_next
                lives_next = listed.lives(ahead_0, ahead_1, first_row)
                ahead_0, ahead_1 = listed.blocks(j + 2)
            k.wait(ks)
            s_flying = issue_scores(q_tile, k, ks, nothing)
            acc = rescale_output(acc, alpha, False)
            v.wait(stage)
            o_flying = issue_output(p, v, stage, acc, config.PROBS_REST)
            s = wgmma_wait(1, deps=(s_flying,))
            k.release(ks)
            if MASKED:
                if lives != WHOLE:
                    s = cut_unit(s, lives, lists)
            p_next, m, l, alpha = softmax.step(s, m, l, scale)
            acc = wait_output(o_flying)
            v.release(stage)
            p = p_next
            stage = ahead

        if MASKED:
            clear_unit(v, stage, lives, lists)
        row = work.block * (64 * config.CONSUMERS) + CID * 64
        rows = work.seq_q - row
        gates = mix.gates(l, work, row, rows, ROW)
        acc = rescale_output(acc, alpha, False)
        v.wait(stage)
        acc = wait_output(issue_output(p, v, stage, acc, config.PROBS_REST))
        v.release(stage)
        other = v.stage(first_v + listed.units)
        branch = mix.branch(v, other, acc[0], CID)
        live = lists.live_queries(work, rows, CID)
        made = mix.apply(acc[0], l, branch, gates)
        epilogue.store_live(made, m, l, work, row, live)
        if mix.MIXED & BRANCH:  # not before its values have been used: as with Q, a load may be on its way for long
            v.release(other)
        begun += listed.units
        i += 1
        q.wait(Stage(CID, i & 1))
        item, count = scheduler.read()


@jit(do_not_specialize=RUNTIME)
def sparse_forward_hopper(
    q_desc, k_desc, v_desc, branch_desc, Out, Lse, Index, Count, Sizes, QuerySizes, Counter, GateB, Gate, scale, seq_q,
    seq_k, heads, group, q_blocks, items, stride_ob, stride_om, stride_oh, stride_ib, stride_ih, stride_iq, stride_cb,
    stride_ch, stride_sb, stride_sh, stride_pb, stride_ph, stride_yb, stride_ym, stride_yh, stride_zb, stride_zm, stride_zh,
    CuQ, CuK, batch, total_q, Table, Lengths, stride_tb,
    D: gl.constexpr, KV_BLOCK: gl.constexpr, PAGE: gl.constexpr, WARPGROUPS: gl.constexpr, K_SLOTS: gl.constexpr,
    V_SLOTS: gl.constexpr, MASKED: gl.constexpr, SIZED: gl.constexpr, Q_SIZED: gl.constexpr, CAUSAL: gl.constexpr,
    MIXED: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q_desc [B, H, Sq, D], k_desc, v_desc [B, H/group, Sk, D] with boxes [1, 1, 64 or KV_BLOCK, 64]; Out [B, Sq, H, D] by
    strides, Lse [B, H, Sq]; Index [B, H, Qb, cap], Count [B, H, Qb], Sizes [B, H, KVb] if SIZED, QuerySizes [B, H, Qb] if
    Q_SIZED, int32 (a stride of 0 broadcasts).  scale > 0; items = B * H * Qb.  Query blocks have 64 * WARPGROUPS rows.  CAUSAL,
    with MASKED: query i sees keys up to i + Sk - Sq of the listed blocks.

    MIXED, the sum of BRANCH, BRANCH_GATE and GATE: GateB * branch is added to Gate times the result, before rounding; GateB, Gate
    [B, Sq, H] by strides y and z, branch_desc [B, H, Sq, D] with boxes [1, 1, KV_BLOCK, 64].

    CuQ, CuK, of a packed batch, else None: tensors [1, H, Tq or Tk, D], Out [Tq, H, D], Lse [H, Tq]; sequence b is queries CuQ[b]
    to CuQ[b+1], of which the first seq_q have lists, [b], and keys CuK[b] to CuK[b+1] (int32); q_blocks = Tq // (64 * WARPGROUPS)
    + batch places, items = H * q_blocks.  PAGE > 0, a power of two of at least 16: k_desc, v_desc [pages, H/group, PAGE, D] with
    boxes of the smaller of PAGE and KV_BLOCK rows; see `Pages`.  Both need MASKED, and exclude MIXED and each other."""
    gl.static_assert(MIXED == 0 or (CuQ is None and PAGE == 0), "no other branch is packed or lies in pages")
    gl.static_assert(MASKED or (CuQ is None and PAGE == 0), "where a sequence ends is known on the device")
    gl.static_assert(MASKED or not CAUSAL, "a causal mask cuts blocks")
    mailbox = gl.allocate_shared_memory(gl.int32, [2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q = make_pipeline(q_desc, WARPGROUPS, 64, D, 1)
    k = make_pipeline(k_desc, K_SLOTS, UNIT, D, WARPGROUPS, 1, False, KV_BLOCK)
    v = make_pipeline(v_desc, V_SLOTS, UNIT, D, WARPGROUPS, 1, False, KV_BLOCK)
    problem = Problem(seq_q, seq_k, heads, group, CuQ, CuK, batch, total_q)
    config = Config(q_desc.dtype, D, UNIT, WARPGROUPS, 1, CuQ is not None, False, False)
    counter = WorkCounter(Counter, items)
    pages = Pages(Table, Lengths, stride_tb, PAGE)
    EDGE: gl.constexpr = CuQ is not None or PAGE > 0
    facts = gl.allocate_shared_memory(gl.int32, [POSTED, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])) if EDGE else None
    scheduler = ListScheduler(problem, counter, mailbox, facts, q_blocks, pages, 64 * WARPGROUPS)
    lists = BlockLists(Index, Count, (stride_ib, stride_ih, stride_iq, stride_cb, stride_ch), Sizes, QuerySizes,
                       (stride_sb, stride_sh, stride_pb, stride_ph), pages, KV_BLOCK, MASKED, SIZED, Q_SIZED,
                       CAUSAL, EDGE)  # fmt: skip
    strides = (stride_yb, stride_ym, stride_yh, stride_zb, stride_zm, stride_zh)
    mix = Mix(branch_desc, GateB, Gate, strides, MIXED, WARPGROUPS)
    softmax = Softmax(None, None, config, 0, False, False)
    epilogue = Epilogue(Out, Lse, stride_ob, stride_om, stride_oh, problem, config, D)
    fence_async_shared()
    gl.warp_specialize(
        [(consume, (c, config, scheduler, lists, q, k, v, mix, softmax, epilogue, scale)) for c in (0, 1)[:WARPGROUPS]]
        + [(produce, (scheduler, lists, q, k, v, mix))],
        [4, 1][2 - WARPGROUPS :],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS][2 - WARPGROUPS :],
    )
