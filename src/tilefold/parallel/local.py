"""What one rank computes: its queries against keys that it holds or has received, as states that are merged; and the gradients.

A pair of shards is cut into pieces (plan/parallel/pieces.py), each one call of the library.  Their results are merged into an
fp32 state (out, lse).  Backward, each piece gets the lse and the output over *all* keys, with which its softmax weights and
the row term are those of the whole attention, so its gradients are plain summands."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import torch

from ..ops.backward import attention_backward
from ..ops.call import Call
from ..ops.dense import attention
from ..ops.source import Packed
from ..plan.parallel.pieces import Chain, chains_of, pieces_of
from ..plan.parallel.sharding import Spans
from .sums import State, Sum

Tensors = tuple[torch.Tensor, ...]


class Kernels(NamedTuple):
    """What folds one piece; for tests and for other libraries' kernels.  Both get a `Call` with causal, window, scale, softcap,
    deterministic and, where pieces were packed, `packed`; tensors [batch, seq, heads, dim] or [total, heads, dim], any strides.

    What they return is taken over: other pieces may be merged into it.

    forward(q, k, v, call) -> (out, lse).  backward((q, k, v, out, lse), dout, dlse or None, call, (True, True, True)) -> (dq, dk,
    dv, ...), out and lse being those over all keys."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]] = attention.forward
    backward: Callable[..., tuple[torch.Tensor | None, ...]] = partial(attention_backward.backward, whole=False)


class Pair(NamedTuple):
    """Which queries meet which keys: global token numbers, offsets of the sequences, the mask, what else the scores take, and
    whether gradients have to be the same bits every run."""

    q_starts: tuple[int, ...]
    k_starts: tuple[int, ...]
    window: tuple[int, int]
    scale: float | None
    softcap: float
    kernels: Kernels
    deterministic: bool

    def chains(self, q_spans: Spans, k_spans: Spans, batch: int) -> tuple[Chain, ...]:
        """The calls for a shard of queries and one of keys; only a batch of one can be packed."""
        pieces = pieces_of(q_spans, k_spans, self.q_starts, self.k_starts, self.window)
        return chains_of(pieces) if batch == 1 else tuple(chain for one in pieces for chain in chains_of((one,)))

    def rows(self, q_spans: Spans, steps: Iterable[Spans], batch: int) -> list[tuple[int, int]]:
        """The rows of queries that the calls of these steps give results for, in their order."""
        return [chain.area[:2] for spans in steps for chain in self.chains(q_spans, spans, batch)]

    def keys(self, q_spans: Spans, k_spans: Spans, batch: int) -> list[tuple[int, int]]:
        """The rows of keys that the calls of one step give gradients for."""
        return [chain.area[2:4] for chain in self.chains(q_spans, k_spans, batch)]


class Gradients:
    """The sums of dq, dk and dv.  keys: gives those of dk and dv once, when the first contribution to them is there."""

    def __init__(self, dq: Sum, keys: Callable[[], Sequence[Sum]]) -> None:
        self.dq, self._keys = dq, keys

    def of(self, i: int) -> Sum:
        """Of dq, dk or dv."""
        return self.dq if i == 0 else self.both[i - 1]

    @cached_property
    def both(self) -> Sequence[Sum]:
        """Of dk and dv."""
        return self._keys()


def fold(
    state: State, pair: Pair, spans: tuple[Spans, Spans], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Take keys into the state of q; spans: the global tokens of q and of k."""
    for chain in pair.chains(*spans, q.shape[0]):
        area = chain.area
        queries, keys, values = q[:, area.q_low : area.q_high], *(t[:, area.k_low : area.k_high] for t in (k, v))
        call = _call(pair, chain, q)
        if call.packed is None:
            part = pair.kernels.forward(queries, keys, values, call)
        else:
            part = tuple(t[None] for t in pair.kernels.forward(queries[0], keys[0], values[0], call))  # type: ignore[assignment]
        state.take(part, area.q_low, area.q_high)
        del part  # before the next one is made room for


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
        found = list(pair.kernels.backward(inputs, *douts, call, (True, True, True, False, False))[:3])
        for i, where in enumerate((rows, cols, cols)):
            part = found[i]
            assert part is not None
            found[i] = None  # each is given up as soon as it is taken
            sums.of(i).take((part if call.packed is None else part[None],), where.start, where.stop)
            del part


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
        source=packed,
        deterministic=pair.deterministic,
    )


@lru_cache(maxsize=4096)
def _offsets(cu: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(cu, dtype=torch.int32, device=device)
