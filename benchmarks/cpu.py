"""Dense attention on the CPU: tilefold's plain torch beside torch's SDPA and FlexAttention's eager form, in one process.

    OMP_NUM_THREADS=2 PYTHONPATH=src python benchmarks/cpu.py [--length 4096] [--rounds 7]

FlexAttention has no backward pass on the CPU.  The rows take turns, so that what else the machine does meets them alike; a row is
the shortest of its rounds."""

import argparse
import time
import warnings
from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import tilefold

FLEX = "FlexAttention, eager"
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def peers(causal: bool, n: int) -> dict[str, Attend]:
    """By name; all take and give [batch, heads, seq, dim]."""
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cpu") if causal else None
    return {
        "tilefold": lambda q, k, v: tilefold.attention(q, k, v, causal=causal, layout="bhsd"),
        "SDPA": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal),
        FLEX: lambda q, k, v: flex_attention(q.detach(), k.detach(), v.detach(), block_mask=mask),
    }


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(causal: bool, n: int, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Of each peer: seconds forward, seconds backward (infinity: none), largest difference of out from SDPA's."""
    q, k, v = (torch.randn(1, 8, n, 64, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 8, n, 64)
    found: dict[str, tuple[float, float, float]] = {}
    known = peers(causal, n)
    exact = known["SDPA"](q, k, v).detach()
    for name in known:
        found[name] = (float("inf"), float("inf"), float((known[name](q, k, v).detach() - exact).abs().max()))
    for _ in range(rounds):
        for name, attend in known.items():
            start = time.perf_counter()
            out = attend(q, k, v)
            forward = time.perf_counter() - start
            if name == FLEX:
                found[name] = (min(found[name][0], forward), found[name][1], found[name][2])
                continue
            backward = timed(lambda out=out: torch.autograd.grad(out, (q, k, v), dout))  # type: ignore[misc]
            old = found[name]
            found[name] = (min(old[0], forward), min(old[1], backward), old[2])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, B=1, H=8, N={given.length}, D=64, fp32; ms\n")
    print("| | forward | beside SDPA | backward | beside SDPA | largest difference |\n|---|---:|---:|---:|---:|---:|")
    for causal in (True, False):
        rows = measure(causal, given.length, given.rounds)
        base = rows["SDPA"]
        for name, (forward, backward, error) in rows.items():
            label = f"{name}, {'causal' if causal else 'full'}"
            back = "none | " if backward == float("inf") else f"{backward * 1e3:.0f} | {backward / base[1]:.2f}"
            print(f"| {label} | {forward * 1e3:.0f} | {forward / base[0]:.2f} | {back} | {error:.0e} |", flush=True)


if __name__ == "__main__":
    main()
