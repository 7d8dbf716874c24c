"""A video's tokens in cubes: the blocks that sparse attention lists are neighbours in time, height and width."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..errors import DtypeError, ShapeError, ValueRangeError
from ..ops.watch import is_transformed, is_watched, wants_gradient
from .kept import kept
from .validate import SMALLEST_BLOCK

AXES = ("t", "h", "w")
Maker = Callable[["GridTiling", torch.device], torch.Tensor]


@dataclass(frozen=True)
class GridTiling:
    """How the tokens of a (T, H, W) grid lie in blocks of one (t, h, w) cube each.

    grid: tokens (T, H, W), each at least 1; a sequence holds them in row-major order, token (a * H + b) * W + c.
    cube: tokens of a block on each axis.  Where they do not divide the grid, the cubes at its far edges are cut.

    Blocks are in row-major order of their cubes, as `tilefold.sparse.video_window(tiling.blocks, ...)` counts them.  Every block
    has t * h * w slots: first its tokens, in row-major order within the (cut) cube, then padding.  A frozen value of six
    numbers; the index tensors that it needs are made on the device when first asked for and kept outside it.

    Raises ShapeError, DtypeError or ValueRangeError naming grid or cube.

    Source: cubes as blocks, sliding tile attention (Zhang et al. 2025, arXiv:2502.04507)."""

    grid: tuple[int, int, int]
    cube: tuple[int, int, int] = (4, 4, 4)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", triple("grid", self.grid))
        object.__setattr__(self, "cube", triple("cube", self.cube))

    # ------------------------------------------------------------ facts

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Blocks on each axis (t, h, w)."""
        (a, b, c), (t, h, w) = self.grid, self.cube
        return -(-a // t), -(-b // h), -(-c // w)

    @property
    def block_count(self) -> int:
        """The number of blocks."""
        return math.prod(self.blocks)

    @property
    def slots(self) -> int:
        """Slots of a block: tokens of a whole cube."""
        return math.prod(self.cube)

    @property
    def tokens(self) -> int:
        """T * H * W."""
        return math.prod(self.grid)

    @property
    def padded(self) -> int:
        """Slots of all blocks: the length of a tiled sequence."""
        return self.block_count * self.slots

    @property
    def even(self) -> bool:
        """Whether the cubes divide the grid, so that there is no padding."""
        return self.padded == self.tokens

    # ------------------------------------------------------------ there and back

    def tile(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T * H * W, ...] of any dtype to [B, blocks * slots, ...]: one copy, padding slots are 0.  Differentiable."""
        self._check("x", x, self.tokens, "T * H * W")
        if not self.even:
            destination = self.destination(x.device)
            return x.new_zeros(x.shape[0], self.padded, *x.shape[2:]).index_copy_(1, destination, x)
        (a, b, c), (t, h, w) = self.blocks, self.cube
        return _turned(x, (a, t, b, h, c, w), (0, 1, 3, 5, 2, 4, 6))

    def untile(self, x: torch.Tensor) -> torch.Tensor:
        """[B, blocks * slots, ...] to [B, T * H * W, ...], the inverse of `tile`; padding is dropped.  Differentiable."""
        self._check("x", x, self.padded, "blocks * slots")
        if not self.even:
            return x.index_select(1, self.destination(x.device))
        return _turned(x, (*self.blocks, *self.cube), (0, 1, 4, 2, 5, 3, 6))

    def _check(self, name: str, x: torch.Tensor, length: int, meaning: str) -> None:
        if not isinstance(x, torch.Tensor):
            raise DtypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() < 2 or x.shape[1] != length:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}, expected [batch, {length}, ...]: {meaning} of grid {self.grid} in cubes "
                f"of {self.cube}"
            )

    # ------------------------------------------------------------ as tensors

    def block_sizes(self, device: torch.device | str | None = None) -> torch.Tensor:
        """int32 [blocks]: tokens of each block, 1 to slots."""
        return self._kept(_block_sizes, device)

    def sizes(self, device: torch.device | str | None = None) -> torch.Tensor | None:
        """`block_sizes`, or None where every block is whole: what `BlockIndex` and the stages take."""
        return None if self.even else self.block_sizes(device)

    def coordinates(self, device: torch.device | str | None = None) -> torch.Tensor:
        """int64 [blocks, 3]: (t, h, w) of each block, counted in blocks."""
        return self._kept(_coordinates, device)

    def destination(self, device: torch.device | str | None = None) -> torch.Tensor:
        """int64 [T * H * W]: the slot, counted over all blocks, of each token."""
        return self._kept(_destination, device)

    def positions(self, device: torch.device | str | None = None) -> torch.Tensor:
        """int64 [blocks * slots, 3]: (t, h, w) of the token in each slot, counted in tokens; 0 in padding slots."""
        return self._kept(_positions, device)

    def _kept(self, make: "Maker", device: torch.device | str | None) -> torch.Tensor:
        place = torch.device(device) if device is not None else torch.get_default_device()
        return kept((self, make), place, lambda: make(self, place))


def _turned(x: torch.Tensor, sizes: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """x with its dimension 1, of these sizes, in another order: a copy.  Without gradients numbers are copied 8 bytes at a time,
    which takes half as long as one by one."""
    wide = _in_words(x)
    split: torch.Tensor = (x if wide is None else wide).unflatten(1, sizes)
    turned = split.permute(*order, *range(7, split.dim())).flatten(1, 6)
    return turned if wide is None else turned.view(x.dtype)


def _in_words(x: torch.Tensor) -> torch.Tensor | None:
    """x as int64; None where that is no view, a gradient would be lost, or torch has to see each operation."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or is_transformed() or is_watched((x,)):
        return None
    if x.dim() < 3 or not x.is_floating_point() or x.itemsize >= 8 or x.is_neg() or wants_gradient((x,)):
        return None
    each, (*strides, last) = 8 // x.itemsize, x.stride()
    whole = all(n % each == 0 for n in (x.shape[-1], x.storage_offset(), *strides))
    return x.view(torch.int64) if whole and last == 1 else None


def triple(name: str, given: object, low: int = 1) -> tuple[int, int, int]:
    """Three ints (t, h, w) of at least `low`; ShapeError, DtypeError or ValueRangeError naming the axis."""
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != 3:
        raise ShapeError(f"{name} must be three ints (t, h, w), got {given!r}")
    for axis, value in zip(AXES, given, strict=True):
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise DtypeError(f"{name} must be three ints (t, h, w), got {value!r} for {axis} in {tuple(given)!r}")
        if value < low:
            raise ValueRangeError(
                f"{name} must be at least {low} on each axis, got {value} for {axis} in {tuple(given)!r}"
            )
    a, b, c = given
    return a, b, c


def block_cube(cube: Sequence[int]) -> tuple[int, int, int]:
    """A cube whose tokens may be a block of lists: together a power of two, at least 16; raises as `triple`, naming cube."""
    sides = triple("cube", cube)
    slots = math.prod(sides)
    if slots < SMALLEST_BLOCK or slots & (slots - 1):
        raise ValueRangeError(
            f"cube must hold a power of two of at least {SMALLEST_BLOCK} tokens, got {sides}: {slots}"
        )
    return sides


# Each from arithmetic on the device: no copy from the host, so that they can be made while a CUDA graph is captured.


def _axes(sizes: tuple[int, int, int], device: torch.device) -> list[torch.Tensor]:
    """int64 [a, 1, 1], [1, b, 1], [1, 1, c]: the coordinate on each axis."""
    shapes = ((-1, 1, 1), (1, -1, 1), (1, 1, -1))
    return [torch.arange(n, device=device).view(shape) for n, shape in zip(sizes, shapes, strict=True)]


def _triples(sizes: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """int64 [a * b * c, 3] in row-major order."""
    return torch.stack([one.expand(sizes) for one in _axes(sizes, device)], -1).view(-1, 3)


def _extents(tiling: GridTiling, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tokens of the cubes at these block coordinates, on each axis."""
    return [(n - at * size).clamp(max=size) for at, size, n in zip(blocks, tiling.cube, tiling.grid, strict=True)]


def _block_sizes(tiling: GridTiling, device: torch.device) -> torch.Tensor:
    t, h, w = _extents(tiling, _axes(tiling.blocks, device))
    return (t * h * w).to(torch.int32).view(-1)


def _coordinates(tiling: GridTiling, device: torch.device) -> torch.Tensor:
    return _triples(tiling.blocks, device)


def _destination(tiling: GridTiling, device: torch.device) -> torch.Tensor:
    tokens = _axes(tiling.grid, device)
    a, b, c = blocks = [one // size for one, size in zip(tokens, tiling.cube, strict=True)]
    t, h, w = (one % size for one, size in zip(tokens, tiling.cube, strict=True))
    _, deep_h, deep_w = _extents(tiling, blocks)
    _, rows, columns = tiling.blocks
    block = (a * rows + b) * columns + c
    return (block * tiling.slots + (t * deep_h + h) * deep_w + w).view(-1)


def _positions(tiling: GridTiling, device: torch.device) -> torch.Tensor:
    return tiling.tile(_triples(tiling.grid, device)[None])[0]
