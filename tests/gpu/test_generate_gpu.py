"""examples/generate.py on a GPU: every request's tokens are those of Transformers' greedy generation, in fp32 and in 16 bits."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich", reason="the example needs the cli extra")

from cases.generation import run_engine, tiny, workload
from continuous.compare import compare_requests
from continuous.engine import Limits

LIMITS = Limits(tokens=128, chunk=48, running=12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("page_size", [16, 5])
def test_every_request_has_the_tokens_of_transformers(dtype, swap, page_size):
    model, theirs = tiny("cuda", dtype, heads=8, kv_heads=2, hidden=512)
    requests = workload(24, prompt=(1, 120), new=(8, 40), rate=1.5)
    pages = 500 // page_size
    _, steps = run_engine(
        model, requests, replace(LIMITS, swap=swap), pages=pages, page_size=page_size, dtype=dtype, device="cuda"
    )
    assert any(one.prefill and one.decode for one in steps)
    assert any(one.preempted for one in steps) and any(one.resumed for one in steps) == swap
    found = compare_requests(requests, theirs, dtype)
    assert all(one.ok for one in found), [one for one in found if not one.ok]
    if dtype == torch.float32:
        assert all(one.equal for one in found)
    assert sum(one.same > 0 for one in found) > len(found) / 2  # what parts does not do so at once


def test_the_program(capsys):
    from generate import main

    small = ["--layers", "2", "--hidden", "256", "--heads", "4", "--requests", "8", "--new", "8,16", "--prompt", "8,64"]
    assert main([*small, "--dtype", "fp32", "--check", "8", "--pages", "32"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Kernels run on" in printed and "8 of 8 requests compared have exactly the tokens" in printed
