"""Which work the dense forward kernel for sm_90 does: the order of query blocks, their places, their tiles, their masks.

The kinds of bands are those of device.ranges, but for PREFIX, which this kernel does not have."""

from ...device.ranges import FULL, WINDOW
from .gluon import gl, jit, opaque, thread_barrier
from .parts import columns_of, place_of_item

LEAVE = gl.constexpr(-1)  # notes that name no block: there are no more
NOTHING = gl.constexpr(-2)  # there may be; only say that the one before is through


# ---------------------------------------------------------------- where a block lies


@jit
def block_of_item(item, q_blocks, heads):
    """-> query block, batch entry, head: the last query blocks of a head come first."""
    i_q, i_b, i_h = place_of_item(item, q_blocks, heads)
    return q_blocks - 1 - i_q, i_b, i_h


@jit
def sequence_of_place(CuQ, place, batch, ROWS: gl.constexpr):
    """-> sequence, query block in it: of `place` among the total // ROWS + batch places of a packed batch.

    Sequence b begins at place CuQ[b] // ROWS + b and has at least as many places as blocks of ROWS queries, whatever the
    offsets; nobody counts blocks.  What is behind its last block, or before the first sequence, is left out."""
    low = place - place
    high = low + batch
    while high - low > 1:
        middle = (low + high) // 2
        before = gl.load(CuQ + middle) // ROWS + middle <= place
        low = gl.where(before, middle, low)
        high = gl.where(before, high, middle)
    return low, place - gl.load(CuQ + low) // ROWS - low


@jit
def find_place(CuQ, CuK, batch, item, seq_q, seq_k, heads, q_blocks, VARLEN: gl.constexpr, ROWS: gl.constexpr):
    """_read_place, of the producer, which finds it; and the row of the first key, whether there is anything to do, and which
    sequence it is."""
    if VARLEN:
        i_h = item // q_blocks
        i_s, i_q = sequence_of_place(CuQ, q_blocks - 1 - (item - i_h * q_blocks), batch, ROWS)
        first_q, first_k = gl.load(CuQ + i_s), gl.load(CuK + i_s)
        n_q = gl.load(CuQ + i_s + 1) - first_q
        n_k = gl.load(CuK + i_s + 1) - first_k
        return i_q, item - item, i_h, n_q, n_k, first_q, first_k, (i_q >= 0) & (i_q * ROWS < n_q), i_s
    else:
        i_q, i_b, i_h = block_of_item(item, q_blocks, heads)
        return i_q, i_b, i_h, seq_q, seq_k, 0, 0, True, i_b


@jit
def write_note(note, item, i_q, seq_q, seq_k, first_q, i_s, VARLEN: gl.constexpr, NUMBERED: gl.constexpr):
    """What the consumers are to do, or LEAVE or NOTHING; of a packed batch, where its sequence lies, too, and if NUMBERED which
    it is."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    if VARLEN:
        note.index(0).store(gl.full([1], item, gl.int32, LAYOUT))
        note.index(1).store(gl.full([1], i_q, gl.int32, LAYOUT))
        note.index(2).store(gl.full([1], seq_q, gl.int32, LAYOUT))
        note.index(3).store(gl.full([1], seq_k, gl.int32, LAYOUT))
        note.index(4).store(gl.full([1], first_q, gl.int32, LAYOUT))
        if NUMBERED:
            note.index(5).store(gl.full([1], i_s, gl.int32, LAYOUT))
    else:
        note.store(gl.full([1], item, gl.int32, LAYOUT))
    thread_barrier()  # one thread of the warp announces what all of them wrote


@jit
def read_item(note, VARLEN: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    if VARLEN:
        return gl.sum(note.index(0).load(LAYOUT), 0)
    else:
        return gl.sum(note.load(LAYOUT), 0)


@jit
def read_place(note, item, seq_q, seq_k, heads, q_blocks, VARLEN: gl.constexpr):
    """-> query block, batch entry (0 of a packed batch), head, lengths, first query's row."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    if VARLEN:
        n_q = gl.sum(note.index(2).load(LAYOUT), 0)
        n_k = gl.sum(note.index(3).load(LAYOUT), 0)
        first_q = gl.sum(note.index(4).load(LAYOUT), 0)
        return gl.sum(note.index(1).load(LAYOUT), 0), item - item, item // q_blocks, n_q, n_k, first_q
    else:
        i_q, i_b, i_h = block_of_item(item, q_blocks, heads)
        return i_q, i_b, i_h, seq_q, seq_k, 0


@jit
def read_sequence(note, i_b, VARLEN: gl.constexpr):
    """Which sequence, of a note that says so, or which batch entry."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    if VARLEN:
        return gl.sum(note.index(5).load(LAYOUT), 0)
    else:
        return i_b


# ---------------------------------------------------------------- how blocks came out


@jit
def begin_telling(CONSUMERS: gl.constexpr):
    """-> [2 * CONSUMERS, 4] numbers: of the last two blocks, by each consumer's warps, item + 1 if it has to be made again, else
    0; and [1]: more than 0 if the present block is made with care."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    told = gl.allocate_shared_memory(gl.int32, [2 * CONSUMERS, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for c in gl.static_range(2 * CONSUMERS):
        told.index(c).store(gl.zeros([4], gl.int32, LAYOUT))
    care = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    care.store(gl.zeros([1], gl.int32, LAYOUT))
    return told, care


@jit
def tell(told, place, rows):
    """rows [64] int32: what each has to say of its block.  Each warp tells of its own 16."""
    told[0].index(place).store(gl.max(rows.reshape([4, 16]), 1))


@jit
def read_told(told, block, CONSUMERS: gl.constexpr):
    """Item + 1 of block number `block` (0 or 1) if it has to be made again, else 0."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    found = told[0].index(block * CONSUMERS).load(LAYOUT)
    for c in gl.static_range(CONSUMERS - 1):
        found = gl.maximum(found, told[0].index(block * CONSUMERS + c + 1).load(LAYOUT))
    return gl.max(found, 0)


@jit
def write_care(told, again):
    """again: more than 0 if the block that comes next is to be made with care."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    told[1].store(gl.full([1], again, gl.int32, LAYOUT))


@jit
def read_care(told):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(told[1].load(LAYOUT), 0)


# ---------------------------------------------------------------- its tiles and masks


@jit
def range_of_block(i_q, seq_q, seq_k, left, right, KIND: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
                   PACK: gl.constexpr):  # fmt: skip
    """-> first tile and number of tiles of keys that some query of the block sees; at least one, be it all masked.  ROWS are PACK
    heads of each of ROWS / PACK queries."""
    shift = seq_k - seq_q
    end = seq_k
    begin = 0
    if KIND != FULL:
        last = gl.minimum((i_q + 1) * (ROWS // PACK), seq_q) - 1
        end = gl.minimum(seq_k, last + shift + 1 + (right if KIND == WINDOW else 0))
    if KIND == WINDOW:
        begin = gl.maximum(i_q * (ROWS // PACK) + shift - left, 0)
    first = gl.minimum(begin, seq_k) // KEYS
    return first, gl.maximum((end + KEYS - 1) // KEYS - first, 1)


@jit
def cut(s, row, begin, shift, seq_k, left, right, KIND: gl.constexpr, KEYS: gl.constexpr, PACK: gl.constexpr):
    """Scores [64, KEYS] of rows from `row` on, PACK to a query, and keys from `begin` on, -inf where the key is not seen."""
    parts = s.reshape([64, KEYS // 8, 4, 2])
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, parts.type.layout)))
    query = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 64, layout=ROW), 1), 2), 3) + row
    if PACK > 1:
        query = query // PACK
    group, rest = columns_of(parts)
    if KIND == FULL:
        live = group * 8 < opaque(seq_k - begin - rest)
    else:
        own = query + shift  # the key at the query's own place
        end = gl.minimum(own + (right + 1 if KIND == WINDOW else 1), seq_k)
        live = group * 8 < opaque(end - begin - rest)
        if KIND == WINDOW:
            live = live & (group * 8 >= opaque(own - left - begin - rest))
    return gl.convert_layout(gl.where(live, parts, float("-inf")).reshape(s.shape), s.type.layout)


@jit
def is_cut(row, begin, shift, seq_k, left, right, KIND: gl.constexpr, KEYS: gl.constexpr, PACK: gl.constexpr):
    """Does some of the 64 rows not see some key of the tile?  `row` is a multiple of 64, 64 one of PACK."""
    end = seq_k
    if KIND != FULL:
        end = gl.minimum(seq_k, row // PACK + shift + 1 + (right if KIND == WINDOW else 0))
    needed = begin + KEYS > end
    if KIND == WINDOW:
        needed = needed | (begin < row // PACK + (64 // PACK - 1) + shift - left)
    return needed


@jit
def cut_if_needed(s, row, begin, shift, seq_k, left, right, KIND: gl.constexpr, KEYS: gl.constexpr, PACK: gl.constexpr):
    """`cut`, where it changes something."""
    if is_cut(row, begin, shift, seq_k, left, right, KIND, KEYS, PACK):
        s = cut(s, row, begin, shift, seq_k, left, right, KIND, KEYS, PACK)
    return s
