"""Gradients of dense attention on sm_90 where head dims are wider than 128: dk and dv do not fit into one warpgroup's registers.

The work and its order are those of `attention_backward`.  One program an SM; two consumers make a work tile together
(`backward_wide_consumer`)."""

from .backward_config import BackwardConfig
from .backward_epilogue import Gradient, SplitSums
from .backward_mask import BackwardMask, Lengths
from .backward_mods import make_softcap
from .backward_pipeline import allocate_ds, allocate_pool, make_backward_pipeline
from .backward_producer import produce
from .backward_scheduler import Counters, SplitScheduler
from .backward_wide_consumer import consume, make_exchange
from .ds_ring import DsTiles, make_ds_ring
from .gluon import fence_async_shared, gl, jit

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_tiles", "kv_tiles", "left", "right", "split_tiles", "splits",
           "width", "heads_at_once", "segments", "delay", "slots", "no_tile", "nowhere",
           "stride_gb", "stride_gm", "stride_gh", "stride_xb", "stride_xn", "stride_xh", "stride_yb", "stride_yn",
           "stride_yh", "written", "stat_tiles", "columns_qk", "columns_v", "cap"]  # fmt: skip


@jit(do_not_specialize=RUNTIME)
def attention_backward_hopper_wide(
    q_desc, do_desc, k_desc, v_desc, stat_desc, ds_desc, DQ, DK, DV, Partial, Progress,
    scale, seq_q, seq_k, heads, group, q_tiles, kv_tiles, left, right, split_tiles, splits, width, heads_at_once, segments, delay,
    slots, no_tile, nowhere,
    stride_gb, stride_gm, stride_gh, stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh, written, stat_tiles,
    columns_qk, columns_v, cap,
    KIND: gl.constexpr, D: gl.constexpr, PANELS_QK: gl.constexpr, PANELS_V: gl.constexpr, SLOTS: gl.constexpr,
    QUERY_TILES: gl.constexpr, SOFTCAP: gl.constexpr, SPLIT: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `attention_backward.attention_backward_hopper`, with D = 192 or 256, the width of all tiles, of which PANELS_QK
    and PANELS_V panels of 64 columns hold the head dims.  columns_qk, columns_v: of the gradients; None: all that a product
    makes.  Partial [.., D].  SOFTCAP, cap: as of ScoreMods.  CONSUMER_REGISTERS, PRODUCER_REGISTERS: of a thread."""
    config = BackwardConfig(q_desc.dtype, D, SLOTS, QUERY_TILES, False, False, PANELS_QK, PANELS_V)
    memory = allocate_pool(stat_desc, config)
    exchange = make_exchange()
    ds_buffer = allocate_ds(config)
    pipe = make_backward_pipeline(q_desc, do_desc, k_desc, v_desc, stat_desc, memory, config, 2)
    fence_async_shared()
    counters = Counters(Progress, segments)
    number = counters.draw()
    lengths = Lengths(seq_q, seq_k, q_tiles, kv_tiles)
    scheduler = SplitScheduler(counters, lengths, heads, group, split_tiles, splits, heads_at_once, delay, slots, no_tile,
                               stat_tiles, QUERY_TILES)  # fmt: skip
    mask = BackwardMask(left, right, KIND)
    mods = make_softcap(scale, cap, SOFTCAP, KIND)
    ds = make_ds_ring(DsTiles(ds_desc, ds_buffer, nowhere), slots, heads_at_once, group, split_tiles, width, KIND)
    sums = SplitSums(Partial, heads, config, SPLIT)
    dq = Gradient(DQ, stride_gb, stride_gm, stride_gh, config.DTYPE, columns_qk)
    dk = Gradient(DK, stride_xb, stride_xn, stride_xh, config.DTYPE, columns_qk, written)
    dv = Gradient(DV, stride_yb, stride_yn, stride_yh, config.DTYPE, columns_v, written)
    gl.warp_specialize(
        [(consume, (c, number, scheduler, pipe, mask, mods, exchange, ds, sums, dq, dk, dv)) for c in (0, 1)]
        + [(produce, (number, scheduler, pipe, mask, ds))],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
