"""BlockIndex as a value: sharing, the kept transpose, flattening, empty sizes, and what it refuses."""

import sys
from typing import Any

import pytest
import torch
from torch.utils import _pytree

import tilefold
from cases.index import lists_of, random_map
from cases.refusals import refuses
from tilefold import BlockIndex, DeviceError, DtypeError, LayoutError, ShapeError, TilefoldError, ValueRangeError
from tilefold.sparse import any_of, causal_blocks, dilated, sliding_tile, video_window

I32 = torch.int32


def test_sharing_copies_nothing() -> None:
    sizes = torch.tensor([64, 10, 0, 64, 5], dtype=I32)
    index = BlockIndex.from_map(random_map(1, 1, 4, 5), block_sizes=sizes)
    assert (index.batch, index.heads) == (1, 1)
    full = index.expand(3, 8)
    assert full.indices.shape == (3, 8, 4, 5) and full.indices.stride()[:2] == (0, 0)
    assert full.counts.stride() == (0, 0, 1)
    assert full.block_sizes.shape == (3, 8, 5) and full.block_sizes.stride() == (0, 0, 1)
    assert full.indices.data_ptr() == index.indices.data_ptr()
    assert full.block_sizes.data_ptr() == sizes.data_ptr()
    assert (full.batch, full.heads) == (3, 8)


def test_each_tensor_is_shared_on_its_own() -> None:
    """Lists per head, counts and sizes per batch."""
    keep = random_map(1, 3, 4, 5)
    lists = BlockIndex.from_map(keep)
    counts = torch.stack([lists.counts[0], lists.counts[0] // 2])
    index = lists.with_tensors(lists.indices, counts, torch.full((2, 5), 60, dtype=I32)).validate()
    assert (index.batch, index.heads) == (2, 3)
    assert index.to_map().shape == (2, 3, 4, 5)
    assert lists_of(index)[12:] == [row[: len(row) // 2] for row in lists_of(lists)]
    once = index.transpose()
    assert torch.equal(once.to_map(), index.to_map().mT)
    assert once.query_sizes is index.block_sizes


def test_expand_refuses_other_sizes() -> None:
    index = BlockIndex.from_map(random_map(2, 3, 4, 5))
    assert index.expand(2, 3).indices.shape == (2, 3, 4, 5)
    refuses(ShapeError, "index has heads 3, expected 6", index.expand, 2, 6)
    refuses(ShapeError, "index has batch 2, expected 4", index.expand, 4, 3)


def test_the_transpose_is_kept_until_the_tensors_change() -> None:
    index = BlockIndex.from_map(random_map(1, 2, 3, 4))
    first = index.transpose()
    assert index.transpose() is first
    index.counts.zero_()
    assert int(index.transpose().counts.sum()) == 0
    assert index.transpose() is index.transpose()


def test_a_transpose_is_kept_only_where_its_record_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a capture computes has values only after a replay, so a record from outside must not keep it."""
    now = {"capturing": False}
    module = sys.modules[BlockIndex.__module__]  # its name in the package is that of the index stage
    monkeypatch.setattr(module, "_capturing", lambda _: now["capturing"])
    outside = BlockIndex.from_map(random_map(1, 2, 3, 4))
    now["capturing"] = True
    captured = outside.transpose()
    inside = BlockIndex.from_map(random_map(1, 2, 3, 4))
    assert inside.transpose() is inside.transpose()
    now["capturing"] = False
    assert outside.transpose() is not captured
    assert outside.transpose() is outside.transpose()


def test_the_transpose_of_inference_tensors() -> None:
    with torch.inference_mode():
        index = BlockIndex.from_map(random_map(1, 2, 3, 4))
        assert index.transpose() is index.transpose()
    assert torch.equal(index.transpose().to_map(), index.to_map().mT)


def test_flattening() -> None:
    index = BlockIndex.from_map(random_map(1, 2, 3, 4), seq_q=180, block_sizes=torch.full((4,), 9, dtype=I32))
    again = BlockIndex(*index.tensors()[:2], *index.geometry, *index.tensors()[2:])
    assert again.with_tensors(*index.tensors()).geometry == index.geometry
    leaves, spec = _pytree.tree_flatten({"index": index})
    assert [t for t in leaves if t is not None] == [index.indices, index.counts, index.block_sizes]
    back = _pytree.tree_unflatten(leaves, spec)["index"]
    assert back.geometry == index.geometry and back.indices is index.indices
    assert torch.equal(back.transpose().indices, index.transpose().indices)
    assert index.to("cpu") is index
    assert index.to("meta").indices.device.type == "meta"


def test_a_record_is_frozen_and_prints_without_its_values() -> None:
    index = BlockIndex.from_map(random_map(1, 2, 3, 4), block_q=128, seq_k=250)
    assert "heads 2, 3 x 4 blocks of 128 x 64 tokens, lengths 384 x 250, capacity 4" in repr(index)
    with pytest.raises(AttributeError):
        index.seq_k = 3  # type: ignore[misc]
    assert tilefold.sparse.BlockIndex is BlockIndex


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_attend(rows: int, columns: int) -> None:
    index = BlockIndex.from_map(torch.ones(1, 2, rows, columns, dtype=torch.bool), check=True)
    assert index.to_map().shape == (1, 2, rows, columns)
    assert index.transpose().to_map().shape == (1, 2, columns, rows)
    assert index.transpose().counts.tolist() == [[[rows] * columns] * 2]
    empty = BlockIndex.from_topk(torch.zeros(1, 2, rows, columns), 0, check=True)
    assert empty.counts.tolist() == [[[0] * rows] * 2]


# ---------------------------------------------------------------- errors


def lists(indices: list[Any], counts: list[int], **options: Any) -> BlockIndex:
    """One head's lists with the record's check."""
    return BlockIndex.from_indices(
        torch.tensor([[indices]], dtype=I32), torch.tensor([[counts]], dtype=I32), seq_k=options.pop("seq_k", 256),
        check=True, **options,
    )  # fmt: skip


BAD_VALUES = [
    (lambda: lists([[0, 1], [0, 4]], [2, 2]), r"indices\[0, 0, 1, 1\] is 4, expected 0 to 3"),
    (lambda: lists([[0, 1], [-1, 0]], [2, 1]), r"indices\[0, 0, 1, 0\] is -1, expected 0 to 3"),
    (lambda: lists([[0, 1], [3, 0]], [2, 3]), r"counts\[0, 0, 1\] is 3, expected 0 to capacity 2"),
    (lambda: lists([[0, 1], [3, 0]], [-1, 2]), r"counts\[0, 0, 0\] is -1, expected 0 to capacity 2"),
    (lambda: lists([[0, 1, 2], [3, 0, 3]], [3, 3]), r"indices\[0, 0, 1\] lists KV block 3 more than once"),
    (
        lambda: lists([[0]], [1], block_sizes=torch.tensor([64, 65, 0, 1], dtype=I32)),
        r"block_sizes\[1\] is 65, expected 0 to 64",
    ),
    (
        lambda: lists([[0]], [1], seq_k=250, block_sizes=torch.tensor([[64, 64, 0, 59]], dtype=I32)),
        r"block_sizes\[0, 3\] is 59, expected 0 to 64 \(the last block: 58, what seq_k=250 leaves",
    ),
    (
        lambda: lists([[0]], [1], query_sizes=torch.tensor([-1], dtype=I32)),
        r"query_sizes\[0\] is -1, expected 0 to 64",
    ),
    (
        lambda: BlockIndex.from_map(torch.ones(1, 1, 2, 3, dtype=torch.bool), capacity=2, check=True),
        r"keep row \[0, 0, 0\] has 3 blocks, more than capacity 2",
    ),
    (
        lambda: BlockIndex.from_csr(torch.tensor([0, 1, 4]), torch.tensor([0, 0, 1, 2]), seq_k=192, capacity=2, check=True),
        r"crow row \[0, 0, 1\] has 3 blocks, more than capacity 2",
    ),
]  # fmt: skip


def csr(crow: list[int], col: list[int], check: bool = True) -> BlockIndex:
    return BlockIndex.from_csr(torch.tensor(crow), torch.tensor(col), seq_k=192, check=check)


BAD_VALUES += [
    (lambda: csr([1, 2, 3], [0, 1, 2]), r"crow\[0\] is 1, expected 0"),
    (lambda: csr([0, 1, 2], [0, 1, 2]), r"crow\[2\] is 2, expected 3, the number of entries of col"),
    (lambda: csr([0, 2, 1, 3], [0, 1, 2]), r"crow\[2\] is 1, less than the one before it"),
    (lambda: csr([0, -1, 2], [0, 1]), r"crow\[1\] is -1, less than"),
    (lambda: csr([0, 1, 2], [0, 3]), r"col\[1\] is 3, expected 0 to 2, the last KV block"),
]


def test_unchecked_rows_that_are_no_rows_are_read_within_col() -> None:
    index = csr([0, -3, 2], [0, 1], check=False)
    assert index.counts.tolist() == [[[0, 2]]] and 0 <= int(index.indices.min()) <= int(index.indices.max()) <= 1


@pytest.mark.parametrize(("make", "text"), BAD_VALUES, ids=range(len(BAD_VALUES)))
def test_checked_values(make: Any, text: str) -> None:
    with pytest.raises(ValueRangeError, match=text):
        make()


def test_unchecked_values_are_not_read() -> None:
    BlockIndex(torch.full((1, 1, 2, 2), 99, dtype=I32), torch.full((1, 1, 2), 99, dtype=I32), 64, 64, 128, 128)


def test_64_bit_numbers_do_not_wrap() -> None:
    with pytest.raises(ValueRangeError, match=r"indices\[0, 0, 0, 0\] is 4294967296, expected 0 to 0"):
        BlockIndex.from_indices(torch.tensor([[[[2**32]]]]), seq_k=64, check=True)
    with pytest.raises(ValueRangeError, match=r"counts\[0, 0, 0\] is 4294967297"):
        BlockIndex.from_indices(torch.tensor([[[[0]]]]), torch.tensor([[[2**32 + 1]]]), seq_k=64, check=True)


def make(**changes: Any) -> BlockIndex:
    values = {
        "indices": torch.zeros(2, 3, 4, 5, dtype=I32), "counts": torch.zeros(2, 3, 4, dtype=I32), "block_q": 64, "block_k": 64,
        "seq_q": 256, "seq_k": 320, **changes,
    }  # fmt: skip
    return BlockIndex(**values)


def by(predicate: Any) -> BlockIndex:
    return BlockIndex.from_predicate(predicate, seq_q=256, seq_k=384)


class Flex48:
    """What from_flex looks at first of a BlockMask."""

    BLOCK_SIZE, seq_lengths = (48, 48), (96, 96)
    kv_num_blocks = kv_indices = None


BAD_RECORDS: list[tuple[Any, type[TilefoldError], str]] = [
    (lambda: make(block_q=48), ValueRangeError, "block_q must be a power of two and at least 16 tokens, got 48"),
    (lambda: make(block_k=8), ValueRangeError, "block_k must be a power of two"),
    (lambda: make(block_k=64.0), DtypeError, "block_k must be an int"),
    (lambda: make(seq_q=-1), ValueRangeError, "seq_q must be at least 0"),
    (lambda: make(seq_q=True), DtypeError, "seq_q must be an int"),
    (lambda: make(seq_q=257), ShapeError, "q_blocks"),
    (lambda: make(counts=torch.zeros(2, 3, 5, dtype=I32)), ShapeError, "counts has shape"),
    (lambda: make(counts=torch.zeros(2, 2, 4, dtype=I32)), ShapeError, "counts has shape"),
    (lambda: make(indices=torch.zeros(2, 3, 4, 5)), DtypeError, "indices has dtype float32"),
    (lambda: make(indices=torch.zeros(4, 5, dtype=I32)), ShapeError, "indices has 2 dimensions"),
    (lambda: make(indices=torch.zeros(2, 3, 5, 4, dtype=I32).mT), LayoutError, "indices needs a contiguous last"),
    (lambda: make(counts=torch.zeros(1, dtype=I32).expand(2, 3, 4)), LayoutError, "counts needs a contiguous last"),
    (lambda: make(block_sizes=torch.zeros(1, dtype=I32).expand(5)), LayoutError, "block_sizes needs a contiguous last"),
    (lambda: make(query_sizes=torch.zeros(8, dtype=I32)[::2]), LayoutError, "query_sizes needs a contiguous last"),
    (lambda: make(counts=torch.zeros(2, 3, 4, dtype=I32, device="meta")), DeviceError, "counts is on meta"),
    (lambda: make(block_sizes=torch.zeros(4, dtype=I32)), ShapeError, "block_sizes has shape"),
    (lambda: make(block_sizes=torch.zeros(5)), DtypeError, "block_sizes has dtype"),
    (lambda: make(query_sizes=torch.zeros(3, 4, dtype=I32)), ShapeError, "query_sizes has shape"),
    (lambda: BlockIndex.from_map(torch.zeros(1, 1, 2, 2)), DtypeError, "keep has dtype float32"),
    (lambda: BlockIndex.from_map(random_map(2, 2)), ShapeError, "keep has 2 dimensions"),
    (lambda: BlockIndex.from_map(random_map(1, 1, 2, 2), seq_k=200), ShapeError, "keep has 2 KV blocks"),
    (lambda: BlockIndex.from_map(random_map(1, 1, 2, 2), capacity=-1), ValueRangeError, "capacity must be at least"),
    (lambda: BlockIndex.from_topk(torch.zeros(1, 1, 2, 3), 4), ValueRangeError, "k is 4, expected 0 to 3"),
    (lambda: BlockIndex.from_csr(torch.zeros(2, 4).long(), torch.zeros(3, 4).long(), seq_k=64), ShapeError, "crow has"),
    (lambda: BlockIndex.from_flex(torch.zeros(3)), DtypeError, "mask must be a BlockMask"),  # type: ignore[arg-type]
    (
        lambda: BlockIndex.from_predicate(lambda b, h, i, j: i + j, seq_q=64, seq_k=64),
        DtypeError,
        "predicate must return",
    ),
    (
        lambda: BlockIndex.from_predicate(lambda b, h, i, j: (i == j).expand(3, 1, 1), seq_q=64, seq_k=64),
        ShapeError,
        "does not broadcast",
    ),
    (lambda: video_window((2, 2), 1), ShapeError, r"must be \(t, h, w\)"),
    (
        lambda: BlockIndex.from_map(random_map(1, 1, 2, 2), seq_q=300),
        ShapeError,
        "keep has 2 Q blocks; expected 5 for seq_q=300 in blocks of block_q=64",
    ),
    (
        lambda: BlockIndex.from_csr(torch.zeros(3).long(), torch.zeros(0).long(), seq_q=300, seq_k=64),
        ShapeError,
        "crow has 2 Q blocks; expected 5",
    ),
    (
        lambda: BlockIndex.from_map(random_map(1, 1, 2, 2), block_k=48),
        ValueRangeError,
        "block_k must be a power of two",
    ),
    (lambda: BlockIndex.from_map(random_map(1, 1, 2, 2), block_k=-16), ValueRangeError, "power of two.*got -16"),
    (lambda: BlockIndex.from_map(random_map(2, 2)), ShapeError, r"keep\[None, None\] shares it"),
    (lambda: BlockIndex.from_topk(torch.zeros(2, 2), 1), ShapeError, r"scores\[None, None\] shares it"),
    (lambda: BlockIndex.from_csr(torch.eye(2).to_sparse_csr(), seq_k=64), LayoutError, r"pass its crow_indices\(\)"),
    (lambda: BlockIndex.from_flex(Flex48()), ValueRangeError, r"mask has BLOCK_SIZE \(48, 48\): each must be a power"),
    (
        lambda: sliding_tile(1.5),
        ValueRangeError,
        r"window must be an int, or a pair \(left, right\) of ints, .*got 1.5",
    ),
    (lambda: sliding_tile(None), ValueRangeError, "window must be an int, or a pair .*got None"),
    (lambda: sliding_tile((1,)), ValueRangeError, r"window must be an int, or a pair .*got \(1,\)"),
    (lambda: sliding_tile((1, 2, 3)), ValueRangeError, r"window must be .*got \(1, 2, 3\)"),
    (lambda: video_window(6, 1), ShapeError, r"grid must be \(t, h, w\), got 6"),
    (lambda: video_window((2, 2, 2), 1.5), ShapeError, r"radii must be \(t, h, w\) or one int for all, got 1.5"),
    (lambda: video_window((2, 2, 2), 1, keep_size="x"), DtypeError, "keep_size must be a bool, got 'x'"),
    (
        lambda: any_of([dilated(1)]),
        DtypeError,
        r"predicates\[0\] must be a function of \(batch, head, q_block, kv_block\)",
    ),
    (lambda: any_of(None), DtypeError, r"predicates\[0\] must be a function .*got None"),
    (lambda: by(None), DtypeError, "predicate must be a function .*got None"),
    (lambda: by(lambda i, j: i >= j), DtypeError, r"predicate must be a function .*got one of \(i, j\)"),
    (lambda: by(causal_blocks(64, 64, block_q=17)), ValueRangeError, "block_q must be a power of two"),
    (lambda: by(causal_blocks(256, 384, block_k=32)), ValueRangeError, "block_k=32, but from_predicate has block_k=64"),
    (
        lambda: by(any_of(dilated(1), causal_blocks(200, 384))),
        ValueRangeError,
        "causal_blocks with seq_q=200, but .*seq_q=256",
    ),
    (
        lambda: by(video_window((20, 3, 1), 1)),
        ValueRangeError,
        "grid of 60 blocks, but from_predicate has only 4: seq_q=256",
    ),
    (lambda: sliding_tile(-1), ValueRangeError, "window must be an int, or a pair .*got -1"),
    (lambda: dilated(0), ValueRangeError, "step must be"),
    (lambda: any_of(), ValueRangeError, "at least one predicate"),
]


@pytest.mark.parametrize(("make_it", "kind", "text"), BAD_RECORDS, ids=range(len(BAD_RECORDS)))
def test_bad_records(make_it: Any, kind: type[TilefoldError], text: str) -> None:
    with pytest.raises(kind, match=text):
        make_it()
