"""The allocator of pages, without tensors: nothing leaks, nothing is owned twice, a refused call changes nothing."""

import contextlib
import pickle
import random
from collections import Counter

import pytest

import tilefold
from cases.paged import audit, snapshot
from cases.refusals import refuses
from tilefold.errors import DtypeError, OutOfPages, ValueRangeError
from tilefold.paged import PageAllocator


def grown(allocator, *lengths):
    """Ids of new sequences of these lengths."""
    ids = [allocator.add() for _ in lengths]
    allocator.reserve(allocator.members(ids), lengths)
    return ids


def one_operation(allocator, draw):
    """A random operation; what it was.  OutOfPages and ValueRangeError are answers, too."""
    ids = allocator.sequences
    resident = [id for id in ids if allocator.find(id).state == "resident"]
    kind = draw.choices(
        ("add", "grow", "fork", "share", "truncate", "free", "out", "in", "defragment"), (8, 40, 6, 6, 8, 10, 6, 8, 1)
    )[0]
    if kind == "add" or not ids:
        allocator.add()
    elif kind == "grow":
        some = draw.sample(resident, draw.randint(0, min(6, len(resident))))
        allocator.reserve(allocator.members(some), [draw.choice((0, 1, 1, 1, 2, 9, 30)) for _ in some])
    elif kind == "fork":
        allocator.share(draw.choice(ids))
    elif kind == "share":
        id = draw.choice(ids)
        allocator.share(id, draw.randint(0, allocator.find(id).length))
    elif kind == "truncate":
        id = draw.choice(ids)
        allocator.truncate(id, draw.randint(0, allocator.find(id).length))
    elif kind == "free":
        allocator.free_sequence(draw.choice(ids))
    elif kind == "out":
        allocator.swap_out(draw.choice(ids))
    elif kind == "in":
        allocator.swap_in(draw.choice(ids))
    else:
        allocator.defragment()
    return kind


def test_a_hundred_thousand_random_operations():
    draw = random.Random(0)
    allocator = PageAllocator(num_pages=160, page_size=4, max_sequences=24, max_tokens=96)
    answers, refused = Counter(), 0
    for step in range(100_000):
        before = snapshot(allocator) if step % 20 == 0 else None
        try:
            answers[one_operation(allocator, draw)] += 1
        except (OutOfPages, ValueRangeError) as error:
            answers[type(error)] += 1
            refused += before is not None
            assert before in (None, snapshot(allocator)), "what is refused changes nothing"
        if step % 20 == 0:
            audit(allocator)
    assert len(answers) == 11
    assert min(answers.values()) > 500 and refused > 500, (
        answers
    )  # each has happened, and the loop has been at the limits
    for id in allocator.sequences:
        allocator.free_sequence(id)
    audit(allocator)
    assert allocator.free == allocator.num_pages
    assert not allocator._host_owners


def test_pages_follow_from_the_calls_alone():
    states = []
    for _ in range(2):
        draw = random.Random(2)
        allocator = PageAllocator(num_pages=64, page_size=4, max_sequences=8, max_tokens=64)
        for _ in range(2000):
            with contextlib.suppress(OutOfPages, ValueRangeError):
                one_operation(allocator, draw)
        states.append(snapshot(allocator))
    assert states[0] == states[1]


def test_exhaustion_says_what_is_needed_and_what_could_be_had():
    allocator = PageAllocator(num_pages=8, page_size=4, max_sequences=8, max_tokens=64)
    a, b, c = grown(allocator, 8, 8, 5)  # 2 + 2 + 2 pages
    fork = allocator.share(c)
    before = snapshot(allocator)
    with pytest.raises(
        OutOfPages, match="4 pages are needed, 2 of 8 are free; freeing or swapping out the other 2 sequences"
    ):
        allocator.reserve(allocator.members([a, c]), [12, 1])
    with pytest.raises(tilefold.TilefoldError) as caught:
        allocator.reserve(allocator.members([a, c]), [12, 1])
    error = pickle.loads(pickle.dumps(caught.value))
    # b's two pages could be had; those that the fork shares with c, who is asking, could not
    assert (error.needed, error.free, error.reclaimable, error.holders) == (4, 2, 2, 2)
    assert isinstance(error, MemoryError)
    assert snapshot(allocator) == before
    allocator.free_sequence(b)
    allocator.reserve(allocator.members([a, c]), [12, 1])
    assert allocator.free == 0
    assert allocator.find(fork).length == 5


def test_copies_are_due_where_others_own_the_page():
    allocator = PageAllocator(num_pages=16, page_size=4, max_sequences=8, max_tokens=64)
    (a,) = grown(allocator, 6)
    b, c = allocator.share(a), allocator.share(a, 5)
    pages = list(allocator.find(a).pages)
    assert allocator.free == 14
    # nothing is written: nothing is copied
    assert allocator.reserve(allocator.members([a, b, c]), [0, 0, 0]) == []
    # three owners write: two of them get copies, the last keeps the page
    copies = allocator.reserve(allocator.members([a, b, c]), [1, 1, 1])
    assert [old for old, _ in copies] == [pages[1]] * 2
    assert allocator.find(c).pages == pages
    assert [allocator.owners(page) for page in pages] == [3, 1]
    # a prefix of whole pages: the next row begins a page, nobody copies
    d = allocator.share(a, 4)
    assert allocator.reserve(allocator.members([d, a]), [1, 1]) == []
    audit(allocator)


def test_an_owner_that_stays_alone_writes_without_a_copy():
    allocator = PageAllocator(num_pages=4, page_size=4, max_sequences=4, max_tokens=16)
    (a,) = grown(allocator, 5)
    allocator.free_sequence(allocator.share(a))
    assert allocator.reserve(allocator.members([a]), [1]) == []
    b = allocator.share(a)
    allocator.truncate(a, 3)  # into a page that b owns, too
    assert len(allocator.reserve(allocator.members([a]), [1])) == 1
    assert allocator.reserve(allocator.members([b]), [1]) == []
    audit(allocator)


def test_defragment_gives_the_lowest_ids():
    allocator = PageAllocator(num_pages=32, page_size=4, max_sequences=8, max_tokens=64)
    ids = grown(allocator, 8, 12, 7, 16)
    fork = allocator.share(ids[3])
    allocator.free_sequence(ids[0])
    allocator.free_sequence(ids[2])
    assert allocator.statistics().holes == 4
    moves = allocator.defragment()
    assert not {old for old, _ in moves} & {new for _, new in moves}
    assert sorted({page for id in allocator.sequences for page in allocator.find(id).pages}) == list(range(7))
    assert allocator.find(fork).pages == allocator.find(ids[3]).pages
    assert allocator.defragment() == []
    assert allocator.statistics().holes == 0
    audit(allocator)


def test_a_shared_page_leaves_with_its_last_resident_owner():
    allocator = PageAllocator(num_pages=16, page_size=4, max_sequences=8, max_tokens=64)
    (a,) = grown(allocator, 10)
    b = allocator.share(a, 8)
    allocator.reserve(allocator.members([b]), [3])
    shared = allocator.find(a).pages[:2]
    assert [page for page, _ in allocator.swap_out(a)] == [2]
    assert allocator.find(a).pages[:2] == shared  # they stay: b is on the device
    assert {page for page, _ in allocator.swap_out(b)} == {*shared, 3}
    assert allocator.free == 16
    assert allocator.find(a).pages[:2] == allocator.find(b).pages[:2]
    assert allocator.statistics().pages_swapped == 4
    audit(allocator)
    allocator.swap_in(a)  # brings the shared ones for b, too
    assert len(allocator.swap_in(b)) == 1
    assert allocator.find(a).pages[:2] == allocator.find(b).pages[:2]
    audit(allocator)
    # pages that only swapped sequences own after their resident owner went: a second call moves them
    allocator.swap_out(a)
    allocator.free_sequence(b)
    assert len(allocator.swap_out(a)) == 2
    with pytest.raises(ValueRangeError, match=f"sequence {a} is swapped out already"):
        allocator.swap_out(a)
    assert allocator.free_sequence(a) and allocator.free == 16
    audit(allocator)


def test_refusals_name_what_was_given():
    allocator = PageAllocator(num_pages=8, page_size=4, max_sequences=3, max_tokens=10)
    a, b = grown(allocator, 3, 2)
    cases = (
        (lambda: allocator.find(9), ValueRangeError, "sequence 9 is not in the cache: it was freed, or never added (it holds 0,"),
        (lambda: allocator.find(True), DtypeError, "sequence must be an int, got True of type bool"),
        (lambda: allocator.find("0"), DtypeError, "sequence must be an int, got '0'"),
        (lambda: allocator.find(-1), ValueRangeError, "sequence must be at least 0, got -1"),
        (lambda: allocator.add(a), ValueRangeError, "sequence 0 is in the cache already"),
        (lambda: allocator.members([a, b, a]), ValueRangeError, "sequences has 0 more than once"),
        (lambda: allocator.truncate(a, 4), ValueRangeError, "length must be at most 3, that of sequence 0, got 4"),
        (lambda: allocator.truncate(a, -1), ValueRangeError, "length must be at least 0, got -1"),
        (lambda: allocator.share(a, 4), ValueRangeError, "tokens must be at most 3, the length of sequence 0, got 4"),
        (lambda: allocator.swap_in(a), ValueRangeError, "sequence 0 is not swapped out"),
        (lambda: allocator.reserve(allocator.members([a, b]), [1, 9]), ValueRangeError, "counts[1] is 9: sequence 1 has 2"),
        (lambda: PageAllocator(0, 4, 1, 1), ValueRangeError, "num_pages must be at least 1, got 0"),
        (lambda: PageAllocator(4, 2.0, 1, 1), DtypeError, "page_size must be an int, got 2.0"),
    )  # fmt: skip
    before = snapshot(allocator)
    for call, kind, message in cases:
        refuses(kind, message, call)
    assert snapshot(allocator) == before
    allocator.add(7)
    refuses(ValueRangeError, "max_sequences=3 sequences are in the cache", allocator.share, a)
    allocator.free_sequence(7)
    refuses(ValueRangeError, "sequence 7 is not in the cache", allocator.free_sequence, 7)
    allocator.swap_out(a)
    for call, word in ((allocator.share, "share"), (lambda id: allocator.truncate(id, 0), "truncate")):
        with pytest.raises(
            ValueRangeError, match=rf"sequence 0 is swapped out: call swap_in\(0\) before you {word} it"
        ):
            call(a)
    refuses(ValueRangeError, "before you batch it", allocator.members, [a])


def test_statistics_count_shared_rows_once():
    allocator = PageAllocator(num_pages=16, page_size=4, max_sequences=4, max_tokens=20)
    (a,) = grown(allocator, 10)
    b = allocator.share(a, 9)
    s = allocator.statistics(row_bytes=100)
    assert (s.pages_used, s.pages_shared, s.pages_free, s.rows_used, s.tokens) == (3, 3, 13, 10, 19)
    assert (s.bytes_allocated, s.bytes_in_pages, s.bytes_used, s.bytes_wasted) == (6400, 1200, 1000, 200)
    assert s.bytes_used + s.bytes_wasted + s.bytes_free + s.scale_bytes == s.bytes_allocated
    assert "unused pool      5.08 KiB" in str(s)
    assert s.bytes_contiguous == 2 * 20 * 100
    assert s.fragmentation == pytest.approx(1 / 6)
    allocator.swap_out(b)
    allocator.swap_out(a)
    s = allocator.statistics(row_bytes=100)
    assert (s.bytes_swapped, s.bytes_used, s.sequences_swapped) == (1200, 0, 2)
    assert (s.bytes_contiguous, s.fragmentation) == (0, 0.0)
    for word in ("2 swapped out", "16 in all", "6.25 KiB", "1.17 KiB", "0 resident"):
        assert word in str(s)
