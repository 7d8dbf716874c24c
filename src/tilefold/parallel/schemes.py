"""Forward and backward of context-parallel attention: head exchange within a node, then a ring, or a gathering, across."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ..plan.parallel.pieces import turns_of
from ..plan.parallel.sharding import Sharding, Spans, union
from .exchange import Transfer, pack, pass_on, unpack
from .group import Ranks
from .heads import HeadExchange, spread, unspread
from .local import Gradients, Pair, add_gradients, fold
from .places import Arriving, Places
from .sums import State, Sum

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Job:
    """One kind of call.  scheme: of plan.parallel.SCHEMES.  q_tokens, k_tokens: who has which tokens.  pair: masks and scores."""

    ranks: Ranks
    scheme: str
    q_tokens: Sharding
    k_tokens: Sharding
    pair: Pair

    @property
    def inner(self) -> Any:
        """The group that exchanges heads, None if none does."""
        return {"heads": self.ranks.flat, "two_level": self.ranks.inner}.get(self.scheme)

    @property
    def outer(self) -> Any:
        """The group in which K and V travel, None if none does."""
        return {"heads": None, "two_level": self.ranks.outer}.get(self.scheme, self.ranks.flat)

    @cached_property
    def nodes(self) -> int:
        return 1 if self.outer is None else dist.get_world_size(self.outer)

    @cached_property
    def node(self) -> int:
        """The number of this rank's node (of this rank, where heads are not exchanged)."""
        return 0 if self.outer is None else dist.get_rank(self.outer)

    @cached_property
    def queries(self) -> tuple[tuple[Spans, ...], ...]:
        """The tokens of the queries of each rank of each node."""
        return self._members(self.q_tokens)

    @cached_property
    def keys(self) -> tuple[tuple[Spans, ...], ...]:
        """Of the keys."""
        return self._members(self.k_tokens)

    def _members(self, tokens: Sharding) -> tuple[tuple[Spans, ...], ...]:
        size = tokens.ranks // self.nodes
        return tuple(tuple(tokens.spans(n * size + place) for place in range(size)) for n in range(self.nodes))

    @cached_property
    def held(self) -> tuple[Spans, ...]:
        """The tokens of each node whose keys it holds."""
        return tuple(map(_together, self.keys))

    @cached_property
    def mine(self) -> Spans:
        """The tokens of this node's queries."""
        return _together(self.queries[self.node])

    @cached_property
    def turns(self) -> int:
        """Steps of the ring that anyone needs."""
        return turns_of(tuple(map(_together, self.queries)), self.held, *self.pair[:3])

    @cached_property
    def steps(self) -> tuple[Spans, ...]:
        """The tokens whose keys this rank's queries meet, one call after the other: its own first."""
        if self.nodes == 1:
            return (self.held[0],)
        if self.scheme == "all_gather":
            return self.held[self.node], _together([one for n, one in enumerate(self.held) if n != self.node])
        return tuple(self.held[(self.node - step) % self.nodes] for step in range(self.turns))

    @cached_property
    def exchanges(self) -> tuple[HeadExchange, HeadExchange]:
        """Of queries, and of keys."""
        return HeadExchange(self.inner, self.queries[self.node]), HeadExchange(self.inner, self.keys[self.node])

    @cached_property
    def others(self) -> Places:
        """The keys of the other nodes, in ascending order of tokens."""
        return Places(self.outer, self.held, own=False)


def _together(members: Sequence[Spans]) -> Spans:
    return union([span for spans in members for span in spans])


class Keys:
    """Shapes and sizes of the messages that carry K and V, or their gradients, of each node."""

    def __init__(self, job: Job, k: torch.Tensor, v: torch.Tensor) -> None:
        self.spans = job.held
        lengths = [sum(stop - start for start, stop in spans) for spans in self.spans]
        self.shapes = [[(t.shape[0], n, *t.shape[2:]) for t in (k, v)] for n in lengths]
        self.sizes = [sum(map(prod, each)) for each in self.shapes]


def forward(job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Tensors, Tensors]:
    """((out, lse) of this rank's queries, what the backward pass needs: q, k, v, out and lse after the head exchange)."""
    if job.inner is not None:
        size = dist.get_world_size(job.inner)
        for_q, for_k = job.exchanges
        (q,) = for_q.gather([q], "queries")
        k, v = for_k.gather([spread(k, size), spread(v, size)], "keys and values")
    mine, steps = job.mine, job.steps
    state = State(q, v.shape[3], job.pair.rows(mine, steps, q.shape[0]))
    if job.nodes > 1 and job.scheme != "all_gather":
        for spans, kv in _rotate(job, Keys(job, k, v), pack([k, v])):  # each fold hides the transfer of the next keys
            fold(state, job.pair, (mine, spans), q, *kv)
            del kv  # before the next message is made room for
    else:
        arriving = _gather(job, k, v) if job.nodes > 1 else None
        fold(state, job.pair, (mine, steps[0]), q, k, v)
        if arriving is not None:
            fold(state, job.pair, (mine, steps[1]), q, *arriving.wait())
            del arriving
    out, lse = state.result()
    del state
    saved = (q, k, v, out, lse)
    if job.inner is not None:
        (out,) = for_q.scatter([out], "outputs")
        (rows,) = for_q.scatter([lse.transpose(1, 2)[..., None]], "lse")
        lse = rows[..., 0].transpose(1, 2)
    return (out, lse), saved


def backward(job: Job, saved: Tensors, dout: torch.Tensor, dlse: torch.Tensor | None, kv_heads: int) -> Tensors:
    """dq, dk, dv of this rank's tokens, in the dtypes of q, k and v; kv_heads: of the call, before they were repeated."""
    q, k, v, _, _ = saved
    if job.inner is not None:
        for_q, for_k = job.exchanges
        (dout,) = for_q.gather([dout], "gradients of outputs")
        if dlse is not None:
            (rows,) = for_q.gather([dlse.transpose(1, 2)[..., None]], "gradients of lse")
            dlse = rows[..., 0].transpose(1, 2)
    mine = job.mine
    queries = Sum(q, job.pair.rows(mine, job.steps, q.shape[0]))
    if job.nodes > 1:
        work = _gradients_gathered if job.scheme == "all_gather" else _gradients_ring
        dk, dv = work(job, mine, saved, queries, dout, dlse)
    else:
        both = _own_keys(job, mine, k, v)
        add_gradients(Gradients(queries, lambda: both), job.pair, (mine, job.steps[0]), saved, dout, dlse)
        dk, dv = (one.result() for one in both)
        del both
    dq = queries.result()
    del queries, saved, q
    if job.inner is None:
        return dq, dk.to(k.dtype), dv.to(v.dtype)
    del dout  # before what is sent is made room for
    (dq,) = for_q.scatter([dq], "gradients of queries")
    if k.shape[2] * dist.get_world_size(job.inner) == kv_heads:  # nothing is left to be added up
        dk, dv = dk.to(k.dtype), dv.to(v.dtype)
    dk, dv = for_k.scatter([dk, dv], "gradients of keys and values")
    return dq, unspread(dk, kv_heads).to(k.dtype), unspread(dv, kv_heads).to(v.dtype)


# ---------------------------------------------------------------- by a ring


def _rotate(job: Job, keys: Keys, current: torch.Tensor) -> Any:
    """(tokens, (k, v)) of the ranks one after the other, own first; the next ones arrive while the caller works on these."""
    for step in range(job.turns):
        source, transfer = (job.node - step) % job.nodes, None
        if step + 1 < job.turns:
            incoming = current.new_empty(keys.sizes[(source - 1) % job.nodes])
            transfer = pass_on(current, incoming, job.outer, f"passing keys on, step {step + 1} of {job.turns - 1}")
        yield keys.spans[source], unpack(current, keys.shapes[source])
        if transfer is not None:
            transfer.wait()
            current = incoming


def _gradients_ring(
    job: Job, mine: Spans, saved: Tensors, queries: Sum, dout: torch.Tensor, dlse: torch.Tensor | None
) -> Sequence[torch.Tensor]:
    """K and V go round once more, the sums of their gradients one step behind them, and straight home after the last.

    The sums of the ranks before arrive while this one's summands are made, which are then added to them in place."""
    q, k, v, out, lse = saved
    exact = torch.promote_types(q.dtype, torch.float32)
    keys, turns = Keys(job, k, v), job.turns
    travelling = q.new_empty(keys.sizes[job.node], dtype=exact)
    transfer: Transfer | None = None
    for step, (spans, kv) in enumerate(_rotate(job, keys, pack([k, v]))):
        source, home = (job.node - step) % job.nodes, step + 1 == turns
        rows, own = job.pair.keys(mine, spans, q.shape[0]), travelling
        sums = Gradients(queries, partial(_awaited, transfer, unpack(own, keys.shapes[source]), rows))
        add_gradients(sums, job.pair, (mine, spans), (q, *kv, out, lse), dout, dlse)
        del kv
        found = [one.result() for one in sums.both]
        del sums
        if turns == 1:
            return found
        del found
        arriving = job.node if home else (source - 1) % job.nodes  # whose keys' gradients come
        travelling = q.new_empty(keys.sizes[arriving], dtype=exact)
        what = f"passing gradients of keys on, step {step + 1} of {turns}"
        transfer = pass_on(own, travelling, job.outer, what, 1 - turns if home else 1)
        del own
    assert transfer is not None
    transfer.wait()
    return unpack(travelling, keys.shapes[job.node])


def _awaited(transfer: Transfer | None, own: list[torch.Tensor], rows: list[tuple[int, int]]) -> list[Sum]:
    """Sums for dk and dv in a message: it has to have arrived, if it is not a new one."""
    if transfer is not None:
        transfer.wait()
    return [Sum(t, rows, t, transfer is not None) for t in own]


# ---------------------------------------------------------------- by gathering


def _own_keys(job: Job, mine: Spans, k: torch.Tensor, v: torch.Tensor) -> tuple[Sum, Sum]:
    """The sums of the gradients of the keys of the first step."""
    rows = job.pair.keys(mine, job.steps[0], k.shape[0])
    return Sum(k, rows), Sum(v, rows)


def _gather(job: Job, k: torch.Tensor, v: torch.Tensor) -> Arriving:
    """Begin to fetch the others' keys, which own ones are folded meanwhile."""
    mine = [k.contiguous(), v.contiguous()]
    return job.others.gather([mine] * job.nodes, "gathering keys and values")


def _gradients_gathered(
    job: Job, mine: Spans, saved: Tensors, queries: Sum, dout: torch.Tensor, dlse: torch.Tensor | None
) -> Sequence[torch.Tensor]:
    """K and V are gathered once more; each rank gets what all have for its keys, and adds it in the order of the ranks: the same
    bits every run."""
    q, k, v, out, lse = saved
    arriving, (near, far) = _gather(job, k, v), job.steps
    own = _own_keys(job, mine, k, v)
    add_gradients(Gradients(queries, lambda: own), job.pair, (mine, near), saved, dout, dlse)
    every = arriving.wait()
    del arriving
    exact = torch.promote_types(q.dtype, torch.float32)
    rows = job.pair.keys(mine, far, q.shape[0])

    def others() -> tuple[Sum, Sum]:
        dk, dv = (t.new_empty(t.shape, dtype=exact) for t in every)
        return Sum(dk, rows, dk), Sum(dv, rows, dv)

    sums = Gradients(queries, others)
    add_gradients(sums, job.pair, (mine, far), (q, *every, out, lse), dout, dlse)
    parts = [one.result() for one in sums.both]
    every.clear()
    del sums, others
    got = job.others.scatter(parts, "adding up the gradients of keys")
    parts.clear()
    return [_total(own[i].result(), [one[i] for one in got if one]) for i in (0, 1)]


def _total(own: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in the dtype of `own`; the first part is used up."""
    for part in parts[1:]:
        parts[0].add_(part)
    return torch.add(parts[0], own, out=torch.empty_like(own))
