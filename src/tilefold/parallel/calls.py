"""Attention over tokens that lie on several ranks, each with its own queries, keys and values."""

from typing import Any

import torch

from ..check import FLOATS, TensorSpec, bind, check_number
from ..errors import DtypeError, ShapeError, TilefoldError, Unsupported
from ..ops.call import check_kinds, window_of
from ..ops.watch import is_transformed, refuse_tangents
from ..plan.parallel import Links, ParallelPlan, ParallelProblem, plan_parallel
from ..plan.sharding import Sharding
from ..types import Window
from . import schemes
from .agree import agree, number_of, text_of
from .group import Ranks, ranks_of
from .local import Kernels, Pair

__all__ = [
    "all_gather_attention",
    "attention",
    "attention_plan",
    "head_exchange_attention",
    "ring_attention",
    "two_level_attention",
]

_OWN = Kernels()


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
    links: Links | None = None,
    kernels: Kernels | None = None,
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
        links: what "auto" assumes of the machine; default `Links` of the group's ranks.
        kernels: what folds a pair of shards; default tilefold's.

    Returns:
        out, like q with dim_v; with return_lse (out, lse), lse [batch, heads, seq] or [heads, seq] fp32.  Both differentiable in
        q, k and v, once; the same bits every run.  Partial results are merged, and gradients added, in fp32.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError, Unsupported: naming the argument; on every rank, if one
        has other arguments or refuses its own.  CommunicationError if a rank died or did not come within the group's timeout.

    Sources: Ring Attention (Liu et al. 2023, arXiv:2310.01889), striped and zigzag shards (Brandon et al. 2023,
    arXiv:2311.09431), DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509), both at once (Fang and Zhao 2024,
    arXiv:2405.07719)."""
    if torch.compiler.is_compiling() or is_transformed():
        raise Unsupported(
            "context-parallel attention runs eagerly: call it outside torch.compile (torch.compiler.disable) and torch.func"
        )
    ranks = ranks_of(group)
    other = sharding if kv_sharding is None else kv_sharding
    kernels = _OWN if kernels is None else kernels
    job: schemes.Job | None = None
    error: Exception | None = None
    sizes: dict[str, int] = {}
    try:
        check_kinds(return_lse)
        refuse_tangents({"q": q, "k": k, "v": v})
        sizes = _sizes(ranks, q, k, v, sharding, other, kernels)
        job = _job(ranks, q, sizes, sharding, other, scheme, (causal, window, scale, softcap), links, kernels)
    except (TilefoldError, TypeError, ValueError) as refused:
        error = refused
    needs = torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in (q, k, v))
    device = q.device if isinstance(q, torch.Tensor) else torch.device("cpu")
    agree(ranks, _fields(job, sizes, q, needs), error, device)
    assert job is not None
    packed = q.dim() == 3
    tensors = (t[None] for t in (q, k, v)) if packed else (q, k, v)
    out, lse = _Attention.apply(job, *tensors)  # type: ignore[no-untyped-call]
    if packed:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


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
    ranks = ranks_of(options.get("group"))
    other = options.get("kv_sharding") or sharding
    sizes = _sizes(ranks, q, k, v, sharding, other, options.get("kernels") or _OWN)
    band = window_of(options.get("window"), options.get("causal", False))
    return _plan(ranks, q, sizes, sharding, other, band, options.get("scheme", "auto"), options.get("links"))


# ---------------------------------------------------------------- checks and the plan


def _sizes(
    ranks: Ranks, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: Sharding, other: Sharding, kernels: Kernels
) -> dict[str, int]:
    for name, one in (("sharding", tokens), ("kv_sharding", other)):
        if not isinstance(one, Sharding):
            raise DtypeError(f"{name} must be a Sharding, made by tilefold.parallel.shard, got {type(one).__name__}")
        if one.ranks != ranks.size:
            raise ShapeError(f"{name} is over {one.ranks} ranks, the group has {ranks.size}")
    if tokens.sequences != other.sequences:
        raise ShapeError(f"sharding has {tokens.sequences} sequences, kv_sharding {other.sequences}")
    floats = FLOATS if kernels is _OWN else (*FLOATS, torch.float64)
    lead = "" if isinstance(q, torch.Tensor) and q.dim() == 3 else "batch "
    specs = (
        TensorSpec("q", f"{lead}seq_q heads dim_qk", floats, contiguous_last=True),
        TensorSpec("k", f"{lead}seq_k kv_heads dim_qk", floats, same_dtype_as="q", contiguous_last=True),
        TensorSpec("v", f"{lead}seq_k kv_heads dim_v", floats, same_dtype_as="q", contiguous_last=True),
    )
    sizes = {"batch": 1} | bind(specs, {"q": q, "k": k, "v": v})
    for name, one, side in (("q", tokens, "seq_q"), ("k", other, "seq_k")):
        if sizes[side] != one.length(ranks.rank):
            raise ShapeError(
                f"{name} has {sizes[side]} tokens, rank {ranks.rank} of the sharding has {one.length(ranks.rank)}"
            )
    if sizes["kv_heads"] == 0 or sizes["heads"] == 0 or sizes["heads"] % sizes["kv_heads"]:
        raise ShapeError(
            f"q has {sizes['heads']} heads and k has {sizes['kv_heads']}: the heads of q must be a multiple of those of k and v"
        )
    if tokens.sequences > 1 and sizes["batch"] != 1:
        raise ShapeError(f"q has batch {sizes['batch']}, but a sharding of {tokens.sequences} packed sequences needs 1")
    if min(sizes["dim_qk"], sizes["dim_v"]) < 1 or max(sizes["dim_qk"], sizes["dim_v"]) > 256:
        raise Unsupported(f"head dims are {sizes['dim_qk']} and {sizes['dim_v']} (v); accepted: 1 to 256")
    return sizes


def _job(
    ranks: Ranks,
    q: torch.Tensor,
    sizes: dict[str, int],
    tokens: Sharding,
    other: Sharding,
    scheme: str,
    scores: tuple[bool, Window | None, float | None, float],
    links: Links | None,
    kernels: Kernels,
) -> schemes.Job:
    causal, window, scale, softcap = scores
    band = window_of(tuple(window) if isinstance(window, list) else window, causal)
    if scale is not None:
        check_number("scale", scale, above=0.0)
    check_number("softcap", softcap, low=0.0)
    plan = _plan(ranks, q, sizes, tokens, other, band, scheme, links)
    return schemes.Job(
        ranks, plan.scheme, tokens, other, Pair(tokens.starts, other.starts, band, scale, float(softcap), kernels)
    )


def _plan(
    ranks: Ranks,
    q: torch.Tensor,
    sizes: dict[str, int],
    tokens: Sharding,
    other: Sharding,
    band: tuple[int, int],
    scheme: str,
    links: Links | None,
) -> ParallelPlan:
    named = {name: sizes[name] for name in ("batch", "heads", "kv_heads", "dim_qk", "dim_v")}
    dtype = str(q.dtype).removeprefix("torch.")
    problem = ParallelProblem(seq_q=tokens.total, seq_k=other.total, dtype=dtype, window=band, kind=tokens.kind,
                              backward=torch.is_grad_enabled(), sequences=tokens.sequences, **named)  # fmt: skip
    if links is None:
        links = Links(ranks.size, ranks.per_node)
    elif not isinstance(links, Links):
        raise DtypeError(f"links must be a Links or None, got {type(links).__name__}")
    if links.ranks != ranks.size or links.ranks_per_node not in (1, ranks.per_node):
        raise ShapeError(
            f"links are of {links.ranks} ranks, {links.ranks_per_node} to a node; the group has {ranks.size}, {ranks.per_node}"
        )
    if scheme != "two_level" or ranks.inner is not None:
        return plan_parallel(problem, links, scheme)
    raise Unsupported("scheme 'two_level' needs a group of two levels: ranks_of(group, ranks_per_node=...)")


def _fields(job: schemes.Job | None, sizes: dict[str, int], q: torch.Tensor, needs: bool) -> dict[str, tuple[int, str]]:
    """What all ranks have to have in common, as numbers and as text; the same names whatever was given."""
    counts = ("batch", "heads", "kv_heads", "dim_qk", "dim_v")
    found = {"function": (text_of("attention"), "attention")}
    found |= {name: (sizes.get(name, 0), str(sizes.get(name, 0))) for name in counts}
    texts: dict[str, object] = {"dtype of q": getattr(q, "dtype", None), "gradients wanted": needs}
    found |= {name: (text_of(value), str(value)) for name, value in texts.items()}
    if job is None:
        names = ("scheme", "sharding", "kv_sharding", "window", "scale", "softcap", "ranks per node")
        return found | dict.fromkeys(names, (0, ""))
    pair = job.pair
    scale = 0.0 if pair.scale is None else float(pair.scale)
    return found | {
        "scheme": (text_of(job.scheme), repr(job.scheme)),
        "sharding": (text_of(job.q_tokens), f"[{job.q_tokens}]"),
        "kv_sharding": (text_of(job.k_tokens), f"[{job.k_tokens}]"),
        "window": (text_of(pair.window), str(pair.window)),
        "scale": (number_of(scale), str(pair.scale)),
        "softcap": (number_of(pair.softcap), str(pair.softcap)),
        "ranks per node": (job.ranks.per_node, str(job.ranks.per_node)),
    }


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
