"""attention_kvcache: check, plan, allocate, launch; and the operator for torch's dispatcher.

By the decode kernel, but for prompts (more rows a KV head than plan.decode's MOST_ROWS) over caches in the queries' dtype: those
have the kernel of `cached`, whose tiles have the rows of one head."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from ...check import CODED, TensorSpec, bind
from ...errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from ..bound import Prepared, new_results, run
from ..call import MAX_HEAD_DIM, Call, check_options
from ..device import device_of, on_host
from ..faults import Watch, require_kernels
from ..numerics import is_invariant
from ..operator import Operation
from ..records import recorded
from ..serve import function_at, plan_at
from ..source import Cache, Scales, is_plain, key_of
from ..watch import is_watched, refuse_derivatives
from .cached import bind_cached
from .cached_call import (
    cache_of,
    cached_shapes,
    cached_sizes,
    check_contents,
    check_longest,
    check_room,
    watched_call,
)
from .decode import (
    Decoder,
    Step,
    bind_decode,
    cut_alike,
    invariant_or_none,
    problem_of_decode,
    remember_cut,
    shares_storage,
    step_of,
)

if TYPE_CHECKING:
    from ...plan import DecodePlan, InvariantPlan
    from ...plan.device import Device

Pair = tuple[torch.Tensor, torch.Tensor]
Check = bool | Watch | None
"""Of index tensors and scales: looked at on the host where that costs nothing, or always, or on the device, or not at all."""
_FLOATING = ("q", "k_cache", "v_cache", "alibi_slopes", "sinks", "k_scale", "v_scale")


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Step | None:
    """The call ready for the other layers of a model, if the decode kernel serves it."""
    return step_of(q, k, v, call, prepare(q, k, v, call, False))


def _noting(p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, watch: Watch) -> Pair:
    """Where the kernel notes what is out of range."""
    out, lse = new_results(q, p.out_shape, p.lse_shape)
    p.bound((q, k, v, out, lse, call), watch)
    return out, lse


def _replacing(p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, watch: Watch) -> Pair:
    """Where what is out of range is noted and replaced before the kernel, which notes nothing."""
    call = watched_call(call, p.sizes, watch)
    return run(prepare(q, k, v, call, None), q, k, v, call)


def _near(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, check: Check, key: Any) -> Prepared | None:
    """The record of a call from that of one with another number of keys; None if there is none."""
    family = _key_of_any_capacity(key, call)
    if family is None:
        return None
    capacity = _capacity(k, call)
    near: Prepared | None = cut_alike(family, capacity, lambda p, keys: _plan_again(p, call, keys))
    if near is None:
        return None
    made = near.of_lengths(near.planned, (near.out_shape, near.lse_shape), near.bound.grown(k, v, call, capacity))
    table = cache_of(call).block_table
    most = {"seq_k": capacity} if table is None else {"max_pages": table.shape[1]}
    made.sizes = {**near.sizes, **most, "capacity": capacity}
    return made


@recorded("attention_kvcache", key_of, _near)
def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, check: Check, key: Any = None) -> Prepared:
    """The record of this call's shapes and options, which checks everything."""
    made, family = _prepared(q, k, v, call, check), _key_of_any_capacity(key, call)
    if family is not None and isinstance(made.bound, Decoder):
        remember_cut(family, made)
    return made


def _key_of_any_capacity(key: Any, call: Call) -> Any:
    """The key of calls without a mask that differ in the rows of their caches, or in the columns of their tables, alone; None for
    other calls.  key: of the call."""
    if key is None or not is_plain(call) or is_invariant(call.numerics):
        return None
    (q, k, v, options), source, scales, same, check = key
    tensors, *numbers = source[1]
    table = tensors[3]
    if table is not None:
        if len(table[1]) != 2 or table[2][1] != 1:
            return None
        sides: Any = k, v, table[0], table[1][0], table[3:]
    elif len(k[1]) != 4 or len(v[1]) != 4 or k[1][1] != v[1][1] or k[3] != q[3]:
        return None
    else:
        sides = *[(t[0], t[1][:1], t[1][2:], t[2][1:], t[3:]) for t in (k, v)], k[2][0] == v[2][0]
    places = tensors[:3], tensors[4:], *numbers
    return "attention_kvcache of any capacity", q, sides, places, options, scales, same, check


def _capacity(k: torch.Tensor, call: Call) -> int:
    """The most keys of a sequence."""
    table = cache_of(call).block_table
    return k.shape[1] * (1 if table is None else table.shape[1])


def _plan_again(near: Prepared, call: Call, capacity: int) -> "DecodePlan":
    """The plan of a call that differs from near's in the capacity alone."""
    from ...plan.cache.decode import plan_decode

    old = near.bound.plan
    attention = old.problem.attention
    problem = replace(old.problem, attention=attention.of_lengths(attention.seq_q, capacity))
    return plan_decode(problem, old.device, cache_of(call).splits)


def _prepared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, check: Check) -> Prepared:
    """`prepare` of a call that is like none before."""
    from ...plan.cache.decode import DecodePlan, decode_kernel_refusal
    from ...plan.cache.invariant import InvariantPlan

    watched = isinstance(check, Watch)
    sizes, shared = _checked(q, k, v, call)
    shapes = cached_shapes(sizes, cache_of(call))
    if watched:
        require_kernels(q.device)
        check_room(sizes)
    device = device_of(q.device, "attention_kvcache")
    if 0 in (*shapes[1], sizes["batch"], sizes["seq_q"]):
        return Prepared(None, *shapes, keep=(call.plan,), sizes=sizes)
    made: Any = _planned(q, k, v, call, sizes, shared, device)
    # looked at where somebody asks, and where reading costs nothing
    look = check_contents if check is True or (check is False and on_host(q)) else None

    def record(bound: Any, run: Any) -> Prepared:
        return Prepared(made, *shapes, bound, 1.0, (call.plan,), look, sizes, run)

    if isinstance(made, InvariantPlan):
        return record(bind_decode(q, k, v, call, sizes, made), _replacing if watched else run)
    if not isinstance(made, DecodePlan):
        return record(function_at("attention_kvcache", q.device, made), run)
    if (
        call.plan is None
        and not shared
        and made.problem.storage == "plain"
        and decode_kernel_refusal(made.problem.attention)
    ):
        bound = bind_cached(q, k, v, call, sizes, device)
        return Prepared(None, *shapes, bound, look=look, sizes=sizes, run=_replacing if watched else run)
    # The kernel trusts packed calls, which take longer; and where there is no page, it cannot read another one.
    trusted = cache_of(call).cu_q is not None or sizes.get("pages") == 0
    return record(
        bind_decode(q, k, v, call, sizes, made, watched), run if not watched else _replacing if trusted else _noting
    )


def _planned(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sizes: dict[str, int], shared: bool, device: "Device"
) -> "DecodePlan | InvariantPlan":
    from ...plan import InvariantPlan
    from ...plan.cache.decode import DecodePlan, plan_decode

    problem, plan = problem_of_decode(q, k, v, call, sizes, shared), cast("Any", call.plan)
    if (own := plan_at("attention_kvcache", problem, device, call, plan)) is not None:
        return own  # type: ignore[no-any-return]
    splits = cache_of(call).splits
    fixed = invariant_or_none(call, problem, device, plan, splits)
    if plan is None:
        return fixed or plan_decode(problem, device, splits)
    if not isinstance(plan, DecodePlan | InvariantPlan):
        raise DtypeError(f"plan must be a DecodePlan, an InvariantPlan or None, got {type(plan).__name__}")
    if splits not in (0, plan.splits):
        raise ValueRangeError(f"num_splits must be 0 or the plan's {plan.splits}, got {splits}")
    plan.problem.require_same(problem)
    return plan


_SCALES = tuple(
    [TensorSpec(name, f"kv_heads / {of} kv_heads", (torch.float32,), optional=True) for name in ("k_scale", "v_scale")]
    for of in ("caches", "pages")
)  # of a cache in one piece, of one in pages


def _checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[dict[str, int], bool]:
    """Sizes, and whether V is part of K, after all checks that need no device."""
    cache, (_, k_scale, v_scale) = cache_of(call), call.scales
    for name, t in (("k_cache", k), ("v_cache", v)):
        if not isinstance(t, torch.Tensor):
            raise DtypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    paged = cache.block_table is not None
    # Memory is looked at where there is some; a tracer is told by the shapes, and the call itself looks again.
    shared = all(t.layout == torch.strided and t.dim() == 4 and t.shape[-1] for t in (k, v)) and (
        shares_storage(k, v, call) if _has_memory(k, v) else v.shape[-1] <= k.shape[-1] and k.shape[-1] > 256
    )
    if not shared and k.dim() == 4 and k.shape[-1] > MAX_HEAD_DIM:
        raise Unsupported(
            f"q and k_cache have head dim {k.shape[-1]}; accepted: 1 to {MAX_HEAD_DIM}, more only where v_cache is a part of "
            f"k_cache, k_cache[..., :dim_v] in the same memory"
        )
    sizes = cached_sizes(q, k, v, call, quantised=True, shared=shared)
    check_longest(q, cache)
    if (k_scale is None) != (v_scale is None):
        raise ValueRangeError("k_scale and v_scale come together, got one of them")
    if k_scale is not None and k.dtype not in CODED:
        raise DtypeError(
            f"k_scale was given, but k_cache has dtype {str(k.dtype).removeprefix('torch.')}: scales go with bytes"
        )
    if k_scale is None and k.dtype in CODED and CODED[k.dtype].needs_factors:
        raise ValueRangeError(f"k_scale and v_scale must be given with an {CODED[k.dtype].short} cache")
    if k_scale is not None:
        bind(_SCALES[paged], {"k_scale": k_scale, "v_scale": v_scale}, dict(sizes), beside=("q", q))
    if k_scale is not None and v_scale is not None and k_scale.dim() != v_scale.dim():
        raise ShapeError(
            f"k_scale has {k_scale.dim()} dimensions and v_scale {v_scale.dim()}: both are per head, or neither"
        )
    return sizes, shared


def sizes_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> dict[str, int]:
    """Everything that is wrong with a call and needs no device; sizes of all dimensions."""
    return _checked(q, k, v, call)[0]


def _has_memory(*tensors: torch.Tensor) -> bool:
    return not any(is_watched((t,)) or t.device.type == "meta" for t in tensors)


def plan_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, on: "Device | None" = None
) -> "DecodePlan | InvariantPlan":
    """The plan that a call follows; the call's own if it is one for that.  on: as on that device."""
    sizes, shared = _checked(q, k, v, call)
    if 0 in (sizes["batch"], sizes["seq_q"], sizes["heads"]):
        raise Unsupported("there is nothing to plan: no queries")
    return _planned(q, k, v, call, sizes, shared, on or device_of(q.device, "attention_kvcache"))


# ---------------------------------------------------------------- the dispatcher


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, check: bool | Watch) -> Pair:
    out_shape, lse_shape = cached_shapes(sizes_of(q, k, v, call), cache_of(call))
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=torch.float32)


def _before(q: Any, k: Any, v: Any, call: Call, check: Any) -> None:
    refuse_derivatives(_FLOATING, (q, k, v, call.alibi_slopes, call.sinks, *call.scales[1:]), "attention_kvcache")
    if call.plan is not None:
        raise Unsupported(
            "plan must be None under torch.compile, transforms and gradients: the planner's own is followed there"
        )
    check_options(call)


ATTENTION_KVCACHE = Operation(
    "attention_kvcache",
    prepare,
    _fake,
    "attention_kvcache is forward only: call it under torch.no_grad()",
    _before,
    (Cache, Scales),
)
