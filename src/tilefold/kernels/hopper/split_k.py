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
