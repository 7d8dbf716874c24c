"""What ran: kernels and times from the trace of torch's profiler (CUPTI) or the interpreter, code from Triton's kernels."""

import gc
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilefold.aot.report import Occupancy, occupancy
from tilefold.aot.targets import TARGETS
from tilefold.bench import timers
from tilefold.plan.device import Device
from tilefold.profiling.evidence import Region

COPIES = ("gpu_memcpy", "gpu_memset")
MARK = "spin_kernel"  # of torch.cuda._sleep: `timers.hidden` puts one before a call and one behind
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Launched:
    """One kernel with one grid, or one copy. seconds: of its launches, in order; begin: of a single one. None where the trace
    does not say."""

    kernel: str
    seconds: tuple[float, ...]
    programs: int | None = None
    threads: int | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    begin: float = 0.0
    copy: bool = False

    @property
    def median(self) -> float:
        """Seconds of a launch."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Code:
    """What the compiler made of a Triton kernel: registers of a thread, of which `spills` in memory; `binary` to disassemble."""

    kernel: str
    registers: int
    spills: int
    shared_bytes: int
    binary: bytes = field(default=b"", repr=False)


def ordered(document: Mapping[str, Any]) -> tuple[Launched, ...]:
    """Everything that the device did, by its begin, from a Chrome trace of torch's profiler."""
    found = []
    for event in document.get("traceEvents", ()):
        category = str(event.get("cat", "")).lower()
        if event.get("ph") != "X" or category not in ("kernel", *COPIES):
            continue
        args = event.get("args", {})
        sizes = product(args.get("grid")), product(args.get("block"))
        rest = args.get("registers per thread"), args.get("shared memory")
        begin, seconds = float(event["ts"]) * 1e-6, float(event.get("dur", 0)) * 1e-6
        found.append(Launched(str(event.get("name", "")), (seconds,), *sizes, *rest, begin, category in COPIES))
    return tuple(sorted(found, key=lambda each: each.begin))


def read_trace(document: Mapping[str, Any]) -> tuple[tuple[Launched, ...], tuple[tuple[float, float], ...], bool]:
    """A Chrome trace of torch's profiler -> kernels by total time, (begin, end) of all that the device did, graph replays?

    Seconds. Copies and fills of memory are in the second, but no kernels.
    """
    found: dict[Launched, list[float]] = {}
    rans = ordered(document)
    for ran in rans:
        if not ran.copy:
            found.setdefault(replace(ran, seconds=(), begin=0.0), []).extend(ran.seconds)
    kernels = (replace(kernel, seconds=tuple(times)) for kernel, times in found.items())
    replayed = any(event.get("name") == "cudaGraphLaunch" for event in document.get("traceEvents", ()))
    spans = tuple((ran.begin, ran.begin + sum(ran.seconds)) for ran in rans)
    return tuple(sorted(kernels, key=lambda each: -sum(each.seconds))), spans, replayed


def product(sizes: Any) -> int | None:
    """Of a grid or a block as the trace has it; None where it has none."""
    return math.prod(map(int, sizes)) if isinstance(sizes, list | tuple) and sizes else None


# --- the launches of calls, in the order in which they ran ---------------------------------------------------------------------


def between_marks(rans: Sequence[Launched]) -> Iterator[tuple[Launched, ...]]:
    """What ran between the first mark and the second, the third and the fourth, and so on."""
    inside: list[Launched] | None = None
    for ran in rans:
        if MARK in ran.kernel:
            if inside is not None:
                yield tuple(inside)
            inside = [] if inside is None else None
        elif inside is not None:
            inside.append(ran)


def traced(calls: Mapping[str, Call], samples: int = 5) -> dict[str, tuple[tuple[Launched, ...], ...]]:
    """What each call launches, `samples` times, the L2 cache cleared and the host ahead (`timers.hidden`): one trace of all.

    () for a call of which the trace does not hold every sample. Warm up before."""
    covered = {name: timers.hidden(call) for name, call in calls.items()}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for run in covered.values():
            for _ in range(samples):
                run()
        torch.cuda.synchronize()
    parts = list(between_marks(ordered(timers.exported(profiler))))
    if len(parts) != samples * len(covered):
        return dict.fromkeys(calls, ())
    return {name: tuple(parts[i * samples : (i + 1) * samples]) for i, name in enumerate(covered)}


def interpreted(calls: Mapping[str, Call]) -> tuple[dict[str, tuple[tuple[Launched, ...], ...]], dict[str, float]]:
    """The same in the interpreter, once: launches by their wall time, and that of each call (ms)."""
    from tilefold.ops.launch import OBSERVERS

    found: dict[str, tuple[tuple[Launched, ...], ...]] = {}
    times = {}
    for name, call in calls.items():
        rans: list[Launched] = []

        def tell(kernel: str, grid: tuple[int, int, int], seconds: float, rans: list[Launched] = rans) -> None:
            rans.append(Launched(kernel, (seconds,), product(grid)))

        OBSERVERS.append(tell)
        begin = time.perf_counter()
        try:
            call()
        finally:
            OBSERVERS.remove(tell)
        found[name], times[name] = (tuple(rans),), (time.perf_counter() - begin) * 1e3
    return found, times


def by_place(samples: Sequence[Sequence[Launched]]) -> tuple[Launched, ...]:
    """Each launch of a call with its times in all samples; samples that launched something else than the first are left out."""
    if not samples:
        return ()
    names = [ran.kernel for ran in samples[0]]
    same = [sample for sample in samples if [ran.kernel for ran in sample] == names]
    times = (tuple(sample[place].seconds[0] for sample in same) for place in range(len(names)))
    return tuple(replace(ran, seconds=seconds) for ran, seconds in zip(samples[0], times, strict=True))


# --- what is known of them ------------------------------------------------------------------------------------------------


def region_of(
    kernels: Sequence[Launched], spans: Sequence[tuple[float, float]], replayed: bool, launch_seconds: float | None = None
) -> Region:  # fmt: skip
    """The region between the first begin and the last end; what ran side by side is busy once."""
    times = [seconds for kernel in kernels for seconds in kernel.seconds]
    whole = timers.joined(spans)
    if not whole:
        return Region(0.0, 0.0, 0, 0.0, launch_seconds, replayed)
    busy, median = sum(end - begin for begin, end in whole), statistics.median(times) if times else 0.0
    return Region(whole[-1][1] - whole[0][0], busy, len(times), median, launch_seconds, replayed)


def codes_of(names: Iterable[str]) -> tuple[Code, ...]:
    """The loaded Triton kernels of these names, ours and anybody's, found among the objects of this process."""
    compiler = sys.modules.get("triton.compiler.compiler")
    if compiler is None:
        return ()
    wanted, found = set(names), []
    for each in gc.get_objects():
        if type(each) is compiler.CompiledKernel and each.name in wanted and getattr(each, "n_regs", None) is not None:
            binary = each.asm.get("cubin", b"")
            found.append(Code(each.name, each.n_regs, each.n_spills, each.metadata.shared, binary))
    return tuple(found)


def code_for(launched: Launched, codes: Sequence[Code]) -> Code | None:
    """The compiled kernel of a launch; None where none fits, or several that differ in what matters."""
    same = [code for code in codes if code.kernel == launched.kernel]
    if launched.registers is not None:
        same = [code for code in same if code.registers == launched.registers] or same
    if launched.shared_bytes is not None:
        same = [code for code in same if code.shared_bytes == launched.shared_bytes] or same
    if not same or len({(code.registers, code.spills) for code in same}) > 1:
        return None
    return same[0] if len({code.binary for code in same}) == 1 else replace(same[0], binary=b"")


def opcodes_of(code: Code) -> Mapping[str, int]:
    """Instruction families of the machine code, most frequent first; empty where it cannot be disassembled."""
    if not code.binary:
        return {}
    from tilefold.aot.compile import _disassemble
    from tilefold.aot.sass import opcode_counts, parse_listing

    try:
        return opcode_counts(parse_listing(_disassemble(code.binary), "sass"))
    except Exception:  # a missing or failing disassembler costs the instruction mix, not the profile
        return {}


def occupancy_on(device: Device, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Programs that fit one SM of a device: of its architecture, or the nearest older one, with the device's own limits."""
    known = TARGETS.get(device.target)
    base = known or TARGETS["gfx942" if device.backend == "hip" else "sm_80"]
    target = replace(
        base,
        shared_per_sm=device.smem_per_sm,
        registers_per_sm=device.registers_per_sm if known is None else base.registers_per_sm,
        warps_per_sm=device.threads_per_sm // device.warp_size,
        programs_per_sm=device.blocks_per_sm,
    )
    return occupancy(target, threads=threads, registers=registers, shared_bytes=shared_bytes)


def same_kernel(one: str, other: str) -> bool:
    """Whether two tools mean the same kernel: C++ names are printed with and without their template arguments and signature."""
    first, second = (re.split(r"[<(]", name.removeprefix("void "), maxsplit=1)[0].strip() for name in (one, other))
    return first == second
