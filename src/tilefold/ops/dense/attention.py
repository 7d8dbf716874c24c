"""Forward attention: check, plan, allocate, launch.

A call's shapes, strides, dtypes and options make a key; everything that follows from them (checks, problem, plan, grid,
scalars) is worked out once, kept as a `Prepared` record and reused, so that a repeated call only allocates and launches.
"""

import functools
import importlib
from typing import TYPE_CHECKING, Any, cast

import torch

from ...errors import DtypeError
from ...types import Rule, Rules
from .. import records
from ..bound import Bound, Example, Prepared, meta, run
from ..cache.decode import Decoder, Step, bind_decode, cut_alike, dense_rules, invariant_or_none, remember_cut, step_of
from ..call import Call, check_hooks, check_options, result_shapes, scale_of, sizes_of, window_of
from ..device import device_of, interpreting, on_host
from ..hopper import disabled
from ..numerics import is_invariant
from ..places import check_inside
from ..records import recorded, remember
from ..serve import function_at, plan_at
from ..source import Packed, is_plain, key_of
from .attention_parts import (
    GIVEN,
    band_of,
    boxed,
    broadcast_strides,
    dims_of,
    head_strides,
    hooks_of,
    kind_of,
    lengths_of,
    option_values,
    problem_of,
    shared_values,
    sides_of,
)
from .attention_tiles import tiles_of

if TYPE_CHECKING:  # imported where they are needed: `import tilefold` stays light
    from ...plan import AttentionPlan, AttentionProblem, DecodePlan, InvariantPlan
    from ...plan.device import Device


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of dense or varlen attention; see `tilefold.attention`."""
    return run(call.prepared or prepare(q, k, v, call), q, k, v, call)


def _look(sizes: Any, q: torch.Tensor, k: torch.Tensor, call: Call) -> None:
    """What says where packed sequences lie."""
    check_inside(call.source, q.shape[0], k.shape[0])  # type: ignore[arg-type]


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Step | None:
    """The call ready for the other layers of a model, if the decode kernel serves it."""
    return step_of(q, k, v, call, prepare(q, k, v, call)) if call.packed is None else None


def _near(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, key: Any) -> Prepared | None:
    """The record of a call from that of other lengths, None if there is none to make it from.  Calls whose k and v are longer or
    shorter by a few keys share plan and launches: a token of generation is not planned anew.  Calls of any lengths share checks
    and compiled kernel."""
    lengths, family, alike = _keys_of_lengths(q, k, v, call, key)
    if lengths is not None:
        near = cut_alike(
            lengths, lengths_of_call(q, k, call)[1], lambda first, keys: _plan_of_lengths(first, q, keys, call)
        )
        return _grown(near, q, k, v, call) if near else None
    if (near := records.CACHE.get(alike)) is not None:
        return _of_the_same_tiles(near, q, k, v, call)
    other = records.CACHE.get(family)
    made = None if other is None else _of_other_lengths(other, q, k, v, call)
    return None if made is None or other is None else _share(made, None, alike, other.shared)


def _share(made: Prepared, family: Any, alike: Any, shared: dict[Any, Any] | None = None) -> Prepared:
    """The record, which is there from here on for calls of these keys, where it serves them.  shared: backward passes of the
    family, if there are some."""
    if isinstance(made.bound, Bound):
        if family is not None:
            remember(records.CACHE, family, made)
        if alike is not None and dense_rules().shared_by_tiles(made.planned):
            made.shared = {} if shared is None else shared
            remember(records.CACHE, alike, made)
    return made


@recorded("attention", key_of, _near)
def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, key: Any = None) -> Prepared:
    """The record of this call's shapes and options, which checks everything."""
    made = prepare_anew(q, k, v, call)
    made.look = _look if call.packed is not None and on_host(q) else None
    lengths, family, alike = _keys_of_lengths(q, k, v, call, key)
    if lengths is not None and isinstance(made.bound, Decoder):
        remember_cut(lengths, made)
    return _share(made, family, alike)


def _keys_of_lengths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, key: Any) -> tuple[Any, Any, Any]:
    """The keys of calls that differ from this one in lengths alone: of a few keys more or less; else of any lengths, and of the
    same tiles.  key: of the call, None if it has none."""
    try:
        lengths = _key_of_lengths(q, k, v, call, key)
        family = None if lengths is not None else _key_of_any_length(key, call)
        return lengths, family, _key_of_tiles(family, q, k, call)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # the checks say which argument is wrong
        return None, None, None


@functools.cache
def _binder(kernel: str) -> Any:
    """The module that binds a specialised kernel; None for a portable one."""
    from ...plan.dense.specialised import SPECIALISED

    return importlib.import_module(SPECIALISED[kernel].binder) if kernel in SPECIALISED else None


def _key_of_lengths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, key: Any) -> Any:
    """The key of calls that differ in the length of k, v and mask alone, within lengths that one plan may hold for; None for
    other calls.  key: of the call."""
    at = 1 if call.layout == "bshd" else 2
    if key is None or k.dim() != 4 or q.numel() > dense_rules().MOST_ROWS * k.shape[0] * k.shape[3 - at] * k.shape[3]:
        return None  # not the decode kernel's
    mask, bare = call.mask, call if call.mask is None else call._replace(mask=None)
    if not is_plain(bare) or k.shape[:3] != v.shape[:3] or is_invariant(call.numerics):
        return None
    plain = key if mask is None else key[0]
    sides: list[tuple[Any, ...]] = [
        (kind, shape[0], shape[3 - at], shape[3], strides[at], remainders(strides), *others)
        for kind, shape, strides, *others in plain[1:3]
    ]
    if mask is not None:
        if mask.dim() != 4 or mask.shape[3] != k.shape[at]:
            return None
        sides.append((type(mask), mask.shape[:3], remainders(broadcast_strides(mask)), tiles_of(mask), key[1][2][3:]))
    return "attention of any length", plain[0], *sides, plain[3]


def _key_of_any_length(key: Any, call: Call) -> Any:
    """The key of calls without a bias or a mask that differ in lengths alone; None for other calls.  key: of the call."""
    packed, at = call.packed, 2 if call.layout == "bhsd" else 1
    if packed is not None:
        at = 0
        if not (type(packed.max_q) is type(packed.max_k) is int and packed.max_q > 0 and packed.max_k > 0):
            return None
    if key is None or not is_plain(call) or is_invariant(call.numerics):
        return None
    (q, k, v, options), places = (key, None) if packed is None else (key[0], key[1][1][:2])
    if k[1][at] != v[1][at]:
        return None
    return "attention of any lengths", sides_of(q, k, v, at), places, options


def _key_of_tiles(family: Any, q: torch.Tensor, k: torch.Tensor, call: Call) -> Any:
    """The key of those of a family whose lengths make the same tiles; None where more than tiles decides."""
    if family is None or disabled():
        return None
    group = 1  # heads of packed sequences are never rows of one tile
    if call.packed is None:
        heads = 1 if call.layout == "bhsd" else 2
        group = q.shape[heads] // max(1, k.shape[heads])
    tiles = dense_rules().lengths_alike(*lengths_of_call(q, k, call), group)
    return None if tiles is None else (family, tiles, mean_of_call(q, call))


def lengths_of_call(q: torch.Tensor, k: torch.Tensor, call: Call) -> tuple[int, int]:
    """Queries and keys, of a packed batch the most of a sequence."""
    packed, at = call.packed, 2 if call.layout == "bhsd" else 1
    return (q.shape[at], k.shape[at]) if packed is None else (packed.max_q, packed.max_k)


def mean_of_call(q: torch.Tensor, call: Call) -> int:
    """Of a packed batch, how long its sequences are in the mean, as plans ask; else 0."""
    packed = call.packed
    return 0 if packed is None else dense_rules().mean_of(q.shape[0], packed.cu_q.shape[0] - 1)


def _of_other_lengths(near: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Prepared | None:
    """The record of a call from that of other lengths; None where these have another kernel, tile or version of it, or offsets
    of another width."""
    plan, old = _plan_of_lengths(near, q, lengths_of_call(q, k, call)[1], call), cast("Any", near.planned)
    if type(plan) is not type(old) or plan.kernel != old.kernel or plan.tile != old.tile or plan.options != old.options:
        return None
    if not _binder(plan.kernel) and near.bound.launch.keywords["WIDE"] != _is_wide(q, call, plan):
        return None
    return _of_lengths(near, q, k, v, call, plan, plan)


def _of_the_same_tiles(near: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Prepared:
    """The record of a call from that of one whose lengths have the same `_key_of_tiles`: its plan is made when somebody asks."""
    old = cast("AttentionPlan", near.planned)
    plan = functools.partial(dense_rules().plan_alike, old, *lengths_of_call(q, k, call))
    return _of_lengths(near, q, k, v, call, old, plan, near.shared)


def _of_lengths(
    near: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, tiles: "AttentionPlan", plan: Any,
    shared: Any = None,
) -> Prepared:  # fmt: skip
    """The record of a call from that of other lengths.  tiles: a plan of the call's tiles, near's kernel and versions; plan: the
    call's own, or what makes it; shared: as of `Prepared`."""
    lengths, shape, at = lengths_of_call(q, k, call), near.out_shape, 2 if call.layout == "bhsd" else 1
    if call.packed is not None:
        shapes: Any = (q.shape[0], *shape[1:]), (near.lse_shape[0], q.shape[0])
    else:
        shapes = (*shape[:at], lengths[0], *shape[at + 1 :]), (*near.lse_shape[:2], lengths[0])
    if own := _binder(tiles.kernel):
        values = own.values_of_lengths(q, call, tiles, shapes[0], lengths)
        grid = own.grid_of(tiles, values["items"])
    else:
        sizes = lengths_of(tiles.problem)
        values, grid = _values_of_lengths(q, k, v, call, tiles, sizes, near.scale, shapes[0]), tiles.grid
    return near.of_lengths(plan, shapes, near.bound.with_values(values, grid, (q, k, v)), shared)


def _plan_of_lengths(near: Prepared, q: torch.Tensor, keys: int, call: Call) -> Any:
    """The plan of a call that differs from near's in its lengths alone; keys: of it."""
    problem = near.problem.of_lengths(lengths_of_call(q, q, call)[0], keys, mean_of_call(q, call))
    return dense_rules().plan_forward(problem, near.plan.device, portable=disabled())


def remainders(strides: tuple[int, ...]) -> tuple[tuple[int, bool, bool], ...]:
    """What Triton specialises on in the strides of a tensor, and what decides whether TMA reads it."""
    return tuple((stride % 16, stride in (0, 1), stride >= 1 << 31) for stride in strides)


def _grown(near: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Prepared:
    """The record of a call from that of another length whose keys are cut alike."""
    problem = near.problem.of_lengths(*lengths_of_call(q, k, call))
    plan = functools.partial(dense_rules().plan_forward, problem, near.bound.plan.device)
    return near.of_lengths(plan, (near.out_shape, near.lse_shape), near.bound.grown(k, v, call, problem.seq_k))


def _is_wide(q: torch.Tensor, call: Call, plan: "AttentionPlan") -> bool:
    """Whether the offsets in a tile of q take 64 bits."""
    return head_strides(q, call.layout)[-2] * plan.block_m >= 1 << 31


def _values_of_lengths(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, plan: "AttentionPlan", sizes: dict[str, int],
    scale: float, out_shape: tuple[int, ...],
) -> dict[str, Any]:  # fmt: skip
    """What the portable kernels take that may differ with lengths, by their names."""
    values = shared_values({**sizes, "total_q": q.shape[0]}, scale, q, k, v, out_shape, call.layout)
    if plan.kernel == "attention_forward_box":
        values |= boxed(k, v, call.layout, plan.block_n, (plan.block_qk, plan.block_v))
    return values


# ---------------------------------------------------------------- the first time


def prepare_anew(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, on: "Device | None" = None) -> Prepared:
    """The record of a call that is like none before.  on: its plan alone, as on that device."""
    from ...plan import AttentionPlan, DecodePlan, DecodeProblem, InvariantPlan, plan_attention, plan_forward
    from ...plan.torch_cpu import TorchPlan
    from ..hopper import bound_or_none

    check_options(call)
    sizes = sizes_of(q, k, v, call)
    window = window_of(call.window, call.causal)
    scale = scale_of(call, sizes["dim_qk"])
    check_hooks(call, q.device)
    if call.plan is not None and not isinstance(call.plan, (AttentionPlan, DecodePlan, InvariantPlan, TorchPlan)):
        raise DtypeError(
            f"plan must be an AttentionPlan, a DecodePlan, an InvariantPlan or None, got {type(call.plan).__name__}"
        )
    shapes = result_shapes(call, sizes)
    device = on or device_of(q.device, "attention")
    if 0 in (*shapes[1], sizes["batch"], sizes["seq_q"]):
        return Prepared(None, *shapes, keep=hooks_of(call))
    problem = problem_of(q, k, v, call, sizes, window, band_of(call, window))
    problem = problem.of_lengths(problem.seq_q, problem.seq_k, mean_of_call(q, call))
    if (own := plan_at("attention", problem, device, call, call.plan)) is not None:
        bound = None if on else function_at("attention", q.device, own)
        return Prepared(own, *shapes, bound, scale, hooks_of(call))
    rows = DecodeProblem(problem, equal=call.packed is None)
    plan: Any = _prompt_or_none(call, problem, device) or invariant_or_none(call, rows, device, call.plan)
    if plan is None:
        plan = plan_forward(problem, device, portable=disabled()) if call.plan is None else call.plan
    if call.plan is not None:
        call.plan.check(problem, device)
    if on is not None:
        return Prepared(plan, *shapes)
    bound_to = functools.partial(_bind, q, k, v, call, sizes, scale, shapes)
    if call.plan is None and (own := _binder(getattr(plan, "kernel", ""))):
        faults: list[str] | None = None if call.score_mod is None and call.mask_mod is None else []
        found = bound_or_none("dense", lambda: bound_to(plan), lambda p: own.compile(p, q, k, v, call), faults=faults)
        if found is not None:
            return found
        if (fixed := invariant_or_none(call, rows, device, None)) is not None:
            return bound_to(fixed)
        name, plan = plan.kernel, plan_attention(problem, device, portable=True)
        if faults:
            plan = plan.refusing(name, f"It does not compile with this score_mod or mask_mod: {faults[0]}.")
    return bound_to(plan)


def _prompt_or_none(call: Call, problem: "AttentionProblem", device: "Device") -> "AttentionPlan | None":
    """The plan of many queries with numerics="invariant" by a dense kernel, or a given one of these bits; else None."""
    from ...plan import plan_prompt
    from ...plan.dense.attention_hopper import INVARIANT

    if not is_invariant(call.numerics):
        return None
    if call.plan is not None:
        return cast("AttentionPlan", call.plan) if INVARIANT in getattr(call.plan, "options", ()) else None
    plan = "" if disabled() else plan_prompt(problem, device)
    return None if isinstance(plan, str) else plan


# ---------------------------------------------------------------- binding a plan to a call


def _bind(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sizes: dict[str, int], scale: float,
    shapes: tuple[tuple[int, ...], tuple[int, ...]], plan: "AttentionPlan | DecodePlan | InvariantPlan",
) -> Prepared:  # fmt: skip
    """The record of this call under this plan."""
    from ...plan import AttentionPlan

    if not isinstance(plan, AttentionPlan):  # k and v as they lie: a cache that is full
        bound: Any = bind_decode(q, k, v, call, {**sizes, "capacity": sizes["seq_k"]}, plan)
    elif own := _binder(plan.kernel):
        return own.bind(q, k, v, call, window_of(call.window, call.causal), scale, plan, shapes)  # type: ignore[no-any-return]
    else:
        bound = _bind_portable(q, k, v, call, sizes, scale, shapes[0], plan)
    return Prepared(plan, *shapes, bound, scale, hooks_of(call))


def _bind_portable(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sizes: dict[str, int], scale: float,
    out_shape: tuple[int, ...], plan: "AttentionPlan",
) -> Bound:  # fmt: skip
    """Kernel, grid, run-time scalars and compile-time constants of this call under this plan."""
    from ...device import mods
    from ...kernels.dense import attention_forward as kernels

    window = window_of(call.window, call.causal)
    band = band_of(call, window)
    constants = {
        "KIND": kind_of(window, band),
        "EMULATE": interpreting() and q.dtype == torch.bfloat16,
        "WIDE": _is_wide(q, call, plan),
        **dims_of(plan.problem),
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
    }
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages, "maxnreg": plan.maxnreg}
    values = _values_of_lengths(q, k, v, call, plan, sizes, scale, out_shape)
    values |= option_values(call, window, mods, float(call.softcap), q.dtype, band)
    return Bound.of(getattr(kernels, plan.kernel), plan.grid, GIVEN, values, constants, q.device, **options)


# ---------------------------------------------------------------- without a GPU


def example_launch(
    problem: "AttentionProblem", plan: "AttentionPlan", bias: str | None = None, reads: bool = False
) -> Example:
    """(kernel, args, kwargs) of a call that has this problem and plan, on tensors without memory: to compile ahead of time.
    bias: its dtype, if not that of q.  reads: the user's functions load from their arguments."""
    (q, k, v), call, prepared, out, lse = example_call(problem, plan, bias, reads)
    bound: Bound = prepared.bound
    return bound.example((q, k, v, out, lse, call))


def example_call(
    problem: "AttentionProblem", plan: "AttentionPlan", bias: str | None = None, reads: bool = False
) -> tuple[Any, Call, Prepared, Any, Any]:
    """((q, k, v), call, prepared, out, lse) of such a call."""
    from ...device import mods
    from ..derivative import derivative_of

    n = problem
    dtype = getattr(torch, n.dtype)
    rows_q, rows_k = (
        ((n.seq_q * n.batch,), (n.seq_k * n.batch,)) if n.varlen else ((n.batch, n.seq_q), (n.batch, n.seq_k))
    )
    q = meta(*rows_q, n.heads, n.dim_qk, dtype=dtype)
    k, v = (meta(*rows_k, n.kv_heads, d, dtype=dtype) for d in (n.dim_qk, n.dim_v))
    offsets = meta(n.batch + 1, dtype=torch.int32)
    rows_bias, rows_mask = (1 if d == "keys" else n.seq_q for d in (n.bias_descriptors, n.mask_descriptors))
    bias_dtype = getattr(torch, bias or n.dtype)
    mask_mod, mask_args = _example_rules(n, meta(n.batch, dtype=torch.int32), reads)
    score_mod, score_grad, score_args = (
        (mods.alibi, derivative_of(mods.alibi), (meta(n.heads), 0, 1))
        if reads
        else (mods.softcap, mods.softcap_slope, (30.0,))
    )
    call = Call(
        causal=n.causal,
        window=n.window,
        softcap=30.0 if "softcap" in n.score_mods else 0.0,
        alibi_slopes=meta(n.heads) if "alibi" in n.score_mods else None,
        bias=meta(n.batch, 1, rows_bias, n.seq_k, dtype=bias_dtype) if "bias" in n.score_mods else None,
        mask=meta(n.batch, 1, rows_mask, n.seq_k, dtype=torch.bool) if "mask" in n.mask_mods else None,
        sinks=meta(n.heads) if n.sinks else None,
        score_mod=score_mod if "user" in n.score_mods else None,
        score_grad=score_grad if "user" in n.score_mods else None,
        score_args=score_args if "user" in n.score_mods else (),
        mask_mod=mask_mod,
        mask_args=mask_args,
        source=Packed(offsets, offsets, n.seq_q, n.seq_k) if n.varlen else None,
        dropout_p=0.1 if n.dropout else 0.0,
        dropout_seed=meta(1, dtype=torch.int64) if n.dropout else None,
        plan=plan,
    )
    sizes = sizes_of(q, k, v, call)
    shapes = result_shapes(call, sizes)
    prepared = _bind(q, k, v, call, sizes, 1.0, shapes, plan)
    return (q, k, v), call, prepared, meta(*shapes[0], dtype=dtype), meta(*shapes[1])


def _example_rules(problem: "AttentionProblem", lengths: torch.Tensor, reads: bool) -> tuple[Any, tuple[Any, ...]]:
    """mask_mod and mask_args for the names of a problem: a function; with a prefix, one length a sequence, rules of rules; by
    place and reading, a table of blocks."""
    from ...device import mods

    user = "user" in problem.mask_mods
    if user and reads and problem.mask_by_place:
        kinds = torch.empty((1, 1, -(-problem.seq_q // 96), -(-problem.seq_k // 96)), dtype=torch.uint8, device="meta")
        table = kinds, 0, 0, kinds.stride(2), 1, 96, 96
        inner = "all", Rule("listed", len(table)), Rule("between", 2)
        return Rules(("all", ("any", Rule("whole", len(table)), inner))), (*table, *table, lengths, lengths)
    if "prefix" not in problem.mask_mods:
        called = (mods.between, (lengths, lengths)) if reads else (mods.window, (64, 64))
        return called if user else (None, ())
    some = ("any", ("not", Rule(mods.window, 2)), ("all", Rule("keys", 1), Rule("between", 2)))
    args = (lengths, *[64, 64, lengths, lengths, lengths] * user)
    return Rules(("all", Rule("prefix_each", 1), *[some] * user)), args
