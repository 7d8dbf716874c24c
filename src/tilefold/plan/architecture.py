"""The registry of architectures: for what code is written, which one serves a device, and which features devices have.

An architecture is a line here, and a folder for what is written for it alone (`kernels/hopper`, `cpu`).  What of it serves a call
stands in `capabilities.py`."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Architecture:
    """name: as capabilities and messages say it.  title: for people.  backend, arch: of the devices that it serves (arch None:
    all of the backend).  tensors: the kind of torch device whose tensors it takes.  interpreted: it runs kernels in Triton's
    interpreter.  planner: "package.module:function" that plans its calls, where operations are functions; "": kernels are
    launched."""

    name: str
    title: str
    backend: str
    arch: int | None
    tensors: str
    interpreted: bool = False
    planner: str = ""

    def __str__(self) -> str:
        return self.name


SM_90 = Architecture("sm_90", "NVIDIA Hopper", "cuda", 90, "cuda")
CUDA = Architecture("cuda", "NVIDIA GPU", "cuda", None, "cuda")
HIP = Architecture("hip", "AMD GPU", "hip", None, "cuda")
INTERPRETER = Architecture("interpreter", "Triton interpreter (CPU)", "interpreter", None, "cpu", interpreted=True)
CPU = Architecture("cpu", "torch (CPU)", "cpu", None, "cpu", planner="tilefold.plan.torch_cpu:plan_torch")

ARCHITECTURES = (SM_90, CUDA, HIP, INTERPRETER, CPU)
"""The special ones before those that serve all of a backend."""


class HasArchitecture(Protocol):
    """What of a `Device` says which architecture serves it."""

    @property
    def backend(self) -> str: ...
    @property
    def arch(self) -> int | str: ...
    def __hash__(self) -> int: ...


@lru_cache(maxsize=256)
def architecture_of(device: HasArchitecture) -> Architecture:
    """The architecture of a device record."""
    return next(a for a in ARCHITECTURES if a.backend == device.backend and a.arch in (None, device.arch))


def architecture_at(tensors: str, interpreted: bool) -> Architecture | None:
    """Which one takes tensors on such a torch device ("cuda", "cpu", ..), before a GPU is looked at: CUDA stands for all GPUs.
    None: nobody.  interpreted: TRITON_INTERPRET=1, which takes tensors wherever they lie."""
    if interpreted:
        return INTERPRETER
    return next((a for a in ARCHITECTURES if a.tensors == tensors and a.arch is None and not a.interpreted), None)


# ---------------------------------------------------------------- features


class Feature(NamedTuple):
    """NVIDIA GPUs have it from sm_`least` to before sm_`below`; beside them the interpreter, if it says so."""

    least: int = 0
    below: int = 1000
    interpreted: bool = False


FEATURES = {
    "ptx": Feature(),  # inline assembly, and a limit of registers for a kernel
    "e4m3": Feature(89),  # conversions to and from e4m3
    "e4m3 products": Feature(89, interpreted=True),
    "tma": Feature(90),  # the tensor memory accelerator
    "descriptors": Feature(90, interpreted=True),  # loads and stores of tiles by tensor descriptors
    "dependent launches": Feature(90),  # programmatic dependent launch
    "shared operands": Feature(90, 120),  # products read both operands from shared memory: wgmma, tcgen05
    "tcgen05": Feature(100, 120),
}
"""By name: planners and operations ask for these, not for a number."""


def has_feature(device: HasArchitecture, name: str) -> bool:
    """Whether a device has a feature of FEATURES."""
    least, below, interpreted = FEATURES[name]
    if device.backend == CUDA.backend:
        return least <= int(device.arch) < below
    return interpreted and device.backend == INTERPRETER.backend
