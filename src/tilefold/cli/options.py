"""Options of commands, as frozen records."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["DemoOptions"]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """out: folder for what the demo writes. quick: fewer sentences. device: "cuda", or "cpu" for the interpreter."""

    out: Path = Path("out/demo")
    quick: bool = False
    device: str = "cpu"
