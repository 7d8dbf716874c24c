"""What flash_attn returns where tilefold returns something else."""

import torch

__all__ = ["flash_lse", "tilefold_lse"]

INFINITY = float("inf")


def flash_lse(lse: torch.Tensor) -> torch.Tensor:
    """lse with +inf where no key is seen, as flash_attn 2.8 has it (there -inf marks empty parts of a split only)."""
    return lse.masked_fill(lse == -INFINITY, INFINITY)


def tilefold_lse(lse: torch.Tensor) -> torch.Tensor:
    """The other way round."""
    return lse.masked_fill(lse == INFINITY, -INFINITY)
