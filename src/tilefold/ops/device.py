"""The plan's device record for the machine at hand."""

import functools
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..errors import DeviceError

if TYPE_CHECKING:
    from ..plan.device import Device

__all__ = ["device_of", "interpreting"]


def interpreting() -> bool:
    """Do kernels run in Triton's interpreter?  Decided by TRITON_INTERPRET when Triton is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def device_of(device: torch.device) -> "Device":
    """The record that plans for `device` are made with; DeviceError where no kernel can run."""
    if interpreting():
        from ..plan.device import device_named

        return device_named("interpreter")
    if device.type != "cuda":
        raise DeviceError(
            f"tensors are on {device}; tilefold runs on CUDA and ROCm GPUs, or on the CPU when TRITON_INTERPRET=1 is set before "
            f"tilefold is first used"
        )
    return _probe(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _probe(index: int) -> "Device":
    """A known device by its name, corrected by what the driver reports; an unknown one from its nearest relative."""
    from ..plan.device import DEVICES

    properties = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    name = properties.name.lower().replace(" ", "")
    known = next((d for d in DEVICES.values() if d.backend == ("hip" if hip else "cuda") and d.name in name), None)
    arch: int | str = properties.gcnArchName.split(":")[0] if hip else properties.major * 10 + properties.minor
    base = known or _relative("hip" if hip else "cuda", arch)
    changes: dict[str, object] = {"sms": properties.multi_processor_count, "arch": arch}
    if known is None:
        changes |= {"name": name, "title": properties.name, "source": f"probed; rates of {base.title}"}
    for field, attribute in (
        ("smem_per_block", "shared_memory_per_block_optin"),
        ("smem_per_sm", "shared_memory_per_multiprocessor"),
        ("registers_per_sm", "regs_per_multiprocessor"),
        ("threads_per_sm", "max_threads_per_multi_processor"),
        ("l2_bytes", "L2_cache_size"),
    ):
        value = getattr(properties, attribute, 0)
        if value and not hip:
            changes[field] = value
    return replace(base, **changes)  # type: ignore[arg-type]


def _relative(backend: str, arch: int | str) -> "Device":
    """The record of the same backend whose architecture is nearest below `arch` (the oldest one if none is)."""
    from ..plan.device import DEVICES

    same = sorted((d for d in DEVICES.values() if d.backend == backend), key=lambda d: str(d.arch).zfill(8))
    if backend == "cuda" and int(arch) < 80:
        raise DeviceError(
            f"compute capability {int(arch) / 10} is below 8.0, the oldest that tilefold's kernels run on"
        )
    below = [d for d in same if str(d.arch).zfill(8) <= str(arch).zfill(8)]
    return below[-1] if below else same[0]
