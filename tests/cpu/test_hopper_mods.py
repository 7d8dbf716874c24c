"""ALiBi in the dense kernel for sm_90: the kernel's own functions, in numpy."""

import types

import numpy as np
import pytest

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
from tilefold.kernels.hopper import forward_mods, parts


class Tensor(np.ndarray):
    """A tensor whose layout does not matter here."""

    type = types.SimpleNamespace(layout=None)

    def to(self, dtype):
        return self.astype(dtype)


def functions(*names):
    gl = types.SimpleNamespace(
        float32=np.float32, int64=np.int64, abs=np.abs, expand_dims=np.expand_dims, constexpr=None,
        SliceLayout=lambda *args: None, convert_layout=lambda x, layout: x,
        arange=lambda first, last, layout: np.arange(first, last, dtype=np.int32).view(Tensor),
        load=lambda pointer: pointer.values[pointer.places],
    )  # fmt: skip
    space = {"gl": gl, "CAUSAL": 1, "opaque": lambda x: x}
    for module, name in ((parts, "columns_of"), *((forward_mods, name) for name in names)):
        space[name] = types.FunctionType(getattr(module, name).fn.__code__, space)
    return [space[name] for name in names]


class Pointer:
    def __init__(self, values, places=0):
        self.values, self.places = np.asarray(values, np.float32).view(Tensor), places

    def __add__(self, offset):
        return Pointer(self.values, self.places + offset)


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("pack", [1, 8])
def test_distances(kind, pack):
    load, subtract = functions("load_slopes", "subtract_distance")
    scale, row, begin, shift = np.float32(0.3), 448 * pack, 384, -37
    s = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32).view(Tensor)
    slopes = np.array([[0.5, -0.1, 0.0, 2.0**-8] * 4, [1.0, 0.3, -2.0, 0.7] * 4], np.float32)
    for batch, head in ((0, 0), (1, 1)):
        slope = load(s, Pointer(slopes.ravel()), 16, 1, np.array(batch).view(Tensor), np.array(head).view(Tensor), pack)
        got = np.asarray(subtract(s, scale, slope, row, begin, shift, kind, pack))
        query = (np.arange(64)[:, None] + row) // pack
        distance = query + shift - begin - np.arange(128)[None]
        mine = slopes[batch, head * pack + np.arange(64) % pack][:, None].astype(np.float64)
        exact = s.astype(np.float64) * float(scale) - mine * np.abs(distance)
        seen = distance >= 0 if kind == 1 else np.ones_like(distance, bool)
        assert seen.any()
        assert np.max(np.abs(got - exact)[seen]) < 2e-5
