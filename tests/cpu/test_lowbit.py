"""Products with weights of few bits: exact recovery of the weight, fp64, gradients, operators, refusals."""

import pytest
import torch

from cases import judge, rand
from tilefold import ops, quant, reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def random_weight(n, k, bits, group=None, zeros="integer", dtype=torch.float16, perm=False, device="cpu"):
    """Codes, scales and zero points random and distinct in every group: a wrong code, group or zero point cannot hide.

    zeros: "none", "integer", "float", "table", or "tensor": one scale and zero point in all."""
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    packed, high = quant.pack(codes, bits)
    group = k if group is None else min(group, k)
    shape = (1, 1) if zeros == "tensor" else (-(-k // group), n)
    scales = (0.5 + torch.rand(shape)).to(dtype)
    given = {}
    if zeros in ("integer", "tensor"):
        given = {"zeros": torch.randint(0, 2**bits, shape, dtype=torch.uint8)}
    elif zeros == "float":
        given = {"zeros": (torch.rand(shape) * 2**bits).to(dtype)}
    elif zeros == "table":
        given = {"table": torch.randn(2**bits)}
    scheme = {"none": "symmetric", "table": "table"}.get(zeros, "asymmetric")
    order = torch.randperm(k).to(torch.int32) if perm else None
    made = quant.QuantizedTensor(packed=packed, packed_high=high, scales=scales, bits=bits, group=group, shape=(n, k),
                                 scheme=scheme, dtype=dtype, perm=order, **given)  # fmt: skip
    return made.to(device)


def assert_recovers(weight, dtype, device="cpu", **options):
    """Rows of the identity give the dequantised weight's columns, bit for bit."""
    x = torch.eye(weight.shape[1], dtype=dtype, device=device)
    got = ops.lowbit_matmul(x, weight, **options)
    want = weight.dequantize(dtype).t()
    assert torch.equal(got, want), f"{weight}: {int((got != want).sum())} of {want.numel()} differ"


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("zeros", ["none", "integer", "float", "table", "tensor"])
def test_identity_recovers_the_weight(device, bits, zeros):
    for group, dtype in ((32, torch.float16), (None, torch.float32), (17, torch.float16)):
        group = None if zeros == "tensor" else group
        weight = random_weight(70, 140, bits, group, zeros, torch.float16, device=device)
        assert_recovers(weight, dtype, device)


@pytest.mark.parametrize("bits", [4, 3])
def test_the_order_of_columns_is_undone(device, bits):
    assert_recovers(random_weight(40, 96, bits, 32, perm=True, device=device), torch.float16, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_fp64(device, dtype):
    weight = quant.quantize_weight(rand(70, 200, dtype=dtype), 4, 64).to(device)
    bias = rand(70, dtype=dtype, device=device)
    for shape in ((1, 200), (2, 3, 200), (200,), (33, 200), (0, 200)):
        x = rand(*shape, dtype=dtype, device=device)
        got = ops.lowbit_matmul(x, weight, bias)
        want, plain = (reference.lowbit_matmul(x, weight, bias, d) for d in (torch.float64, dtype))
        assert got.shape == (*shape[:-1], 70)
        judge(got, want, plain, f"{shape} {dtype}")


def test_gradients(device):
    weight = random_weight(40, 96, 4, 32, perm=True, device=device)
    x = rand(3, 5, 96, dtype=torch.float16, device=device).requires_grad_()
    bias = rand(40, dtype=torch.float16, device=device).requires_grad_()
    g = rand(3, 5, 40, dtype=torch.float16, device=device)
    out = ops.lowbit_matmul(x, weight, bias)
    got = torch.autograd.grad(out, (x, bias), g)
    for dtype in (torch.float64, torch.float16):
        want = torch.autograd.grad(reference.lowbit_matmul(x, weight, bias, dtype), (x, bias), g.to(dtype))
        oracle, plain = (want, None) if dtype == torch.float64 else (oracle, want)  # noqa: F821
    for a, b, c, name in zip(got, oracle, plain, ("x", "bias"), strict=True):
        judge(a, b.double(), c, name)
