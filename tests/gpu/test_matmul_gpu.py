"""Matrix products on a GPU, portable kernel and the one for sm_90: layouts, batches, bias, activations, shares, gradients."""

import pytest
import torch

from cases import judge, rand
from cases.device import DEVICE, alike_every_run, followed
from cases.matmul import ACTIVATIONS, check, check_gradients, matrix
from tilefold import constant, ops, reference
from tilefold.ops.device import device_of
from tilefold.ops.matrix.operands import operands
from tilefold.ops.matrix.product import Epilogue, problem_of
from tilefold.plan.matrix.matmul import plan_matmul

pytestmark = pytest.mark.no_poison
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
KERNELS = ["matmul", "matmul_hopper"]


def planned(kernel, a, b, bias=None, activation="none", out_dtype=None, **tile):
    """The plan of this call with a kernel and tile of the test's choice."""
    if kernel == "matmul_hopper" and not HOPPER:
        pytest.skip("written for sm_90")
    problem = problem_of(operands(a, b, bias, False), Epilogue(activation, out_dtype=out_dtype or a.dtype), False)
    return plan_matmul(problem, device_of(DEVICE)).with_tile(kernel=kernel, **tile)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layouts(kernel, turned, dtype):
    for m, n, k in ((256, 512, 128), (1000, 776, 328), (130, 264, 72)):
        a = matrix(m, k, dtype=dtype, device=DEVICE, turned=turned[0])
        b = matrix(k, n, dtype=dtype, device=DEVICE, turned=turned[1])
        if turned[0] and m % 8:
            continue
        for tile in ({"block_n": 256, "num_stages": 4}, {"block_n": 128}) if kernel == "matmul_hopper" else ({},):
            check(a, b, plan=planned(kernel, a, b, **tile))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [(520,), (3, 1, 1), (3, 200, 520), (200, 1)])
def test_bias_and_activation(kernel, activation, bias):
    a, b = (rand(*shape, dtype=torch.float16, device=DEVICE) for shape in ((3, 200, 136), (3, 136, 520)))
    bias = rand(*bias, dtype=torch.float16, device=DEVICE)
    check(a, b, bias=bias, activation=activation, plan=planned(kernel, a, b, bias, activation or "none"))
    check(a, b, bias=bias, activation=activation, out_dtype=torch.float32)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("splits", [2, 5, 8])
def test_shares(kernel, splits):
    a, b = (
        rand(2, 200, 1000, dtype=torch.bfloat16, device=DEVICE),
        rand(2, 1000, 264, dtype=torch.bfloat16, device=DEVICE),
    )
    bias = rand(2, 1, 1, dtype=torch.bfloat16, device=DEVICE)
    plan = planned(kernel, a, b, bias, "gelu", splits=splits)
    got = check(a, b, bias=bias, activation="gelu", plan=plan)
    assert all(torch.equal(got, ops.bmm(a, b, bias=bias, activation="gelu", plan=plan)) for _ in range(5))


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (1, 4096, 4096), (17, 1001, 333), (4096, 1, 512), (2048, 2048, 16), (64, 64, 65536)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sizes(sizes, dtype):
    m, n, k = sizes
    check(
        matrix(m, k, dtype=dtype, device=DEVICE),
        matrix(k, n, dtype=dtype, device=DEVICE),
        bias=rand(n, dtype=dtype, device=DEVICE),
    )


def test_odd_columns_of_a_turned_weight():
    """TMA reads A and B, and cannot store rows of 1001 elements."""
    a, b = (
        rand(512, 256, dtype=torch.bfloat16, device=DEVICE),
        matrix(256, 1001, dtype=torch.bfloat16, device=DEVICE, turned=True),
    )
    for kernel in KERNELS:
        check(a, b, plan=planned(kernel, a, b, activation="gelu"), activation="gelu")


def test_tf32():
    a, b = rand(512, 256, device=DEVICE), rand(256, 384, device=DEVICE)
    exact, rounded = ops.matmul(a, b), ops.matmul(a, b, tf32=True)
    want = a.double() @ b.double()
    judge(exact, want, reference.matmul(a, b, dtype=torch.float32), "ieee")
    error = float((rounded - want).norm() / want.norm())
    assert 1e-5 < error < 1e-3


@pytest.mark.parametrize("scales", [(None, None), ((1,), (1,)), ((500,), (392,))])
def test_eight_bits(scales):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no products of bytes")
    a = rand(500, 1000, device=DEVICE).to(torch.float8_e4m3fn)
    b = rand(392, 1000, device=DEVICE).to(torch.float8_e4m3fn).t()
    scale_a, scale_b = (None if s is None else rand(*s, device=DEVICE).abs() + 0.1 for s in scales)
    check(a, b, scale_a=scale_a, scale_b=scale_b, activation="silu")


@pytest.mark.parametrize(
    "shapes", [((3, 200, 136), (3, 136, 264)), ((3, 200, 136), (136, 264)), ((200, 136), (3, 136, 264))]
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients(shapes, activation, dtype):
    a, b = (rand(*shape, dtype=dtype, device=DEVICE).requires_grad_() for shape in shapes)
    check_gradients(a, b, rand(264, dtype=dtype, device=DEVICE).requires_grad_(), activation=activation)


def test_a_shared_operand_of_many_tiles():
    """Gradients that the kernel for sm_90 sums over a batch which is no longer k: of A, whose tiles are enough for it."""
    a = rand(2048, 512, dtype=torch.bfloat16, device=DEVICE).mT.contiguous().mT.requires_grad_()
    b = rand(3, 512, 2040, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    check_gradients(a, b, None, activation="gelu")
    wide = rand(1280, 2048, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    check_gradients(wide, rand(3, 2048, 264, dtype=torch.bfloat16, device=DEVICE).requires_grad_(), None)
    folded = problem_of(operands(rand(3, 1280, 264, dtype=torch.bfloat16), rand(3, 264, 2048, dtype=torch.bfloat16), None, True),
                        Epilogue(fold=True), False)  # fmt: skip
    if HOPPER:
        assert folded.fold and plan_matmul(folded, device_of(DEVICE)).kernel == "matmul_hopper"


def test_the_same_bits_every_run():
    a, b = (
        rand(*shape, dtype=torch.bfloat16, device=DEVICE).requires_grad_() for shape in ((8, 500, 512), (512, 1000))
    )
    dout = rand(8, 500, 1000, dtype=torch.bfloat16, device=DEVICE)
    alike_every_run(lambda: torch.autograd.grad(ops.bmm(a, b, activation="gelu"), (a, b), dout), 3)


def test_cuda_graph_and_compile():
    a, b, bias = (rand(*s, dtype=torch.bfloat16, device=DEVICE) for s in ((300, 256), (256, 512), (512,)))
    plan = constant(planned("matmul", a, b, bias, "relu"))
    for fn in (
        lambda: ops.matmul(a, b, bias=bias, activation="gelu"),
        lambda: ops.matmul(a, b, bias=bias, activation="relu", plan=plan),
    ):
        want = fn()
        assert not torch.equal(followed(fn, lambda: a.mul_(2)), want)
        assert torch.equal(torch.compile(fn, fullgraph=True)(), fn())


@pytest.mark.large
@pytest.mark.parametrize("kernel", KERNELS)
def test_more_than_two_to_the_31_elements(kernel):
    """A and the result are both that large; rows from the end are right."""
    a = torch.randn(3 << 20, 768, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(768, 1024, device=DEVICE, dtype=torch.bfloat16)
    got = ops.matmul(a, b, plan=planned(kernel, a, b))
    for rows in (slice(0, 200), slice(-200, None), slice(2796203, 2796203 + 200)):
        judge(got[rows], reference.matmul(a[rows], b), reference.matmul(a[rows], b, dtype=a.dtype), f"rows {rows}")


@pytest.mark.large
def test_rows_far_apart():
    """Offsets inside one tile past 2^31."""
    whole = torch.zeros(40 << 26, device=DEVICE, dtype=torch.float16)
    a = whole.as_strided((40, 64), (1 << 26, 1))
    a.copy_(torch.randn(40, 64, device=DEVICE))
    check(a, rand(64, 64, dtype=torch.float16, device=DEVICE))
