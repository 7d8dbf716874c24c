"""What the backward passes share on the host: the launch that makes delta, and strides of tensors that may be packed."""

from typing import Any

import torch

from ..types import Layout
from .attention import boxable, head_strides

__all__ = ["ROWS", "delta_launch", "readable", "sequence_strides"]

ROWS = 64  # rows of delta that one program makes


def delta_launch(problem: Any, total: int, rows: int, wide: bool, device: int) -> Any:
    """total: rows of all sequences, `rows` of each (a packed batch is one sequence here)."""
    from ..kernels.backward_delta import backward_delta
    from .launch import Launch

    constants = {"WIDE": wide, "DIM": problem.dim_v, "BLOCK_D": problem.block_v, "BLOCK_M": ROWS}
    grid = (-(-rows // ROWS) * problem.heads * (total // rows), 1, 1)
    return Launch(backward_delta, grid, constants, {"num_warps": 4}, device)


def sequence_strides(t: torch.Tensor, layout: Layout) -> tuple[int, ...]:
    """(batch, row, head); a packed tensor has batch stride 0."""
    return (0, *head_strides(t, layout)) if t.dim() == 3 else head_strides(t, layout)


def readable(dout: torch.Tensor) -> torch.Tensor:
    """dout, or its copy where no kernel could read it: as after sum(), every element at one address."""
    return dout if boxable(dout) and dout.stride(-1) == 1 else dout.contiguous()
