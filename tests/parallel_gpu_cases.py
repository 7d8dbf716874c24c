"""What runs on several GPUs over NCCL."""

import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import train_long
from parallel_cases import SCHEMES, check
from parallel_model_cases import transformer
from tilefold import parallel as tp
from tilefold import reference
from tilefold.bench.parallel.loads import Work
from tilefold.bench.parallel.run import measure
from tilefold.bench.parallel.setup import links_of, warmed
from tilefold.plan.parallel.plan import plan_parallel
from tilefold.plan.parallel.problem import Links, ParallelProblem
from tilefold.reference import compare, deviating
from tilefold.sparse import BlockIndex


def schemes(dtype, kinds=("zigzag",), masks=True):
    """On GPUs over NCCL: real tiles, every scheme, the library's kernels.  masks: with a window and packed, too."""
    real = {"heads": (8, 4), "dims": (128, 128), "kernels": None, "dtype": dtype}
    yield "warm", lambda: warm(dtype)
    for scheme in SCHEMES:
        for kind in kinds:
            yield f"{scheme}-{kind}", lambda s=scheme, k=kind: check(s, k, 1031, causal=True, **real)
        if masks:
            yield f"{scheme}-window", lambda s=scheme: check(s, "zigzag", 1031, batch=2, window=(200, 0), **real)
            yield f"{scheme}-varlen", lambda s=scheme: check(s, "zigzag", [0, 300, 301, 1100], causal=True, **real)


def bf16():
    return schemes(torch.bfloat16, ("contiguous", "zigzag"))


def fp16():
    return schemes(torch.float16)


def fp32():
    return schemes(torch.float32, masks=False)


def others():
    yield "decode-graph", decode_graph
    yield "sparse", sparse
    yield "links", links
    yield "bench", bench
    yield "transformers", lambda: transformer("mistral", "zigzag", [0, 9, 16], "cuda", None)
    yield "train-long", train  # FSDP2, checkpoints, compiled layers


def dying():
    """The last rank dies between two calls; the next call of the others is of another kind, which ranks compare first."""
    yield "before", lambda: check("ring", "zigzag", 300, dtype=torch.bfloat16, causal=True, kernels=None, dims=(64, 64))
    yield "death", lambda: death(1024)


def dying_late():
    """The next call is one that was compared before: nothing on the host waits for the others."""
    sharding = tp.shard(300, dist.get_world_size(), "zigzag")
    x = torch.zeros(1, sharding.length(dist.get_rank()), 4, 64, device="cuda", dtype=torch.bfloat16)
    yield "before", lambda: torch.cuda.synchronize(tp.attention(x, x, x, sharding, causal=True, scheme="ring").device)
    yield "death", lambda: death(300)


def death(tokens):
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(7)
    sharding = tp.shard(tokens, dist.get_world_size(), "zigzag")
    x = torch.zeros(1, sharding.length(dist.get_rank()), 4, 64, device="cuda", dtype=torch.bfloat16)
    began = time.monotonic()

    def call():
        tp.attention(x, x, x, sharding, causal=True, scheme="ring")
        torch.cuda.synchronize()  # until the watchdog ends the process

    with pytest.raises(tp.CommunicationError, match=r"rank 0 of 2 failed while .*a rank has died"):
        call()
    assert time.monotonic() - began < 20


def warm(dtype):
    """Rank 0 compiles what the others would compile at the same time."""
    name = str(dtype).removeprefix("torch.")
    problem = ParallelProblem(1, 1031, 1031, 8, 4, 128, 128, name, (-1, 0), "zigzag", True)
    warmed(plan_parallel(problem, Links(dist.get_world_size()), "ring"), torch.device("cuda"))


def links():
    found = links_of(torch.device("cuda", torch.cuda.current_device()), 1 << 26)
    assert found.neighbour > 1e9, found
    assert found.latency < 0.1, found


def train():
    small = ["--layers", "1", "--tokens", "4096", "--steps", "2", "--vocabulary", "64", "--check", "--compile"]
    assert train_long.main(small) == 0


def sparse():
    """Lists of this rank's rows, blocks of the others, beside the oracle."""
    ranks, rank, device = dist.get_world_size(), dist.get_rank(), torch.device("cuda")
    sharding = tp.shard_blocks(1000, ranks, 64)
    random = torch.Generator().manual_seed(6)
    q, k, v, w = (torch.randn(1, 1000, n, 64, generator=random).to(torch.bfloat16) for n in (4, 2, 2, 4))
    keep = torch.rand(1, 4, 16, 16, generator=random) < 0.4
    sizes = {"block_q": 64, "block_k": 64, "seq_q": 1000, "seq_k": 1000}

    def expected():
        leaves = [t.double().requires_grad_() for t in (q, k, v)]
        out, _ = reference.sparse_attention(*leaves, BlockIndex.from_map(keep, **sizes))
        (out * w.double()).sum().backward()
        return [out.detach(), *(t.grad for t in leaves)]

    wanted = [expected(), deviating(expected, torch.bfloat16, kept=torch.bfloat16)]
    mine = [tp.shard_sequence(t, sharding, rank).to(device).requires_grad_() for t in (q, k, v)]
    rows = tp.shard_index(BlockIndex.from_map(keep.to(device), **sizes), sharding, rank)
    out = tp.sparse_attention(*mine, rows, sharding)
    (out * tp.shard_sequence(w, sharding, rank).to(device)).sum().backward()
    for name, got, exact, plain in zip(("out", "dq", "dk", "dv"), (out, *(t.grad for t in mine)), *wanted, strict=True):
        verdict = compare(got, *(tp.shard_sequence(t, sharding, rank) for t in (exact, plain)))
        assert verdict.ok, f"{name}: {verdict}"


def bench():
    """Every scheme's output, forward and backward, by the benchmark's own check; its trace and its memory are figures."""
    with tempfile.TemporaryDirectory() as folder:
        work = Work((4096,), (8, 4), ways=("ring", "all_gather", "heads"), rounds=1, trace=f"{folder}/trace")
        lines = measure(work)
        if dist.get_rank() == 0:
            assert sorted(p.name for p in Path(folder).iterdir()) == [f"trace-{w}.json.gz" for w in sorted(work.ways)]
    assert [line.status for line in lines] == ["ok"] * 6, lines
    for line in lines:
        assert 0 <= line.hidden <= 1
        assert line.memory > 0
        assert line.exposed_ms >= 0


def decode_graph():
    """A captured step gives what an eager one gives, after the cache has grown."""
    ranks = dist.get_world_size()
    q = torch.randn(2, 1, 8, 128, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(1))
    k, v = (torch.randn(2, 4096, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.full((2,), 1000, dtype=torch.int32, device="cuda")

    def step():
        return tp.attention_kvcache(q, k, v, cache_seqlens=tp.cache_lengths(lengths, dist.get_rank(), ranks))

    with torch.no_grad():
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        lengths += 777
        graph.replay()
        assert torch.equal(out, step())
