"""Which tiles of 64 queries and 64 keys see each other in the dense backward pass, where a pair keeps its dS, and masks.

Ranges are computed, from queries and from keys, and name the same pairs: those where some query sees some key.  Masks are
aligned to the bottom right; `shift` = seq_k - seq_q is where query 0 stands among the keys.

Keys are made in *stripes* of so many tiles, so that the dS of one stripe has room in memory whatever the lengths are.  In the
room of a head each tile of keys has a line for the queries of its range.  Under a causal mask two share one, the tiles number l
from its left and stripe_units - 1 - l from its right: one has many queries when the other has few.

The kinds of bands are those of device.ranges, but for PREFIX, which these kernels do not have.
"""

from ...device.ranges import CAUSAL, FULL, WINDOW
from .gluon import gl, jit, opaque

UNIT = gl.constexpr(64)  # tokens of a tile


@jit
def keys_of_queries(i_m, lengths, band, KIND: gl.constexpr):
    """-> first tile of keys that query tile i_m sees, and the one after its last; lengths = (seq_q, seq_k, q_units, kv_units),
    band = (left, right)."""
    seq_q, seq_k, q_units, kv_units = lengths
    left, right = band
    begin = 0
    end = seq_k
    if KIND != FULL:
        own = gl.minimum((i_m + 1) * UNIT, seq_q) - 1 + seq_k - seq_q  # of the last query
        end = gl.maximum(gl.minimum(seq_k, own + 1 + (right if KIND == WINDOW else 0)), 0)
    if KIND == WINDOW:
        begin = gl.maximum(i_m * UNIT + seq_k - seq_q - left, 0)
    first = begin // UNIT
    return first, gl.maximum((end + UNIT - 1) // UNIT, first)


@jit
def queries_of_keys(i_n, lengths, band, KIND: gl.constexpr):
    """-> first tile of queries that see tile i_n of keys, and how many see it: 0 of keys past the end."""
    seq_q, seq_k, q_units, kv_units = lengths
    left, right = band
    begin = 0
    end = seq_q
    if KIND != FULL:
        begin = gl.maximum(i_n * UNIT - seq_k + seq_q - (right if KIND == WINDOW else 0), 0)
    if KIND == WINDOW:
        own = gl.minimum((i_n + 1) * UNIT, seq_k) - 1 - seq_k + seq_q  # the query at the last key's place
        end = gl.maximum(gl.minimum(seq_q, own + 1 + left), 0)
    first = begin // UNIT
    tiles = gl.maximum((end + UNIT - 1) // UNIT - first, 0)
    return first, gl.where(i_n < kv_units, tiles, 0)


@jit
def stripe_of_queries(i_m, stripe, stripe_units, lengths, band, KIND: gl.constexpr, SUM_TILES: gl.constexpr):
    """-> first tile of keys of the stripe that query tile i_m, or one of SUM_TILES from it on, sees; how many (0 if none);
    whether it is their first stripe; whether it is their last.  Tiles that see no key at all belong to one stripe, too."""
    first, end = keys_of_queries(i_m, lengths, band, KIND)
    if SUM_TILES > 1:
        others, end = keys_of_queries(gl.minimum(i_m + SUM_TILES, lengths[2]) - 1, lengths, band, KIND)
    low = gl.maximum(first, stripe * stripe_units)
    high = gl.minimum(end, (stripe + 1) * stripe_units)
    begins = stripe == first // stripe_units
    ends = stripe == gl.maximum(end - 1, first) // stripe_units
    return low, gl.maximum(high - low, 0), begins, ends


@jit
def lines_of_head(stripe_units, KIND: gl.constexpr):
    """How many lines the room of a head has."""
    return (stripe_units + 1) // 2 if KIND == CAUSAL else stripe_units


@jit
def line_of_keys(local, stripe_units, width, KIND: gl.constexpr):
    """-> the place in a head's room where key tile number `local` of its stripe keeps the first dS of its range of queries, and
    the way from there to the next: 1 or -1.  width: places of a line."""
    if KIND != CAUSAL:
        return local * width, 1
    else:
        partner = stripe_units - 1 - local
        line = gl.minimum(local, partner) * width
        return gl.where(local <= partner, line, line + width - 1), gl.where(local <= partner, 1, -1)


@jit
def whole_tiles(i_n, lengths, band, KIND: gl.constexpr):
    """-> first tile of queries of which every query sees every key of tile i_n, and the first one after them of which that does
    not hold.  Queries past the end count for nothing anyway."""
    seq_q, seq_k, q_units, kv_units = lengths
    left, right = band
    begin = 0
    end = q_units
    if KIND != FULL:  # the first query sees the last key
        begin = i_n * UNIT + UNIT - 1 - seq_k + seq_q - (right if KIND == WINDOW else 0)
        begin = (gl.maximum(begin, 0) + UNIT - 1) // UNIT
    if KIND == WINDOW:  # the last query sees the first key
        end = (gl.maximum(i_n * UNIT - seq_k + seq_q + left + 1, 0)) // UNIT
    if KIND != CAUSAL:  # which needs no mask at the end of the keys: only queries past the end stand there
        end = gl.where((i_n + 1) * UNIT > seq_k, 0, end)
    return begin, end


@jit
def cut(s, i_m, i_n, lengths, band, KIND: gl.constexpr):
    """S [64 keys, 64 or 128 queries], -inf where the query does not see the key, of tile i_n and tiles from i_m on.

    A column is 8 * group + 2 * thread + e; compared like this the group is a constant of each register (parts.cut_columns).
    What is made of the keys is made here: kept throughout the loop, it would push others out of their registers."""
    seq_q, seq_k, q_units, kv_units = lengths
    left, right = band
    QUERIES: gl.constexpr = s.shape[1]
    parts = s.reshape([UNIT, QUERIES // 8, 4, 2])
    LAYOUT: gl.constexpr = parts.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    GROUP: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    THREAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
    ELEMENT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    key = gl.expand_dims(gl.expand_dims(gl.expand_dims(opaque(gl.arange(0, UNIT, layout=ROW)), 1), 2), 3) + i_n * UNIT
    group = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, QUERIES // 8, layout=GROUP), 0), 2), 3)
    thread = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=THREAD), 0), 1), 3)
    element = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 2, layout=ELEMENT), 0), 1), 2)
    column = thread * 2 + element
    if KIND == FULL:
        live = (group >= 0) & ((key < seq_k) & (column >= 0))
    else:
        own = key - seq_k + seq_q - i_m * UNIT  # the column of the query at the key's own place
        first = own - (right if KIND == WINDOW else 0)
        if KIND == WINDOW:
            first = gl.where(key < seq_k, first, QUERIES)
        live = group * 8 >= opaque(first - column)
        if KIND == WINDOW:
            live = live & (group * 8 <= opaque(own + left - column))
    return gl.convert_layout(gl.where(live, parts, float("-inf")).reshape(s.shape), s.type.layout)


@jit
def cut_if_needed(s, i_m, i_n, whole, lengths, band, KIND: gl.constexpr):
    """cut, where some of the queries does not see some of the keys; whole: whole_tiles of i_n."""
    needed = i_m >= whole[1] - (s.shape[1] // UNIT - 1)
    if KIND == CAUSAL:
        needed = i_m < whole[0]
    elif KIND == WINDOW:
        needed = needed | (i_m < whole[0])
    if needed:
        s = cut(s, i_m, i_n, lengths, band, KIND)
    return s


@jit
def tiles_of_block(block, lengths, band, KIND: gl.constexpr, QUERIES: gl.constexpr):
    """-> first tile of QUERIES queries that see one of the 128 keys of a block, and how many from it on: 0 if none does."""
    q_units, kv_units = lengths[2], lengths[3]
    PER: gl.constexpr = QUERIES // UNIT
    first, seen = queries_of_keys(block * 2, lengths, band, KIND)
    other, more = queries_of_keys(gl.minimum(block * 2 + 1, kv_units - 1), lengths, band, KIND)
    begin = first // PER
    end = gl.minimum(gl.maximum(first + seen, other + more), q_units)
    return begin, gl.maximum((end + PER - 1) // PER - begin, 0)
