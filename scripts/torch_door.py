"""What a call through torch's dispatcher costs the host beyond `tilefold.attention`, in microseconds.

    python scripts/torch_door.py [--rounds 9] [--calls 5000]

On a GPU: scaled_dot_product_attention beside `attention`, of a shape so small that the host is what is measured.  On a CPU: the
operator, called in a loop that is not Python's, and the computing left out of both.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import tilefold
from tilefold.integrations import torch_flash
from tilefold.ops.serve import BoundFunction

MEMORY = {"rows first": (2, 64, 4, 64), "heads first": (2, 4, 64, 64)}


def repeated(calls: int, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    for _ in range(calls):  # out becomes q, so that no call can be left out
        q = torch.ops.aten._flash_attention_forward(q, k, k, None, None, 64, 64, 0.0, True, False, scale=0.125)[0]
    return q


def microseconds(run: Callable[[], object], calls: int, gpu: bool) -> float:
    start = time.perf_counter()
    run()
    if gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="the host's time of calls through torch's dispatcher")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=5000)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    loop = torch.jit.script(repeated)
    handle = torch_flash.activate("CUDA" if gpu else "CPU")
    print("| q in memory | attention | through torch | beyond |\n|---|---:|---:|---:|")
    for memory, shape in MEMORY.items():
        q = torch.randn(shape, device="cuda" if gpu else "cpu").half()
        q = q.transpose(1, 2) if memory == "heads first" else q
        heads = q.transpose(1, 2)

        def ours(q: torch.Tensor = q) -> None:
            for _ in range(args.calls):
                tilefold.attention(q, q, q, causal=True, scale=0.125)

        def theirs(q: torch.Tensor = q, heads: torch.Tensor = heads) -> None:
            if not gpu:
                loop(args.calls, q, q)
                return
            for _ in range(args.calls):
                torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True, scale=0.125)

        with torch.no_grad():
            loop(1, q, q)
            tilefold.attention(q, q, q, causal=True, scale=0.125)
            computed = BoundFunction.__call__
            if not gpu:
                BoundFunction.__call__ = lambda *_: None  # type: ignore[method-assign]
            times = [[microseconds(run, args.calls, gpu) for run in (ours, theirs)] for _ in range(args.rounds)]
            BoundFunction.__call__ = computed  # type: ignore[method-assign]
        mine, door = (min(column) for column in zip(*times, strict=True))
        beyond = statistics.median(b - a for a, b in times)
        print(f"| {memory} | {mine:.1f} | {door:.1f} | {beyond:.1f} |")
    handle.remove()


if __name__ == "__main__":
    main()
