"""Clocks, power and temperature of the GPU while a benchmark runs: a figure means little if the clock moved under it.

One nvidia-smi process writes them, a line every half second.  Nothing is read without an NVIDIA GPU.
"""

import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Bits of NVML's reasons for a clock below the highest, of which these three are no fault: an idle GPU, clocks that someone set,
# and a display's clock.
REASONS = {
    0x1: "idle",
    0x2: "clocks set by the user",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown (software)",
    0x40: "thermal slowdown (hardware)",
    0x80: "power brake",
    0x100: "display clock",
}
HARMLESS = {0x1, 0x2, 0x100}
MOVED = 0.03  # of the highest SM clock under load: more, and it is said
COLUMNS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu")
REASON_COLUMNS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # newer drivers' name, older ones'
PERIOD_MS = 500


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample.  MHz, watts, degrees Celsius, per cent of the time busy; None where the device does not say.

    reasons: NVML's bits for why the clock is not the highest."""

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    busy: float | None = None
    reasons: int = 0

    @property
    def throttled(self) -> tuple[str, ...]:
        """The reasons that are a fault."""
        return tuple(name for bit, name in REASONS.items() if self.reasons & bit and bit not in HARMLESS)


@dataclass(frozen=True, slots=True)
class Spread:
    """Lowest, middle and highest of some samples."""

    least: float
    median: float
    most: float

    def __str__(self) -> str:
        low, middle, high = (f"{value:.0f}" for value in (self.least, self.median, self.most))
        return middle if low == high else f"{middle} ({low} to {high})"


@dataclass(frozen=True, slots=True)
class Summary:
    """What the samples under load say; throttled: reason -> the share of them in which it held."""

    samples: int
    sm_mhz: Spread | None
    memory_mhz: Spread | None
    power_w: Spread | None
    temperature_c: Spread | None
    throttled: dict[str, float]

    def __str__(self) -> str:
        figures = (
            (self.sm_mhz, "SM clock", "MHz"),
            (self.memory_mhz, "memory clock", "MHz"),
            (self.power_w, "power", "W"),
            (self.temperature_c, "temperature", "C"),
        )
        said = ", ".join(f"{what} {spread} {unit}" for spread, what, unit in figures if spread is not None)
        return f"{said or 'nothing could be read'} ({self.samples} samples under load)"

    @property
    def warnings(self) -> list[str]:
        """Why figures taken meanwhile are to be read with care: [] if the clock stood still and nothing held it down."""
        found = []
        clock = self.sm_mhz
        if clock is not None and clock.most and (clock.most - clock.least) / clock.most > MOVED:
            share = 100 * (1 - clock.least / clock.most)
            found.append(f"the SM clock moved between {clock.least:.0f} and {clock.most:.0f} MHz ({share:.0f} %)")
        found += [
            f"the GPU was throttled in {100 * share:.0f} % of the samples: {why}"
            for why, share in self.throttled.items()
        ]
        return found


def summarise(readings: Sequence[Reading]) -> Summary | None:
    """A Summary of the readings under load (of all, if none says that the GPU was busy); None of none."""
    busy = [one for one in readings if one.busy] or list(readings)
    if not busy:
        return None

    def spread(name: str) -> Spread | None:
        values = [value for one in busy if (value := getattr(one, name)) is not None]
        return Spread(min(values), float(statistics.median(values)), max(values)) if values else None

    reasons = dict.fromkeys(name for one in busy for name in one.throttled)
    shares = {name: sum(name in one.throttled for one in busy) / len(busy) for name in reasons}
    return Summary(
        len(busy), spread("sm_mhz"), spread("memory_mhz"), spread("power_w"), spread("temperature_c"), shares
    )


# --- where readings come from -----------------------------------------------------------------------------------------------


def parse_smi(line: str) -> Reading | None:
    """A Reading from a line of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` of COLUMNS and the reasons, None if it
    is none (a message, a heading, half a line)."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != len(COLUMNS) + 1 or not any(part[:1].isdigit() for part in parts):
        return None
    sm, memory, watts, degrees, busy = (_number(part) for part in parts[:-1])
    try:
        reasons = int(parts[-1], 0)
    except ValueError:
        reasons = 0
    return Reading(sm, memory, watts, degrees, busy, reasons)


def _number(text: str) -> float | None:
    """None from "[N/A]" and "[Not Supported]"."""
    try:
        return float(text)
    except ValueError:
        return None


def gpu_id() -> str | None:
    """What nvidia-smi calls the current GPU; None without an NVIDIA one."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    uuid = getattr(torch.cuda.get_device_properties(), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


class Sampler:
    """While it is open, one nvidia-smi writes a line every half second into a file.  gpu: None: nothing is read.

    A driver that does not know the newer name of the reasons is asked by the older one's."""

    def __init__(self, gpu: str | None, program: str = "nvidia-smi") -> None:
        self.gpu, self.program = gpu, program
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Sampler":
        self._lines = tempfile.TemporaryFile()
        if self.gpu is not None and shutil.which(self.program):
            asked = self._command(REASON_COLUMNS[0])
            known = subprocess.run(asked, capture_output=True, check=False).returncode == 0
            command = [*(asked if known else self._command(REASON_COLUMNS[1])), f"--loop-ms={PERIOD_MS}"]
            self._process = subprocess.Popen(command, stdout=self._lines, stderr=subprocess.DEVNULL)
        return self

    def _command(self, reasons: str) -> list[str]:
        query = ",".join((*COLUMNS, reasons))
        return [self.program, f"--id={self.gpu}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._lines.close()

    def mark(self) -> int:
        """Now, for `since`."""
        return os.fstat(self._lines.fileno()).st_size

    def since(self, mark: int = 0) -> Summary | None:
        """What was read since then; None if nothing was."""
        text = os.pread(self._lines.fileno(), self.mark() - mark, mark).decode()
        return summarise([reading for line in text.splitlines() if (reading := parse_smi(line)) is not None])
