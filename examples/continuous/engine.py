"""Continuous batching: who runs in a step, with how many tokens, and who has to give back its pages.

A request knows some tokens (its prompt, then what was generated) and has the keys of the first few of them in the cache.  A step
computes the next tokens of every running request: one where only the newest is missing (decoding), a chunk where more are
(prefill, and again after a preemption that threw keys away).  Whoever is complete then gets one more token.  So prefill and
decoding are the same thing, and share one call of attention."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilefold import CacheBatch, OutOfPages, PagedKVCache

__all__ = ["Engine", "Limits", "Request", "StepRecord"]

# (tokens [T], cache, batch, rows) -> logits [len(rows), vocabulary] of the packed tokens at `rows`.
Model = Callable[[Tensor, PagedKVCache, CacheBatch, Tensor], Tensor]


@dataclass
class Request:
    """A prompt and what became of it.

    arrives: the step from which on it may run.  known: the prompt, then the tokens generated so far.  cached: how many of them
    have their keys and values in the cache.  first, finished: the steps of its first and of its last token.
    preempted: how often it lost its pages."""

    number: int
    prompt: tuple[int, ...]
    new_tokens: int
    arrives: int = 0
    ends: tuple[int, ...] = ()
    known: list[int] = field(default_factory=list)
    cached: int = 0
    sequence: int | None = None
    first: int | None = None
    finished: int | None = None
    preempted: int = 0

    def __post_init__(self) -> None:
        self.known = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        return self.known[len(self.prompt) :]

    @property
    def missing(self) -> int:
        """Known tokens that are not in the cache yet; at least one while it is not finished."""
        return len(self.known) - self.cached

    @property
    def longest(self) -> int:
        """Tokens in the cache when it is finished: the last one is never computed."""
        return len(self.prompt) + self.new_tokens - 1

    @property
    def complete(self) -> bool:
        made = len(self.known) - len(self.prompt)
        return made >= self.new_tokens or (made > 0 and self.known[-1] in self.ends)


@dataclass(frozen=True)
class Limits:
    """tokens: the most of one step.  chunk: the most of one request's in a step.  running: the most requests at a time.
    swap: preempted requests keep their keys in host memory; else they compute them again."""

    tokens: int = 512
    chunk: int = 256
    running: int = 32
    swap: bool = False


@dataclass(frozen=True)
class StepRecord:
    """What one step did.  prefill and decode: tokens; generated: tokens gained; after it: requests running, waiting and swapped
    out, pages in use, rows in them that hold no token."""

    step: int
    prefill: int
    decode: int
    generated: int
    admitted: int
    preempted: int
    resumed: int
    running: int
    waiting: int
    swapped: int
    pages: int
    wasted_rows: int


class Engine:
    """Runs requests over a model and a paged cache, oldest first.

    New requests are admitted when the whole of what they know, and of what those that run still have to write, fits into free
    pages; where pages run out all the same, the youngest gives back its own.  So the oldest always goes on, and everything
    finishes.  Raises ValueError for a request that no empty cache could hold."""

    def __init__(self, model: Model, cache: PagedKVCache, limits: Limits) -> None:
        for name in ("tokens", "chunk", "running"):
            if getattr(limits, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(limits, name)}")
        self.model, self.cache, self.limits = model, cache, limits
        self.step_number = 0
        self.future: deque[Request] = deque()  # by arrival
        self.waiting: deque[Request] = deque()
        self.swapped: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.finished: list[Request] = []
        self.peak = cache.statistics()  # of the step with the most pages, before anyone leaves
        self._batch: CacheBatch | None = None

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests, in any order of arrival."""
        for one in requests:
            if not one.prompt or one.new_tokens < 1:
                raise ValueError(f"request {one.number} needs a prompt and at least 1 new token")
            most = min(self.cache.allocator.max_tokens, self.cache.num_pages * self.cache.page_size)
            if one.longest > most:
                raise ValueError(
                    f"request {one.number} needs {one.longest} rows of the cache, which holds {most} of a sequence"
                )
        self.future = deque(sorted([*self.future, *requests], key=lambda one: (one.arrives, one.number)))

    @property
    def busy(self) -> bool:
        return bool(self.future or self.waiting or self.swapped or self.running)

    def step(self) -> StepRecord:
        """Admit and resume whom the free pages take, compute one batch, and retire whoever is complete."""
        if not (self.waiting or self.swapped or self.running) and self.future:
            self.step_number = max(self.step_number, self.future[0].arrives)  # nothing to do until then
        while self.future and self.future[0].arrives <= self.step_number:
            self.waiting.append(self.future.popleft())
        resumed, admitted = self._resume(), self._admit()
        batch, chosen, preempted = self._reserve()
        counts = dict(zip((one.number for one in chosen), batch.counts, strict=True))
        decode = sum(one.missing == 1 and len(one.known) > len(one.prompt) for one in chosen)
        generated = self._compute(batch, chosen)
        record = StepRecord(
            step=self.step_number,
            prefill=sum(counts.values()) - decode,
            decode=decode,
            generated=generated,
            admitted=admitted,
            preempted=preempted,
            resumed=resumed,
            running=len(self.running),
            waiting=len(self.waiting),
            swapped=len(self.swapped),
            pages=self.cache.num_pages - self.cache.free_pages,
            wasted_rows=(self.cache.num_pages - self.cache.free_pages) * self.cache.page_size
            - sum(one.cached for one in self.running),
        )
        if record.pages > self.peak.pages_used:
            self.peak = self.cache.statistics()
        self._retire()
        self.step_number += 1
        return record

    # ---------------------------------------------------------------- who runs

    def _pages(self, rows: int) -> int:
        return -(-rows // self.cache.page_size)

    def _promised(self) -> int:
        """Pages that those that run will still take for what they know and one token more."""
        return sum(max(0, self._pages(len(one.known) + 1) - self._pages(one.cached)) for one in self.running)

    def _resume(self) -> int:
        """Bring back who was swapped out, oldest first, while there is room for more than just their pages."""
        count = 0
        while self.swapped and len(self.running) < self.limits.running:
            one = self.swapped[0]
            if self.running and self._pages(len(one.known) + 1) + self._promised() > self.cache.free_pages:
                break
            assert one.sequence is not None
            self.cache.swap_in(one.sequence)
            self._run(self.swapped.popleft())
            count += 1
        return count

    def _admit(self) -> int:
        """Let waiting requests in, oldest first, while what they know fits beside what is promised; nobody overtakes those who
        were swapped out."""
        count = 0
        while self.waiting and not self.swapped and len(self.running) < self.limits.running:
            one = self.waiting[0]
            if self.running and self._pages(len(one.known) + 1) + self._promised() > self.cache.free_pages:
                break
            one.sequence = self.cache.add()
            self._run(self.waiting.popleft())
            count += 1
        return count

    def _run(self, one: Request) -> None:
        self.running.append(one)
        self.running.sort(key=lambda each: (each.arrives, each.number))

    def _choose(self) -> list[tuple[Request, int]]:
        """(request, tokens) of a step: a token for the oldest, one for each that decodes, then chunks with what is left."""
        left = self.limits.tokens
        counts = {one.number: 0 for one in self.running}
        for i, one in enumerate(self.running):
            if left and (i == 0 or one.missing == 1):
                counts[one.number], left = 1, left - 1
        for one in self.running:
            more = min(one.missing, self.limits.chunk) - counts[one.number]
            counts[one.number] += min(more, left)
            left -= min(more, left)
        return [(one, counts[one.number]) for one in self.running if counts[one.number]]

    def _reserve(self) -> tuple[CacheBatch, list[Request], int]:
        """Rows for the tokens of a step; the youngest give back their pages until there are enough."""
        preempted = 0
        while True:
            chosen = self._choose()
            ids, counts = [one.sequence for one, _ in chosen], [count for _, count in chosen]
            try:
                if self._batch is not None and list(self._batch.sequences) == ids:
                    self._batch.next(counts)  # the same sequences: their tensors on the device are used again
                else:
                    self._batch = self.cache.batch(
                        (i for i in ids if i is not None), counts, max_new=self._most(counts)
                    )
                return self._batch, [one for one, _ in chosen], preempted
            except OutOfPages:
                self._preempt(self.running.pop())
                preempted += 1

    def _most(self, counts: list[int]) -> int:
        return max(self.limits.tokens, sum(counts))

    def _preempt(self, one: Request) -> None:
        """Take the pages of a request, to go on later: from the copy in host memory, or by computing its tokens again."""
        assert one.sequence is not None
        one.preempted += 1
        if self.limits.swap and one.cached:
            self.cache.swap_out(one.sequence)
            self.swapped.appendleft(one)
            return
        self._forget(one)
        self.waiting.appendleft(one)

    def _forget(self, one: Request) -> None:
        assert one.sequence is not None
        self.cache.free(one.sequence)
        one.sequence, one.cached = None, 0

    # ---------------------------------------------------------------- what is computed

    def _compute(self, batch: CacheBatch, chosen: list[Request]) -> int:
        """One forward pass; each request that is complete up to its newest token gets another; how many did."""
        device = self.cache.device
        tokens: list[int] = []
        ready: list[tuple[Request, int]] = []
        for one, count in zip(chosen, batch.counts, strict=True):
            tokens += one.known[one.cached : one.cached + count]
            one.cached += count
            if not one.missing:
                ready.append((one, len(tokens) - 1))
        rows = torch.tensor([row for _, row in ready], dtype=torch.int64, device=device)
        logits = self.model(torch.tensor(tokens, dtype=torch.int64, device=device), self.cache, batch, rows)
        for (one, _), token in zip(ready, logits.argmax(-1).tolist(), strict=True):
            one.known.append(token)
            one.first = self.step_number if one.first is None else one.first
        return len(ready)

    def _retire(self) -> None:
        """Free the pages of those that have all their tokens."""
        for one in [one for one in self.running if one.complete]:
            one.finished = self.step_number
            self.running.remove(one)
            self._forget(one)
            self.finished.append(one)
