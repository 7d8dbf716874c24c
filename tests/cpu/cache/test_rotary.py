"""Rotary embedding: in 3-D against complex numbers in fp64, its properties, tables; by its kernel, both kinds of pairs."""

import copy
import pickle

import pytest
import torch

import tilefold
from cases import graph_gives, judge, rand
from cases.flash import angles, turned
from tilefold import reference
from tilefold.compat.flash_attn.layers import rotary as layers
from tilefold.errors import DeviceError, DtypeError, ShapeError, ValueRangeError
from tilefold.nn import Rotary3D, default_split, rotary_3d
from tilefold.ops.cache.rotary import apply_rotary
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
    tiling = GridTiling((3, 5, 6), (2, 4, 4))

    def layer(x):
        return rotary_3d(x, tiling, interleaved=interleaved)

    x = rand(1, tiling.padded, 2, 12, device=device)
    graph_gives(layer, x)


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


# ---------------------------------------------------------------- the kernel


def oracle(x, cos, sin, interleaved, offsets, step=1, dtype=torch.float64):
    place = torch.arange(x.shape[1], device=x.device) * step
    rows = [turned(x[b], cos, sin, interleaved, int(offsets[b]) + place, dtype) for b in range(len(x))]
    return torch.stack(rows)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "pairs"), [(32, 16), (59, 16), (40, 6), (16, 1)])
def test_against_the_oracle(device, dim, pairs, dtype, interleaved):
    x = rand(2, 9, 3, dim, dtype=dtype, device=device)
    cos, sin = angles(30, pairs, dtype, device)
    offsets = torch.tensor([3, 12], device=device)
    got = apply_rotary(x, cos, sin, interleaved=interleaved, offsets=offsets)
    plain = oracle(x, cos, sin, interleaved, offsets, dtype=dtype)
    judge(got, oracle(x, cos, sin, interleaved, offsets), plain, "rotary")
    y = x.clone()
    assert apply_rotary(y, cos, sin, interleaved=interleaved, offsets=offsets, inplace=True) is y
    assert torch.equal(y, got)


def test_offsets_steps_and_the_table_s_end(device):
    x = rand(3, 5, 2, 16, device=device)
    cos, sin = angles(8, 8, device=device)
    for offsets in (torch.tensor([0, 2, 30]), torch.tensor([6, -2, 7], dtype=torch.int32)):
        for step in (0, 1):
            got = apply_rotary(x, cos, sin, offsets=offsets.to(device), step=step)
            judge(
                got,
                oracle(x, cos, sin, False, offsets, step),
                oracle(x, cos, sin, False, offsets, step).float(),
                "rotary",
            )
    same = apply_rotary(x, cos, sin, offsets=3)
    assert torch.equal(same, apply_rotary(x, cos, sin, offsets=torch.full((3,), 3, device=device)))


def test_strides_and_packed_sequences(device):
    cos, sin = angles(20, 8, device=device)
    x = rand(2, 3, 7, 20, device=device).transpose(1, 2)
    assert torch.equal(apply_rotary(x, cos, sin), apply_rotary(x.contiguous(), cos, sin))
    lengths = [4, 0, 7, 1]
    cu = torch.tensor([0, 4, 4, 11, 12], dtype=torch.int32, device=device)
    packed = rand(14, 3, 20, device=device)
    offsets = torch.tensor([1, 0, 9, 5], dtype=torch.int32, device=device)
    got = apply_rotary(packed, cos, sin, interleaved=True, offsets=offsets, cu_seqlens=cu, max_seqlen=7)
    for b, n in enumerate(lengths):
        rows = packed[cu[b] : cu[b + 1]]
        place = int(offsets[b]) + torch.arange(n, device=device)
        exact, plain = (turned(rows, cos, sin, True, place, d) for d in (torch.float64, torch.float32))
        judge(got[cu[b] : cu[b + 1]], exact, plain, "rotary")
    assert not got[12:].any()
    y = packed.clone()
    apply_rotary(y, cos, sin, interleaved=True, offsets=offsets, cu_seqlens=cu, max_seqlen=7, inplace=True)
    assert torch.equal(y[:12], got[:12])
    assert torch.equal(y[12:], packed[12:])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient_kernel(device, interleaved, inplace):
    cos, sin = angles(20, 5, device=device)
    offsets = torch.tensor([3, 8], device=device)
    x = rand(2, 6, 3, 14, device=device).requires_grad_()
    grad = rand(2, 6, 3, 14, device=device)
    apply_rotary(x * 2.0, cos, sin, interleaved=interleaved, offsets=offsets, inplace=inplace).backward(grad)
    y = x.detach().double().requires_grad_()
    want, plain = (
        torch.autograd.grad(oracle(y, cos, sin, interleaved, offsets, dtype=d), y, 2 * grad.double())[0]
        for d in (torch.float64, torch.float32)
    )
    judge(x.grad, want, plain, "dx")


@pytest.mark.no_poison
def test_compiled(device):
    cos, sin = angles(20, 8, device=device)
    offsets = torch.tensor([3, 8], device=device)

    def both(x):
        return apply_rotary(x, cos, sin, offsets=offsets), apply_rotary(x * 1.0, cos, sin, offsets=2, inplace=True)

    x = rand(2, 6, 3, 16, device=device).requires_grad_()
    graph_gives(both, x)


def test_qkv_and_kv(device):
    cos, sin = angles(20, 8, device=device)
    cos_k, sin_k = angles(20, 8, device=device)
    qkv = rand(2, 5, 3, 4, 20, device=device)
    q, k, v = qkv.unbind(2)
    for tables in ((), (cos_k, sin_k)):
        for given in (qkv.clone(), qkv.transpose(0, 1).contiguous().transpose(0, 1)):
            got = layers.apply_rotary_emb_qkv_(given, cos, sin, *tables, seqlen_offsets=2)
            assert got is given
            assert torch.equal(got[:, :, 0], apply_rotary(q, cos, sin, offsets=2))
            assert torch.equal(got[:, :, 1], apply_rotary(k, *(tables or (cos, sin)), offsets=2))
            assert torch.equal(got[:, :, 2], v)
    grouped = rand(2, 5, 4 + 2 * 2, 20, device=device)
    got = layers.apply_rotary_emb_qkv_(grouped.clone(), cos, sin, num_heads_q=4, interleaved=True)
    assert torch.equal(got[:, :, :6], apply_rotary(grouped[:, :, :6], cos, sin, interleaved=True))
    assert torch.equal(got[:, :, 6:], grouped[:, :, 6:])
    kv = rand(2, 5, 2, 4, 20, device=device)
    got = layers.apply_rotary_emb_kv_(kv.clone(), cos, sin)
    assert torch.equal(got[:, :, 0], apply_rotary(kv[:, :, 0], cos, sin))
    assert torch.equal(got[:, :, 1], kv[:, :, 1])


def test_gradient_of_qkv(device):
    cos, sin = angles(20, 8, device=device)
    qkv = rand(1, 5, 3, 2, 20, device=device).requires_grad_()
    grad = torch.randn_like(qkv)
    layers.apply_rotary_emb_qkv_(qkv * 1.0, cos, sin).backward(grad)
    for i in range(2):
        assert torch.equal(qkv.grad[:, :, i], apply_rotary(grad[:, :, i], cos, sin, conjugate=True))
    assert torch.equal(qkv.grad[:, :, 2], grad[:, :, 2])


@pytest.mark.parametrize("scale_base", [None, 512])
def test_module(device, scale_base):
    module = layers.RotaryEmbedding(16, base=100.0, scale_base=scale_base, device=device)
    qkv = rand(2, 5, 3, 4, 20, device=device)
    got = module(qkv.clone(), seqlen_offset=3)

    def turned_by_tables(i):
        angle = torch.arange(8)[:, None].double() * 100.0 ** -(torch.arange(0, 16, 2).double() / 16)
        growth = torch.ones(8, 8).double()
        if scale_base:
            base = (torch.arange(0, 16, 2).double() + 0.4 * 16) / (1.4 * 16)
            growth = base ** ((torch.arange(8).double() - 4) / scale_base)[:, None]
        factor = 1 / growth if i else growth
        return oracle(qkv[:, :, i], (angle.cos() * factor).to(device), (angle.sin() * factor).to(device), False, [3, 3])

    for i in range(2):
        plain = reference.deviating(lambda i=i: turned_by_tables(i), torch.float32)
        judge(got[:, :, i], turned_by_tables(i), plain, "module")
    q, kv = qkv[:, :, 0].clone(), qkv[:, :, 1:].clone()
    turned_q, turned_kv = module(q, kv, seqlen_offset=3)
    assert torch.equal(turned_q, got[:, :, 0])
    assert torch.equal(turned_kv, got[:, :, 1:])
    assert module.state_dict() == {}
    offsets = torch.tensor([0, 3], device=device)
    assert torch.equal(module(qkv.clone(), seqlen_offset=offsets)[1], got[1])  # the tables are those at hand
    with pytest.raises(RuntimeError, match="max_seqlen"):
        layers.RotaryEmbedding(16)(qkv.clone(), seqlen_offset=offsets)


def test_plain_torch(device):
    cos, sin = angles(5, 8, device=device)
    x = rand(2, 5, 3, 20, device=device)
    for interleaved in (False, True):
        plain = layers.apply_rotary_emb_torch(x, cos, sin, interleaved)
        assert torch.allclose(plain, apply_rotary(x, cos, sin, interleaved=interleaved), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"offsets": 17}, "offsets"),
        ({"offsets": -1}, "offsets"),
        ({"offsets": 1.5}, "offsets"),
        ({"offsets": torch.zeros(3, dtype=torch.int32)}, "offsets"),
        ({"cu_seqlens": torch.zeros(3, dtype=torch.int32)}, "max_seqlen"),
        ({"interleaved": 1}, "interleaved"),
        ({"cos": torch.zeros(20, 11)}, "cos"),
        ({"sin": torch.zeros(20, 7)}, "sin"),
        ({"cos": torch.zeros(20, 8, requires_grad=True)}, "cos"),
        ({"step": 0.5}, "step"),
    ],
)
def test_wrong_arguments(device, change, name):
    cos, sin = angles(20, 8, device=device)
    moved = {key: value.to(device) if isinstance(value, torch.Tensor) and not value.requires_grad else value
             for key, value in change.items()}  # fmt: skip
    with pytest.raises(tilefold.TilefoldError, match=name):
        apply_rotary(**{"x": rand(2, 4, 3, 20, device=device), "cos": cos, "sin": sin, **moved})


def test_exported(device):
    empty = tilefold.apply_rotary(torch.zeros(0, 4, 2, 8, device=device), *angles(8, 4, device=device))
    assert empty.shape == (0, 4, 2, 8)
