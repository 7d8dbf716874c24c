"""Whether context-parallel results are right: sampled rows and keys of one head beside fp64, at any length.

A rank looks at some of its own queries (out and dq) and some of its own keys (dk and dv) of one KV head; for those it needs all
tokens of that head, and nothing else in full."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilefold import parallel as tp
from tilefold import reference
from tilefold.bench.parallel.loads import Mask
from tilefold.plan.parallel.sharding import Sharding
from tilefold.reference import compare, deviating

ROWS = 32  # queries and keys that a rank looks at


class Inputs(NamedTuple):
    """One rank's tensors, [1, tokens, heads, dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


class Results(NamedTuple):
    """out, and the gradients where there are any."""

    out: torch.Tensor
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None


def inputs_of(
    sharding: Sharding, rank: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, device: torch.device
) -> Inputs:
    """Normally distributed, each rank's own.  dout is 0 in the heads 1 and on of KV head 0's group, so that one head is all that
    there is to check of its gradients."""
    random = torch.Generator(device).manual_seed(1000 + rank)
    tokens = sharding.length(rank)
    made = [
        torch.randn(1, tokens, n, dim, device=device, dtype=dtype, generator=random)
        for n in (*heads, heads[1], heads[0])
    ]
    made[3][:, :, 1 : heads[0] // heads[1]] = 0
    return Inputs(*made)


def judged(inputs: Inputs, results: Results, sharding: Sharding, rank: int, seen: Mask | None) -> list[str]:
    """What is wrong, [] if nothing is: a collective of all ranks.  KV head 0 and its query heads are looked at;
    seen: as of `Load`."""
    whole = [tp.gather_sequence(t[:, :, :1], sharding)[0, :, 0] for t in (inputs.k, inputs.v)]
    where = tp.positions(sharding, rank, inputs.q.device)
    chosen = torch.linspace(0, max(0, len(where) - 1), min(ROWS, len(where)), device=where.device).long()
    wrong = _rows(inputs, results, whole, where[chosen], chosen, seen) if len(where) else []
    if results.dk is None or results.dv is None:
        return wrong
    return wrong + _keys(inputs, results, whole, sharding, (where, where[chosen], chosen), seen)


def _deviating(exact: Callable[[], Any], inputs: Inputs) -> Any:
    """Parts of results are handed on in the inputs' dtype, and added up."""
    return deviating(exact, inputs.q.dtype, kept=inputs.q.dtype)


def _rows(
    inputs: Inputs,
    results: Results,
    whole: list[torch.Tensor],
    where: torch.Tensor,
    chosen: torch.Tensor,
    seen: Mask | None,
) -> list[str]:
    """out and dq of some queries of head 0: they depend on no other query."""

    def exact() -> tuple[torch.Tensor, torch.Tensor]:
        q = inputs.q[:, chosen, :1].double().requires_grad_()
        k, v = (t[None, :, None] for t in whole)
        mask = (
            None if seen is None else seen(where[:, None], torch.arange(k.shape[1], device=k.device)[None])[None, None]
        )
        out, _ = reference.attention(q, k, v, mask=mask)
        out.backward(inputs.dout[:, chosen, :1].to(out.dtype))
        assert q.grad is not None
        return out.detach(), q.grad

    found = exact(), _deviating(exact, inputs)
    pairs = [("out", results.out, 0)] + ([("dq", results.dq, 1)] if results.dq is not None else [])
    return _compared([(name, got[:, chosen, :1], found[0][i], found[1][i]) for name, got, i in pairs])


def _keys(
    inputs: Inputs, results: Results, whole: list[torch.Tensor], sharding: Sharding, places: tuple[torch.Tensor, ...],
    seen: Mask | None,
) -> list[str]:  # fmt: skip
    """dk and dv of some keys of KV head 0, over all queries of head 0; places: of own tokens, of the chosen ones, and which."""
    positions, where, chosen = places
    scale = 1 / math.sqrt(inputs.q.shape[3])
    own = inputs.q[0, :, 0]
    row = (inputs.dout[0, :, 0].double() * results.out[0, :, 0].double()).sum(1)
    exactly = torch.float64 if own.dtype == torch.float32 else torch.float32  # products of 16 bits fit into fp32
    sums = _lse(own, whole[0], positions, scale, seen, exactly)
    lse, delta = tp.gather_sequence(torch.stack([sums, row], 1)[None], sharding)[0].unbind(1)
    q, dout = (tp.gather_sequence(t[:, :, :1], sharding)[0, :, 0] for t in (inputs.q, inputs.dout))

    def exact() -> tuple[torch.Tensor, torch.Tensor]:
        score = (q.double() @ whole[0][where].double().mT) * scale
        if seen is not None:
            score = score.masked_fill(~seen(torch.arange(len(q), device=q.device)[:, None], where[None]), float("-inf"))
        p = torch.exp(score - lse[:, None])
        ds = p * (dout.double() @ whole[1][where].double().mT - delta[:, None]) * scale
        return ds.mT @ q.double(), p.mT @ dout.double()

    found = exact(), _deviating(exact, inputs)
    assert results.dk is not None
    assert results.dv is not None
    both = zip(("dk", "dv"), (results.dk, results.dv), *found, strict=True)
    return _compared([(name, got[0, chosen, 0], exact, plain) for name, got, exact, plain in both])


def _lse(
    q: torch.Tensor, k: torch.Tensor, where: torch.Tensor, scale: float, seen: Mask | None, dtype: torch.dtype
) -> torch.Tensor:
    """fp64 [queries] of own queries over all keys, made in dtype; as many queries at a time as 1 to 2 GiB of scores hold."""
    found = [q.new_empty(0, dtype=torch.float64)]
    rows = max(1, (1 << 28) // max(1, len(k)))
    for low in range(0, len(q), rows):
        score = (q[low : low + rows].to(dtype) @ k.to(dtype).mT) * scale
        if seen is not None:
            keys = torch.arange(len(k), device=q.device)[None]
            score = score.masked_fill(~seen(where[low : low + rows, None], keys), float("-inf"))
        found.append(score.logsumexp(1).double())
    return torch.cat(found)


def _compared(pairs: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[str]:
    verdicts = [(name, compare(got, exact, plain)) for name, got, exact, plain in pairs]
    return [f"{name}: {verdict}" for name, verdict in verdicts if not verdict.ok]
