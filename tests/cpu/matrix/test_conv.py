"""conv2d against its oracle, forward and backward: options in pairs, layouts, groups, dtypes, methods, plans, what is refused."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from cases import graph_gives, rand
from cases.conv import held
from cases.refusals import refuses, refuses_given
from tilefold import ops
from tilefold.device.convolution import folded, tap_of
from tilefold.errors import DtypeError, PlanError, ShapeError, Unsupported, ValueRangeError
from tilefold.ops.matrix.conv import conv_plan
from tilefold.ops.matrix.conv_layout import channels_run, pixels_run, strides_of
from tilefold.plan import device_named
from tilefold.plan.matrix.conv import ConvProblem, plan_conv

FIRST, LAST = torch.contiguous_format, torch.channels_last
CASES = [  # channels, size, output channels, taps, options, memory format
    (20, (6, 5), 12, (3, 3), {"padding": 1, "activation": "relu"}, LAST),
    (20, (6, 5), 12, (3, 2), {"stride": (2, 1), "padding": (2, 1), "activation": "silu"}, FIRST),
    (17, (7, 5), 33, (3, 1), {"dilation": 2, "padding": "same", "activation": "gelu"}, LAST),
    (16, (5, 9), 16, (1, 1), {"activation": "gelu_tanh"}, FIRST),
    (3, (9, 9), 12, (4, 3), {"stride": 2, "padding": "valid"}, LAST),
    (3, (6, 6), 12, (3, 3), {"padding": 1, "stride": (2, 3), "dilation": (3, 2)}, FIRST),
    (16, (6, 5), 3, (1, 1), {"stride": 2}, LAST),
    (18, (7, 6), 7, (3, 3), {"padding": 2, "stride": 2, "dilation": 2}, LAST),
    (3, (7, 6), 8, (3, 3), {"padding": 2, "stride": 4, "dilation": 2}, FIRST),
]


@pytest.mark.parametrize(("channels", "size", "out", "taps", "options", "memory"), CASES)
def test_options(channels, size, out, taps, options, memory, device):
    x = rand(2, channels, *size, device=device).contiguous(memory_format=memory)
    got = held(x, rand(out, channels, *taps, device=device) / 8, rand(out, device=device), **options)
    assert got.is_contiguous(memory_format=memory)


@triton.jit
def taps_and_tiles(X, Weight, A, B, Taps, count_h, count_w):
    """What the loop of conv_implicit reads in a step, where taps and channels are one axis, and a tap's place."""
    o = tl.arange(0, 16)
    live = o < 16
    a, b = folded(
        X, Weight, o, o * 4, o, o * 0, o * 0, live, live, 1, 1, 4, count_h, count_w, 1, 1, 1, 1, (0, 4, 4, 1), (1, 16, 4, 4),
        False, 1, 1,
    )  # fmt: skip
    tl.store(A + o[:, None] * 16 + o[None, :], a)
    tl.store(B + o[:, None] * 16 + o[None, :], b)
    i_h, i_w = tap_of(o, count_w)
    tl.store(Taps + o, i_h * 100 + i_w)


@pytest.mark.parametrize(("count_h", "count_w"), [(0, 0), (2, 0), (0, 2)])
def test_nothing_divides_by_a_number_of_taps_that_is_0(count_h, count_w, device):
    """Where stride and dilation share a factor no tap meets some pixels, and the loop over taps does not run; but the compiler
    computes in front of a loop what its first step needs, and concludes from a division that the divisor is not 0."""
    x, w = torch.ones(64, device=device), torch.ones(256, device=device)
    a, b, taps = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device), torch.zeros(16, device=device)
    with np.errstate(divide="raise"):
        taps_and_tiles[(1,)](x, w, a, b, taps, count_h, count_w)
    if count_h == 0:
        assert not a.any() and not b.any()
    n = max(count_w, 1)
    assert taps.tolist() == [i // n * 100 + i % n for i in range(16)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype, device):
    x = rand(1, 16, 5, 4, dtype=dtype, device=device).contiguous(memory_format=LAST)
    held(
        x,
        (rand(16, 16, 3, 3, device=device) / 12).to(dtype),
        rand(16, dtype=dtype, device=device),
        padding=1,
        activation="silu",
    )


@pytest.mark.parametrize(("channels", "out", "groups"), [(6, 6, 6), (4, 8, 4), (32, 34, 2)])
def test_groups(channels, out, groups, device):
    """Depthwise, with two results a channel, and groups for tensor cores."""
    x = rand(2, channels, 5, 6, device=device).contiguous(memory_format=LAST)
    w = rand(out, channels // groups, 3, 2, device=device) / 3
    held(x, w, rand(out, device=device), groups=groups, stride=2, padding=1, activation="relu")
    held(x.contiguous(), w, groups=groups, padding="same")


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("memory", [FIRST, LAST])
def test_im2col(memory, groups, device):
    x = rand(3, 6, 5, 6, device=device).contiguous(memory_format=memory)
    w = rand(10, 6 // groups, 3, 2, device=device)
    held(
        x,
        w,
        rand(10, device=device),
        method="im2col",
        groups=groups,
        stride=(1, 2),
        padding=1,
        activation="silu",
        backward=False,
    )


@pytest.mark.parametrize(
    ("channels", "groups", "dtype"), [(20, 1, torch.float32), (3, 1, torch.float32), (16, 2, torch.bfloat16)]
)
def test_relayout(channels, groups, dtype, device):
    """Copies of x and of the result's gradient, few channels with zeros beside them; what a copy is of does not change."""
    x, w = rand(2, channels, 5, 4, dtype=dtype, device=device), rand(16, channels // groups, 3, 3, device=device) / 12
    options = {"padding": 1, "groups": groups, "activation": "relu"}
    got = held(x, w.to(dtype), rand(16, dtype=dtype, device=device), method="relayout", **options)
    assert got.is_contiguous()


def test_direct_is_the_implicit_convolution(device):
    """Another name of it, in calls and in plans; groups of few channels take the kernel without tensor cores by either."""
    for channels, groups in ((20, 1), (8, 8)):
        x, w = rand(2, channels, 5, 4, device=device), rand(16, channels // groups, 3, 3, device=device) / 12
        got = held(x, w, rand(16, device=device), method="direct", padding=1, groups=groups, activation="relu")
        assert got.shape == (2, 16, 5, 4)
        one, other = (conv_plan(x, w, padding=1, groups=groups, method=name) for name in ("direct", "implicit"))
        assert one == other
        assert torch.equal(
            ops.conv2d(x, w, padding=1, groups=groups, method="direct", plan=one),
            ops.conv2d(x, w, padding=1, groups=groups, method="implicit"),
        )
    assert plan_conv(one.problem, one.device, "direct") == plan_conv(one.problem, one.device, "implicit")


def test_relayout_of_strided_and_of_channels_last(device):
    x = rand(2, 3, 12, 9, device=device)[:, :, ::2, 1:]
    w = rand(8, 3, 3, 2, device=device) / 4
    held(x, w, method="relayout", stride=2)
    got = held(x.contiguous(memory_format=LAST), w, method="relayout", stride=2, backward=False)
    assert got.is_contiguous(memory_format=LAST)


def test_gradient_that_lies_channels_first_of_a_channels_last_result(device):
    x, w = rand(1, 16, 4, 4, device=device).contiguous(memory_format=LAST), rand(8, 16, 3, 3, device=device) / 12
    x.requires_grad_()
    dout = rand(1, 8, 2, 2, device=device)
    for method in ("implicit", "relayout"):
        out = ops.conv2d(x, w, method=method)
        first, last = (
            torch.autograd.grad(out, x, dout.contiguous(memory_format=f), retain_graph=True)[0] for f in (FIRST, LAST)
        )
        assert torch.equal(first, last)


@pytest.mark.parametrize("size", [(8, 8), (4, 6), (7, 8), (7, 7), (1, 16)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_runs_are_what_they_are_said_to_be(size, itemsize):
    """The kernels' hints: that many pixels, or channels, follow one another from a multiple on, everywhere."""
    for t in (
        torch.empty(2, 6, *size),
        torch.empty(2, 6, size[0] * 2, size[1])[:, ::2, ::2],
        torch.empty(3, 6, size[0], size[1] + 8)[..., 4 : 4 + size[1]],
        torch.empty(2, 8, *size).contiguous(memory_format=LAST)[:, :6],
        torch.empty(2, 8, *size).contiguous(memory_format=LAST)[:, :4],
    ):
        strides = strides_of(t)
        where = torch.arange(100_000).as_strided(t.shape, t.stride())
        for run, rows in (
            (pixels_run(*size, strides, itemsize), where.movedim(1, 0).reshape(t.shape[1], -1)),
            (
                channels_run(t.shape[1], (strides[1], strides[0], *strides[2:]), itemsize),
                where.movedim(1, 3).reshape(-1, t.shape[1]),
            ),
        ):
            assert 1 <= run * itemsize <= 16
            pieces = rows.unflatten(1, (-1, run))
            assert (pieces == pieces[..., :1] + torch.arange(run)).all() and not (pieces[..., 0] % run).any()
    whole = torch.empty(2, 32, 8, 8)
    assert pixels_run(8, 8, strides_of(whole), 2) == 8 and pixels_run(7, 7, strides_of(whole[..., :7, :7]), 2) == 1
    assert channels_run(32, (1, 2048, 256, 32), 2) == 8 and channels_run(32, (64, 2048, 8, 1), 2) == 1


def test_im2col_some_images_at_a_time(device, monkeypatch):
    monkeypatch.setattr("tilefold.plan.matrix.conv.WORKSPACE", 2 * 6 * 4 * 4 * 9 * 4)
    x, w = rand(3, 6, 4, 4, device=device), rand(8, 6, 3, 3, device=device)
    assert conv_plan(x, w, padding=1, method="im2col").images_at_once == 2
    held(x, w, method="im2col", padding=1, backward=False)


def test_splits(device):
    """A plan of the caller's; the parts are added in a fixed order."""
    x, w = rand(1, 40, 5, 5, device=device), rand(16, 40, 3, 3, device=device) / 20
    plan = conv_plan(x, w, padding=1)
    for part, splits in (("forward", 3), ("input", 2), ("weight", 1)):
        plan = plan.with_tile(part, splits=splits)
    held(x, w, rand(16, device=device), plan=plan, padding=1, activation="gelu")
    refuses(PlanError, "plan is for another problem", ops.conv2d, x, w, plan=plan)
    with pytest.raises(PlanError, match="plan field forward: rows must be a power of two from 16 to 256, got 24"):
        plan.with_tile("forward", rows=24)


def test_wide_offsets_give_the_same(device, monkeypatch):
    x, w = rand(1, 16, 5, 5, device=device), rand(16, 16, 3, 3, device=device) / 12
    one = held(x, w, padding=1)
    from tilefold.ops import records
    from tilefold.ops.matrix import conv

    monkeypatch.setattr(records, "CACHE", {})
    problem_of = conv.problem_of
    monkeypatch.setattr(
        conv, "problem_of", lambda *args: __import__("dataclasses").replace(problem_of(*args), wide64=True)
    )
    assert torch.equal(one, held(x, w, padding=1))


@pytest.mark.interpreter
def test_channels_of_one_tile_that_lie_2_31_elements_apart(tmp_path):
    """As in channels-first images of 64 channels and more than 5839 x 5839 pixels: a sparse file in place of the memory."""
    plane = 70_000_000
    held_by = torch.from_file(str(tmp_path / "x"), shared=True, size=32 * plane, dtype=torch.float16)
    x = held_by.as_strided((1, 32, 4, 4), (32 * plane, plane, 4, 1))
    x.copy_(rand(1, 32, 4, 4, dtype=torch.float16))
    held(x, rand(8, 32, 3, 3, dtype=torch.float16) / 20, padding=1)


def test_strides_and_rank(device):
    x = rand(2, 9, 7, 16, device=device).permute(0, 3, 1, 2)[:, :, ::2, 1:]
    w = rand(3, 3, 16, 8, device=device).permute(3, 2, 0, 1)
    held(x, w, padding=1)
    one = ops.conv2d(x[0], w, padding=1)
    assert one.dim() == 3 and torch.equal(one, ops.conv2d(x[:1], w, padding=1)[0])


def test_empty_batch(device):
    x, w = (
        torch.ones(0, 4, 5, 5, device=device).requires_grad_(),
        torch.ones(6, 4, 3, 3, device=device).requires_grad_(),
    )
    out = ops.conv2d(x, w)
    assert out.shape == (0, 6, 3, 3)
    dx, dw = torch.autograd.grad(out.sum(), (x, w))
    assert dx.shape == x.shape and not dw.any()


@pytest.mark.no_poison
def test_compiled(device):
    x, w = rand(1, 4, 4, 4, device=device).requires_grad_(), rand(4, 4, 3, 3, device=device).requires_grad_()

    def block(x, w):
        return ops.conv2d(x, w, padding=1, activation="silu")

    assert graph_gives(block, x, w)(x, w).stride() == block(x, w).stride()


REFUSED = [
    ({"x": torch.ones(4, 5)}, ShapeError, "x has 2 dimensions, shape (4, 5); expected [batch, channels, high, wide]"),
    ({"weight": torch.ones(6, 3, 3, 3)}, ShapeError, "x has 4 channels, but weight has 3 for each of 1 groups"),
    ({"groups": 2, "weight": torch.ones(5, 2, 3, 3)}, ShapeError, "weight has 5 output channels, not a multiple of 2 groups"),
    ({"bias": torch.ones(5)}, ShapeError,
     "bias has shape (5,), expected [out_channels]: dimension 0 (out_channels) is 5, should be 6 as in weight"),
    ({"weight": torch.ones(6, 4, 3, 3).half()}, DtypeError,
     "weight has dtype float16, but x has float32: they must be the same (nothing is converted silently)"),
    ({"stride": 0}, ValueRangeError, "stride must be at least 1, got 0"),
    ({"stride": (1, 2, 3)}, DtypeError, "stride must be an int or a pair of them, got (1, 2, 3)"),
    ({"padding": -1}, ValueRangeError, "padding must be at least 0, got -1"),
    ({"padding": "full"}, ValueRangeError, "padding must be integers, 'same' or 'valid', got 'full'"),
    ({"padding": "same", "stride": 2}, ValueRangeError, "padding 'same' needs stride 1, got (2, 2)"),
    ({"dilation": 3}, ShapeError,
     "x has shape (1, 4, 5, 5): with padding 0 it is smaller than the filter, which spans 7 x 7"),
    ({"groups": 0}, ValueRangeError, "groups must be at least 1, got 0"),
    ({"activation": "tanh"}, ValueRangeError,
     "activation must be None or one of 'relu', 'silu', 'gelu', 'gelu_tanh', got 'tanh'"),
    ({"method": "fft"}, ValueRangeError, "method must be one of 'auto', 'implicit', 'im2col', 'relayout', 'direct', got 'fft'"),
    ({"plan": 3}, DtypeError, "plan must be a ConvPlan or None, got int"),
    ({"x": torch.ones(1, 4, 5, 5).half(), "weight": torch.ones(6, 4, 3, 3).half(), "tf32": True}, ValueRangeError,
     "tf32 is for float32, but x has dtype float16"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), REFUSED, ids=[text[:40] for _, _, text in REFUSED])
def test_refusals(changes, error, text, device):
    given = {"x": torch.ones(1, 4, 5, 5), "weight": torch.ones(6, 4, 3, 3), **changes}
    refuses_given(error, text, ops.conv2d, device, **given)


def test_plan():
    h200 = device_named("h200")
    wide = plan_conv(ConvProblem(32, 256, 14, 14, 256, (3, 3), (14, 14), pad=(1, 1)), h200)
    assert wide.method == "implicit" and dict(wide.rejected)["im2col"].startswith("writes and reads 57.8 MB")
    assert wide.problem.flops == 2 * 32 * 14 * 14 * 256 * 256 * 9
    assert wide.bound_s == pytest.approx(wide.problem.flops / 760e12)
    small = plan_conv(ConvProblem(32, 512, 7, 7, 512, (3, 3), (7, 7), pad=(1, 1)), h200)
    assert small.forward.splits > 1 and small.weight.splits >= 1
    assert "1x1" not in str(small) and "at least" in str(small)
    depthwise = plan_conv(ConvProblem(8, 64, 56, 56, 64, (3, 3), (56, 56), pad=(1, 1), groups=64), h200)
    assert depthwise.method == "direct" and "tensor cores nothing to do" in depthwise.reason
    im2col = plan_conv(wide.problem, h200, "im2col")
    assert im2col.bytes > wide.bytes and im2col.images_at_once == 32
    long = plan_conv(ConvProblem(8, 1280, 16, 16, 1280, (3, 3), (16, 16), pad=(1, 1)), h200)
    assert long.forward.splits > 1  # 160 tiles on 132 SMs: two waves of whole sums
    with pytest.raises(Unsupported, match="more than one launch can make"):
        plan_conv(ConvProblem(1, 1024, 900, 900, 1024, (1, 1), (3, 3), stride=(300, 300)), h200)


def test_plan_of_layouts():
    """Copies where elements would be read one by one; none for plain GEMMs, channels-last, small images, or where refused."""
    h200 = device_named("h200")
    first = {"x_last": False, "y_last": False}
    three = ConvProblem(32, 64, 56, 56, 64, (3, 3), (56, 56), pad=(1, 1), **first)
    plan = plan_conv(three, h200)
    assert plan.method == "relayout" and plan.copy_bytes == 32 * 64 * 56 * 56 * 2
    assert plan.bytes == three.bytes + 2 * plan.copy_bytes and "12.85 MB for a channels-last copy of x" in str(plan)
    assert plan.copies_in_gradients == ("x", "dy") and plan.relaid.problem.x_last
    refused = plan_conv(three, h200, "implicit")
    assert refused.method == "implicit" and not refused.copies_x and not refused.copies_in_gradients
    one = plan_conv(ConvProblem(32, 64, 56, 56, 256, (1, 1), (56, 56), **first), h200)
    assert one.method == "implicit" and "as wide as they lie" in dict(one.rejected)["relayout"]
    odd = plan_conv(ConvProblem(32, 512, 7, 7, 2048, (1, 1), (7, 7), **first), h200)
    assert odd.method == "relayout"  # lines of 7: nothing is aligned
    small = plan_conv(ConvProblem(1, 16, 8, 8, 16, (3, 3), (8, 8), pad=(1, 1), **first), h200)
    assert small.method == "implicit" and "a channels-last copy takes about" in dict(small.rejected)["relayout"]
    for last in (False, True):
        rgb = ConvProblem(32, 3, 224, 224, 64, (7, 7), (112, 112), (2, 2), (3, 3), x_last=last, y_last=last)
        plan = plan_conv(rgb, h200)
        assert (
            plan.method == "relayout"
            and plan.copy_bytes == 32 * 4 * 224 * 224 * 2
            and plan.relaid.problem.channels == 4
        )
    many = ConvProblem(3000, 3, 448, 448, 8, (3, 3), (224, 224), (2, 2), (1, 1), x_last=False, y_last=False)
    assert (
        not many.wide64 and plan_conv(many, h200).relaid.problem.wide64
    )  # 1.8e9 elements, with a fourth channel 2.4e9
    last = plan_conv(ConvProblem(32, 64, 56, 56, 64, (3, 3), (56, 56), pad=(1, 1)), h200)
    assert last.method == "implicit" and dict(last.rejected)["relayout"] == "nothing lies channels-first"
