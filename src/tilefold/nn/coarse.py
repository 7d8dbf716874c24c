"""The learned projections of the coarse branch: which mix of a block's keys and values stands for it."""

import torch
from torch import nn

from ..sparse import GridTiling


class CoarseProjection(nn.Module):
    """weight_k and weight_v of `tilefold.sparse.coarse`, starting at the mean over a block.

    slots: tokens of a block.  tiling: None for the kind "block", weights [slots] that start at 1 / slots (in a cut block the
    stage scales them by slots / tokens); the tiling of the one grid for the kind "dense", weights [blocks, blocks * slots]
    that start at 1 / tokens for the tokens of the row's own block.
    heads: each of so many key and value heads has its own, [heads, ...]; None: one for all."""

    def __init__(
        self,
        slots: int,
        tiling: GridTiling | None = None,
        heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.slots, self.tiling = slots, tiling
        shape = (slots,) if tiling is None else (tiling.block_count, tiling.padded)
        shape = shape if heads is None else (heads, *shape)
        self.weight_k = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.weight_v = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to the mean."""
        with torch.no_grad():
            for weight in (self.weight_k, self.weight_v):
                if self.tiling is None:
                    weight.fill_(1 / self.slots)
                else:
                    weight.copy_(block_means(self.tiling, weight.device))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(weight_k, weight_v): a call, so that whoever shards parameters can gather them first."""
        return self.weight_k, self.weight_v

    def extra_repr(self) -> str:
        return f"{list(self.weight_k.shape)}, {'block' if self.tiling is None else 'dense'}"


def block_means(tiling: GridTiling, device: torch.device) -> torch.Tensor:
    """fp32 [blocks, blocks * slots]: each row is the mean over the tokens of its block."""
    n, sizes = tiling.block_count, tiling.block_sizes(device)[:, None]
    row = (torch.arange(tiling.slots, device=device) < sizes) / sizes  # [blocks, slots]
    own = torch.eye(n, device=device)
    return (own[:, :, None] * row).view(n, tiling.padded)
