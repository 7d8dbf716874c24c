"""The attention plan: which kernel, tile and grid serve a problem on a device, why, and what was rejected."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from tilefold.errors import Unsupported
from tilefold.plan.base import Fault, Plan, changed, fields_of, require_derived, require_device, require_fit
from tilefold.plan.capabilities import architecture_refusal
from tilefold.plan.cost import Bound, Cost, attention_cost, bound
from tilefold.plan.dense.specialised import SPECIALISED
from tilefold.plan.device import Device
from tilefold.plan.explain import explain
from tilefold.plan.limits import (
    BOX,
    Tile,
    box_refusal,
    grid_of,
    programs_per_sm,
    require_supported,
    shared_bytes,
    tile_violation,
)
from tilefold.plan.problem import AttentionProblem
from tilefold.plan.rules import BEFORE, RULES, SPECIALISED_RULES, Choice, Rule
from tilefold.plan.table import RULE, measured
from tilefold.plan.words import sentence


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor to allocate: name, shape (-1 where only the call knows: the tokens of a packed batch), dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """An alternative and the sentence that says why it was not taken."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class AttentionPlan(Plan):
    """The decision for one problem on one device. `print` it; keep it as JSON; change it with `with_tile`.

    kernel: "attention_forward" (pointer loads), "attention_forward_box" (K and V by host tensor descriptors) or
        "attention_forward_varlen" (packed batch, pointer loads) or "attention_forward_hopper" (sm_90: Q, K and V by descriptors,
        a warpgroup folds 64 queries each, one more warp loads; as many programs as SMs draw the blocks of `grid` from a counter;
        of a packed batch `grid` is the most that there can be).
    block_m, block_n: queries and keys per tile; block_qk, block_v: head dimensions padded to a power of two.
    num_warps, num_stages, maxnreg: launch options. splits: parts of the key range folded apart (1 in this release).
    options: versions of the kernel that compute the same (attention_hopper.OPTIONS); the others have none.
    grid: programs. buffers: what the host allocates. shared_bytes, programs_per_sm: estimates.
    rule, reason, evidence: which rule decided, why, and what supports it. rejected: the alternatives.
    cost, bound: the work of the problem and the roofline of the device.

    Raises PlanError, naming the field, if the fields contradict one another or a limit of the device.
    """

    problem: AttentionProblem
    device: Device
    kernel: str
    block_m: int
    block_n: int
    block_qk: int
    block_v: int
    num_warps: int
    num_stages: int
    maxnreg: int | None
    splits: int
    grid: tuple[int, int, int]
    buffers: tuple[Buffer, ...]
    shared_bytes: int
    programs_per_sm: int
    rule: str
    reason: str
    evidence: str
    cost: Cost
    bound: Bound
    rejected: tuple[Rejected, ...] = ()
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_fit(_violation(self.problem, self.device, Choice(self.kernel, self.tile), self.options))
        require_derived(self, _derived(self.problem, Choice(self.kernel, self.tile), self.options))

    def __str__(self) -> str:
        return explain(self)

    @property
    def tile(self) -> Tile:
        """The tile as one value."""
        return Tile(self.block_m, self.block_n, self.num_warps, self.num_stages, self.maxnreg)

    def with_tile(
        self,
        *,
        block_m: int | None = None,
        block_n: int | None = None,
        num_warps: int | None = None,
        num_stages: int | None = None,
        maxnreg: int | None = None,
        kernel: str | None = None,
        options: tuple[str, ...] | None = None,
    ) -> "AttentionPlan":
        """The plan with a chosen tile, kernel or versions of it (None keeps the field); PlanError names the field that does not
        fit."""
        tile = changed(
            self.tile, block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages, maxnreg=maxnreg
        )
        chosen = Choice(self.kernel if kernel is None else kernel, tile)
        if options is None:
            options = self.options if chosen.kernel == self.kernel else _options(self.problem, self.device, chosen)
        require_fit(_violation(self.problem, self.device, chosen, options))
        replaced = Rejected(
            f"{self.kernel}, tile {self.tile}", f"Replaced by the caller; rule {self.rule} had chosen it."
        )
        why = ("The caller chose this tile.", "None is needed: a tile given by the caller is used as it is.")
        return _plan(self.problem, self.device, chosen, options, ("override", *why), lambda: (replaced,))

    def refusing(self, kernel: str, why: str) -> "AttentionPlan":
        """The same plan with another sentence that says why `kernel` was not taken."""
        others = (entry for entry in self.rejected if entry.what != kernel)
        return replace(self, rejected=(Rejected(kernel, why), *others))

    def check(self, problem: AttentionProblem, device: Device) -> None:
        """PlanError, naming the field, unless this plan serves exactly `problem` on `device`.

        `descriptors` may differ as long as a kernel with box loads is not asked to read K and V without descriptors. A
        device matches if its backend and architecture do and the tile is within its limits.
        """
        self.problem.require_same(problem)
        require_device(self.device, device)
        require_fit(_violation(problem, device, Choice(self.kernel, self.tile), self.options))


@lru_cache(maxsize=4096)
def plan_attention(problem: AttentionProblem, device: Device, portable: bool = False) -> AttentionPlan:
    """The plan for a problem on a device: the same every time in a process, no GPU needed.  portable: without kernels for one
    architecture, and without the table of measured plans.

    Unsupported, naming the argument, if head dims or lengths are beyond the kernels or no tile fits the device.
    """
    ruled = rules_attention(problem, device, portable)
    return ruled if portable else measured("attention", ruled, _follow)


def _follow(ruled: AttentionPlan, fields: dict[str, Any], evidence: str) -> AttentionPlan:
    """The plan of a table's entry."""
    plan = ruled.with_tile(**fields)
    other = Rejected(f"{ruled.kernel}, tile {ruled.tile}", f"Rule {ruled.rule} takes it; it was measured to be slower.")
    reason = "A table has a measurement of this very problem on this device."
    return replace(plan, rule=RULE, reason=reason, evidence=evidence, rejected=(other,))


def rules_attention(problem: AttentionProblem, device: Device, portable: bool = False) -> AttentionPlan:
    """The plan by rules alone: pure.  Raises as `plan_attention` does."""
    require_supported(problem, device)
    rejected: list[Rejected] = []
    for rule in RULES:
        if not rule.applies(problem, device) or (portable and rule in SPECIALISED_RULES):
            continue
        for choice in rule.choices(problem, device):
            options = _options(problem, device, choice)
            fault = _violation(problem, device, choice, options)
            if fault is None:
                why = (rule.name, rule.reason, choice.evidence or rule.evidence)
                others = partial(_alternatives, problem, device, rule, choice, tuple(rejected))
                return _plan(problem, device, choice, options, why, others)
            if fault[0] == "grid":
                raise Unsupported(f"batch, heads and seq_q: {fault[1]}")
            rejected.append(Rejected(f"tile {choice.tile}", sentence(fault[1])))
    tried = "; ".join(f"{entry.what}: {entry.why}" for entry in rejected)
    raise Unsupported(
        f"no tile fits {device.name} for dim_qk={problem.dim_qk}, dim_v={problem.dim_v}, {problem.dtype} ({tried})"
    )


def _alternatives(
    problem: AttentionProblem, device: Device, rule: Rule, choice: Choice, misfits: tuple[Rejected, ...]
) -> tuple[Rejected, ...]:
    """Every alternative to the choice of the rule that decided that a reader would ask about."""
    return misfits + _runner_up(problem, device, rule, choice) + _other_kernels(problem, device, rule, choice)


def _options(problem: AttentionProblem, device: Device, choice: Choice) -> tuple[str, ...]:
    """The versions of a kernel that are taken unless others are asked for."""
    own = SPECIALISED.get(choice.kernel)
    return own.options(problem, choice.tile, device) if own else ()


def _violation(problem: AttentionProblem, device: Device, choice: Choice, options: tuple[str, ...]) -> Fault:
    """(field, sentence) of the first limit that a tile of a kernel breaks, or None."""
    if own := SPECIALISED.get(choice.kernel):
        return own.violation(problem, device, choice.tile, options)
    if options:
        return "options", f"{choice.kernel} has no versions, got {options!r}"
    return tile_violation(problem, device, choice.kernel, choice.tile)


def _runner_up(problem: AttentionProblem, device: Device, rule: Rule, choice: Choice) -> tuple[Rejected, ...]:
    """The next tile that would fit too: of the deciding rule, else of the rules behind it."""
    listed = rule.choices(problem, device)
    behind = [(rule, other) for other in listed[listed.index(choice) + 1 :]]
    for later in RULES[RULES.index(rule) + 1 :]:
        if later.applies(problem, device):
            behind += [(later, other) for other in later.choices(problem, device)]
    for proposer, other in behind:
        if other.tile != choice.tile and _violation(problem, device, other, _options(problem, device, other)) is None:
            return (Rejected(f"tile {other.tile}", _why_behind(problem, device, rule, proposer, other)),)
    return ()


def _why_behind(problem: AttentionProblem, device: Device, rule: Rule, proposer: Rule, other: Choice) -> str:
    programs = grid_of(problem, other.tile.block_m)[0]
    if rule.name == "few-programs" and proposer is not rule and programs < device.sms:
        return f"Fits; rule {proposer.name} proposes it, but it makes {programs} programs for {device.sms} SMs."
    if proposer is not rule:
        return f"Fits; rule {proposer.name} proposes it, but rule {rule.name} comes first."
    return f"Fits, but rule {rule.name} ranks it behind the tile that was taken."


def _other_kernels(problem: AttentionProblem, device: Device, rule: Rule, choice: Choice) -> tuple[Rejected, ...]:
    """Specialised ones, box loads, split-KV and packed heads, where they were not taken and could be expected."""
    found, portable = [], choice.kernel not in SPECIALISED and device.backend != "interpreter"
    for name, own in SPECIALISED.items():
        if choice.kernel != name and not architecture_refusal(name, device):
            first = f"rule {rule.name} comes first" if rule in BEFORE else "portable kernels were asked for"
            found.append(Rejected(name, sentence(own.unserved(problem, device) or first)))
    if portable and choice.kernel != BOX:
        refusal = box_refusal(problem, device)
        found.append(Rejected("box loads", sentence(refusal or "this rule's tiles are chosen for pointer loads")))
    programs = _grid(problem, choice, _options(problem, device, choice))[0]
    if 0 < programs < device.sms:
        tiles = -(-problem.seq_k // choice.tile.block_n)
        filled = min(device.sms, programs * max(1, tiles))
        if filled > programs:
            why = f"Would use {filled} of {device.sms} SMs, not {programs}; attention_decode splits the keys of few queries."
            found.append(Rejected("split-KV", why))
    if problem.group > 1 and 0 < problem.seq_q < choice.tile.block_m and portable:
        found.append(
            Rejected(
                "packed heads",
                f"Making the {problem.group} query heads of a KV head rows of one tile would read K and V once, not "
                f"{problem.group} times from L2; portable kernels do not.",
            )
        )
    return tuple(found)


def _grid(problem: AttentionProblem, choice: Choice, options: tuple[str, ...]) -> tuple[int, int, int]:
    own = SPECIALISED.get(choice.kernel)
    return own.grid(problem, choice.tile, options) if own else grid_of(problem, choice.tile.block_m)


def _derived(problem: AttentionProblem, choice: Choice, options: tuple[str, ...]) -> dict[str, object]:
    """The fields that follow exactly from problem and tile; estimates and roofs may differ between versions."""
    return {
        "block_qk": problem.block_qk,
        "block_v": problem.block_v,
        "splits": 1,
        "grid": _grid(problem, choice, options),
        "buffers": result_buffers(problem),
        "cost": attention_cost(problem),
    }


def result_buffers(problem: AttentionProblem) -> tuple[Buffer, Buffer]:
    """Out and lse."""
    if problem.varlen:
        shapes: tuple[tuple[int, ...], ...] = ((-1, problem.heads, problem.dim_v), (problem.heads, -1))
    else:
        shapes = (
            (problem.batch, problem.seq_q, problem.heads, problem.dim_v),
            (problem.batch, problem.heads, problem.seq_q),
        )
    return Buffer("out", shapes[0], problem.dtype), Buffer("lse", shapes[1], "float32")


def _plan(
    problem: AttentionProblem,
    device: Device,
    choice: Choice,
    options: tuple[str, ...],
    why: tuple[str, str, str],
    rejected: Callable[[], tuple[Rejected, ...]],
) -> AttentionPlan:
    """The plan of a choice that breaks no limit; rejected: what its field of that name is."""
    tile, own = choice.tile, SPECIALISED.get(choice.kernel)
    rule, reason, evidence = why

    def rest() -> dict[str, object]:
        cost = attention_cost(problem)
        return {
            "buffers": result_buffers(problem),
            "shared_bytes": own.shared_bytes(problem, tile, options) if own else shared_bytes(problem, device, tile),
            "programs_per_sm": own.programs(problem, tile, device, options) // device.sms
            if own
            else programs_per_sm(problem, device, choice.kernel, tile),
            "cost": cost,
            "bound": bound(cost, device, problem.dtype),
            "rejected": rejected(),
        }

    return AttentionPlan.decided(
        rest,
        problem=problem,
        device=device,
        kernel=choice.kernel,
        **fields_of(tile),
        block_qk=problem.block_qk,
        block_v=problem.block_v,
        splits=1,
        grid=_grid(problem, choice, options),
        rule=rule,
        reason=reason,
        evidence=evidence,
        options=options,
    )
