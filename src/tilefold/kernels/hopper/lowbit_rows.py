"""Products of few rows with weights of few bits: each warp walks blocks of K of its own.

x [M, K] times W^T, M at most BLOCK_M = 8 or 16.  Memory-bound: what counts is bytes in flight, and instructions a word.  A warp
reads 16 bytes a thread, in the order in which they lie; that those are not the columns that mma.sync expects of that thread does
not matter, since x is read in the same order: thread c of a quad has elements 8 c to 8 c + 7 of each slab, of weights and of x.
So no element moves between threads: weights go through a ring of DEPTH tiles in shared memory, in which each thread reads what it
has copied itself (DEPTH 1: through registers, one step ahead, as x is).  At the end the warps' sums are added in order; splits
of K over programs are added by the last to arrive, in order.
"""

from .gluon import copies_commit, copies_wait, copy_async, gl, jit, let_next_start, mma, wait_for_previous
from .lowbit_parts import halves, middle, twice, unpack_words, zero_terms
from .split_k import Output, Partials
from .structs import Buffer, Value, struct

RUNTIME = ["M", "N", "rows", "groups", "blocks", "each"]


@jit
def in_order(x):
    """Words [W, R, 16] as they lie -> with the columns that make them the operand of mma.sync that a thread has."""
    W: gl.constexpr = x.shape[0]
    R: gl.constexpr = x.shape[1]
    return x.reshape([W, R, 4, 2, 2]).permute([0, 1, 3, 4, 2]).reshape([W, R, 16])


@struct
class Steps:
    """What the warps walk: steps of W blocks of K, one a warp.

    low, high: pointers to a plane's words [W, BLOCK_N, 16]; high None but of 3 bits.  low_ring, high_ring: words on their way,
    [DEPTH, W, BLOCK_N, 16], of DEPTH > 1.  x: pointers to words of x [1, BLOCK_M, 16]; x_live: rows that there are; x_word: the
    words' numbers.  Scales, Zeros (or None): pointers to those of BLOCK_N rows.  end: of this program's blocks.  GROUP: columns
    that share a scale; CHUNK: slabs that do.  EVEN: K is a multiple of the block."""

    low: gl.tensor
    high: Value
    low_ring: gl.shared_memory_descriptor
    high_ring: Buffer
    x: gl.tensor
    x_live: gl.tensor
    x_word: gl.tensor
    Scales: gl.tensor
    Zeros: Value
    stride_sg: Value
    n_live: gl.tensor
    end: Value
    K: Value
    rows: Value
    groups: Value
    BITS: gl.constexpr
    GROUP: gl.constexpr
    CHUNK: gl.constexpr
    SLABS: gl.constexpr
    EVEN: gl.constexpr
    DEPTH: gl.constexpr

    @jit
    def _mine(self, block):
        """The block of each warp [W, 1, 1], of a step that begins at `block`."""
        LOAD: gl.constexpr = self.low.type.layout
        return block + gl.arange(0, self.low.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, LOAD)))[:, None, None]

    @jit
    def load(self, block):
        """Everything of a step, but for words that go through the ring -> tuple: SLABS of x, scales and zeros of each chunk."""
        W: gl.constexpr = self.low.shape[0]
        ROW: gl.constexpr = self.n_live.type.layout
        mine = self._mine(block)
        live = mine < self.end
        made = ()
        if self.DEPTH == 1:
            made = (gl.load(self.low + mine.to(gl.int64) * (self.rows * 16), mask=live, other=0),)
            if self.BITS == 3:
                made = made + (gl.load(self.high + (mine // 2).to(gl.int64) * (self.rows * 16), mask=live, other=0),)
        for j in gl.static_range(self.SLABS):
            k = mine * (self.SLABS * 16) + j * 16
            m_here = self.x_live & live
            if not self.EVEN:
                m_here = m_here & (k + self.x_word < self.K // 2)
            made = made + (gl.load(self.x + k, mask=m_here, other=0),)
        i_r = gl.arange(0, W, gl.SliceLayout(1, ROW))[:, None]
        for c in gl.static_range(self.SLABS // self.CHUNK):
            column = (block + i_r) * (self.SLABS * 32) + c * self.CHUNK * 32
            i_g = gl.minimum(column // self.GROUP, self.groups - 1).to(gl.int64)
            made = made + (gl.load(self.Scales + i_g * self.stride_sg, mask=self.n_live, other=0.0),)
            if self.Zeros is not None:
                made = made + (gl.load(self.Zeros + i_g * self.stride_sg, mask=self.n_live, other=0),)
        return made

    @jit
    def copy(self, slot, block):
        """Copy the words of a step to a slot of the ring: each thread what it will read itself."""
        mine = self._mine(block)
        live = mine < self.end
        copy_async(self.low_ring.index(slot), self.low + mine.to(gl.int64) * (self.rows * 16), mask=live)
        if self.BITS == 3:
            copy_async(self.high_ring.index(slot), self.high + (mine // 2).to(gl.int64) * (self.rows * 16), mask=live)
        copies_commit()

    @jit
    def multiply(self, acc, slot, block, step, DTYPE: gl.constexpr):
        """acc + the products of a step, each chunk's times its scales; step: as loaded."""
        A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, k_width=2)
        B: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, k_width=2)
        BITS: gl.constexpr = self.BITS
        SLABS: gl.constexpr = self.SLABS
        FIRST: gl.constexpr = 0 if self.DEPTH > 1 else 2 if BITS == 3 else 1
        ZEROS: gl.constexpr = self.Zeros is not None
        EACH: gl.constexpr = 2 if ZEROS else 1
        LOAD: gl.constexpr = self.low.type.layout
        low = in_order(step[0] if self.DEPTH == 1 else self.low_ring.index(slot).load(LOAD))
        high = low
        if BITS == 3:
            words = step[1] if self.DEPTH == 1 else self.high_ring.index(slot).load(LOAD)
            shift = (8 * (self._mine(block) & 1)).to(gl.uint32)
            high = in_order(words.to(gl.uint32, bitcast=True) >> shift).to(gl.int32, bitcast=True)
        for c in gl.static_range(SLABS // self.CHUNK):
            if ZEROS:
                z = zero_terms(step[FIRST + SLABS + EACH * c + 1].to(gl.float32), BITS, DTYPE)
                z = gl.convert_layout(twice(z), gl.SliceLayout(2, low.type.layout), assert_trivial=True)
                zeros = gl.expand_dims(z, 2).broadcast_to(low.shape)
            else:
                zeros = twice(gl.full(low.shape, middle(BITS, DTYPE), DTYPE, low.type.layout))
            part = gl.zeros_like(acc)
            for j in gl.static_range(self.CHUNK):
                w = unpack_words(low, high, zeros, c * self.CHUNK + j, BITS, DTYPE)
                x = halves(in_order(step[FIRST + c * self.CHUNK + j]), DTYPE).permute([0, 2, 1])
                part = mma(
                    gl.convert_layout(w, A, assert_trivial=True), gl.convert_layout(x, B, assert_trivial=True), part
                )
            acc = acc + part * gl.expand_dims(step[FIRST + SLABS + EACH * c].to(gl.float32), 2)
        return acc


@jit(do_not_specialize=RUNTIME)
def lowbit_rows(
    X, Packed, High, Scales, Zeros, Bias, Out, Part, Arrived, M, N, K, rows, groups, blocks, each, stride_xm, stride_sg,
    stride_sn, stride_om, BITS: gl.constexpr, GROUP: gl.constexpr, CHUNK: gl.constexpr, SPLITS: gl.constexpr, EARLY: gl.constexpr,
    EVEN: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """X [M, K], M at most BLOCK_M, rows 16-byte aligned; planes [blocks, rows, 16] int32; Scales, Zeros (uint8 or None) by
    strides g, n; Out [M, N].  GROUP: columns that share a scale; CHUNK: slabs.
    K a multiple of the block if EVEN, of 16 in any case.
    Grid (cdiv(N, BLOCK_N), SPLITS); a split makes `each` blocks.  Part [SPLITS, M, N] fp32, Arrived int32 zeros, one a tile.
    EARLY: a dependent launch."""
    W: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = X.dtype.element_ty
    SLABS: gl.constexpr = 8 if BITS == 3 else 16 // BITS
    LOAD: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [W, 1, 1], [2, 1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    ROW: gl.constexpr = gl.SliceLayout(2, ACC)
    tile, i_k = gl.program_id(0), gl.program_id(1)
    first = i_k * each
    end = gl.minimum(first + each, blocks)
    wait_for_previous(EARLY)
    o_l = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, LOAD)))[None, None, :]
    o_w = (tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, LOAD))))[None, :, None] * 16 + o_l
    o_w = o_w + gl.full([W, BLOCK_N, 16], 0, gl.int32, LOAD)
    low, high = Packed + o_w, None
    if BITS == 3:
        high = High + o_w
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, LOAD)))[None, :, None]
    words = X.to(gl.pointer_type(gl.int32), bitcast=True)
    o_n = (tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, ROW)))[None, :]
    scales, zeros = Scales + o_n * stride_sn, None
    if Zeros is not None:
        zeros = Zeros + o_n * stride_sn
    acc = gl.zeros([W, BLOCK_N, BLOCK_M], gl.float32, ACC)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    low_ring, high_ring = gl.allocate_shared_memory(gl.int32, [DEPTH, W, BLOCK_N, 16], SHARED), None
    if BITS == 3 and DEPTH > 1:
        high_ring = gl.allocate_shared_memory(gl.int32, [DEPTH, W, BLOCK_N, 16], SHARED)
    x = words + o_m.to(gl.int64) * (stride_xm // 2) + o_l
    steps = Steps(low, high, low_ring, high_ring, x, o_m < M, o_l, scales, zeros, stride_sg, o_n < N, end, K, rows, groups, BITS,
                  GROUP, CHUNK, SLABS, EVEN, DEPTH)  # fmt: skip
    for d in gl.static_range(DEPTH - 1):
        steps.copy(d, first + d * W)
    a = steps.load(first)
    slot = 0
    # two names for what is held of x, in turn: nothing is moved from register to register
    for block in range(first, end, 2 * W):
        if DEPTH > 1:
            copies_wait(DEPTH - 2)
        b = steps.load(block + W)
        if DEPTH > 1:
            steps.copy((slot + DEPTH - 1) % DEPTH, block + (DEPTH - 1) * W)
        acc = steps.multiply(acc, slot, block, a, DTYPE)
        slot = (slot + 1) % DEPTH
        if DEPTH > 1:
            copies_wait(DEPTH - 2)
        a = steps.load(block + 2 * W)
        if DEPTH > 1:
            steps.copy((slot + DEPTH - 1) % DEPTH, block + DEPTH * W)
        acc = steps.multiply(acc, slot, block + W, b, DTYPE)
        slot = (slot + 1) % DEPTH
    if DEPTH > 1:
        copies_wait(0)
    let_next_start(EARLY)
    total = gl.sum(acc, 0)  # [BLOCK_N, BLOCK_M]
    partials = Partials(Part, Arrived, M.to(gl.int64) * N, SPLITS)
    Output(Out, Bias, stride_om, M, N, partials).finish(total, tile * BLOCK_N, 0, tile, i_k, None)
