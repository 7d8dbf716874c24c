"""The backend of vLLM on a GPU: the batches of its CPU tests, and a captured decoding step."""

import sys

import pytest
import torch

import vllm_stub
from cases import vllm_determinism as determinism
from cases.device import DEVICE, captured
from cases.vllm_batch import HEADS, Batch

BATCHES = [[(0, 200), (0, 33)], [(700, 1), (16, 1), (1, 1)], [(31, 1), (0, 220), (65, 12), (512, 1)]]


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    vllm_stub.install(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("requests", BATCHES, ids=str)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 40}], ids=str)
@pytest.mark.parametrize("physical", ["NHD", "HND"])
def test_batches(physical, options, requests, dtype):
    Batch(requests, dtype, DEVICE, padding=5, physical=physical, dim=128).held(**options)


def test_rows_behind_a_page_are_not_written():
    batch = Batch(BATCHES[2], torch.bfloat16, DEVICE, rejected=(0, 7, 230))
    before = batch.rows()
    batch.run(batch.impl())
    batch.untouched(before)


def test_a_captured_step_follows_the_batch():
    """The graph of a decoding step is replayed for longer requests: lengths, pages and slots lie where they lay."""
    first, later = (Batch([(a, 1), (b, 1)], torch.bfloat16, DEVICE) for a, b in ((40, 13), (41, 14)))
    builder, impl, common = first.builder(), first.impl(), first.common()
    batch, output = builder.build(0, common), torch.empty(2, HEADS * first.dim, dtype=torch.bfloat16, device=DEVICE)
    graph, _ = captured(lambda: impl.forward(None, first.query, first.key, first.value, first.cache, batch, output))
    for own, new in ((first.query, later.query), (first.key, later.key), (first.value, later.value)):
        own.copy_(new)
    common.seq_lens += 1
    places = [int(first.table[i, n // 16]) * 16 + n % 16 for i, n in enumerate((41, 14))]
    common.slot_mapping.copy_(torch.tensor(places))
    builder.build(0, common)
    graph.replay()
    eager = torch.empty_like(output)
    impl.forward(None, first.query, first.key, first.value, first.cache, batch, eager)
    assert torch.equal(output, eager)


@pytest.fixture
def invariant(monkeypatch):
    vllm_stub.install(monkeypatch, invariant=True)
    sys.modules.pop("tilefold.integrations.vllm_backend", None)
    yield
    sys.modules.pop("tilefold.integrations.vllm_backend", None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("invariant")
def test_determinism(dtype):
    """What vLLM's tests of determinism ask, at sizes nearer to theirs."""
    determinism.needle(dtype, DEVICE, trials=4, seats=48, most=120, new=12)
    assert determinism.alone_and_together(dtype, DEVICE, count=24, most=200, new=8) == 24
    determinism.chunks(dtype, DEVICE, sizes=(1, 2, 3, 5, 8), tokens=400, budget=333, new=8)
    determinism.prefixes(dtype, DEVICE, count=8, shared=320, budget=500, new=6)
    determinism.decoding_and_prompts(dtype, DEVICE, tokens=200, new=12)
