"""Policies against their definitions, block by block, and `sparsify` on a model of one's own."""

import itertools
import math

import pytest
import torch
from torch import nn

from cases import judge, rand
from cases.refusals import refuses
from tilefold import reference, video
from tilefold.errors import DtypeError, ShapeError, ValueRangeError
from tilefold.sparse import GridTiling
from tilefold.video import Site

CUBE = (2, 2, 4)
TILINGS = [GridTiling((3, 5, 6), CUBE), GridTiling((4, 4, 8), CUBE)]  # cut and whole cubes
HEADS, DIM = 4, 8
odd_and_even = pytest.mark.parametrize("tiling", TILINGS, ids=["cut", "whole"])


def tokens(tiling, heads=HEADS, kv_heads=HEADS, batch=2, device="cpu", **kind):
    """q and k of a tiled video; what is past a block's tokens is anything but 0."""
    return tuple(rand(batch, tiling.padded, h, DIM, device=device, **kind) for h in (heads, kv_heads))


def site_of(tiling, heads=HEADS, layer=0, layers=3, step=None):
    return Site(layer, layers, heads, step, tiling, DIM**-0.5, {})


def valid(x, tiling, block):
    start, size = block * tiling.slots, int(tiling.block_sizes()[block])
    return x[:, start : start + size].double().cpu()


def means(x, tiling):
    """fp64 [batch, heads, blocks, dim]."""
    return torch.stack([valid(x, tiling, block).mean(1) for block in range(tiling.block_count)], 2)


def best(scores, keep):
    """bool like scores: the `keep` best of each row, of equal ones the first."""
    found = torch.zeros_like(scores, dtype=torch.bool)
    return found.scatter_(-1, scores.sort(dim=-1, descending=True, stable=True).indices[..., :keep], True)


def matches(index, wanted, tiling):
    assert index.geometry == (tiling.slots, tiling.slots, tiling.padded, tiling.padded)
    assert torch.equal(index.to_map().cpu().expand(wanted.shape), wanted)


@pytest.mark.parametrize(
    ("tiling", "dtype"),
    [(TILINGS[0], torch.float32), (TILINGS[0], torch.bfloat16), (TILINGS[1], torch.float16)],
    ids=["cut", "cut, bfloat16", "whole, float16"],
)
def test_pooled(tiling, dtype, device):
    """Softmax of products of means, grouped heads; the tokens that count are those of each block."""
    q, k = tokens(tiling, kv_heads=2, dtype=dtype, device=device)
    site = site_of(tiling)
    exact = (means(q, tiling) @ means(k, tiling).repeat_interleave(2, 1).transpose(-1, -2) * site.scale).softmax(-1)
    n = tiling.block_count
    got = video.Pooled(sparsity=0.5).scores(q, k, site).cpu()
    assert (got - exact).abs().max() <= 8 * torch.finfo(dtype).eps  # rows are rounded to the dtype
    matches(video.Pooled(sparsity=0.5)(q, k, site), best(got, math.ceil(n / 2)), tiling)
    shares = (0.0, 0.25, 0.5, 0.9)
    wanted = [best(got[:, h], max(1, math.ceil((1 - share) * n - 1e-6))) for h, share in enumerate(shares)]
    matches(video.Pooled(sparsity=shares)(q, k, site), torch.stack(wanted, 1), tiling)
    kept = video.Pooled(top_p=[0.2, 0.9, 0.2, 0.9])(q, k, site).to_map().cpu()
    mass = (got * kept).sum(-1)
    assert bool((mass >= torch.tensor([0.2, 0.9, 0.2, 0.9])[:, None] - 1e-5).all())
    smallest = got.masked_fill(~kept, 2).amin(-1)
    assert bool((mass - smallest < torch.tensor([0.2, 0.9, 0.2, 0.9])[:, None] + 1e-5).all()), "no block too many"


@odd_and_even
@pytest.mark.parametrize("stride", [1, 4, 16])
def test_antidiagonal(tiling, stride, device):
    """Loops over tiles: the mean of each antidiagonal, tokens past a block's own taken as 0."""
    q, k = tokens(tiling, heads=2, kv_heads=1, batch=1, device=device)
    site, n, per = site_of(tiling, heads=2), tiling.block_count, tiling.slots // stride
    padded = [torch.zeros(1, tiling.padded, h, DIM, dtype=torch.float64) for h in (2, 1)]
    for x, full in zip((q, k), padded, strict=True):
        for block in range(n):
            one = valid(x, tiling, block)
            full[:, block * tiling.slots : block * tiling.slots + one.shape[1]] = one
    scores = torch.einsum("bqhd,bkgd->bhqk", *padded)[0] * site.scale
    tiles = scores.view(2, n * per, stride, n * per, stride).transpose(2, 3).flip(-1)
    logits = tiles.diagonal(dim1=-2, dim2=-1).mean(-1)
    live = torch.tensor([step * stride < size for size in tiling.block_sizes().tolist() for step in range(per)])
    shares = logits.masked_fill(~live, -torch.inf).softmax(-1).view(2, n, per, n, per).sum(-1)
    rows = live.view(n, per, 1)
    wanted = ((shares * rows).sum(2) / rows.sum(1))[None]
    policy = video.Antidiagonal(sparsity=0.6, stride=stride)
    got = policy.scores(q, k, site).cpu()
    torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-6)
    matches(policy(q, k, site), best(got, math.ceil(0.4 * n)), tiling)


def test_antidiagonal_in_pieces(monkeypatch, device):
    tiling = TILINGS[0]
    q, k = tokens(tiling, device=device)
    whole = video.Antidiagonal(top_p=0.5).scores(q, k, site_of(tiling))
    monkeypatch.setattr("tilefold.video.policies.AT_ONCE", 1)
    assert torch.allclose(video.Antidiagonal(top_p=0.5).scores(q, k, site_of(tiling)), whole, atol=1e-6)


@pytest.mark.parametrize(("tiling", "kind"), [(TILINGS[0], "pooled"), (TILINGS[1], "block")], ids=["cut", "whole"])
def test_gini(tiling, kind, device):
    """More concentrated rows keep fewer blocks; tau of 1 keeps all, of 0 one."""
    q, k = tokens(tiling, device=device)
    site, n = site_of(tiling), tiling.block_count
    counts = [video.Gini(low, high, kind)(q, k, site).counts for low, high in ((0, 0), (0.3, 0.8), (1, 1))]
    assert bool((counts[0] == 1).all()) and bool((counts[2] == n).all())
    assert 1 < counts[1].float().mean() < n
    sharp = video.Gini(0.3, 0.8, kind)(6 * q, 6 * k, site).counts
    assert sharp.float().mean() < counts[1].float().mean()


@odd_and_even
def test_sliding_tile_and_window(tiling, device):
    """Distances on each axis of the grid of blocks; at a border the window moves inside, that of `Pooled` is cut."""
    q, k = tokens(tiling, device=device)
    places = list(itertools.product(*map(range, tiling.blocks)))
    radii = (0, 1, 1)

    def moved(at, radius, size):
        low = min(radius, (size - 1) // 2)
        return min(max(at, low), max(low, size - 1 - radius))

    def near(a, b, move):
        centre = [moved(*one) for one in zip(a, radii, tiling.blocks, strict=True)] if move else a
        return all(abs(x - y) <= r for x, y, r in zip(centre, b, radii, strict=True))

    for move, policy in ((True, video.SlidingTile(radii)), (False, video.Pooled(top_p=0.0, window=radii))):
        wanted = torch.tensor([[near(a, b, move) for b in places] for a in places])
        found = policy(q, k, site_of(tiling)).to_map().cpu()
        assert bool((found | ~wanted).all())
        if move:
            assert torch.equal(found[0, 0], wanted)


@pytest.mark.parametrize("width", [0.05, 0.5, 1.0, 3.0])
def test_radial(width, device):
    tiling = GridTiling((20, 5, 6), CUBE)
    places, n = tiling.blocks[1] * tiling.blocks[2], tiling.block_count

    def seen(a, b):
        apart, near = abs(a // places - b // places), abs(a % places - b % places)
        band = 2 ** int(math.log2(max(apart, 1)))
        window = width * places / band
        if window >= 1:
            return near + 1 <= window or b < places
        return (near == 0 and apart % math.ceil(band / (width * places)) == 0) or b < places

    wanted = torch.tensor([[seen(a, b) for b in range(n)] for a in range(n)])
    q, k = tokens(tiling, batch=1, device=device)
    matches(video.Radial(width)(q, k, site_of(tiling)), wanted[None, None], tiling)


def test_policies_of_policies(device):
    tiling = TILINGS[0]
    q, k = tokens(tiling, kv_heads=2, device=device)
    n = tiling.block_count
    window, half = video.SlidingTile((0, 0, 1)), video.Pooled(sparsity=0.5)
    maps = torch.rand(3, HEADS, n, n, device=device) > 0.5
    fixed = video.FixedMap({0: maps[0], 2: maps[2]})
    for layer in range(3):
        found = fixed(q, k, site_of(tiling, layer=layer))
        assert found is None if layer == 1 else torch.equal(found.to_map()[0], maps[layer])
    matches(video.FixedMap(maps[0, 0])(q, k, site_of(tiling)), maps[0, :1, None].transpose(0, 1).cpu()[:1], tiling)
    chosen = video.ByLayer({1: window}, otherwise=half)
    assert torch.equal(chosen(q, k, site_of(tiling, layer=1)).to_map(), window(q, k, site_of(tiling)).to_map())
    assert torch.equal(chosen(q, k, site_of(tiling)).to_map(), half(q, k, site_of(tiling)).to_map())
    assert video.ByLayer({1: window})(q, k, site_of(tiling)) is None
    heads = video.ByHead([half, window, video.Dense(), half])(q, k, site_of(tiling)).to_map()
    assert torch.equal(heads[:, ::3], half(q, k, site_of(tiling)).to_map()[:, ::3])
    assert torch.equal(heads[:, 1:2], window(q, k, site_of(tiling)).to_map().expand(2, -1, -1, -1))
    assert bool(heads[:, 2].all())
    ends = video.DenseFirst(half, first=1, last=1)
    assert [ends(q, k, site_of(tiling, layer=one)) is None for one in range(3)] == [True, False, True]


def test_kept_lists(device):
    tiling, other = TILINGS
    q, k = tokens(tiling, device=device)
    policy, site = video.KeepFor(video.Pooled(sparsity=0.5), 2), site_of(tiling)
    first = policy(q, k, site._replace(step=3))
    assert policy(2 * q, -k, site._replace(step=4)) is first
    assert policy(q, k, site._replace(step=5)) is not first
    first = policy(q, k, site._replace(step=3))
    assert policy(q, k, site._replace(step=2)) is not first, "steps began again"
    assert policy(q[:1], k[:1], site._replace(step=2)).batch == 1, "another batch"
    assert policy(*tokens(other, device=device), site._replace(step=2, tiling=other)).seq_q == other.padded
    assert video.KeepFor(video.Dense(), 2)(q, k, site._replace(step=0)) is None


def test_fitting_cube():
    """The least padding of all cubes whose sides are at most 8, by trying each; then the least surface."""
    cubes = [c for c in itertools.product((1, 2, 4, 8), repeat=3) if math.prod(c) == 64]
    for grid in ((21, 30, 52), (21, 45, 80), (33, 45, 80), (1, 60, 104), (16, 28, 52), (3, 3, 3), (5, 8, 8), (6, 8, 9)):
        cost = {c: (GridTiling(grid, c).padded, c[0] * c[1] + c[0] * c[2] + c[1] * c[2], c) for c in cubes}
        assert video.fitting_cube(grid) == min(cubes, key=cost.get)
    assert video.fitting_cube((16, 28, 52)) == (4, 4, 4)
    assert math.prod(video.fitting_cube((9, 9, 9), 1024)) == 1024
    for wrong in (8, 48, True, 64.0):
        refuses(ValueRangeError, "tokens must be a power of two of at least 16", video.fitting_cube, (1, 2, 3), wrong)


def test_refusals():
    tiling = TILINGS[0]
    q, k = tokens(tiling)
    for options in ({}, {"sparsity": 0.5, "top_p": 0.5}):
        refuses(ValueRangeError, "give sparsity or top_p", video.Pooled, **options)
    refuses(ValueRangeError, "sparsity", video.Pooled, sparsity=1.5)
    refuses(ValueRangeError, "top_p", video.Pooled, top_p=(0.5, -1.0))
    with pytest.raises(ShapeError, match="has 3 numbers, expected one, or 4: one for each head"):
        video.Pooled(sparsity=(0.1, 0.2, 0.3))(q, k, site_of(tiling))
    refuses(ShapeError, "window must be three ints", video.Pooled, sparsity=0.5, window=(1, 2))
    refuses(ValueRangeError, "stride must be a power of two, got 3", video.Antidiagonal, sparsity=0.5, stride=3)
    with pytest.raises(ValueRangeError, match="stride is 32, more than the 16 tokens of a block"):
        video.Antidiagonal(sparsity=0.5, stride=32)(q, k, site_of(tiling))
    refuses(ValueRangeError, "tau_min is 0.9, more than tau_max, 0.1", video.Gini, 0.9, 0.1)
    refuses(ValueRangeError, "kind must be 'block' or 'pooled', got 'dense'", video.Gini, kind="dense")
    for width, kind in ((0.0, ValueRangeError), (math.nan, ValueRangeError), ("1", DtypeError)):
        refuses(kind, "width must be", video.Radial, width)
    refuses(ValueRangeError, "radii", video.SlidingTile, -1)
    refuses(DtypeError, "maps must be bool tensors, got torch.float32", video.FixedMap, torch.ones(2, 2))
    with pytest.raises(ShapeError, match=r"maps must be \[\.\., blocks, blocks\], got shape \(2, 3\)"):
        video.FixedMap(torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ShapeError, match="maps of layer 0 are for 2 blocks, but grid"):
        video.FixedMap(torch.ones(2, 2, dtype=torch.bool))(q, k, site_of(tiling))
    with pytest.raises(ShapeError, match="policies are 1, expected one for each of 4 heads"):
        video.ByHead((video.Dense(),))(q, k, site_of(tiling))
    for make in (lambda: video.DenseFirst(3), lambda: video.KeepFor(3, 1), lambda: video.ByLayer({0: 3})):
        refuses(DtypeError, "must be a policy, a function of", make)
    for name, make in (
        ("policy must be a policy, got its class: call Pooled", lambda: video.DenseFirst(video.Pooled)),
        ("policies must be a mapping", lambda: video.ByLayer([video.Dense()])),
        ("policies must be a sequence of policies", lambda: video.ByHead(video.Dense())),
        ("policies must be a sequence of policies", lambda: video.ByHead(())),
        (
            "policy must be a function, got the class Pooled: call it",
            lambda: video.sparsify(torch.nn.Identity(), video.Pooled),
        ),
    ):
        refuses(DtypeError, name, make)
    refuses(ValueRangeError, "steps", video.KeepFor, video.Dense(), 0)
    with pytest.raises(ValueRangeError, match=r"KeepFor\(.*\) needs the denoising step"):
        video.KeepFor(video.Dense(), 1)(q, k, site_of(tiling))


# ---------------------------------------------------------------- a model of one's own


class Attention(nn.Module):
    """Grouped heads, and text in the same attention."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 8 * DIM), nn.Linear(HEADS * DIM, 16)

    def parts(self, x):
        return self.qkv(x).unflatten(-1, (8, DIM)).split((4, 2, 2), 2)

    def forward(self, x, text, lengths):
        parts = zip(self.parts(x), self.parts(text), strict=True)
        keys = torch.arange(x.shape[1] + text.shape[1]) < x.shape[1] + lengths[:, None]
        q, k, v = (torch.cat(pair, 1) for pair in parts)
        out = self.out(reference.attention(q, k, v, mask=keys[:, None, None])[0].flatten(2))
        return out[:, : x.shape[1]], out[:, x.shape[1] :]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])

    def forward(self, video, text, lengths):
        x = video.flatten(1, 3)
        for layer in self.layers:
            x, text = (a + b for a, b in zip((x, text), layer(x, text, lengths), strict=True))
        return x, text


class Mine(video.Adapter):
    def layers(self, model):
        return model.layers

    def grid(self, model, inputs):
        return tuple(inputs["video"].shape[1:4])

    def forward(self, layer, attend, x, text, lengths):
        out, beside = attend(*layer.parts(x), text=video.Text(*layer.parts(text), lengths))
        return layer.out(out.flatten(2)), layer.out(beside.flatten(2))


@pytest.mark.usefixtures("torch_cpu")
@pytest.mark.parametrize("text", [0, 5, 17])
@pytest.mark.parametrize("policy", [video.Pooled(sparsity=0.0), video.Dense()], ids=["lists", "dense"])
def test_a_model_with_an_adapter_of_its_own(text, policy):
    """In row-major order from layer to layer; text of which rows see a part, none at all; the model's own forward comes back."""
    model = Model()
    lengths = torch.tensor([text, text // 3])
    given = rand(2, 3, 5, 6, 16), rand(2, text, 16), lengths
    double = Model().double()
    double.load_state_dict(model.state_dict())

    def wanted():
        with torch.no_grad():
            return double(*(x.double() if x.is_floating_point() else x for x in given))

    exact, plain = wanted(), reference.deviating(wanted, torch.float32)
    sparse = video.sparsify(model, policy, cube=CUBE, adapter=Mine())
    with torch.no_grad():
        got = model(*given)
    for what, *three in zip(("video", "text"), got, exact, plain, strict=True):
        if three[0].numel():
            judge(*three, what)
    assert sparse.now.tiling == TILINGS[0] and not sparse.now.tiled
    video.desparsify(model)
    assert not any("forward" in layer.__dict__ for layer in model.layers)


@pytest.mark.usefixtures("torch_cpu")
def test_text_of_each_row_has_its_own_length():
    """Keys past a row's text change nothing, those before do."""
    model = Model()
    video.sparsify(model, video.Pooled(sparsity=0.5), cube=CUBE, adapter=Mine())
    x, text, lengths = rand(2, 3, 5, 6, 16), rand(2, 17, 16), torch.tensor([17, 3])
    with torch.no_grad():
        first = model(x, text, lengths)[0]
        changed = text.clone()
        changed[1, 3:] = 9
        assert torch.equal(model(x, changed, lengths)[0], first)
        changed[1, 2] = 9
        assert not torch.equal(model(x, changed, lengths)[0][1], first[1])


def test_outside_of_a_forward_pass():
    model = Model()
    video.sparsify(model, adapter=Mine())
    with pytest.raises(video.model.Unsupported, match="attention was called outside of the model's forward pass"):
        model.layers[0](rand(1, 6, 16), rand(1, 2, 16), torch.tensor([2]))
