"""A family of benchmark cases whose implementations are judged whole and timed in turns: its records, and who takes part."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from tilefold.ops.environment import importable
from tilefold.reference import Comparison

if TYPE_CHECKING:
    from tilefold.bench.run import Row


class Case(Protocol):
    """What of a case the runner and the report need: its name and dtype, bytes that have to move, operations."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def bytes(self) -> int: ...

    @property
    def flops(self) -> int: ...


class Judge(Protocol):
    """The reference of one set of inputs."""

    def verdict(self, result: Any) -> Comparison: ...


@dataclass(frozen=True, slots=True)
class Calls:
    """The same computation over each set of inputs; `context` has to be open while they run.

    judge: what the first one's output is judged by, if not by the family's judge (who rounds weights in its own way)."""

    calls: list[Callable[[], Any]]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    judge: Judge | None = None

    @property
    def call(self) -> Callable[[], Any]:
        """The first one."""
        return self.calls[0]


@dataclass(frozen=True, slots=True)
class Peer:
    """name: as on the command line and in result files; title: as in tables; package: the distribution that it comes in.

    refuses: (case, device type) -> why it cannot be used there, or None; Unsupported and NotImplementedError of prepare or of a
    call count as a refusal, too.  prepare: makes the calls over several sets of inputs of one case, of attention the call over
    one; what is done once (plans, compilation, masks, copies in another layout) happens there.  lists: whether it follows the
    lists of sparse attention; one that does not computes every pair and is judged by that."""

    name: str
    title: str
    what: str
    package: str
    prepare: Callable[[Any], Calls]
    refuses: Callable[[Any, str], str | None] = lambda case, device: None
    lists: bool = False

    @property
    def ours(self) -> bool:
        return self.package == "tilefold"


@dataclass(frozen=True)
class Family:
    """name: of the command and the results file.  cases: of a size ("full", "quick", "tiny").  inputs: (case, device, seed) ->
    tensors, the same for the same three.  peers: by name, "tilefold" among them; defaults: device type -> who is measured
    unasked.

    record: what a case adds to its record.  lines: sentences below the tables.  rotating: what replays go around.
    roof: (case, device type) -> operations a second that the device can do at most; 0: moving bytes is all that counts.
    prepare: (implementation, sets of inputs) -> its calls.  replayed: whether a case is replayed from CUDA graphs even unasked.
    attention: no copy is timed beside; the memory that a call takes is measured, too."""

    name: str
    cases: Callable[[str], tuple[Any, ...]]
    inputs: Callable[[Any, str, int], Any]
    judge: Callable[[Any], Judge]
    peers: Mapping[str, Peer]
    defaults: Mapping[str, tuple[str, ...]]
    record: Callable[[Any], dict[str, Any]] = lambda case: {}
    lines: "Callable[[Sequence[Row]], list[str]]" = lambda rows: []
    rotating: str = "weights"
    roof: Callable[[Any, str], float] = lambda case, device: 0.0
    prepare: Callable[[Any, Sequence[Any]], Calls] = lambda peer, sets: peer.prepare(sets)
    replayed: Callable[[Any], bool] = lambda case: True
    attention: bool = False


def absent(package: str, device: str, *modules: str) -> str | None:
    """Why a library cannot be used here at all: it has none of these modules, or there is no GPU."""
    if not any(map(importable, modules)):
        return f"{package} is not installed"
    return None if device == "cuda" else "needs a GPU"


def by_name(*peers: Peer) -> dict[str, Peer]:
    """As a Family has them."""
    return {peer.name: peer for peer in peers}


def each(
    make: Callable[[Any], Callable[[], Tensor]], context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Callable[[Sequence[Any]], Calls]:
    """A prepare that treats every set of inputs by itself; context: open while the calls run."""
    return lambda sets: Calls([make(one) for one in sets], context)


def normal_numbers(device: str, seed: int, dtype: str) -> Callable[..., Tensor]:
    """(*shape) -> standard-normal numbers, of uint8 all 256, the same for a seed and device, other ones at each call.

    Never zeros: a GPU draws less power on them and runs faster."""
    generator, kind = torch.Generator(device=device).manual_seed(seed), getattr(torch, dtype)
    options: dict[str, Any] = {"generator": generator, "device": device, "dtype": kind}
    if dtype == "uint8":
        return lambda *shape: torch.randint(0, 256, shape, **options)
    return lambda *shape: torch.randn(shape, **options)
