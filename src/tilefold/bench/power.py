"""Clocks, power and temperature of the GPU while a benchmark runs: a figure means little if the clock moved under it.

A thread reads them from one nvidia-smi process that prints a line every half second.  Nothing is read without an NVIDIA GPU.
"""

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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

    def record(self) -> dict[str, Any]:
        """As a record keeps it."""
        return asdict(self)

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
    is none (a message, a heading)."""
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


Stop = threading.Event
Source = Callable[[Stop], Iterator[Reading]]


def smi_readings(device: str, program: str = "nvidia-smi") -> Source:
    """Readings of the GPU with a UUID (or index) from a nvidia-smi that runs until the event is set; none where it cannot."""

    def read(stop: Stop) -> Iterator[Reading]:
        for reasons in REASON_COLUMNS:
            query = ",".join((*COLUMNS, reasons))
            command = [program, f"--id={device}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
            found = False
            for line in _lines([*command, f"--loop-ms={PERIOD_MS}"], stop):
                reading = parse_smi(line)
                if reading is not None:
                    found = True
                    yield reading
            if found or stop.is_set():
                return  # else the driver does not know this column's name

    return read


def _lines(command: Sequence[str], stop: Stop) -> Iterator[str]:
    """What a program prints, line by line, until it ends or the event is set."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return

    def end() -> None:
        stop.wait()
        process.terminate()

    threading.Thread(target=end, daemon=True).start()  # a read of its output would wait for the next line
    with process:
        assert process.stdout is not None
        yield from process.stdout
        process.terminate()


def source_of(device: str) -> Source | None:
    """Where readings of the current GPU come from; None without an NVIDIA GPU or nvidia-smi."""
    if device != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(), "uuid", None)
    if torch.version.hip or uuid is None:
        return None
    return smi_readings(f"GPU-{uuid}") if shutil.which("nvidia-smi") else None


class Sampler:
    """Collects readings in a thread while it is open; without a source it collects nothing."""

    def __init__(self, source: Source | None) -> None:
        self.source = source
        self.readings: list[tuple[float, Reading]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Sampler":
        if self.source is not None:
            self._thread = threading.Thread(target=self._collect, args=(self.source,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def _collect(self, source: Source) -> None:
        for reading in source(self._stop):
            self.readings.append((time.perf_counter(), reading))
            if self._stop.is_set():
                return

    def since(self, begin: float = 0.0) -> Summary | None:
        """What was read since a time of time.perf_counter(); None if nothing was."""
        return summarise([reading for at, reading in list(self.readings) if at >= begin])
