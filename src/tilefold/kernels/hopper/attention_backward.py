"""Gradients of dense attention on sm_90, in five products a pair of tiles: dS is kept in memory, and nothing is added there.

A program makes either dk and dv of 64 keys, and publishes its dS, or dq of 64 to 256 queries, from the dS that was published:

    KV tile      S = K q^T     dP = V dout^T     P = exp2(S - lse)     dS = P (dP - delta)     dv += P dout     dk += dS q
    query tile   dq += dS K

Each sum is made by one program in one order: the same bits every run.  `attention_backward_reduce`, which has all mods, adds
32 KB of fp32 a pair to dq in memory; `options_for` of plan/backward/attention_backward_reduce.py says which is taken.  The
dS of all pairs is as large as the scores, which are stored nowhere.  So it is kept for a few heads, of long sequences for one KV
split at a time, in a ring, all in one launch: the device is full from the first head to the last.

    producer    1 warp     issues TMA loads into rings of tiles
    consumer    4 warps    the products of one tile after the other

    backward_config      constants of the version
    backward_scheduler   which work tile a program makes, and who waits for whom
    backward_mask        which query tiles and KV tiles see each other, and the cut through them
    backward_pipeline    the rings between producer and consumer
    ds_ring              where dS lies in memory
    recompute            P and dS, made again
    backward_producer    what the loading warp does
    backward_consumer    the main loops
    backward_epilogue    where gradients, and sums of them, go

Source: the products are FlashAttention-2's (Dao 2023, arXiv:2307.08691, section 3.1.2).
"""

from .backward_config import BackwardConfig
from .backward_consumer import consume
from .backward_epilogue import Gradient, SplitSums
from .backward_mask import BackwardMask, Lengths
from .backward_pipeline import allocate_ds, allocate_pool, make_backward_pipeline
from .backward_producer import produce
from .backward_scheduler import Counters, SplitScheduler
from .ds_ring import DsTiles, make_ds_ring
from .gluon import fence_async_shared, gl, jit

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_tiles", "kv_tiles", "left", "right", "split_tiles", "splits",
           "width", "heads_at_once", "segments", "delay", "slots", "no_tile", "nowhere",
           "stride_gb", "stride_gm", "stride_gh", "stride_xb", "stride_xn", "stride_xh", "stride_yb", "stride_yn",
           "stride_yh", "written", "stat_tiles"]  # fmt: skip


@jit(do_not_specialize=RUNTIME)
def attention_backward_hopper(
    q_desc, do_desc, k_desc, v_desc, stat_desc, ds_desc, DQ, DK, DV, Partial, Progress,
    scale, seq_q, seq_k, heads, group, q_tiles, kv_tiles, left, right, split_tiles, splits, width, heads_at_once, segments, delay,
    slots, no_tile, nowhere,
    stride_gb, stride_gm, stride_gh, stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh, written, stat_tiles,
    KIND: gl.constexpr, D: gl.constexpr, COLUMNS_QK: gl.constexpr, COLUMNS_V: gl.constexpr, SLOTS: gl.constexpr,
    QUERY_TILES: gl.constexpr, SPLIT: gl.constexpr, HOLD: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q_desc, do_desc [B, H, Sq, D], k_desc, v_desc [B, H/group, Sk, D] with boxes [1, 1, 64, 64]; stat_desc: statistics
    (`recompute`) as one dimension, box [128], the last row being number no_tile; ds_desc [nowhere, 64], box [64, 64]: the ring of
    dS, `slots` slots, in each `width` tiles a row (`ds_ring`).  D: width of the tiles, of which COLUMNS_QK and COLUMNS_V are the
    head dims (None: all).  DQ [B, Sq, H, D], DK, DV [B, Sk, H/group, D] by strides; Partial: sums of dq, fp32, if SPLIT (splits
    > 1).  scale > 0.  q_tiles, kv_tiles: of 64 queries and keys; KIND: FULL, CAUSAL or WINDOW (left, right: keys on either side
    of a query's own place).  QUERY_TILES of a work tile for dq, which share K: 1 or 2.

    segments = B * H/group / heads_at_once * splits, of split_tiles KV tiles.  Progress [1 + 2 * segments] int32: zeros.
    Grid: a program for each work tile; which one it makes, it draws.

    written, stat_tiles: None, or of one span of a longer call's queries (`backward_epilogue`): DK and DV are fp32 there, of whose
    first `written` rows earlier spans have left their sums, and the statistics have stat_tiles rows a head."""
    config = BackwardConfig(q_desc.dtype, D, SLOTS, QUERY_TILES, HOLD)
    memory = allocate_pool(stat_desc, config)
    ds_buffer = allocate_ds(config)
    pipe = make_backward_pipeline(q_desc, do_desc, k_desc, v_desc, stat_desc, memory, config, 1)
    fence_async_shared()
    counters = Counters(Progress, segments)
    number = counters.draw()
    lengths = Lengths(seq_q, seq_k, q_tiles, kv_tiles)
    scheduler = SplitScheduler(counters, lengths, heads, group, split_tiles, splits, heads_at_once, delay, slots, no_tile,
                               stat_tiles, QUERY_TILES)  # fmt: skip
    mask = BackwardMask(left, right, KIND)
    ds = make_ds_ring(DsTiles(ds_desc, ds_buffer, nowhere), slots, heads_at_once, group, split_tiles, width, KIND)
    sums = SplitSums(Partial, heads, config, SPLIT)
    dq = Gradient(DQ, stride_gb, stride_gm, stride_gh, config.DTYPE, COLUMNS_QK)
    dk = Gradient(DK, stride_xb, stride_xn, stride_xh, config.DTYPE, COLUMNS_QK, written)
    dv = Gradient(DV, stride_yb, stride_yn, stride_yh, config.DTYPE, COLUMNS_V, written)
    gl.warp_specialize(
        [
            (consume, (number, scheduler, pipe, mask, ds, sums, dq, dk, dv, scale)),
            (produce, (number, scheduler, pipe, mask, ds)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )
