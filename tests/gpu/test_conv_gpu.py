"""conv2d on a GPU: ResNet-50's layers, options in pairs, dtypes, layouts, splits, the same bits, graphs, many elements."""

import pytest
import torch

from cases import rand
from cases.conv import RESNET50, held, layer
from cases.device import DEVICE, followed
from tilefold import ops
from tilefold.ops.matrix.conv import conv_plan

FORMATS = [torch.contiguous_format, torch.channels_last]


@pytest.fixture(autouse=True)
def exact():
    """Plain PyTorch, by which results are judged, works in the dtype that it is given."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("name", RESNET50)
def test_resnet_layers(name, memory_format):
    x, w, options = layer(name, batch=3, memory_format=memory_format)
    held(x, w, rand(w.shape[0], dtype=x.dtype, device=DEVICE), activation="relu", **options)


OPTIONS = [
    {"padding": 1},
    {"stride": 2, "padding": (2, 1), "activation": "silu"},
    {"stride": (2, 3), "dilation": (3, 2), "padding": 3},
    {"dilation": 2, "padding": "same", "activation": "gelu"},
    {"stride": 4, "padding": 1, "dilation": 2, "activation": "gelu_tanh"},
]


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", ["implicit", "relayout", "im2col"])
def test_options(method, dtype, memory_format):
    x = rand(3, 40, 29, 23, dtype=dtype, device=DEVICE).contiguous(memory_format=memory_format)
    w = rand(72, 40, 3, 3, device=DEVICE).div(19).to(dtype)
    for options in OPTIONS:
        held(x, w, rand(72, dtype=dtype, device=DEVICE), method=method, **options)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize(
    ("channels", "out_channels", "groups"), [(48, 48, 48), (48, 96, 48), (64, 96, 4), (12, 6, 3), (6, 12, 1)]
)
def test_groups(channels, out_channels, groups, memory_format):
    x = rand(2, channels, 31, 30, dtype=torch.float16, device=DEVICE).contiguous(memory_format=memory_format)
    w = rand(out_channels, channels // groups, 3, 5, device=DEVICE).div((15 * channels // groups) ** 0.5).half()
    for options in ({"padding": "same"}, {"stride": 2, "padding": 1, "activation": "relu"}):
        held(x, w, rand(out_channels, dtype=x.dtype, device=DEVICE), groups=groups, **options)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", ["implicit", "relayout", "im2col"])
@pytest.mark.parametrize(("channels", "out_channels", "groups"), [(32, 7, 1), (3, 8, 1), (16, 15, 1), (64, 32, 4)])
def test_pixels_that_no_tap_meets(channels, out_channels, groups, method, dtype, memory_format):
    """Where stride and dilation share a factor the gradient of some pixels is 0; few output channels, which are one axis with
    taps there."""
    x = rand(2, channels, 11, 13, dtype=dtype, device=DEVICE).contiguous(memory_format=memory_format)
    for taps, stride, dilation in ((3, 2, 2), (5, 2, 2), (3, 4, 2), (3, (2, 3), (4, 3))):
        w = rand(out_channels, channels // groups, taps, taps, device=DEVICE).div(taps * (channels / groups) ** 0.5)
        held(x, w.to(dtype), method=method, stride=stride, padding=3, dilation=dilation, groups=groups)


@pytest.mark.parametrize("size", [(8, 8), (14, 14), (7, 7), (6, 9), (1, 16), (5, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_pixels(dtype, size):
    """Channels-first, whole, cut out of wider lines, off the alignment of 16 bytes."""
    whole = rand(3, 48, size[0] + 1, size[1] + 8, dtype=dtype, device=DEVICE)
    for x in (
        whole[:, :, 1:, 8:].contiguous(),
        whole[:, :, 1:, 8:],
        whole[:, ::2, 1:, 1 : 1 + size[1]],
        whole.flatten()[1 : 1 + 40 * size[0] * size[1]].view(2, 20, *size),
    ):
        for taps, options in ((1, {}), (3, {"padding": 1}), (3, {"padding": 1, "stride": 2})):
            w = rand(40, x.shape[1], taps, taps, device=DEVICE).div(taps * x.shape[1] ** 0.5).to(dtype)
            for method in ("implicit", "relayout"):
                held(x, w, rand(40, dtype=dtype, device=DEVICE), method=method, activation="silu", **options)


@pytest.mark.parametrize("channels", [8, 16])
def test_channels_of_groups_are_loaded_at_once(channels):
    x = rand(2, 4 * channels, 15, 16, dtype=torch.float16, device=DEVICE)
    w = rand(4 * channels, channels, 3, 3, device=DEVICE).div(3 * channels**0.5).half()
    for memory_format in FORMATS:
        held(x.contiguous(memory_format=memory_format), w, groups=4, padding=1, method="relayout")


def test_tf32():
    x, w = rand(2, 32, 14, 14, device=DEVICE), rand(64, 32, 3, 3, device=DEVICE).div(17)
    exact = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
    got = ops.conv2d(x, w, padding=1, tf32=True)
    error = float((got - exact).norm() / exact.norm())
    assert 1e-5 < error < 1e-3
    held(x, w, padding=1)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_splits_and_the_same_bits(splits):
    x, w, options = layer("3x3 512->512 @7", batch=2)
    plan = conv_plan(x, w, **options)
    for part in ("forward", "input", "weight"):
        plan = plan.with_tile(part, splits=splits)
    bias = rand(512, dtype=x.dtype, device=DEVICE)
    first = held(x, w, bias, plan=plan, activation="silu", **options)
    assert all(torch.equal(first, ops.conv2d(x, w, bias, plan=plan, activation="silu", **options)) for _ in range(3))


@pytest.mark.no_poison
def test_compiled_and_captured():
    x, w, options = layer("3x3 64->64 @56", batch=2)
    x.requires_grad_()
    want = ops.conv2d(x, w, **options, activation="gelu")
    got = torch.compile(lambda a, b: ops.conv2d(a, b, **options, activation="gelu"), fullgraph=True)(x, w)
    assert torch.equal(got, want)
    got.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(want.sum(), x)[0])
    y = x.detach()
    followed(lambda: ops.conv2d(y, w, **options), lambda: y.mul_(2))


@pytest.mark.large
@pytest.mark.no_poison
def test_more_than_two_to_the_31_elements():
    x = torch.randn(1, 64, 64, 64, device=DEVICE).bfloat16().contiguous(memory_format=torch.channels_last)
    w = torch.randn(64, 64, 3, 3, device=DEVICE).bfloat16() / 24
    many = x.expand(8200, 64, 64, 64).contiguous(memory_format=torch.channels_last)
    want = ops.conv2d(x.expand(64, 64, 64, 64), w, padding=1)
    got = ops.conv2d(many, w, padding=1)
    assert all(torch.equal(got[i], want[0]) for i in (0, 4096, 8191, 8199))


@pytest.mark.large
@pytest.mark.no_poison
def test_channels_first_planes_whose_tile_passes_two_to_the_31():
    """63 planes of 8192 x 8192 pixels lie between the first and the last channel of a tile, of the input and of the result."""
    x = torch.randn(1, 64, 8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(64, 64, 3, 3, device=DEVICE).bfloat16() / 24
    got = ops.conv2d(x, w, padding=1)
    for corner in (0, 8192 - 40):
        part = (..., slice(corner, corner + 40), slice(corner, corner + 40))
        inner = (..., slice(1, -1), slice(1, -1))
        want = ops.conv2d(x[part].contiguous(), w, padding=1)  # by another plan: sums in another order
        torch.testing.assert_close(got[part][inner], want[inner], rtol=1.6e-2, atol=1e-2)
