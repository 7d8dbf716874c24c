"""The stages around the fine one in plain torch, for tests of what composes them; a stage that the library has is left alone."""

from typing import Any, NamedTuple

import pytest
import torch

import tilefold.sparse
from tilefold import BlockIndex, reference

INF = float("inf")


class CoarseResult(NamedTuple):
    out: torch.Tensor
    scores: torch.Tensor


class Selection(NamedTuple):
    index: BlockIndex
    gini: torch.Tensor
    tau: torch.Tensor
    mass: torch.Tensor


class SelectedRows(NamedTuple):
    keep: torch.Tensor
    gini: torch.Tensor
    tau: torch.Tensor
    mass: torch.Tensor


def valid_slots(sizes, seq, block, heads):
    """bool [B or 1, H or 1, blocks, block]: which slots of a block hold a token."""
    left = seq - torch.arange(-(-seq // block)) * block
    sizes = left.clamp(max=block) if sizes is None else torch.minimum(sizes, left.clamp(max=block).to(sizes.device))
    sizes = sizes[(None,) * (3 - sizes.dim())] if sizes.dim() != 2 else sizes[:, None]
    return torch.arange(block, device=sizes.device) < sizes[..., None]


def in_blocks(x, block):
    """[B, H, seq, D] to [B, H, blocks, block, D], zeros past the end."""
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % block))
    return x.unflatten(2, (-1, block))


def projected(x, weight, valid, kind):
    """Rows [B, H, blocks, D] of x [B, H, blocks, block, D]: the mean over valid tokens, or learned."""
    x = x * valid[..., None]
    if weight is None:
        return x.sum(3) / valid.sum(3, keepdim=True).clamp(min=1)
    if kind == "block":
        per_token = weight.to(x.dtype).expand(x.shape[1], -1)
        factor = x.shape[3] / valid.sum(3, keepdim=True).clamp(min=1)
        return torch.einsum("bhnsd,hs->bhnd", x, per_token) * factor.to(x.dtype)
    flat = x.flatten(2, 3)
    weight = weight.to(x.dtype).expand(x.shape[1], -1, -1)
    return torch.einsum("bhtd,hnt->bhnd", flat[:, :, : weight.shape[2]], weight)


def by_query_head(weight, q, k, layout):
    axis = 2 if layout == "bshd" else 1
    return weight.expand(k.shape[axis], *weight.shape[1:]).repeat_interleave(q.shape[axis] // k.shape[axis], 0)


def coarse(q, k, v, *, weight_k=None, weight_v=None, kind="block", reduction="mean", scale=None, block=64, block_sizes=None,
           query_sizes=None, layout="bshd", dtype=None):  # fmt: skip
    store = q.dtype
    q, k, v = (x.to(dtype or q.dtype) for x in (q, k, v))
    weight_k, weight_v = (
        w if w is None or w.dim() == 1 + (kind == "dense") else by_query_head(w, q, k, layout)
        for w in (weight_k, weight_v)
    )
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    seq, heads = q.shape[2], q.shape[1]
    k, v = (in_blocks(x.repeat_interleave(heads // x.shape[1], 1), block) for x in (k, v))
    valid_k = valid_slots(block_sizes, k.shape[2] * block if block_sizes is not None else seq, block, heads)
    valid_q = valid_slots(query_sizes, seq, block, heads)
    rows_k, rows_v = (projected(x, w, valid_k, kind) for x, w in ((k, weight_k), (v, weight_v)))
    blocks_q = in_blocks(q, block) * valid_q[..., None]
    count = valid_q.sum(3, keepdim=True).clamp(min=1)
    if kind == "pooled":
        blocks_q = blocks_q.sum(3, keepdim=True) / count[..., None]
    s = torch.einsum("bhisd,bhjd->bhisj", blocks_q, rows_k) * (q.shape[3] ** -0.5 if scale is None else scale)
    s = s.masked_fill(~(valid_k.any(3) | torch.tensor(kind == "dense"))[..., None, None, :], -INF)
    p = torch.softmax(s, -1)
    out = torch.einsum("bhisj,bhjd->bhisd", p, rows_v).expand(-1, -1, -1, block, -1) * valid_q[..., None]
    out = out.flatten(2, 3)[:, :, :seq]
    if kind == "pooled":
        scores = p[..., 0, :]
    elif reduction == "mean":
        scores = (p * valid_q[..., None]).sum(3) / count
    else:
        scores = (p * valid_q[..., None]).amax(3)
    out = out.transpose(1, 2) if layout == "bshd" else out
    return CoarseResult(out if dtype else out.to(store), scores.detach() if dtype else scores.detach().float())


def select(scores, *, method="gini", tau_min=None, tau_max=None, tau=None, top_p=None, top_k=None, sparsity=None, min_blocks=1,
           max_blocks=None, capacity=None, force_self=False, force_first=0, local_window=None, force=None, block_q=64, block_k=64,
           seq_q=None, seq_k=None, block_sizes=None, query_sizes=None, dtype=None):  # fmt: skip
    assert (tau, capacity, force_self, force_first, local_window, force) == (None, None, False, 0, None, None)
    tau_min, tau_max = 0.5 if tau_min is None else tau_min, 0.95 if tau_max is None else tau_max
    x = scores.detach().to(dtype or scores.dtype)
    n = x.shape[-1]
    total = x.sum(-1, keepdim=True)
    rank = torch.arange(1, n + 1, device=x.device)
    gini = (2 * (x.sort(-1).values * rank).sum(-1) / (n * total[..., 0]) - (n + 1) / n).clamp(0, 1)
    ordered, order = x.sort(dim=-1, descending=True, stable=True)
    before = (ordered / total).cumsum(-1) - ordered / total
    if method == "top_k":
        wanted = top_k if top_k is not None else max(1, round(n * (1 - sparsity)))
        limit = torch.ones_like(gini)
        keep = (rank <= wanted).expand_as(x)
    else:
        limit = torch.full_like(gini, top_p) if method == "top_p" else tau_min + (tau_max - tau_min) * (1 - gini)
        keep = before < limit[..., None]
    keep = (keep | (rank <= min_blocks)) & (rank <= (max_blocks or n))
    listed = torch.zeros_like(keep).scatter(-1, order, keep)
    index = BlockIndex.from_map(listed, block_q=block_q, block_k=block_k, seq_q=seq_q, seq_k=seq_k, block_sizes=block_sizes,
                                query_sizes=query_sizes)  # fmt: skip
    mass = (x * listed).sum(-1) / total[..., 0]
    return SelectedRows(listed, gini, limit, mass) if dtype else Selection(index, gini, limit, mass)


def fuse(coarse, fine, gate_coarse=None, gate_fine=None, *, layout="bshd", dtype=None):
    def gated(x, gate):
        if gate is not None and gate.dim() == 1:
            gate = gate if layout == "bshd" else gate[:, None]
        return x.to(wide) if gate is None else x.to(wide) * gate.to(wide)[..., None]

    wide = dtype or torch.float32
    terms = [gated(x, gate) for x, gate in ((coarse, gate_coarse), (fine, gate_fine)) if x is not None]
    return sum(terms).to(dtype or fine.dtype)


def oracle(stage):
    """The stage as tilefold.reference has it: computed in fp64 unless told otherwise, and a selection is a map."""

    def reference_stage(*args: Any, dtype: torch.dtype = torch.float64, **options: Any):
        return stage(*args, dtype=dtype, **options)

    return reference_stage


@pytest.fixture
def stages(monkeypatch):
    """Put the stand-ins where a stage is missing."""
    for stage in (coarse, select, fuse):
        for place, fn in ((tilefold.sparse, stage), (reference, oracle(stage))):
            if not callable(getattr(place, stage.__name__, None)):
                monkeypatch.setattr(place, stage.__name__, fn, raising=False)
