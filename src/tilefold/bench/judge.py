"""Is a result right? Asked of every implementation before it is timed, against the fp64 reference on a sample.

The whole of a large case does not fit in fp64, and need not. Forward, each row of attention depends on its own query only, so a
random set of rows, with the first and the last among them, judges a kernel at any size. Backward, the gradients of a KV head
depend on that head alone, but on all its queries: some heads are computed in full, a stretch of queries at a time, so that no
[queries, keys] matrix is ever there in full.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tilefold import reference
from tilefold.bench.implementation import Inputs, Result
from tilefold.reference.tolerance import Comparison

ROWS = 64
HEADS = 2
STRETCH = 1 << 25  # scores that the reference of a backward holds at a time, of which it keeps a few copies in fp64


def verdict_of(results: Sequence[Tensor], pairs: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Comparison:
    """Of some comparisons (got, oracle, plain) the one nearest to its limit or furthest beyond; results: all of what was
    computed, the parts that were not sampled included, which has to be finite."""
    worst = max((reference.compare(*each) for each in pairs), key=lambda one: one.strain)
    return replace(worst, finite=all(bool(t.isfinite().all()) for t in results))


def sampled_rows(seq_q: int, count: int = ROWS, seed: int = 1) -> list[int]:
    """`count` different query rows, ascending, the first and the last among them; all rows if there are fewer."""
    if seq_q <= count:
        return list(range(seq_q))
    inner = torch.randperm(seq_q - 2, generator=torch.Generator().manual_seed(seed))[: count - 2] + 1
    return sorted([0, *inner.tolist(), seq_q - 1])


def sampled_heads(batch: int, kv_heads: int, count: int = HEADS, seed: int = 1) -> list[tuple[int, int]]:
    """`count` different (batch entry, KV head), ascending, the last among them; all if there are fewer."""
    everything = [(b, h) for b in range(batch) for h in range(kv_heads)]
    order = torch.randperm(len(everything) - 1, generator=torch.Generator().manual_seed(seed))[: count - 1]
    return sorted([*(everything[i] for i in order.tolist()), everything[-1]])


class Judge:
    """The reference of one case, computed once, on the device that holds the inputs.

    What it samples goes through `tilefold.reference.attention`, with the causal mask, the window and the lists of the true
    positions given as a boolean mask. The same one standard deviation off says how much error the inputs' dtype allows
    (`tilefold.reference.compare`). A backward is torch's gradient through that reference.
    lists: False judges what computes every pair, whatever the lists say.
    """

    def __init__(self, inputs: Inputs, count: int = ROWS, lists: bool = True) -> None:
        self.inputs, self.lists = inputs, lists
        self.rows = sampled_rows(inputs.q.shape[1], count)
        self.heads = sampled_heads(inputs.q.shape[0], inputs.problem.kv_heads)
        both = (torch.float64, inputs.q.dtype)
        self.want, self.plain = (self._gradients(d) if inputs.case.backward else [self._rows(d)] for d in both)

    def verdict(self, result: Result) -> Comparison:
        """Judge an output [B, Sq, H, Dv], or gradients (dq, dk, dv)."""
        backward = self.inputs.case.backward
        parts = self._sampled(result) if backward else [result[:, self.rows]]
        return verdict_of(result if backward else (result,), zip(parts, self.want, self.plain, strict=True))

    def _rows(self, dtype: torch.dtype) -> Tensor:
        """The sampled rows of the output [B, rows, H, Dv], one batch entry at a time."""
        i = self.inputs
        outs = []
        for b in range(i.q.shape[0]):
            mask = visible(i, self.rows, self.lists, b)
            q, k, v = i.q[b : b + 1, self.rows], i.k[b : b + 1], i.v[b : b + 1]
            outs.append(reference.attention(q, k, v, mask=mask, dtype=dtype)[0])
        return torch.cat(outs)

    def _sampled(self, result: Sequence[Tensor]) -> list[Tensor]:
        """Of each gradient the sampled heads: [tokens, heads of the group or 1, dim] of all, one after the other."""
        group = self.inputs.problem.group
        dq, dk, dv = result
        return [
            torch.cat([t[b, :, h * n : (h + 1) * n] for b, h in self.heads], 1)
            for t, n in ((dq, group), (dk, 1), (dv, 1))
        ]

    def _gradients(self, dtype: torch.dtype) -> list[Tensor]:
        """dq, dk, dv of the sampled heads, as `_sampled` cuts them out of a result."""
        each = [self._gradients_of(b, h, dtype) for b, h in self.heads]
        return [torch.cat(parts, 1) for parts in zip(*each, strict=True)]

    def _gradients_of(self, b: int, h: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """dq [Sq, group, D], dk [Sk, 1, D], dv [Sk, 1, Dv] of a KV head; dk and dv summed over the stretches in fp64."""
        i, group = self.inputs, self.inputs.problem.group
        assert i.grad is not None
        mine = slice(h * group, (h + 1) * group)
        k, v = (t[b : b + 1, :, h : h + 1] for t in (i.k, i.v))
        dk, dv = (torch.zeros(t.shape, dtype=torch.float64, device=t.device) for t in (k, v))
        dq = []
        for rows in self._stretches():
            # Leaves of the inputs' dtype would round their gradients.
            leaves = [t.detach().double().requires_grad_() for t in (i.q[b : b + 1, rows, mine], k, v)]
            mask = visible(i, rows, self.lists, b, mine)
            with torch.enable_grad():
                out = reference.attention(*leaves, mask=mask, dtype=dtype)[0]
                found = torch.autograd.grad(out, leaves, i.grad[b : b + 1, rows, mine].double())
            dq.append(found[0][0])
            dk += found[1]
            dv += found[2]
        return torch.cat(dq), dk[0], dv[0]

    def _stretches(self) -> Iterator[list[int]]:
        """All queries in stretches of few enough for the reference's memory."""
        queries, keys = self.inputs.q.shape[1], self.inputs.k.shape[1]
        step = max(1, STRETCH // max(1, keys * self.inputs.problem.group))
        for start in range(0, queries, step):
            yield list(range(start, min(start + step, queries)))


def visible(inputs: Inputs, rows: list[int], lists: bool = True, batch: int = 0, heads: slice | None = None) -> Tensor:
    """Which keys each of the rows of a batch entry sees: bool [1, H or 1, len(rows), seq_k], on the inputs' device.  Of a packed
    batch those of its own sequence, whose queries and keys have the same places.

    lists: narrow what causal and window allow to the blocks listed; heads: only those of the lists."""
    p, device = inputs.problem, inputs.q.device
    query = torch.tensor(rows, device=device)
    place = query[:, None] + (p.seq_k - p.seq_q)
    keys = torch.arange(inputs.k.shape[1], device=device)[None, :]
    left, right = p.sides
    seen = torch.ones(len(rows), inputs.k.shape[1], dtype=torch.bool, device=device)
    if inputs.offsets is not None:
        sequence = torch.searchsorted(inputs.offsets, torch.arange(inputs.k.shape[1], device=device), right=True)
        seen &= sequence[query][:, None] == sequence[None, :]
    if left >= 0:
        seen &= keys >= place - left
    if right >= 0:
        seen &= keys <= place + right
    if inputs.index is None or not lists:
        return seen[None, None]
    index = inputs.index.expand(p.batch, p.heads)
    mine = slice(None) if heads is None else heads
    numbers, counts = (t[batch : batch + 1, mine][:, :, query // index.block_q] for t in (index.indices, index.counts))
    meant = torch.arange(index.capacity, device=device) < counts[..., None]
    # Entries past the count go to a column of their own, which is cut off.
    blocks = torch.zeros(*numbers.shape[:3], index.kv_blocks + 1, dtype=torch.bool, device=device)
    blocks.scatter_(-1, torch.where(meant, numbers, index.kv_blocks).long(), True)
    return blocks[..., torch.arange(p.seq_k, device=device) // index.block_k] & seen
