"""Dense attention forward on sm_90 with Q, K and V in e4m3: full, causal or within a window, any lengths.

Producer, consumers, pipelines and scheduler are those of attention_forward.  What differs:

    V^T      both operands of a product of bytes lie in shared memory with the summed dimension contiguous, so V comes
             transposed (kernels.transpose_values), its keys in the order in which the probabilities lie in registers
    probs    2^8 times as large, so that e4m3 holds what is small beside the row's largest
    sums     a wgmma of bytes adds with about 14 bits; the products of each tile are therefore added to an accumulator of
             fp32 outside (DIRECT: they are not), which costs the multiply-adds that a new maximum's factor takes anyway.  The
             last tile's alone is added inside: one such sum is off by less than the result's own rounding

Source: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), section 3.3; sums outside: DeepSeek-V3 (arXiv:2412.19437), 3.3.2.
"""

from .config import Config, Problem
from .consumer import consume
from .epilogue import Epilogue
from .fp8_parts import Scales
from .gluon import fence_async_shared, gl, jit
from .mask import Mask
from .ping_pong import PingPong
from .pipeline import make_pipeline
from .producer import produce
from .scheduler import TileScheduler, WorkCounter, make_mailbox, make_overflow_flags
from .score_mods import ScoreMods, make_mod_pipeline
from .softmax import Softmax

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_blocks", "items", "left", "right", "stride_ob", "stride_om",
           "stride_oh", "q_group", "stride_qb", "stride_qh", "stride_kb", "stride_kh", "stride_vb", "stride_vh"]  # fmt: skip


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
    config = Config(gl.bfloat16, DIM_V, KEYS, CONSUMERS, 1, False, FENCE, False, 8, not DIRECT)
    counter = WorkCounter(Counter, items)
    scheduler = TileScheduler(problem, counter, mailbox, overflow, q_blocks, CONSUMERS * 64, False, False)
    mask = Mask(left, right, KIND, CONSUMERS * 64, KEYS, 1)
    none = make_mod_pipeline(None, None, None, 0, KEYS, 0, CONSUMERS)
    softmax = Softmax(None, None, config, POLYNOMIAL, False, False)
    scales = Scales(QScale, KScale, VScale, q_group, group,
                    (stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh))  # fmt: skip
    mods = ScoreMods(scale, None, None, None, None, none, none, 0, mask, scales)
    epilogue = Epilogue(Out, Lse, stride_ob, stride_om, stride_oh, problem, config, COLUMNS)
    turns = PingPong(PING_PONG, CONSUMERS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (c, config, scheduler, q, k, v, mask, mods, softmax, epilogue, turns))
            for c in (0, 1, 2)[:CONSUMERS]
        ]
        + [(produce, (scheduler, q, k, v, mask, mods))],
        [4, 4, 1][3 - CONSUMERS :],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS][3 - CONSUMERS :],
    )
