"""What the dense backward kernels for sm_90 do otherwise where the queries of a call are made in spans, a launch for each.

A launch sees the queries of one span, and the keys that these see: all ranges and masks are those of a call of its own.  A row
of dq has one span.  dk and dv are sums over spans, in fp32 in memory: each item adds to what the spans before left for its 64
keys, which no other item of the launch has.  So a sum has one order, that of the queries, and is rounded once.
"""

from .backward_work import await_copies
from .gluon import gl, jit, mbarrier, opaque
from .parts import LOG2E

UNIT = gl.constexpr(64)  # tokens of a tile


@jit
def add_rows(Out, acc, strides, i_b, i_h, i_n, seq, written, COLUMNS: gl.constexpr = None):
    """Store acc [64, D] as rows i_n * 64 on of Out [B, seq, H, ..] fp32, whose strides (batch, row, head) are multiples of 4; to
    rows before `written` add it.  COLUMNS: how many of the D there are (None: all), a multiple of 4.

    A quad of threads has 8 neighbouring columns of a row: each 32-byte sector is read and written whole."""
    LAYOUT: gl.constexpr = acc.type.layout
    stride_b, stride_n, stride_h = strides
    row = gl.expand_dims(gl.arange(0, UNIT, layout=gl.SliceLayout(1, LAYOUT)), 1) + i_n * UNIT
    column = gl.expand_dims(gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
    # in steps of 4, so that two columns are known to be one access
    place = i_b.to(gl.int64) * (stride_b // 4) + i_h.to(gl.int64) * (stride_h // 4) + row.to(gl.int64) * (stride_n // 4)
    place = Out + place * 4 + column
    live = (row < seq) & (column >= 0)
    if COLUMNS is not None:
        live = live & (opaque(column) < COLUMNS)  # as in parts.store_accumulator
    acc += gl.load(place, mask=live & (row < written), other=0.0)
    gl.store(place, acc, mask=live)


@jit
def finish_span(DK, DV, dk, dv, done, outs, i_b, i_k, i_n, scale, seq_k, written, COLUMNS_QK: gl.constexpr = None,
                COLUMNS_V: gl.constexpr = None):  # fmt: skip
    """As backward_parts.finish_keys, adding to what the spans before have left."""
    await_copies()
    mbarrier.arrive(done.index(0), count=1)
    add_rows(DV, dv, outs[3:], i_b, i_k, i_n, seq_k, written, COLUMNS_V)
    add_rows(DK, dk * (scale * (1 / LOG2E)), outs[:3], i_b, i_k, i_n, seq_k, written, COLUMNS_QK)
