"""The 3-D rotary embedding: against complex numbers in fp64, its properties, its split of channels, tables
in tiled order, errors."""

import copy
import pickle

import pytest
import torch

from cases import rand
from tilefold.errors import DeviceError, DtypeError, ShapeError, ValueRangeError
from tilefold.nn import Rotary3D, default_split, rotary_3d
from tilefold.sparse import GridTiling


def by_complex(x, positions, theta, split, interleaved):
    """[B, S, H, D] in fp64: every pair is a complex number, turned by exp(i * angle), one pair after the other."""
    x = x.double()
    out, rotated, done = x.clone(), sum(split), 0
    positions = positions.double().expand(x.shape[0], -1, -1)
    for axis, n in enumerate(split):
        for pair in range(n // 2):
            i = done + pair
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rotated // 2)
            angle = positions[:, :, axis, None] * theta[axis] ** (-2 * pair / n)
            turned = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones_like(angle), angle)
            out[..., a], out[..., b] = turned.real, turned.imag
        done += n // 2
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("dim", "split", "theta"),
    [
        (128, None, 10000.0),
        (16, (8, 4, 4), 100.0),
        (24, (4, 8, 8), (50.0, 100.0, 1e4)),
        (7, None, 10.0),
        (8, (0, 4, 4), 1e4),
    ],
)
def test_against_complex_numbers(dim, split, theta, interleaved, device):
    x = rand(2, 9, 3, dim, dtype=torch.float64, device=device)
    positions = torch.randint(-3, 30, (2, 9, 3), device=device)
    got = rotary_3d(x, positions, theta=theta, split=split, interleaved=interleaved)
    thetas = theta if isinstance(theta, tuple) else (theta,) * 3
    want = by_complex(x, positions, thetas, split or default_split(dim), interleaved)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_computed_in_fp32_and_rounded_once(dtype, device):
    """The result in a narrow dtype is the fp64 one but for fp32's error and one rounding."""
    x = rand(2, 50, 2, 64, dtype=dtype, device=device)
    positions = torch.randint(0, 200, (50, 3), device=device)
    got, want = rotary_3d(x, positions), rotary_3d(x.double(), positions)
    assert got.dtype == dtype
    limit = want.abs() * torch.finfo(dtype).eps / 2 + 200 * torch.finfo(torch.float32).eps * x.abs().max()
    assert bool(((got.double() - want).abs() <= limit).all())


@pytest.mark.parametrize("interleaved", [True, False])
def test_properties(interleaved, device):
    """Position 0 turns nothing, lengths stay, and scores depend on differences of positions only."""
    q, k = (rand(1, 12, 2, 32, dtype=torch.float64, device=device) for _ in range(2))
    at = torch.randint(0, 20, (12, 3), device=device)
    shift = torch.tensor([5, -2, 9], device=device)

    def turn(x, where):
        return rotary_3d(x, where, interleaved=interleaved)

    def scores(by):
        return torch.einsum("bqhd,bkhd->bhqk", turn(q, at + by), turn(k, at + by))

    assert torch.equal(turn(q, torch.zeros_like(at)), q)
    assert torch.allclose(turn(q, at).norm(dim=-1), q.norm(dim=-1))
    assert torch.allclose(scores(0), scores(shift))
    assert not torch.allclose(scores(0), torch.einsum("bqhd,bkhd->bhqk", turn(q, at + shift), turn(k, at)))


def test_default_split():
    assert default_split(128) == (44, 42, 42)
    for dim in range(1, 257):
        split = default_split(dim)
        assert sum(split) == dim - dim % 2
        assert all(n % 2 == 0 for n in split)
        assert max(split) - min(split) <= 2
        assert split == tuple(sorted(split, reverse=True))


def test_tiled_order(device):
    """Rotating tiled tokens is tiling rotated tokens, on valid slots."""
    tiling = GridTiling((3, 5, 6), (2, 4, 4))
    x = rand(2, tiling.tokens, 2, 12, device=device)
    rows = torch.cartesian_prod(*(torch.arange(n, device=device) for n in tiling.grid))
    assert torch.equal(tiling.untile(rotary_3d(tiling.tile(x), tiling)), rotary_3d(x, rows))
    row_major = GridTiling(tiling.grid, (1, 1, 1))
    assert torch.equal(rotary_3d(x, row_major), rotary_3d(x, rows))


def test_gradient(device):
    x = rand(1, 5, 2, 11, dtype=torch.float64, device=device).requires_grad_()
    positions = torch.rand(5, 3, dtype=torch.float64, device=device) * 9  # fractions are fine
    for interleaved in (True, False):
        assert torch.autograd.gradcheck(
            lambda x, turn=interleaved: rotary_3d(x, positions, split=(4, 4, 2), interleaved=turn), x
        )


@pytest.mark.no_poison
@pytest.mark.parametrize("interleaved", [True, False])
def test_compile_fullgraph(interleaved, device):
    torch._dynamo.reset()
    tiling = GridTiling((3, 5, 6), (2, 4, 4))

    def layer(x):
        return rotary_3d(x, tiling, interleaved=interleaved)

    x = rand(1, tiling.padded, 2, 12, device=device)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_a_value():
    options = Rotary3D(theta=(1.0, 2.0, 3.0), split=[4, 2, 2], interleaved=False)
    assert options == copy.deepcopy(options) == pickle.loads(pickle.dumps(options))
    assert hash(options) == hash(Rotary3D((1.0, 2.0, 3.0), (4, 2, 2), False))
    assert options.channels(9) == (4, 2, 2)


X = torch.ones(2, 4, 1, 8)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Rotary3D(theta=0), ValueRangeError, "theta must be greater than 0, got 0"),
        (lambda: Rotary3D(theta=(1.0, 2.0)), ShapeError, r"theta must be a number or three \(t, h, w\)"),
        (lambda: Rotary3D(split=(4, 3, 2)), ValueRangeError, r"split must be even numbers .* got \(4, 3, 2\)"),
        (lambda: Rotary3D(split=(4, -2, 2)), ValueRangeError, "split must be at least 0 on each axis, got -2 for h"),
        (lambda: Rotary3D(interleaved=1), DtypeError, "interleaved must be a bool, got 1"),
        (
            lambda: rotary_3d(X, torch.zeros(4, 3), split=(4, 4, 2)),
            ValueRangeError,
            "10 channels, more than the head dim 8",
        ),
        (lambda: rotary_3d(X[0], torch.zeros(4, 3)), ShapeError, r"x has 3 dimensions"),
        (lambda: rotary_3d(X.long(), torch.zeros(4, 3)), DtypeError, "x has dtype int64, accepted: float16"),
        (lambda: rotary_3d(X, torch.zeros(5, 3)), ShapeError, r"positions has shape \(5, 3\)"),
        (lambda: rotary_3d(X, torch.zeros(4, 2)), ShapeError, r"positions .* \(axes\) is 2, should be 3"),
        (lambda: rotary_3d(X, torch.zeros(4, 3, dtype=torch.bool)), DtypeError, "positions has dtype bool"),
        (lambda: rotary_3d(X, torch.zeros(4, 3, device="meta")), DeviceError, "positions is on meta, but x is on cpu"),
        (lambda: rotary_3d(X, GridTiling((2, 2, 2))), ShapeError, "expected 64 tokens for positions GridTiling"),
        (lambda: rotary_3d(X, (2, 2, 1)), DtypeError, "positions must be a torch.Tensor, got tuple"),
    ],
)
def test_errors(make, error, text):
    with pytest.raises(error, match=text):
        make()
