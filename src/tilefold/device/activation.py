"""Activations of a product's result and their slopes, in fp32.  KIND: one of the constants below.

Source of the GELUs: Hendrycks and Gimpel 2016, arXiv:1606.08415; the names are those of torch.nn.functional.gelu's `approximate`.
"""

import triton
import triton.language as tl

from .tile import narrow

NONE = tl.constexpr(0)
RELU = tl.constexpr(1)
SILU = tl.constexpr(2)
GELU = tl.constexpr(3)  # exact: x times the normal distribution's integral up to x
GELU_TANH = tl.constexpr(4)

SQRT_HALF = tl.constexpr(0.7071067811865476)
DENSITY = tl.constexpr(0.3989422804014327)  # of the normal distribution at 0
TWICE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): tanh(u) = 2 sigmoid(2 u) - 1
CUBIC = tl.constexpr(0.044715)
FAR = tl.constexpr(20.0)  # beyond it every slope is 0 or 1 to the last bit of fp32, and cubes stay finite


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid_slope(x):
    """sigmoid(x) * (1 - sigmoid(x)), without the difference, which has no digits left for large x."""
    e = tl.exp(-tl.abs(x))
    return e / ((1.0 + e) * (1.0 + e))


@triton.jit
def activate(x, KIND: tl.constexpr):
    """The activation of x; NaN stays NaN."""
    if KIND == RELU:
        return tl.where(x < 0, 0.0, x)
    elif KIND == SILU:
        return x * sigmoid(x)
    elif KIND == GELU:
        return 0.5 * x * (1.0 + tl.math.erf(x * SQRT_HALF))
    elif KIND == GELU_TANH:
        return x * sigmoid(TWICE * (x + CUBIC * x * x * x))
    else:
        return x


@triton.jit
def store_activated(acc, Out, Pre, p, m, KIND: tl.constexpr, EMULATE: tl.constexpr):
    """Store the activation of acc, and acc itself to Pre unless that is None; p: places in both, m: mask."""
    if Pre is not None:
        tl.store(Pre + p, narrow(acc, Pre.dtype.element_ty, EMULATE), mask=m)
    tl.store(Out + p, narrow(activate(acc, KIND), Out.dtype.element_ty, EMULATE), mask=m)


@triton.jit
def slope(x, KIND: tl.constexpr):
    """The derivative of SILU, GELU or GELU_TANH at x."""
    x = tl.where(x > FAR, FAR, tl.where(x < -FAR, -FAR, x))
    if KIND == SILU:
        return sigmoid(x) + x * sigmoid_slope(x)
    elif KIND == GELU:
        return 0.5 * (1.0 + tl.math.erf(x * SQRT_HALF)) + x * DENSITY * tl.exp(-0.5 * x * x)
    else:
        tl.static_assert(KIND == GELU_TANH)
        u = TWICE * (x + CUBIC * x * x * x)
        return sigmoid(u) + x * sigmoid_slope(u) * TWICE * (1.0 + 3.0 * CUBIC * x * x)
