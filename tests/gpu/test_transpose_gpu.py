"""add and transpose on a GPU: real sizes, every element size, strides, many elements."""

import pytest
import torch

from cases import judge, rand
from cases.device import DEVICE, followed
from tilefold import ops
from tilefold.errors import Unsupported
from tilefold.ops.matrix.transpose import INTEGERS
from tilefold.plan.matrix.transpose import METHODS
from tilefold.reference import matrix as oracle

DTYPES = [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(512, 1024), (528, 336), (1, 16), (16, 4096)])
def test_transpose(shape, dtype, method):
    x = rand(*shape, device=DEVICE).mul(10).to(dtype)
    want = x.t().contiguous()
    if method == "descriptors" and (torch.cuda.get_device_capability()[0] < 9 or x.shape[0] * x.element_size() % 16):
        with pytest.raises(Unsupported, match="method 'descriptors' is not possible here"):
            ops.transpose(x, method=method)
        return
    got = ops.transpose(x, method=method)
    bits = INTEGERS[x.element_size()]
    assert torch.equal(got.view(bits), want.view(bits))


@pytest.mark.parametrize("method", ["registers", "strides"])
def test_strided(method):
    x = rand(1001, 777, device=DEVICE).to(torch.bfloat16)
    for t in (x, x.t(), x[1:, 3:], x[::2, ::3], x[:, :1].expand(1001, 70)):
        assert torch.equal(ops.transpose(t, method=method), t.t())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_add(dtype):
    x, y = (rand(1001, 777, dtype=dtype, device=DEVICE) for _ in range(2))
    for a, b in ((x, y), (x.t(), y.t()), (x[1:, 3:], y[1:, 3:]), (x[:700, :700], y.t()[:700, :700]), (x[3], y[5])):
        judge(ops.add(a, b), oracle.add(a, b), oracle.add(a, b, dtype=dtype), f"{a.shape} {a.stride()} {dtype}")
    whole = torch.arange(-5000, 5000, device=DEVICE).to(torch.int8)
    assert torch.equal(ops.add(whole, whole), whole + whole)


@pytest.mark.no_poison
def test_compiled_and_captured():
    x, y = (rand(64, 200, device=DEVICE) for _ in range(2))
    got = torch.compile(lambda a, b: ops.transpose(ops.add(a, b)), fullgraph=True)(x, y)
    assert torch.equal(got, (x + y).t())
    assert torch.equal(followed(lambda: ops.transpose(ops.add(x, y)), lambda: x.mul_(2)), (x + y).t())


@pytest.mark.large
@pytest.mark.no_poison
def test_more_than_two_to_the_31_elements():
    x = torch.randint(-100, 100, (70000, 32992), device=DEVICE, dtype=torch.int8)
    for method in ("registers", "strides", "descriptors"):
        got = ops.transpose(x, method=method)
        assert (
            torch.equal(got[-1], x[:, -1]) and torch.equal(got[:, -1], x[-1]) and torch.equal(got[16500], x[:, 16500])
        )
        del got
    out = ops.add(x, x)
    assert torch.equal(out[-1], x[-1] + x[-1]) and torch.equal(out[35000], x[35000] * 2)
    part = ops.add(x[:, 1:], x[:, 1:])
    assert torch.equal(part[-1], x[-1, 1:] * 2)
