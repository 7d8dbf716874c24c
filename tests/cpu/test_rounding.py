"""The model of rounding that limits come from: its formula, what it leaves alone, gradients, and that no processor takes part."""

import hashlib
import math
import os
import subprocess
import sys

import pytest
import torch

from cases import rand
from tilefold import reference
from tilefold.reference.rounding import Rounding, deviating, in_dtype

pytestmark = pytest.mark.no_poison  # no kernel runs
U32 = 2.0**-24


def off(call, dtype, draws=60):
    """The deviation of an fp64 result, of many draws."""
    exact, total = call(), 0.0
    for seed in range(draws):
        with Rounding(dtype, seed):
            found = call()
        total = total + (found - exact).square()
    return (total / draws).sqrt()


@pytest.mark.parametrize("n", [8, 64, 1000])
def test_a_product_deviates_as_the_formula_says(n):
    """Its sum in fp32, then one rounding: of random terms, and of positive ones."""
    for a, b in ((torch.randn(40, n), torch.randn(n, 30)), (torch.rand(40, n), torch.rand(n, 30))):
        a, b = a.double(), b.double()
        s, q = a @ b, a**2 @ b**2
        want = U32 * torch.sqrt((n * (s**2 / 3 + q / 6) + s**2) / 3)
        found = off(lambda a=a, b=b: a @ b, torch.float32)
        assert math.isclose(float(found.square().mean()), float(want.square().mean()), rel_tol=0.1)
        size = a.abs() @ b.abs()
        assert (want <= U32 * size * math.sqrt(n / 6 + 1)).all()


@pytest.mark.parametrize(("dtype", "u"), [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8), (torch.float32, U32)])
def test_an_operation_rounds_once(dtype, u):
    x, y = rand(50, 40).double(), rand(50, 40).double()
    for call in (lambda: x * y, lambda: x + y, lambda: torch.exp(x), lambda: x.clone().mul_(y)):
        found = off(call, dtype) / call().abs()
        assert math.isclose(float(found.square().mean().sqrt()), u / 3**0.5, rel_tol=0.1)
    with Rounding(dtype, 0):
        assert ((x * y - (x * y)).abs() <= 2 * u * (x * y).abs()).all()
        assert ((torch.exp(x) / torch.exp(x) - 1).abs() <= 3.1 * u).all()


def test_a_sum_over_dimensions():
    x = torch.rand(30, 500).double()
    s, q = x.sum(1), (x * x).sum(1)
    want = U32 * torch.sqrt((500 * (s**2 / 3 + q / 6) + s**2) / 3)
    found = off(lambda: x.sum(1), torch.float32)
    assert math.isclose(float(found.square().mean()), float(want.square().mean()), rel_tol=0.2)
    mean = off(lambda: x.mean(1), torch.float32)
    assert math.isclose(float(mean.square().mean()), float((want / 500).square().mean()), rel_tol=0.25)


def test_what_moves_numbers_leaves_them_alone():
    x = torch.cat([rand(3, 8).double(), torch.tensor([[math.inf, -math.inf, 0, 0, 1, 2, 3, math.nan]]).double()])
    seen = torch.rand(4, 8) < 0.5
    with Rounding(torch.bfloat16, 0):
        moved = (
            torch.where(seen, x, 0.0)[:, [3, 1]],
            x.mT.contiguous(),
            torch.cat([x, x]),
            x.masked_fill(seen, -1.0),
            x.relu(),
        )
        changed = x * 1.0
        narrow = x.float().double()
    with Rounding(torch.float32, 0):
        same = x.float().double()
    wanted = torch.where(seen, x, 0.0)[:, [3, 1]], x.mT, torch.cat([x, x]), x.masked_fill(seen, -1.0), x.relu()
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(moved, wanted, strict=True))
    assert torch.equal(changed[3].isfinite(), x[3].isfinite())
    assert torch.equal(changed[3, :4], x[3, :4])
    assert not torch.equal(changed[:3], x[:3])
    assert torch.equal(same.nan_to_num(7), x.float().double().nan_to_num(7))  # fp32 is no wider
    assert not torch.equal(narrow[:3], x.float().double()[:3])  # fp32 becomes bfloat16


def test_float16_has_a_smallest_number():
    x = torch.full((1000,), 1e-6, dtype=torch.float64)
    found = off(lambda: x * 1.0, torch.float16)
    assert math.isclose(float(found.square().mean().sqrt()), 2.0**-25 / 3**0.5, rel_tol=0.1)


def test_a_reference_in_a_narrow_dtype_is_one_deviation_off():
    q, k, v = (rand(1, 20, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    exact, plain = (reference.attention(q, k, v, dtype=d) for d in (torch.float64, torch.bfloat16))
    assert [t.dtype for t in plain] == [torch.bfloat16] * 2
    wanted = deviating(lambda: reference.attention(q, k, v), torch.bfloat16)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(plain, wanted, strict=True))
    assert all((b >= a).all() and (b > a).any() for a, b in zip(exact, wanted, strict=True))


def test_gradients_deviate_too():
    q, k, v = (rand(1, 20, 2, 16).requires_grad_() for _ in range(3))
    dout = rand(1, 20, 2, 16)

    def pulled():
        with torch.enable_grad():
            leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
            return torch.autograd.grad(reference.attention(*leaves)[0], leaves, dout.double())

    found = torch.autograd.grad(reference.attention(q, k, v, dtype=torch.float32)[0], (q, k, v), dout)
    for a, b, exact in zip(found, deviating(pulled, torch.float32), pulled(), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float())
        size = float((b - exact).norm() / exact.norm())
        assert U32 / 2 < size < 40 * U32


def test_a_tensor_given_twice_and_one_without_a_gradient():
    @in_dtype
    def product(x, y, *, dtype=torch.float64):
        return x.to(dtype) * y.to(dtype), None, 3

    x, y = rand(5).requires_grad_(), rand(5)
    made, nothing, number = product(x, x, dtype=torch.float32)
    assert (nothing, number) == (None, 3)
    torch.testing.assert_close(torch.autograd.grad(made.sum(), x)[0], 2 * x.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(product(x, y, dtype=torch.float32)[0].sum(), x)[0], y, rtol=1e-5, atol=0
    )


SHOWN = """
import hashlib, torch
from tilefold import reference
x = (torch.arange(3 * 24 * 2 * 16) * 37 % 101).double().view(3, 1, 24, 2, 16) / 50 - 1
q, k, v = (t.float().requires_grad_() for t in x)
out, lse = reference.attention(q, k, v, causal=True, dtype=torch.float32)
found = [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))]
exact = reference.attention(q, k, v, causal=True)
off = torch.cat([(a.double() - b).flatten() for a, b in zip(found, exact)]).detach()
print(*(f"{float(t.double().norm()):.6g}" for t in found), f"{float(off.norm()):.2g}")
"""


def test_no_processor_takes_part():
    """The same deviations from ATen without vectors, from MKL's oldest path, in one thread and in two."""
    shown = set()
    for changed in (
        {},
        {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"},
        {"MKL_CBWR": "AVX2"},
    ):
        run = subprocess.run(
            [sys.executable, "-c", SHOWN], env={**os.environ, **changed}, capture_output=True, text=True, check=True
        )
        shown.add(run.stdout)
    assert len(shown) == 1, shown


def test_the_limit_does_not_know_what_plain_pytorch_made():
    """Nothing of a dtype narrower than fp64 is computed: the same bits whatever torch's fp32 product does."""
    a, b = rand(9, 64), rand(64, 7)
    kept, digests = torch.get_num_threads(), set()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        digests.add(hashlib.sha256(reference.matmul(a, b, dtype=torch.float32).numpy().tobytes()).hexdigest())
    torch.set_num_threads(kept)
    assert len(digests) == 1
