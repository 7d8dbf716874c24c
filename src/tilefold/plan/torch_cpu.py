"""Plans of operations that are functions of torch: how these cut a call of attention into tiles."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tilefold.errors import PlanError
from tilefold.plan import serialise
from tilefold.plan.base import Shown, changed, require_equal, said_sizes
from tilefold.plan.cache.invariant import require_keepable
from tilefold.plan.capabilities import capability
from tilefold.plan.device import Device

BLOCK_N = 512  # keys of a tile
INVARIANT_BLOCK_N = 64  # the same with numerics="invariant", whose sums are trees over that many
ROWS = 256  # query rows of a KV head in a tile, those of its group together
SCORES = 1 << 19  # scores that are folded at once: 2 MiB in fp32, which stay in the caches; larger tiles are slower


@dataclass(frozen=True, slots=True)
class Cut:
    """block_m queries of each head and block_n keys a tile; sequences, and heads of K and V, that are folded at once."""

    block_m: int
    block_n: int
    sequences: int
    heads: int


def cut_of(batch: int, kv_heads: int, group: int, seq_q: int, seq_k: int) -> Cut:
    """Tiles whose scores stay in the caches; where sequences are short, many are folded at once."""
    block_m = max(1, min(seq_q, max(16, ROWS // max(1, group))))
    block_n = max(1, min(seq_k, BLOCK_N))
    pairs = max(1, SCORES // (block_m * max(1, group) * block_n))
    if pairs >= kv_heads:
        return Cut(block_m, block_n, max(1, min(batch, pairs // max(1, kv_heads))), max(1, kv_heads))
    return Cut(block_m, block_n, 1, pairs)


@dataclass(frozen=True, slots=True)
class TorchPlan(Shown):
    """The decision for one call of a function.  `print` it.

    operation: as in the capabilities; problem: of the operation; cut: None where nothing is folded in tiles, and with
    numerics="invariant", which has one for all."""

    operation: str
    problem: Any
    device: Device
    cut: Cut | None = None
    numerics: str = "fast"

    splits = 1  # of the keys of a row: in parts they would be no faster

    @property
    def kernel(self) -> str:
        found = capability(self.operation, self.device.architecture)
        return "" if found is None else found.kernel

    def invariant(self) -> "TorchPlan":
        """The plan of numerics="invariant".  Unsupported for what that cannot keep."""
        require_keepable(getattr(self.problem, "attention", self.problem))
        return replace(self, cut=None, numerics="invariant")

    def with_tile(
        self,
        *,
        block_m: int | None = None,
        block_n: int | None = None,
        sequences: int | None = None,
        heads: int | None = None,
    ) -> "TorchPlan":
        """The plan with another cut (None keeps the field); PlanError names a field that is no number above 0."""
        given = {"block_m": block_m, "block_n": block_n, "sequences": sequences, "heads": heads}
        for name, value in given.items():
            if value is not None and (type(value) is not int or value < 1):
                raise PlanError(f"plan field {name}: must be an integer of at least 1, got {value!r}")
        return replace(self, cut=changed(self.cut or Cut(1, 1, 1, 1), **given))

    def check(self, problem: Any, device: Device) -> None:
        """PlanError unless the plan is one for this problem and device."""
        if device.architecture is not self.device.architecture:
            raise PlanError(f"plan is for {self.device.title}, the call is on {device.title}")
        if type(problem) is not type(self.problem):
            raise PlanError(f"plan is for {self.problem}, the call is {problem}")
        require_equal(self.problem, problem)

    def to_json(self) -> str:
        """The plan, with its problem and device, and the name of its function, as JSON."""
        return serialise.to_json(self, kernel=self.kernel)

    def __str__(self) -> str:
        lines = [
            f"{self.operation.replace('_', ' ').capitalize()} plan for {self.device.title}",
            f"  kernel      {self.kernel}",
        ]
        if self.cut is not None:
            c = self.cut
            lines.insert(1, f"  problem     {said_sizes(getattr(self.problem, 'attention', self.problem))}")
            lines += [
                f"  tiles       {c.block_m} queries of each head x {c.block_n} keys",
                f"  at once     {c.sequences} sequences x {c.heads} KV heads, K and V of these in fp32",
            ]
        if self.numerics == "invariant":
            lines += [
                f"  fixed       numerics=invariant: tiles of {INVARIANT_BLOCK_N} keys from a sequence's first key; sums are "
                "trees over halves",
                "  why         torch's products follow shapes; single elements' additions and products do not.",
            ]
            return "\n".join(lines)
        how = "Batched products of plain torch; dead tiles are skipped, only edge tiles are masked."
        lines.append(f"  why         {how if self.cut else 'Plain torch, in fp32.'}")
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def plan_torch(operation: str, problem: Any, device: Device) -> TorchPlan:
    """The plan of an operation of attention; problem: an AttentionProblem, or one that has it as `attention`."""
    n = getattr(problem, "attention", problem)
    cut = cut_of(n.batch, n.kv_heads, n.heads // max(1, n.kv_heads), n.seq_q, n.seq_k)
    return TorchPlan(operation, problem, device, cut)
