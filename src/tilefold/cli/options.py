"""Options of commands, as frozen records."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["DemoOptions"]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """out: folder for the pictures and tables that the demo writes. quick: fewer sentences. device: "cuda" or "cpu" (interpreter)."""

    out: Path = Path("out/demo")
    quick: bool = False
    device: str = "cpu"
