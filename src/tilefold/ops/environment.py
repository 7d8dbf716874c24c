"""Whether the installed torch, triton and numpy can work together, by their versions: known before a kernel is imported."""

import functools
import importlib.util
import sys
from importlib import metadata
from typing import Any

from ..errors import DeviceError

OLDEST_TORCH, OLDEST_TRITON = (2, 9), (3, 6)
TRITON_NAMES = ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton", "triton-windows")


@functools.cache
def check_environment(interpreted: bool) -> None:
    """DeviceError, with the command that mends it, where no kernel can run; looked at until it is right, then never again.

    interpreted: in Triton's interpreter, on the CPU."""
    fault = interpreter_fault() if interpreted else triton_fault()
    if fault is not None:
        raise DeviceError(f"{fault} (`tilefold doctor` says what works here)")
    language: Any = sys.modules.get("triton.language")
    if language is not None and (type(language.sum).__name__ == "InterpretedFunction") is not interpreted:
        raise DeviceError(
            "TRITON_INTERPRET=1 was set after triton was imported, which reads it then: set it before Python starts, or before "
            "the first import of triton"
            if interpreted
            else "triton was imported with TRITON_INTERPRET=1, which is not set any more: its functions run in the interpreter "
            "alone; start Python without it"
        )


def installed(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def triton_version() -> str | None:
    """The version of triton under whichever name it was distributed, or None."""
    return next((version for name in TRITON_NAMES if (version := installed(name)) is not None), None)


def importable(module: str) -> bool:
    """Whether a dotted module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def number(version: str | None) -> tuple[int, ...]:
    """The leading numbers of a version: (3, 6, 0) of "3.6.0+git"; () of None."""
    parts: list[int] = []
    for part in (version or "").split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def triton_fault() -> str | None:
    """Why no kernel can be compiled or interpreted at all, or None."""
    torch, version = installed("torch"), triton_version()
    if torch is not None and number(torch) < OLDEST_TORCH:
        return f"torch {torch} is too old; 2.9 or newer is needed: pip install 'torch>=2.9'"
    if not importable("triton"):
        return "triton is not installed (Linux only); pip install 'triton>=3.6'"
    if version is not None and number(version) < OLDEST_TRITON:
        return f"triton {version} is too old; 3.6 or newer is needed: pip install 'triton>=3.6'"
    return None


def interpreter_fault() -> str | None:
    """Why the interpreter cannot run the kernels, or None."""
    numpy, triton = installed("numpy"), triton_version()
    if fault := triton_fault():
        return fault
    if numpy is None:
        return "numpy is not installed; the interpreter needs it: pip install 'numpy<2.4'"
    if number(numpy) >= (2, 4) and number(triton) < (3, 9):
        return f"numpy {numpy} breaks the interpreter of triton {triton}: loops fail; pip install 'numpy<2.4'"
    return None
