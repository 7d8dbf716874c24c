"""The machines that kernels are compiled for ahead of time, as frozen records: no torch, no triton, no GPU.

Sources: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; AMD CDNA3 ISA guide and
LLVM's AMDGPU usage page (unified vector registers, 64 KiB of LDS, 8 waves per SIMD, 16 barriers per compute unit).
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from tilefold.errors import ValueRangeError

__all__ = ["TARGETS", "Target", "target_named"]


@dataclass(frozen=True, slots=True)
class Target:
    """What the compiler needs to know of a machine and what a compiled kernel must respect there.

    Sizes are bytes, register counts are 32-bit registers of one thread (lane). `best_tensor` names the tensor
    instructions that a large tile must reach, `any_tensor` also those of older generations that small tiles fall back
    to; both are prefixes of the opcodes in the machine code listing (SASS or AMDGCN).
    """

    name: str
    backend: Literal["cuda", "hip"]
    arch: int | str
    warp_size: int
    shared_per_program: int
    shared_per_sm: int
    shared_reserved: int  # taken by the system for each resident program
    registers_per_thread: int  # what one thread can address
    registers_per_sm: int
    register_granule: int  # registers per thread are rounded up to this
    warps_per_sm: int
    programs_per_sm: int
    schedulers_per_sm: int  # sub-partitions (SIMDs); each owns an equal part of the registers
    tensor_columns: int  # columns of tensor memory (Blackwell), 0 where there is none
    best_tensor: tuple[str, ...]
    any_tensor: tuple[str, ...]

    @property
    def listing(self) -> str:
        """Name of the machine code listing that instruction counts are taken from."""
        return "sass" if self.backend == "cuda" else "amdgcn"


def _nvidia(arch: int, shared_kib: int, tensor: tuple[str, ...], *, tensor_columns: int = 0) -> Target:
    """Record of an NVIDIA data-centre GPU; 1 KiB of each program's shared memory belongs to the system."""
    return Target(
        name=f"sm_{arch}",
        backend="cuda",
        arch=arch,
        warp_size=32,
        shared_per_program=(shared_kib - 1) * 1024,
        shared_per_sm=shared_kib * 1024,
        shared_reserved=1024,
        registers_per_thread=255,
        registers_per_sm=65536,
        register_granule=8,
        warps_per_sm=64,
        programs_per_sm=32,
        schedulers_per_sm=4,
        tensor_columns=tensor_columns,
        best_tensor=tensor,
        any_tensor=tuple(dict.fromkeys((*tensor, "HMMA"))),
    )


_GFX942 = Target(
    name="gfx942",
    backend="hip",
    arch="gfx942",
    warp_size=64,
    shared_per_program=65536,
    shared_per_sm=65536,
    shared_reserved=0,
    registers_per_thread=512,
    registers_per_sm=4 * 512 * 64,
    register_granule=8,
    warps_per_sm=32,
    programs_per_sm=16,
    schedulers_per_sm=4,
    tensor_columns=0,
    best_tensor=("v_mfma_",),
    any_tensor=("v_mfma_",),
)

TARGETS: MappingProxyType[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            _nvidia(80, 164, ("HMMA",)),
            _nvidia(90, 228, ("HGMMA", "QGMMA", "IGMMA")),
            _nvidia(100, 228, ("UTCHMMA", "UTCQMMA", "UTCOMMA"), tensor_columns=512),
            _GFX942,
        )
    }
)
"""Every known target by name: sm_80 (A100), sm_90 (H100, H200), sm_100 (B200), gfx942 (MI300X)."""


def target_named(name: str) -> Target:
    """The target called `name`; ValueRangeError lists the known names otherwise."""
    if name not in TARGETS:
        raise ValueRangeError(f"target: got {name!r}, known are {', '.join(TARGETS)}")
    return TARGETS[name]
