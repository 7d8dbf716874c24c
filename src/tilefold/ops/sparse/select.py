"""Block selection: plan, allocate, launch.  The arguments arrive checked and in one form; `tilefold.sparse.select` makes it."""

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from ...errors import ValueRangeError
from .. import torch_cpu
from ..device import device_of
from ..records import remember

if TYPE_CHECKING:
    from ...plan.select import SelectPlan

__all__ = ["SelectCall", "Selected", "Setting", "example_gini", "example_select", "forward", "gini", "most_forced"]

Setting: TypeAlias = float | torch.Tensor
"""One number for all rows, or a view [batch, heads, Q blocks] of any real dtype, on the device of the scores."""

NOWHERE = -(1 << 30)  # the reach of no window at all


class SelectCall(NamedTuple):
    """A selection but for its scores.

    method: "gini" (amount: tau_min, tau_max), "mass" (amount: tau) or "count" (amount: blocks); least, most: blocks a list;
    capacity: entries a list, at most the KV blocks; geometry: block_q, block_k, seq_q, seq_k; force_first: blocks from the start;
    reach: blocks to either side of a query block's own, NOWHERE for none; force: bool view [B, H, Qb, KVb]; block_sizes: int32
    view [B, H, KVb]."""

    method: str
    amount: tuple[Setting, ...]
    least: Setting
    most: Setting
    capacity: int
    geometry: tuple[int, int, int, int]
    force_first: int = 0
    reach: int = NOWHERE
    force: torch.Tensor | None = None
    block_sizes: torch.Tensor | None = None

    @property
    def settings(self) -> tuple[Setting, ...]:
        return (*self.amount, self.least, self.most)

    @property
    def forced(self) -> bool:
        return self.force is not None or self.force_first > 0 or self.reach != NOWHERE


class Selected(NamedTuple):
    """indices int32 [B, H, Qb, capacity], counts int32, gini, tau, mass fp32 [B, H, Qb]; tau has no elements for "count"."""

    indices: torch.Tensor
    counts: torch.Tensor
    gini: torch.Tensor
    tau: torch.Tensor
    mass: torch.Tensor


_CACHE: dict[Any, tuple[Any, tuple[Any, ...]]] = {}  # key -> launch and its integers


def result_shapes(scores: torch.Tensor, call: SelectCall) -> tuple[tuple[int, ...], ...]:
    """Shapes of the results, in the order of `Selected`."""
    rows = tuple(scores.shape[:3])
    return (*rows, call.capacity), rows, rows, (0,) if call.method == "count" else rows, rows


def forward(scores: torch.Tensor, call: SelectCall) -> Selected:
    """Lists, their lengths, and what they were made by, in one launch."""
    kinds = (torch.int32, torch.int32, torch.float32, torch.float32, torch.float32)
    made = Selected(
        *(
            torch.empty(s, dtype=kind, device=scores.device)
            for s, kind in zip(result_shapes(scores, call), kinds, strict=True)
        )
    )
    if made.counts.numel() == 0:
        return made
    if device_of(scores.device, "select").backend == "cpu":
        check_forced(scores, call)
        torch_cpu.served("select")(scores, call, made)
        return made
    most = None if isinstance(call.most, torch.Tensor) else call.most
    key = (
        scores.shape[3],
        *map(_key, (scores, call.force, call.block_sizes, *call.settings)),
        *call[4:8],
        call.method,
        most,
    )
    found = _CACHE.get(key)
    if found is None:
        check_forced(scores, call)
        found = remember(_CACHE, key, _select_launch(_plan(scores, call.forced), call, scores))
    launch, integers = found
    launch((scores, call.block_sizes, call.force, *made, *_settings(call), *integers))
    return made


def gini(scores: torch.Tensor, block_sizes: torch.Tensor | None) -> torch.Tensor:
    """fp32 [B, H, Qb]: the Gini coefficient of each row; block_sizes as in `SelectCall`."""
    made = torch.empty(scores.shape[:3], dtype=torch.float32, device=scores.device)
    if made.numel() == 0:
        return made
    if device_of(scores.device, "gini").backend == "cpu":
        torch_cpu.served("gini")(scores, block_sizes, made)
        return made
    key = ("gini", scores.shape[3], _key(scores), _key(block_sizes))
    found = _CACHE.get(key)
    if found is None:
        found = remember(_CACHE, key, _gini_launch(_plan(scores), scores, block_sizes))
    launch, integers = found
    launch((scores, block_sizes, made, *integers))
    return made


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
    most = most_forced(scores, call)
    room = call.capacity if isinstance(call.most, torch.Tensor) else int(min(call.capacity, call.most))
    if most > room:
        raise ValueRangeError(
            f"max_blocks leaves room for {room} blocks a list, but force_first, force_self and local_window force up to {most}"
        )


def _plan(scores: torch.Tensor, forced: bool = False) -> "SelectPlan":
    from ...plan.select import SelectProblem, plan_select

    batch, heads, q_blocks, kv_blocks = scores.shape
    return plan_select(SelectProblem(batch, heads, q_blocks, kv_blocks, forced), device_of(scores.device))


def _key(value: Setting | None) -> Any:
    """What of a tensor decides its launch; of a number its type alone."""
    if not isinstance(value, torch.Tensor):
        return type(value)
    return tuple(value.shape[:3]), value.stride(), value.dtype, value.device, value.data_ptr() % 16 == 0


def _settings(call: SelectCall) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """amount, least and most as the kernel's `setting` takes them."""
    amount, least, most = tuple(map(_setting, call.amount)), _setting(call.least), _setting(call.most)
    return amount, least, most


def _setting(value: Setting) -> tuple[Any, ...]:
    return (value, *value.stride()) if isinstance(value, torch.Tensor) else (value,)


def _constants(plan: "SelectPlan") -> dict[str, int]:
    return {"ROWS": plan.rows, "REGS": plan.regs, "LANES": plan.lanes, "LOG": plan.log}


def _launch(fn: Any, plan: "SelectPlan", constants: dict[str, Any], device: torch.device) -> Any:
    from ..launch import Launch

    return Launch(fn, (plan.programs, 1, 1), constants, {"num_warps": plan.num_warps}, device.index or 0)


def _strides(t: torch.Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if t is None else tuple(t.stride())


def _select_launch(plan: "SelectPlan", call: SelectCall, scores: torch.Tensor) -> tuple[Any, tuple[int, ...]]:
    """The launch and the integers behind its tensors and settings."""
    from ...kernels.select import select

    p = plan.problem
    block_q, block_k, seq_q, seq_k = call.geometry
    shifts = block_q.bit_length() - 1, block_k.bit_length() - 1
    integers = (p.rows, p.heads, p.q_blocks, p.kv_blocks, call.capacity, seq_q, seq_k - seq_q, *shifts, call.force_first,
                call.reach, *scores.stride()[:3], *_strides(call.force, 4), *_strides(call.block_sizes, 3))  # fmt: skip
    constants = {"METHOD": call.method, "FORCED": call.forced, **_constants(plan)}
    return _launch(select, plan, constants, scores.device), integers


def _gini_launch(
    plan: "SelectPlan", scores: torch.Tensor, block_sizes: torch.Tensor | None
) -> tuple[Any, tuple[int, ...]]:
    from ...kernels.gini import gini as kernel

    p = plan.problem
    integers = (p.rows, p.heads, p.q_blocks, p.kv_blocks, *scores.stride()[:3], *_strides(block_sizes, 3))
    return _launch(kernel, plan, _constants(plan), scores.device), integers


# ---------------------------------------------------------------- without a GPU


def example_select(
    plan: "SelectPlan", method: str = "gini", sizes: bool = False, tensors: bool = False
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of a selection that has this plan, on tensors without memory, to compile ahead.

    A forced problem has a map and a window; tensors: settings for each head."""
    p = plan.problem
    forced = p.forced
    scores, rows = _meta(p.batch, p.heads, p.q_blocks, p.kv_blocks), (p.batch, p.heads, p.q_blocks)
    setting: Setting = _meta(p.heads).view(1, -1, 1).expand(rows) if tensors else 0.5
    force = _meta(p.q_blocks, p.kv_blocks, dtype=torch.bool).expand(scores.shape) if forced else None
    block_sizes = _meta(p.kv_blocks, dtype=torch.int32).expand(p.batch, p.heads, p.kv_blocks) if sizes else None
    geometry = (64, 64, 64 * p.q_blocks, 64 * p.kv_blocks)
    amount = (setting,) * (2 if method == "gini" else 1)
    call = SelectCall(method, amount, setting, setting, p.kv_blocks, geometry, int(forced), 1 if forced else NOWHERE, force,
                      block_sizes)  # fmt: skip
    launch, integers = _select_launch(plan, call, scores)
    i32 = torch.int32
    made = (_meta(*rows, p.kv_blocks, dtype=i32), _meta(*rows, dtype=i32), *(_meta(*rows) for _ in range(3)))
    return launch.fn, (scores, block_sizes, force, *made, *_settings(call), *integers), launch.keywords


def example_gini(plan: "SelectPlan") -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The same of the Gini coefficients alone."""
    p = plan.problem
    scores = _meta(p.batch, p.heads, p.q_blocks, p.kv_blocks)
    launch, integers = _gini_launch(plan, scores, None)
    return launch.fn, (scores, None, _meta(p.batch, p.heads, p.q_blocks), *integers), launch.keywords


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
