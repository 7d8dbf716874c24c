"""Sample from a small decoder while requests come and go, train it on the samples, and compare the log-probabilities of both.

    python examples/rl_consistency.py                    # tiny without a GPU, in plain torch; larger on one
    python examples/rl_consistency.py --rounds 5 --requests 32

The sampler is a continuous batch over `tilefold.PagedKVCache`: prompts in chunks beside tokens of others.  The trainer packs all
sequences into one call of `attention_varlen`.  With numerics="invariant" both have the same bits: the ratio of policies in an
on-policy step is 1 and not nearly so.  The same model over torch's SDPA and linear layers shows what they differ by otherwise.
Exit code 1 if a bit differs.

Everything else of this decoder works on one token at a time: embeddings by table, norms whose mean is a product, silu inside a
product.  docs/invariance.md says what is fixed."""

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilefold

USUAL: dict[bool, dict[str, int]] = {
    True: {
        "layers": 4,
        "heads": 16,
        "kv_heads": 4,
        "dim": 64,
        "vocabulary": 4096,
        "requests": 24,
        "prompt": 700,
        "new": 64,
    },
    False: {"layers": 2, "heads": 4, "kv_heads": 2, "dim": 16, "vocabulary": 40, "requests": 5, "prompt": 30, "new": 6},
}
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Of a layer's number, q [tokens, heads, dim], k and v [tokens, kv_heads, dim]: out like q."""


class Decoder(nn.Module):
    """A decoder of packed tokens.  invariant: products are ours, else torch's."""

    def __init__(self, options: argparse.Namespace, invariant: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.invariant = options.heads, options.kv_heads, options.dim, invariant
        width, keys = options.heads * options.dim, options.kv_heads * options.dim
        sizes = {"q": (width, width), "k": (keys, width), "v": (keys, width), "o": (width, width), "gate": (2 * width, width),
                 "up": (2 * width, width), "down": (width, 2 * width)}  # fmt: skip
        self.layers = nn.ModuleList(
            nn.ParameterDict({name: torch.randn(size) * size[1] ** -0.5 for name, size in sizes.items()})
            for _ in range(options.layers)
        )
        self.tokens = nn.Parameter(torch.randn(options.vocabulary, width))
        self.places = nn.Parameter(torch.randn(options.prompt + options.new, width))
        self.register_buffer("ones", torch.ones(1, width))

    def product(self, x: Tensor, weight: Tensor, activation: str | None = None) -> Tensor:
        if self.invariant:
            return tilefold.matmul(x, weight.t(), activation=activation)
        made = F.linear(x, weight)
        return F.silu(made) if activation else made

    def norm(self, x: Tensor) -> Tensor:
        squares = self.product(x * x, cast("Tensor", self.ones)) / x.shape[-1]
        return x * torch.rsqrt(squares + 1e-6)

    def forward(self, tokens: Tensor, places: Tensor, attend: Attend) -> Tensor:
        """Log-probabilities [tokens, vocabulary] of what comes next, fp32."""
        x = self.tokens[tokens] + self.places[places]
        layers: list[Any] = list(self.layers)
        for number, w in enumerate(layers):
            inner = self.norm(x)
            q, k, v = (self.product(inner, w[name]).unflatten(-1, (-1, self.dim)) for name in "qkv")
            x = x + self.product(attend(number, q, k, v).flatten(-2), w["o"])
            inner = self.norm(x)
            x = x + self.product(self.product(inner, w["gate"], "silu") * self.product(inner, w["up"]), w["down"])
        return self.product(self.norm(x), self.tokens).float().log_softmax(-1)


@dataclass
class Sample:
    """A request: its prompt, then what was sampled, with the log-probability of each of these."""

    tokens: list[int]
    new: int
    chance: torch.Generator
    prompt: int = field(init=False)
    logs: list[Tensor] = field(default_factory=list)
    done: int = 0  # tokens that the model has seen

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def finished(self) -> bool:
        return len(self.logs) == self.new

    def take(self, logs: Tensor) -> None:
        """Sample the next token (by Gumbel noise of the request's own)."""
        noise = -torch.empty(logs.shape).exponential_(generator=self.chance).log().to(logs.device)
        token = int((logs + noise).argmax())
        self.tokens.append(token)
        self.logs.append(logs[token])


# ---------------------------------------------------------------- the sampler


def steps(samples: Sequence[Sample], chunk: int, running: int) -> Iterator[list[tuple[int, int]]]:
    """Which request gets how many of its tokens, step by step: a prompt comes in chunks, later requests take free places."""
    while any(not one.finished for one in samples):
        active = [i for i, one in enumerate(samples) if not one.finished][:running]
        yield [(i, min(chunk, len(samples[i].tokens) - samples[i].done)) for i in active]


@torch.no_grad()
def sample(model: Decoder, samples: Sequence[Sample], keep: Any, chunk: int = 7, running: int = 3) -> None:
    """Let the model continue all requests; keep: a `Pages` or a `Tensors`, where keys and values are kept."""
    device = model.tokens.device
    for batch in steps(samples, chunk, running):
        parts = [(samples[i], samples[i].done, n) for i, n in batch]
        tokens = torch.tensor([t for one, at, n in parts for t in one.tokens[at : at + n]], device=device)
        places = torch.tensor([p for _, at, n in parts for p in range(at, at + n)], device=device)
        logs = model(tokens, places, keep.attention(batch))
        ends = torch.tensor([n for _, n in batch]).cumsum(0) - 1
        for (one, at, n), last in zip(parts, ends.tolist(), strict=True):
            one.done = at + n
            if one.done == len(one.tokens):
                one.take(logs[last])
                if one.finished:
                    keep.drop(samples.index(one))


class Pages:
    """Keys and values in a paged cache."""

    def __init__(self, model: Decoder, samples: Sequence[Sample], page_size: int = 16) -> None:
        longest = max(one.prompt + one.new for one in samples)
        pages = len(samples) * (-(-longest // page_size) + 1)
        self.cache = tilefold.PagedKVCache(
            len(model.layers), model.kv_heads, model.dim, num_pages=pages, page_size=page_size, max_sequences=len(samples),
            max_tokens=longest, dtype=model.tokens.dtype, device=model.tokens.device)  # fmt: skip
        self.ids: dict[int, int] = {}

    def attention(self, batch: list[tuple[int, int]]) -> Attend:
        for i, _ in batch:
            if i not in self.ids:
                self.ids[i] = self.cache.add()
        held = self.cache.batch([self.ids[i] for i, _ in batch], [n for _, n in batch])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.append(layer, k, v, held)
            out: Tensor = self.cache.attend(layer, q, held)
            return out

        return attend

    def drop(self, i: int) -> None:
        self.cache.free(self.ids[i])


class Tensors:
    """Keys and values of each request in tensors of their own, attended by torch's SDPA."""

    def __init__(self, model: Decoder, samples: Sequence[Sample]) -> None:
        self.held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attention(self, batch: list[tuple[int, int]]) -> Attend:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outs, at = [], 0
            for i, n in batch:
                new = k[at : at + n], v[at : at + n]
                before = self.held.get((layer, i))
                both = new if before is None else tuple(torch.cat(pair) for pair in zip(before, new, strict=True))
                self.held[layer, i] = both[0], both[1]
                outs.append(by_sdpa(q[at : at + n], *both))
                at += n
            return torch.cat(outs)

        return attend

    def drop(self, i: int) -> None:
        self.held = {key: pair for key, pair in self.held.items() if key[1] != i}


def by_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last queries of a sequence, all [tokens, heads, dim]."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)


# ---------------------------------------------------------------- the trainer


def log_probabilities(model: Decoder, samples: Sequence[Sample]) -> Tensor:
    """Those of all sampled tokens, one after the other, with gradients: all sequences packed into one forward pass."""
    device, lengths = model.tokens.device, [len(one.tokens) - 1 for one in samples]
    cu = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    tokens = torch.tensor([t for one in samples for t in one.tokens[:-1]], device=device)
    places = torch.cat([torch.arange(n) for n in lengths]).to(device)

    def packed(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        longest = max(lengths)
        out: Tensor = tilefold.attention_varlen(q, k, v, cu, cu, longest, longest, causal=True)
        return out

    def apart(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([by_sdpa(*three) for three in zip(*(t.split(lengths) for t in (q, k, v)), strict=True)])

    logs: Tensor = model(tokens, places, packed if model.invariant else apart)
    rows = torch.cat([torch.arange(end - one.new, end) for one, end in zip(samples, cu[1:].tolist(), strict=True)])
    taken = torch.tensor([t for one in samples for t in one.tokens[one.prompt :]], device=device)
    return logs[rows.to(device), taken]


def improve(model: Decoder, logs: Tensor, samples: Sequence[Sample], rate: float) -> None:
    """One step of policy gradients: even tokens are good."""
    rewards = torch.tensor(
        [1.0 - 2.0 * (t % 2) for one in samples for t in one.tokens[one.prompt :]], device=logs.device
    )
    grads = torch.autograd.grad(-(rewards * logs).mean(), list(model.parameters()))
    with torch.no_grad():
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.sub_(rate * grad)


# ---------------------------------------------------------------- both


def requests(options: argparse.Namespace, seed: int) -> list[Sample]:
    chance = random.Random(seed)
    lengths = [chance.randint(1, options.prompt) for _ in range(options.requests)]
    return [
        Sample(
            [chance.randrange(options.vocabulary) for _ in range(n)],
            options.new,
            torch.Generator().manual_seed(seed + i),
        )
        for i, n in enumerate(lengths)
    ]


def run(options: argparse.Namespace, invariant: bool) -> bool:
    """Sample and train for some rounds, print how far the log-probabilities are apart; whether no bit was."""
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    model = Decoder(options, invariant).to("cuda" if gpu else "cpu", torch.bfloat16 if gpu else torch.float32)
    keep, same = Pages if invariant else Tensors, True
    with tilefold.numerics("invariant") if invariant else nullcontext():
        for number in range(options.rounds):
            samples = requests(options, number)
            sample(model, samples, keep(model, samples))
            sampled = torch.stack([log for one in samples for log in one.logs])
            trained = log_probabilities(model, samples)
            differ = (sampled != trained).float().mean()
            same = same and not differ
            apart = (sampled - trained).abs().max()
            name = "tilefold, invariant" if invariant else "torch, SDPA"
            text = f"{len(sampled)} tokens, {differ:.1%} of log-probabilities differ, by {apart:.2e} at most"
            print(f"{name:20} round {number}: {text}")
            improve(model, trained, samples, 0.02)
    return same


def main(argv: Sequence[str] | None = None) -> int:
    usual = USUAL[torch.cuda.is_available()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {**usual, "rounds": 2}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help="(default %(default)s)")
    options = parser.parse_args(argv)
    same = run(options, True)
    run(options, False)
    print("the same bits in sampling and training" if same else "sampling and training differ")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
