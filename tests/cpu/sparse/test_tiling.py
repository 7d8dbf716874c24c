"""Tiling of a (T, H, W) grid in cubes: exact inverses, the order of blocks and slots, padding, compilation, errors."""

import copy
import itertools
import pickle

import pytest
import torch

from cases import one_graph
from tilefold import BlockIndex
from tilefold.errors import DtypeError, ShapeError, ValueRangeError
from tilefold.sparse import GridTiling, any_of, video_window
from tilefold.sparse import kept as kept_module
from tilefold.sparse.tiling import _in_words

GRIDS = [
    ((4, 8, 8), (4, 4, 4)),
    ((5, 6, 7), (4, 4, 4)),
    ((1, 3, 9), (2, 4, 2)),
    ((2, 2, 2), (4, 4, 4)),
    ((3, 4, 5), (1, 1, 16)),
]


def slots_by_hand(grid, cube):
    """Which token lies in each slot, -1 for padding, written as loops."""
    slots = []
    for corner in itertools.product(*(range(0, n, c) for n, c in zip(grid, cube, strict=True))):
        inside = [range(a, min(a + c, n)) for a, c, n in zip(corner, cube, grid, strict=True)]
        block = [(a * grid[1] + b) * grid[2] + c for a, b, c in itertools.product(*inside)]
        slots += block + [-1] * (cube[0] * cube[1] * cube[2] - len(block))
    return torch.tensor(slots)


@pytest.mark.parametrize(("grid", "cube"), GRIDS)
def test_slots_are_those_of_the_loops(grid, cube, device):
    tiling, want = GridTiling(grid, cube), slots_by_hand(grid, cube)
    token = torch.arange(1, tiling.tokens + 1, device=device)[None]
    got = tiling.tile(token)[0].cpu()
    assert torch.equal(got - 1, want)
    valid = (want >= 0).view(tiling.block_count, tiling.slots)
    assert torch.equal(tiling.block_sizes(device).cpu(), valid.sum(1, dtype=torch.int32))
    assert torch.equal(valid, torch.arange(tiling.slots) < valid.sum(1, keepdim=True)), "valid slots come first"
    assert tiling.padded == len(want)
    assert tiling.even == bool(valid.all())
    assert (tiling.sizes(device) is None) == tiling.even
    where = torch.stack([want // (grid[1] * grid[2]), want // grid[2] % grid[1], want % grid[2]], 1)
    assert torch.equal(tiling.positions(device).cpu(), torch.where(want[:, None] >= 0, where, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_words_are_what_numbers_are(dtype, device):
    """Copied 8 bytes at a time where they lie so, and one by one with gradients: of slices, odd widths, shared rows."""
    tiling, numbers = GridTiling((4, 8, 4), (4, 4, 4)), torch.randn(2, 128, 40, device=device).to(dtype)
    heads, turned = numbers.view(2, 128, 5, 8), numbers.transpose(1, 2).contiguous().transpose(1, 2)
    views = (
        numbers,
        numbers[..., 8:32],
        numbers[..., 3:20],
        numbers[..., :7],
        numbers[1:, :, ::2],
        heads[:, :, 1:3],
        turned,
    )
    for x in (*views, numbers[:1].expand(3, -1, -1), numbers[..., 0], numbers[:0]):
        leaf = x.detach().clone().requires_grad_()
        tiled = tiling.tile(leaf)
        assert torch.equal(tiling.tile(x), tiled) and torch.equal(tiling.untile(tiled.detach()), x)
        assert torch.equal(torch.autograd.grad(tiled, leaf, tiled.detach())[0], x)
    assert _in_words(numbers) is not None and _in_words(heads[:, :, 1:3]) is not None
    assert _in_words(numbers[..., 3:20]) is None and _in_words(numbers.requires_grad_()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize(("grid", "cube"), GRIDS)
def test_there_and_back(grid, cube, dtype, device):
    tiling = GridTiling(grid, cube)
    x = torch.randn(2, tiling.tokens, 3, 2, device=device).mul(4).to(dtype)
    tiled = tiling.tile(x)
    assert tiled.shape == (2, tiling.padded, 3, 2)
    assert tiled.dtype == dtype
    assert torch.equal(tiling.untile(tiled), x)
    padding = tiling.tile(torch.ones_like(x)) == 0
    assert not tiled[padding].any(), "padding is 0"


def test_strided_input_and_no_trailing_dimensions(device):
    tiling = GridTiling((3, 5, 4), (2, 2, 2))
    x = torch.randn(4, tiling.tokens, 2, device=device)[::2].transpose(0, 2)[1].T
    assert torch.equal(tiling.tile(x), tiling.tile(x.contiguous()))
    assert torch.equal(tiling.untile(tiling.tile(x)), x)


@pytest.mark.parametrize(("grid", "cube"), GRIDS[:3])
def test_gradients(grid, cube, device):
    """tile and untile are linear, each the transpose of the other on valid tokens; padding gets no gradient."""
    tiling = GridTiling(grid, cube)
    x = torch.randn(1, tiling.tokens, 2, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.randn(1, tiling.padded, 2, dtype=torch.float64, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(tiling.tile(x), x, y)
    assert torch.equal(dx, tiling.untile(y))
    (dy,) = torch.autograd.grad(tiling.untile(y), y, x)
    assert torch.equal(dy, tiling.tile(x))
    assert torch.autograd.gradcheck(tiling.tile, x)
    assert torch.autograd.gradcheck(tiling.untile, y)


@pytest.mark.no_poison
def test_compile_fullgraph_over_grids(device):

    def both(x, grid, cube):
        tiling = GridTiling(grid, cube)
        tiled = tiling.tile(2 * x)
        return tiled, tiling.untile(tiled), tiling.block_sizes(x.device), tiling.positions(x.device)

    compiled = one_graph(both)
    for grid, cube in GRIDS[:2]:
        x = torch.randn(2, grid[0] * grid[1] * grid[2], 3, device=device, requires_grad=True)
        results = []
        for fn in (both, compiled):
            made = fn(x, grid, cube)
            results.append((*made, *torch.autograd.grad(made[0].square().sum(), x)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of index_copy_ is a loop
def test_under_torch_func_and_fake_tensors(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    tiling = GridTiling((3, 5, 4), (2, 2, 2))
    x = torch.randn(2, tiling.tokens, 2, device=device)
    got = torch.func.grad(lambda x: tiling.tile(x).square().sum())(x)
    assert torch.equal(got, 2 * x)
    assert torch.equal(torch.func.vmap(lambda row: tiling.tile(row[None])[0])(x), tiling.tile(x))
    with FakeTensorMode() as mode:
        tiled = tiling.untile(tiling.tile(mode.from_tensor(x)))
    assert tiled.shape == x.shape
    assert torch.equal(tiling.untile(tiling.tile(x)), x), "nothing fake was kept"


def test_index_tensors_are_kept_and_can_be_saved_for_backward(device):
    tiling = GridTiling((3, 5, 6), (2, 2, 2))
    with torch.inference_mode():
        tiling.tile(torch.ones(1, tiling.tokens, device=device))
    x = torch.ones(1, tiling.tokens, device=device, requires_grad=True)
    tiling.untile(tiling.tile(x)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert tiling.destination(device) is tiling.destination(device)
    assert GridTiling((3, 5, 6), (2, 2, 2)).destination(device) is tiling.destination(device)
    assert tiling.block_sizes("meta").device.type == "meta"


def test_what_is_kept_is_bounded(monkeypatch):
    """The oldest tensors go first, the newest one never does."""
    monkeypatch.setattr(kept_module, "_KEPT", {})
    monkeypatch.setattr(kept_module, "_LIMIT", 3 * 80)
    made = [kept_module.kept(n, torch.device("cpu"), lambda: torch.zeros(10, dtype=torch.int64)) for n in range(5)]
    assert [any(one is t for t in kept_module._KEPT.values()) for one in made] == [False, False, True, True, True]
    kept_module.kept("large", torch.device("cpu"), lambda: torch.zeros(1000))
    assert len(kept_module._KEPT) == 1


def test_blocks_are_those_of_video_window(device):
    """The window's lists are the blocks whose coordinates are near."""
    tiling = GridTiling((9, 10, 7), (4, 4, 4))
    at = tiling.coordinates(device)
    assert tiling.blocks == (3, 3, 2)
    near = ((at[:, None] - at[None, :]).abs() <= torch.tensor([1, 1, 0], device=device)).all(-1)
    lengths = {"seq_q": tiling.padded, "seq_k": tiling.padded, "block_q": tiling.slots, "block_k": tiling.slots}
    sizes = dict.fromkeys(("block_sizes", "query_sizes"), tiling.sizes(device))
    window = any_of(video_window(tiling.blocks, (1, 1, 0)))
    index = BlockIndex.from_predicate(window, **lengths, **sizes, device=device, check=True)
    assert torch.equal(index.to_map()[0, 0], near)


def test_a_value(device):
    tiling = GridTiling([5, 6, 7])
    assert tiling == GridTiling((5, 6, 7), (4, 4, 4)) == copy.deepcopy(tiling) == pickle.loads(pickle.dumps(tiling))
    assert hash(tiling) == hash(copy.copy(tiling))
    assert (tiling.blocks, tiling.block_count, tiling.slots) == ((2, 2, 2), 8, 64)
    assert (tiling.tokens, tiling.padded) == (210, 512)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: GridTiling((4, 4)), ShapeError, r"grid must be three ints \(t, h, w\), got \(4, 4\)"),
        (lambda: GridTiling(4), ShapeError, "grid must be three ints"),
        (lambda: GridTiling((4, 0, 4)), ValueRangeError, "grid must be at least 1 on each axis, got 0 for h"),
        (
            lambda: GridTiling((4, 4, 4), (2, 2, -1)),
            ValueRangeError,
            "cube must be at least 1 on each axis, got -1 for w",
        ),
        (lambda: GridTiling((4, 4.0, 4)), DtypeError, "grid must be three ints .* got 4.0 for h"),
        (lambda: GridTiling((4, True, 4)), DtypeError, "got True for h"),
        (
            lambda: GridTiling((2, 2, 2)).tile(torch.ones(1, 9)),
            ShapeError,
            r"x has shape \(1, 9\), expected \[batch, 8, ...\]",
        ),
        (lambda: GridTiling((2, 2, 2)).tile(torch.ones(8)), ShapeError, r"x has shape \(8,\)"),
        (lambda: GridTiling((2, 2, 2)).untile(torch.ones(1, 8)), ShapeError, r"expected \[batch, 64, ...\]"),
        (lambda: GridTiling((2, 2, 2)).tile([1]), DtypeError, "x must be a torch.Tensor, got list"),
    ],
)
def test_errors(make, error, text):
    with pytest.raises(error, match=text):
        make()


hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
SIDES = st.tuples(*[st.integers(1, 9)] * 3)


@hypothesis.given(grid=SIDES, cube=st.tuples(*[st.integers(1, 5)] * 3), batch=st.integers(0, 2))
def test_law_untile_undoes_tile(grid, cube, batch):
    """On any grid: untile(tile(x)) is x; tile(untile(y)) is y with zeros in the padding; every token has one slot."""
    tiling = GridTiling(grid, cube)
    x = torch.randn(batch, tiling.tokens, 2)
    assert torch.equal(tiling.untile(tiling.tile(x)), x)
    y = torch.randn(batch, tiling.padded)
    valid = torch.arange(tiling.slots) < tiling.block_sizes("cpu")[:, None]
    assert torch.equal(tiling.tile(tiling.untile(y)), torch.where(valid.view(-1), y, 0.0))
    assert int(tiling.block_sizes("cpu").sum()) == tiling.tokens == tiling.destination("cpu").unique().numel()
    assert torch.equal(tiling.tile(torch.arange(1, tiling.tokens + 1)[None])[0] - 1, slots_by_hand(grid, cube))
