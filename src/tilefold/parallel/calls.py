"""Attention over tokens that lie on several ranks, each with its own queries, keys and values."""

from typing import Any, NoReturn

import torch

from ..errors import Unsupported
from ..keywords import refusing, unexpected, unexpected_of
from ..ops.call import window_of
from ..ops.watch import is_transformed
from ..plan.parallel.plan import ParallelPlan
from ..plan.parallel.problem import Links
from ..plan.parallel.sharding import Sharding
from ..types import Window
from . import schemes
from .group import ranks_of
from .job import OWN, Scores, Setting, agreed_job, plan_of, sizes_of, wanted
from .local import Kernels


@refusing
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sharding: Sharding,
    *,
    kv_sharding: Sharding | None = None,
    group: Any = None,
    scheme: str = "auto",
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = True,
    links: Links | None = None,
    kernels: Kernels | None = None,
    **others: NoReturn,
) -> Any:
    """`tilefold.attention` of sequences whose tokens are sharded over ranks: this rank's rows of what one process would compute
    on all tokens.  A collective: all ranks of the group call it, in the same order, and backward, too.

    Args:
        q: [batch, seq, heads, dim] of this rank's tokens, fp16, bf16 or fp32, any strides with a contiguous last dimension; or
            [seq, heads, dim].  Batch must be left out, or 1, if the sharding has several sequences.
        k, v: [batch, seq, kv_heads, dim or dim_v] of this rank's tokens, dtype of q.
        sharding: which tokens each rank has, from `shard`: one sequence, or packed ones.  Masks hold within each sequence.
        kv_sharding: of k and v, if they have other tokens than q: as many sequences, aligned to the bottom right of each.
        group: a ProcessGroup, DeviceMesh or Ranks, see `ranks_of`; default all processes.
        scheme: "ring" (K and V go round, transfers overlap the fold), "all_gather" (K and V of all ranks on each), "heads" (head
            exchange, Ulysses), "two_level" (heads within a node, a ring across), or "auto": the choice of `plan_parallel`.
        causal, window, scale, softcap: as for `tilefold.attention`, of the whole sequences.
        return_lse: also return the logarithm of each row's softmax denominator over all keys.
        deterministic: as for `tilefold.attention`, of the gradients.  False lets the kernels of one rank add in an order that
            changes from run to run, where that is faster; what ranks send each other is added in the same order anyway.
        links: what "auto" assumes of the machine; default `Links` of the group's ranks.
        kernels: what folds a pair of shards; default tilefold's.

    Returns:
        out, like q with dim_v; with return_lse (out, lse), lse [batch, heads, seq] or [heads, seq] fp32.  Both differentiable in
        q, k and v, once; the same bits every run, unless deterministic=False.  Partial results are merged, and gradients
        added, in fp32.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError, Unsupported: naming the argument; on every rank, if one
        has other arguments or refuses its own.  CommunicationError if a rank died or did not come within the group's timeout.

    Sources: Ring Attention (Liu et al. 2023, arXiv:2310.01889), striped and zigzag shards (Brandon et al. 2023,
    arXiv:2311.09431), DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509), both at once (Fang and Zhao 2024,
    arXiv:2405.07719)."""
    if others:
        raise unexpected_of(attention, others)
    if torch.compiler.is_compiling():
        raise Unsupported(
            "tilefold.parallel.attention runs eagerly: inside torch.compile call tilefold.attention under context_parallel"
        )
    ranks = ranks_of(group)
    setting = Setting(ranks, sharding, sharding if kv_sharding is None else kv_sharding, scheme, links, kernels or OWN)
    out, lse = eager_attention(setting, q, k, v, (causal, window, scale, softcap, deterministic), return_lse)
    return (out, lse) if return_lse else out


def eager_attention(
    setting: Setting, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, return_lse: object = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call under a setting."""
    if is_transformed():
        raise Unsupported("context-parallel attention under torch.func (grad, vmap) is not served")
    job = agreed_job(setting, q, k, v, scores, wanted(q, k, v), return_lse)
    if q.dim() == 4:
        return _Attention.apply(job, q, k, v)  # type: ignore[no-untyped-call,no-any-return]
    out, lse = _Attention.apply(job, q[None], k[None], v[None])  # type: ignore[no-untyped-call]
    return out[0], lse[0]


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sharding: Sharding, **options: Any) -> Any:
    """`attention` by a ring: K and V go from rank to rank, the transfer of the next ones overlaps the fold of these."""
    return attention(q, k, v, sharding, scheme="ring", **options)


def all_gather_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sharding: Sharding, **options: Any) -> Any:
    """`attention` with K and V of all ranks gathered on each: one collective, the memory of all keys."""
    return attention(q, k, v, sharding, scheme="all_gather", **options)


def head_exchange_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sharding: Sharding, **options: Any
) -> Any:
    """`attention` by head exchange (Ulysses): every rank gets all tokens of a share of the heads, and gives the results back."""
    return attention(q, k, v, sharding, scheme="heads", **options)


def two_level_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sharding: Sharding, **options: Any) -> Any:
    """`attention` by head exchange within a node and a ring across nodes; group: of two levels, see `ranks_of`."""
    return attention(q, k, v, sharding, scheme="two_level", **options)


def attention_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sharding: Sharding, **options: Any
) -> ParallelPlan:
    """The ParallelPlan that `attention(q, k, v, sharding, **options)` follows, without running it; `print` it.  No collective,
    unless the group's two levels have to be made."""
    unknown = [name for name in options if name not in (attention.__kwdefaults__ or {})]
    if unknown:
        raise unexpected("attention_plan", unknown[0], attention.__kwdefaults__ or {})
    ranks = ranks_of(options.get("group"))
    scheme, links, kernels = options.get("scheme", "auto"), options.get("links"), options.get("kernels") or OWN
    setting = Setting(ranks, sharding, options.get("kv_sharding") or sharding, scheme, links, kernels)
    sizes = sizes_of(setting, q, k, v)
    band = window_of(options.get("window"), options.get("causal", False))
    return plan_of(setting, q, sizes, band, wanted(q, k, v), options.get("deterministic", True))


class _Attention(torch.autograd.Function):
    """(out, lse) of one rank's queries; backward is a collective, too."""

    @staticmethod
    def forward(
        ctx: Any, job: schemes.Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (out, lse), saved = schemes.forward(job, q, k, v)
        ctx.job, ctx.kv_heads = job, k.shape[2]
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None
        if dout is None:
            q, v, exchanged = saved[0], saved[2], ctx.job.inner is not None
            assert dlse is not None
            shape = (dlse.shape[0], dlse.shape[2], dlse.shape[1], v.shape[3]) if exchanged else saved[3].shape
            dout = torch.zeros(shape, dtype=q.dtype, device=q.device)
        return None, *schemes.backward(ctx.job, saved, dout, dlse, ctx.kv_heads)
