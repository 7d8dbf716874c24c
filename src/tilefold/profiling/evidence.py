"""What is known of one kernel, as frozen records: None where nobody measured it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

FULL_SECTOR = 32.0  # bytes


@dataclass(frozen=True, slots=True)
class Counters:
    """Hardware counters of one kernel; shares are percent of the machine's peak over the kernel's time, None if unread.

    dram, l2, l2_to_sm, l1, shared: memory, the L2 cache itself, the crossbar from it to the SMs, the L1 cache and its way to
    the registers, shared memory. tensor, fma, alu, exp: pipes. issue: issue slots. occupancy: warps resident, of the most.
    bytes_per_sector: bytes that global loads used of each sector of 32 that they moved; store_bytes_per_sector likewise.
    Copies to shared memory (TMA, cp.async) are not among these loads.
    wasted_share: bytes that loads and stores moved and did not use, of all bytes between the SMs and L2, copies included, 0 to 1.
    conflict_share: of the passes over shared memory, those that only bank conflicts made necessary, 0 to 1.
    local_share: of all sectors through L1, copies included where they were read, those of spilled registers, 0 to 1.
    stalls: reason -> warps that wait for it, per instruction issued. dram_bytes: read and written.
    """

    dram: float | None = None
    l2: float | None = None
    l2_to_sm: float | None = None
    l1: float | None = None
    shared: float | None = None
    tensor: float | None = None
    fma: float | None = None
    alu: float | None = None
    exp: float | None = None
    issue: float | None = None
    occupancy: float | None = None
    bytes_per_sector: float | None = None
    store_bytes_per_sector: float | None = None
    wasted_share: float | None = None
    conflict_share: float | None = None
    local_share: float | None = None
    stalls: Mapping[str, float] = field(default_factory=dict)
    dram_bytes: float | None = None

    @property
    def waits(self) -> tuple[tuple[str, float], ...]:
        """What warps wait for and its share of all waiting, 0 to 1, most first; being ready is no reason."""
        waits = {name: value for name, value in self.stalls.items() if name not in ("selected", "not_selected")}
        total = sum(waits.values())
        return tuple(sorted(((name, value / total) for name, value in waits.items() if total), key=lambda one: -one[1]))

    @property
    def top_stall(self) -> tuple[str, float] | None:
        """The reason that warps wait for most, and its share."""
        return next(iter(self.waits), None)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One kernel.

    seconds: median of a launch; launches: how many; share: of the time of all kernels, 0 to 1.
    programs: of the grid; threads, registers (a thread), spills (registers of a thread in memory), shared_bytes: of a program.
    resident: programs that fit an SM at once, and what sets that limit. sms: of the device.
    flops, bytes, l2_bytes: declared work of one launch. tensor_rate, dram_rate, l2_rate: roofs (per second).
    measured_roofs: whether the roofs are of this machine. launch_seconds: what an empty kernel takes.
    opcodes: instruction mix of the machine code, family -> count (static).
    """

    kernel: str
    seconds: float | None = None
    launches: int = 1
    share: float | None = None
    programs: int | None = None
    threads: int | None = None
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    resident: int | None = None
    limit: str | None = None
    sms: int | None = None
    flops: float | None = None
    bytes: float | None = None
    l2_bytes: float | None = None
    tensor_rate: float | None = None
    dram_rate: float | None = None
    l2_rate: float | None = None
    measured_roofs: bool = False
    launch_seconds: float | None = None
    opcodes: Mapping[str, int] = field(default_factory=dict)
    counters: Counters | None = None

    def _rate_share(self, work: float | None, roof: float | None) -> float | None:
        return 100 * work / self.seconds / roof if work and roof and self.seconds else None

    @property
    def tensor_share(self) -> float | None:
        """Declared FLOPs over time, percent of the roof."""
        return self._rate_share(self.flops, self.tensor_rate)

    @property
    def dram_share(self) -> float | None:
        """Declared bytes over time, percent of the roof."""
        return self._rate_share(self.bytes, self.dram_rate)

    @property
    def l2_share(self) -> float | None:
        """Declared bytes drawn from L2 over time, percent of the roof."""
        return self._rate_share(self.l2_bytes, self.l2_rate)

    @property
    def waves(self) -> "Waves | None":
        """How the grid fills the device; None where something of that is unknown."""
        if not self.programs or not self.sms or not self.resident:
            return None
        return waves_of(self.programs, self.sms, self.resident)


@dataclass(frozen=True, slots=True)
class Waves:
    """waves: programs over those that are resident at once. filled: share of the places that hold a program, over all waves
    (below one wave: of the SMs' turns, by the fullest SM)."""

    waves: float
    filled: float


def waves_of(programs: int, sms: int, resident: int) -> Waves:
    """Waves of a grid whose programs take equally long."""
    slots = sms * resident
    waves = programs / slots
    # Below a wave an SM's programs share its units: the SM with the most of them ends last.
    filled = waves / math.ceil(waves) if waves > 1 else programs / (sms * math.ceil(programs / sms))
    return Waves(waves, filled)


@dataclass(frozen=True, slots=True)
class Region:
    """Everything that ran between two points.

    span: seconds from the first kernel's begin to the last one's end; busy: of them with a kernel or copy running.
    kernels: launches; median: seconds of the median kernel. launch_seconds: host time that one launch costs here, if measured.
    replayed: whether kernels came from CUDA graphs. under_profiler: the host was slowed by being watched.
    """

    span: float
    busy: float
    kernels: int
    median: float
    launch_seconds: float | None = None
    replayed: bool = False
    under_profiler: bool = True

    @property
    def idle(self) -> float:
        """Share of the span in which the device did nothing, 0 to 1."""
        return max(0.0, 1 - self.busy / self.span) if self.span else 0.0
