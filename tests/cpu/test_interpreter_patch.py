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
