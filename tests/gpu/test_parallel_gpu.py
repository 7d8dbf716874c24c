"""Context parallelism over NCCL on two GPUs or more: every scheme beside the oracle, sparse attention, decoding, models."""

import pytest
import torch

from parallel_cases import SCHEMES
from parallel_worker import run_ranks

EACH = len(SCHEMES)
pytestmark = [pytest.mark.no_poison, pytest.mark.several_gpus, pytest.mark.xdist_group("parallel")]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("suite", "cases"), [("bf16", 4 * EACH), ("fp16", 3 * EACH), ("fp32", EACH), ("others", 6)])
def test_every_scheme_over_nccl(suite, cases, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    found = run_ranks("parallel_gpu_cases", suite, ranks, timeout=120.0, limit=220.0, backend="nccl")
    broken = [f"{name}, rank {r}: {text}" for name, texts in found.items() for r, text in texts.items() if text]
    assert not broken, "\n".join(broken[:4])
    assert all(len(texts) == ranks for texts in found.values())
    assert len(found) >= cases


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("suite", "after"), [("dying", {0: None}), ("dying_late", {})])
def test_a_rank_that_dies_over_nccl(suite, after):
    """A call of a kind that ranks compare first raises on the others; in one that is under way torch's watchdog ends them."""
    found = run_ranks("parallel_gpu_cases", suite, 2, 10.0, 150.0, "nccl")
    assert found["before"] == dict.fromkeys(range(2))
    assert "hung" not in found
    assert found.get("death", {}) == after
