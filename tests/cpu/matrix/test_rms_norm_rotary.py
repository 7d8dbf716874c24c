"""RMSNorm fused with the rotary embedding, against its oracle: layouts, strides, tables, gradients, what is refused."""

import pytest
import torch

from cases import graph_gives, hold_back, rand
from cases.refusals import each_refuses
from tilefold import ops, reference
from tilefold.errors import DeviceError, DtypeError, LayoutError, ShapeError, Unsupported, ValueRangeError

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
LAYOUTS = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
HEADS = pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])


def tables(positions, pairs, *batch, dtype=torch.float32, device="cpu"):
    angle = rand(*batch, positions, pairs) * 3
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def case(batch, seq, heads, dim, pairs=None, *, together, dtype=torch.float32, device="cpu"):
    x = rand(batch, seq, heads, dim, dtype=dtype, device=device)
    weight = rand(*((heads, dim) if together else (dim,)), dtype=dtype, device=device)
    return x, weight, *tables(seq, dim // 2 if pairs is None else pairs, device=device)


def check(x, weight, cos, sin, **options):
    """Hold the result, and gradients of x and weight, to the oracle."""
    own = [t.detach().requires_grad_() for t in (x, weight)]
    got = ops.rms_norm_rotary(*own, cos, sin, **options)
    assert got.is_contiguous()
    hold_back(got, lambda *leaves, **dtype: reference.rms_norm_rotary(*leaves, cos, sin, **options, **dtype), *own)


@LAYOUTS
@HEADS
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_oracle(dtype, together, interleaved, device):
    check(*case(2, 17, 3, 32, together=together, dtype=dtype, device=device), interleaved=interleaved, eps=1e-3)


@LAYOUTS
@HEADS
@pytest.mark.parametrize(
    "shape", [(1, 9, 5, 20, 10), (2, 7, 3, 24, 5), (1, 11, 2, 9, 3), (1, 1, 1, 2, 1), (2, 3, 12, 128, 64)]
)
def test_sizes_and_partial_rotary(shape, together, interleaved, device):
    check(*case(*shape, together=together, device=device), interleaved=interleaved)


@LAYOUTS
@HEADS
def test_slices_of_a_fused_projection(together, interleaved, device):
    """Also heads before tokens, tables of each batch entry that are slices, and a weight in another dtype."""
    fused = rand(2, 10, 3, 4, 16, dtype=torch.bfloat16, device=device)
    weight = rand(*((4, 16) if together else (16,)), device=device)
    cos, sin = (t[:, 2:, 1:9] for t in tables(15, 10, 2, device=device))
    for x in (fused[:, :, 1], fused[:, :, 0, :, :].transpose(1, 2).contiguous().transpose(1, 2)):
        check(x, weight, cos, sin, interleaved=interleaved)
    check(fused[:, :, 2], weight, cos[:1], sin[:1], interleaved=interleaved)


@HEADS
def test_it_is_the_norm_and_then_the_rotation(together, device):
    import tilefold

    x, weight, cos, sin = case(2, 9, 4, 16, together=together, device=device)
    normed = ops.rms_norm(x.flatten(2) if together else x, weight.flatten()).view(x.shape)
    for interleaved in (True, False):
        want = tilefold.apply_rotary(normed, cos, sin, interleaved=interleaved)
        torch.testing.assert_close(ops.rms_norm_rotary(x, weight, cos, sin, interleaved=interleaved), want)


@HEADS
def test_the_same_bits_and_nothing(together, device):
    x, weight, cos, sin = case(2, 300, 2, 8, together=together, device=device)
    own = x.requires_grad_(), weight.requires_grad_()
    first, second = (torch.autograd.grad(ops.rms_norm_rotary(*own, cos, sin).square().sum(), own) for _ in range(2))
    assert all(map(torch.equal, first, second))
    nothing = torch.zeros(2, 0, 2, 8, device=device, requires_grad=True)
    out = ops.rms_norm_rotary(nothing, weight, cos, sin)
    assert out.shape == nothing.shape
    assert not torch.autograd.grad(out.sum(), weight)[0].any()


def test_only_what_is_asked(device):
    x, weight, cos, sin = case(1, 5, 2, 8, together=True, device=device)
    dw = torch.autograd.grad(ops.rms_norm_rotary(x, weight.requires_grad_(), cos, sin).sum(), weight)[0]
    dx = torch.autograd.grad(ops.rms_norm_rotary(x.requires_grad_(), weight.detach(), cos, sin).sum(), x)[0]
    both = torch.autograd.grad(ops.rms_norm_rotary(x, weight, cos, sin).sum(), (x, weight))
    assert all(map(torch.equal, (dx, dw), both))


@pytest.mark.no_poison
def test_compiled(device):
    x, weight, cos, sin = case(1, 9, 2, 8, together=True, device=device)
    own = x.requires_grad_(), weight.requires_grad_()

    def layer(x, weight):
        return ops.rms_norm_rotary(x * 2, weight, cos, sin, eps=1e-5, interleaved=True) * 2

    graph_gives(layer, *own)
    op = ops.matrix.rms_norm_rotary.RMS_NORM_ROTARY.op
    torch.library.opcheck(op, (x, weight, cos, sin, 1e-6, False))
    torch.library.opcheck(op, (x, weight[0].detach().requires_grad_(), cos[None], sin[None], 1e-6, True))


def test_refusals(device):
    x, weight, cos, sin = case(2, 4, 3, 8, together=False, device=device)
    call = ops.rms_norm_rotary
    each_refuses(
        (DtypeError, "x has dtype int32", lambda: call(x.int(), weight, cos, sin)),
        (DtypeError, "interleaved must be a bool", lambda: call(x, weight, cos, sin, interleaved=1)),
        (DtypeError, "sin has dtype float16, but cos has float32", lambda: call(x, weight, cos, sin.half())),
        (DtypeError, "weight must be a torch.Tensor", lambda: call(x, None, cos, sin)),
        (ShapeError, "x has 3 dimensions", lambda: call(x[0], weight, cos, sin)),
        (ShapeError, "weight has shape", lambda: call(x, weight[:4], cos, sin)),
        (ShapeError, "weight has shape", lambda: call(x, weight.expand(2, 8), cos, sin)),
        (ShapeError, "cos has 3 positions, x has 4 tokens", lambda: call(x, weight, cos[:3], sin[:3])),
        (ShapeError, "it turns 10 channels, x has 8", lambda: call(x, weight, *tables(4, 5, device=device))),
        (ShapeError, "cos has shape", lambda: call(x, weight, *tables(4, 4, 3, device=device))),
        (ShapeError, "sin has shape", lambda: call(x, weight, cos, sin[None])),
        (
            LayoutError,
            "x needs a contiguous last dim",
            lambda: call(x.transpose(2, 3), weight[:3], cos[:, :1], sin[:, :1]),
        ),
        (LayoutError, "cos needs a contiguous last dimension", lambda: call(x, weight, cos[:, ::2], sin[:, ::2])),
        (DeviceError, "weight is on meta", lambda: call(x, weight.to("meta"), cos, sin)),
        (ValueRangeError, "eps must be greater than 0", lambda: call(x, weight, cos, sin, eps=0.0)),
        (Unsupported, "sin requires a gradient", lambda: call(x, weight, cos, sin.clone().requires_grad_())),
    )


def test_more_columns_than_a_program_holds(device):
    many = torch.ones(1, 1, 200, 128, device=device)
    with pytest.raises(Unsupported, match="x has 25600 columns"):
        ops.rms_norm_rotary(many, many[0, 0], *tables(1, 64, device=device))
