"""A whole generation, step by step: the steps grouped into ranges in which a policy's decision stays the same."""

from dataclasses import dataclass, replace

from tilefold.errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from tilefold.plan.base import Plan
from tilefold.plan.cache.dispatch import SplitDecision, plan_splits
from tilefold.plan.cache.flash_split import CALLS
from tilefold.plan.device import Device
from tilefold.plan.explain_dispatch import explain_trace
from tilefold.plan.problem import AttentionProblem

MAX_NEW = 65536  # steps are decided one by one


@dataclass(frozen=True, slots=True)
class Generation:
    """What is generated: `prompt` tokens are read in step 1, which gives the first of `new` tokens; each further step has one
    query a sequence and one key more.

    heads, kv_heads, dim: the model's geometry. call: "dense" and "varlen" (a cache that grows: its length decides) or "kvcache"
    (`capacity` rows allocated, 0: prompt + new; they decide). window: keys to the left that a query sees beside its own, -1: all.
    paged, append: as for `plan_splits`.  Raises ShapeError, DtypeError, ValueRangeError, Unsupported."""

    heads: int
    kv_heads: int
    dim: int
    prompt: int
    new: int
    batch: int = 1
    dtype: str = "bfloat16"
    call: str = "dense"
    capacity: int = 0
    window: int = -1
    paged: bool = False
    append: bool = False

    def __post_init__(self) -> None:
        for name in ("prompt", "new", "batch", "capacity"):
            value = getattr(self, name)
            if type(value) is not int:
                raise DtypeError(f"{name} must be an integer, got {value!r}")
            if value < (0 if name == "capacity" else 1):
                raise ShapeError(f"{name} must be at least {0 if name == 'capacity' else 1}, got {value}")
        if self.new > MAX_NEW:
            raise ValueRangeError(f"new must be at most {MAX_NEW}, got {self.new}")
        if self.call not in CALLS:
            raise ValueRangeError(f"call must be one of {', '.join(CALLS)}, got {self.call!r}")
        if self.capacity and self.call != "kvcache":
            raise Unsupported(f"capacity needs call 'kvcache', got {self.call!r}")
        if self.capacity and self.capacity < self.last_keys:
            raise ShapeError(f"capacity must hold the {self.last_keys} keys of the last step, got {self.capacity}")

    @property
    def last_keys(self) -> int:
        """Keys of the last step: the last new token's own is never read."""
        return self.prompt + self.new - 1

    @property
    def rows(self) -> int:
        """Rows of the cache with call "kvcache"."""
        return self.capacity or self.prompt + self.new

    def problem(self, step: int) -> AttentionProblem:
        """The attention problem of a step, counted from 1."""
        queries, keys = (self.prompt if step == 1 else 1), self.prompt + step - 1
        window = (self.window, -1 if self.window < 0 else 0)
        return AttentionProblem(
            self.batch, queries, keys, self.heads, self.kv_heads, self.dim, self.dim, self.dtype, True, window
        )


@dataclass(frozen=True, slots=True)
class TraceRange:
    """Steps first_step to last_step, with the decisions of both; kernel, tile, splits and programs are the same in between.

    bound_s, predicted_s: seconds of all these steps together, of one layer; least_s, most_s: predicted of one step.  A cache
    that is cut by its capacity keeps the splits behind its keys idle, so the shortest step need not be the first."""

    first_step: int
    last_step: int
    first: SplitDecision
    last: SplitDecision
    bound_s: float
    predicted_s: float
    least_s: float
    most_s: float

    @property
    def steps(self) -> int:
        """How many steps."""
        return self.last_step - self.first_step + 1


@dataclass(frozen=True, slots=True)
class Trace(Plan):
    """A generation under a policy on a device.  `print` it."""

    generation: Generation
    policy: str
    device: Device
    ranges: tuple[TraceRange, ...]

    def __str__(self) -> str:
        return explain_trace(self)

    @property
    def bound_s(self) -> float:
        """Seconds of all steps of one layer at the device's roofs."""
        return sum(part.bound_s for part in self.ranges)

    @property
    def predicted_s(self) -> float:
        """The same with every SM at its even share of the device."""
        return sum(part.predicted_s for part in self.ranges)

    def at(self, step: int) -> TraceRange:
        """The range of a step, counted from 1.  ValueRangeError if there is no such step."""
        for part in self.ranges:
            if part.first_step <= step <= part.last_step:
                return part
        raise ValueRangeError(f"step must be 1 to {self.generation.new}, got {step}")


def trace_generation(generation: Generation, device: Device, policy: str = "tilefold") -> Trace:
    """The decision of every step, grouped.  Raises what `plan_splits` raises; pure, no GPU needed."""
    run, ranges = generation, list[TraceRange]()
    capacity = run.rows if run.call == "kvcache" else None
    for step in range(1, run.new + 1):
        made = plan_splits(
            run.problem(step), device, policy, call=run.call, capacity=capacity, paged=run.paged, append=run.append
        )
        seconds = made.predicted_s
        if ranges and _same(ranges[-1].last, made):
            one = ranges.pop()
            part = replace(
                one,
                last_step=step,
                last=made,
                bound_s=one.bound_s + made.bound.seconds,
                predicted_s=one.predicted_s + seconds,
                least_s=min(one.least_s, seconds),
                most_s=max(one.most_s, seconds),
            )
        else:
            part = TraceRange(step, step, made, made, made.bound.seconds, seconds, seconds, seconds)
        ranges.append(part)
    return Trace(generation, policy, device, tuple(ranges))


def _same(one: SplitDecision, other: SplitDecision) -> bool:
    """Whether two steps launch the same kernels on the same grids, for as many queries."""
    fields = ("kernel", "combine", "block_m", "block_n", "splits", "tiles")
    return one.problem.seq_q == other.problem.seq_q and all(getattr(one, n) == getattr(other, n) for n in fields)
