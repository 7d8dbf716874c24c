"""select under torch.compile, opcheck and FakeTensor, and that no value ever reaches the host."""

import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tilefold
from cases import graph_gives, one_graph, qkv, same
from cases.host import READS, NoReads, refuse_values
from cases.select import rows
from tilefold import sparse
from tilefold.ops.sparse.select import GINI, SELECT, SelectCall
from tilefold.sparse import Selection

pytestmark = pytest.mark.no_poison

CALLS = {
    "gini": lambda s, h: {},
    "gini per head": lambda s, h: {"tau_min": h / 2, "tau_max": h, "max_blocks": 9},
    "tau": lambda s, h: {"tau": lambda g: 1 - g / 2},
    "top_p": lambda s, h: {"method": "top_p", "top_p": h, "force": s[0, 0] > 0.9},
    "top_k": lambda s, h: {"method": "top_k", "top_k": 5, "local_window": 1, "force_first": 1},
    "sparsity": lambda s, h: {"method": "top_k", "sparsity": h, "min_blocks": (4 * h).int()},
}


def inputs(device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    return rows("random", 2, 3, 5, 20).to(device), torch.tensor([0.3, 0.6, 0.9], device=device)


def tensors(selection: Selection) -> list[torch.Tensor]:
    made = [*selection.index.tensors()[:2], selection.gini, selection.tau, selection.mass]
    return [t for t in made if t is not None]


@pytest.fixture(params=["kernel", "long"])
def path(request, monkeypatch):
    """The kernel, and the path of long rows on short ones."""
    if request.param == "long":
        monkeypatch.setattr(sys.modules["tilefold.sparse.select"], "LONGEST_ROW", 0)
    return request.param


@pytest.mark.parametrize(
    ("name", "path"), [("gini", "long"), *zip(CALLS, ("kernel", "long") * len(CALLS), strict=False)], indirect=["path"]
)
def test_compile_fullgraph(name, path, device):
    scores, heads = inputs(device)

    def stage(scores, heads):
        return sparse.select(scores + 0, **CALLS[name](scores, heads))

    compiled = one_graph(stage)
    scores.requires_grad_()
    want = tensors(stage(scores, heads))
    for _ in range(2):
        got = compiled(scores, heads)
        assert isinstance(got, Selection)
        assert same(tensors(got), want)
        assert not any(t.requires_grad for t in tensors(got))


def test_compile_scores_to_attention(device):
    """Select and the fine stage in one graph; the gradient passes beside the selection."""

    def layer(q, k, v, scores):
        selection = sparse.select(scores, block_q=16, block_k=16, seq_q=33, seq_k=48)
        return tilefold.sparse_attention(q, k, v, selection.index)

    sides = [t.requires_grad_() for t in qkv(1, 33, 48, 2, 2, 16, device=device)]
    scores = rows("random", 1, 2, 3, 3).to(device)
    graph_gives(layer, *sides, scores)


def test_opcheck(device):
    scores, heads = inputs(device)
    per_head = heads.view(1, -1, 1).expand(2, 3, 5)
    force = (scores > 0.9).expand(scores.shape)
    sizes = torch.full((2, 3, 20), 64, dtype=torch.int32, device=device)
    geometry = 64, 64, 320, 1280
    for call in (
        SelectCall("gini", (0.5, 0.9), (1.0, 20.0), 20, geometry),
        SelectCall("mass", (per_head,), (1.0, 9.0), 9, geometry, 1, 1, force, sizes),
        SelectCall("count", (4.0,), (1.0, 20.0), 4, geometry, gini=False, softmax=0.5),
    ):
        torch.library.opcheck(SELECT.op, SELECT.flat(scores, call))
    torch.library.opcheck(GINI.op, (scores, sizes))


def test_fake_tensors(device):
    scores, _ = inputs(device)
    with FakeTensorMode() as mode:
        got = sparse.select(mode.from_tensor(scores), max_blocks=7)
        coefficients = sparse.gini(mode.from_tensor(scores))
    assert got.index.indices.shape == (2, 3, 5, 7)
    assert got.tau is not None
    assert got.tau.shape == got.gini.shape == got.mass.shape == coefficients.shape == (2, 3, 5)


def test_a_selection_is_a_tree(device):
    from torch.utils import _pytree

    scores, _ = inputs(device)
    got = sparse.select(scores, method="top_k", top_k=3)
    moved = _pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, got)
    assert isinstance(moved, Selection)
    assert moved.tau is None
    assert same(tensors(moved), tensors(got))


# ---------------------------------------------------------------- nothing is read on the host


@pytest.mark.parametrize("name", CALLS)
def test_no_value_is_read(name, path, monkeypatch):
    """Under a dispatch mode the op is opaque, so its inside is looked at too: the kernel's host code by forbidden reads."""
    scores, heads = inputs()
    options = CALLS[name](scores, heads)

    with monkeypatch.context() as patched:
        refuse_values(patched)
        if path == "kernel":  # the interpreter reads what kernels read: stop in front of it
            patched.setattr("tilefold.ops.launch.Launch.__call__", lambda self, args: None)
        mode = NoReads(*READS, "_to_copy.device", "item")
        with mode:
            sparse.select(scores, **options)
        sparse.select(scores, **options)
        sparse.index(scores > 0.5)
    assert mode.seen > 0


@pytest.mark.parametrize("path_of_index", ["select", "map"])
def test_index_does_not_walk_rows(path_of_index, monkeypatch):
    """The number of operators, or of launches, is the same for a short row and for a long one."""

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen = []
    for blocks in (4, 400):
        scores = rows("random", 1, 2, 3, blocks)
        with Count() as count:
            if path_of_index == "map":
                sparse.index(scores > 0.5)
            else:
                sparse.select(scores)
        seen.append(count.seen)
    assert seen[0] == seen[1]


def test_lengths_share_a_graph(device):
    """But for sparsity, whose number of blocks follows from the length."""
    made = []

    def backend(graph, _):
        made.append(graph)
        return graph

    def choose(scores):
        return [sparse.select(scores, **METHODS[name]).index.counts for name in ("gini", "top_p", "top_k")]

    METHODS = {"gini": {}, "top_p": {"method": "top_p", "top_p": 0.7}, "top_k": {"method": "top_k", "top_k": 3}}
    compiled = torch.compile(choose, fullgraph=True, dynamic=True, backend=backend)
    for blocks in (5, 9, 17, 30):
        scores = rows("random", 1, 2, blocks, blocks).to(device)
        assert all(map(torch.equal, compiled(scores), choose(scores)))
    assert len(made) == 1
