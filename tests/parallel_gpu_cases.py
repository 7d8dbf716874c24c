"""What runs on several GPUs over NCCL."""

import tempfile

import torch
import torch.distributed as dist

from parallel_cases import SCHEMES, check
from tilefold import parallel as tp
from tilefold.bench.parallel.run import Work, measure


def gpus():
    """On GPUs over NCCL: real tiles, every scheme, the library's kernels."""
    real = {"heads": (8, 4), "dims": (128, 128), "kernels": None}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for scheme in SCHEMES:
            for kind in ("contiguous", "zigzag"):
                yield (
                    f"{scheme}-{kind}-{dtype}",
                    lambda s=scheme, k=kind, d=dtype: check(s, k, 1031, dtype=d, causal=True, **real),
                )
            yield (
                f"{scheme}-window-{dtype}",
                lambda s=scheme, d=dtype: check(s, "zigzag", 1031, batch=2, dtype=d, window=(200, 0), **real),
            )
            yield (
                f"{scheme}-varlen-{dtype}",
                lambda s=scheme, d=dtype: check(s, "zigzag", [0, 300, 301, 1100], dtype=d, causal=True, **real),
            )
    yield "decode-graph", decode_graph
    yield "bench", bench


def bench():
    """Every scheme's output, forward and backward, by the benchmark's own check; its trace and its memory are figures."""
    with tempfile.TemporaryDirectory() as folder:
        work = Work((4096,), (8, 4), ways=("ring", "all_gather", "heads"), rounds=1, trace=f"{folder}/trace")
        lines = measure(work)
    assert [line.status for line in lines] == ["ok"] * 6, lines
    for line in lines:
        assert 0 <= line.hidden <= 1
        assert line.memory > 0


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
