"""How much of dense attention the selected blocks hold: mass kept and error of the output, as a function of sparsity."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilefold import sparse_attention
from tilefold.nn.sparse_video import whole_index
from tilefold.sparse import BlockIndex, CoarseOptions, GridTiling, SelectOptions
from tilefold.sparse import coarse as coarse_stage
from tilefold.sparse import select as select_stage
from tilefold.video.scene import Scene, patches, project, render

Fine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockIndex], torch.Tensor]


@dataclass(frozen=True)
class Reconstruction:
    """What is left of dense attention under one selection.

    sparsity: part of the pairs of blocks that is not listed.  mass: attention probability that the listed blocks hold, averaged
    over queries and heads; best: what as many blocks a row could hold at most; random: what they would hold if drawn blindly.
    error: relative L2 distance of the output from dense attention's; best_error: that of the best blocks."""

    select: SelectOptions
    sparsity: float
    mass: float
    best: float
    random: float
    error: float
    best_error: float

    def __str__(self) -> str:
        return (
            f"sparsity {self.sparsity:6.1%}  mass {self.mass:.4f} (best {self.best:.4f}, random {self.random:.4f})  "
            f"error {self.error:.4f} (best {self.best_error:.4f})"
        )


def fine_stage(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: BlockIndex) -> torch.Tensor:
    """The library's own."""
    out: torch.Tensor = sparse_attention(q, k, v, index)
    return out


def reconstruct(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiling: GridTiling,
    selections: Sequence[SelectOptions],
    coarse: CoarseOptions = CoarseOptions(),  # noqa: B008 - a frozen value
    fine: Fine = fine_stage,
) -> list[Reconstruction]:
    """One `Reconstruction` for each selection, without any training: the coarse stage takes the mean over a block's tokens.

    q [B, blocks * slots, heads, D], k and v [B, blocks * slots, kv_heads, D] in tiled order.  fine: (q, k, v, index) to out; on
    the CPU the reference is quicker than the interpreter.  Memory: one query block's scores over all keys, and a few maps of
    blocks."""
    sizes, slots = tiling.sizes(q.device), tiling.slots
    both: dict[str, Any] = {"block_sizes": sizes, "query_sizes": sizes}
    shape: dict[str, Any] = {"block_q": slots, "block_k": slots, "seq_q": tiling.padded, "seq_k": tiling.padded, **both}
    true = block_mass(q, k, tiling)
    dense = tiling.untile(fine(q, k, v, whole_index(tiling, q.device)))
    weights = tiling.block_sizes(q.device) / tiling.tokens
    scores = coarse_stage(q, k, v, kind=coarse.kind, reduction=coarse.reduction, block=slots, **both).scores
    rows = []
    for select in selections:
        index = select_stage(scores, **select.arguments(), **shape).index
        chosen = index.to_map().expand(true.shape)
        counts = chosen.sum(-1, keepdim=True)
        best = true.argsort(-1, descending=True).argsort(-1) < counts
        masses = [((true * one).sum(-1) * weights).sum(-1).mean() for one in (chosen, best)]
        errors = []
        for lists in (index, BlockIndex.from_map(best, **shape)):
            out = tiling.untile(fine(q, k, v, lists))
            errors.append(float((out - dense).norm() / dense.norm()))
        listed = counts.double().mean() / tiling.block_count
        blind = (counts[..., 0] / tiling.block_count * weights).sum(-1).mean()
        rows.append(Reconstruction(select, 1 - float(listed), *map(float, (*masses, blind)), *errors))
    return rows


def block_mass(q: torch.Tensor, k: torch.Tensor, tiling: GridTiling) -> torch.Tensor:
    """fp32 [B, heads, Q blocks, KV blocks]: probability that a query block's tokens put on a KV block's, in dense attention,
    averaged over the tokens; rows sum to 1."""
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    keys = k.repeat_interleave(group, 2).float()
    valid = torch.arange(tiling.slots, device=q.device) < tiling.block_sizes(q.device)[:, None]
    queries = q.float().unflatten(1, (tiling.block_count, tiling.slots))
    rows = []
    for row in range(tiling.block_count):
        s = torch.einsum("bqhd,bkhd->bhqk", queries[:, row, valid[row]], keys) * scale
        p = s.masked_fill(~valid.flatten(), float("-inf")).softmax(-1)
        rows.append(p.unflatten(-1, (tiling.block_count, tiling.slots)).sum(-1).mean(2))
    return torch.stack(rows, 2)


def scene_qkv(
    scene: Scene,
    patch: tuple[int, int, int],
    heads: int,
    dim: int,
    cube: tuple[int, int, int] = (4, 4, 4),
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], GridTiling]:
    """((q, k, v), tiling) of one rendered video: `render`, `patches` and `project` one after the other."""
    tokens, grid = patches(render(scene, 1, seed, device), patch)
    tiling = GridTiling(grid, cube)
    return project(tokens, tiling, heads, dim, seed=seed), tiling
