"""The Gluon kernel for dense attention on sm_90 against the fp64 oracle, at lengths, strides and numbers that are hard for it."""

import math
import os
import subprocess
import sys

import pytest
import torch

import tilefold
from cases import check, judge, qkv, rand
from tilefold import reference

DEVICE = torch.device("cuda")
HOPPER = "attention_forward_hopper"
pytestmark = [
    pytest.mark.no_poison,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]
MASKS = [{}, {"causal": True}, {"window": (200, 50)}, {"window": (0, 0)}, {"window": (130, -1)}]


def held(q, k, v, **options):
    """Hold the kernel to the oracle, whether the plan takes it or not."""
    plan = tilefold.attention_plan(q, k, v, **options)
    stages = 2 if q.shape[-1] == 128 else 4
    plan = plan.with_tile(kernel=HOPPER, block_m=128, block_n=128, num_warps=4, num_stages=stages)
    out, lse = tilefold.attention(q, k, v, plan=plan, return_lse=True, **options)
    oracle = reference.attention(q, k, v, **options)
    plain = reference.attention(q, k, v, dtype=q.dtype, **options)
    note = f"q {tuple(q.shape)} k {tuple(k.shape)} {q.dtype} {options}"
    judge(out, oracle[0], plain[0], f"out {note}")
    judge(lse, oracle[1], plain[1].float(), f"lse {note}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_lengths(options, dim, dtype):
    for sq, sk in ((1, 1), (127, 129), (128, 128), (333, 1001), (1001, 333), (64, 2000)):
        q, k, v = qkv(2, sq, sk, 8, 2, dim, dtype=dtype, device=DEVICE)
        held(q, k, v, **options)


@pytest.mark.parametrize("heads", [(1, 1), (12, 12), (12, 3), (7, 1)])
def test_heads(heads):
    q, k, v = qkv(3, 400, 700, *heads, 128, dtype=torch.bfloat16, device=DEVICE)
    held(q, k, v, causal=True)


@pytest.mark.parametrize("dim", [64, 128])
def test_strides_and_layouts(dim):
    packed = rand(2, 500, 3, 4, dim, dtype=torch.bfloat16, device=DEVICE).unbind(2)
    held(*packed)
    transposed = [t.transpose(1, 2) for t in qkv(2, 4, 4, 500, 500, dim, dtype=torch.bfloat16, device=DEVICE)]
    held(*transposed, causal=True)
    held(*(t.transpose(1, 2) for t in packed), layout="bhsd")


def test_the_plan_takes_it():
    q, k, v = qkv(1, 4096, 4096, 16, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    assert tilefold.attention_plan(q, k, v).kernel == HOPPER
    check(q, k, v, None)
    odd = torch.empty(1, 4096, 16, 132, dtype=torch.bfloat16, device=DEVICE)[..., :128].copy_(q)
    assert tilefold.attention_plan(odd, k, v).kernel != HOPPER  # rows of 264 bytes are no boxes
    check(odd, k, v, None)


def test_hard_numbers():
    """Logits of 1e4, and numbers below the least normal one."""
    for size in (100.0, 1e-30):
        q, k, v = (t * size for t in qkv(1, 300, 500, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE))
        held(q, k, v, scale=1.0)
    q, k, v = qkv(1, 300, 500, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    v[:, :, 1] *= 1e-38
    held(q, k, v)


def test_nan_stays_in_its_rows():
    q, k, v = qkv(1, 512, 512, 2, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    plan = tilefold.attention_plan(q, k, v, causal=True)
    plan = plan.with_tile(kernel=HOPPER, block_m=128, block_n=128, num_warps=4, num_stages=2)
    clean = tilefold.attention(q, k, v, causal=True, plan=plan)
    q[0, 100, 0] = math.nan
    out = tilefold.attention(q, k, v, causal=True, plan=plan)
    assert out[0, 100, 0].isnan().all()
    out[0, 100, 0] = clean[0, 100, 0]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_the_same_bits_every_run(options):
    q, k, v = qkv(2, 3000, 3000, 16, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    assert tilefold.attention_plan(q, k, v, **options).kernel == HOPPER
    first = tilefold.attention(q, k, v, return_lse=True, **options)
    for _ in range(50):
        assert all(
            torch.equal(a, b)
            for a, b in zip(first, tilefold.attention(q, k, v, return_lse=True, **options), strict=True)
        )


def test_graph_and_streams():
    q, k, v = qkv(1, 2048, 2048, 16, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    tilefold.attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilefold.attention(q, k, v, causal=True)
    for _ in range(3):
        q.copy_(rand(*q.shape, dtype=q.dtype, device=DEVICE))
        graph.replay()
        assert torch.equal(out, tilefold.attention(q, k, v, causal=True))
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for stream in streams * 5:
        with torch.cuda.stream(stream):
            results.append(tilefold.attention(q, k, v, causal=True))
    torch.cuda.synchronize()
    assert all(torch.equal(r, out) for r in results)


def test_the_environment_turns_it_off():
    code = (
        "import torch, tilefold; q = torch.randn(1, 4096, 16, 128, device='cuda', dtype=torch.bfloat16); "
        "print(tilefold.attention_plan(q, q, q).kernel)"
    )
    for value, kernel in (("1", "attention_forward_box"), ("0", HOPPER)):
        found = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TILEFOLD_DISABLE_HOPPER": value},
            capture_output=True,
            text=True,
        )
        assert found.stdout.strip() == kernel, found.stderr


@pytest.mark.large
def test_more_than_two_to_the_31_elements():
    q = torch.randn(1, 600, 32, 128, dtype=torch.bfloat16, device=DEVICE).expand(1000, -1, -1, -1).contiguous()
    out = tilefold.attention(q, q, q, causal=True)
    assert torch.equal(out[-1], out[0])
    assert torch.equal(out[500], out[0])
