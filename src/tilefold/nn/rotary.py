"""Rotary position embedding over time, height and width: a head's channels are shared among the three axes.

Source: RoPE (Su et al. 2021, arXiv:2104.09864); giving each axis its own channels is how video transformers extend it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..api import apply_rotary
from ..check import FLOATS, TensorSpec, bind, check_number
from ..errors import DtypeError, ShapeError, ValueRangeError
from ..ops import rms_norm_rotary
from ..ops.call import MAX_HEAD_DIM
from ..ops.watch import in_forward_mode, is_transformed, is_watched
from ..plan.matrix.rms_norm import MOST_COLUMNS
from ..sparse.kept import kept
from ..sparse.tiling import GridTiling, triple
from .bare import is_bare

Tables = tuple[torch.Tensor, torch.Tensor]
"""(cos, sin)."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_POSITIONS = (torch.int32, torch.int64, torch.float32, torch.float64)


def default_split(dim: int) -> tuple[int, int, int]:
    """Channels of t, h and w: as even as whole pairs allow, what is over going to t, then h.  128: (44, 42, 42).

    The last channel of an odd `dim` is not rotated."""
    pairs = dim // 2
    t, h, w = ((pairs + more) // 3 * 2 for more in (2, 1, 0))
    return t, h, w


@dataclass(frozen=True)
class Rotary3D:
    """How the channels of a head turn with a token's position (t, h, w).

    theta: the longest period is about 2 pi * theta tokens; one number, or one for each axis.
    split: channels of t, h and w, even numbers; None: `default_split` of the head dim.  Channels past their sum are left alone.
    interleaved: pair i is the channels (2i, 2i + 1), the channels of an axis lie together, as in most video transformers;
        otherwise (i, i + rotated / 2), as in most language models.  Pairs are numbered t first, then h, then w.

    Pair i of an axis with n pairs turns by position * theta ** (-i / n).  A frozen value without tensors: a module that holds it
    has no buffers.

    Raises ShapeError, DtypeError or ValueRangeError naming the field."""

    theta: float | tuple[float, float, float] = 10000.0
    split: tuple[int, int, int] | None = None
    interleaved: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.theta, Sequence):
            if len(self.theta) != 3:
                raise ShapeError(f"theta must be a number or three (t, h, w), got {self.theta!r}")
            object.__setattr__(self, "theta", tuple(check_number("theta", one, above=0) for one in self.theta))
        else:
            check_number("theta", self.theta, above=0)
        if not isinstance(self.interleaved, bool):
            raise DtypeError(f"interleaved must be a bool, got {self.interleaved!r}")
        if self.split is not None:
            object.__setattr__(self, "split", triple("split", self.split, low=0))
            if any(n % 2 for n in self.split):
                raise ValueRangeError(f"split must be even numbers of channels (t, h, w), got {self.split!r}")

    def channels(self, dim: int) -> tuple[int, int, int]:
        """The split of a head of `dim` channels; ValueRangeError if it has fewer than `split` names."""
        split = default_split(dim) if self.split is None else self.split
        if sum(split) > dim:
            raise ValueRangeError(f"split {split} is {sum(split)} channels, more than the head dim {dim}")
        return split

    def tables(self, positions: torch.Tensor, dim: int, dtype: torch.dtype = torch.float32) -> Tables:
        """(cos, sin) [..., rotated / 2] of positions [..., 3]; the angles are computed in `dtype`, fp32 or fp64."""
        angles = []
        thetas = self.theta if isinstance(self.theta, tuple) else (self.theta,) * 3
        for axis, (n, theta) in enumerate(zip(self.channels(dim), thetas, strict=True)):
            turn = theta ** -(torch.arange(0, n, 2, device=positions.device, dtype=dtype) / max(1, n))
            angles.append(positions[..., axis, None].to(dtype) * turn)
        angle = torch.cat(angles, -1)
        return angle.cos(), angle.sin()

    def tiled_tables(
        self, tiling: GridTiling, dim: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Tables:
        """`tables` of a tiled sequence, [blocks * slots, rotated / 2] each: made once for a grid and kept outside any module."""
        key = self, tiling, dim, dtype
        cos, sin = kept(key, device, lambda: torch.stack(self.tables(tiling.positions(device), dim, dtype))).unbind()
        return cos, sin


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [..., seq, heads, dim] with its first 2 * cos.shape[-1] channels turned; cos, sin [..., seq, pairs].

    By torch's operations, in the wider of x's dtype and that of the tables; returned in x's dtype.  Differentiable in x."""
    pairs = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turning = x[..., : 2 * pairs].to(torch.promote_types(x.dtype, cos.dtype))
    first, second = turning.unflatten(-1, (pairs, 2)).unbind(-1) if interleaved else turning.chunk(2, -1)
    both = first * cos - second * sin, first * sin + second * cos
    turned = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    turned = turned.to(x.dtype)
    return turned if 2 * pairs == x.shape[-1] else torch.cat((turned, x[..., 2 * pairs :]), -1)


def normed(
    x: torch.Tensor, norm: nn.Module | None, tables: Tables | None, interleaved: bool = True, together: bool = False
) -> torch.Tensor:
    """norm(x), if there is one, turned by the tables, if there are any: by one launch where norm is an RMSNorm that `is_bare` and
    kernels take the tensors, else by the module, in its weight's dtype if that is wider, and by `rotate`.

    x [batch, seq, heads, dim]; tables [1 or batch, seq, pairs] or [seq, pairs].  norm: of each head, or, together, of all
    of a token.  Returns x's dtype.  Differentiable once."""
    if tables is not None and _is_launched(x, *tables):
        cos, sin = (t.detach() for t in tables)
        one = cos.dim() == 2 or cos.shape[0] == 1
        if norm is None and one and x.shape[-1] <= MAX_HEAD_DIM:
            cos, sin = (t if t.dim() == 2 else t[0] for t in (cos, sin))
            return apply_rotary(x, cos, sin, interleaved=interleaved)
        if norm is not None and _is_rms_norm(norm, x, together):
            weight = norm.weight.view(x.shape[-2:] if together else x.shape[-1:])  # type: ignore[operator]
            return rms_norm_rotary(x, weight, cos, sin, eps=norm.eps, interleaved=interleaved)  # type: ignore[arg-type]
    if norm is not None:
        weight, kind = getattr(norm, "weight", None), x.dtype
        if weight is not None and weight.is_floating_point() and weight.itemsize > x.itemsize:
            x = x.to(weight.dtype)
        x = (norm(x.flatten(-2)).view(x.shape) if together else norm(x)).to(kind)
    return x if tables is None else rotate(x, *tables, interleaved)


def _is_launched(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether kernels take these, and nobody has to see torch's operations."""
    if not torch.compiler.is_compiling() and (is_transformed() or in_forward_mode() or is_watched((x, cos, sin))):
        return False
    fits = 0 < 2 * cos.shape[-1] <= x.shape[-1] and cos.shape[-2] == x.shape[1]
    return fits and all(t.dtype in FLOATS and t.stride(-1) == 1 for t in (x, cos, sin))


def _is_rms_norm(norm: nn.Module, x: torch.Tensor, together: bool) -> bool:
    """Whether norm is torch's RMSNorm, or Diffusers', of these rows, with a weight, and `is_bare`."""
    kind, weight, columns = type(norm), getattr(norm, "weight", None), x.shape[-1] * (x.shape[-2] if together else 1)
    if not (kind is nn.RMSNorm or (kind.__name__ == "RMSNorm" and kind.__module__.startswith("diffusers."))):
        return False
    if weight is None or weight.dtype not in FLOATS or weight.shape != (columns,) or columns > MOST_COLUMNS:
        return False
    eps: object = norm.eps
    return isinstance(eps, float) and eps > 0 and getattr(norm, "bias", None) is None and is_bare(norm, x.device)


def rotary_3d(
    x: torch.Tensor,
    positions: torch.Tensor | GridTiling,
    *,
    theta: float | tuple[float, float, float] = 10000.0,
    split: tuple[int, int, int] | None = None,
    interleaved: bool = True,
) -> torch.Tensor:
    """x with its channels turned by each token's position.

    Args:
        x: [batch, seq, heads, dim] fp16, bf16, fp32 or fp64.
        positions: (t, h, w) of each token, int32, int64, fp32 or fp64 [seq, 3] or [batch, seq, 3]; or the `GridTiling` in whose
            order x lies (`GridTiling(grid, cube=(1, 1, 1))` is row-major order).  May be fractions, and negative.
        theta, split, interleaved: see `Rotary3D`.

    Returns:
        Like x, in x's dtype; angles, sine, cosine and products in fp32 (fp64 if x is).  Differentiable in x.  Scores q k^T
        of turned q and k depend on positions only through their differences.

    Raises:
        ShapeError, DtypeError, DeviceError, ValueRangeError: naming the argument, before anything is computed.

    Source: Su et al. 2021, arXiv:2104.09864."""
    options = Rotary3D(theta, split, interleaved)
    sizes = bind((TensorSpec("x", "batch seq heads dim", _FLOATS),), {"x": x})
    wide = torch.promote_types(x.dtype, torch.float32)
    if isinstance(positions, GridTiling):
        if positions.padded != sizes["seq"]:
            raise ShapeError(
                f"x has shape {tuple(x.shape)}, expected {positions.padded} tokens for positions {positions}"
            )
        return rotate(x, *options.tiled_tables(positions, sizes["dim"], x.device, wide), interleaved)
    spec = (TensorSpec("positions", "seq axes / batch|1 seq axes", _POSITIONS),)
    bind(spec, {"positions": positions}, known={**sizes, "axes": 3}, beside=("x", x))
    return rotate(x, *options.tables(positions, sizes["dim"], wide), interleaved)
