"""The families of `tilefold bench`, and named sets of them: what `tilefold bench suite NAME` runs, one after the other."""

from dataclasses import dataclass
from typing import Any

from tilefold.bench.attention.peers import DENSE, SPARSE
from tilefold.bench.choice import select_cases
from tilefold.bench.decode.peers import DECODE
from tilefold.bench.engine import AttentionEngine, Engine, Request
from tilefold.bench.matrix.conv import CONV
from tilefold.bench.matrix.gemm import GEMM
from tilefold.bench.matrix.lowbit import LOWBIT
from tilefold.bench.matrix.move import MOVE
from tilefold.bench.video.engine import VideoEngine
from tilefold.errors import ValueRangeError

ENGINES: dict[str, Engine] = {
    one.name: one
    for one in (*map(AttentionEngine, (DENSE, SPARSE)), *map(Engine, (DECODE, GEMM, CONV, LOWBIT, MOVE)), VideoEngine())
}


def engine_named(name: str) -> Engine:
    """The family. ValueRangeError if there is none of that name."""
    if name not in ENGINES:
        raise ValueRangeError(f"family must be one of {', '.join(ENGINES)}, got {name!r}")
    return ENGINES[name]


@dataclass(frozen=True, slots=True)
class Part:
    """A family's cases in a suite.  peers: who is measured unless the command says so, None: those usual on the machine."""

    family: str
    request: Request
    peers: tuple[str, ...] | None = None

    @property
    def engine(self) -> Engine:
        return engine_named(self.family)

    def cases(self, pattern: str | None, gpu: bool) -> tuple[Any, ...]:
        """All, or those whose name a pattern of the command has, too; () if none has."""
        found = self.engine.cases(self.request, gpu)
        try:
            return select_cases(found, pattern)
        except ValueRangeError:
            return ()


@dataclass(frozen=True, slots=True)
class Suite:
    """what: one line for the list; needs a GPU unless all its cases are quick ones."""

    name: str
    what: str
    parts: tuple[Part, ...]

    @property
    def quick(self) -> bool:
        return all(part.request.quick for part in self.parts)


def _quick(*families: str) -> tuple[Part, ...]:
    return tuple(Part(family, Request(quick=True)) for family in families)


def _full(*families: str) -> tuple[Part, ...]:
    return tuple(
        Part(family, Request(direction="both" if family in ("dense", "sparse") else "forward")) for family in families
    )


SUITES = {
    suite.name: suite
    for suite in (
        Suite("quick", "a few cases of every family: minutes on a GPU, tiny ones without", _quick(*ENGINES)),
        Suite("attention", "a few cases of dense, sparse and decode", _quick("dense", "sparse", "decode")),
        Suite("matrix", "a few cases of gemm, conv, lowbit and move", _quick("gemm", "conv", "lowbit", "move")),
        Suite(
            "readme",
            "what the README and docs/performance/overview.md show: dense and sparse attention, forward and backward",
            (
                Part("dense", Request(direction="both"), ("cudnn", "flash", "fa4", "fa4-det", "non-deterministic")),
                Part("sparse", Request(direction="both"), ("portable", "bsa", "tk", "fa4")),
            ),
        ),
        Suite("all", "every case of every family, forward and backward: an hour and more", _full(*ENGINES)),
    )
}


def suite_named(name: str, gpu: bool) -> Suite:
    """The suite. ValueRangeError if there is none of that name, or it takes a GPU that is not there."""
    if name not in SUITES:
        raise ValueRangeError(f"suite must be one of {', '.join(SUITES)}, got {name!r}")
    suite = SUITES[name]
    if not gpu and not suite.quick:
        small = ", ".join(one.name for one in SUITES.values() if one.quick)
        raise ValueRangeError(
            f"the suite {name!r} needs a GPU: on a CPU it would take days; those that run here: {small}"
        )
    return suite
