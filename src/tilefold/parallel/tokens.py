"""Tensors of one rank from tensors of all tokens and back, positions for rotary embedding, labels and the mean of a loss."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..errors import DtypeError, ShapeError
from ..plan.parallel.sharding import Sharding, Spans, ordered
from .agree import agree
from .exchange import gather_flat, guarded
from .group import check_device, check_sharding, ranks_of


def shard_sequence(x: torch.Tensor, sharding: Sharding, rank: int, dim: int = 1) -> torch.Tensor:
    """The tokens of one rank along dim (1: [batch, seq, ...]; 0: packed), a view where they lie together.  Differentiable.

    Raises ShapeError if dim has not sharding.total tokens."""
    _check_all("x", x, sharding, dim)
    return take(x, sharding.spans(rank), dim)


def _check(name: str, x: object, sharding: object, dim: int) -> None:
    """DtypeError or ShapeError unless x is a tensor that has such a dimension and sharding a Sharding."""
    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"{name} must be a tensor, got {type(x).__name__}")
    check_sharding(sharding)
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(f"dim is {dim}, but {name} has {x.dim()} dimensions, shape {tuple(x.shape)}")


def _check_all(name: str, x: torch.Tensor, sharding: Sharding, dim: int) -> None:
    """The same, and ShapeError unless it has all tokens."""
    _check(name, x, sharding, dim)
    if x.shape[dim] != sharding.total:
        raise ShapeError(f"{name} has {x.shape[dim]} tokens in dim {dim}, the sharding has {sharding.total}")


def unshard_sequence(parts: Sequence[torch.Tensor], sharding: Sharding, dim: int = 1) -> torch.Tensor:
    """All tokens in their order from the tensors of all ranks, rank 0's first.  Differentiable.

    Raises ShapeError if there are not as many parts as ranks, or one has another length than its rank."""
    if len(parts) != sharding.ranks:
        raise ShapeError(f"parts has {len(parts)} tensors, the sharding has {sharding.ranks} ranks")
    for rank, part in enumerate(parts):
        _check(f"parts[{rank}]", part, sharding, dim)
        if part.shape[dim] != sharding.length(rank):
            raise ShapeError(
                f"parts[{rank}] has {part.shape[dim]} tokens in dim {dim}, rank {rank} has {sharding.length(rank)}"
            )
    spans = [sharding.spans(r) for r in range(sharding.ranks)]
    pieces = [parts[part].narrow(dim, row, rows) for part, row, rows in ordered(spans)]
    if not pieces:
        return parts[0]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def take(x: torch.Tensor, spans: Spans, dim: int) -> torch.Tensor:
    """Rows of x along dim, span after span."""
    if len(spans) == 1:
        return x.narrow(dim, spans[0][0], spans[0][1] - spans[0][0])
    if not spans:
        return x.narrow(dim, 0, 0)
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in spans], dim)


def gather_sequence(x: torch.Tensor, sharding: Sharding, group: object = None, dim: int = 1) -> torch.Tensor:
    """All tokens on every rank, in their order: a collective, for results and tests.  No gradient passes it.

    x: this rank's tensor; sizes but that of dim are the same on all ranks.  sharding: over the ranks of group.
    Raises ShapeError, DtypeError, DeviceError, on every rank if the ranks' arguments differ; CommunicationError."""
    group_ranks = ranks_of(group)
    flat, rank, ranks = group_ranks.flat, group_ranks.rank, group_ranks.size
    with agree(group_ranks, "gather_sequence", x) as facts:
        _check("x", x, sharding, dim)
        check_device("x", x, flat)
        check_sharding(sharding, group_ranks)
        if x.shape[dim] != sharding.length(rank):
            raise ShapeError(f"x has {x.shape[dim]} tokens in dim {dim}, rank {rank} has {sharding.length(rank)}")
        rest = tuple(x.movedim(dim, 0).shape[1:])
        facts |= {"dtype of x": x.dtype, "sizes of x beside its tokens": rest, "sharding": sharding}
    most = max(sharding.length(r) for r in range(ranks))
    rows = x.detach().movedim(dim, 0)
    if rows.is_floating_point() and rows.element_size() == 1:
        rows = rows.view(torch.uint8)  # gloo does not know fp8
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    every = rows.new_zeros((ranks * most, *rows.shape[1:]))
    with guarded(flat, "gathering a sequence"):
        gather_flat(every, padded, group=flat)
    parts = [every[r * most : r * most + sharding.length(r)] for r in range(ranks)]
    return unshard_sequence(parts, sharding, 0).movedim(0, dim).view(x.dtype)


def positions(sharding: Sharding, rank: int, device: torch.device | str | None = None) -> torch.Tensor:
    """[tokens of the rank] int64: each one's position in its sequence, for rotary embedding: cos[positions], sin[positions]."""
    pieces = [torch.arange(first, first + count, device=device) for first, count in sharding.positions(rank)]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)


def next_tokens(
    tokens: torch.Tensor, sharding: Sharding, rank: int | None, dim: int = 1, ignore: int = -100
) -> torch.Tensor:
    """The labels of one rank: for each of its tokens the one that follows in the whole sequence, `ignore` for a sequence's last.
    rank None: those of all tokens, in their order.

    tokens: all tokens along dim, the same on every rank.  Shifting a shard by itself would lose the label of its last token."""
    _check_all("tokens", tokens, sharding, dim)
    labels = tokens.roll(-1, dim)
    last = [stop - 1 for start, stop in zip(sharding.starts, sharding.starts[1:], strict=False) if stop > start]
    if last:
        labels.index_fill_(dim, torch.tensor(last, device=tokens.device), ignore)
    return labels if rank is None else shard_sequence(labels, sharding, rank, dim)


def causal_batch(
    input_ids: torch.Tensor,
    sharding: Sharding,
    group: object = None,
    labels: torch.Tensor | None = None,
    ignore: int = -100,
) -> dict[str, torch.Tensor]:
    """What a causal language model of transformers takes on this rank, `model(**causal_batch(...), use_cache=False)`: input_ids,
    position_ids, and labels that were shifted before they were cut.

    input_ids: [batch, tokens] of all tokens, the same on every rank; labels: likewise, not shifted, default input_ids; ignore:
    what a label is that does not count.  sharding: over the ranks of group, default all processes.
    The model's loss is then this rank's summand of the mean over all ranks' labels: sum losses, and parameters' gradients, over
    the ranks (where something averages the gradients, multiply the loss by the number of ranks).

    Needs a model whose loss function takes shift_labels and num_items_in_batch, as transformers' own for causal models does."""
    ranks = ranks_of(group)
    rank = ranks.rank
    _check("input_ids", input_ids, sharding, 1)
    check_sharding(sharding, ranks)
    if labels is not None and labels.shape != input_ids.shape:
        raise ShapeError(f"labels has shape {tuple(labels.shape)}, input_ids has {tuple(input_ids.shape)}")
    every = next_tokens(input_ids if labels is None else labels, sharding, None, ignore=ignore)
    where = positions(sharding, rank, input_ids.device)
    mine = shard_sequence(every, sharding, rank).contiguous()
    return {
        "input_ids": shard_sequence(input_ids, sharding, rank).contiguous(),
        "position_ids": where.expand(input_ids.shape[0], -1),
        "labels": mine,
        "shift_labels": mine,
        "num_items_in_batch": (every != ignore).sum().clamp(min=1),
    }


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks; the gradient goes to each rank's own share as it is."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, group: "dist.ProcessGroup") -> torch.Tensor:
        total = x.clone()
        with guarded(group, "adding up the losses"):
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def loss_mean(losses: torch.Tensor, keep: torch.Tensor | None = None, group: object = None) -> torch.Tensor:
    """The mean of the losses of all ranks' tokens, the same number on every rank; 0 if no token counts.

    losses: this rank's, any shape, floating point.  keep: bool, like losses: the tokens that count (labels != -100).
    Backward, each rank gets the gradient of the mean by its own tokens: sum parameters' gradients over the ranks (where something
    averages them, as DistributedDataParallel does, multiply the loss by the number of ranks).
    A mean of the ranks' own means would be wrong wherever ranks have different numbers of tokens that count.
    The first call compares the ranks, with a wait of the host: not in a CUDA graph's capture."""
    ranks = ranks_of(group)
    flat = ranks.flat
    if torch.compiler.is_compiling():
        _check_losses(losses, keep, flat)
    else:
        with agree(ranks, "loss_mean", losses) as facts:
            _check_losses(losses, keep, flat)
            facts["losses are float64"] = losses.dtype == torch.float64
    exact = losses.double() if losses.dtype == torch.float64 else losses.float()
    if keep is not None:
        exact = torch.where(keep, exact, 0.0)
    count = torch.tensor(float(exact.numel()), device=losses.device) if keep is None else keep.sum()
    count = count.to(exact.dtype)
    with guarded(flat, "counting the tokens of the loss"):
        dist.all_reduce(count, group=flat)
    total: torch.Tensor = _SumOverRanks.apply(exact.sum(), flat)  # type: ignore[no-untyped-call]
    return total / count.clamp(min=1)


def _check_losses(losses: object, keep: object, group: object) -> None:
    if not isinstance(losses, torch.Tensor):
        raise DtypeError(f"losses must be a tensor, got {type(losses).__name__}")
    if not losses.is_floating_point():
        raise DtypeError(f"losses must be floating point, got {losses.dtype}")
    check_device("losses", losses, group)
    if keep is None:
        return
    if not isinstance(keep, torch.Tensor) or keep.dtype != torch.bool:
        raise DtypeError(f"keep must be a bool tensor or None, got {getattr(keep, 'dtype', type(keep).__name__)}")
    if keep.shape != losses.shape:
        raise ShapeError(f"keep has shape {tuple(keep.shape)}, losses has {tuple(losses.shape)}")
