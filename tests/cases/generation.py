"""Tiny Qwen2 models and workloads for the tests of examples/generate.py."""

import torch

from continuous.engine import Engine, Limits
from continuous.weights import random_config, random_model
from continuous.workload import random_requests
from tilefold import PagedKVCache


def tiny(device, dtype=torch.float32, *, heads=2, kv_heads=1, hidden=32, layers=2, seed=1):
    """(our model on the device, Transformers' in fp32 on the device)."""
    ours, theirs = random_model(random_config(layers, hidden, heads, kv_heads, 64, 256), seed)
    return ours.place(device, dtype), theirs.to(device)


def run_engine(model, requests, limits, *, pages, page_size=4, dtype=torch.float32, device="cpu"):
    """(engine, records of all steps) of requests that ran to their end; every page is free again."""
    shape = model.shape
    cache = PagedKVCache(
        shape.layers, shape.kv_heads, shape.head_dim, num_pages=pages, page_size=page_size, max_sequences=len(requests),
        max_tokens=shape.positions, dtype=dtype, device=device,
    )  # fmt: skip
    engine = Engine(model, cache, limits)
    engine.submit(requests)
    steps = []
    while engine.busy:
        steps.append(engine.step())
        assert len(steps) < 10_000
    assert cache.free_pages == pages and cache.sequences == ()
    assert len(engine.finished) == len(requests)
    return engine, steps


def workload(count=5, prompt=(3, 14), new=(3, 7), rate=0.7, seed=9):
    return random_requests(count, 64, prompt, new, rate, seed)


LIMITS = Limits(tokens=16, chunk=8, running=4)
