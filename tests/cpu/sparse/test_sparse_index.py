"""BlockIndex: its constructors and its properties; the oracle of block-sparse attention, element by element."""

import itertools
from typing import Any

import pytest
import torch

from cases import prefix_twin, qkv, rand, same
from cases.index import lists_of, map_lists, random_map
from tilefold import BlockIndex, reference
from tilefold.sparse import all_of, any_of, causal_blocks, dilated, sliding_tile, video_window

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
given = hypothesis.given

I32 = torch.int32


@st.composite
def maps(draw: Any) -> torch.Tensor:
    shape = [draw(st.integers(1, n)) for n in (2, 2)] + [draw(st.integers(0, 9)) for _ in range(2)]
    density = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    return random_map(*shape, density=density, seed=draw(st.integers(0, 2**32)))


# ---------------------------------------------------------------- properties


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


# ---------------------------------------------------------------- the oracle


def by_element(index: BlockIndex, batch: int, heads: int) -> torch.Tensor:
    """bool [B, H, Sq, Sk] from single tokens, by the words of the record's contract."""
    full = index.expand(batch, heads)
    keep = torch.zeros(batch, heads, index.seq_q, index.seq_k, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for i in range(index.seq_q):
                row, o_q = divmod(i, index.block_q)
                if full.query_sizes is not None and o_q >= int(full.query_sizes[b, h, row]):
                    continue
                for block in full.indices[b, h, row, : int(full.counts[b, h, row])].tolist():
                    size = index.block_k if full.block_sizes is None else int(full.block_sizes[b, h, block])
                    first = block * index.block_k
                    keep[b, h, i, first : min(first + size, index.seq_k)] = True
    return keep


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("sizes", ["none", "shared", "batch", "head"])
def test_lists_written_out(sizes: str, layout: str) -> None:
    """Tails on both sides, unequal blocks, GQA, empty lists and empty blocks."""
    b, h, hk, sq, sk, bq, bk = 2, 4, 2, 50, 75, 16, 32
    shape = {"none": None, "shared": (3,), "batch": (b, 3), "head": (b, h, 3)}[sizes]
    block_sizes = None if shape is None else torch.randint(0, 12, shape, dtype=torch.int32)
    query_sizes = None if shape is None else torch.randint(0, 3, (*shape[:-1], 4), dtype=torch.int32)
    keep = torch.rand(b, h, 4, 3) < 0.5
    keep[0, 0, 1] = False
    index = BlockIndex.from_map(
        keep, block_q=bq, block_k=bk, seq_q=sq, seq_k=sk, block_sizes=block_sizes, query_sizes=query_sizes, check=True
    )
    q, k, v = qkv(b, sq, sk, h, hk, 8, 6)
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = by_element(index, b, h)
    out, lse = reference.sparse_attention(q, k, v, index, layout=layout)
    want_out, want_lse = reference.attention(q, k, v, mask=mask, layout=layout)
    assert out.dtype == lse.dtype == torch.float64
    assert torch.equal(out, want_out) and torch.equal(lse, want_lse)
    assert lse[0, 0, 16:32].eq(float("-inf")).all()
    rows = out if layout == "bhsd" else out.transpose(1, 2)
    assert rows[0, 0, 16:32].eq(0).all() and not out.isnan().any()


def test_all_blocks_are_dense_attention() -> None:
    index = BlockIndex.from_map(torch.ones(1, 1, 4, 5, dtype=torch.bool), block_q=16, block_k=16, seq_q=60, seq_k=70)
    q, k, v = qkv(2, 60, 70, 3, 1, 8)
    options = {"causal": True, "softcap": 5.0, "bias": rand(1, 3, 60, 70), "sinks": rand(3)}
    assert same(reference.sparse_attention(q, k, v, index, **options), reference.attention(q, k, v, **options))


def test_masks_narrow_the_lists() -> None:
    index = BlockIndex.from_map(torch.rand(1, 2, 4, 4) < 0.6, block_q=16, block_k=16)
    q, k, v = qkv(1, 64, 64, 2, 2, 8)
    mask = torch.rand(1, 1, 64, 64) < 0.5
    both = by_element(index, 1, 2) & mask
    out, lse = reference.sparse_attention(q, k, v, index, mask=mask, mask_mod=prefix_twin, mask_args=(5,))
    want, want_lse = reference.attention(q, k, v, mask=both, mask_mod=prefix_twin, mask_args=(5,))
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_gradients_flow_and_dead_rows_have_none() -> None:
    keep = torch.tensor([[[[True, False], [False, False]]]])
    index = BlockIndex.from_map(keep, block_q=16, block_k=16)
    q, k, v = (t.double().requires_grad_() for t in qkv(1, 32, 32, 1, 1, 4))
    out, lse = reference.sparse_attention(q, k, v, index)
    (out.sum() + lse[lse.isfinite()].sum()).backward()
    for t, dead in ((q, slice(16, 32)), (k, slice(16, 32)), (v, slice(16, 32))):
        assert t.grad is not None and not t.grad.isnan().any()
        assert t.grad[:, dead].eq(0).all() and t.grad[:, :16].ne(0).any()


def test_lengths_have_to_fit() -> None:
    index = BlockIndex.from_map(torch.ones(1, 1, 2, 2, dtype=torch.bool))
    q, k, v = qkv(1, 128, 100, 1, 1, 8)
    with pytest.raises(ValueError, match="128 and 100 tokens"):
        reference.sparse_attention(q, k, v, index)
