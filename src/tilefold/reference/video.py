"""fp64 oracles of the fuse stage, and of the pipeline: those of its stages one after the other."""

from typing import TYPE_CHECKING, Any

import torch

from .coarse import coarse as coarse_oracle
from .rounding import in_dtype, stored
from .select import select as select_oracle
from .sparse import sparse_attention

if TYPE_CHECKING:
    from ..sparse import BlockIndex


@in_dtype
def sparse_video_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    coarse: Any = "default",
    select: Any = None,
    weight_k: torch.Tensor | None = None,
    weight_v: torch.Tensor | None = None,
    gate_coarse: torch.Tensor | None = None,
    gate_fine: torch.Tensor | None = None,
    index: "BlockIndex | None" = None,
    scale: float | None = None,
    block: int = 64,
    block_sizes: torch.Tensor | None = None,
    query_sizes: torch.Tensor | None = None,
    layout: str = "bshd",
    return_stages: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Any:
    """out, or (out, stages), as `tilefold.sparse.sparse_video_attention` defines them, computed in `dtype`.

    index: with a coarse branch, too, the lists to attend instead of the selected ones: a selection made from rounded scores may
    differ from this one where two are nearly equal, and what follows can then be held to the lists that were used."""
    from ..sparse import BlockIndex, CoarseOptions, SelectOptions, Stages

    coarse = CoarseOptions() if coarse == "default" else coarse
    select = SelectOptions() if select is None else select
    rows = 1 if layout == "bshd" else 2
    sizes: dict[str, Any] = {"block_sizes": block_sizes, "query_sizes": query_sizes}
    rough: Any = None
    chosen: Any = None
    if coarse is not None:
        rough = coarse_oracle(
            q, k, v, weight_k=weight_k, weight_v=weight_v, kind=coarse.kind, reduction=coarse.reduction, scale=scale, block=block,
            **sizes, layout=layout, dtype=dtype,
        )  # fmt: skip
        if index is None or return_stages:
            shape: dict[str, Any] = {"block_q": block, "block_k": block, "seq_q": q.shape[rows], "seq_k": k.shape[rows]}
            chosen = select_oracle(rough.scores, **select.arguments(), **shape, **sizes)
        if index is None:
            index = BlockIndex.from_map(
                chosen.keep.to(q.device), block_q=block, block_k=block, seq_q=q.shape[rows], seq_k=k.shape[rows],
                block_sizes=block_sizes, query_sizes=query_sizes,
            )  # fmt: skip
    assert index is not None
    fine, lse = sparse_attention(q, k, v, index, scale=scale, layout=layout, dtype=dtype)
    fine = stored(fine)
    if rough is None:
        out = fine if gate_fine is None else fuse(None, fine, None, gate_fine, layout=layout, dtype=dtype)
        return (out, Stages(None, None, None, None, None, index, fine, lse)) if return_stages else out
    out = fuse(stored(rough.out), fine, gate_coarse, gate_fine, layout=layout, dtype=dtype)
    if not return_stages:
        return out
    return out, Stages(rough.out, rough.scores, chosen.gini, chosen.tau, chosen.mass, index, fine, lse)


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
