"""Products with weights of few bits on a GPU: exact recovery through every path, fp64, reruns, graphs, 8-bit products."""

from dataclasses import replace

import pytest
import torch

from cases import judge, rand
from cases.device import DEVICE, captured
from tilefold import ops, quant, reference

pytestmark = pytest.mark.no_poison
PATHS = {"rows": 8, "rows of 16": 16, "hopper 64": 64, "hopper 256": 256}


def weight_of(n, k, bits, group, zeros=True, dtype=torch.bfloat16):
    """Random and distinct codes, scales and zero points."""
    packed, high = quant.pack(torch.randint(0, 2**bits, (n, k), dtype=torch.uint8), bits)
    shape = (-(-k // group), n)
    return quant.QuantizedTensor(
        packed=packed,
        packed_high=high,
        scales=(0.5 + torch.rand(shape)).to(dtype),
        zeros=torch.randint(0, 2**bits, shape, dtype=torch.uint8) if zeros else None,
        bits=bits,
        group=group,
        shape=(n, k),
        scheme="asymmetric" if zeros else "symmetric",
        dtype=dtype,
    ).to(DEVICE)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_identity_recovers_the_weight(path, bits):
    """N and K off the tiles, a short last group, groups of one slab to whole rows."""
    step = PATHS[path]
    for n, k, group, zeros, dtype in (
        (704, 2112, 128, True, torch.bfloat16),
        (200, 1040, 32, False, torch.float16),
        (200, 1040, 96, True, torch.bfloat16),
        (72, 528, 528, True, torch.float16),
    ):
        weight = weight_of(n, k, bits, group, zeros, dtype)
        want = weight.dequantize().t()
        eye = torch.eye(k, dtype=dtype, device=DEVICE)
        for first in sorted({0, step, (k // 2) // step * step, k - step}):
            got = ops.lowbit_matmul(eye[first : first + step].contiguous(), weight)
            assert torch.equal(got, want[first : first + step]), (n, k, group, first)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_the_portable_kernel_recovers_the_weight(bits):
    """N a multiple of four and not; groups of one slab to whole rows; parts of K; scaled after the product and before."""
    own = {"path": "tile", "block_n": 128, "block_m": 16, "num_warps": 4, "stages": 3, "join": True}
    for n, k, group, dtype, scaled in (
        (704, 2112, 128, torch.bfloat16, "after"),
        (202, 1040, 32, torch.float16, "before"),
        (72, 528, 528, torch.float16, "after"),
    ):
        weight = weight_of(n, k, bits, group, True, dtype)
        want, eye = weight.dequantize().t(), torch.eye(k, dtype=dtype, device=DEVICE)
        for first in (0, (k // 2) // 16 * 16, k - 16):
            x = eye[first : first + 16].contiguous()
            plan = replace(ops.lowbit_matmul_plan(x, weight), splits=2, scaled=scaled, registers=0, **own)
            assert torch.equal(ops.lowbit_matmul(x, weight, plan=plan), want[first : first + 16]), (n, k, group, first)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_against_fp64_and_the_same_bits(bits):
    weight = weight_of(1408, 4096, bits, 128)
    bias = rand(1408, dtype=torch.bfloat16, device=DEVICE)
    for m in (1, 7, 16, 33, 100, 300, 2000):
        x = rand(m, 4096, dtype=torch.bfloat16, device=DEVICE)
        got = ops.lowbit_matmul(x, weight, bias)
        want, plain = (reference.lowbit_matmul(x, weight, bias, d) for d in (torch.float64, torch.bfloat16))
        judge(got, want, plain, f"m {m}")
        assert all(torch.equal(got, ops.lowbit_matmul(x, weight, bias)) for _ in range(3))


def test_graph_replays_see_new_activations():
    weight, x = weight_of(704, 4096, 4, 128), rand(4, 4096, dtype=torch.bfloat16, device=DEVICE)
    ops.lowbit_matmul(x, weight)
    graph, out = captured(
        lambda: ops.lowbit_matmul(ops.lowbit_matmul(x, weight).repeat(1, 6)[:, :4096].contiguous(), weight)
    )
    for _ in range(3):
        x.normal_()
        graph.replay()
        want = ops.lowbit_matmul(ops.lowbit_matmul(x, weight).repeat(1, 6)[:, :4096].contiguous(), weight)
        assert torch.equal(out, want)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_eight_bits(kind):
    for m, n, k in ((1, 704, 2112), (64, 200, 1000), (300, 520, 4096)):
        x = rand(m, k, dtype=torch.bfloat16, device=DEVICE)
        weight = (torch.randn(n, k, device=DEVICE) * 40).clamp(-127, 127).to(kind)
        scale = torch.rand(n, device=DEVICE) * 0.01
        want, plain = (reference.matmul_w8a8(x, weight, scale, None, d) for d in (torch.float64, torch.float32))
        judge(ops.matmul_w8a8(x, weight, scale), want, plain.bfloat16(), f"{kind} {m}")
