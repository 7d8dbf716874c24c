"""A small engine around the vLLM backend, with vLLM's switch of batch invariance: a request's bits follow from its tokens."""

import sys

import pytest
import torch

import vllm_stub
from cases import vllm_determinism as cases
from cases.invariant import products_in_order  # noqa: F401
from cases.vllm_batch import BLOCK, Batch

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    vllm_stub.install(monkeypatch, invariant=True)
    yield
    sys.modules.pop("tilefold.integrations.vllm_backend", None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_needle_among_others(dtype, device):
    cases.needle(dtype, device, trials=2, seats=6, most=50, new=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_alone_and_together(dtype, device):
    assert cases.alone_and_together(dtype, device, count=4, most=40, new=2) == 4


def test_prompts_in_chunks(device):
    cases.chunks(DTYPES[0], device, sizes=(1, 2), tokens=40, budget=19, new=2)


def test_shared_prefixes(device):
    cases.prefixes(DTYPES[1], device, count=3, shared=32, budget=39, new=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_and_prompts(dtype, device):
    cases.decoding_and_prompts(dtype, device, tokens=30, new=4)


def test_the_same_bits_in_any_batch():
    """With vLLM's switch a token's result does not depend on its neighbours, nor on how its prompt was cut."""
    whole = Batch([(0, 40)])
    impl = whole.impl()
    assert impl.options["numerics"] == "invariant"
    want = whole.run(impl)
    parts = Batch([(0, 40)])
    got = []
    for begin, end in ((0, 16), (16, 33), (33, 34), (34, 40)):
        step = Batch([(begin, end - begin), (37, 1)])
        own = step.table[0, : -(-end // BLOCK)].long()
        step.query[: end - begin], step.key[: end - begin] = parts.query[begin:end], parts.key[begin:end]
        step.value[: end - begin] = parts.value[begin:end]
        places = [own[j // BLOCK].item() * BLOCK + j % BLOCK for j in range(begin)]
        for j, place in enumerate(places):
            step.cache[place // BLOCK, :, place % BLOCK] = torch.cat([parts.key[j], parts.value[j]], -1)
        got.append(step.run(impl)[: end - begin])
    assert torch.equal(torch.cat(got), want)


def test_bits_differ_without_the_switch(monkeypatch, device):
    """test_logprobs_without_batch_invariance_should_fail: the tests above could fail."""
    vllm_stub.install(monkeypatch, invariant=False)
    assert cases.alone_and_together(torch.float32, device, count=4, most=40, new=2) < 4
