"""BlockIndex: its constructors, laws, contract, and that none of them reads a value on the host."""

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import tilefold
from tilefold import BlockIndex, DeviceError, DtypeError, LayoutError, ShapeError, TilefoldError, ValueRangeError
from tilefold.sparse import all_of, any_of, causal_blocks, dilated, sliding_tile, video_window

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
given = hypothesis.given

I32 = torch.int32
READS = (
    "index.Tensor",
    "_local_scalar_dense",
    "nonzero",
    "unique",
    "masked_select",
    "is_nonzero",
    "equal",
    "repeat_interleave.Tensor",
)


class NoReads(TorchDispatchMode):
    """Forbids every operator whose shape or value the host has to wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        assert not name.startswith(READS), f"{func} reads values on the host"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch):
    """No value of a tensor may reach Python."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a value was read on the host")

    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with NoReads():
        yield
    monkeypatch.undo()


def random_map(*shape: int, density: float = 0.4, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < density


def lists_of(index: BlockIndex) -> list[list[int]]:
    """Every list up to its count, rows of all batches and heads one after the other."""
    shape = torch.broadcast_shapes(index.indices.shape[:3], index.counts.shape)
    rows = index.indices.expand(*shape, -1).flatten(0, 2).tolist()
    return [row[:n] for row, n in zip(rows, index.counts.expand(shape).flatten().tolist(), strict=True)]


def map_lists(keep: torch.Tensor) -> list[list[int]]:
    return [[c for c, one in enumerate(row) if one] for row in keep.flatten(0, -2).tolist()]


@st.composite
def maps(draw: Any) -> torch.Tensor:
    shape = [draw(st.integers(1, n)) for n in (2, 2)] + [draw(st.integers(0, 9)) for _ in range(2)]
    density = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    return random_map(*shape, density=density, seed=draw(st.integers(0, 2**32)))


# ---------------------------------------------------------------- laws


@given(maps())
def test_a_map_and_back(keep: torch.Tensor) -> None:
    index = BlockIndex.from_map(keep, check=True)
    assert torch.equal(index.to_map(), keep)
    assert lists_of(index) == map_lists(keep)  # ascending
    assert index.indices.dtype == index.counts.dtype == I32
    assert index.indices.numel() == 0 or (int(index.indices.min()) >= 0 and int(index.indices.max()) < keep.shape[3])


@given(maps(), st.integers(0, 10))
def test_a_capacity_keeps_the_lowest_blocks(keep: torch.Tensor, capacity: int) -> None:
    index = BlockIndex.from_map(keep, capacity=capacity)
    assert index.capacity == capacity
    assert lists_of(index) == [row[:capacity] for row in map_lists(keep)]
    index.validate()


@given(maps())
def test_transposing(keep: torch.Tensor) -> None:
    index = BlockIndex.from_map(keep, block_q=16, block_k=128)
    once = index.transpose().validate()
    assert torch.equal(once.to_map(), keep.mT)
    assert lists_of(once) == map_lists(keep.mT)
    assert once.geometry == (128, 16, index.seq_k, index.seq_q)
    twice = once.transpose()
    assert twice.geometry == index.geometry
    assert torch.equal(twice.indices, index.indices)
    assert torch.equal(twice.counts, index.counts)


@given(maps(), st.randoms(use_true_random=False))
def test_permuting_a_list_changes_nothing(keep: torch.Tensor, random: Any) -> None:
    index = BlockIndex.from_map(keep)
    mixed = index.indices.clone()
    for row, n in zip(mixed.flatten(0, 2), index.counts.flatten().tolist(), strict=True):
        order = list(range(n))
        random.shuffle(order)
        row[:n] = row[:n][order]
    as_given = BlockIndex.from_indices(mixed, index.counts, seq_k=index.seq_k, sort=False, check=True)
    assert as_given.indices is mixed
    assert torch.equal(as_given.to_map(), keep)
    assert torch.equal(as_given.transpose().indices, index.transpose().indices)
    sorted_lists = BlockIndex.from_indices(mixed.long(), index.counts.long(), seq_k=index.seq_k, check=True)
    assert lists_of(sorted_lists) == lists_of(index)


@given(maps())
def test_what_is_past_a_count_is_not_meant(keep: torch.Tensor) -> None:
    index = BlockIndex.from_map(keep)
    live = torch.arange(index.capacity) < index.counts[..., None]
    rubbish = index.with_tensors(torch.where(live, index.indices, -(2**31)).to(I32), index.counts).validate()
    assert torch.equal(rubbish.to_map(), keep)
    assert torch.equal(rubbish.transpose().counts, index.transpose().counts)


# ---------------------------------------------------------------- constructors


@given(maps(), st.data())
def test_topk(keep: torch.Tensor, data: Any) -> None:
    """Few distinct scores, so ties abound; -inf and NaN are never listed."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scores = torch.randint(0, 3, keep.shape, generator=generator).float()
    scores[~keep] = data.draw(st.sampled_from([float("-inf"), float("nan")]))
    k = data.draw(st.integers(0, keep.shape[3]))
    index = BlockIndex.from_topk(scores.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16]))), k, check=True)
    assert index.capacity == k
    for mine, row, live in zip(
        lists_of(index), scores.flatten(0, 2).tolist(), keep.flatten(0, 2).tolist(), strict=True
    ):
        best = sorted((c for c, one in enumerate(live) if one), key=lambda c: (-row[c], c))[:k]
        assert mine == sorted(best)


def test_topk_takes_infinite_scores_first() -> None:
    scores = torch.tensor([[[[1.0, float("inf"), 3.0, float("inf")]]]])
    assert lists_of(BlockIndex.from_topk(scores, 3)) == [[1, 2, 3]]


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_csr(lead: tuple[int, ...]) -> None:
    keep = random_map(6, 5, seed=3)
    every = torch.stack([keep.roll(i, 0) for i in range(max(1, torch.Size(lead).numel()))]).reshape(*lead, 6, 5)
    csr = every.float().to_sparse_csr()
    index = BlockIndex.from_csr(csr.crow_indices(), csr.col_indices(), seq_k=5 * 64, check=True)
    assert torch.equal(index.to_map(), every.reshape(*(1,) * (2 - len(lead)), *lead, 6, 5))
    narrow = BlockIndex.from_csr(csr.crow_indices(), csr.col_indices(), seq_k=5 * 64, capacity=2)
    assert lists_of(narrow) == [row[:2] for row in map_lists(every)]


def test_bsr() -> None:
    keep = random_map(4, 6, seed=1)
    dense = keep.float().repeat_interleave(32, 0).repeat_interleave(16, 1)
    bsr = dense.to_sparse_bsr((32, 16))
    index = BlockIndex.from_csr(
        bsr.crow_indices(), bsr.col_indices(), seq_q=120, seq_k=90, block_q=32, block_k=16, check=True
    )
    assert torch.equal(index.to_map()[0, 0], keep)


def test_csr_without_entries() -> None:
    empty = torch.zeros(4, dtype=torch.int64)
    index = BlockIndex.from_csr(empty, empty[:0], seq_k=128, check=True)
    assert lists_of(index) == [[], [], []]
    assert lists_of(BlockIndex.from_csr(empty, empty[:0], seq_k=128, capacity=2)) == [[], [], []]


@pytest.mark.no_poison
@pytest.mark.parametrize(("seq_q", "seq_k"), [(512, 512), (300, 520)])
def test_flex(seq_q: int, seq_k: int) -> None:
    """Causal: full blocks below the diagonal, partial ones on it; one head sees only every other block of keys."""
    from torch.nn.attention.flex_attention import create_block_mask

    def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i + 8) & ((h == 0) | (j // 64 % 2 == 0))

    mask = create_block_mask(rule, 1, 2, seq_q, seq_k, device="cpu", BLOCK_SIZE=(128, 64))
    assert int(mask.full_kv_num_blocks.sum()) > 0 and int(mask.kv_num_blocks.sum()) > 0
    index = BlockIndex.from_flex(mask, check=True)
    assert index.geometry == (128, 64, seq_q, seq_k)
    assert torch.equal(index.to_map(), mask.to_dense().bool())


def by_hand(predicate: Any, rows: int, columns: int) -> torch.Tensor:
    return torch.tensor([[bool(predicate(i, j)) for j in range(columns)] for i in range(rows)])


def test_windows_along_the_sequence() -> None:
    def build(predicate: Any) -> torch.Tensor:
        index = BlockIndex.from_predicate(predicate, seq_q=7 * 64, seq_k=9 * 64, check=True)
        assert (index.batch, index.heads) == (1, 1)
        return index.to_map()[0, 0]

    assert torch.equal(build(sliding_tile(2)), by_hand(lambda i, j: abs(i - j) <= 2, 7, 9))
    assert torch.equal(build(sliding_tile((3, 0))), by_hand(lambda i, j: 0 <= i - j <= 3, 7, 9))
    assert torch.equal(build(dilated(3)), by_hand(lambda i, j: (i - j) % 3 == 0, 7, 9))
    assert torch.equal(build(dilated(2, 1)), by_hand(lambda i, j: i - j in (-2, 0, 2), 7, 9))
    both = any_of(all_of(sliding_tile(2), dilated(2)), lambda b, h, i, j: j == 0)
    assert torch.equal(build(both), by_hand(lambda i, j: i - j in (-2, 0, 2) or j == 0, 7, 9))


@pytest.mark.parametrize(("seq_q", "seq_k"), [(128, 128), (100, 130), (130, 50), (16, 200), (200, 16)])
@pytest.mark.parametrize(("block_q", "block_k"), [(16, 16), (64, 16), (16, 64)])
def test_causal_blocks(seq_q: int, seq_k: int, block_q: int, block_k: int) -> None:
    index = BlockIndex.from_predicate(
        causal_blocks(seq_q, seq_k, block_q, block_k), seq_q=seq_q, seq_k=seq_k, block_q=block_q, block_k=block_k
    )
    element = torch.arange(seq_k)[None, :] <= torch.arange(seq_q)[:, None] + seq_k - seq_q
    want = torch.zeros(index.q_blocks, index.kv_blocks, dtype=torch.bool)
    for i, j in itertools.product(range(index.q_blocks), range(index.kv_blocks)):
        want[i, j] = element[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k].any()
    assert torch.equal(index.to_map()[0, 0], want)


@pytest.mark.parametrize("keep_size", [False, True])
@pytest.mark.parametrize(("grid", "radii"), [((4, 5, 6), (1, 2, 1)), ((3, 2, 4), 1), ((2, 1, 3), (0, 0, 5))])
def test_video_window(grid: tuple[int, int, int], radii: Any, keep_size: bool) -> None:
    blocks = grid[0] * grid[1] * grid[2]
    index = BlockIndex.from_predicate(
        video_window(grid, radii, keep_size=keep_size), seq_q=(blocks + 1) * 16, seq_k=(blocks + 2) * 16, block_q=16,
        block_k=16, check=True,
    )  # fmt: skip
    reach = (radii,) * 3 if isinstance(radii, int) else radii
    cells = list(itertools.product(*(range(n) for n in grid)))

    def near(a: int, b: int, n: int, r: int) -> bool:
        first = a - r
        if keep_size:
            first = max(0, min(first, n - 1 - 2 * r))
        return first <= b <= first + 2 * r

    def visible(i: int, j: int) -> bool:
        if max(i, j) >= blocks:
            return False
        return all(near(a, b, n, r) for a, b, n, r in zip(cells[i], cells[j], grid, reach, strict=True))

    assert torch.equal(index.to_map()[0, 0], by_hand(visible, blocks + 1, blocks + 2))
    if keep_size:
        assert len(set(index.counts[0, 0, :blocks].tolist())) == 1


def test_a_predicate_may_look_at_batch_and_head() -> None:
    shared = BlockIndex.from_predicate(sliding_tile(1), seq_q=256, seq_k=256, batch=2, heads=3)
    assert shared.indices.shape == (1, 1, 4, 4)
    index = BlockIndex.from_predicate(lambda b, h, i, j: (i + h) % 3 == j, seq_q=256, seq_k=256, batch=2, heads=3)
    assert index.indices.shape == (1, 3, 4, 4)
    assert lists_of(index)[4:8] == [[1], [2], [0], [1]]
    index = BlockIndex.from_predicate(lambda b, h, i, j: j == b, seq_q=256, seq_k=256, batch=2, heads=3)
    assert index.indices.shape == (2, 1, 4, 4)
    assert lists_of(index)[:5] == [[0], [0], [0], [0], [1]]


# ---------------------------------------------------------------- no host synchronisation

BUILDERS = {
    "record": lambda t: BlockIndex(t["indices"], t["counts"], 64, 64, 250, 320, t["sizes"]),
    "map": lambda t: BlockIndex.from_map(t["keep"], seq_q=250, block_sizes=t["sizes"]),
    "map, capacity": lambda t: BlockIndex.from_map(t["keep"], capacity=2),
    "indices": lambda t: BlockIndex.from_indices(t["indices"], t["counts"], seq_k=320, query_sizes=t["sizes"][:4]),
    "indices without counts": lambda t: BlockIndex.from_indices(t["indices"].long(), None, seq_k=320),
    "topk": lambda t: BlockIndex.from_topk(t["scores"], 3),
    "csr": lambda t: BlockIndex.from_csr(t["crow"], t["col"], seq_k=320, capacity=4),
    "predicate": lambda t: BlockIndex.from_predicate(video_window((2, 2, 1), 1), seq_q=250, seq_k=250),
    "causal": lambda t: BlockIndex.from_predicate(causal_blocks(250, 320), seq_q=250, seq_k=320, capacity=3),
    "transpose": lambda t: BlockIndex(t["indices"], t["counts"], 64, 64, 250, 320).transpose(),
    "map and back": lambda t: BlockIndex.from_map(BlockIndex.from_map(t["keep"]).to_map()),
    "expand": lambda t: BlockIndex(t["indices"], t["counts"], 64, 64, 250, 320, t["sizes"]).expand(2, 6),
}  # fmt: skip


def builder_inputs() -> dict[str, torch.Tensor]:
    keep = random_map(2, 1, 4, 5)
    index = BlockIndex.from_map(keep)
    csr = keep[0, 0].float().to_sparse_csr()
    return {
        "keep": keep,
        "indices": index.indices,
        "counts": index.counts,
        "sizes": torch.full((5,), 33, dtype=I32),
        "scores": torch.randn(2, 1, 4, 5),
        "crow": csr.crow_indices(),
        "col": csr.col_indices(),
    }


@pytest.mark.parametrize("name", BUILDERS)
def test_no_value_is_read_on_the_host(name: str, no_reads: None) -> None:
    with torch.utils._python_dispatch._disable_current_modes():
        tensors = {
            "keep": torch.ones(2, 1, 4, 5, dtype=torch.bool),
            "indices": torch.arange(5, dtype=I32).expand(2, 1, 4, 5),
            "counts": torch.full((2, 1, 4), 3, dtype=I32),
            "sizes": torch.full((5,), 33, dtype=I32),
            "scores": torch.ones(2, 1, 4, 5),
            "crow": torch.arange(5) * 2,
            "col": torch.arange(8) % 5,
        }
    assert BUILDERS[name](tensors).indices.dtype == I32


@pytest.mark.no_poison
def test_flex_reads_no_value_either(no_reads: None) -> None:
    from torch.nn.attention.flex_attention import BlockMask

    counts, blocks = torch.full((1, 2, 3), 1, dtype=I32), torch.arange(4, dtype=I32).expand(1, 2, 3, 4)
    mask = BlockMask.from_kv_blocks(counts, blocks, counts + 1, blocks.flip(-1), BLOCK_SIZE=64, compute_q_blocks=False)
    index = BlockIndex.from_flex(mask, capacity=3)
    with torch.utils._python_dispatch._disable_current_modes():
        assert torch.equal(index.indices, torch.tensor([0, 2, 3], dtype=I32).expand(1, 2, 3, 3))


@pytest.mark.parametrize("read", [lambda t: t.item(), bool, lambda t: t.tolist(), torch.nonzero, lambda t: t[t > 0]])
def test_the_guard_sees_reads(read: Any, no_reads: None) -> None:
    with pytest.raises(AssertionError, match="on the host"):
        read(torch.ones(1))


@pytest.mark.parametrize("name", BUILDERS)
def test_shapes_follow_from_shapes(name: str) -> None:
    """Under FakeTensor there are no values at all: as in a captured graph, where they come only with a replay."""
    real = builder_inputs()
    want = BUILDERS[name](real)
    with FakeTensorMode() as mode:
        got = BUILDERS[name]({key: mode.from_tensor(t) for key, t in real.items()})
    assert got.indices.shape == want.indices.shape
    assert got.counts.shape == want.counts.shape
    assert got.geometry == want.geometry


@pytest.mark.no_poison
@pytest.mark.parametrize("name", BUILDERS)
def test_in_one_compiled_graph(name: str) -> None:
    real = builder_inputs()
    want = BUILDERS[name](real)
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: BUILDERS[name](t).tensors(), backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(compiled(real), want.tensors(), strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert torch.equal(mine, theirs)


@pytest.mark.no_poison
def test_through_a_compiled_function() -> None:
    """The record as an argument and as a result."""
    torch._dynamo.reset()
    index = BlockIndex.from_map(random_map(1, 2, 3, 4))
    compiled = torch.compile(lambda i: i.transpose(), backend="aot_eager", fullgraph=True)
    result = compiled(index)
    assert isinstance(result, BlockIndex)
    assert torch.equal(result.indices, index.transpose().indices)


# ---------------------------------------------------------------- the record


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
    with pytest.raises(ShapeError, match="index has heads 3, expected 6"):
        index.expand(2, 6)
    with pytest.raises(ShapeError, match="index has batch 2, expected 4"):
        index.expand(4, 3)


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
    monkeypatch.setattr("tilefold.sparse.index._capturing", lambda _: now["capturing"])
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
        r"block_sizes\[0, 3\] is 59, .*length of 250",
    ),
    (
        lambda: lists([[0]], [1], query_sizes=torch.tensor([-1], dtype=I32)),
        r"query_sizes\[0\] is -1, expected 0 to 64",
    ),
    (
        lambda: BlockIndex.from_map(torch.ones(1, 1, 2, 3, dtype=torch.bool), capacity=2, check=True),
        r"counts\[0, 0, 0\] is 3, more than capacity 2",
    ),
    (
        lambda: BlockIndex.from_csr(torch.tensor([0, 1, 4]), torch.tensor([0, 0, 1, 2]), seq_k=192, capacity=2, check=True),
        r"counts\[0, 0, 1\] is 3, more than capacity 2",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "text"), BAD_VALUES, ids=range(len(BAD_VALUES)))
def test_checked_values(make: Any, text: str) -> None:
    with pytest.raises(ValueRangeError, match=text):
        make()


def test_unchecked_values_are_not_read() -> None:
    BlockIndex(torch.full((1, 1, 2, 2), 99, dtype=I32), torch.full((1, 1, 2), 99, dtype=I32), 64, 64, 128, 128)


def test_64_bit_numbers_do_not_wrap() -> None:
    with pytest.raises(ValueRangeError, match="indices"):
        BlockIndex.from_indices(torch.tensor([[[[2**32]]]]), None, seq_k=64, check=True)


def make(**changes: Any) -> BlockIndex:
    values = {
        "indices": torch.zeros(2, 3, 4, 5, dtype=I32), "counts": torch.zeros(2, 3, 4, dtype=I32), "block_q": 64, "block_k": 64,
        "seq_q": 256, "seq_k": 320, **changes,
    }  # fmt: skip
    return BlockIndex(**values)


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
    (lambda: sliding_tile(-1), ValueRangeError, "window must be an int of at least 0"),
    (lambda: dilated(0), ValueRangeError, "step must be"),
    (lambda: any_of(), ValueRangeError, "at least one predicate"),
]


@pytest.mark.parametrize(("make_it", "kind", "text"), BAD_RECORDS, ids=range(len(BAD_RECORDS)))
def test_bad_records(make_it: Any, kind: type[TilefoldError], text: str) -> None:
    with pytest.raises(kind, match=text):
        make_it()
