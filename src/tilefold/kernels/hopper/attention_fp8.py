"""Dense attention forward on sm_90 with Q, K and V in e4m3: full, causal or within a window, any lengths.

The roles, pipelines and scheduler are those of attention_forward.  What differs:

    V^T      both operands of a product of bytes lie in shared memory with the summed dimension contiguous, so V comes
             transposed (kernels.transpose_values), its keys in the order in which the probabilities lie in registers
    probs    2^8 times as large, so that e4m3 holds what is small beside the row's largest
    sums     a wgmma of bytes adds with about 14 bits; the products of each tile are therefore added to an accumulator of
             fp32 outside (DIRECT: they are not), which costs the multiply-adds that a new maximum's factor takes anyway

What a consumer has in flight:   issue S'  |  add PV  |  issue PV'  |  wait for S'  |  its softmax  |  wait for PV'

Source: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), section 3.3; sums outside: DeepSeek-V3 (arXiv:2412.19437), 3.3.2.
"""

from .config import Config, Problem
from .epilogue import Epilogue
from .fp8_parts import Scales, online_softmax, operand
from .gluon import fence_async_shared, gl, jit, opaque, schedule_fence, wgmma, wgmma_wait
from .mask import Mask
from .ping_pong import PingPong
from .pipeline import Stage, make_pipeline
from .producer import produce
from .products import issue_scores, rescale_output, zero_output
from .scheduler import TileScheduler, WorkCounter, make_mailbox, make_overflow_flags
from .score_mods import ScoreMods, make_mod_pipeline
from .softmax import Softmax

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_blocks", "items", "left", "right", "stride_ob", "stride_om",
           "stride_oh", "q_group", "stride_qb", "stride_qh", "stride_kb", "stride_kh", "stride_vb", "stride_vh"]  # fmt: skip


@jit
def consume(
    CID: gl.constexpr, config, scheduler, q, k, v, mask, softmax, scales, epilogue, turns, DIRECT: gl.constexpr
):
    """Consumer number CID: rows CID * 64 on of each query tile of this program."""
    POLYNOMIAL: gl.constexpr = softmax.POLYNOMIAL
    q_tile = q.parts(Stage(CID, 0))
    no_scores = gl.zeros([64, config.KEYS], gl.float32, config.SCORES)  # use_acc=False: never read
    nothing = zero_output(config)[0]
    zero = scheduler.problem.seq_q >> 31
    i = 0  # query tiles that were begun
    t = 0  # KV tiles that were folded
    turns.begin(CID)
    q.wait(Stage(CID, 0))
    item = scheduler.item()
    while item >= 0:
        work = scheduler.work(item)
        first, tiles = mask.tiles(work)
        row = work.block * (config.CONSUMERS * 64) + CID * 64
        scale = scales.of_scores(work)
        m, l = softmax.begin(no_scores, work.head)
        acc = zero_output(config)[0]
        stage = k.stage(t)
        k.wait(stage)
        turns.wait(CID)
        s = issue_scores(q_tile, k, stage, no_scores)
        turns.pass_on(CID)
        s = wgmma_wait(0, deps=(s,))
        k.release(stage)
        s = mask.apply(s, work, row, first * config.KEYS)
        p, m, l, alpha = online_softmax(s, m, l, scale, POLYNOMIAL)
        before = alpha  # its factor is the accumulator's when the product of those probabilities is added
        for j in range(1, tiles):
            t += 1
            ahead = k.stage(t)
            k.wait(ahead)
            if DIRECT:
                acc = rescale_output((acc,), alpha, True)[0]
            probs = operand(p, zero, config.PROBS)  # before a product is in flight: it would be made to wait for this
            turns.wait(CID)
            s_flying = issue_scores(q_tile, k, ahead, no_scores)
            v.wait(stage)
            if DIRECT:
                o_flying = wgmma(probs, v.part(stage, 0).permute((1, 0)), acc, is_async=True)
            else:
                o_flying = wgmma(probs, v.part(stage, 0).permute((1, 0)), nothing, use_acc=False, is_async=True)
            turns.pass_on(CID)
            s = wgmma_wait(1, deps=(s_flying,))
            k.release(ahead)
            s = mask.apply(s, work, row, (first + j) * config.KEYS)
            p_next, m, l, alpha = online_softmax(s, m, l, scale, POLYNOMIAL)
            if config.FENCE:
                l = schedule_fence(l)
            if DIRECT:
                acc = wgmma_wait(0, deps=(o_flying,))
            else:
                acc = rescale_output((acc,), before, False)[0] + wgmma_wait(0, deps=(o_flying,))
                before = alpha
            v.release(stage)
            p = p_next
            stage = ahead
        # every product of this query tile with Q has been waited for
        q.release(Stage(CID, 0))
        acc = rescale_output((acc,), alpha, False)[0]
        v.wait(stage)
        acc = wgmma(operand(p, zero, config.PROBS), v.part(stage, 0).permute((1, 0)), acc, is_async=True)
        acc = wgmma_wait(0, deps=(acc,))
        v.release(stage)
        # worked out again: numbers that live across the loop take registers that are not there
        work = scheduler.work(opaque(item))
        row = work.block * (config.CONSUMERS * 64) + CID * 64
        epilogue.store((acc,), m, l, work, row, scales.of_values(work))
        t += 1
        i += 1
        q.wait(Stage(CID, i & 1))
        item = scheduler.item()
    turns.end(CID)


@jit(do_not_specialize=RUNTIME)
def attention_forward_fp8(
    q_desc, k_desc, v_desc, Out, Lse, Counter,
    scale, seq_q, seq_k, heads, group, q_blocks, items, left, right, stride_ob, stride_om, stride_oh,
    QScale, KScale, VScale, q_group, stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    KIND: gl.constexpr, DIM_QK: gl.constexpr, DIM_V: gl.constexpr, COLUMNS: gl.constexpr, KEYS: gl.constexpr,
    SLOTS: gl.constexpr, CONSUMERS: gl.constexpr, DIRECT: gl.constexpr, FENCE: gl.constexpr, PING_PONG: gl.constexpr,
    POLYNOMIAL: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """e4m3: q_desc [B, H, Sq, D] with boxes [1, 1, 64, panel], k_desc [B, H/group, Sk, D] with boxes [1, 1, KEYS, panel], v_desc
    [B, H/group, D, Sk or more] (what transpose_values makes) with boxes [1, 1, DIM_V, KEYS].  Out [B, Sq, H, COLUMNS] bf16 by
    strides, Lse [B, H, Sq]; Counter [1] int32: 0.  scale > 0; items = B * H * q_blocks, q_blocks of CONSUMERS * 64 queries.
    KIND: FULL, CAUSAL or WINDOW (left, right: keys on either side of a query's own place).  DIM_QK, DIM_V: widths of tiles,
    at least the head dims, of which COLUMNS is V's.  QScale [B, H/q_group], KScale, VScale [B, H/group] fp32 by strides, each or
    None: what q, k and v are to be multiplied with, > 0.  Grid (min(items, SMs),).

    DIRECT leaves sums over tiles to wgmma; FENCE, PING_PONG as of attention_forward_hopper; POLYNOMIAL: see `exponentials`."""
    mailbox = make_mailbox(False, False)
    overflow = make_overflow_flags(CONSUMERS, False)
    q = make_pipeline(q_desc, CONSUMERS, 64, DIM_QK, 1)
    k = make_pipeline(k_desc, SLOTS, KEYS, DIM_QK, CONSUMERS)
    v = make_pipeline(v_desc, SLOTS, DIM_V, KEYS, CONSUMERS, 1, True)
    problem = Problem(seq_q, seq_k, heads, group, None, None, None, None)
    config = Config(gl.bfloat16, DIM_V, KEYS, CONSUMERS, 1, False, FENCE, False, 8)
    counter = WorkCounter(Counter, items)
    scheduler = TileScheduler(problem, counter, mailbox, overflow, q_blocks, CONSUMERS * 64, False, False)
    mask = Mask(left, right, KIND, CONSUMERS * 64, KEYS, 1)
    none = make_mod_pipeline(None, None, None, 0, KEYS, 0, CONSUMERS)
    mods = ScoreMods(scale, None, None, None, None, none, none, 0, KIND, 1)
    softmax = Softmax(None, None, config, POLYNOMIAL, False, False)
    scales = Scales(scale, QScale, KScale, VScale, q_group, group,
                    (stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh))  # fmt: skip
    epilogue = Epilogue(Out, Lse, stride_ob, stride_om, stride_oh, problem, config, COLUMNS)
    turns = PingPong(PING_PONG, CONSUMERS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (c, config, scheduler, q, k, v, mask, softmax, scales, epilogue, turns, DIRECT))
            for c in (0, 1, 2)[:CONSUMERS]
        ]
        + [(produce, (scheduler, q, k, v, mask, mods))],
        [4, 4, 1][3 - CONSUMERS :],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS][3 - CONSUMERS :],
    )
