"""The model of rounding that limits come from: its formula, what it leaves alone, gradients, and that no processor takes part."""

import contextlib
import hashlib
import io
import math
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

import tilefold
from cases import rand, same
from tilefold import reference
from tilefold.errors import DtypeError
from tilefold.reference.rounding import Rounding, _of_cutting, activated, attended, binade, deviating, in_dtype, stored

pytestmark = pytest.mark.no_poison  # no kernel runs
U32 = 2.0**-24
NARROW = [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)]


def off(call, dtype, draws=60, **options):
    """The deviation of an fp64 result, of many draws."""
    exact, total, mode = call(), 0.0, Rounding(dtype, **options)
    for seed in range(draws):
        with mode.again(seed):
            found = call()
        total = total + (found - exact).square()
    return (total / draws).sqrt()


def same_norm(found, want, tolerance):
    assert math.isclose(float(found.norm()), float(want.norm()), rel_tol=tolerance), (found.norm(), want.norm())


@pytest.mark.parametrize("n", [8, 64, 1000])
def test_a_product_deviates_as_the_formula_says(n):
    """Of inputs, whatever their dtype, by its sum in fp32: of random terms, and of positive ones."""
    for a, b in ((torch.randn(40, n), torch.randn(n, 30)), (torch.rand(40, n), torch.rand(n, 30))):
        a, b = a.half().double(), b.half().double()
        s, q = a @ b, a**2 @ b**2
        want = U32 * torch.sqrt(0.541 * n * (s**2 / 3 + q / 6) / 3)
        same_norm(off(lambda a=a, b=b: a @ b, torch.float32), want, 0.1)
        cut = torch.sqrt(s**2 / 4 + q / 12) * (n / 8 + s.abs() * n / (n * q).sqrt() / 4) * U32 / (2 * math.log(2))
        same_norm(off(lambda a=a, b=b: a @ b, torch.float16), torch.hypot(want, cut), 0.1)
        assert (want <= U32 * (a.abs() @ b.abs()) * math.sqrt(n / 6)).all()


@pytest.mark.parametrize("mean", [0.0, 0.5])
def test_a_matrix_unit_cuts_its_sums_off(mean):
    """A witness: terms and the sum are cut off two bits behind the last place of the largest, then the sum at its last place."""
    n = 4096
    t = torch.randn(300, n).half().double() * (torch.randn(300, n).half().double() + mean * 4).abs().clamp(max=8.0)
    t = t.abs() if mean else t
    t = t.float().double()  # a product of two fp16 numbers has 22 bits
    total = torch.zeros(300, 1).double()
    for step in t.view(300, n // 8, 8).unbind(1):
        terms = torch.cat([total, step], 1)
        place = binade(terms.abs().amax(1, True)) * 2.0**-25
        total = ((terms / place).trunc() * place).sum(1, True)
        place = binade(total) * 2.0**-23
        total = (total / place).trunc() * place
    exact, squares = t.sum(1), t.square().sum(1)
    found = _of_cutting(exact, squares, n, torch.float16)[0] / 3**0.5
    same_norm(total[:, 0] - exact, found, 0.4)


def test_what_is_cut_off_all_scores_stays_in_their_sum():
    """Scores of 128 products in e4m3 on Hopper: 32 terms at a time, 13 bits behind the largest.  Every lse is too small."""
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, n, 1, 128, generator=generator) for n in (3, 20000))
    (q, of_q), (k, of_k) = tilefold.quantize_fp8(q), tilefold.quantize_fp8(k)
    given = {"q": q, "k": k, "v": k, "q_descale": of_q, "k_descale": of_k}
    exact, off = (reference.attention_fp8(**given, dtype=dtype)[1] for dtype in (torch.float64, torch.float8_e4m3fn))
    products = q[0, :, 0].double()[:, None] * k[0, :, 0].double()
    total = torch.zeros(products.shape[:2], dtype=torch.float64)
    for terms in products.split(32, -1):
        place = binade(torch.cat((terms, total[..., None]), -1)).amax(-1, True) * 2.0**-13
        total = ((terms / place).trunc().sum(-1) + (total / place[..., 0]).trunc()) * place[..., 0]
    got = (total * (of_q * of_k).double() / math.sqrt(128)).logsumexp(-1).float()[None, None]
    assert (got < exact).all()
    error, deviation = (got - exact).abs().mean(), (off - exact).mean()
    assert 0.25 * deviation < error < deviation
    assert reference.compare(got, exact, off, unit=1.0).ok


def test_tanh_as_gpus_compute_it():
    x = rand(50, 40).double()
    same_norm(off(lambda: torch.tanh(x), torch.float32), torch.full_like(x, 4 * U32 / 3**0.5), 0.1)
    same_norm(off(lambda: torch.tanh(x), torch.bfloat16), torch.tanh(x).abs() * 2.0**-11 / 3**0.5, 0.1)


def test_the_mean_significand():
    """0.541: that of 1 / m^2 over 1 <= m < 2, of evenly spread logarithm, as numbers of many magnitudes have it."""
    x = torch.exp(torch.linspace(0, 10 * math.log(2), 100001, dtype=torch.float64)[:-1])
    assert math.isclose(float((binade(x) / x).square().mean()), 0.541, rel_tol=1e-3)
    assert torch.equal(binade(x), torch.ldexp(torch.tensor(0.5).double(), torch.frexp(x)[1]))


def test_sums_run_one_term_after_another_in_fp32():
    """The model's deviation is that of a sum as processors without wide registers make it: a witness."""
    t = torch.randn(400, 500)
    total = torch.zeros(400)
    for i in range(500):
        total = total + t[:, i]
    exact, squares = t.double().sum(1), t.double().square().sum(1)
    want = U32 * torch.sqrt(0.541 * 500 * (exact**2 / 3 + squares / 6) / 3)
    same_norm(total - exact, want, 0.2)


@pytest.mark.parametrize(("dtype", "u"), NARROW)
def test_operands_that_were_computed_are_rounded(dtype, u):
    """Those that a product has from elsewhere are not; one that is used twice is rounded once.  A product's own may be kept
    times any factor, what is stored is what it is."""
    a, b = torch.rand(40, 64).to(dtype).double(), torch.rand(64, 30).to(dtype).double()
    x = a * 1.1
    want = u * torch.sqrt(x**2 @ b**2 / 3)
    same_norm(off(lambda: (a * 1.1) @ b, dtype), want, 0.1)
    same_norm(off(lambda: stored(a * 1.1) @ b, dtype), u * torch.sqrt(binade(x) ** 2 @ b**2 / 3), 0.1)
    assert float(off(lambda: a @ b, dtype).norm()) < 1e-2 * float(want.norm())


@pytest.mark.parametrize(("dtype", "u"), [*NARROW, (torch.float32, U32)])
def test_an_operation_rounds_once(dtype, u):
    x, y = rand(50, 40).double(), rand(50, 40).double()
    for call in (lambda: x * y, lambda: x + y, lambda: torch.exp(x), lambda: x.clone().mul_(y)):
        same_norm(off(call, dtype), U32 * binade(call()) / 3**0.5, 0.1)
        same_norm(off(call, dtype, kept=dtype), u * binade(call()) / 3**0.5, 0.1)
    with Rounding(dtype, kept=dtype):
        assert ((x * y - (x * y)).abs() <= 2 * u * (x * y).abs()).all()


def test_a_sum_over_dimensions():
    x = torch.rand(30, 500).double()
    s, q = x.sum(1), (x * x).sum(1)
    want = U32 * torch.sqrt(0.541 * (16 + 500 / 16) * (s**2 / 3 + q / 6) / 3)
    same_norm(off(lambda: x.sum(1), torch.float32), want, 0.1)
    total = torch.zeros(30)
    for i in range(0, 500, 20):  # a witness
        total = total + x.float()[:, i : i + 20].sum(1)
    assert float((total - x.float().double().sum(1)).norm()) < 2 * float(want.norm())
    same_norm(off(lambda: x.mean(1), torch.float32), want / 500, 0.1)


def test_what_moves_numbers_leaves_them_alone():
    x = torch.cat([rand(3, 8).double(), torch.tensor([[math.inf, -math.inf, 0, 0, 1, 2, 3, math.nan]]).double()])
    seen = torch.rand(4, 8) < 0.5

    def moved():
        return (
            torch.where(seen, x, 0.0)[:, [3, 1]],
            x.mT.contiguous(),
            torch.cat([x, x]),
            x.masked_fill(seen, -1.0),
            x.relu(),
            x.float().double(),
        )

    with Rounding(torch.bfloat16):
        found, changed = moved(), x * 1.0
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(moved(), found, strict=True))
    assert torch.equal(changed[3].isfinite(), x[3].isfinite())
    assert torch.equal(changed[3, :4], x[3, :4])
    assert not torch.equal(changed[:3], x[:3])


def test_float16_has_a_smallest_number():
    x = torch.full((1000,), 1.1e-6, dtype=torch.float64)
    same_norm(off(lambda: stored(x), torch.float16), torch.full((1000,), 2.0**-25 / 3**0.5), 0.1)


@pytest.mark.parametrize(("dtype", "u"), NARROW)
def test_what_kernels_hand_on_is_rounded(dtype, u):
    """A gradient that comes back, sum(out dout), and what an activation's slope is taken of."""
    x = rand(50, 40).double().requires_grad_()
    g = rand(50, 40).double()

    def slope(call):
        return lambda: torch.autograd.grad(call(x), x, g)[0]

    same_norm(off(slope(stored), dtype), u * binade(g) / 3**0.5, 0.1)
    lse, mode, total, one = rand(50).double().requires_grad_(), Rounding(dtype), 0.0, torch.eye(40).double()
    for seed in range(60):
        with mode.again(seed):
            total = total + torch.autograd.grad(attended(x * 1.0, one, lse), lse, g)[0].square()
    both = (g * binade(x)).square() + (
        g * x
    ).square()  # of what is stored, and of the operand of the product that made it
    same_norm((total / 60).sqrt(), u * torch.sqrt(both.sum(1) / 3).detach(), 0.1)
    same_norm(off(slope(lambda t: activated(torch.relu, t)), dtype), u * binade(g * (x > 0)) / 3**0.5, 0.1)


def test_a_reference_in_a_narrow_dtype_is_one_deviation_off():
    q, k, v = (rand(1, 20, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    exact, plain = (reference.attention(q, k, v, dtype=d) for d in (torch.float64, torch.bfloat16))
    assert [t.dtype for t in plain] == [torch.float64] * 2
    wanted = deviating(lambda: reference.attention(q, k, v), torch.bfloat16)
    assert same(plain, wanted)
    assert all((b >= a).all() and (b > a).any() for a, b in zip(exact, wanted, strict=True))


@dataclass(frozen=True)
class Stages:
    whole: torch.Tensor
    name: str


def test_what_lies_in_a_record_deviates():
    """As the stages of the video pipeline do: a tensor in a dataclass was one that has no error."""

    @in_dtype
    def both(x, *, dtype=torch.float64):
        y = x.to(dtype) @ x.to(dtype).mT
        return y, Stages(y * 3, "y")

    x = torch.randn(5, 40).half().double().requires_grad_()
    exact, off = both(x), both(x, dtype=torch.float32)
    assert off[1].name == "y" and (off[0] > exact[0]).all() and (off[1].whole > exact[1].whole).all()
    grads = [torch.autograd.grad(found[1].whole.sum(), x)[0] for found in (exact, off)]
    assert not torch.equal(*grads) and torch.allclose(*grads)


def test_roundings_that_cancel_in_all_draws_still_count():
    """Two roundings of equal size, one error each for a whole row: among many rows some have opposite signs in every draw."""
    x, rows = torch.full((2000, 1), 1.5).double() + 2.0**-12, torch.ones(1, 64).double()

    def twice():
        mode = Rounding.entered[-1] if Rounding.entered else None
        narrowed = (lambda t: t) if mode is None else mode.narrowed
        return (narrowed(x * 1.0) + narrowed(x * 1.0)) * rows

    exact, one = twice(), 2.0**-8 / 3**0.5
    alone = [Rounding(torch.bfloat16).again(draw) for draw in range(8)]
    drawn = 0.0
    for mode in alone:
        with mode:
            drawn = drawn + (twice() - exact).square() / 8
    assert drawn.min() < 1e-8 < one**2 < drawn.mean(), "some rows cancel"
    found = deviating(twice, torch.bfloat16) - exact
    assert found.min() >= one * 0.999
    assert found.max() <= 2 * one * 1.001


def test_gradients_deviate_too():
    q, k, v = (rand(1, 20, 2, 16).double().requires_grad_() for _ in range(3))
    dout = rand(1, 20, 2, 16).double()

    def pulled():
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            return torch.autograd.grad(reference.attention(*leaves)[0], leaves, dout)

    found = torch.autograd.grad(reference.attention(q, k, v, dtype=torch.float32)[0], (q, k, v), dout)
    for a, b, exact in zip(found, deviating(pulled, torch.float32), pulled(), strict=True):
        assert torch.equal(a, b)
        size = float((b - exact).norm() / exact.norm())
        assert U32 / 2 < size < 20 * U32
    with pytest.raises(DtypeError, match=r"need inputs in torch\.float64"):
        reference.attention(q.detach().float().requires_grad_(), k, v, dtype=torch.float32)


def test_a_tensor_given_twice_and_one_without_a_gradient():
    @in_dtype
    def product(x, y, *, dtype=torch.float64):
        return x.to(dtype) * y.to(dtype), None, 3

    x, y = rand(5).double().requires_grad_(), rand(5).double()
    made, nothing, number = product(x, x, dtype=torch.float32)
    assert (nothing, number) == (None, 3)
    torch.testing.assert_close(torch.autograd.grad(made.sum(), x)[0], 2 * x.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(product(x, y, dtype=torch.float32)[0].sum(), x)[0], y, rtol=1e-5, atol=0
    )


SHOWN = """
import torch
from tilefold import reference
x = (torch.arange(3 * 24 * 2 * 16) * 37 % 101).double().view(3, 1, 24, 2, 16) / 50 - 1
q, k, v = (t.float().double().requires_grad_() for t in x)
out, lse = reference.attention(q, k, v, causal=True, dtype=torch.float32)
found = [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))]
exact = reference.attention(q, k, v, causal=True)
off = torch.cat([(a - b).flatten() for a, b in zip(found, exact)]).detach()
print(*(f"{float(t.double().norm()):.6g}" for t in found), f"{float(off.norm()):.2g}")
"""


def test_no_processor_takes_part():
    """The same deviations here, from ATen without vectors and MKL's oldest path, and from its newer one, in other threads."""
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(SHOWN, {})
    shown = {here.getvalue()}
    for changed in (
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
