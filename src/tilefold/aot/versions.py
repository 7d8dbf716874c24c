"""Which Triton versions `compile.py` knows: asked before that file imports anything private of Triton."""

import triton

from tilefold.errors import Unsupported

__all__ = ["triton_version"]

OLDEST, TOO_NEW = (3, 6), (3, 10)


def triton_version() -> str:
    """Version of the Triton in this process; raises Unsupported outside the range that `compile.py` knows."""
    version = str(triton.__version__)
    major, minor = (int(part) for part in version.split(".")[:2])
    if not OLDEST <= (major, minor) < TOO_NEW:
        known = f"{OLDEST[0]}.{OLDEST[1]} to {TOO_NEW[0]}.{TOO_NEW[1] - 1}"
        raise Unsupported(f"ahead-of-time compilation: triton {version} is installed, known are {known}")
    return version
