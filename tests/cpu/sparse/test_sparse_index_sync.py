"""No constructor of BlockIndex reads a value on the host: under guards, without values, and in one compiled graph."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import one_graph
from cases.host import NoReads, refuse_values
from cases.index import random_map
from tilefold import BlockIndex
from tilefold.sparse import causal_blocks, video_window

I32 = torch.int32


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch):
    """No value of a tensor may reach Python."""
    refuse_values(monkeypatch)
    with NoReads():
        yield
    monkeypatch.undo()


BUILDERS = {
    "record": lambda t: BlockIndex(t["indices"], t["counts"], 64, 64, 250, 320, t["sizes"]),
    "map": lambda t: BlockIndex.from_map(t["keep"], seq_q=250, block_sizes=t["sizes"]),
    "map, capacity": lambda t: BlockIndex.from_map(t["keep"], capacity=2),
    "indices": lambda t: BlockIndex.from_indices(t["indices"], t["counts"], seq_k=320, query_sizes=t["sizes"][:4]),
    "indices without counts": lambda t: BlockIndex.from_indices(t["indices"].long(), None, seq_k=320),
    "topk": lambda t: BlockIndex.from_topk(t["scores"], 3),
    "csr": lambda t: BlockIndex.from_csr(t["crow"], t["col"], seq_k=320, capacity=4),
    "predicate": lambda t: BlockIndex.from_predicate(video_window((2, 2, 1), 1), seq_q=250, seq_k=250),
    "mask": lambda t: BlockIndex.from_mask(lambda b, h, i, j: i >= j, seq_q=250, seq_k=320, capacity=3),
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
    """Under FakeTensor there are no values that could be read: as in a captured graph, where they come only with a replay."""
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
    compiled = one_graph(lambda t: BUILDERS[name](t).tensors())
    for mine, theirs in zip(compiled(real), want.tensors(), strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert torch.equal(mine, theirs)


@pytest.mark.no_poison
def test_through_a_compiled_function() -> None:
    """The record as an argument and as a result."""
    index = BlockIndex.from_map(random_map(1, 2, 3, 4))
    compiled = one_graph(lambda i: i.transpose())
    result = compiled(index)
    assert isinstance(result, BlockIndex)
    assert torch.equal(result.indices, index.transpose().indices)
