"""Codes of few bits: what is packed comes back, lies where the picture says, and padding never shows."""

import pytest
import torch

from examples import examples
from tilefold.errors import DtypeError, ShapeError, ValueRangeError
from tilefold.quant import block_columns, pack, unpack
from tilefold.quant.packing import packed_shapes

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

BITS = (8, 4, 3, 2)
SHAPES = [(1, 1), (63, 31), (64, 32), (65, 129), (3, 511), (2, 513), (704, 40), (5, 2112), (130, 257)]


def random_codes(n: int, k: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpack_inverts_pack(bits, shape):
    codes = random_codes(*shape, bits)
    packed, high = pack(codes, bits)
    assert (high is not None) == (bits == 3)
    assert torch.equal(unpack(packed, high, bits, shape), codes)


@examples(60)
@hypothesis.given(bits=st.sampled_from(BITS), n=st.integers(1, 140), k=st.integers(1, 600), seed=st.integers(0, 2**31))
def test_any_shape_comes_back(bits, n, k, seed):
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed, high = pack(codes, bits)
    assert torch.equal(unpack(packed, high, bits, (n, k)), codes)
    again = pack(unpack(packed, high, bits, (n, k)), bits)
    assert torch.equal(again[0], packed) and (high is None or torch.equal(again[1], high))


def field(plane: torch.Tensor, width: int, row: int, column: int) -> int:
    """The field of `column` by the picture, from the words as Python integers."""
    block, inside = divmod(column, 512 // width)
    f, lane = divmod(inside, 32)
    word = int(plane[block, row, lane // 2]) & 0xFFFFFFFF
    return (word >> (16 * (lane % 2) + width * f)) & (2**width - 1)


@pytest.mark.parametrize("bits", BITS)
def test_codes_lie_where_the_picture_says(bits):
    codes = random_codes(67, 700, bits)
    packed, high = pack(codes, bits)
    for row in (0, 1, 66):
        for column in range(700):
            value = field(packed, 2 if bits == 3 else bits, row, column)
            if high is not None:
                value |= field(high, 1, row, column) << 2
            assert value == codes[row, column]


def test_the_planes_of_three_bits_share_lanes():
    """A kernel finds the high bit of a slab of the low plane in the same lanes, field 8 (b % 2) + f of block b // 2."""
    codes = random_codes(64, 1024, 3)
    low, high = (plane.view(torch.int16).int() & 0xFFFF for plane in pack(codes, 3))
    for b in range(4):
        for f in range(8):
            slab = (low[b] >> (2 * f) & 3) | (high[b // 2] >> (8 * (b % 2) + f) & 1) << 2
            assert torch.equal(slab.to(torch.uint8), codes[:, 256 * b + 32 * f :][:, :32])


@pytest.mark.parametrize("bits", BITS)
def test_padding_is_zero_and_dropped(bits):
    codes = torch.full((3, 5), 2**bits - 1, dtype=torch.uint8)
    planes = [plane for plane in pack(codes, bits) if plane is not None]
    bits_set = sum(bin(int(word) & 0xFFFFFFFF).count("1") for plane in planes for word in plane.flatten())
    assert bits_set == 15 * bits
    full = pack(torch.full((64, 512), 2**bits - 1, dtype=torch.uint8), bits)
    cut = [plane[: size[0]].contiguous() for plane, size in zip(full, packed_shapes(bits, (3, 5)), strict=False)]
    assert torch.equal(unpack(cut[0], cut[1] if bits == 3 else None, bits, (3, 5)), codes)


@pytest.mark.parametrize("bits", BITS)
def test_shapes_are_told_beforehand(bits):
    planes = [plane for plane in pack(random_codes(704, 300, bits), bits) if plane is not None]
    assert tuple(tuple(plane.shape) for plane in planes) == packed_shapes(bits, (704, 300))
    assert [block_columns(width) for width in (8, 4, 2, 1)] == [64, 128, 256, 512]


def test_bad_input_is_refused():
    codes = random_codes(4, 4, 4)
    with pytest.raises(ValueRangeError, match=r"bits must be one of \(8, 4, 3, 2\), got 5"):
        pack(codes, 5)
    with pytest.raises(ValueRangeError, match="bits must be one of"):
        pack(codes, True)
    with pytest.raises(DtypeError, match=r"codes must be uint8, got torch\.int32"):
        pack(codes.int(), 4)
    with pytest.raises(ShapeError, match=r"codes must be \[N, K\].*got \[0, 4\]"):
        pack(codes[:0], 4)
    with pytest.raises(ValueRangeError, match=r"below 2\*\*bits = 4, got 9"):
        pack(torch.full((2, 2), 9, dtype=torch.uint8), 2)
    packed, _ = pack(codes, 4)
    with pytest.raises(ShapeError, match=r"packed must be contiguous \[2, 64, 16\].*got \[1, 64, 16\]"):
        unpack(packed, None, 4, (4, 130))
    with pytest.raises(ShapeError, match=r"3 bits lie in 2 plane"):
        unpack(packed, None, 3, (4, 4))
    with pytest.raises(DtypeError, match="packed must be int32"):
        unpack(packed.long(), None, 4, (4, 4))
