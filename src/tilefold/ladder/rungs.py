"""The five rungs as records: what they are called, what they teach, and how to get at their programs, which need Triton."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from tilefold import reference
from tilefold.errors import ValueRangeError
from tilefold.plan.cost import Cost
from tilefold.plan.problem import AttentionProblem

if TYPE_CHECKING:
    from tilefold.ladder.inputs import Tile


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung: name, lesson in a line, when it is the one to use, page of the docs.  `program` is its module: attention, cost,
    TILES, tile_for."""

    name: str
    lesson: str
    best_use: str

    @property
    def page(self) -> str:
        """Its page, from the checkout's root."""
        return f"docs/tutorials/ladder/{self.name}.md"

    @property
    def program(self) -> Any:
        """Its module.  Imports triton."""
        return importlib.import_module(f"tilefold.ladder.{self.name}")

    def prepare(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, tile: "Tile | None" = None,
        **options: Any,
    ) -> Callable[[], torch.Tensor]:  # fmt: skip
        """The call that is checked and timed; what is done once before it (a paged cache) is done here.  options: of its
        attention, as `splits` of split."""
        program = self.program
        if hasattr(program, "prepare"):
            made: Callable[[], torch.Tensor] = program.prepare(q, k, v, causal, tile, **options)
            return made
        return lambda: program.attention(q, k, v, causal, tile=tile, **options)

    def cost(self, p: AttentionProblem, tile: "Tile | None" = None, **options: Any) -> Cost:
        """What it declares of a problem.  options: `splits` of split."""
        found: Cost = self.program.cost(p, tile, **options)
        return found


_ALL = (
    Rung(
        "naive",
        "the formula in three kernels, every score through memory",
        "to read and to check: every intermediate is a tensor that can be printed",
    ),
    Rung(
        "profile",
        "measure, find the bound, change that: the same kernels on tensor cores, with tiles that a sweep found",
        "where scores or weights are wanted as tensors, for short sequences",
    ),
    Rung(
        "paged",
        "keys in blocks behind a table; scores computed twice rather than stored",
        "caches of many sequences that grow to unequal lengths",
    ),
    Rung(
        "flash",
        "tiling and online softmax: one pass over the keys, nothing of the size of the scores",
        "many queries: training, prefill, encoders",
    ),
    Rung(
        "split",
        "few queries over many keys: parts folded apart and merged, empty ones the identity",
        "few queries over many keys: generation, token by token",
    ),
)
RUNGS: Mapping[str, Rung] = MappingProxyType({rung.name: rung for rung in _ALL})
"""Every rung by name, the first step first: naive, profile, paged, flash, split."""


def rung_named(name: str) -> Rung:
    """The rung of that name.  ValueRangeError if there is none."""
    if name not in RUNGS:
        raise ValueRangeError(f"rung must be one of {', '.join(RUNGS)}, got {name!r}")
    return RUNGS[name]


def up_to(name: str) -> tuple[Rung, ...]:
    """The rungs from the first one to that one."""
    names = list(RUNGS)
    return tuple(RUNGS[each] for each in names[: names.index(rung_named(name).name) + 1])


def show(name: str) -> None:
    """Run a rung on a small problem, compare it with fp64, print what it declares: what `python -m tilefold.ladder.NAME` does."""
    from tilefold.ladder.inputs import here, problem_of
    from tilefold.ops.device import interpreting

    rung, place = rung_named(name), "cpu" if interpreting() else "cuda"
    q, k, v = (torch.randn(1, 100, 2, 32, device=place, dtype=torch.float16) for _ in range(3))
    wanted, plain = (reference.attention(q, k, v, causal=True, dtype=dtype)[0] for dtype in (torch.float64, q.dtype))
    print(f"{rung.name}: {rung.lesson}")
    print(reference.compare(rung.prepare(q, k, v, True)(), wanted, plain))
    print(rung.cost(problem_of(q, k, True)))
    print(f"on {here().title}; see {rung.page}, and `tilefold ladder --rung {name}`")
