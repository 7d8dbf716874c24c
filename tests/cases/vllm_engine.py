"""A small serving engine around tilefold's vLLM backend: requests that come and end, prompts in chunks, shared prefixes."""

import importlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

import tilefold

BLOCK, HEADS, KV_HEADS, DIM, WIDTH, WORDS, LAYERS, LONGEST = 16, 4, 2, 32, 64, 50, 2, 512


class Model:
    """A decoder whose every part but attention gives a token the same bits beside any others."""

    def __init__(self, dtype, device):
        g = torch.Generator().manual_seed(7)

        def draw(*shape):
            return (torch.randn(*shape, generator=g) / shape[-1] ** 0.5).to(device, dtype)

        self.dtype, self.device = dtype, device
        self.words, self.places = draw(WORDS, WIDTH) * 8, draw(LONGEST, WIDTH) * 4
        self.one = torch.ones(WIDTH, dtype=dtype, device=device)
        self.layers = [
            (
                draw((HEADS + 2 * KV_HEADS) * DIM, WIDTH) * 2,
                draw(WIDTH, HEADS * DIM),
                draw(2 * WIDTH, WIDTH),
                draw(WIDTH, 2 * WIDTH),
            )
            for _ in range(LAYERS)
        ]

    def logits(self, tokens, places, attend):
        """[tokens, words] of new tokens at their places; attend: (layer, q, k, v) to [tokens, HEADS * DIM]."""

        def times(x, weight, **more):
            return tilefold.matmul(x, weight.t(), numerics="invariant", **more)

        x = self.words[tokens] + self.places[places]
        for i, (mixed, out, wide, narrow) in enumerate(self.layers):
            parts = times(tilefold.rms_norm(x, self.one), mixed).view(len(tokens), -1, DIM)
            q, k, v = (part.contiguous() for part in parts.split((HEADS, KV_HEADS, KV_HEADS), 1))
            x = x + times(attend(i, q, k, v), out)
            x = x + times(times(tilefold.rms_norm(x, self.one), wide, activation="silu"), narrow)
        return times(tilefold.rms_norm(x, self.one), self.words, out_dtype=torch.float32)


@dataclass
class Request:
    """tokens: the prompt's, then those that were generated.  computed: of them in the cache.  blocks: of the cache, in order."""

    tokens: list[int]
    stop: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)


class Engine:
    """budget: new tokens a step, at most; seats: requests at a time.  prefixes: whole blocks of equal tokens are shared."""

    def __init__(self, model, budget=512, seats=64, prefixes=False, seed=0, **options):
        backend = importlib.import_module("tilefold.integrations.vllm_backend")
        self.model, self.budget, self.seats, self.prefixes = model, budget, seats, prefixes
        self.impls = [backend.TilefoldImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, **options) for _ in range(LAYERS)]
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=budget))
        self.builder = backend.TilefoldBuilder(
            SimpleNamespace(block_size=BLOCK), ["layer"], config, torch.device(model.device)
        )
        count = 40 * 16
        self.free = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        shape = (count, KV_HEADS, BLOCK, 2 * DIM)
        self.caches = [torch.full(shape, torch.nan, dtype=model.dtype, device=model.device) for _ in range(LAYERS)]
        self.known: dict[tuple[int, ...], int] = {}
        self.steps = self.reused = 0

    def generate(self, prompts, new):
        """[(log-probabilities fp32 [new, words], tokens)] of the likeliest tokens after each prompt."""
        requests = [Request(list(prompt), len(prompt) + new) for prompt in prompts]
        waiting = list(requests)
        running: list[Request] = []
        while waiting or running:
            while waiting and len(running) < self.seats:
                running.append(self._admit(waiting.pop(0)))
            self._step(running)
            for done in [one for one in running if len(one.tokens) == one.stop]:
                running.remove(done)
                if not self.prefixes:
                    self.free += done.blocks
        return [(torch.stack(one.logprobs), one.tokens[len(p) :]) for one, p in zip(requests, prompts, strict=True)]

    def _admit(self, request):
        whole = (len(request.tokens) - 1) // BLOCK  # a token is left to compute
        for n in range(1, whole + 1):
            block = self.known.get(tuple(request.tokens[: n * BLOCK])) if self.prefixes else None
            if block is None:
                break
            request.blocks.append(block)
            request.computed = n * BLOCK
            self.reused += 1
        return request

    def _step(self, running):
        """Those that generate first, then prompts, as far as the budget goes."""
        room, batch = self.budget, []
        for one in sorted(running, key=lambda one: len(one.tokens) - one.computed > 1):
            count = min(len(one.tokens) - one.computed, room)
            if count:
                batch.append((one, count))
                room -= count
                while len(one.blocks) * BLOCK < one.computed + count:
                    one.blocks.append(self.free.pop())
        tokens, places, slots, starts = [], [], [], [0]
        for one, count in batch:
            at = range(one.computed, one.computed + count)
            tokens += one.tokens[at.start : at.stop]
            places += at
            slots += [one.blocks[j // BLOCK] * BLOCK + j % BLOCK for j in at]
            starts.append(starts[-1] + count)
        logits = self._run(batch, tokens, places, slots, starts)
        self.steps += 1
        for i, (one, count) in enumerate(batch):
            one.computed += count
            for n in range(1, one.computed // BLOCK + 1):
                self.known.setdefault(tuple(one.tokens[: n * BLOCK]), one.blocks[n - 1])
            if one.computed == len(one.tokens):
                one.logprobs.append(logits[starts[i + 1] - 1].log_softmax(-1).cpu())
                one.tokens.append(int(one.logprobs[-1].argmax()))

    def _run(self, batch, tokens, places, slots, starts):
        def tensor(values, dtype=torch.int64):
            return torch.tensor(values, dtype=dtype, device=self.model.device)

        pages = max(len(one.blocks) for one, _ in batch)
        common = SimpleNamespace(
            num_actual_tokens=len(tokens), max_query_len=max(count for _, count in batch),
            query_start_loc=tensor(starts, torch.int32),
            seq_lens=tensor([one.computed + count for one, count in batch], torch.int32),
            block_table_tensor=tensor([one.blocks + [-1] * (pages - len(one.blocks)) for one, _ in batch], torch.int32),
            slot_mapping=tensor(slots), causal=True,
            mm_req_doc_ranges=None, rswa_prefix_lens=None, dcp_local_seq_lens=None,
        )  # fmt: skip
        metadata = self.builder.build(0, common)

        def attend(layer, q, k, v):
            output = torch.empty(len(tokens), HEADS * DIM, dtype=q.dtype, device=q.device)
            return self.impls[layer].forward(None, q, k, v, self.caches[layer], metadata, output)

        return self.model.logits(tensor(tokens), tensor(places), attend)
