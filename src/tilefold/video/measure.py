"""What lists leave out of dense attention: pairs, mass and the output's error, and the least time that a GPU needs for them."""

from typing import NamedTuple

import torch

from ..api import attention
from ..plan.cost import bound
from ..plan.device import Device
from ..plan.sparse.video import VideoShape, dense_cost, stage_costs
from ..sparse import BlockIndex, GridTiling
from ..sparse_api import sparse_attention

Results = tuple[torch.Tensor, torch.Tensor]


class LeftOut(NamedTuple):
    """Of each query head, fp32 [heads].

    listed: the share of pairs of blocks.  mass: the mean share of a query's attention probability on them.  error: the output's
    relative L2 error."""

    listed: torch.Tensor
    mass: torch.Tensor
    error: torch.Tensor


def dense_results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiling: GridTiling, scale: float) -> Results:
    """(out [batch, T * H * W, heads, dim], lse [batch, heads, T * H * W]) of q, k, v in the tiled order over all keys."""
    out, lse = attention(*(tiling.untile(one) for one in (q, k, v)), scale=scale, return_lse=True)
    return out, lse


def left_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: BlockIndex, tiling: GridTiling, scale: float, dense: Results
) -> LeftOut:  # fmt: skip
    """What these lists leave out of `dense_results`.  A query's mass is exp(its lse over the lists - its lse over all keys)."""
    sizes = tiling.sizes(q.device)
    index = index.with_tensors(index.indices, index.counts, sizes, sizes)
    found, lse = sparse_attention(q, k, v, index, scale=scale, return_lse=True)
    out, all_lse = dense
    lse = tiling.untile(lse.transpose(1, 2)).transpose(1, 2)
    away = (tiling.untile(found).float() - out.float()).square().sum((0, 1, 3))
    error = (away / out.float().square().sum((0, 1, 3)).clamp_min(torch.finfo(torch.float32).tiny)).sqrt()
    listed = index.counts.float().mean((0, 2)) / index.kv_blocks
    return LeftOut(listed.expand(q.shape[2]), (lse - all_lse).exp().mean((0, 2)), error)


def least_seconds(shape: VideoShape, listed: float, device: Device) -> tuple[float, float]:
    """(sparse, dense): what attention of one layer needs at least, by the device's rates of products, memory and exponentials.

    listed: the share of pairs of blocks.  sparse: pooled scores, selection and attention over the lists.  Kernels take longer."""
    pairs = round(listed * shape.batch * shape.heads * shape.blocks**2)
    costs = stage_costs(shape, pairs, "pooled")
    sparse = sum(bound(costs[name], device, shape.dtype).seconds for name in ("coarse", "select", "fine"))
    return sparse, bound(dense_cost(shape), device, shape.dtype).seconds
