"""The producer of the dense forward kernel for sm_90: which query blocks come next, and every load of theirs."""

from .forward_mods import load_tiles
from .forward_parts import load_tile
from .forward_work import LEAVE, NOTHING, find_place, range_of_block, read_told, write_care, write_note
from .gluon import gl, jit, mbarrier
from .parts import draw_ticket, read_ticket


@jit
def _produce_block(q_desc, k_desc, v_desc, Tickets, note, rings, tiles_in, tile_rings, place, item, now, i, t, group, left,
                   right, programs, KIND: gl.constexpr, DIM_QK: gl.constexpr, DIM_V: gl.constexpr, KEYS: gl.constexpr,
                   SLOTS: gl.constexpr, CONSUMERS: gl.constexpr, PACK: gl.constexpr, VARLEN: gl.constexpr, LAZY: gl.constexpr,
                   ALIBI: gl.constexpr, BIAS: gl.constexpr, MASK: gl.constexpr, BIAS_SLOTS: gl.constexpr,
                   MASK_SLOTS: gl.constexpr):  # fmt: skip
    """Make every load of query block `now` -> the item to be made after it, and the position in the rings.  item: `now`, or, if
    that is made again, the one that waits meanwhile."""
    q_buf, k_buf, v_buf, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    i_q, i_b, i_h, seq_q, seq_k, first_q, first_k, _, i_s = place
    drawn = 0
    following = item
    first, tiles = range_of_block(i_q, seq_q, seq_k, left, right, KIND, CONSUMERS * 64, KEYS, PACK)
    if not LAZY:  # the caller has
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(c), (i & 1) ^ 1)
    write_note(note, now, i_q, seq_q, seq_k, first_q, i_s, VARLEN, ALIBI)
    for c in gl.static_range(CONSUMERS):
        row = first_q + i_q * (CONSUMERS * 64) + c * 64
        load_tile(q_desc, q_full.index(c), q_buf, c, i_b, i_h, row, 64, DIM_QK, PACK)
    i_k = i_h // group
    for j in range(tiles):
        slot = t % SLOTS
        parity = ((t // SLOTS) & 1) ^ 1
        row = first_k + (first + j) * KEYS
        mbarrier.wait(k_empty.index(slot), parity)
        load_tile(k_desc, k_full.index(slot), k_buf, slot, i_b, i_k, row, KEYS, DIM_QK)
        if BIAS:
            load_tiles(tiles_in[0], tile_rings[0], t, i_s, i_h, i_q * (CONSUMERS * 64), (first + j) * KEYS, BIAS, KEYS,
                       BIAS_SLOTS, CONSUMERS)  # fmt: skip
        if MASK:
            load_tiles(tiles_in[1], tile_rings[1], t, i_s, i_h, i_q * (CONSUMERS * 64), (first + j) * KEYS, MASK, KEYS,
                       MASK_SLOTS, CONSUMERS)  # fmt: skip
        mbarrier.wait(v_empty.index(slot), parity)
        load_tile(v_desc, v_full.index(slot), v_buf, slot, i_b, i_k, row, KEYS, DIM_V)
        t += 1
        # As late as hides the answers: who draws early may hold two long blocks while others have none.
        if (j == gl.maximum(tiles - 4, 0)) & (item == now):
            drawn = draw_ticket(Tickets)
        if (j == gl.maximum(tiles - 2, 0)) & (item == now):
            following = programs + read_ticket(drawn)
    return following, t


@jit
def produce(q_desc, k_desc, v_desc, Tickets, CuQ, CuK, batch, note, told, rings, tiles_in, tile_rings, sizes, group, items,
            KIND: gl.constexpr, DIM_QK: gl.constexpr, DIM_V: gl.constexpr, KEYS: gl.constexpr, SLOTS: gl.constexpr,
            CONSUMERS: gl.constexpr, PACK: gl.constexpr, VARLEN: gl.constexpr, LAZY: gl.constexpr, ALIBI: gl.constexpr,
            BIAS: gl.constexpr, MASK: gl.constexpr, BIAS_SLOTS: gl.constexpr, MASK_SLOTS: gl.constexpr):  # fmt: skip
    """The producer: chooses the query blocks and makes every load, in the order in which the consumers need them.

    LAZY: when the consumers are done with Q of block i - 1, they have told how block i - 2 came out.  If it has to be made again,
    that is done next, with care.  (Only that block, though its neighbours may have to be as well: whose program it falls to
    changes from run to run, and its bits must not.)  A note of no block brings the answer for the last one."""
    q_full, q_empty = rings[3], rings[4]
    seq_q, seq_k, heads, q_blocks, left, right = sizes
    programs = gl.num_programs(0)
    item = gl.program_id(0)  # the first that nobody has begun
    i = 0  # query blocks that were begun
    t = 0  # tiles that were loaded: position in the rings
    if LAZY:
        open = 2  # 1: the last block was begun, and nothing is left but what it tells
        while open > 0:
            for c in gl.static_range(CONSUMERS):
                mbarrier.wait(q_empty.index(c), (i & 1) ^ 1)
            again = read_told(told, i & 1, CONSUMERS)
            if (again > 0) | (item < items):
                now = gl.where(again > 0, again - 1, item)
                place = find_place(CuQ, CuK, batch, now, seq_q, seq_k, heads, q_blocks, VARLEN, CONSUMERS * 64)
                if place[7]:
                    write_care(told, again)
                    item, t = _produce_block(q_desc, k_desc, v_desc, Tickets, note, rings, tiles_in, tile_rings, place, item, now,
                                             i, t, group, left, right, programs, KIND, DIM_QK, DIM_V, KEYS, SLOTS, CONSUMERS,
                                             PACK, VARLEN, LAZY, ALIBI, BIAS, MASK, BIAS_SLOTS, MASK_SLOTS)  # fmt: skip
                    i += 1
                else:
                    item = programs + read_ticket(draw_ticket(Tickets))
            else:
                open = gl.where(i > 0, open - 1, 0)
                if open > 0:
                    write_note(note, NOTHING, 0, 0, 0, 0, 0, VARLEN, ALIBI)
                    for c in gl.static_range(CONSUMERS):
                        mbarrier.arrive(q_full.index(c), count=1)
                    i += 1
    else:
        while item < items:
            place = find_place(CuQ, CuK, batch, item, seq_q, seq_k, heads, q_blocks, VARLEN, CONSUMERS * 64)
            if place[7]:
                item, t = _produce_block(q_desc, k_desc, v_desc, Tickets, note, rings, tiles_in, tile_rings, place, item, item, i,
                                         t, group, left, right, programs, KIND, DIM_QK, DIM_V, KEYS, SLOTS, CONSUMERS, PACK,
                                         VARLEN, LAZY, ALIBI, BIAS, MASK, BIAS_SLOTS, MASK_SLOTS)  # fmt: skip
                i += 1
            else:
                item = programs + read_ticket(draw_ticket(Tickets))
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(c), (i & 1) ^ 1)
    write_note(note, LEAVE, 0, 0, 0, 0, 0, VARLEN, ALIBI)
    for c in gl.static_range(CONSUMERS):
        mbarrier.arrive(q_full.index(c), count=1)
    # a number was drawn for every block that was made; who drew the last one leaves the counter as it was
    if item == programs + items - 1:
        gl.store(Tickets, 0)
