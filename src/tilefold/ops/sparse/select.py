"""Block selection: plan, allocate, launch.  The arguments arrive checked and in one form; `tilefold.sparse.select` makes it."""

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch

from ...errors import ValueRangeError
from ...types import ModArgs
from ..bound import Bound, Example, meta, strides_named
from ..device import device_of
from ..operator import Operation
from ..records import recorded
from ..serve import function_at

if TYPE_CHECKING:
    from ...plan.sparse.select import SelectPlan

Setting: TypeAlias = float | torch.Tensor
"""One number for all rows, or a view [batch, heads, Q blocks] of any real dtype, on the device of the scores."""

NOWHERE = -(1 << 30)  # the reach of no window at all


class SelectCall(NamedTuple):
    """A selection but for its scores.

    method: "gini" (amount: tau_min, tau_max), "mass" (amount: tau) or "count" (amount: blocks); bounds: the least and the most
    blocks a list; each of amount and bounds is a `Setting`; capacity: entries a list, at most the KV blocks; geometry: block_q,
    block_k, seq_q, seq_k; force_first: blocks from the start; reach: blocks to either side of a query block's own, NOWHERE for
    none; force: bool view [B, H, Qb, KVb]; block_sizes: int32 view [B, H, KVb]; gini: whether Gini coefficients are made, which
    "gini" needs; softmax: None, or the scale of logits whose softmax is the scores."""

    method: str
    amount: ModArgs
    bounds: ModArgs
    capacity: int
    geometry: tuple[int, int, int, int]
    force_first: int = 0
    reach: int = NOWHERE
    force: torch.Tensor | None = None
    block_sizes: torch.Tensor | None = None
    gini: bool = True
    softmax: float | None = None

    @property
    def forced(self) -> bool:
        return self.force is not None or self.force_first > 0 or self.reach != NOWHERE


class Selected(NamedTuple):
    """indices int32 [B, H, Qb, capacity], counts int32, gini, tau, mass fp32 [B, H, Qb]; tau has no elements for "count", gini
    none where none was asked for."""

    indices: torch.Tensor
    counts: torch.Tensor
    gini: torch.Tensor
    tau: torch.Tensor
    mass: torch.Tensor


Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""`Selected`, as torch's dispatcher has it."""
KINDS = (torch.int32, torch.int32, torch.float32, torch.float32, torch.float32)  # of the results
GIVEN = ("Scores", "Sizes", "Force", "Index", "Count", "Gini", "Tau", "Mass", "amount", "least", "most")
"""What a call gives to the kernel."""


def result_shapes(scores: torch.Tensor, call: SelectCall) -> tuple[tuple[int, ...], ...]:
    """Shapes of the results, in the order of `Selected`."""
    rows = tuple(scores.shape[:3])
    tau = (0,) if call.method == "count" else rows
    return (*rows, call.capacity), rows, rows if call.gini else (0,), tau, rows


def forward(scores: torch.Tensor, call: SelectCall) -> Five:
    """Lists, their lengths, and what they were made by, in one launch."""
    shapes = zip(result_shapes(scores, call), KINDS, strict=True)
    made = Selected(*(torch.empty(shape, dtype=kind, device=scores.device) for shape, kind in shapes))
    if made.counts.numel() == 0:
        return made
    given = made if call.gini else made._replace(gini=None)  # type: ignore[arg-type]
    _prepare(scores, call)((scores, call.block_sizes, call.force, *given, *_settings(call)))
    return made


def _served_logits(served: Any, softmax: float) -> Any:
    """The same function, of logits."""

    def run(given: tuple[Any, ...]) -> None:
        scores, sizes, *rest = given
        served((scores_of(scores, sizes, softmax), sizes, *rest))

    return run


def scores_of(logits: torch.Tensor, sizes: torch.Tensor | None, softmax: float | None) -> torch.Tensor:
    """fp32 scores of logits, as `SelectCall` has both, but for the division by their sum; scores as they are without a scale."""
    if softmax is None:
        return logits
    x = logits.float() * softmax
    if sizes is not None:
        x = x.masked_fill(sizes[:, :, None] <= 0, -torch.inf)
    top = x.amax(-1, keepdim=True)
    return (x - top.masked_fill(top == -torch.inf, 0.0)).exp()


def _key(scores: torch.Tensor, call: SelectCall) -> Any:
    most = None if isinstance(call.bounds[1], torch.Tensor) else call.bounds[1]
    tensors = (scores, call.force, call.block_sizes, *call.amount, *call.bounds)
    return scores.shape[3], *map(_fact, tensors), *call[3:7], call.method, most, call.gini, call.softmax


@recorded("select", _key)
def _prepare(scores: torch.Tensor, call: SelectCall) -> Bound:
    check_forced(scores, call)
    bare = call._replace(amount=(), bounds=(0, 0), force=None, block_sizes=None)
    if served := function_at("select", scores.device, bare):
        return served if call.softmax is None else _served_logits(served, call.softmax)  # type: ignore[no-any-return]
    return _bind(_plan(scores, call.forced, call.gini), call, scores)


def gini(scores: torch.Tensor, block_sizes: torch.Tensor | None) -> torch.Tensor:
    """fp32 [B, H, Qb]: the Gini coefficient of each row; block_sizes as in `SelectCall`."""
    made = torch.empty(scores.shape[:3], dtype=torch.float32, device=scores.device)
    if made.numel() == 0:
        return made
    _prepare_gini(scores, block_sizes)((scores, block_sizes, made))
    return made


@recorded("gini", lambda scores, block_sizes: (scores.shape[3], _fact(scores), _fact(block_sizes)))
def _prepare_gini(scores: torch.Tensor, block_sizes: torch.Tensor | None) -> Bound:
    return function_at("gini", scores.device) or _bind_gini(_plan(scores), scores, block_sizes)


def most_forced(scores: torch.Tensor, call: SelectCall) -> int:
    """The most blocks that force_first and reach force into a list, as the kernel finds them."""
    block_q, block_k, seq_q, seq_k = call.geometry
    q_blocks, kv_blocks = scores.shape[2:]
    first = min(call.force_first, kv_blocks)
    most = first
    if call.reach != NOWHERE:
        for i in range(q_blocks):
            low = (i * block_q + seq_k - seq_q) // block_k - call.reach
            high = (min((i + 1) * block_q, seq_q) - 1 + seq_k - seq_q) // block_k + call.reach
            most = max(most, first + max(0, min(high, kv_blocks - 1) + 1 - max(low, first)))
    return most


def check_forced(scores: torch.Tensor, call: SelectCall) -> None:
    """ValueRangeError if what the arguments force does not fit the lists; what tensors force is not known here."""
    most, limit = most_forced(scores, call), call.bounds[1]
    room = call.capacity if isinstance(limit, torch.Tensor) else int(min(call.capacity, limit))
    if most > room:
        raise ValueRangeError(
            f"max_blocks leaves room for {room} blocks a list, but force_first, force_self and local_window force up to {most}"
        )


def _plan(scores: torch.Tensor, forced: bool = False, gini: bool = True) -> "SelectPlan":
    from ...plan.sparse.select import SelectProblem, plan_select

    batch, heads, q_blocks, kv_blocks = scores.shape
    return plan_select(SelectProblem(batch, heads, q_blocks, kv_blocks, forced, gini), device_of(scores.device))


def _fact(value: Setting | None) -> Any:
    """What of a tensor decides its launch; of a number its type alone."""
    if not isinstance(value, torch.Tensor):
        return type(value)
    return tuple(value.shape[:3]), value.stride(), value.dtype, value.device, value.data_ptr() % 16 == 0


def _settings(call: SelectCall) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """amount, least and most as the kernel's `setting` takes them."""
    least, most = call.bounds
    return tuple(map(_setting, call.amount)), _setting(least), _setting(most)


def _setting(value: Setting) -> tuple[Any, ...]:
    return (value, *value.stride()) if isinstance(value, torch.Tensor) else (value,)


def _bind(plan: "SelectPlan", call: SelectCall, scores: torch.Tensor) -> Bound:
    from ...kernels.sparse.select import select

    block_q, block_k, seq_q, seq_k = call.geometry
    values = {
        "scale": call.softmax,
        "capacity": call.capacity,
        "seq_q": seq_q,
        "shift": seq_k - seq_q,
        "log_q": block_q.bit_length() - 1,
        "log_k": block_k.bit_length() - 1,
        "force_first": call.force_first,
        "reach": call.reach,
        **strides_named("f", (0,) * 4 if call.force is None else call.force.stride(), "bhqk"),
    }
    constants = {"METHOD": call.method, "FORCED": call.forced, "RANKED": plan.ranked}
    return _bound(select, GIVEN, plan, scores, call.block_sizes, values, constants)


def _bind_gini(plan: "SelectPlan", scores: torch.Tensor, block_sizes: torch.Tensor | None) -> Bound:
    from ...kernels.sparse.gini import gini as kernel

    return _bound(kernel, ("Scores", "Sizes", "Gini"), plan, scores, block_sizes, {}, {})


def _bound(fn: Any, given: tuple[str, ...], plan: "SelectPlan", scores: torch.Tensor, block_sizes: torch.Tensor | None,
           values: dict[str, Any], constants: dict[str, Any]) -> Bound:  # fmt: skip
    """The launch of a kernel over rows of scores."""

    p = plan.problem
    constants = {**constants, "ROWS": plan.rows, "REGS": plan.regs, "LANES": plan.lanes, "LOG": plan.log}
    shared = {
        **{name: getattr(p, name) for name in ("rows", "heads", "q_blocks", "kv_blocks")},
        **strides_named("", scores.stride()[:3], "bhq"),
        **strides_named("s", (0,) * 3 if block_sizes is None else block_sizes.stride(), "bhk"),
    }
    values = {**shared, **values}
    return Bound.of(fn, plan.programs, given, values, constants, scores.device, num_warps=plan.num_warps)


# ---------------------------------------------------------------- the dispatcher: opaque operators without gradients


def _fake(scores: torch.Tensor, call: SelectCall) -> Five:
    shapes = result_shapes(scores, call)
    return cast("Five", tuple(scores.new_empty(s, dtype=kind) for s, kind in zip(shapes, KINDS, strict=True)))


def _fake_gini(scores: torch.Tensor, block_sizes: torch.Tensor | None) -> torch.Tensor:
    return scores.new_empty(scores.shape[:3], dtype=torch.float32)


NONE = "selections have no gradients: detach() the scores"
SELECT = Operation("select", forward, _fake, NONE)
GINI = Operation("gini", gini, _fake_gini, NONE)


# ---------------------------------------------------------------- without a GPU


def example_select(plan: "SelectPlan", method: str = "gini", sizes: bool = False, tensors: bool = False) -> Example:
    """(kernel, args, kwargs) of a selection that has this plan, on tensors without memory, to compile ahead.

    A forced problem has a map and a window; tensors: settings for each head."""
    p = plan.problem
    forced = p.forced
    scores, rows = meta(p.batch, p.heads, p.q_blocks, p.kv_blocks), (p.batch, p.heads, p.q_blocks)
    setting: Setting = meta(p.heads).view(1, -1, 1).expand(rows) if tensors else 0.5
    force = meta(p.q_blocks, p.kv_blocks, dtype=torch.bool).expand(scores.shape) if forced else None
    block_sizes = meta(p.kv_blocks, dtype=torch.int32).expand(p.batch, p.heads, p.kv_blocks) if sizes else None
    geometry = (64, 64, 64 * p.q_blocks, 64 * p.kv_blocks)
    amount = (setting,) * (2 if method == "gini" else 1)
    call = SelectCall(method, amount, (setting, setting), p.kv_blocks, geometry, int(forced), 1 if forced else NOWHERE, force,
                      block_sizes, p.gini)  # fmt: skip
    i32 = torch.int32
    gini = meta(*rows) if p.gini else None
    made = (meta(*rows, p.kv_blocks, dtype=i32), meta(*rows, dtype=i32), gini, meta(*rows), meta(*rows))
    return _bind(plan, call, scores).example((scores, block_sizes, force, *made, *_settings(call)))


def example_gini(plan: "SelectPlan") -> Example:
    """The same of the Gini coefficients alone."""
    p = plan.problem
    scores = meta(p.batch, p.heads, p.q_blocks, p.kv_blocks)
    return _bind_gini(plan, scores, None).example((scores, None, meta(p.batch, p.heads, p.q_blocks)))
