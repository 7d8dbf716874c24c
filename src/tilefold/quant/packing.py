"""How codes of 8, 4, 3 and 2 bits lie in memory: planes of 32-column slabs, so that a kernel unpacks by one shift and one mask.

A code matrix [N, K] is stored as one plane of `bits` bits, or, at 3 bits, as a plane of the two low bits and one of the high bit.
A plane of w bits cuts K into blocks of 512 / w columns.  One row of one block is 64 bytes: 32 elements of 16 bits, lane 0 to 31,
each with 16 / w fields.  Field f of lane l is column 32 f + l of the block:

                    one element of 16 bits, w = 4                        a row of a block: columns 0 .. 127

      bit   15 ..  12  11 ..  8   7 ..  4   3 ..  0              lane        0     1     2   ...  31
           +---------+---------+---------+---------+             field 0     0     1     2   ...  31     slab 0
    lane l | 96 + l  | 64 + l  | 32 + l  |    l    |             field 1    32    33    34   ...  63     slab 1
           +---------+---------+---------+---------+             field 2    64    65    66   ...  95     slab 2
             field 3   field 2   field 1   field 0               field 3    96    97    98   ... 127     slab 3

So `(element >> w * f) & (2**w - 1)` over the 32 lanes is a slab: 32 neighbouring columns, in order, without a shuffle.  Groups
whose size is a multiple of 32 hold whole slabs.  Both planes of 3 bits have the same lanes: the low plane's block b, field f
(columns 256 b + 32 f + l) meets the high plane's block b // 2, field 8 (b % 2) + f.

Blocks come first, then rows: int32 [ceil(K / block), ceil(N / 64) * 64, 16], two lanes a word, the even one in the low half; so
the weights of a tile of rows and one block are one run of bytes, and `.view(torch.int16)` gives [.., .., 32], an element a lane.
Rows are padded to a multiple of 64 and columns to whole blocks, with zeros that `unpack` drops.
"""

import torch

from ..errors import DtypeError, ShapeError, ValueRangeError

BITS = (8, 4, 3, 2)
LANES = 32  # columns of a slab
ROWS = 64  # rows are padded to a multiple of it
ELEMENT = 16  # bits of a lane's element
WORDS = LANES * ELEMENT // 32  # int32 words of a row of a block


def check_bits(bits: int) -> None:
    """Raise ValueRangeError unless bits is 8, 4, 3 or 2."""
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in BITS:
        raise ValueRangeError(f"bits must be one of {BITS}, got {bits!r}")


def plane_widths(bits: int) -> tuple[int, ...]:
    """Bits of each plane, the low one first: (bits,), or (2, 1) for 3 bits."""
    check_bits(bits)
    return (2, 1) if bits == 3 else (bits,)


def block_columns(width: int) -> int:
    """Columns of K in a block of a plane of `width` bits: 64, 128, 256, 512 at 8, 4, 2, 1."""
    if width not in (8, 4, 2, 1):
        raise ValueRangeError(f"width must be 8, 4, 2 or 1 bits, got {width!r}")
    return LANES * ELEMENT // width


def packed_shapes(bits: int, shape: tuple[int, int]) -> tuple[tuple[int, int, int], ...]:
    """Shapes of the int32 planes that hold codes of `shape` [N, K]."""
    n, k = shape
    rows = -(-n // ROWS) * ROWS
    return tuple((-(-k // block_columns(width)), rows, WORDS) for width in plane_widths(bits))


def pack(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pack codes [N, K] (uint8, each below 2**bits) into planes: (plane, None), or (low two bits, high bit) for 3 bits.

    The planes are int32 as the module says.  Raises DtypeError, ShapeError, or ValueRangeError for a code of more bits."""
    check_bits(bits)
    if not isinstance(codes, torch.Tensor) or codes.dtype != torch.uint8:
        raise DtypeError(f"codes must be uint8, got {getattr(codes, 'dtype', type(codes).__name__)}")
    if codes.dim() != 2 or 0 in codes.shape:
        raise ShapeError(f"codes must be [N, K] with both at least 1, got {list(codes.shape)}")
    largest = int(codes.max())
    if largest >= 2**bits:
        raise ValueRangeError(f"codes must be below 2**bits = {2**bits}, got {largest}")
    if bits == 3:
        return _pack_plane(codes & 3, 2), _pack_plane(codes >> 2, 1)
    return _pack_plane(codes, bits), None


def unpack(packed: torch.Tensor, high: torch.Tensor | None, bits: int, shape: tuple[int, int]) -> torch.Tensor:
    """The codes uint8 [N, K] that `pack` packed: the inverse, without the padding.  Raises ShapeError or DtypeError."""
    planes = [packed] if high is None else [packed, high]
    wanted = packed_shapes(bits, shape)
    if len(planes) != len(wanted):
        raise ShapeError(f"{bits} bits lie in {len(wanted)} plane(s), got {len(planes)}")
    for name, plane, size in zip(("packed", "high"), planes, wanted, strict=False):
        check_plane(name, plane, size, bits, shape)
    codes = _unpack_plane(packed, plane_widths(bits)[0], shape)
    return codes if high is None else codes | (_unpack_plane(high, 1, shape) << 2)


def check_plane(name: str, plane: torch.Tensor, size: tuple[int, int, int], bits: int, shape: tuple[int, int]) -> None:
    """Raise DtypeError or ShapeError unless the plane is int32 of that size, and contiguous."""
    if not isinstance(plane, torch.Tensor) or plane.dtype != torch.int32:
        raise DtypeError(f"{name} must be int32, got {getattr(plane, 'dtype', type(plane).__name__)}")
    if tuple(plane.shape) != size or not plane.is_contiguous():
        kind = "" if plane.is_contiguous() else " (not contiguous)"
        raise ShapeError(
            f"{name} must be contiguous {list(size)} for {bits} bits of {list(shape)}, got {list(plane.shape)}{kind}"
        )


def _pack_plane(values: torch.Tensor, width: int) -> torch.Tensor:
    """One plane of `width` bits of values uint8 [N, K]."""
    n, k = values.shape
    columns, fields = block_columns(width), ELEMENT // width
    blocks, rows = -(-k // columns), -(-n // ROWS) * ROWS
    padded = torch.zeros(rows, blocks * columns, dtype=torch.uint8, device=values.device)
    padded[:n, :k] = values
    slabs = padded.view(rows, blocks, fields, LANES)
    elements = torch.zeros(rows, blocks, LANES, dtype=torch.int32, device=values.device)
    for f in range(fields):
        elements |= slabs[:, :, f].to(torch.int32) << (width * f)
    signed = torch.where(elements >= 1 << 15, elements - (1 << 16), elements).to(torch.int16)
    return signed.transpose(0, 1).contiguous().view(torch.int32)


def _unpack_plane(plane: torch.Tensor, width: int, shape: tuple[int, int]) -> torch.Tensor:
    """The values uint8 [N, K] of one plane."""
    n, k = shape
    elements = plane.view(torch.int16).transpose(0, 1)  # [rows, blocks, lanes]
    mask = (1 << width) - 1
    slabs = [((elements >> (width * f)) & mask).to(torch.uint8) for f in range(ELEMENT // width)]
    return torch.stack(slabs, 2).flatten(1)[:n, :k].contiguous()
