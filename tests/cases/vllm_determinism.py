"""What vLLM's own tests of determinism ask of an engine (tests/v1/determinism), asked of `vllm_engine.Engine`.

The tests are ours; each names the one whose question it asks."""

import random

import torch

from .vllm_engine import WORDS, Engine, Model


def prompt(draw, low, high):
    return [draw.randrange(WORDS) for _ in range(draw.randint(low, high))]


def equal(a, b):
    """Two results of one request: the same tokens, and the same bits of all log-probabilities."""
    return a[1] == b[1] and torch.equal(a[0], b[0])


def needle(dtype, device, trials, seats, most, new):
    """test_v1_generation_is_deterministic_across_batch_sizes_with_needle."""
    model, draw = Model(dtype, device), random.Random(12345)
    wanted_prompt = prompt(draw, 4, 4)
    (alone,) = Engine(model, seats=seats).generate([wanted_prompt], new)
    for trial in range(trials):
        count = draw.randint(seats // 2, seats)
        at = draw.randrange(count)
        prompts = [wanted_prompt if i == at else prompt(draw, most // 2, most) for i in range(count)]
        assert equal(Engine(model, seats=seats, seed=trial).generate(prompts, new)[at], alone), (trial, count, at)


def alone_and_together(dtype, device, count, most, new):
    """test_logprobs_bitwise_batch_invariance_bs1_vs_bsN; how many of the requests have equal bits."""
    model, draw = Model(dtype, device), random.Random(12345)
    prompts = [prompt(draw, 10, most) for _ in range(count)]
    alone = [Engine(model).generate([one], new)[0] for one in prompts]
    together = Engine(model, seed=1).generate(prompts, new)
    return sum(equal(a, b) for a, b in zip(alone, together, strict=True))


def chunks(dtype, device, sizes, tokens, budget, new):
    """test_logprobs_chunked_prefill_batch_invariance: one prompt, several times in a batch, cut wherever the budget ends."""
    model = Model(dtype, device)
    one = prompt(random.Random(12345), tokens, tokens)
    whole = Engine(model, budget=4096)
    (wanted,) = whole.generate([one], new)
    assert whole.steps == new
    for size in sizes:
        engine = Engine(model, budget=budget, seed=size)
        for found in engine.generate([one] * size, new):
            assert equal(found, wanted), size
        assert engine.steps > new


def prefixes(dtype, device, count, shared, budget, new):
    """The question of test_prefix_caching_batch_invariance: a cold and a hot run of prompts with a long common beginning."""
    model, draw = Model(dtype, device), random.Random(12345)
    start = prompt(draw, shared, shared)
    prompts = [start + prompt(draw, 3, 20) for _ in range(count)]
    plain = Engine(model, budget=budget).generate(prompts, new)
    engine = Engine(model, budget=budget, prefixes=True, seed=1)
    cold = engine.generate(prompts, new)
    before = engine.reused
    hot = engine.generate(prompts, new)
    assert engine.reused - before >= count * (shared // 16)
    for a, b, c in zip(plain, cold, hot, strict=True):
        assert equal(a, b) and equal(a, c)


def decoding_and_prompts(dtype, device, tokens, new):
    """test_decode_logprobs_match_prefill_logprobs: what a token got while it was generated, and as the end of a prompt."""
    model = Model(dtype, device)
    one = prompt(random.Random(12345), tokens, tokens)
    ((logprobs, made),) = Engine(model).generate([one], new)
    for n in range(1, new):
        ((again, _),) = Engine(model, seed=n).generate([one + made[:n]], 1)
        assert torch.equal(again[0], logprobs[n]), n
