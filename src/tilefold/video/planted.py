"""A small video transformer whose heads attend as they were planted: something to calibrate without weights."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..api import attention
from ..errors import ValueRangeError
from ..sparse import GridTiling
from .adapters import Adapter

KINDS = ("local", "scattered", "global")
DIM = 32
SHARP = 14.0  # the score of a token with what it looks for


class Planted(nn.Module):
    """Layers of attention with a residual sum over the tokens of one grid, [batch, T * H * W, channels].

    Queries and keys depend on a token's place alone.  A "local" head looks around the token, within about half a cube;
    a "scattered" one at two cubes of the video that were drawn for its own; a "global" one at all tokens alike.

    grid, cube: of the tokens.  kinds: of the heads of each layer, one after the other.  channels: of a token.  seed: of what is
    drawn."""

    def __init__(
        self,
        grid: Sequence[int],
        kinds: Sequence[Sequence[str]],
        channels: int = 48,
        cube: Sequence[int] = (4, 4, 4),
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.tiling = GridTiling(tuple(grid), tuple(cube))  # type: ignore[arg-type]
        self.kinds = [list(one) for one in kinds]
        draw = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList([PlantedAttention(self.tiling, one, channels, draw) for one in self.kinds])

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden_states = hidden_states + layer(hidden_states)
        return hidden_states


class PlantedAttention(nn.Module):
    """q and k [tokens, heads, dim] are buffers; v and what comes out are drawn projections."""

    q: torch.Tensor
    k: torch.Tensor

    def __init__(self, tiling: GridTiling, kinds: Sequence[str], channels: int, draw: torch.Generator) -> None:
        super().__init__()
        parts = [_planted(kind, tiling, draw) for kind in kinds]
        for number, name in enumerate("qk"):
            self.register_buffer(name, torch.stack([part[number] for part in parts], 1))
        width = len(kinds) * DIM
        self.to_v, self.to_out = nn.Linear(channels, width, bias=False), nn.Linear(width, channels, bias=False)
        for linear in (self.to_v, self.to_out):
            weight = torch.randn(linear.weight.shape, generator=draw) / math.sqrt(linear.in_features)
            linear.weight = nn.Parameter(weight)

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [batch, tokens, heads, dim]."""
        q, k = (one.expand(x.shape[0], *one.shape).to(x.dtype) for one in (self.q, self.k))
        return q, k, self.to_v(x).unflatten(-1, (-1, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.to_out(attention(*self.parts(x)).flatten(2))
        return projected


class PlantedAdapter(Adapter):
    """Of `Planted`."""

    def layers(self, model: Any) -> Sequence[nn.Module]:
        layers: Sequence[nn.Module] = model.layers
        return layers

    def grid(self, model: Any, inputs: dict[str, Any]) -> tuple[int, int, int]:
        grid: tuple[int, int, int] = model.tiling.grid
        return grid

    def forward(self, layer: Any, attend: Any, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = layer.to_out(attend(*layer.parts(x)).flatten(2))
        return projected


def _planted(kind: str, tiling: GridTiling, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [tokens, dim]; the score of a token with what it looks for is `SHARP`, scale included."""
    long = math.sqrt(SHARP * math.sqrt(DIM))
    if kind == "global":
        return torch.zeros(tiling.tokens, DIM), torch.randn(tiling.tokens, DIM, generator=draw)
    if kind == "local":
        places = GridTiling(tiling.grid, (1, 1, 1)).positions("cpu").float()
        angles = places @ (torch.randn(3, DIM // 2, generator=draw) / torch.tensor(tiling.cube)[:, None] * 2)
        both = torch.cat([angles.cos(), angles.sin()], 1) / math.sqrt(DIM // 2) * long
        return both, both
    if kind == "scattered":
        blocks = tiling.block_count
        codes = nn.functional.normalize(torch.randn(blocks, DIM, generator=draw), dim=1) * long
        wanted = sum(codes[torch.randperm(blocks, generator=draw)] for _ in range(2))
        own = tiling.destination("cpu") // tiling.slots
        return wanted[own], codes[own]  # type: ignore[index]
    raise ValueRangeError(f"kinds must be of {', '.join(KINDS)}, got {kind!r}")
