"""Products with weights of few bits on sm_90 for many rows: weights are dequantised in registers, the left operand of wgmma.

A program makes CONSUMERS * 64 rows of W times BLOCK_M rows of x, over `each` blocks of K:

    producer    1 warp     loads blocks by TMA into a ring: the planes' tiles, and panels of 64 columns of x that all
                           consumers read
    consumers   4 warps    64 rows of W: elements to registers, unpack, subtract, scale; products with the panels

A consumer unpacks the next panel's weights beside the product of the one before; the others' products fill the tensor cores
meanwhile.  Values are those of the dequantised weight in x's dtype.
"""

from .gluon import (
    descriptor,
    fence_async_shared,
    gl,
    jit,
    let_next_start,
    tma_load,
    wait_for_previous,
    wgmma,
    wgmma_wait,
)
from .lowbit_parts import middle, shift_high, unpack, zero_terms
from .ring import Ring, make_ring, swizzled
from .split_k import Output, Partials, tile_of_program
from .structs import Buffer, Value, struct

RUNTIME = ["M", "group", "groups", "blocks", "each"]


@struct
class Operands:
    """A stage is a block of K: of each consumer the planes' tiles [64, 32] int16, and PANELS panels of x [BLOCK_M, 64].  A panel
    has barriers of its own, which are the ring's stages; the planes come with a block's first.  h_buf: of 3 bits the high
    ones, else None."""

    w_desc: descriptor
    h_desc: descriptor | gl.constexpr
    x_desc: descriptor
    w_buf: gl.shared_memory_descriptor
    h_buf: Buffer
    x_buf: gl.shared_memory_descriptor
    ring: Ring
    rows: Value  # of a plane's block
    CONSUMERS: gl.constexpr
    BLOCK_M: gl.constexpr
    SLOTS: gl.constexpr
    PANELS: gl.constexpr

    @jit
    def load(self, i, row, token, block):
        """Issue the TMA loads of a block, the i-th of this program."""
        PLANES: gl.constexpr = 2 if self.h_buf is not None else 1
        slot = i % self.SLOTS
        for p in gl.static_range(self.PANELS):
            panel = slot * self.PANELS + p
            self.ring.acquire(panel, i // self.SLOTS)
            bar = self.ring.expect(panel, self.BLOCK_M * 128 + (self.CONSUMERS * 64 * 64 * PLANES if p == 0 else 0))
            if p == 0:
                for c in gl.static_range(self.CONSUMERS):
                    mine = row + c * 64
                    tma_load(
                        self.w_desc, [block * self.rows + mine, 0], bar, self.w_buf.index(slot * self.CONSUMERS + c)
                    )
                    if self.h_buf is not None:
                        high = self.h_buf.index(slot * self.CONSUMERS + c)
                        tma_load(self.h_desc, [(block // 2) * self.rows + mine, 0], bar, high)
            tma_load(self.x_desc, [token, (block * self.PANELS + p) * 64], bar, self.x_buf.index(panel))


@struct
class Terms:
    """Scales, and zero points or None, by strides; `group` columns share one, CHUNK slabs do.  SLABS: of a block."""

    Scales: gl.tensor
    Zeros: Value
    stride_sg: Value
    stride_sn: Value
    group: Value
    groups: Value
    CHUNK: gl.constexpr
    SLABS: gl.constexpr

    @jit
    def load(self, o_n, live, block):
        """Scales, and zeros if any, of each chunk of a block for rows o_n of the weight: a tuple."""
        rows = o_n.to(gl.int64) * self.stride_sn
        made = ()
        for c in gl.static_range(self.SLABS // self.CHUNK):
            i_g = gl.minimum((block * (self.SLABS * 32) + c * self.CHUNK * 32) // self.group, self.groups - 1).to(
                gl.int64
            )
            made = made + (gl.load(self.Scales + i_g * self.stride_sg + rows, mask=live, other=0.0),)
            if self.Zeros is not None:
                made = made + (gl.load(self.Zeros + i_g * self.stride_sg + rows, mask=live, other=0),)
        return made


@jit
def _produce(operands, tile):
    """Make every load."""
    for block in range(tile.first, tile.end):
        operands.load(block - tile.first, tile.row, tile.token, block)


@jit
def _side_by_side(a, b, LAYOUT: gl.constexpr):
    """[R, 32] and [R, 32] -> [R, 64]."""
    both = gl.join(a, b).permute([0, 2, 1]).reshape([a.shape[0], 64])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@jit
def _panel(low, high, terms, P: gl.constexpr, BITS: gl.constexpr, CHUNK: gl.constexpr, ZEROS: gl.constexpr, LAYOUT: gl.constexpr,
           DTYPE: gl.constexpr):  # fmt: skip
    """Weights [64, 64] of panel P of a block."""
    EACH: gl.constexpr = 2 if ZEROS else 1
    parts = ()
    for j in gl.static_range(2):
        scales = gl.expand_dims(terms[EACH * ((2 * P + j) // CHUNK)], 1).broadcast_to(low.shape)
        if ZEROS:
            z = zero_terms(terms[EACH * ((2 * P + j) // CHUNK) + 1].to(gl.float32), BITS, DTYPE)
            zeros = gl.expand_dims(z, 1).broadcast_to(low.shape)
        else:
            zeros = gl.full(low.shape, middle(BITS, DTYPE), DTYPE, LAYOUT)
        parts = parts + (unpack(low, high, zeros, scales, 2 * P + j, BITS, True, DTYPE),)
    return _side_by_side(parts[0], parts[1], LAYOUT)


@jit
def _consume(operands, terms_of, output, tile, BITS: gl.constexpr, EARLY: gl.constexpr, CID: gl.constexpr):
    """Consumer number CID: rows CID * 64 on of this program's tile."""
    ring = operands.ring
    CONSUMERS: gl.constexpr = operands.CONSUMERS
    PANELS: gl.constexpr = operands.PANELS
    SLOTS: gl.constexpr = operands.SLOTS
    CHUNK: gl.constexpr = terms_of.CHUNK
    DTYPE: gl.constexpr = operands.x_buf.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, operands.BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, k_width=2)
    ZEROS: gl.constexpr = terms_of.Zeros is not None
    o_n = tile.row + CID * 64 + gl.arange(0, 64, gl.SliceLayout(1, A))
    live = o_n < output.N
    terms = terms_of.load(o_n, live, tile.first)
    acc = gl.zeros([64, operands.BLOCK_M], gl.float32, ACC)
    for block in range(tile.first, tile.end):
        i = block - tile.first
        slot = i % SLOTS
        if CONSUMERS == 4:
            terms = terms_of.load(o_n, live, block)
        ring.wait(slot * PANELS, i // SLOTS)
        low = operands.w_buf.index(slot * CONSUMERS + CID).load(A)
        high = low
        if BITS == 3:
            high = operands.h_buf.index(slot * CONSUMERS + CID).load(A)
            high = shift_high(high, gl.full([64, 32], 0, gl.int16, A) + (8 * (block & 1)).to(gl.int16))
        following = terms
        if CONSUMERS == 2:  # of four, the others hide that they are waited for; registers are scarcer
            following = terms_of.load(o_n, live, block + 1)
        w = _panel(low, high, terms, 0, BITS, CHUNK, ZEROS, A, DTYPE)
        for p in gl.static_range(PANELS):
            panel = slot * PANELS + p
            if p:
                ring.wait(panel, i // SLOTS)
            flying = wgmma(w, operands.x_buf.index(panel).permute((1, 0)), acc, is_async=True)
            ahead = w
            if p + 1 < PANELS:
                ahead = _panel(low, high, terms, p + 1, BITS, CHUNK, ZEROS, A, DTYPE)
            acc = wgmma_wait(0, deps=(flying,))
            ring.release(panel)
            w = ahead
        terms = following
    let_next_start(EARLY)
    # four neighbouring rows of W a thread: they lie side by side in Out and in the partials
    STORE: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    acc = gl.convert_layout(acc, STORE)
    output.finish(acc, tile.row + CID * 64, tile.token, tile.item * CONSUMERS + CID, tile.split, None)


@jit(do_not_specialize=RUNTIME)
def lowbit_matmul_hopper(
    x_desc, w_desc, h_desc, Scales, Zeros, Bias, Out, Part, Arrived, M, N, rows, group, groups, blocks, each, stride_sg,
    stride_sn, stride_om, BITS: gl.constexpr, CHUNK: gl.constexpr, SPLITS: gl.constexpr, EARLY: gl.constexpr,
    BLOCK_M: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """x_desc [M, K] with boxes [BLOCK_M, 64], w_desc, h_desc (3 bits) planes as int16 [blocks * rows, 32] with boxes [64, 32];
    Scales (in x's dtype), Zeros (uint8 or None) by strides g, n; Out [M, N].
    CHUNK: slabs that share a scale.  Grid (cdiv(M, BLOCK_M) * cdiv(N, CONSUMERS * 64), splits), rows of x fastest; a split makes
    `each` blocks.  Part [splits, M, N] fp32, Arrived int32 zeros, CONSUMERS (2 or 4) an item.
    EARLY: a dependent launch.  SLOTS: blocks in the ring."""
    DTYPE: gl.constexpr = x_desc.dtype
    SLABS: gl.constexpr = 8 if BITS == 3 else 16 // BITS
    PANELS: gl.constexpr = SLABS // 2
    W_SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    tile = tile_of_program(M, blocks, each, CONSUMERS * 64, BLOCK_M)
    wait_for_previous(EARLY)
    w_buf = gl.allocate_shared_memory(gl.int16, [SLOTS * CONSUMERS, 64, 32], W_SHARED)
    h_buf = None
    if BITS == 3:
        h_buf = gl.allocate_shared_memory(gl.int16, [SLOTS * CONSUMERS, 64, 32], W_SHARED)
    x_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, BLOCK_M, 64], swizzled(2))
    ring = make_ring(SLOTS * PANELS, CONSUMERS)
    fence_async_shared()
    operands = Operands(w_desc, h_desc, x_desc, w_buf, h_buf, x_buf, ring, rows, CONSUMERS, BLOCK_M, SLOTS, PANELS)
    terms = Terms(Scales, Zeros, stride_sg, stride_sn, group, groups, CHUNK, SLABS)
    partials = Partials(Part, Arrived, M.to(gl.int64) * N, SPLITS)
    output = Output(Out, Bias, stride_om, M, N, partials)
    if CONSUMERS == 4:
        gl.warp_specialize([
            (_consume, (operands, terms, output, tile, BITS, EARLY, 0)),
            (_consume, (operands, terms, output, tile, BITS, EARLY, 1)),
            (_consume, (operands, terms, output, tile, BITS, EARLY, 2)),
            (_consume, (operands, terms, output, tile, BITS, EARLY, 3)),
            (_produce, (operands, tile)),
        ], [4, 4, 4, 1], [120, 120, 120, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (operands, terms, output, tile, BITS, EARLY, 0)),
            (_consume, (operands, terms, output, tile, BITS, EARLY, 1)),
            (_produce, (operands, tile)),
        ], [4, 1], [240, 24])  # fmt: skip
