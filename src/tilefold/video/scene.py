"""A rendered video as queries, keys and values: attention with the structure of real video, made from nothing but a seed.

Moving textures in front of a drifting background; patches of it through fixed random projections, turned by the rotary embedding.
Random q and k have no structure that a selection of blocks could find; here alike patches attend each other, near ones most.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import ShapeError, ValueRangeError
from ..nn.rotary import Rotary3D, rotate
from ..sparse import GridTiling

COLOURS = 3
WAVES = 4  # of a texture
SHARED = 0.8  # of a head's query and key projections
PEAKED = 3.0  # how much longer the queries of the sharpest head are than those of the most diffuse one

Uniform = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Scene:
    """What is rendered.

    frames, height, width: pixels.  objects: boxes and discs, each with a texture of its own and a constant velocity; they bounce
    at the borders.  speed: pixels a frame, the most on each axis; the background drifts at up to a fifth of it.  pan: pixels
    (down, right) a frame by which everything moves besides, the same in every video."""

    frames: int = 16
    height: int = 64
    width: int = 64
    objects: int = 5
    speed: float = 3.0
    pan: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        for name, low in (("frames", 1), ("height", 1), ("width", 1), ("objects", 0)):
            if getattr(self, name) < low:
                raise ValueRangeError(f"{name} must be at least {low}, got {getattr(self, name)}")


def render(scene: Scene, batch: int = 1, seed: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    """fp32 [batch, frames, 3, height, width] in 0 to 1: different videos, drawn on the CPU, so that a seed means the same ones
    everywhere.  The last object is in front."""
    draw = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        """[batch, 1, 1, 1, *shape]: one number a video."""
        return (torch.rand(batch, 1, 1, 1, *shape, generator=draw) * (high - low) + low).to(device)

    t, y, x = (
        torch.arange(n, device=device).view(shape)
        for n, shape in ((scene.frames, (1, -1, 1, 1)), (scene.height, (1, 1, -1, 1)), (scene.width, (1, 1, 1, -1)))
    )
    y, x = y - scene.pan[0] * t, x - scene.pan[1] * t
    slow, size = scene.speed / 5, min(scene.height, scene.width)
    drift = [uniform(-slow, slow) for _ in range(2)]
    picture = 0.6 * _texture(uniform, y - drift[0] * t, x - drift[1] * t, size / 5, size / 2)
    for number in range(scene.objects):
        centre = [
            _bounce(uniform(0, n) + uniform(-scene.speed, scene.speed) * t, n) for n in (scene.height, scene.width)
        ]
        dy, dx = y - centre[0], x - centre[1]
        tall, wide = dy / uniform(size / 8, size / 4), dx / uniform(size / 8, size / 4)
        inside = tall.square() + wide.square() < 1 if number % 2 else torch.maximum(tall.abs(), wide.abs()) < 1
        picture = torch.where(inside[..., None], _texture(uniform, dy, dx, size / 16, size / 4), picture)
    return picture.permute(0, 1, 4, 2, 3).contiguous()


def _bounce(place: torch.Tensor, size: int) -> torch.Tensor:
    """A line folded into 0 to size."""
    return size - (place % (2 * size) - size).abs()


def _texture(uniform: Uniform, y: torch.Tensor, x: torch.Tensor, short: float, long: float) -> torch.Tensor:
    """[batch, frames, height, width, 3] in 0 to 1 at these coordinates: plane waves of wavelengths from short to long, and a
    colour of its own."""
    total = uniform(-1, 1, COLOURS)
    for _ in range(WAVES):
        angle, length, phase = uniform(0, math.pi), uniform(short, long), uniform(0, 2 * math.pi, COLOURS)
        along = (y * angle.sin() + x * angle.cos()) * (2 * math.pi / length)
        total = total + (along[..., None] + phase).sin() / math.sqrt(WAVES)
    return (total / 4 + 0.5).clamp(0, 1)


def patches(video: torch.Tensor, patch: tuple[int, int, int]) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """([B, T * H * W, 3 * pixels of a patch], (T, H, W)): the video [B, frames, 3, height, width] in patches (frames, rows,
    columns), row-major.  Raises ShapeError if they do not divide it."""
    frames, height, width = video.shape[1], video.shape[3], video.shape[4]
    if frames % patch[0] or height % patch[1] or width % patch[2]:
        raise ShapeError(
            f"patch {patch} must divide the video's (frames, height, width), got {(frames, height, width)}"
        )
    grid = frames // patch[0], height // patch[1], width // patch[2]
    t, h, w = grid
    split = video.reshape(video.shape[0], t, patch[0], COLOURS, h, patch[1], w, patch[2])
    return split.permute(0, 1, 4, 6, 3, 2, 5, 7).flatten(4).flatten(1, 3), grid


def project(
    tokens: torch.Tensor,
    tiling: GridTiling,
    heads: int,
    dim: int,
    rotary: Rotary3D | None = Rotary3D(),  # noqa: B008 - a frozen value
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v fp32 [B, blocks * slots, heads, dim] of tokens [B, T * H * W, features], in tiled order.

    Features are centred and scaled to unit variance.  A head's query and key projections are Gaussian and mostly the same, so
    that a score is high where two patches look alike, as it is in trained models.  k has a root mean square of 1 before it is
    turned; the heads' q go from 1 (diffuse) to `PEAKED`.  v is another Gaussian projection."""
    draw = torch.Generator().manual_seed(seed)
    features = tokens.shape[-1]

    def gaussian() -> torch.Tensor:
        return (torch.randn(heads, features, dim, generator=draw) / math.sqrt(features)).to(tokens)

    centred = tokens - tokens.mean((0, 1))
    centred = tiling.tile(centred / centred.std().clamp_min(1e-6))
    common = SHARED * gaussian()
    rest = math.sqrt(1 - SHARED**2)
    weights = (common + rest * gaussian(), common + rest * gaussian(), gaussian())
    q, k, v = (torch.einsum("bnf,hfd->bnhd", centred, weight) for weight in weights)
    q, k = (one * one.square().mean(-1, keepdim=True).clamp_min(1e-6).rsqrt() for one in (q, k))
    q = q * torch.linspace(1, PEAKED, heads, device=q.device)[:, None]
    if rotary is None:
        return q, k, v
    tables = rotary.tiled_tables(tiling, dim, q.device, q.dtype)
    return rotate(q, *tables, rotary.interleaved), rotate(k, *tables, rotary.interleaved), v
