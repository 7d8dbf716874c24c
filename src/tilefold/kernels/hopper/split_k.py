"""Split-K of products with few rows of x: programs that share a tile, each with some steps of K, and the sum of their parts."""

from .gluon import gl, jit, thread_barrier
from .structs import Value, struct


@struct
class SplitTile:
    """ROWS rows of the weight from `row` on, rows of x from `token` on, steps `first` to `end` of K."""

    item: Value
    row: Value
    token: Value
    split: Value
    first: Value
    end: Value


@jit
def tile_of_program(M, steps, each, ROWS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Of the grid (tiles, splits): rows of x fastest; a split makes `each` steps."""
    tiles_m = gl.cdiv(M, BLOCK_M)
    item, split = gl.program_id(0), gl.program_id(1)
    first = split * each
    return SplitTile(
        item, (item // tiles_m) * ROWS, (item % tiles_m) * BLOCK_M, split, first, gl.minimum(first + each, steps)
    )


@struct
class Partials:
    """Part [SPLITS, M, N]: what each split has summed.  Arrived int32, 0 before the launch and after it: splits that are done."""

    Part: Value
    Arrived: Value
    size: Value  # M * N
    SPLITS: gl.constexpr

    @jit
    def join(self, acc, item, split, place, inside):
        """-> the sum of all splits in their order, and whether this program is the last to arrive, which has it.

        item: of Arrived.  place, inside: of acc's elements in [M, N]."""
        if self.SPLITS > 1:
            gl.store(self.Part + split * self.size + place, acc, mask=inside)
            thread_barrier()
            last = gl.atomic_add(self.Arrived + item, 1, sem="acq_rel", scope="gpu") == self.SPLITS - 1
            if last:
                gl.store(self.Arrived + item, 0)
            thread_barrier()
            if last:
                acc = gl.zeros_like(acc)
                if acc.shape[0] * acc.shape[1] <= 1024:  # all loads at once
                    for s in gl.static_range(self.SPLITS):
                        acc += gl.load(self.Part + s * self.size + place, mask=inside, other=0.0, cache_modifier=".cg")
                else:
                    for s in range(gl.num_programs(1)):  # not unrolled: registers
                        acc += gl.load(self.Part + s * self.size + place, mask=inside, other=0.0, cache_modifier=".cg")
            return acc, last
        else:
            return acc, True


@struct
class Factors:
    """Of products of 8-bit numbers: ScaleA of rows of x, ScaleB of rows of the weight by a stride, fp32."""

    ScaleA: gl.tensor
    ScaleB: gl.tensor
    stride_sb: Value

    @jit
    def apply(self, acc, o_n, o_m, M, N):
        """Sums [o_n, o_m] times their factors, in fp32."""
        x = acc.to(gl.float32) * gl.load(self.ScaleA + o_m, mask=o_m < M, other=0.0)[None, :]
        return x * gl.load(self.ScaleB + o_n.to(gl.int64) * self.stride_sb, mask=o_n < N, other=0.0)[:, None]


@struct
class Output:
    """Out [M, N], rows stride_om apart, Bias [N] or None, and what the splits of K have summed."""

    Out: gl.tensor
    Bias: Value
    stride_om: Value
    M: Value
    N: Value
    partials: Partials

    @jit
    def finish(self, acc, row, token, item, split, factors):
        """Store sums [rows of W, rows of x] from `row` and `token` on, times their factors (None: as they are) and with their
        bias, if this is the last split to arrive."""
        M, N = self.M, self.N
        o_n = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        o_m = token + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        inside = (o_n < N)[:, None] & (o_m < M)[None, :]
        place = o_m[None, :].to(gl.int64) * N + o_n[:, None]
        acc, last = self.partials.join(acc, item, split, place, inside)
        if last:
            out = acc
            if factors is not None:
                out = factors.apply(acc, o_n, o_m, M, N)
            if self.Bias is not None:
                out += gl.load(self.Bias + o_n, mask=o_n < N, other=0.0).to(gl.float32)[:, None]
            to = self.Out + o_m[None, :].to(gl.int64) * self.stride_om + o_n[:, None]
            gl.store(to, out.to(self.Out.dtype.element_ty), mask=inside)
