"""What the demo is asked, and what it answers: frozen records."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """out: folder for what the demo writes. quick: fewer sentences. device: "cuda" or "cpu".

    layer, head, sentence: whose attention the heat map shows, counted from 0. In the trained model layer 3's head 1
    ties words to what they refer to: in sentence 0, "they" to "owls".
    """

    out: Path = Path("out/demo")
    quick: bool = False
    device: str = "cpu"
    layer: int = 3
    head: int = 1
    sentence: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """One claim of the demo: whether it holds, and the figures that say so."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run and its wall time in seconds."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The checks, the time of every stage, and the files written."""

    checks: tuple[Check, ...]
    stages: tuple[Stage, ...]
    files: tuple[Path, ...]

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)

    @property
    def exit_code(self) -> int:
        """0, or 1 if a check failed."""
        return 0 if self.ok else 1
