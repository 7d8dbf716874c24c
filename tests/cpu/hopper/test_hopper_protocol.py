"""The protocol of every Gluon kernel on the CPU: its own functions, over memory, barriers, copies and products that check.

Gluon has no interpreter.  Here the partitions run as they are written, on the stand-ins of `simulated`: a copy arrives later and
completes its barrier, a product reads its buffers from its issue until it is waited for.  What is held: nobody waits for ever,
each product reads what it should, no buffer is written while it is read, every piece of work is done once.  And the check itself
is checked: who does not wait where the kernel has to is caught."""

import itertools
import random
import types

import pytest

from cases import pairs
from simulated import Barrier, Memory, Turn, backward_dense, backward_packed, backward_sparse, matmul
from simulated.backward import CAUSAL, FULL, WINDOW
from simulated.backward_reduce import Run as Reduce
from simulated.forward import Changed, Chunked, Eight, Listed, Run
from simulated.sparse_forward import Run as Sparse
from tilefold.kernels.hopper import backward_scheduler

KINDS = [FULL, CAUSAL, WINDOW]
PACKED = [(100, 300), (0, 50), (257, 257), (1, 400), (64, 0)]

# ---------------------------------------------------------------- block-sparse attention


@pytest.mark.parametrize(
    ("warpgroups", "block", "slots"), [(1, 64, (1, 2)), (1, 64, (3, 3)), (2, 128, (3, 3)), (2, 64, (2, 1))]
)
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("mixed", [0, 1])
def test_sparse(warpgroups, block, slots, programs, mixed):
    draw = random.Random(7)
    lists = [draw.sample(range(40), draw.choice((0, 1, 2, 3, 5, 9))) for _ in range(14)]
    for seed in range(3, 8):
        Sparse(seed, warpgroups, block, slots, lists, heads=2, mixed=mixed, causal=seed % 2 == 0)(programs)


SEQUENCES = [(100, 300), (0, 700), (257, 0), (1, 65), (64, 128), (130, 333)]  # queries, keys


def lists_of(draw, number, blocks=11):
    """Some that are empty, some that name blocks past the ends of shorter sequences."""
    return [draw.sample(range(blocks), draw.choice((0, 1, 2, 3, 5, min(9, blocks)))) for _ in range(number)]


@pytest.mark.parametrize(("warpgroups", "block", "slots"), [(1, 64, (1, 2)), (2, 128, (3, 3)), (2, 64, (2, 1))])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("programs", [1, 3])
def test_packed_lists(warpgroups, block, slots, dim, programs):
    """Places without work between sequences; rows that there are no lists of."""
    draw = random.Random(7)
    for seed in range(3, 8):
        longest = (None, 128)[seed % 2]
        rows = -(-(longest or 257) // (64 * warpgroups))
        lists = lists_of(draw, 2 * len(SEQUENCES) * rows, 704 // block)
        run = Sparse(
            seed, warpgroups, block, slots, lists, 2, dim, lengths=SEQUENCES, longest=longest, causal=seed % 3 == 0
        )
        run(programs)


@pytest.mark.parametrize(
    ("version", "page", "programs"),
    pairs([(1, 64, (1, 2)), (2, 128, (3, 3)), (1, 128, (2, 2))], [16, 32, 64, 128, 256], [1, 3]),
    ids=str,
)
def test_paged_lists(version, page, programs):
    warpgroups, block, slots = version
    draw = random.Random(page)
    for seed in range(3, 6):
        lists = lists_of(draw, 2 * len(SEQUENCES) * 2, 704 // block)
        lengths = [(128 * warpgroups - 5, keys) for _, keys in SEQUENCES]
        Sparse(seed, warpgroups, block, slots, lists, heads=2, lengths=lengths, page=page, causal=seed % 2 == 0)(
            programs
        )


@pytest.mark.parametrize(
    ("per", "places", "sizes"),
    pairs([(1, 1), (2, 2), (1, 2), (2, 1)], [1, 3, 7], [(4, 1, 1, 2), (4, 1, 1, 3), (4, 2, 2, 1), (6, 3, 1, 2)]),
    ids=str,
)
def test_sparse_backward(per, places, sizes):
    (per_q, per_k), (heads, group, heads_at_once, slots) = per, sizes
    lists = backward_sparse.random_lists(places, heads, 3, 4)
    backward_sparse.Run(places, lists, group, 4, per_q, per_k, heads_at_once, slots)(places)


@pytest.mark.parametrize("heads_at_once", [1, 2])
def test_sparse_backward_of_heads_that_list_nothing(heads_at_once):
    """Their query tiles have no dS to wait for; who has the slot next waits for those that had it before: else every seed fails
    with one head at once."""
    some, none = backward_sparse.random_lists(1, 2, 3, 4), [[[], [], []]] * 2
    lists = [*some, *none, *some] * heads_at_once
    for seed in range(3):
        backward_sparse.Run(seed, lists, 1, 4, 1, 1, heads_at_once, 2)(40)


@pytest.mark.parametrize(
    ("sizes", "per", "span", "places"),
    pairs([(2, 1, 1, 2), (2, 2, 1, 3), (4, 1, 2, 2)], [(1, 1), (2, 2), (1, 2)], [1, 2, 3], [1, 3, 7]),
    ids=str,
)
def test_sparse_backward_in_spans(sizes, per, span, places):
    """Five query blocks: the last span may have fewer."""
    heads, group, heads_at_once, slots = sizes
    lists = backward_sparse.random_lists(places, heads, 5, 3)
    backward_sparse.Run(places, lists, group, 3, *per, heads_at_once, slots, span)(places)


def test_order_of_the_backward_pass():
    """Every piece of work has one number; what a piece waits for comes before it; both kinds are mixed."""
    names = {"gl": types.SimpleNamespace(maximum=max, minimum=min, where=lambda c, a, b: a if c else b)}
    work = types.FunctionType(backward_scheduler.work_of_number.fn.__code__, names)
    for keys, queries, segments, slots in itertools.product((1, 3), (1, 2, 5), (1, 2, 5), (2, 3, 4)):
        for delay in range(keys, (slots - 1) * keys + 1):
            order = [work(i, keys, queries, segments, delay) for i in range(segments * (keys + queries))]
            assert sorted(order) == sorted(
                [(True, b, i) for b in range(segments) for i in range(keys)]
                + [(False, b, i) for b in range(segments) for i in range(queries)]
            )
            last = {each[:2]: i for i, each in enumerate(order)}
            for i, (is_keys, segment, _) in enumerate(order):
                assert is_keys or last[True, segment] < i
                assert not is_keys or segment < slots or last[False, segment - slots] < i
    mixed = [work(i, 8, 16, 9, 10)[0] for i in range(10, 10 + 24 * 7)]
    assert all(sum(mixed[i : i + 3]) == 1 for i in range(0, len(mixed), 3))


# ---------------------------------------------------------------- dense attention


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("programs", [1, 3])
def test_dense(kind, slots, programs):
    for seq_q, seq_k, heads, group in ((400, 700, 2, 1), (300, 100, 4, 2)):
        Run(3, kind, [(seq_q, seq_k)], heads, group, slots)(programs)


@pytest.mark.parametrize(
    "version",
    [
        {"consumers": 3, "turns": True},
        {"consumers": 2, "turns": True, "late": True},
        {"consumers": 1},
        {"dims": (192, 192), "keys": 64},
        {"dims": (192, 128), "late": True},
        {"prefetch": True, "turns": True},
        {"prefetch": True, "consumers": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("programs", [1, 2])
def test_versions(version, programs):
    Run(4, CAUSAL, [(400, 700)], 2, 1, 2, **version)(programs)
    Run(5, WINDOW, [(300, 100)], 4, 2, 3, **version)(programs)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("version", [{}, {"consumers": 3, "turns": True}, {"dims": (192, 192), "keys": 64}], ids=str)
@pytest.mark.parametrize("programs", [1, 3])
def test_lists_of_tiles(version, programs, shared):
    for seed, kind in enumerate((FULL, CAUSAL)):
        Listed(seed, kind, [(400, 1000)], 4, 2, 2, shared=shared, **version)(programs)


@pytest.mark.parametrize("version", [{}, {"outside": False, "turns": True}, {"consumers": 3, "turns": True}], ids=str)
@pytest.mark.parametrize("programs", [1, 3])
def test_e4m3(version, programs):
    Eight(14, CAUSAL, [(400, 700)], 2, 1, 2, **version)(programs)
    Eight(15, WINDOW, [(300, 100)], 4, 2, 3, **version)(programs)


@pytest.mark.parametrize(
    "version",
    [
        {},
        {"consumers": 3, "turns": True},
        {"consumers": 1, "late": True},
        {"prefetch": True},
        {"prefetch": True, "consumers": 1},
    ],
    ids=str,
)
def test_what_overflowed_is_folded_again(version):
    """Once, whichever query tile of a program it is: the first, the last, or one on its way while another's flags are read."""
    made = []
    for seed in range(8):
        for lengths in ([(300, 700)], [(128, 256)], [(100, 300), (0, 50), (257, 257)], [(0, 5), (0, 7)]):
            run = Run(seed, CAUSAL, lengths, 4, 2, 2, lazy=True, **version)
            run(1 + seed % 3)
            made.append(len(run.overflowed))
    assert sum(made) > 20
    assert 0 in made


WIDE = {"split": 2, "keys": 32, "dims": (512, 512)}  # two consumers share rows, each with half of the columns of V


@pytest.mark.parametrize(
    ("kind", "version", "slots", "programs"),
    pairs(
        KINDS,
        [{}, {"turns": True}, {"turns": True, "late": True, "dims": (384, 384)}, {"keys": 64, "dims": (64, 512)}],
        [1, 2],
        [1, 3],
    ),
    ids=str,
)
def test_wide_heads(kind, version, slots, programs):
    for seed, lengths in enumerate([[(400, 300)], [(70, 500)], PACKED]):
        Run(seed, kind, lengths, 4, 2, slots, **{**WIDE, **version})(programs)
    Run(8, kind, [(21, 300)], 2, 1, slots, pack=8, **{**WIDE, **version})(2)


def test_packed_heads():
    Run(8, CAUSAL, [(21, 700)], 2, 1, 2, pack=8)(2)
    Run(9, WINDOW, [(100, 300)], 3, 3, 2, pack=4, consumers=3)(1)


@pytest.mark.parametrize(
    "version", [{}, {"consumers": 3, "turns": True}, {"dims": (192, 192), "keys": 64}, {"prefetch": True}], ids=str
)
@pytest.mark.parametrize("programs", [1, 3])
def test_packed(version, programs):
    Run(6, CAUSAL, PACKED, 2, 1, 2, **version)(programs)
    Run(7, FULL, [(0, 0), (0, 7), (30, 129)], 2, 2, 2, **version)(programs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("version", [{"turns": True}, {"consumers": 3, "turns": True}, {"consumers": 1}], ids=str)
def test_chunks(version, chunk, kind):
    """numerics="invariant": each is merged once, where it ends among the sequence's keys, whatever the rows see of it."""
    for seed, lengths in enumerate([[(400, 900)], [(300, 100)], PACKED]):
        Chunked(seed, kind, lengths, 4, 2, 2, keys=64, chunk=chunk, **version)(2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [
    {},
    {"rows": (64, 0), "tile_slots": (1, 0)},
    {"rows": (0, 1), "turns": True},
    {"rows": (1, 64), "tile_slots": (1, 2), "late": True},
    {"steps": ((0, 0), (1, 0)), "consumers": 1},
], ids=str)  # fmt: skip
def test_bias_and_mask(kind, version):
    Changed(11, kind, [(400, 700)], 2, 1, 2, **version)(2)
    Changed(12, kind, [(300, 100)], 4, 2, 2, **version)(1)


def test_packed_sequences_have_their_own_bias_and_mask():
    Changed(13, CAUSAL, PACKED, 2, 1, 2, turns=True)(2)


# ---------------------------------------------------------------- gradients of dense attention

DENSE = {  # seq_q, seq_k, heads, group, split_tiles, heads_at_once, slots
    "heads": (200, 250, 4, 1, 4, 1, 2),
    "groups": (130, 250, 6, 3, 4, 1, 2),
    "splits": (250, 330, 2, 1, 2, 1, 2),
    "splits of heads": (330, 250, 4, 2, 3, 2, 2),
    "few keys": (500, 60, 2, 1, 1, 2, 1),
    "few queries": (60, 500, 2, 1, 3, 1, 2),
}
BATCHES = {  # lengths of q and k, KV heads, group, slots
    "few slots": ([200, 64, 130, 0, 65], [130, 64, 190, 70, 0], 1, 1, 4),
    "groups": ([130, 90, 128], [100, 250, 64], 2, 3, 5),
    "heads": ([70, 300], [300, 70], 4, 1, 7),
    "room for all": ([1, 64, 63, 100], [65, 1, 64, 200], 2, 1, None),
    "short ones": ([5] * 12, [3] * 12, 1, 1, 2),
}
SIZES = {  # seq_q, seq_k, heads, how many share a KV head
    "heads": (300, 400, 2, 1),
    "groups": (200, 260, 4, 2),
    "few queries": (50, 500, 2, 2),
    "keys that nobody sees": (700, 130, 1, 1),
}


@pytest.mark.parametrize(("kind", "places", "case", "query_tiles"), pairs(KINDS, [1, 5], [*DENSE], [1, 2]))
def test_dense_backward(kind, places, case, query_tiles):
    backward_dense.Run(places, kind, *DENSE[case], query_tiles, hold=places == 1)(places)
    backward_dense.Wide(places, kind, *DENSE[case], 2)(places)
    backward_dense.ThreePanels(places, kind, *DENSE[case], 4)(places)
    backward_dense.ThreePanelsEach(places, kind, *DENSE[case], 4)(places)


@pytest.mark.parametrize("kind", KINDS)
def test_dense_backward_of_a_span(kind):
    """Some of a call's queries: their statistics lie among those of all, and dk and dv are added to."""
    for case in ("groups", "few keys"):
        backward_dense.Run(3, kind, *DENSE[case], 2, span=11)(5)
    for places in (1, 5):
        backward_dense.Wide(places, kind, *DENSE["groups"], 2, span=11)(places)
        backward_dense.ThreePanels(places, kind, *DENSE["groups"], 4, span=11)(places)


@pytest.mark.interpreter
@pytest.mark.parametrize(("kind", "places", "case", "query_tiles"), pairs(KINDS, [1, 5], [*BATCHES], [1, 2]))
def test_packed_backward(kind, places, case, query_tiles):
    backward_packed.Run(places, kind, *BATCHES[case], query_tiles, hold=places == 1)(places)
    backward_packed.Wide(places, kind, *BATCHES[case], 2)(places)


@pytest.mark.parametrize(
    ("name", "kind", "ordered", "dim", "places"), pairs([*SIZES], KINDS, [False, True], [64, 80, 96, 128], [1, 2, 5])
)
def test_reducing_backward(name, kind, ordered, dim, places):
    """However few programs run side by side, none of them waits for one that has not begun."""
    sizes = SIZES[name]
    for heads_at_once in {1, sizes[2] // sizes[3]}:
        Reduce(1, kind, sizes, dim, ordered, heads_at_once)(places)
    if sizes[3] > 1:
        for seed in range(3):
            Reduce(seed, kind, sizes, dim, ordered, heads_at_once, apart=True)(places)
    for mask in (0, 1, 128 if dim == 64 else 64):
        Reduce(places, kind, sizes, dim, ordered, late=mask != 1, mask=mask)(places)
    for seed in range(3):
        Reduce(seed, kind, sizes, dim, ordered, late=seed > 1, lists=True)(places)
        Reduce(seed, kind, sizes, dim, ordered, late=True, lists=seed > 1, apart=seed == 1 < sizes[3], stored=True)(
            places
        )


@pytest.mark.parametrize(
    ("lengths", "kind", "ordered", "dim", "places"),
    pairs([PACKED, [(0, 0), (128, 128), (300, 129)]], KINDS, [False, True], [64, 80, 128], [1, 2, 5]),
    ids=str,
)
def test_reducing_backward_of_packed_sequences(lengths, kind, ordered, dim, places):
    """In any order of blocks that keeps that of a sequence's; what has an end in it is loaded from its copy."""
    total = tuple(map(sum, zip(*lengths, strict=True)))
    for seed, (heads, group, at_once) in enumerate(((1, 1, 1), (4, 2, 2), (4, 2, 1))):
        Reduce(seed, kind, (*total, heads, group), dim, ordered, at_once, packed=lengths)(places)
    Reduce(7, kind, (*total, 4, 2), dim, ordered, 2, apart=True, packed=lengths)(places)


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("programs", [1, 3])
def test_layouts_of_products(turned, programs):
    matmul.Run(1, (3, 2, 4), turned=turned)(programs)
    matmul.Run(2, (2, 3, 5), columns=128, slots=2, turned=turned)(programs)


@pytest.mark.parametrize("programs", [1, 4])
def test_batches_and_shares_of_products(programs):
    matmul.Run(3, (2, 2, 3), batch=3)(programs)
    matmul.Run(4, (2, 2, 3), batch=3, steps=(0, 1))(programs)
    matmul.Run(5, (2, 1, 7), splits=3)(programs)
    matmul.Run(6, (1, 2, 3), batch=3, fold=True, splits=2)(programs)
    matmul.Run(7, (2, 2, 1), batch=2, slots=4)(programs)


@pytest.mark.parametrize("group", [1, 2, 8])
def test_orders_of_products(group):
    matmul.Run(8, (5, 3, 1), group=group)(2)


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("halves", [1, 2])
def test_products_of_8_bits(outside, halves):
    matmul.Large(1, (3, 2, 4), halves=halves, outside=outside)(1)
    matmul.Large(2, (2, 3, 5), slots=2, halves=halves, outside=outside)(3)
    matmul.Large(3, (2, 1, 7), splits=3, halves=halves, outside=outside, group=8)(2)
    matmul.Large(4, (2, 2, 1), slots=4, halves=halves, outside=outside, group=1)(2)


@pytest.mark.parametrize("kind", ["int8", "e4m3"])
@pytest.mark.parametrize("consumers", [1, 2])
def test_products_of_few_rows(kind, consumers):
    for seed, (first, end, slots, panels) in enumerate(((0, 11, 3, 2), (5, 7, 4, 1), (3, 4, 2, 2), (2, 10, 4, 1))):
        matmul.Few(seed, first, end, slots, panels, consumers, kind)()


# ---------------------------------------------------------------- planted faults


def sparse_run(seed, missing):
    lists = [[1, 2, 3, 4, 5, 6, 7], [3], [4], [], [6], [7], [8], [9], [1, 9, 8, 7, 5, 4, 3] * 3]
    slots = {"q": (3, 3), "k": (1, 3), "v": (3, 1)}[missing[0]]  # the other ring must not hold the culprit back
    Sparse(seed, 2, 64, slots, lists, heads=1, mixed=seed % 2)(1)


def packed_lists_run(seed, missing):
    slots = {"q": (3, 3), "k": (1, 3), "v": (3, 1)}[missing[0]] if missing != "clear" else (2, 2)
    lists = lists_of(random.Random(seed), 18)
    Sparse(seed, 2, 64, slots, lists, heads=1, lengths=SEQUENCES)(1)


def paged_lists_run(seed, missing):
    slots = {"q": (3, 3), "k": (1, 3), "v": (3, 1)}[missing[0]] if missing != "clear" else (2, 2)
    lists = lists_of(random.Random(seed), 18)
    Sparse(seed, 2, 64, slots, lists, heads=1, lengths=[(300, keys) for _, keys in SEQUENCES], page=16)(1)


def lengths_of(seed):
    pick = random.Random(5 + seed)
    return [(pick.choice((300, 700)), pick.choice((150, 900)))]


def dense_backward_run(seed, missing):
    backward_dense.Run(seed, FULL, 500, 500, 2, 1, 3, 1, 2)(14)  # splits wait for each other, and so for slots
    backward_dense.Run(seed, FULL, 250, 130, 12, 1, 3, 1, 2)(30)  # whole heads for slots alone


def spans_run(seed, missing):
    lists = backward_sparse.random_lists(seed, 2, 6, 2)
    backward_sparse.Run(seed, lists, 1, 2, 1, 1, 1, 2, 1)(14)  # more places than KV tiles of a segment


COUNTED = ["await_slot", "await_keys", "await_queries"]
ORDER = ["await_counter", "wait_copies"]  # of additions to a tile of queries
LAUNCHES = {  # what runs with a seed, and what is left out: a barrier, a turn, a method of the launch
    "sparse": (sparse_run, ["q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty"]),
    "packed lists": (packed_lists_run, ["q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty", "clear"]),
    "paged lists": (paged_lists_run, ["q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty", "clear"]),
    "sparse backward": (
        lambda seed, missing: backward_sparse.Run(seed, backward_sparse.random_lists(seed, 4, 3, 4), 1, 4, 2, 2, 1, 2)(
            14
        ),
        ["kv_full", "q_full", "do_full", "empty", "done", *COUNTED[:2], "wait_copies"],
    ),
    "sparse backward in spans": (spans_run, ["await_sums"]),
    "dense": (
        lambda seed, missing: Run(seed, CAUSAL, lengths_of(seed), 4, 1, 2, turns=missing == "turn")(1),
        ["q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty", "turn"],
    ),
    "dense, Q ahead": (
        lambda seed, missing: Run(seed, CAUSAL, lengths_of(seed), 4, 1, 2, lazy=seed % 2 == 0, prefetch=True)(1),
        ["q_full", "q_empty"],
    ),
    "wide heads": (
        lambda seed, missing: Run(seed, CAUSAL, lengths_of(seed), 4, 1, 2, turns=missing == "turn", **WIDE)(1),
        ["q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty", "turn"],
    ),
    "e4m3": (
        lambda seed, missing: Eight(seed, CAUSAL, lengths_of(seed), 4, 1, 2, turns=missing == "turn")(1),
        ["q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty", "turn"],
    ),
    "bias and mask": (
        lambda seed, missing: Changed(seed, CAUSAL, lengths_of(seed), 4, 1, 2)(1),
        ["bias_full", "bias_empty", "mask_full", "mask_empty", "fence"],
    ),
    "dense backward": (dense_backward_run, ["kv_full", "q_full", "do_full", "empty", "done", *COUNTED]),
    "wide backward": (
        lambda seed, missing: backward_dense.Wide(seed, FULL, 500, 500, 2, 1, 3, 1, 2)(14),
        ["kv_full", "q_full", "do_full", "q_empty", "do_empty", "p_full", "p_empty", "done"],
    ),
    "packed backward": (
        lambda seed, missing: backward_packed.Run(seed, FULL, [130] * 6, [200] * 6, 2, 1, 5)(14),
        ["kv_full", "q_full", "do_full", "empty", "done", *COUNTED[:2], "clear"],
    ),
    "wide packed backward": (
        lambda seed, missing: backward_packed.Wide(seed, FULL, [130] * 6, [200] * 6, 2, 1, 5, 2)(14),
        ["do_full", "q_empty", "do_empty", "p_full", "p_empty", "cleared", "clear"],
    ),
    "reducing backward": (
        lambda seed, missing: Reduce(seed, FULL, (500, 256, 1, 1), ordered=True)(2),
        ["kv_full", "q_full", "do_full", "empty", "sum_full", "sum_empty", "meeting", *ORDER],
    ),
    "reducing backward that stores dS": (
        lambda seed, missing: Reduce(seed, FULL, (500, 256, 1, 1), ordered=True, stored=True)(2),
        ["stored_full", "stored_empty"],
    ),
    "products": (lambda seed, missing: matmul.Run(seed, (3, 2, 6), slots=2)(1), ["full", "empty"]),
    "products of 8 bits": (lambda seed, missing: matmul.Large(seed, (3, 2, 6), slots=2)(1), ["full", "empty"]),
    "few rows": (lambda seed, missing: matmul.Few(seed, 0, 12, 2)(), ["full", "empty"]),
}
OWNERS = {"packed lists": Sparse, "paged lists": Sparse, "sparse backward": backward_sparse.Run, "bias and mask": Changed,
          "sparse backward in spans": backward_sparse.Run,
          "dense backward": backward_dense.Run, "packed backward": backward_packed.Run,
          "wide packed backward": backward_packed.Wide, "reducing backward": Reduce}  # fmt: skip
INTERPRETED = ("packed backward", "wide packed backward")  # whose order of work the interpreter makes
FAULTS = [
    pytest.param(name, one, marks=pytest.mark.interpreter if name in INTERPRETED else ())
    for name, (_, missing) in LAUNCHES.items()
    for one in missing
]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.interpreter) if name in INTERPRETED else name
                                  for name in LAUNCHES])  # fmt: skip
def test_what_is_not_broken_is_right(name):
    """Of the launches whose faults are to be found: else any of them would be."""
    run, missing = LAUNCHES[name]
    for seed in range(2):
        run(seed, missing[seed % len(missing)])


def several(run):
    """Orders of events, until one shows it."""
    for seed in range(100):
        run(seed)


@pytest.mark.parametrize(("name", "missing"), FAULTS)
def test_a_missing_wait_is_found(monkeypatch, name, missing):
    """Who does not wait for one kind of barrier, turn, counter or copy, or zeroes nothing, is caught."""
    run, _ = LAUNCHES[name]
    if missing == "kv_full":  # else they have come, as a rule, when what was asked for after them has
        monkeypatch.setattr(backward_dense.Backward, "late", ("k", "v"))
    if missing == "stored_empty":  # else dq's copies hold the writers back
        monkeypatch.setattr(Reduce, "late", ("stored",))
    elif missing.endswith("empty"):  # readers that are slower than those who write
        monkeypatch.setattr(Memory, "pace", 10.0)
    if missing in ("turn", "meeting"):
        monkeypatch.setattr(Turn, "missing", True)
    elif hasattr(OWNERS.get(name), missing):
        monkeypatch.setattr(OWNERS[name], missing, lambda self, *args: None)
    else:
        monkeypatch.setattr(Barrier, "missing", missing)
    with pytest.raises(AssertionError):
        several(lambda seed: run(seed, missing))


def test_one_pair_of_barriers_is_not_enough(monkeypatch):
    """A warpgroup that goes on at once arrives at the next meeting where the other does not wait yet: two pairs, in turns."""
    monkeypatch.setattr(Reduce, "pairs", 1)
    with pytest.raises(AssertionError, match="two arrivals without a wait"):
        several(lambda seed: Reduce(seed, FULL, (500, 256, 1, 1))())


def test_a_kernel_that_does_not_wait_for_the_one_before_is_found(monkeypatch):
    monkeypatch.setattr(matmul.Few, "waits", False)
    with pytest.raises(AssertionError, match="before the kernel"):
        matmul.Few(1, 0, 5)()
