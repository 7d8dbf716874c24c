"""BlockIndex on a GPU: captured into CUDA graphs, replayed with other inputs, the same as on the CPU, never synchronising."""

import pytest
import torch

from cases.device import DEVICE, no_waiting
from tilefold import BlockIndex
from tilefold.sparse import causal_blocks, video_window

pytestmark = pytest.mark.no_poison
ROWS, COLUMNS = 40, 53


def inputs(seed: int) -> dict[str, torch.Tensor]:
    """On the CPU; every seed has as many CSR entries."""
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(2, 3, ROWS, COLUMNS, generator=generator) < 0.3
    index = BlockIndex.from_map(keep)
    csr = torch.rand(ROWS, COLUMNS, generator=generator).topk(7, 1).indices.sort(1).values
    return {
        "keep": keep,
        "indices": index.indices,
        "counts": index.counts,
        "scores": torch.randint(0, 9, keep.shape, generator=generator).float(),
        "crow": torch.arange(ROWS + 1) * 7,
        "col": csr.flatten(),
    }


BUILDERS = {
    "map": lambda t: BlockIndex.from_map(t["keep"], capacity=20),
    "indices": lambda t: BlockIndex.from_indices(t["indices"], t["counts"], seq_k=COLUMNS * 64),
    "topk": lambda t: BlockIndex.from_topk(t["scores"], 11),
    "csr": lambda t: BlockIndex.from_csr(t["crow"], t["col"], seq_k=COLUMNS * 64, capacity=8),
    "predicate": lambda t: BlockIndex.from_predicate(
        video_window((2, 4, 5), 1), seq_q=ROWS * 64, seq_k=ROWS * 64, device=t["keep"].device
    ),
    "causal": lambda t: BlockIndex.from_predicate(
        causal_blocks(2000, 3000), seq_q=2000, seq_k=3000, device=t["keep"].device
    ),
    "record": lambda t: BlockIndex(t["indices"], t["counts"], 64, 64, ROWS * 64, COLUMNS * 64),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_captured_and_replayed_with_other_inputs(name):
    """A captured constructor and transpose give, at every replay, what the CPU gives for the inputs of that replay."""
    build = BUILDERS[name]
    held = {key: t.to(DEVICE) for key, t in inputs(0).items()}
    build(held).transpose()  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        index = build(held)
        once = index.transpose()
        assert index.transpose() is once  # made in the same capture
    for seed in (1, 2):
        fresh = inputs(seed)
        for key, t in fresh.items():
            held[key].copy_(t)
        graph.replay()
        want = build(fresh)
        for mine, theirs in ((index, want), (once, want.transpose())):
            assert torch.equal(mine.counts.cpu(), theirs.counts)
            assert torch.equal(mine.to_map().cpu(), theirs.to_map())
            assert torch.equal(mine.indices.cpu(), theirs.indices)


@pytest.mark.parametrize("name", BUILDERS)
def test_no_synchronisation(name):
    held = {key: t.to(DEVICE) for key, t in inputs(0).items()}
    with no_waiting():
        BUILDERS[name](held).transpose().to_map()


def test_a_capture_keeps_nothing_on_a_record_from_outside():
    """Its transpose has values only after a replay, so an eager call must not find it."""
    index = BlockIndex.from_map(inputs(0)["keep"].to(DEVICE))
    index.to_map()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = index.transpose()
    assert index.transpose() is not captured
    assert torch.equal(index.transpose().to_map(), index.to_map().mT)


def test_the_same_bits_every_run():
    scores = torch.randint(0, 4, (1, 12, 364, 364), device=DEVICE).float()
    first = BlockIndex.from_topk(scores, 36)
    for _ in range(5):
        again = BlockIndex.from_topk(scores, 36)
        assert torch.equal(again.indices, first.indices)
        assert torch.equal(again.transpose().indices, first.transpose().indices)
