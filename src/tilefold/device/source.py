"""KV sources: where tile i lies (LOCATE) and how it is brought (FETCH).  A new layout is a new pair here; of caches, in cache.py.

LOCATE(i, source, BLOCK_N) -> rows, cols, live
    rows  where the tile's rows are stored, in the form its FETCH takes     cols [N] int32: index of each key in its sequence
    live  [N] bool: the lane is a key of the sequence
FETCH(side, rows, live, EDGE, EMULATE, BLOCK_N, DIM, BLOCK_D) -> [N, BLOCK_D]
    lanes that are not live (looked at only when EDGE) and columns past DIM read as 0
"""

import triton
import triton.language as tl

from .tile import widen


@triton.jit
def locate_rows(i, source, BLOCK_N: tl.constexpr):
    """One contiguous sequence, source = (length,): rows is [N] int64."""
    cols = i * BLOCK_N + tl.arange(0, BLOCK_N)
    return cols.to(tl.int64), cols, cols < source[0]


@triton.jit
def fetch_rows(
    side, rows, live,
    EDGE: tl.constexpr, EMULATE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """By pointers, side = (base, row stride).  The int64 row offset is made anew for every tile: a part that does not change
    in the loop would be hoisted into two registers a row and cost 30 to 60 registers a thread."""
    base, stride = side
    return load_lanes(base, rows * stride, live, EDGE, EMULATE, DIM, BLOCK_D)


@triton.jit
def load_lanes(
    base,
    offsets,
    live,
    EDGE: tl.constexpr,
    EMULATE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows that begin `offsets` [N] int64 elements after base."""
    o_d = tl.arange(0, BLOCK_D)
    p = base + offsets[:, None] + o_d[None, :]
    if EDGE:
        inside = live[:, None]
        if DIM != BLOCK_D:
            inside = inside & (o_d < DIM)[None, :]
        x = tl.load(p, mask=inside, other=0.0)
    elif DIM != BLOCK_D:
        x = tl.load(p, mask=(o_d < DIM)[None, :], other=0.0)
    else:
        x = tl.load(p)
    return widen(x, EMULATE)


@triton.jit
def locate_box(i, source, BLOCK_N: tl.constexpr):
    """One contiguous sequence for a tensor descriptor: rows is the first row only, the box does the rest."""
    cols = i * BLOCK_N + tl.arange(0, BLOCK_N)
    return i * BLOCK_N, cols, cols < source[0]


@triton.jit
def fetch_box(
    side, rows, live,
    EDGE: tl.constexpr, EMULATE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """By the copy engine, side = (descriptor of [B, H, N, D], batch, head); it fills with 0 past the tensor's end."""
    descriptor, i_b, i_h = side
    return widen(descriptor.load([i_b, i_h, rows, 0]).reshape(BLOCK_N, BLOCK_D), EMULATE)


@triton.jit
def listed_block(i, source, BLOCK_N: tl.constexpr):
    """source = (list, sizes or None, length, BLOCK, offset of this head's sizes), BLOCK a multiple of N.
    -> tile i's KV block, and the tile's first row in it."""
    TILES: tl.constexpr = source[3] // BLOCK_N
    return tl.load(source[0] + i // TILES), i % TILES * BLOCK_N


@triton.jit
def live_in_block(block, o_n, cols, source):
    """Keys of the sequence that the block's size counts."""
    live = cols < source[2]
    if source[1] is not None:
        live = live & (o_n < tl.load(source[1] + source[4] + block))
    return live


@triton.jit
def locate_listed(i, source, BLOCK_N: tl.constexpr):
    """Tile i of the blocks that a list names, by pointers."""
    block, first = listed_block(i, source, BLOCK_N)
    o_n = first + tl.arange(0, BLOCK_N)
    cols = block * source[3] + o_n
    return cols.to(tl.int64), cols, live_in_block(block, o_n, cols, source)


@triton.jit
def locate_listed_box(i, source, BLOCK_N: tl.constexpr):
    """Tile i of the blocks that a list names, for a descriptor."""
    block, first = listed_block(i, source, BLOCK_N)
    o_n = first + tl.arange(0, BLOCK_N)
    cols = block * source[3] + o_n
    return block * source[3] + first, cols, live_in_block(block, o_n, cols, source)


@triton.jit
def locate_listed_page(i, source, BLOCK_N: tl.constexpr):
    """Tile i of the blocks that a list names, in a paged cache: source = what listed_block takes, then (table, PAGE), PAGE a
    multiple of N, so that the tile lies inside one page.  rows is (page, [N] rows in it)."""
    PAGE: tl.constexpr = source[6]
    block, first = listed_block(i, source, BLOCK_N)
    start = block * source[3] + first
    o_n = first + tl.arange(0, BLOCK_N)
    cols = block * source[3] + o_n
    # the table says nothing of pages past the sequence's end
    page = tl.load(source[5] + start // PAGE, mask=start < source[2], other=0)
    rows = (page.to(tl.int64), start % PAGE + tl.arange(0, BLOCK_N))
    return rows, cols, live_in_block(block, o_n, cols, source)


@triton.jit
def locate_listed_pages(i, source, BLOCK_N: tl.constexpr):
    """locate_listed_page for pages of any size: rows is a page [N] and a row in it [N] for each key."""
    PAGE: tl.constexpr = source[6]
    block, first = listed_block(i, source, BLOCK_N)
    o_n = first + tl.arange(0, BLOCK_N)
    cols = block * source[3] + o_n
    live = live_in_block(block, o_n, cols, source)
    page = tl.load(source[5] + cols // PAGE, mask=live, other=0)
    return (page.to(tl.int64), cols % PAGE), cols, live


@triton.jit
def live_of_row(cols, source):
    """source = (length, sizes or None, offset of this head's sizes): every row has a size, and is live if it is not 0."""
    live = cols < source[0]
    if source[1] is not None:
        live = live & (tl.load(source[1] + source[2] + cols, mask=live, other=0) > 0)
    return live


@triton.jit
def locate_live(i, source, BLOCK_N: tl.constexpr):
    """One contiguous sequence some of whose rows are dead (source as for live_of_row), by pointers."""
    cols = i * BLOCK_N + tl.arange(0, BLOCK_N)
    return cols.to(tl.int64), cols, live_of_row(cols, source)


@triton.jit
def locate_live_box(i, source, BLOCK_N: tl.constexpr):
    """locate_live for a descriptor."""
    cols = i * BLOCK_N + tl.arange(0, BLOCK_N)
    return i * BLOCK_N, cols, live_of_row(cols, source)


@triton.jit
def live_of_block(start, cols, source):
    """source = (length, sizes or None, offset of this head's sizes, BLOCK, first tile), BLOCK a multiple of the tile at `start`:
    the first sizes[block] tokens of each block are live."""
    live = cols < source[0]
    if source[1] is not None:
        block = start // source[3]
        live = live & (cols - block * source[3] < tl.load(source[1] + source[2] + block))
    return live


@triton.jit
def locate_sized(i, source, BLOCK_N: tl.constexpr):
    """Tile source[4] + i of one contiguous sequence in blocks of which only the first tokens are live, by pointers."""
    start = (source[4] + i) * BLOCK_N
    cols = start + tl.arange(0, BLOCK_N)
    return cols.to(tl.int64), cols, live_of_block(start, cols, source)


@triton.jit
def locate_sized_box(i, source, BLOCK_N: tl.constexpr):
    """locate_sized for a descriptor."""
    start = (source[4] + i) * BLOCK_N
    cols = start + tl.arange(0, BLOCK_N)
    return start, cols, live_of_block(start, cols, source)


@triton.jit
def locate_page(i, source, BLOCK_N: tl.constexpr):
    """Tile i of a sequence in pages, source = (length, table, 0, PAGE), PAGE a multiple of N, so that the tile lies inside one
    page.  rows is (page, [N] rows in it)."""
    PAGE: tl.constexpr = source[3]
    start = i * BLOCK_N
    o_n = tl.arange(0, BLOCK_N)
    page = tl.load(source[1] + start // PAGE).to(tl.int64)
    return (page, start % PAGE + o_n), start + o_n, start + o_n < source[0]


@triton.jit
def locate_pages(i, source, BLOCK_N: tl.constexpr):
    """locate_page for pages of any size, the first source[2] rows of which are no keys: rows is a page [N], a row in it [N]."""
    PAGE: tl.constexpr = source[3]
    cols = i * BLOCK_N + tl.arange(0, BLOCK_N)
    live = cols < source[0]
    row = cols + source[2]
    page = tl.load(source[1] + row // PAGE, mask=live, other=0)  # the table says nothing of pages past the end
    return (page.to(tl.int64), row % PAGE), cols, live


@triton.jit
def fetch_paged(
    side, rows, live,
    EDGE: tl.constexpr, EMULATE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """By pointers, side = (base, page stride, row stride), rows = (page int64, row in the page int32): int64 rows would cost 30
    registers a thread, so the row stride is int64 where a page spans 2^31 elements or more."""
    base, stride_p, stride_n = side
    page, row = rows
    return load_lanes(base, page * stride_p + row * stride_n, live, EDGE, EMULATE, DIM, BLOCK_D)


@triton.jit
def side_of(X, i_b, i_h, first, stride_b, stride_n, stride_h, BOX: tl.constexpr):
    """What FETCH takes for one sequence and head of X: for fetch_box if X is a descriptor of [B, H, N, D], else for fetch_rows,
    the sequence beginning at row `first`."""
    if BOX:
        return X, i_b.to(tl.int32), i_h.to(tl.int32)
    else:
        return X + i_b * stride_b + first * stride_n + i_h * stride_h, stride_n
