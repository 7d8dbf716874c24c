"""What a policy is told, and what travels through one forward pass of a sparse model."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from ..sparse import BlockIndex, GridTiling


class Site(NamedTuple):
    """Where attention is about to happen.

    layer: number of the layer among the model's `layers` sparse ones, from 0.  heads: query heads.
    step: number of the denoising step, from 0; None where nobody said.
    tiling: the video's grid in cubes; q and k lie in its order.  scale: of the scores.
    memory: what the policy keeps for this layer from one call to the next."""

    layer: int
    layers: int
    heads: int
    step: int | None
    tiling: GridTiling
    scale: float
    memory: dict[str, Any]


Policy: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Site], BlockIndex | None]
"""A function of (q, k, site): q [batch, blocks * slots, heads, dim], k with kv_heads, of the video's tokens in the tiled order,
turned by the rotary embedding; slots past a block's tokens hold anything.  It returns the lists of the video's blocks, or None
for dense attention.  It is called without gradients, and reads nothing on the host if it is to run in CUDA graphs."""

Observer: TypeAlias = Callable[[Site, tuple[torch.Tensor, torch.Tensor, torch.Tensor], BlockIndex | None], None]
"""A function of (site, (q, k, v), lists) that is called before attention."""


class Text(NamedTuple):
    """Text tokens that are attended together with the video's.

    q, k, v: [batch, tokens, heads, dim].  lengths: int32 [batch], how many tokens at the start are seen as keys; None: all."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor | None = None


class Pass(NamedTuple):
    """One forward pass of a model: the tiling of its grid, the step, whether tokens travel in the tiled order; cos and sin
    [1 or batch, tokens, pairs] of the rotary embedding in the tokens' order, None without one."""

    tiling: GridTiling
    step: int | None
    tiled: bool
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
