"""Dense attention forward on sm_90: full, causal or within a window, any lengths, packed sequences, query heads in groups.

A query tile of 64 rows for each of one to three consumers is folded by warpgroups, 64 rows each, over KV tiles that all read:

    producer    1 warp     issues TMA loads of Q, and of K and V tile by tile, into pipelines of shared memory
    consumers   4 warps    S = Q K^T, online softmax, O += P V, of one KV tile after the other

    config      the problem's sizes, the constants of the version
    scheduler   the dynamic persistent tile scheduler and its mailbox
    producer    what the loading warp does
    consumer    the main loop
    pipeline    rings of tiles between producer and consumers
    mask        which KV tiles a query tile sees, and the cut through them
    score_mods  softcap, ALiBi, bias, mask tensors
    softmax     the online softmax, lazy rescaling
    products    wgmma over head dims of any width
    epilogue    where the result goes
    ping_pong   whose turn it is to issue products

Source: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), sections 3.1 and 3.2.
"""

from ...device.ranges import WINDOW
from .chunks import make_totals
from .config import Config, Problem
from .consumer import consume
from .epilogue import Epilogue
from .gluon import fence_async_shared, gl, jit
from .mask import Mask
from .ping_pong import PingPong
from .pipeline import make_pipeline
from .producer import produce
from .scheduler import TileScheduler, WorkCounter, make_mailbox, make_overflow_flags
from .score_mods import ScoreMods, make_mod_pipeline
from .softmax import Softmax

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_blocks", "items", "left", "right", "stride_ob", "stride_om",
           "stride_oh", "cap", "stride_sinks", "batch", "total_q", "bias_b", "bias_h", "mask_b", "mask_h", "slope_b",
           "slope_h", "lists_b", "lists_h", "lists_q"]  # fmt: skip


@jit(do_not_specialize=RUNTIME)
def attention_forward_hopper(
    q_desc, k_desc, v_desc, Out, Lse, Counter,
    scale, seq_q, seq_k, heads, group, q_blocks, items, left, right, stride_ob, stride_om, stride_oh,
    Sinks, stride_sinks, cap, CuQ, CuK, batch, total_q,
    bias_desc, bias_b, bias_h, mask_desc, mask_b, mask_h, Slopes, slope_b, slope_h, score_mods, mask_mods,
    Lists, lists_b, lists_h, lists_q, Sums,
    KIND: gl.constexpr, DIM_QK: gl.constexpr, DIM_V: gl.constexpr, COLUMNS: gl.constexpr, KEYS: gl.constexpr,
    SLOTS: gl.constexpr, CONSUMERS: gl.constexpr, PACK: gl.constexpr, VARLEN: gl.constexpr, SOFTCAP: gl.constexpr,
    FENCE: gl.constexpr, LATE: gl.constexpr, PING_PONG: gl.constexpr, POLYNOMIAL: gl.constexpr,
    SKIP: gl.constexpr, LAZY: gl.constexpr, BIAS: gl.constexpr, MASK: gl.constexpr, BIAS_SLOTS: gl.constexpr,
    MASK_SLOTS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    PREFETCH: gl.constexpr, CHUNK: gl.constexpr, TILE: gl.constexpr, SHARED_SUMS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """q_desc [B, H, Sq, D] with boxes [1, 1, 64, panel], k_desc, v_desc [B, H/group, Sk, D] with boxes [1, 1, KEYS, panel]; a
    panel is 64 columns, or 32 where 64 do not divide the width.  Out [B, Sq, H, COLUMNS] by strides, Lse [B, H, Sq] natural.
    Counter [1] int32: 0.  scale > 0.  items = B * H * q_blocks, q_blocks of ROWS queries.  KIND: FULL, CAUSAL or WINDOW
    (left, right: keys on either side of a query's own place).  DIM_QK, DIM_V: widths of tiles, at least the head dims, of which
    COLUMNS is V's.  KEYS of a KV tile, SLOTS of the rings of K and of V.  Sinks [H] by its stride, or None.  SOFTCAP: see
    `ScoreMods`, with `cap`.  CONSUMER_REGISTERS, PRODUCER_REGISTERS: of a thread.  Grid (min(items, programs that fit),): one
    program an SM, two with one consumer.

    PACK heads, a divisor of 64, make one: q_desc is [B, H/PACK, Sq, PACK, D] with boxes [1, 1, 64/PACK, PACK, panel], `heads` is
    H/PACK, `group` what is left of it, and q_blocks are of Sq * PACK rows.

    VARLEN: tensors [1, H, Tq or Tk, D], Out [Tq, H, COLUMNS], Lse [H, Tq]; sequence b is queries CuQ[b] to CuQ[b+1] and keys
    CuK[b] to CuK[b+1] (int32); q_blocks = Tq // ROWS + batch places, see `sequence_of_place`; seq_q and seq_k are the
    longest, which nothing depends on; no PACK.

    BIAS, MASK: rows of a tile of the bias, of the mask: 64, 1 where one row serves all queries, or 0.  bias_desc (16 or 32 bits),
    mask_desc (8 bits, 0: not seen): [B or 1, H or 1, Sq or 1, Sk] with boxes [1, 1, rows, panel_of_tile]; bias_b, bias_h, mask_b,
    mask_h: 1, or 0 where there is one for all batch entries, heads; BIAS_SLOTS, MASK_SLOTS: slots for each consumer.
    Slopes [B, H] of ALiBi by its strides, or None.  score_mods, mask_mods: the user's, see device.mods; () for none.  PACK
    excludes a bias, a mask and mods.  Lists by their strides, or None: see `Mask`; not with VARLEN.

    FENCE holds the wait for O behind the softmax; LATE releases K's slot with V's; PING_PONG: see `PingPong`; POLYNOMIAL, SKIP,
    LAZY (with SKIP, without POLYNOMIAL): see `softmax`; PREFETCH: Q of the next query tile is loaded beside the present one.
    CHUNK: see `Config`; Sums, SHARED_SUMS, TILE: see `make_totals`.

    SPLIT, 2 for wide heads, else 1: so many consumers fold the same 64 rows, with the same scores and probabilities, each with
    DIM_V / SPLIT columns of V and O.  ROWS of a query tile are CONSUMERS / SPLIT * 64.  SPLIT excludes BIAS, MASK, mods, LAZY,
    POLYNOMIAL, PREFETCH and CHUNK."""
    gl.static_assert(KIND <= WINDOW, "the kernels for sm_90 have no other masks")
    USER: gl.constexpr = len(score_mods) + len(mask_mods) > 0
    gl.static_assert(PACK == 1 or (BIAS == 0 and MASK == 0 and not USER), "rows of a packed tile are not queries")
    gl.static_assert(not LAZY or (SKIP and POLYNOMIAL == 0), "LAZY is a version of SKIP")
    PLAIN: gl.constexpr = BIAS + MASK + POLYNOMIAL + CHUNK == 0 and not (USER or LAZY or PREFETCH)
    gl.static_assert(SPLIT == 1 or PLAIN, "wide heads have no other versions")
    NUMBERED: gl.constexpr = Slopes is not None or USER
    ROWS: gl.constexpr = CONSUMERS // SPLIT * 64  # of a query tile
    mailbox = make_mailbox(VARLEN, NUMBERED, PREFETCH)
    overflow = make_overflow_flags(CONSUMERS, LAZY, PREFETCH)
    q = make_pipeline(q_desc, (2 if PREFETCH else 1) * ROWS // 64, 64, DIM_QK, SPLIT, PACK)
    k = make_pipeline(k_desc, SLOTS, KEYS, DIM_QK, CONSUMERS)
    v = make_pipeline(v_desc, SLOTS * SPLIT, KEYS, DIM_V // SPLIT, CONSUMERS // SPLIT)
    problem = Problem(seq_q, seq_k, heads, group, CuQ, CuK, batch, total_q)
    config = Config(q_desc.dtype, DIM_V // SPLIT, KEYS, CONSUMERS, PACK, VARLEN, FENCE, LATE, CHUNK=CHUNK)
    counter = WorkCounter(Counter, items)
    scheduler = TileScheduler(problem, counter, mailbox, overflow, q_blocks, ROWS, VARLEN, NUMBERED, PREFETCH)
    mask = Mask(left, right, KIND, ROWS, KEYS, PACK, Lists, lists_b, lists_h, lists_q)
    bias_tiles = make_mod_pipeline(bias_desc, bias_b, bias_h, BIAS, KEYS, BIAS_SLOTS, CONSUMERS)
    mask_tiles = make_mod_pipeline(mask_desc, mask_b, mask_h, MASK, KEYS, MASK_SLOTS, CONSUMERS)
    mods = ScoreMods(scale, cap, Slopes, slope_b, slope_h, bias_tiles, mask_tiles, SOFTCAP, mask, None,
                     (score_mods, mask_mods))  # fmt: skip
    if CHUNK:
        softmax = Softmax(
            Sinks, stride_sinks, config, POLYNOMIAL, SKIP, LAZY, make_totals(config, Sums, SHARED_SUMS, TILE)
        )
    else:
        softmax = Softmax(Sinks, stride_sinks, config, POLYNOMIAL, SKIP, LAZY)
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
