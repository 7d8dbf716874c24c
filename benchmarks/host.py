"""What a call of small tensors costs the host, in microseconds, and by functions where asked.

    PYTHONPATH=src python benchmarks/host.py [--only kvcache] [--profile] [--stages] [--before ../before/src [--rounds 5]]

With a GPU: the time until a call returns, beside torch's SDPA.  Without: CPU time of the thread, the least of many short runs,
with plans for an H200, without the driver's launches and the system's part of allocations, beside an autograd function that only
allocates.  Rows that begin with "new" have lengths that no call had before.  --before: the same of another checkout, in turns,
and both beside SDPA.  --stages: by steps of a warm call, and by checks, problem, plan, binding and launch of a new length."""

import argparse
import cProfile
import ctypes
import gc
import itertools
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import versions
from torch.nn.functional import scaled_dot_product_attention

import tilefold
from tilefold import BlockIndex
from tilefold.bench import timers
from tilefold.ops import hopper, records

Call = Callable[..., Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


FIRST, LENGTHS = 1057, 1500  # of "new" rows


def draw(*shape: int, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, device=DEVICE, generator=generator).bfloat16().requires_grad_(grad)


def differentiated(attend: Callable[..., Any]) -> Call:
    inputs = [draw(1, 128, 4, 64, grad=True) for _ in range(3)]
    dout = draw(1, 128, 4, 64)
    return lambda: torch.autograd.grad(attend(*inputs), inputs, dout)


class Allocates(torch.autograd.Function):
    """The least that an attention function does."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, torch.empty((1, 4, 128), device=q.device))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:3])


def rows() -> dict[str, Call]:
    q, k, v = (draw(1, 128, 4, 64) for _ in range(3))
    graded = [draw(1, 128, 4, 64, grad=True) for _ in range(3)]
    one, cache = draw(1, 1, 4, 64), draw(1, 256, 4, 64)
    pages, table = draw(16, 16, 4, 64), torch.arange(16, dtype=torch.int32, device=DEVICE)[None]
    lengths = torch.full((1,), 200, dtype=torch.int32, device=DEVICE)
    cu = torch.tensor([0, 64, 128], dtype=torch.int32, device=DEVICE)
    index = BlockIndex.from_map(torch.ones(1, 4, 2, 2, dtype=torch.bool, device=DEVICE))

    def causal(*tensors: torch.Tensor) -> Any:
        return tilefold.attention(*tensors, causal=True)

    def packed() -> Any:
        return tilefold.attention_varlen(q[0], k[0], v[0], cu, cu, 64, 64, causal=True)

    def nothing() -> Any:
        return torch.empty_like(q), q.new_empty((1, 4, 128), dtype=torch.float32)

    def sdpa(*tensors: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*(t.transpose(1, 2) for t in tensors), is_causal=True).transpose(1, 2)

    torchs: dict[str, Call] = {
        "SDPA": lambda: sdpa(q, k, v),
        "SDPA, grad": lambda: sdpa(*graded),
        "SDPA forward + backward": differentiated(sdpa),
    }
    return {
        "out and lse alone": nothing,
        "attention": lambda: causal(q, k, v),
        "attention, grad": lambda: causal(*graded),
        "attention forward + backward": differentiated(causal),
        "an autograd function alone": differentiated(Allocates.apply),
        "varlen": packed,
        "kvcache": lambda: tilefold.attention_kvcache(one, cache, cache, cache_seqlens=lengths),
        "kvcache, pages": lambda: tilefold.attention_kvcache(
            one, pages, pages, cache_seqlens=lengths, block_table=table
        ),
        "sparse": lambda: tilefold.sparse_attention(q, k, v, index),
        "sparse forward + backward": differentiated(lambda *tensors: tilefold.sparse_attention(*tensors, index)),
        "matmul": lambda: tilefold.matmul(q[0, 0], k[0, 0].T),
        **(torchs if DEVICE == "cuda" else {}),
        **new_rows(),
    }


def new_rows() -> dict[str, Call]:
    """Calls each of which has lengths that none before had: 16 heads on 4, packed and over caches, too."""
    q, k = draw(FIRST + LENGTHS, 16, 64), draw(FIRST + LENGTHS, 4, 64)
    one, cache = draw(1, 1, 16, 64), k[None]
    cu = torch.tensor([0, 100, 1000], dtype=torch.int32, device=DEVICE)
    lengths = torch.full((1,), 200, dtype=torch.int32, device=DEVICE)
    pages, table = draw(16, 16, 4, 64), torch.zeros((1, FIRST + LENGTHS), dtype=torch.int32, device=DEVICE)
    blocks = torch.zeros((1, 16, (FIRST + LENGTHS) // 64 + 1, 4), dtype=torch.int32, device=DEVICE)
    listed = [
        BlockIndex(blocks[:, :, : -(-n // 64)], blocks[:, :, : -(-n // 64), 0].contiguous() + 1, 64, 64, n, n)
        for n in range(FIRST, FIRST + LENGTHS)
    ]
    for index in listed:
        index.transpose()

    def dense(n: int, *qkv: torch.Tensor, **options: Any) -> torch.Tensor:
        return tilefold.attention(*(t.view(1, n, -1, 64) for t in qkv), **options)

    def packed(n: int, *qkv: torch.Tensor) -> torch.Tensor:
        return tilefold.attention_varlen(*qkv, cu, cu, n - 100, n - 100, causal=True)

    def sparse(n: int, *qkv: torch.Tensor) -> torch.Tensor:
        return tilefold.sparse_attention(*(t.view(1, n, -1, 64) for t in qkv), listed[n - FIRST])

    def forward(attend: Call, **options: Any) -> Call:
        n = itertools.count(FIRST)
        return lambda: attend(at := next(n), q[:at], k[:at], k[:at], **options)

    def backward(attend: Call, **options: Any) -> Call:
        def both() -> Any:
            at = next(n)
            inputs = [t[:at].requires_grad_() for t in (q, k, k)]
            out = attend(at, *inputs, **options)
            return torch.autograd.grad(out, inputs, out.detach())

        n = itertools.count(FIRST)
        return both

    def over(keys: int, *_: Any) -> Any:
        return tilefold.attention_kvcache(one, cache[:, :keys], cache[:, :keys], cache_seqlens=lengths)

    def in_pages(keys: int, *_: Any) -> Any:
        return tilefold.attention_kvcache(one, pages, pages, cache_seqlens=lengths, block_table=table[:, :keys])

    return {
        "new: attention": forward(dense),
        "new: attention, causal": forward(dense, causal=True),
        "new: varlen": forward(packed),
        "new: attention, one query": forward(lambda n, *_: tilefold.attention(one, cache[:, :n], cache[:, :n])),
        "new: kvcache": forward(over),
        "new: kvcache, pages": forward(in_pages),
        "new: sparse": forward(sparse),
        "new: an autograd function alone": backward(lambda n, *qkv: Allocates.apply(*qkv)),
        "new: attention forward + backward": backward(dense, causal=True),
        "new: varlen forward + backward": backward(packed),
        "new: sparse forward + backward": backward(sparse),
    }


def first(name: str, call: Call) -> Call:
    """The call, made once: of a new length as in a new process, but for compiled kernels."""
    if name.startswith("new"):
        records.CACHE.clear()
        for module in [module for at, module in sys.modules.items() if at.startswith("tilefold.plan")]:
            for each in list(vars(module).values()):
                getattr(each, "cache_clear", lambda: None)()
    call()
    return call


def shortest(call: Call, calls: int = 20, runs: int = 100) -> float:
    """Microseconds."""
    if DEVICE == "cuda":
        return timers.time_host(call, torch.cuda.synchronize, calls, max(2, runs // 4)).low * 1e3
    found = []
    gc.collect()
    gc.disable()
    for _ in range(runs):
        begin = time.thread_time_ns()
        for _ in range(calls):
            call()
        found.append((time.thread_time_ns() - begin) / calls / 1e3)
    gc.enable()
    return min(found)


STAGES = {
    "checks": ("check_options", "sizes_of", "check_hooks", "_checked", "check_call", "_key_of_any_length"),
    "problem": ("problem_of", "problem_of_decode"),
    "plan": ("plan_forward", "plan_decode", "plan_sparse", "backward_plan_of", "backward_plan"),
    "bind": ("bind", "_bind", "_of_lengths", "bind_decode", "bound_launches"),
    "compile": ("compile", "found", "compiled"),
}
"""Functions of tilefold by the stage that they are."""


def stages(stats: Any, total: float) -> list[tuple[str, float]]:
    """Microseconds of each stage, of `total`: by its share in a profile, which makes small functions longer than they are."""
    rows = stats.stats.items()
    found = []
    for stage, names in STAGES.items():
        mine = {(path, name) for (path, _, name), _ in rows if name in names and "check.py" not in path}
        outside = [times for (path, _, name), (*_, callers) in rows if (path, name) in mine
                   for (at, _, caller), times in callers.items() if (at, caller) not in mine]  # fmt: skip
        found.append((stage, total * sum(times[3] for times in outside) / stats.total_tt))
    return [*found, ("else", total - sum(us for _, us in found))]


def steps() -> dict[str, Call]:
    """What a warm `attention` does, one by one; those of the launch by themselves, too."""
    from tilefold.ops import launch
    from tilefold.ops.bound import Flat, new_results
    from tilefold.ops.call import Call
    from tilefold.ops.source import key_of
    from tilefold.ops.watch import is_open

    q, k, v = (draw(1, 128, 4, 64) for _ in range(3))
    for _ in range(3):
        tilefold.attention(q, k, v, causal=True)
    call = Call(True, None, None, 0.0, "bshd")
    key = "attention", key_of(q, k, v, call)
    record = records.CACHE[key]
    given = (q, k, v, *new_results(q, record.out_shape, record.lse_shape), call)
    bound, one = record.bound, record.bound.launch
    run, head, current_stream, middle = one._compiled
    flat = isinstance(bound._flat, Flat)
    make, start, drive = (bound._flat.arguments, one.flat, run.launch) if flat else (bound.arguments, one, run)
    arguments = make(given)
    whole = (*one.grid, current_stream(one.device), *head, *middle, *arguments, *one._tail)
    return {
        "Call": lambda: Call(True, None, None, 0.0, "bshd"),
        "who watches": lambda: torch.compiler.is_compiling() or is_open(),
        "key": lambda: key_of(q, k, v, call),
        "lookup": lambda: records.CACHE.get(key),
        "out and lse": lambda: new_results(q, record.out_shape, record.lse_shape),
        "arguments": lambda: make(given),
        "  work counter": lambda: hopper.WORK_COUNTER.make(q),
        "launch": lambda: start(arguments),
        "  hooks": launch._hooked,
        "  device": lambda: launch.current_device(),
        "  stream": lambda: current_stream(one.device),
        "  driver": lambda: drive(*whole),
    }


def left_out() -> list[Any]:
    """What stands for the GPU."""
    from tilefold.ops import device as devices
    from tilefold.ops import launch
    from tilefold.ops.cache import kvcache
    from tilefold.ops.dense import attention
    from tilefold.ops.sparse import sparse
    from tilefold.plan import architecture
    from tilefold.plan.architecture import CUDA
    from tilefold.plan.device import device_named

    def compiled(self: Any, args: Any) -> bool:
        self._key(args)  # as where a call of another shape has compiled it
        places = [(at + 13, None) for at, arg in enumerate(args) if hasattr(arg, "block_shape")]
        run = launch.Mapped(nothing, places, lambda one, facts: [one, *one.shape, *one.strides]) if places else nothing
        self._compiled = run, (None,) * 5, lambda index: 0, (None,) * 4
        return True

    def nothing(*args: Any) -> None:
        """What the driver does."""

    def giving(value: Any) -> Callable[..., Any]:
        return lambda *args: value

    in_place = [
        (devices, "interpreting", giving(False)),
        (devices, "check_environment", giving(None)),
        (devices, "_probe", giving(device_named("h200"))),
        (architecture, "architecture_at", giving(CUDA)),
        *((module, "on_host", giving(False)) for module in (attention, kvcache, sparse)),
        (launch.Launch, "_first", compiled),
        (launch.Launch, "found", compiled),
        (launch, "current_device", giving(0)),
        (tilefold.api, "mode_for", giving(False)),  # which reads offsets that lie on the host
        (torch, "zeros", torch.empty),  # which a GPU fills
        (torch.cuda, "current_device", giving(0)),
        (torch.cuda, "is_current_stream_capturing", giving(False)),
        (triton.runtime.driver, "_active", mock.Mock(get_current_stream=giving(0))),
    ]
    return [mock.patch.object(owner, name, new) for owner, name, new in in_place]


def keep_memory() -> None:
    """What is freed stays with the process, as torch's allocator keeps a GPU's: pages from the system take longer than a call."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD, the largest
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def sampler(name: str, call: Call) -> Callable[[], float]:
    runs = 20 if not name.startswith("new") else 12 if DEVICE == "cuda" else 3  # LENGTHS are enough for ten rounds
    return lambda: shortest(call, runs=runs)


def beside(before: Path, names: list[str], rounds: int) -> None:
    """Both versions in turns, and the latter beside SDPA."""
    here, jobs = Path(tilefold.__file__).parents[1], 0 if DEVICE == "cpu" else os.cpu_count() or 1
    of = min if DEVICE == "cpu" else statistics.median
    found = versions.compare([before, here], names, rounds, min(8, jobs), __file__, of)
    for name, (_, after) in found.items():
        peer = "SDPA" + (", grad" if ", grad" in name else " forward + backward" if "backward" in name else "")
        if peer in found and name != peer:
            print(f"{name:36} {after / found[peer][1]:6.2f} of {peer}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by functions")
    parser.add_argument("--stages", action="store_true", help="where the time goes, by steps and stages")
    parser.add_argument("--before", type=Path, help="src of the version to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sort", choices=("tottime", "cumtime"), default="tottime")
    parser.add_argument("--lines", type=int, default=25)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    calls = rows()
    if DEVICE == "cpu":
        keep_memory()
    for patch in left_out() if DEVICE == "cpu" else []:
        patch.start()
    if options.worker:
        made = {name: lambda name=name: first(name, calls[name]) for name in calls}
        return versions.worker(made, sampler, bits=DEVICE == "cuda")
    names = [name for name in calls if options.only in name]
    if options.before:
        beside(options.before, names, options.rounds)
    for name in names if options.profile or options.stages or not options.before else []:
        call = first(name, calls[name])
        found = shortest(call, runs=20 if name.startswith("new") else 100)
        print(f"{name:36} {found:8.1f}", flush=True)
        if options.stages and name == "attention":
            print("".join(f"    {step:32} {shortest(one):8.2f}\n" for step, one in steps().items()), end="")
        if options.profile or (options.stages and name.startswith("new")):
            gc.disable()
            with cProfile.Profile() as profile:
                for _ in range(1000):
                    call()
            gc.enable()
            stats = pstats.Stats(profile)
            if options.stages:
                print("".join(f"    {stage:32} {us:8.1f}\n" for stage, us in stages(stats, found)), end="")
            else:
                stats.sort_stats(options.sort).print_stats(options.lines)


if __name__ == "__main__":
    main()
