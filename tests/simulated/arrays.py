"""The kernels' own functions on plain integers and in numpy: arithmetic, ranges and masks rather than protocol."""

import types
from typing import Any

import numpy as np

from simulated import own_classes, own_functions


class Array(np.ndarray):
    """A tensor whose layout does not matter here; of a dtype that numpy does not know it stays what it is."""

    type = types.SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        if bitcast:
            return self.view(dtype)
        return self if dtype is None else self.astype(dtype)


def array(x, dtype=np.float32):
    return np.asarray(x, dtype).view(Array)


class Pointer:
    """Into numbers, at one place or at many."""

    def __init__(self, values, places=0):
        self.values, self.places = values, places

    def __add__(self, offset):
        return Pointer(self.values, self.places + offset)


def integers() -> dict[str, Any]:
    """The language of functions of integers."""
    gl = types.SimpleNamespace(
        constexpr=lambda x: x,
        maximum=max, minimum=min, where=lambda c, a, b: a if c else b, load=lambda pointer: pointer.values[pointer.places]
    )  # fmt: skip
    return {"gl": gl, "UNIT": 64, "FULL": 0, "CAUSAL": 1, "WINDOW": 2}


def arrays(**more) -> dict[str, Any]:
    """The language of functions of tensors."""
    language = {
        "int32": np.int32, "int64": np.int64, "float32": np.float32, "constexpr": lambda x: x, "abs": np.abs, "exp2": np.exp2,
        "where": lambda c, a, b: np.where(c, a, b).view(Array), "expand_dims": np.expand_dims, "zeros_like": np.zeros_like,
        "maximum": lambda a, b, propagate_nan=None: np.maximum(a, np.float32(b)) if propagate_nan else np.fmax(a, b),
        "minimum": lambda a, b, propagate_nan=None: np.minimum(a, b), "max": lambda x, axis: np.fmax.reduce(x, axis),
        "SliceLayout": lambda *args: None, "convert_layout": lambda x, layout: x,
        "full": lambda shape, value, *rest: np.full(shape, value).view(Array),
        "arange": lambda first, last, layout: np.arange(first, last, dtype=np.int32).view(Array),
        "load": lambda pointer: np.asarray(pointer.values)[pointer.places].view(Array), **more,
    }  # fmt: skip
    return {**integers(), "gl": types.SimpleNamespace(**language), "opaque": lambda x: x, "KEEP_NAN": True}


def functions(names, *found, **more):
    """Of (module, name) each, over these names and more."""
    names = own_functions({**names, **more}, [(module, (name,)) for module, name in found])
    return [names[name] for _, name in found]


def class_of(names, module, name, *found, **more):
    """The class `name` of a module, whose methods see these names, functions (module, name), and more."""
    names = own_functions(
        {**names, "field": lambda x: x, "held": lambda x: x, **more}, [(owner, (one,)) for owner, one in found]
    )
    return own_classes(names, [(module, (name,))])[name]
