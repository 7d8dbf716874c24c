"""Devices as values: what a planner must know of a GPU, from public datasheets or from a probe."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from tilefold.errors import DeviceError, DtypeError
from tilefold.plan.architecture import CPU, Architecture, architecture_of, has_feature

KIB, MIB, TERA = 1024, 1024**2, 1e12

Rates = tuple[tuple[str, float], ...]
"""(dtype, FLOP/s) of matrix products."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU (or the interpreter): limits of a program and roofs of the machine.

    name: short name ("h200"); title: name for people; backend: "cuda", "hip", "interpreter" or "cpu".
    arch: 90 for sm_90, or "gfx942".
    sms: streaming multiprocessors (compute units on AMD). warp_size: threads of a warp (64 on CDNA).
    smem_per_block: most bytes of shared memory that one program can opt in to; smem_per_sm: bytes per SM.
    registers_per_sm: 32-bit registers; registers_per_thread: the most that one thread can hold.
    threads_per_sm, blocks_per_sm: most resident threads and programs. l2_bytes: size of the L2 cache.
    clock_hz: the clock for which tensor_flops holds. exps_per_clock_per_sm: exponentials per clock and SM.
    dram_bytes_per_s: datasheet bandwidth. tensor_flops: (dtype, dense FLOP/s) pairs with fp32 accumulation; "tf32" is
        listed too, "float32" is IEEE fp32.
    measured_dram_bytes_per_s, measured_flops: roofs that were measured; they replace the datasheet's in bounds.
    measured_l2_bytes_per_s: what a kernel that does nothing but load brings from the L2 cache to shared memory, if measured.
    source: where the numbers come from ("datasheet", "measured", "probed", with the name of the document).
    """

    name: str
    title: str
    backend: str
    arch: int | str
    sms: int
    smem_per_block: int
    smem_per_sm: int
    registers_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    l2_bytes: int
    clock_hz: float
    dram_bytes_per_s: float
    tensor_flops: Rates
    source: str
    warp_size: int = 32
    registers_per_thread: int = 255
    exps_per_clock_per_sm: int = 16
    measured_dram_bytes_per_s: float | None = None
    measured_flops: Rates = ()
    measured_l2_bytes_per_s: float | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def target(self) -> str:
        """The compilation target as compilers spell it: "sm_90", "gfx942", "cpu"."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)

    @property
    def architecture(self) -> Architecture:
        """What serves it, of the registry."""
        return architecture_of(self)

    @property
    def generation(self) -> int:
        """The number of a CUDA architecture (90 for sm_90), 0 for everything else."""
        return self.arch if self.backend == "cuda" and isinstance(self.arch, int) else 0

    @property
    def dependent_launches(self) -> bool:
        """Whether a kernel can be launched before the one that it depends on is through (programmatic dependent launch)."""
        return self.has("dependent launches")

    def has(self, feature: str) -> bool:
        """Whether it has a feature of `plan.architecture.FEATURES`."""
        return has_feature(self, feature)

    def matmul_rate(self, dtype: str) -> float:
        """Matrix-multiply roof for a dtype (FLOP/s): measured, else the datasheet's. DeviceError if there is none."""
        rates = dict(self.tensor_flops) | dict(self.measured_flops)
        if dtype not in rates:
            raise DeviceError(f"device {self.name} has no matrix rate for dtype {dtype!r}; it has {', '.join(rates)}")
        return rates[dtype]

    @property
    def dram_rate(self) -> float:
        """DRAM roof (bytes/s): measured if known, else the datasheet's."""
        return self.measured_dram_bytes_per_s or self.dram_bytes_per_s

    @property
    def exp_rate(self) -> float:
        """Exponentials per second of the whole device."""
        return float(self.exps_per_clock_per_sm) * self.sms * self.clock_hz


def _rates(half: float, tf32: float, fp32: float) -> Rates:
    """Dense rates, given in TFLOP/s."""
    return (("bfloat16", half * TERA), ("float16", half * TERA), ("tf32", tf32 * TERA), ("float32", fp32 * TERA))


H100 = Device(
    name="h100",
    title="NVIDIA H100 SXM5 80GB",
    backend="cuda",
    arch=90,
    sms=132,
    smem_per_block=227 * KIB,
    smem_per_sm=228 * KIB,
    registers_per_sm=65536,
    threads_per_sm=2048,
    blocks_per_sm=32,
    l2_bytes=50 * MIB,
    clock_hz=1.83e9,
    dram_bytes_per_s=3.35e12,
    tensor_flops=_rates(989.4, 494.7, 66.9),
    source="datasheet: NVIDIA H100 Tensor Core GPU Architecture",
)

H200 = replace(
    H100,
    name="h200",
    title="NVIDIA H200 SXM 141GB",
    l2_bytes=60 * MIB,
    dram_bytes_per_s=4.8e12,
    measured_dram_bytes_per_s=4.27e12,
    measured_flops=(("bfloat16", 760e12),),
    measured_l2_bytes_per_s=9.6e12,
    source="datasheet: NVIDIA H200 Tensor Core GPU; measured: device copy, bf16 matmul of 8192^3 (707-790 TFLOP/s), "
    "block-sparse loads without arithmetic (9.4-9.9 TB/s)",
)

B200 = replace(
    H100,
    name="b200",
    title="NVIDIA B200 SXM 180GB",
    arch=100,
    sms=148,
    l2_bytes=126 * MIB,
    clock_hz=1.85e9,
    dram_bytes_per_s=8.0e12,
    tensor_flops=_rates(2250.0, 1125.0, 75.0),
    source="datasheet: NVIDIA HGX B200",
)

A100 = replace(
    H100,
    name="a100",
    title="NVIDIA A100 SXM4 80GB",
    arch=80,
    sms=108,
    smem_per_block=163 * KIB,
    smem_per_sm=164 * KIB,
    l2_bytes=40 * MIB,
    clock_hz=1.41e9,
    dram_bytes_per_s=2.039e12,
    tensor_flops=_rates(312.0, 156.0, 19.5),
    source="datasheet: NVIDIA A100 80GB Tensor Core GPU",
)

L4 = replace(
    H100,
    name="l4",
    title="NVIDIA L4 24GB",
    arch=89,
    sms=58,
    smem_per_block=99 * KIB,
    smem_per_sm=100 * KIB,
    threads_per_sm=1536,
    blocks_per_sm=24,
    l2_bytes=48 * MIB,
    clock_hz=2.04e9,
    dram_bytes_per_s=0.3e12,
    tensor_flops=_rates(121.0, 60.0, 30.3),
    source="datasheet: NVIDIA L4 Tensor Core GPU",
)

RTX4090 = replace(
    L4,
    name="rtx4090",
    title="NVIDIA GeForce RTX 4090 24GB",
    sms=128,
    l2_bytes=72 * MIB,
    clock_hz=2.52e9,
    dram_bytes_per_s=1.008e12,
    tensor_flops=_rates(165.2, 82.6, 82.6),
    source="datasheet: NVIDIA Ada GPU Architecture (rates with fp32 accumulation)",
)

MI300X = Device(
    name="mi300x",
    title="AMD Instinct MI300X 192GB",
    backend="hip",
    arch="gfx942",
    sms=304,
    smem_per_block=64 * KIB,
    smem_per_sm=64 * KIB,
    registers_per_sm=131072,
    threads_per_sm=2048,
    blocks_per_sm=16,
    l2_bytes=32 * MIB,
    clock_hz=2.1e9,
    dram_bytes_per_s=5.3e12,
    tensor_flops=_rates(1307.4, 653.7, 163.4),
    source="datasheet: AMD Instinct MI300X and the CDNA 3 white paper (L2 is 4 MiB on each of 8 dies)",
    warp_size=64,
    registers_per_thread=512,
)

# The interpreter has no limits of its own. Its one rate is what was measured: two heads of 512 tokens, D=64, in 0.6 s.
INTERPRETER = Device(
    name="interpreter",
    title="Triton interpreter (CPU)",
    backend="interpreter",
    arch="cpu",
    sms=1,
    smem_per_block=1024 * MIB,
    smem_per_sm=1024 * MIB,
    registers_per_sm=1 << 30,
    threads_per_sm=1 << 20,
    blocks_per_sm=1,
    l2_bytes=1 * MIB,
    clock_hz=2.0e9,
    dram_bytes_per_s=10e9,
    tensor_flops=tuple((dtype, 0.22e9) for dtype in ("bfloat16", "float16", "tf32", "float32")),
    source="measured: two heads of 512 tokens with D=64 take 0.6 s on a CPU",
    registers_per_thread=1 << 20,
)

# Plain torch: nothing is planned by its numbers.
TORCH_CPU = replace(
    INTERPRETER,
    name="cpu",
    title=CPU.title,
    backend="cpu",
    tensor_flops=(),
    source="none: nothing is planned by the numbers of a CPU",
)

DEVICES: Mapping[str, Device] = MappingProxyType(
    {device.name: device for device in (H200, H100, B200, A100, L4, RTX4090, MI300X, INTERPRETER)}
)
"""Every known device by name: h200, h100, b200, a100, l4, rtx4090, mi300x and the interpreter."""


def device_named(name: str) -> Device:
    """The record of a known device by its short name, whatever its case, spaces and dashes; "cpu" for plain torch. DeviceError if
    unknown."""
    if not isinstance(name, str):
        raise DtypeError(f"device must be a name, one of {', '.join(DEVICES)} or cpu, got {name!r}")
    short = name.lower().replace(" ", "").replace("-", "").replace("_", "")
    found = TORCH_CPU if short == TORCH_CPU.name else DEVICES.get(short)
    if found is None:
        raise DeviceError(f"device must be one of {', '.join(DEVICES)} or cpu, got {name!r}")
    return found
