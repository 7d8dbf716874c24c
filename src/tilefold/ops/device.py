"""The plan's device record for the machine at hand."""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..errors import DeviceError, DtypeError
from .environment import check_environment

if TYPE_CHECKING:
    from ..plan.device import Device


def interpreting() -> bool:
    """Do kernels run in Triton's interpreter?  Set TRITON_INTERPRET before the first call: Triton reads it when imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def on_host(tensor: torch.Tensor) -> bool:
    """Whether reading what an index tensor holds costs nothing, and a wrong number would end the process or go unseen."""
    return tensor.is_cpu or interpreting()


@functools.cache
def stream_of() -> Callable[[int | None], int]:
    """What finds the current stream of a device by its index."""
    import triton  # here: `import tilefold` stays light

    return triton.runtime.driver.active.get_current_stream  # type: ignore[no-any-return]


def device_of(device: torch.device, operation: str = "") -> "Device":
    """The record that plans for `device` are made with; DeviceError where nothing serves it.

    operation: a name in `plan/capabilities.py`: a CPU tensor is served where `cpu` has it."""
    from ..plan import architecture, capabilities
    from ..plan.device import device_named

    found = architecture.architecture_at(device.type, interpreting())
    if found is architecture.INTERPRETER:
        check_environment(True)
        return device_named("interpreter")
    if found is architecture.CUDA:
        check_environment(False)
        return _probe(device.index if device.index is not None else torch.cuda.current_device())
    if found is not None and capabilities.capability(operation, found) is not None:
        return device_named(found.name)
    if device.type == "meta":
        raise DeviceError(
            "tensors are on meta, which holds no numbers; plans of them take device=, as in device='h200'"
        )
    raise DeviceError(
        f"tensors are on {device}; {'this' if found is not None else 'tilefold'} runs on CUDA and ROCm GPUs, or on the CPU in "
        f"Triton's interpreter: start Python with TRITON_INTERPRET=1"
    )


def device_asked(device: "str | Device | None") -> "Device | None":
    """The record of a device that somebody plans for, by its name or as it is; None: that of the tensors."""
    from ..plan.device import Device, device_named

    if isinstance(device, str):
        return device_named(device)
    if device is not None and not isinstance(device, Device):
        raise DtypeError(f"device must be a name of tilefold.plan.DEVICES, a Device of it or None, got {device!r}")
    return device


def device_of_kernels(device: "str | Device | None", tensors: torch.device) -> "Device":
    """The record of a device to plan kernels for; None: that of the tensors.  Unsupported for "cpu", which has none."""
    from ..plan.limits import require_kernels

    on = device_asked(device)
    if on is None:
        return device_of(tensors)
    require_kernels(on)
    return on


# What drivers call the devices whose records hold exactly; every other model is probed and says whose rates it borrows.
DRIVER_NAMES = {
    "NVIDIA B200": "b200",
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA L4": "l4",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "AMD Instinct MI300X": "mi300x",
}


@functools.cache
def _probe(index: int) -> "Device":
    """A known device by its name, corrected by what the driver reports; an unknown one from its nearest relative."""
    from ..plan.device import DEVICES

    properties = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    known = DEVICES.get(DRIVER_NAMES.get(properties.name, ""))
    arch: int | str = properties.gcnArchName.split(":")[0] if hip else properties.major * 10 + properties.minor
    base = known or _relative("hip" if hip else "cuda", arch)
    changes: dict[str, object] = {"sms": properties.multi_processor_count, "arch": arch}
    if known is None:
        name = properties.name.lower().removeprefix("nvidia ").replace(" ", "-")
        changes |= {"name": name, "title": properties.name, "source": f"probed; rates of {base.title}"}
    for field, attribute in (
        ("smem_per_block", "shared_memory_per_block_optin"),
        ("smem_per_sm", "shared_memory_per_multiprocessor"),
        ("registers_per_sm", "regs_per_multiprocessor"),
        ("threads_per_sm", "max_threads_per_multi_processor"),
        ("l2_bytes", "L2_cache_size"),
        ("warp_size", "warp_size"),
    ):
        value = getattr(properties, attribute, 0)
        if value and (not hip or field == "warp_size"):
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
