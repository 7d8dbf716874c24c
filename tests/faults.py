"""Kernels with one planted fault each, and kernels at one roof each: what `tilefold.profile` has to say of them.

`python tests/faults.py` on a GPU prints the table of hits; `--ncu` reads hardware counters, too, where Nsight Compute can.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilefold.profiling.counters import ROLE_VARIABLE, Measured, run_ncu
from tilefold.profiling.report import Profile
from tilefold.profiling.roof_launches import Sizes
from tilefold.profiling.session import Declared, profile, with_counters

MIB = 1 << 20


@triton.jit
def scattered_copy(X, Y, stride, BLOCK: tl.constexpr):
    """Neighbouring lanes read elements `stride` apart: a sector of 32 bytes for 4 of them."""
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + o_x, tl.load(X + o_x.to(tl.int64) * stride))


@triton.jit(do_not_specialize=["turns"])
def spilling_sum(X, Y, turns, BLOCK: tl.constexpr):
    """More values alive in the loop than the registers that a launch with maxnreg leaves."""
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(X + o_x)
    b, c, d = a * 2 + 1, a * 3 + 1, a * 5 + 1
    for _ in range(turns):
        a, b, c, d = b * c + d, c * d + a, d * a + b, a * b + c
        a, b, c, d = a * 0.5, b * 0.25, c * 0.125, d * 0.5
    tl.store(Y + o_x, a + b + c + d)


@triton.jit(do_not_specialize=["turns"])
def few_programs(X, Y, turns, BLOCK: tl.constexpr):
    """Fine by itself, launched with a few programs."""
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o_x)
    for _ in range(turns):
        x = tl.exp2(-x)
    tl.store(Y + o_x, x)


@gluon.jit(do_not_specialize=["turns"])
def conflicting_transposes(X, Y, turns, SIZE: gl.constexpr):
    """Rows in and columns out of a tile of shared memory without swizzle: 32 lanes meet in one bank."""
    rows: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    columns: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    o_m = gl.arange(0, SIZE, gl.SliceLayout(1, rows))
    o_n = gl.arange(0, SIZE, gl.SliceLayout(0, rows))
    o_x = o_m[:, None] * SIZE + o_n[None, :]
    x = gl.load(X + o_x)
    there = gl.allocate_shared_memory(gl.float32, [SIZE, SIZE], plain)
    back = gl.allocate_shared_memory(gl.float32, [SIZE, SIZE], plain)
    for _ in range(turns):
        there.store(x)
        gl.thread_barrier()
        back.store(there.load(columns) + 1.0)
        gl.thread_barrier()
        x = back.load(rows)
    gl.store(Y + o_x + gl.program_id(0) * SIZE * SIZE, x)


@triton.jit
def serial_product(A, B, Out, turns, stride, M: tl.constexpr, K: tl.constexpr):
    """Loads of a tile, then its product, then the next loads: launched with num_stages=1 nothing is under way meanwhile."""
    o_m, o_k = tl.arange(0, M), tl.arange(0, K)
    p_a = A + tl.program_id(0).to(tl.int64) * turns * stride + o_m[:, None] * K + o_k[None, :]
    p_b = B + tl.program_id(0).to(tl.int64) * turns * stride + o_m[None, :] * K + o_k[:, None]
    acc = tl.zeros([M, M], tl.float32)
    for i in tl.range(0, turns, num_stages=1):
        acc = tl.dot(tl.load(p_a + i * stride), tl.load(p_b + i * stride), acc)
    tl.store(Out + tl.program_id(0) * M + o_m, tl.sum(acc, 1))


@triton.jit(do_not_specialize=["turns"])
def pointer_chase(Next, Out, turns, BLOCK: tl.constexpr):
    """Every load waits for the one before: its address is what that one brought."""
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = o_x
    for _ in range(turns):
        at = tl.load(Next + at)
    tl.store(Out + o_x, at)


@triton.jit
def tiny_add(X, Y, BLOCK: tl.constexpr):
    """A kernel of nothing but its launch."""
    o_x = tl.arange(0, BLOCK)
    tl.store(Y + o_x, tl.load(X + o_x) + 1)


@dataclass(frozen=True)
class Fault:
    """expected: the verdict with counters; without: the one that the times and the compiler alone allow.

    make: (device, SMs) -> the call, how often it is made, and the work of a launch by kernel name. region: whether the verdict
    is that of the region. counted: whether a watched run measures it."""

    name: str
    expected: str
    without: str
    make: Callable[[torch.device, int], tuple[Callable[[], object], int, dict[str, Declared]]]
    region: bool = False

    @property
    def counted(self) -> bool:
        return not self.region and self.expected != "launch"


def floats(device, count):
    return torch.rand(count, device=device)


def make_scattered(device, sms):
    count, stride = 4 * MIB, 32
    x, y = floats(device, count * stride), floats(device, count)
    return lambda: scattered_copy[(count // 1024,)](x, y, stride, BLOCK=1024), 3, {}


def make_spilling(device, sms):
    x = floats(device, sms * 16 * 4096)
    y = torch.empty_like(x)
    grid = (sms * 16,)
    return lambda: spilling_sum[grid](x, y, 100, BLOCK=4096, num_warps=4, maxnreg=64), 3, {}


def make_few(device, sms):
    x = floats(device, 8 * 1024)
    return lambda: few_programs[(8,)](x, torch.empty_like(x), 5000, BLOCK=1024), 3, {}


def make_conflicts(device, sms):
    x, y = floats(device, 1024), floats(device, sms * 8 * 1024)
    return lambda: conflicting_transposes[(sms * 8,)](x, y, 500, SIZE=32, num_warps=4), 3, {}


def make_serial(device, sms):
    m, k, turns = 128, 16, 256  # 8 KiB on their way to an SM do not fill DRAM
    a, b = (torch.randn(sms * turns * m * k, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = floats(device, sms * m)
    return lambda: serial_product[(sms,)](a, b, out, turns, m * k, M=m, K=k, num_warps=4, num_stages=1), 3, {}


def make_chase(device, sms):
    links = torch.randperm(64 * MIB, device=device, dtype=torch.int32)
    out = torch.empty(sms * 4 * 128, device=device, dtype=torch.int32)
    return lambda: pointer_chase[(sms * 4,)](links, out, 200, BLOCK=128, num_warps=4), 3, {}


def make_tiny(device, sms):
    x = floats(device, 128)
    return lambda: tiny_add[(1,)](x, x, BLOCK=128, num_warps=1), 100, {}


def make_host(device, sms):
    x = floats(device, 32 * MIB)

    def call():
        x.sin_()
        time.sleep(2e-3)

    return call, 10, {}


def roof(method: str, kernel: str, **sizes: int):
    """A kernel of `tilefold roofline`, which is at its roof: with `programs` other than usual, at the start of a tail."""

    def make(device, sms):
        from tilefold.ops.device import device_of
        from tilefold.profiling.roof_launches import Work

        work = Work(device_of(device), device, Sizes(elements=64 * MIB, l2_elements=2 * MIB, turns=1024))
        moved = {"copy": 8.0 * 64 * MIB, "read_l2": 4.0 * 2 * MIB}.get(method)
        if method == "tail":
            work.programs = sms + 4
        call = work.multiply("bfloat16") if method in ("multiply", "tail") else getattr(work, method)()
        flops = work.flops_of("bfloat16") if method in ("multiply", "tail") else None
        drawn = 4.0 * 2 * MIB * 4 * work.l2_programs if method == "read_l2" else None
        return call, 3, {kernel: Declared(flops=flops, bytes=moved, l2_bytes=drawn)}

    return make


FAULTS = (
    Fault("scattered loads", "uncoalesced", "unknown", make_scattered),
    Fault("spilled registers", "spills", "spills", make_spilling),
    Fault("eight programs", "too few programs", "too few programs", make_few),
    Fault("four programs too many", "tail wave", "tail wave", roof("tail", "multiply_tiles")),
    Fault("unswizzled transposes", "bank conflicts", "unknown", make_conflicts),
    Fault("loads and products in turn", "memory latency", "unknown", make_serial),
    Fault("a chain of loads", "memory latency", "unknown", make_chase),
    Fault("a hundred tiny kernels", "launch", "launch", make_tiny),
    Fault("a sleeping host", "host", "host", make_host, region=True),
    Fault("none: a copy", "DRAM", "DRAM", roof("copy", "copy_bytes")),
    Fault("none: products", "tensor pipe", "tensor pipe", roof("multiply", "multiply_tiles")),
    Fault("none: exponentials", "exp unit", "unknown", roof("exponentials", "exponentials")),
    Fault("none: reads from L2", "L2-to-SM path", "L2-to-SM path", roof("read_l2", "read_bytes")),
)


@dataclass(frozen=True)
class Hit:
    """What was said of one fault."""

    fault: Fault
    expected: str
    found: str
    sentence: str

    @property
    def ok(self) -> bool:
        return self.found == self.expected


def watch(fault: Fault, device: torch.device, times: int | None = None) -> Profile | None:
    """Run a fault, warmed up, under `tilefold.profile`; None where another profiler keeps what it sees."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    call, usual, declared = fault.make(device, sms)
    call()
    with profile(declare=declared) as session:
        for _ in range(times or usual):
            call()
    return None if os.environ.get(ROLE_VARIABLE) == "ncu" else session.profile


def hit_of(fault: Fault, found: Profile, counters: Sequence[Measured]) -> Hit:
    """The verdict on the longest kernel, or on the region."""
    expected = fault.expected if not fault.counted else fault.without
    if counters and fault.counted:
        found = with_counters(found, counters)
        if found.rows and found.rows[0].evidence.counters is not None:
            expected = fault.expected
    verdict = found.verdict if fault.region else found.rows[0].verdict if found.rows else None
    return Hit(
        fault, expected, verdict.resource if verdict else "none", str(verdict or "nothing ran, or the device was busy")
    )


def run(counters: Sequence[Measured], device: torch.device) -> list[Hit]:
    """All faults, one after the other; one that cannot run is a miss that says why."""
    hits = []
    for fault in FAULTS:
        try:
            found = watch(fault, device)
            assert found is not None
            hits.append(hit_of(fault, found, counters))
        except Exception as error:  # the table shows it
            hits.append(Hit(fault, fault.expected, "failed", f"{type(error).__name__}: {str(error)[:300]}"))
    return hits


def counted(timeout_s: float = 300) -> tuple[Measured, ...]:
    """The counters of all faults that have some, from this file run under ncu."""
    return run_ncu([sys.executable, str(Path(__file__).resolve()), "--watched"], marked=True, timeout_s=timeout_s)


def table(hits: Sequence[Hit]) -> str:
    """The table of hits as Markdown."""
    rows = [f"| {h.fault.name} | {h.expected} | {h.found} | {'yes' if h.ok else 'NO'} | {h.sentence} |" for h in hits]
    head = "| planted | expected | found | hit | in words |\n| --- | --- | --- | --- | --- |"
    return "\n".join([head, *rows, "", f"{sum(h.ok for h in hits)} of {len(hits)} hit"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ncu", action="store_true", help="read hardware counters, too")
    parser.add_argument("--watched", action="store_true", help="run what is counted, once each (for ncu)")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    if options.watched:
        for fault in FAULTS:
            if fault.counted:
                try:
                    watch(fault, device, times=1)
                except Exception as error:
                    print(f"{fault.name}: {error}", file=sys.stderr)
        return
    counters: tuple[Measured, ...] = ()
    if options.ncu:
        try:
            counters = counted()
        except Exception as error:
            print(f"no counters: {error}\n")
    print(table(run(counters, device)))
    for each in counters:
        print(each)


if __name__ == "__main__":
    main()
