"""In the interpreter that the tests patch shapes, types and refusals are what they were."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.interpreter


@triton.jit
def pairs(Out, strides, SIZE: tl.constexpr):
    block = tl.zeros((SIZE, 2 * SIZE), tl.float32)
    other = tl.zeros((SIZE, SIZE), tl.float32)
    tl.static_assert(block.shape[1] == 2 * SIZE)
    tl.static_assert(other.shape[1] == SIZE)
    tl.static_assert(block.type.element_ty == tl.float32)
    (a, b), c = strides
    tl.store(Out + tl.arange(0, 2 * SIZE), tl.sum(block, 0) + a + b * c)


def test_shapes_and_tuples():
    """Tuples within tuples, two sizes of one element type, a size twice."""
    for size in (4, 8, 4):
        out = torch.zeros(2 * size)
        pairs[(1,)](out, ((1, 2), 3), size)
        assert out.tolist() == [7.0] * (2 * size)


def test_a_size_that_is_no_power_of_two_is_refused():
    with pytest.raises(InterpreterError, match="power of 2"):
        pairs[(1,)](torch.zeros(6), ((1, 2), 3), 3)


@triton.jit
def mixed(Out, Bytes, Longs, n, scale, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    small = tl.load(Bytes + at)
    wide = tl.load(Longs + at)
    tile = small[:, None] * wide[None, :] + n
    tile = tile * scale - 1
    tl.store(Out + at[:, None] * SIZE + at[None, :], tile.to(tl.float32) / 3 + (0.5 + at)[None, :])


def test_operands_of_other_types_and_shapes():
    """Casts, splats and broadcasts are found once for a pair of types: other values of them, other types and other numbers."""
    for turn in range(3):
        for dtype in (torch.int8, torch.float16, torch.bfloat16):
            for n, scale in ((3, 2), (-70000, 0.25), (2**33, 2), (0, float("nan"))):
                small, wide = (torch.arange(8) - 3 + turn).to(dtype), torch.arange(8) * 1000
                out = torch.empty(8, 8)
                mixed[(1,)](out, small, wide, n, scale, 8)
                tile = (small[:, None] * wide[None, :] + n) * scale - 1
                wanted = tile.float() / 3 + (0.5 + torch.arange(8))
                assert torch.allclose(out, wanted, rtol=1e-2 if dtype.is_floating_point else 1e-6, equal_nan=True)


@triton.jit
def wrong(Out, SIZE: tl.constexpr):
    tl.store(Out + tl.arange(0, SIZE), tl.arange(0, SIZE) + tl.arange(0, 2 * SIZE))


def test_shapes_that_do_not_fit_are_refused_each_time():
    for _ in range(2):
        with pytest.raises(InterpreterError, match="incompatible dimensions"):
            wrong[(1,)](torch.zeros(4), 4)


@triton.jit
def counted(Out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    total = at * 0 + 1
    for i in range(3):
        total += 1
        one = total * 1
        one += i
        total = one + 1
    tl.store(Out + at, total)


def test_a_number_that_is_a_tensor_once_keeps_its_value():
    for _ in range(2):
        out = torch.zeros(4, dtype=torch.int32)
        counted[(1,)](out, 4)
        assert out.tolist() == [1 + 3 * 2 + 3] * 4
