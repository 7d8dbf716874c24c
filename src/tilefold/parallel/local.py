"""What one rank computes: its queries against keys that it holds or has received, as states that are merged; and the gradients.

A pair of shards is cut into pieces (plan/bands.py), each one call of the library.  Their results are merged into an fp32 state
(out, lse).  Backward, each piece gets the lse and the output over *all* keys, with which its softmax weights and the row term
are those of the whole attention, so its gradients are plain summands."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from ..ops.backward import attention_backward
from ..ops.call import Call, Packed
from ..ops.dense import attention
from ..plan.bands import Chain, chains_of, pieces_of
from ..plan.sharding import Spans

__all__ = ["Gradients", "Kernels", "Pair", "State", "add_gradients", "fold"]

Tensors = tuple[torch.Tensor, ...]


class Kernels(NamedTuple):
    """What folds one piece; for tests and for other libraries' kernels.  Both get a `Call` with causal, window, scale, softcap
    and, where pieces were packed, `packed`; tensors [batch, seq, heads, dim] or [total, heads, dim], any strides.

    forward(q, k, v, call) -> (out, lse).  backward((q, k, v, out, lse), dout, dlse or None, call, (True, True, True)) -> (dq, dk,
    dv, ...), out and lse being those over all keys."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]] = attention.forward
    backward: Callable[..., tuple[torch.Tensor | None, ...]] = partial(attention_backward.backward, whole=False)


class Pair(NamedTuple):
    """Which queries meet which keys: global token numbers, offsets of the sequences, the mask and what else the scores take."""

    q_starts: tuple[int, ...]
    k_starts: tuple[int, ...]
    window: tuple[int, int]
    scale: float | None
    softcap: float
    kernels: Kernels

    def chains(self, q_spans: Spans, k_spans: Spans, batch: int) -> tuple[Chain, ...]:
        """The calls for a shard of queries and one of keys; only a batch of one can be packed."""
        pieces = pieces_of(q_spans, k_spans, self.q_starts, self.k_starts, self.window)
        return chains_of(pieces) if batch == 1 else tuple(chain for one in pieces for chain in chains_of((one,)))


class State:
    """(out, lse) of queries over the keys seen so far: out [batch, seq, heads, dim_v], lse [batch, heads, seq], both in fp32
    (fp64 for fp64 queries); without keys 0 and -inf.  The first whole result is kept as it came until a second one comes."""

    def __init__(self, q: torch.Tensor, dim_v: int) -> None:
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.like, self.shape = q, (*q.shape[:3], dim_v)
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None

    def merge(self, out: torch.Tensor, lse: torch.Tensor, low: int, high: int) -> None:
        """Take in the result over more keys of the queries low to high."""
        if self.out is None and (low, high) == (0, self.shape[1]):
            self.out, self.lse = out, lse
            return
        mine, sums = self._own()
        mine, sums = mine[:, low:high], sums[:, :, low:high]
        total = torch.logaddexp(sums, lse.to(self.dtype))
        base = total.masked_fill(total == float("-inf"), 0.0)  # dead in both: both weights are exp(-inf - 0)
        old, new = (torch.exp(part - base).transpose(1, 2)[..., None] for part in (sums, lse.to(self.dtype)))
        mine.mul_(old).addcmul_(out, new)  # in the kernel's registers, whatever out's dtype
        sums.copy_(total)

    def _own(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.out is None or self.lse is None:
            rows = (self.shape[0], self.shape[2], self.shape[1])
            self.out = self.like.new_zeros(self.shape, dtype=self.dtype)
            self.lse = self.like.new_full(rows, float("-inf"), dtype=self.dtype)
        elif self.out.dtype != self.dtype:
            self.out, self.lse = self.out.to(self.dtype), self.lse.clone()
        return self.out, self.lse

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out in the queries' dtype and lse."""
        if self.out is None or self.lse is None:
            self._own()
        assert self.out is not None
        assert self.lse is not None
        return self.out.to(self.like.dtype), self.lse


class Gradients(NamedTuple):
    """Sums of dq, dk and dv, in fp32 (fp64 for fp64), of the shapes of q, k and v."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def fold(
    state: State, pair: Pair, spans: tuple[Spans, Spans], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Take keys into the state of q; spans: the global tokens of q and of k."""
    for chain in pair.chains(*spans, q.shape[0]):
        area = chain.area
        queries, keys, values = q[:, area.q_low : area.q_high], *(t[:, area.k_low : area.k_high] for t in (k, v))
        call = _call(pair, chain, q)
        if call.packed is None:
            out, lse = pair.kernels.forward(queries, keys, values, call)
        else:
            out, lse = (t[None] for t in pair.kernels.forward(queries[0], keys[0], values[0], call))
        state.merge(out, lse, area.q_low, area.q_high)


def add_gradients(
    sums: Gradients,
    pair: Pair,
    spans: tuple[Spans, Spans],
    saved: Tensors,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> None:
    """Add what these keys contribute to the gradients; saved: q, k, v, and out and lse over all keys."""
    q, k, v, out, lse = saved
    for chain in pair.chains(*spans, q.shape[0]):
        area = chain.area
        rows, cols = slice(area.q_low, area.q_high), slice(area.k_low, area.k_high)
        inputs: Tensors = q[:, rows], k[:, cols], v[:, cols], out[:, rows], lse[:, :, rows]
        douts = dout[:, rows], None if dlse is None else dlse[:, :, rows]
        call = _call(pair, chain, q)
        if call.packed is not None:
            inputs = tuple(t[0] for t in inputs)
            douts = douts[0][0], None if douts[1] is None else douts[1][0]
        found = pair.kernels.backward(inputs, *douts, call, (True, True, True, False, False))
        for total, part, where in zip(sums, found, (rows, cols, cols), strict=False):
            if part is not None:
                total[:, where].add_(part)


def _call(pair: Pair, chain: Chain, q: torch.Tensor) -> Call:
    """The options of one call.  Sequences of a batch of one are packed, if there are several."""
    area = chain.area
    packed = None
    if len(chain.pieces) > 1:
        cu_q, cu_k = (_offsets(cu, q.device) for cu in (chain.cu_q, chain.cu_k))
        packed = Packed(cu_q, cu_k, *chain.longest)
    return Call(
        causal=(area.left, area.right) == (-1, 0),
        window=None if area.right <= 0 and area.left < 0 else (area.left, area.right),
        scale=pair.scale,
        softcap=pair.softcap,
        packed=packed,
    )


@lru_cache(maxsize=4096)
def _offsets(cu: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(cu, dtype=torch.int32, device=device)
