"""How long a launch should take: the resource that is busy longest, the uneven end of its grid, and the launch itself.

The model is that of a kernel which overlaps everything: it holds where a kernel is at a roof, and what it leaves is what the
kernel does not overlap, or a resource that nobody counts. `apart` is the other end: each resource after the other.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilefold.plan.device import Device
from tilefold.plan.sparse.video_launches import LaunchWork

PARTITIONS = 4  # of an SM, each issuing an instruction a clock; integer and comparison instructions at half of that
HELD = 0.1  # a launch counts as explained within this share of what was measured


@dataclass(frozen=True, slots=True)
class Predicted:
    """resource: busy longest; times: (resource, its seconds alone), longest first, where the device's rate is known.

    uneven: what the SMs' unequal shares of the pieces of work make of the time of a resource that each SM has for itself, from
    1 on. launch: seconds of an empty kernel. seconds: the prediction; apart: if nothing overlapped."""

    resource: str
    seconds: float
    apart: float
    times: tuple[tuple[str, float], ...]
    uneven: float
    launch: float

    def explains(self, measured: float) -> bool:
        """Whether that is what was measured, within 10 %."""
        return abs(measured - self.seconds) <= HELD * measured

    def overlap(self, measured: float) -> float | None:
        """How much of what could overlap did, 0 to 1, limited to that; None where only one resource counts."""
        possible = self.apart - self.seconds
        if possible <= HELD * self.seconds:
            return None
        return min(1.0, max(0.0, (self.apart - measured) / possible))


def predict(
    work: LaunchWork, machine: Device, dtype: str, launch: float, exp_rate: float | None = None, moved: int | None = None
) -> Predicted:  # fmt: skip
    """The prediction for one launch on a machine with measured roofs (`roofs.with_roofs`), or recorded ones.

    dtype: of the products. launch: what an empty kernel takes. exp_rate: measured; None: the device's record. moved:
    bytes between memory and the device, if others than the launch's own."""
    per_sm = {
        "tensor pipe": work.flops / machine.matmul_rate(dtype) if work.flops else 0.0,
        "exp unit": work.exps / (exp_rate or machine.exp_rate) if work.exps else 0.0,
    }
    if machine.measured_l2_bytes_per_s:
        per_sm["L2 to SM"] = work.l2_bytes / machine.measured_l2_bytes_per_s
    if machine.backend == "cuda":
        per_sm["ALU pipe"] = 2 * work.alu / (PARTITIONS * machine.sms * machine.clock_hz)
    uneven = math.ceil(work.items / machine.sms) / (work.items / machine.sms) if work.items else 1.0
    alone = {name: seconds * uneven for name, seconds in per_sm.items() if seconds}
    alone["DRAM"] = (work.bytes if moved is None else moved) / machine.dram_rate
    times = tuple(sorted(alone.items(), key=lambda entry: -entry[1]))
    resource, longest = times[0]
    apart = launch + sum(seconds for _, seconds in times)
    return Predicted(resource, longest + launch, apart, times, uneven, launch)


def memory_traffic(works: Sequence[LaunchWork | None], cache: int, dirty: int) -> Iterator[int]:
    """Bytes between memory and the device during each launch of a sequence; None: one of which nothing is known.

    cache: bytes of the L2 cache; dirty: of them, what was written before and is not in memory yet. What a launch brings in pushes
    that out, and the end of what it writes stays for the next one to push."""
    for work in works:
        if work is None:
            dirty = 0
            yield 0
            continue
        pushed = min(dirty, work.bytes)
        left = min(work.written, cache)
        yield max(0, work.bytes + pushed - left)
        dirty = min(cache, dirty - pushed + left)
