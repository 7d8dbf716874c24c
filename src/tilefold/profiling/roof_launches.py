"""The launches behind `roofs`: calls over kernels/roofs.py, and how each is timed."""

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilefold.bench import timers
from tilefold.kernels import roofs as kernels
from tilefold.ops.launch import Launch
from tilefold.plan.device import Device, device_named

Call = Callable[[], object]
FMA_BLOCK = 2048
UNROLLED = 8  # steps of a turn in the kernels that loop in registers

# dtype of the roof -> dtype of the tiles, of the sums, precision of tl.dot, the feature of a GPU that it needs
PRODUCTS: dict[str, tuple[torch.dtype, torch.dtype, str | None, str]] = {
    "bfloat16": (torch.bfloat16, torch.float32, None, ""),
    "float16": (torch.float16, torch.float32, None, ""),
    "tf32": (torch.float32, torch.float32, "tf32", ""),
    "float8_e4m3fn": (torch.float8_e4m3fn, torch.float32, None, "e4m3 products"),
    "int8": (torch.int8, torch.int32, None, ""),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much each measurement does. elements: int32 of the DRAM buffers; l2_elements: of the one in L2, read l2_turns times;
    block: of a program at a time. turns: of the loops in registers and on tensor cores. programs: of those, an SM.
    tile: M, N of the products; k_bytes: bytes of a row of their tiles. warps. Defaults are for a data-centre GPU."""

    elements: int = 1 << 29
    l2_elements: int = 1 << 21
    l2_turns: int = 4
    block: int = 8192
    turns: int = 4096
    programs: int = 8
    tile: tuple[int, int] = (128, 256)
    k_bytes: int = 128
    warps: int = 8


def sizes_of(device: Device) -> Sizes:
    """Sizes for a device: buffers far beyond its L2 cache and within a quarter of it; next to nothing for the interpreter."""
    if device.backend == "interpreter":
        return Sizes(
            elements=1 << 12, l2_elements=1 << 10, l2_turns=3, block=256, turns=2, programs=2, tile=(16, 16), k_bytes=64, warps=4
        )  # fmt: skip
    quarter = 1 << (device.l2_bytes // 16).bit_length() - 1  # elements of 4 bytes
    return Sizes(elements=max(1 << 28, 128 * quarter), l2_elements=quarter)


class Work:
    """The calls of one measurement. Each method gives a call that can be repeated, and keeps its tensors alive.

    The results stay in `out`, where tests look."""

    def __init__(self, device: Device, where: torch.device, sizes: Sizes) -> None:
        self.device, self.where, self.sizes = device, where, sizes
        self.programs = sizes.programs * device.sms
        self.l2_programs = 4 * device.sms if device.backend != "interpreter" else 2
        self.out = torch.zeros(max(self.programs, self.l2_programs), dtype=torch.int32, device=where)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of the products that the device has, and plain float32."""
        if self.device.backend == "interpreter":
            return ("float16", "tf32", "int8", "float32")  # numpy, which multiplies there, has no bfloat16
        if self.device.backend == "hip":
            return ("bfloat16", "float16", "int8", "float32")
        return (*(name for name, entry in PRODUCTS.items() if not entry[3] or self.device.has(entry[3])), "float32")

    def _launch(self, kernel: Any, programs: int, args: tuple[Any, ...], **constants: Any) -> functools.partial[None]:
        options = {"num_warps": self.sizes.warps}
        launch = Launch(kernel, (programs, 1, 1), constants, options, self.where.index or 0)
        return functools.partial(launch, args)

    @functools.cached_property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two buffers of the DRAM measurements; random bits, since equal ones could be compressed on their way."""
        x = torch.randint(-(2**31), 2**31 - 1, (self.sizes.elements,), dtype=torch.int32, device=self.where)
        return x, torch.zeros_like(x)

    def read(self) -> functools.partial[None]:
        """DRAM -> registers."""
        blocks = self.sizes.elements // self.sizes.block
        args = (self.buffers[0], self.out, blocks, 1)
        return self._launch(kernels.read_bytes, self.l2_programs, args, BLOCK=self.sizes.block, PASS=False)

    def write(self) -> functools.partial[None]:
        """Registers -> DRAM."""
        programs = self.sizes.elements // (self.sizes.block // 2)
        return self._launch(kernels.write_bytes, programs, (self.buffers[1], 7), BLOCK=self.sizes.block // 2)

    def copy(self) -> functools.partial[None]:
        """DRAM -> DRAM."""
        programs = self.sizes.elements // (self.sizes.block // 2)
        return self._launch(kernels.copy_bytes, programs, self.buffers, BLOCK=self.sizes.block // 2)

    def read_l2(self) -> functools.partial[None]:
        """L2 -> registers of every SM."""
        blocks = self.sizes.l2_elements // self.sizes.block
        args = (self.buffers[0][: self.sizes.l2_elements], self.out, blocks, self.sizes.l2_turns)
        return self._launch(kernels.read_bytes, self.l2_programs, args, BLOCK=self.sizes.block, PASS=True)

    def flops_of(self, dtype: str) -> float:
        """Of one call of `multiply(dtype)`."""
        s = self.sizes
        if dtype == "float32":
            return 2.0 * UNROLLED * FMA_BLOCK * s.turns * self.programs
        m, n = s.tile
        return 2.0 * m * n * (s.k_bytes // PRODUCTS[dtype][0].itemsize) * s.turns * self.programs

    @functools.cached_property
    def start(self) -> torch.Tensor:
        """[FMA_BLOCK] fp32 in (0, 0.5): sums and products of the loops stay finite and normal."""
        return 0.05 + 0.4 * torch.rand(FMA_BLOCK, device=self.where)

    def multiply(self, dtype: str) -> functools.partial[None]:
        """Products on the SM; normal values, as the power that they draw sets the clock. The tiles and sums: `self.product`."""
        s = self.sizes
        if dtype == "float32":
            return self._in_registers(kernels.multiply_add)
        import triton.language as tl

        kind, acc, precision, _ = PRODUCTS[dtype]
        (m, n), k = s.tile, s.k_bytes // kind.itemsize
        a, b = (torch.randn(rows, k, device=self.where) for rows in (m, n))
        if kind == torch.int8:
            a, b = a * 20, b * 20
        a, b = a.to(kind), b.to(kind)
        sums = torch.zeros(self.programs, dtype=acc, device=self.where)
        self.product = (a, b, sums)
        constants = {"M": m, "N": n, "K": k, "ACC": tl.int32 if acc == torch.int32 else tl.float32}
        args = (a, b, sums, s.turns)
        return self._launch(kernels.multiply_tiles, self.programs, args, **constants, PRECISION=precision)

    @property
    def exps(self) -> float:
        """Exponentials of one call of `exponentials`."""
        return float(UNROLLED * FMA_BLOCK * self.sizes.turns * self.programs)

    def exponentials(self) -> functools.partial[None]:
        """exp2 in registers; the sums: `self.product`."""
        return self._in_registers(kernels.exponentials)

    def _in_registers(self, kernel: Any) -> functools.partial[None]:
        sums = torch.zeros(self.programs, dtype=torch.float32, device=self.where)
        self.product = (self.start, self.start, sums)
        return self._launch(kernel, self.programs, (self.start, sums, self.sizes.turns), BLOCK=FMA_BLOCK)

    def nothing(self) -> functools.partial[None]:
        """A launch of one program that does nothing."""
        return self._launch(kernels.nothing, 1, (self.out,))


def timer(where: torch.device) -> Callable[[Call], float]:
    """Seconds of a call: the median between GPU events, or of wall time on the CPU."""
    if where.type == "cpu":
        return lambda call: statistics.median(timers.wall_samples(call, budget_s=0.0)) * 1e-3
    return lambda call: statistics.median(timers.event_samples(call, warmup_ms=15)) * 1e-3


def launch_on_device(call: Call, where: torch.device) -> float:
    """Seconds from one launch to the next where the host is not waited for: replays of a CUDA graph."""
    if where.type == "cpu":
        return launch_on_host(call, where)  # the interpreter has no device beside the host
    return statistics.median(timers.graph_sampler([call] * 100, replays=5, target_ms=1.0)()) * 1e-3


def launch_on_host(call: Call, where: torch.device) -> float:
    """Seconds that an eager launch costs the host."""
    synchronize = torch.cuda.synchronize if where.type == "cuda" else lambda: None
    return timers.time_host(call, synchronize, calls=100 if where.type == "cuda" else 2, repetitions=5).ms * 1e-3


def example_launch(part: str, dtype: str = "bfloat16") -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of a measurement as an H200 runs it, on tensors without memory, to compile."""
    device = device_named("h200")
    work = Work(device, torch.device("meta"), sizes_of(device))
    call = work.multiply(dtype) if part == "multiply" else getattr(work, part)()
    launch: Any = call.func
    (args,) = call.args
    return launch.fn, args, launch.keywords
