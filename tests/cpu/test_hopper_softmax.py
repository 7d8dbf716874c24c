"""The arithmetic that versions of the dense kernel for sm_90 take instead of instructions: its own functions, in numpy."""

import types

import numpy as np
import pytest

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
from tilefold.kernels.hopper import forward_parts as kernel

NEG_INF = np.float32(-np.inf)


class Words(np.ndarray):
    """fp32 numbers or int32 words, as tensors of the kernel: bitcasts, and numbers that stay fp32."""

    def to(self, dtype, bitcast=False):
        assert bitcast
        return self.view(dtype)


def words(x):
    return np.asarray(x, np.float32).view(Words)


def namespace(**more):
    gl = types.SimpleNamespace(
        int32=np.int32, float32=np.float32, where=np.where, exp2=np.exp2, expand_dims=np.expand_dims,
        maximum=lambda a, b, propagate_nan=None: np.maximum(a, np.float32(b)) if propagate_nan else np.fmax(a, b),
        minimum=lambda a, b, propagate_nan=None: np.minimum(a, np.float32(b)),
        max=lambda x, axis: np.fmax.reduce(x, axis),
    )  # fmt: skip
    constants = {name: np.float32(getattr(kernel, name).value) for name in ("P1", "P2", "P3", "ROUNDS", "GROWTH")}
    return {"gl": gl, "KEEP_NAN": True, **constants, **more}


def function(name, **more):
    return types.FunctionType(getattr(kernel, name).fn.__code__, namespace(**more))


def test_powers_of_two_by_a_polynomial():
    power = function("power_of_two")
    x = words(np.concatenate([np.linspace(-126, 0, 400_001), -np.geomspace(1e-30, 1, 1001), np.arange(-126, 1)]))
    exact = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(np.asarray(power(x), np.float64) / exact - 1)) < 1.05e-4
    assert power(words([0.0]))[0] == 1.0


def test_what_is_masked_weighs_nothing_and_what_is_no_number_stays_none():
    power = function("power_of_two")
    assert (power(words([NEG_INF, -3e38, -1000.0, -127.0])) == 0).all()
    assert np.isnan(power(words([np.nan]))).all()
    below = power(words(np.linspace(-127, -126, 1001)))
    assert ((below >= 0) & (below < 1.3e-38)).all()


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e4])
def test_softcap(size):
    soften = function("soften", quick_reciprocal=lambda x: np.float32(1) / x, LOG2E=np.float32(np.log2(np.e)))
    s = words(np.random.default_rng(0).standard_normal(10_000) * size)
    inner = np.float32(1 / 20)
    exact = np.tanh(s.astype(np.float64) * float(inner))
    assert np.max(np.abs(soften(s, inner, 1) - exact)) < 4e-7
    assert np.isnan(soften(words([np.nan]), inner, 1)).all()


class Converted(np.ndarray):
    """A tensor whose layout and dtype do not matter here."""

    @property
    def type(self):
        return types.SimpleNamespace(layout=None)

    def to(self, dtype):
        return self


def fold(tiles, skip):
    """fold_scores over tiles of scores, with the products in fp64; -> out, lse in base 2."""
    step = function("fold_scores", exponentials=lambda x, share: np.exp2(x), quad_sums=lambda p: p.sum(1)[:, None])
    names = step.__globals__
    names["gl"].SliceLayout = lambda *args: None
    names["gl"].convert_layout = lambda x, layout: x
    rows = tiles[0][0].shape[0]
    m, l = np.full(rows, -3e38).view(Converted), np.zeros((rows, 1)).view(Converted)
    acc, kept = np.zeros((rows, tiles[0][1].shape[1])), 0
    for s, v in tiles:
        p, m, l, alpha = step(s.view(Converted), m, l, 1.0, None, None, 16, skip)
        kept += int((np.asarray(alpha) == 1).sum())
        assert np.max(p) <= 2.0**8
        acc = acc * np.asarray(alpha)[:, None] + np.asarray(p) @ v
    return acc / np.asarray(l), np.asarray(m) + np.log2(np.asarray(l)[:, 0]), kept


@pytest.mark.parametrize("size", [1.0, 10.0, 300.0])
def test_sums_may_be_relative_to_an_older_maximum(size):
    random = np.random.default_rng(1)
    tiles = [(random.standard_normal((64, 32)) * size, random.standard_normal((32, 8))) for _ in range(12)]
    tiles[3][0][:5] = -np.inf
    tiles[0][0][7:9] = -np.inf  # rows that have seen no key yet
    exact, lse, kept_always = fold(tiles, False)
    found, found_lse, kept = fold(tiles, True)
    assert np.allclose(found, exact, rtol=1e-12, atol=1e-12)
    assert np.allclose(found_lse, lse, rtol=1e-12, atol=1e-12)
    assert kept > kept_always  # and it is worth something


class Sinks:
    """A pointer into numbers."""

    def __init__(self, values, places=None):
        self.values, self.places = values, places

    def __add__(self, offsets):
        return Sinks(self.values, offsets)


class Tensor(np.ndarray):
    """Any tensor whose layout and dtype do not matter here."""

    type = types.SimpleNamespace(layout=None)

    def to(self, dtype):
        return self


@pytest.mark.parametrize("pack", [1, 4])
def test_a_sink_is_a_key_seen_before_the_first(pack):
    begin = function(
        "begin_fold", quad_sums=lambda nothing: np.zeros((64, 4)).view(Tensor), LOWEST=-3e38, LOG2E=np.log2(np.e)
    )
    gl = begin.__globals__["gl"]
    gl.full = lambda shape, value, *rest: np.full(shape, value).view(Tensor)
    gl.load = lambda pointer: np.asarray(pointer.values)[pointer.places].view(Tensor)
    gl.arange = lambda first, last, layout: np.arange(first, last).view(Tensor)
    gl.zeros_like, gl.convert_layout, gl.SliceLayout, gl.int64 = (
        np.zeros_like,
        lambda x, layout: x,
        lambda *args: None,
        None,
    )
    sinks = [0.5, -np.inf, 3.0, 1e-3, -7.0, np.nan, 2.0, 100.0]
    for head in range(len(sinks) // pack):
        m, l = begin(None, Sinks(np.repeat(sinks, 3)), 3, np.int64(head), None, pack)
        mine = np.array([sinks[head * pack + r % pack] for r in range(64)])
        with np.errstate(divide="ignore"):
            lse = (np.asarray(m) + np.log2(np.asarray(l).sum(1))) / np.log2(np.e)
        assert np.allclose(lse, mine, rtol=1e-6, equal_nan=True)
