"""fp64 oracle of the fuse stage."""

import torch

from .rounding import in_dtype


@in_dtype
def fuse(
    coarse: torch.Tensor | None,
    fine: torch.Tensor | None,
    gate_coarse: torch.Tensor | None = None,
    gate_fine: torch.Tensor | None = None,
    *,
    layout: str = "bshd",
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """gate_coarse * coarse + gate_fine * fine as `tilefold.sparse.fuse` defines it, computed in `dtype`."""
    terms = [
        branch.to(dtype) * (1 if gate is None else spread(gate, layout).to(dtype))
        for branch, gate in ((coarse, gate_coarse), (fine, gate_fine))
        if branch is not None
    ]
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def spread(gate: torch.Tensor, layout: str) -> torch.Tensor:
    """With four dimensions."""
    if gate.dim() == 1:
        return gate[:, None] if layout == "bshd" else gate[:, None, None]
    return gate if gate.dim() == 4 else gate[..., None]
