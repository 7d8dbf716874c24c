"""The accuracy report: what is counted, and that nothing else decides it."""

import hashlib
import math

import numpy
import pytest
import torch

from tilefold import ShapeError
from tilefold.bench import accuracy
from tilefold.bench.accuracy import BINS, difference_of, facts_of


def test_facts():
    t = torch.tensor([[3.0, -4.0], [float("nan"), float("inf")]])
    facts = facts_of(t)
    assert (facts.shape, facts.dtype, facts.norm, facts.largest, facts.smallest, facts.specials) == (
        (2, 2), "float32", 5.0, 3.0, -4.0, 2)  # fmt: skip
    assert facts.sha256 == hashlib.sha256(t.numpy().tobytes()).hexdigest()
    nothing = facts_of(torch.empty(0, 3))
    assert (nothing.norm, nothing.specials) == (0.0, 0)
    assert math.isnan(nothing.largest)
    assert facts_of(torch.tensor(2.0)).shape == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_facts_do_not_depend_on_strides_or_chunks(monkeypatch, dtype):
    t = torch.randn(6, 5, 4, dtype=dtype)
    whole = facts_of(t)
    assert facts_of(t.transpose(0, 2).contiguous().transpose(0, 2)) == whole
    monkeypatch.setattr(accuracy, "CHUNK", 7)
    cut = facts_of(t)
    assert cut.sha256 == whole.sha256
    assert cut.norm == pytest.approx(whole.norm, rel=1e-12)


@pytest.mark.parametrize("chunk", [1 << 22, 7])
def test_difference(monkeypatch, chunk):
    monkeypatch.setattr(accuracy, "CHUNK", chunk)
    a = torch.randn(2, 9, 3, dtype=torch.float64)
    b = a + torch.randn_like(a) * 1e-3
    found = difference_of("out", a, b)
    x, y = a.numpy(), b.numpy()
    assert found.max_abs == abs(x - y).max()
    assert found.mean == pytest.approx((x - y).mean(), rel=1e-9)
    assert difference_of("out", b, a).mean == -found.mean
    assert found.mean_abs == pytest.approx(abs(x - y).mean(), rel=1e-12)
    assert found.rmse == pytest.approx(math.sqrt(((x - y) ** 2).mean()), rel=1e-12)
    assert found.relative_l2 == pytest.approx(numpy.linalg.norm(x - y) / numpy.linalg.norm(y), rel=1e-12)
    assert (found.differing, found.elements, found.close, found.identical) == (54, 54, False, False)
    assert sum(found.decades) == 54
    assert found.along == tuple(abs(x - y).max((0, 2)))
    assert difference_of("out", a, b, atol=1.0).close
    assert difference_of("out", a, a.clone()).identical


def test_close_is_allclose():
    for scale in (1e-7, 1e-6, 1e-5, 1e-4):
        a = torch.randn(50)
        b = a * (1 + scale)
        assert difference_of("out", a, b).close == torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5)


def test_specials_count_and_hide_nothing():
    a = torch.tensor([1.0, float("nan"), float("inf"), float("inf"), 2.0, -float("inf")])
    b = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), float("nan"), 5.0])
    found = difference_of("out", a, b)
    assert (found.differing, found.specials, found.close, found.max_abs) == (3, 3, False, 0.0)
    same = difference_of("out", a[2:4], a[2:4].clone())
    assert (same.differing, same.close, same.identical) == (0, True, True)
    assert not difference_of("out", a[1:2], a[1:2].clone()).close  # NaN is close to nothing, as torch.allclose has it


def test_decades_clamp():
    found = difference_of(
        "out", torch.zeros(3, dtype=torch.float64), torch.tensor([1e-30, 0.5, 1e9], dtype=torch.float64)
    )
    assert {e: n for e, n in zip(BINS, found.decades, strict=True) if n} == {BINS[0]: 1, -1: 1, BINS[-1]: 1}


def test_other_shapes_are_refused():
    with pytest.raises(ShapeError, match=r"out has shapes \(2,\) and \(3,\): they must be the same"):
        difference_of("out", torch.zeros(2), torch.zeros(3))
    empty = difference_of("out", torch.zeros(0, 3), torch.zeros(0, 3))
    assert (empty.elements, empty.close, empty.relative_l2) == (0, True, 0.0)
