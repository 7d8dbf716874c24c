"""The static persistent tile scheduler of matrix products: program p makes the tiles p, p + programs, ... in grouped order."""

from .gluon import gl, jit
from .structs import Value, struct


@struct
class WorkTile:
    """128 rows and BLOCK_N columns of one batch entry of the result, summed over the steps `first` to `last` of K."""

    row: Value
    column: Value
    batch: Value
    split: Value
    first: Value
    last: Value


@struct
class TileScheduler:
    """work = tiles_m * tiles_n * batch * splits tiles.  steps: of K.  GROUP: rows of tiles that share columns of B in L2."""

    tiles_m: gl.tensor
    tiles_n: gl.tensor
    steps: gl.tensor
    splits: gl.tensor
    work: gl.tensor
    GROUP: gl.constexpr
    BLOCK_N: gl.constexpr

    @jit
    def tile(self, item):
        """Work tile number `item`; the order is device.epilogue.grouped_place's."""
        tiles = self.tiles_m * self.tiles_n
        rest = item // tiles
        number = item - rest * tiles
        batch = rest // self.splits
        split = rest - batch * self.splits
        width = self.GROUP * self.tiles_n
        group = number // width * self.GROUP
        rows = gl.minimum(self.tiles_m - group, self.GROUP)
        inside = number % width
        row = (group + inside % rows) * 128
        column = (inside // rows) * self.BLOCK_N
        first = self.steps * split // self.splits
        last = self.steps * (split + 1) // self.splits
        return WorkTile(row, column, batch, split, first, last)
