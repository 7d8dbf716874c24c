"""What the backward passes share on the host: their bound launches, descriptors, and dout as a kernel can read it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...errors import Unsupported
from ...types import Layout
from ..dense.attention_parts import boxable, describe_box

if TYPE_CHECKING:
    from ...plan.limits import Tile
    from ...plan.problem import AttentionProblem

__all__ = [
    "ROWS",
    "Bound",
    "boxes_of",
    "delta_launch",
    "readable",
    "require_score_grad",
    "streamed",
    "tiled",
]

ROWS = 64  # rows of delta that one program makes


@dataclass(slots=True)
class Bound:
    """The three launches of a backward pass, each with the arguments that do not change from call to call."""

    plan: Any
    delta: Any
    delta_tail: tuple[Any, ...]
    queries: Any
    queries_tail: tuple[Any, ...]
    keys: Any
    keys_tail: tuple[Any, ...]
    boxes: tuple[Any, ...]  # of q, k, v, dout where they stream by; or none


def delta_launch(problem: "AttentionProblem", total: int, rows: int, wide: bool, device: int) -> Any:
    """total: rows of all sequences, `rows` of each (a packed batch is one sequence here)."""
    from ...kernels.backward_delta import backward_delta
    from ..launch import Launch

    constants = {"WIDE": wide, "DIM": problem.dim_v, "BLOCK_D": problem.block_v, "BLOCK_M": ROWS}
    grid = (-(-rows // ROWS) * problem.heads * (total // rows), 1, 1)
    return Launch(backward_delta, grid, constants, {"num_warps": 4}, device)


def tiled(fn: Any, tile: "Tile", grid: tuple[int, int, int], constants: dict[str, Any], device: int) -> Any:
    """The launch of a kernel with this tile; None for an empty grid."""
    from ..launch import Launch

    constants = {**constants, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return Launch(fn, grid, constants, options, device) if grid[0] else None


def boxes_of(
    problem: "AttentionProblem", queries: "Tile", keys: "Tile", tensors: tuple[torch.Tensor, ...], layout: Layout
) -> tuple[Any, ...]:
    """Descriptors of q, k, v, dout, each as the kernel that it streams through reads it: that of the other side's gradient."""
    n = problem
    rows = (keys.block_m, queries.block_n, queries.block_n, keys.block_m)
    widths = (n.block_qk, n.block_qk, n.block_v, n.block_v)
    return tuple(describe_box(t, layout, r, w) for t, r, w in zip(tensors, rows, widths, strict=True))


def streamed(
    bound: Bound, tensors: tuple[torch.Tensor, ...], statistics: tuple[torch.Tensor, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The tensors q, k, v, dout and the statistics as the kernel of dq reads them, and as that of dk and dv does: what streams
    by comes in boxes, if there are any."""
    if not bound.boxes:
        return (*tensors, *statistics), (*tensors, *statistics)
    q, k, v, dout = (box.over(t) for box, t in zip(bound.boxes, tensors, strict=True))
    return (tensors[0], k, v, tensors[3], *statistics), (q, tensors[1], tensors[2], dout, *statistics)


def readable(dout: torch.Tensor) -> torch.Tensor:
    """dout, or its copy where some kernel could not read it: after sum() every element is at one address, and a part of a larger
    gradient may begin anywhere."""
    if boxable(dout) and dout.stride(-1) == 1:
        return dout
    return dout.clone(memory_format=torch.contiguous_format)


def require_score_grad(score_mod: Any, score_grad: Any) -> None:
    """Unsupported if the derivative of the user's score mod is needed and nobody gave it."""
    if score_mod is not None and score_grad is None:
        raise Unsupported(
            "an input requires a gradient and score_mod is given: also give score_grad, a @triton.jit function of the same "
            "arguments that returns the derivative of the new score by the given one"
        )
