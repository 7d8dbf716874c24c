"""What a trainable sparse layer has beside the dense one's weights: a gate for the coarse branch."""

import torch
from torch import nn

NAME = "sparse_branch"  # the attribute of a layer, and so a part of its parameters' names


class CoarseBranch(nn.Module):
    """The gate of one layer: a linear layer of the hidden states, one number for each token, head and channel.

    gate [B, S, channels] -> [B, S, heads, dim].  Weight and bias start at 0, so the layer starts as attention over the lists.
    The coarse branch has no weights: it is attention among the means of blocks.

    Source: VSA (Zhang et al. 2025, arXiv:2505.13389), whose to_gate_compress it is."""

    def __init__(self, channels: int, heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.gate = nn.Linear(channels, heads * dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Closed: the gate is 0 for every token."""
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate: torch.Tensor = self.gate(hidden).unflatten(-1, (self.heads, self.dim))
        return gate
