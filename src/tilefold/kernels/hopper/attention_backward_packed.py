"""Gradients of dense attention over packed sequences on sm_90: as `attention_backward`, in an order made on the device.

`kernels.backward_packed` has written what each work tile is: an entry with a sequence, its lengths, a tile of it, the slot of dS,
and whom to wait for.  Tiles are loaded from the middle of packed tensors, so what lies past the end of a sequence is the next
one, and may be NaN: its rows are zeroed in shared memory, since neither a mask nor a probability of 0 takes a NaN out of a
product.

    K, V          the KV tile's own, once: scores and dP of these keys are 0, their probabilities are masked
    q, dout       the last tile of the sequence; its statistics say that those queries count for nothing
    K             for dq, the last tile: dS is 0 there

Of head dims wider than 128 two consumers make a work tile, as in `attention_backward_wide`.
"""

from .backward_config import BackwardConfig
from .backward_consumer import consume
from .backward_epilogue import Gradient, SplitSums
from .backward_mask import BackwardMask
from .backward_mods import make_softcap
from .backward_pipeline import allocate_ds, allocate_pool, make_backward_pipeline
from .backward_producer import produce
from .backward_scheduler import Counters, PackedScheduler
from .backward_wide_consumer import consume as consume_wide
from .backward_wide_consumer import make_exchange
from .ds_ring import DsTiles, PackedDsRing
from .gluon import fence_async_shared, gl, jit

RUNTIME = ["scale", "group", "total_q", "q_places", "left", "right", "slots", "width", "segments", "no_tile", "nowhere",
           "stride_gm", "stride_gh", "stride_xn", "stride_xh", "stride_yn", "stride_yh", "columns_qk", "columns_v",
           "cap"]  # fmt: skip


@jit(do_not_specialize=RUNTIME)
def attention_backward_packed(
    q_desc, do_desc, k_desc, v_desc, stat_desc, ds_desc, DQ, DK, DV, Entries, Progress,
    scale, group, total_q, q_places, left, right, slots, width, segments, no_tile, nowhere,
    stride_gm, stride_gh, stride_xn, stride_xh, stride_yn, stride_yh, columns_qk, columns_v, cap,
    KIND: gl.constexpr, D: gl.constexpr, PANELS_QK: gl.constexpr, PANELS_V: gl.constexpr, SLOTS: gl.constexpr,
    QUERY_TILES: gl.constexpr, HOLD: gl.constexpr, SOFTCAP: gl.constexpr, CONSUMERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q_desc, do_desc [1, H, total_q, D], k_desc, v_desc [1, H/group, total_k, D] with boxes [1, 1, 64, 64]; stat_desc:
    statistics as one dimension, box [128], a row for each of q_places places of each head, the last being number no_tile;
    ds_desc [nowhere, 64], box [64, 64]: the ring of dS, a slot of group * width tiles for each KV tile.  DQ [total_q, H, D], DK,
    DV [total_k, H/group, D] by strides; Entries: the work tiles, in order.  scale > 0.  KIND, left, right: as of
    attention_backward.  QUERY_TILES of a work tile for dq, as the entries have them: CONSUMERS where those are 2.  The other
    constants, columns_qk, columns_v and cap as of attention_backward_wide; of one consumer head dims are D, without SOFTCAP.

    Progress [1 + 2 * segments] int32: zeros.  Grid: a program for each entry; which one it makes, it draws."""
    config = BackwardConfig(q_desc.dtype, D, SLOTS, QUERY_TILES, HOLD, True, PANELS_QK, PANELS_V)
    memory = allocate_pool(stat_desc, config)
    ds = PackedDsRing(DsTiles(ds_desc, allocate_ds(config), nowhere), group, slots, width)
    pipe = make_backward_pipeline(q_desc, do_desc, k_desc, v_desc, stat_desc, memory, config, CONSUMERS)
    fence_async_shared()
    counters = Counters(Progress, segments)
    number = counters.draw()
    scheduler = PackedScheduler(counters, Entries, group, total_q, q_places, no_tile, QUERY_TILES)
    mask = BackwardMask(left, right, KIND)
    sums = SplitSums(None, group, config, False)
    dq = Gradient(DQ, None, stride_gm, stride_gh, config.DTYPE, columns_qk)
    dk = Gradient(DK, None, stride_xn, stride_xh, config.DTYPE, columns_qk)
    dv = Gradient(DV, None, stride_yn, stride_yh, config.DTYPE, columns_v)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consume, (number, scheduler, pipe, mask, ds, sums, dq, dk, dv, scale)),
                (produce, (number, scheduler, pipe, mask, ds)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    else:
        exchange = make_exchange()
        mods = make_softcap(scale, cap, SOFTCAP, KIND)
        fence_async_shared()
        gl.warp_specialize(
            [(consume_wide, (c, number, scheduler, pipe, mask, mods, exchange, ds, sums, dq, dk, dv)) for c in (0, 1)]
            + [(produce, (number, scheduler, pipe, mask, ds))],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
