"""Matrix products that are added up, tile by tile."""

import triton
import triton.language as tl


@triton.jit
def add_product(a, b, acc):
    """acc + a b, in fp32.  Of fp32 factors the tile's product is made first: one chain of multiply-adds over all keys has an
    error that grows with the root of their number, three times that of torch over 1000; a chain a tile has that of a tile."""
    if a.dtype == tl.float32:
        return tl.fma(tl.dot(a, b, input_precision="ieee"), 1.0, acc)  # acc + dot(...) would be made one chain again
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
