"""The decode kernel's host side: which call it takes, its launches, the memory for partial results."""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ...cache_formats import format_named
from ...errors import PlanError, Unsupported
from .. import records
from ..bound import Bound, Example, Slot, attribute, meta, new_results, strides_named
from ..call import Call, scale_of, window_of
from ..dense.attention_parts import band_of, kind_of, option_values, problem_of, sequence_strides, shared_values
from ..device import interpreting
from ..faults import WORDS, Watch, note_of
from ..numerics import is_invariant
from ..records import remember
from ..source import Cache, Scales, facts_of
from ..watch import in_forward_mode, is_transformed, is_watched
from .cached_call import cache_of, cache_values, cached_shapes, scale_strides
from .decode_counters import counters

if TYPE_CHECKING:
    from ...plan.cache.decode import DecodePlan, DecodeProblem
    from ...plan.cache.invariant import InvariantPlan
    from ...plan.device import Device

ONE_CHUNK, LARGE_CHUNK = 128, 1024  # sequences whose tiles are counted at a time


@dataclass(slots=True)
class Decoder:
    """A call of one kind, ready to be run again and again."""

    plan: "DecodePlan | InvariantPlan"
    launch: Bound
    merge: Bound | None
    parts: tuple[int, int]  # numbers of partial results, and of their statistics; 0: there are none
    counted: int  # items that the last program to arrive merges, 0: none does
    limit: int = 0  # how many pages, or caches, there are
    warm: bool = False  # all launches have been made

    def __call__(self, given: tuple[Any, ...], watch: Watch | None = None) -> None:
        """Launch for q, k, v, out, lse and a call, as a `Bound` of attention.  watch: in every call of a Decoder, or in none."""
        device, (size, statistics) = given[0].device, self.parts
        part: Any = None
        stat: Any = None
        arrived: Any = None
        if size:
            memory = torch.empty_strided((size + statistics,), (1,), dtype=torch.float32, device=device)
            if self.warm and self.launch.launch.warm:  # views cost more than addresses
                part = memory.data_ptr()
                stat = part + 4 * size
            else:
                part, stat = memory.split_with_sizes(self.parts)
            if self.counted:
                arrived = counters(self.counted, device)
        noted = None if watch is None else self._noted(watch, cache_of(given[5]), device)
        given = (*given, part, stat, arrived, noted)
        self.launch(given)
        if self.merge is not None:
            self.merge(given)
        if not self.warm and self.launch.launch._compiled is not None:
            self.warm = self.launch.launch.warm and (self.merge is None or self.merge.launch.warm)

    def grown(self, k: torch.Tensor, v: torch.Tensor, call: Call, capacity: int) -> "Decoder":
        """The same launches for caches of another capacity, which are cut alike."""
        values: dict[str, int] = {"capacity": capacity}
        table = cache_of(call).block_table
        if table is not None:
            values["stride_tb"] = table.stride(0)
        else:
            for letter, t in (("k", k), ("v", v)):
                values |= strides_named(letter, sequence_strides(t, call.layout), "bnh")
        merge = None if self.merge is None else self.merge.with_values(values)
        return Decoder(self.plan, self.launch.with_values(values), merge, self.parts, self.counted, self.limit)

    def _noted(self, watch: Watch, cache: Cache, device: torch.device) -> tuple[Any, ...]:
        """The note that faults are left in, and what the kernel needs for it; no table has 2^31 entries."""
        columns = 0 if cache.block_table is None else cache.block_table.shape[1]
        return (note_of(device), watch.operation, self.limit, watch.fewest, watch.shift, watch.columns or columns)


GIVEN = ("q", "k", "v", "out", "lse", "call", "part", "stat", "arrived", "noted")
"""What a call gives to the launches."""
_PARTS = {"Part": Slot("part"), "Stat": Slot("stat"), "Arrived": Slot("arrived")}
_NOTED = ("Fault", "operation", "limit", "fewest", "shift", "columns")
WATCHED = _PARTS | {name: Slot("noted", operator.itemgetter(i)) for i, name in enumerate(_NOTED)}
UNWATCHED = _PARTS | dict.fromkeys(_NOTED, 0) | {"Fault": None}


@dataclass(slots=True)
class Step:
    """A call that another layer makes again: its tensors are others of the same facts, all else is the same.

    A token of generation passes dozens of layers, and what a call is checked for is the same in each."""

    facts: Any
    decoder: Decoder
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    call: Call

    def fits(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether these tensors are like those that it was made for, and nobody watches or differentiates."""
        return (facts_of(q), facts_of(k), facts_of(v)) == self.facts and not (
            torch.is_grad_enabled() or in_forward_mode() or is_transformed() or torch._C._len_torch_dispatch_stack()
        )

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The call's out."""
        out, lse = new_results(q, self.out_shape, self.lse_shape)
        self.decoder((q, k, v, out, lse, self.call))
        return out


def step_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, prepared: Any) -> Step | None:
    """The call ready to be made again; prepared: its record; None where no decoder runs it, for tensors of other classes, and
    where V lies in K: another layer's need not."""
    if not isinstance(prepared.bound, Decoder) or is_watched((q, k, v, call.mask)) or shares_storage(k, v, call):
        return None
    facts = facts_of(q), facts_of(k), facts_of(v)
    return Step(facts, prepared.bound, prepared.out_shape, prepared.lse_shape, call)


def remember_cut(family: Any, made: Any) -> None:
    """Keep a record with a decoder as the first of its family, calls that differ in the number of keys alone, and for those that
    are cut alike."""
    remember(records.CACHE, family, made)
    remember(records.CACHE, (family, dense_rules().cut_of(made.bound.plan)), made)


@functools.cache
def dense_rules() -> Any:
    """The module that says what calls of other lengths share."""
    from ...plan.dense import forward  # here: `import tilefold` stays light

    return forward


def cut_alike(family: Any, keys: int, plan_of: Callable[[Any, int], Any]) -> Any:
    """A record of the family that is cut as a call of so many keys is, None if there is none; plan_of(record, keys): a
    call's plan, from any record.  Where a plan holds for its STEP, lengths in it are not planned anew."""
    rules = dense_rules()
    held = records.CACHE.get(step := (family, rules.step_number(keys)))
    if held:
        return held
    first = records.CACHE.get(family)
    plan: Any = None if first is None else plan_of(first, keys)
    found = records.CACHE.get((family, rules.cut_of(plan))) if isinstance(plan, rules.DecodePlan) else None
    # a table of measured plans has single problems
    if held is None and found is not None and keys > 0 and not rules.in_use(plan.device):
        remember(records.CACHE, step, rules.plan_holds(keys, lambda n: plan_of(first, n)) and found)
    return found


def storage_of(q: torch.Tensor, k: torch.Tensor) -> str:
    """How K and V are stored, as plans call it."""
    return "plain" if k.dtype == q.dtype else str(k.dtype).removeprefix("torch.")


def shares_storage(k: torch.Tensor, v: torch.Tensor, call: Call) -> bool:
    """V is the first columns of K in the same memory.  Scales of pages have to be the same, too: a tile is multiplied once."""
    same = (
        k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and k.dtype == v.dtype and v.shape[-1] <= k.shape[-1]
    )
    if not same or k.device.type == "meta":
        return False
    return not _per_page(call) or call.scales.k is call.scales.v


def _per_page(call: Call) -> bool:
    """Each page has factors of its own."""
    return cache_of(call).block_table is not None and any(t is not None and t.dim() == 2 for t in call.scales[1:])


def invariant_or_none(
    call: Call, problem: "DecodeProblem", device: "Device", given: Any, splits: int = 0
) -> "InvariantPlan | None":
    """The plan of a call with numerics="invariant", or the given one if it has the same bits; None for other calls.

    PlanError for a plan with other bits."""
    from ...plan import InvariantPlan, plan_invariant

    if not is_invariant(call.numerics):
        return None
    if given is None:
        return plan_invariant(problem, device, splits)
    if not isinstance(given, InvariantPlan):
        raise PlanError(
            f'plan is a {type(given).__name__}, numerics="invariant" follows an InvariantPlan: leave one of them out'
        )
    given.require_invariant()
    return given


def problem_of_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sizes: dict[str, int], shared: bool
) -> "DecodeProblem":
    from ...plan.cache.decode import DecodeProblem

    cache = cache_of(call)
    window = window_of(call.window, call.causal)
    attention = problem_of(q, k, v, call, {**sizes, "seq_k": sizes["capacity"]}, window)
    page = sizes["page_size"] if cache.block_table is not None else 0
    equal = cache.lengths is None and cache.pads is None and cache.cu_q is None and cache.cu_k is None
    return DecodeProblem(attention, storage_of(q, k), page, shared, equal)


@functools.cache
def _quant(storage: str, device: "Device") -> int:
    """Which of device.cache's conversions."""
    from ...device import cache as kinds

    name = "PLAIN" if storage == "plain" else format_named(storage).read_by(device.has)
    return int(getattr(kinds, name).value)


def _constants(plan: "DecodePlan | InvariantPlan", q: torch.Tensor, call: Call, sizes: dict[str, int], wide: bool, pairs: bool,
               kind: int) -> dict[str, Any]:  # fmt: skip
    p, a = plan.problem, plan.problem.attention
    quant = _quant(p.storage, plan.device)
    # a quantised tile is exact in float16, so only bfloat16 and what the interpreter cannot do go through fp32
    emulate = interpreting() and (q.dtype == torch.bfloat16)
    return {
        "PAGE": p.page_size,
        "PADDED": cache_of(call).pads is not None,
        "KIND": kind,
        "EMULATE": emulate,
        "WIDE": wide,
        "QUANT": quant,
        "PER_PAGE": _per_page(call),
        "SHARED": p.shared,
        "PAIRS": pairs,
        "EARLY": plan.device.dependent_launches,
        "DIM_K": a.dim_v if p.shared else a.dim_qk,
        "DIM_REST": a.dim_qk - a.dim_v if p.shared else 0,
        "DIM_V": a.dim_v,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": p.block_k,
        "BLOCK_REST": p.block_rest,
        "BLOCK_V": p.block_v,
        **_cut(plan, sizes["batch"]),
    }


def _cut(plan: "DecodePlan | InvariantPlan", batch: int) -> dict[str, Any]:
    """How a kernel cuts the keys, and merges what its programs made."""
    from ...plan import InvariantPlan
    from ...plan.problem import next_power_of_two

    if isinstance(plan, InvariantPlan):
        return {"PACK": plan.pack > 1, "ROWS": plan.held, "CHUNK": plan.chunk // plan.block_n}
    rows = next_power_of_two(min(plan.problem.rows, plan.block_m))
    registers = 64 if plan.block_m <= 32 else 24  # of a thread, for parts to be merged; sums of 64 rows leave no more
    once = registers * plan.device.warp_size * plan.num_warps // (rows * plan.problem.block_v)
    return {
        "EVEN": plan.splits == 0,
        "FUSED": plan.merge == "last",
        "BLOCK_B": 1 if batch == 1 else ONE_CHUNK if batch <= ONE_CHUNK else LARGE_CHUNK,
        "ROWS": rows,
        "BLOCK_S": max(1, min(32, next_power_of_two(once + 1) // 2)),
    }


def bind_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sizes: dict[str, int],
    plan: "DecodePlan | InvariantPlan", watched: bool = False,
) -> Decoder:  # fmt: skip
    """Kernel, grid, scalars and constants of a plan; watched: faults are noted, by attention_decode alone."""
    from ...device import mods
    from ...device.cache import E4M3_BITS
    from ...plan import DecodePlan

    n, p, cache, scales = sizes, plan.problem, cache_of(call), call.scales
    shares = plan if isinstance(plan, DecodePlan) else None
    out_shape, lse_shape = cached_shapes(sizes, cache)
    window = window_of(call.window, call.causal)
    if n["seq_q"] == 1 and window[1] >= 0:  # the only query is the last: it has every key before it
        window = (window[0], -1)
    rows = [sequence_strides(t, call.layout) for t in (q, k, v)]
    wide = n["seq_q"] * rows[0][1] + n["heads"] * rows[0][2] >= 1 << 31
    wide |= max(p.page_size, plan.block_n) * max(rows[1][1], rows[2][1]) >= 1 << 31
    pairs = _lies_in_pairs(v, plan.problem)
    if pairs:
        rows[2] = tuple(stride // 2 for stride in rows[2])
    band = "" if shares else band_of(call, window)
    constants = _constants(plan, q, call, sizes, wide, pairs, kind_of(window, band))
    scale = scale_of(call, n["dim_qk"])
    partial = 0 if plan.splits == 1 else plan.slots * (plan.block_m if isinstance(plan, DecodePlan) else plan.held)
    values = {
        **shared_values(
            n, scale, q, k, v, out_shape if call.layout == "bshd" else _heads_first(out_shape), call.layout
        ),
        **option_values(call, window, mods, float(call.softcap), q.dtype, band),
        **cache_values(cache),
        **_stored(constants["QUANT"] == E4M3_BITS.value, pairs),
        "KScale": attribute("call", "scales.k", scales.k),
        "VScale": attribute("call", "scales.v", scales.v),
        **(WATCHED if watched else UNWATCHED),
        "blocks": plan.blocks,
        "splits": max(1, plan.splits),
        "least": shares.least if shares else 1,
        "programs": plan.grid,
        "chunks": 1 if shares else plan.chunks,  # type: ignore[union-attr]
        **strides_named("l", (0 if cache.cu_q is not None else n["heads"] * n["seq_q"], lse_shape[-1]), "bh"),
        **strides_named("ks", scale_strides(scales.k), "ph"),
        **strides_named("vs", scale_strides(scales.v), "ph"),
        **strides_named("v", rows[2], "bnh"),
    }
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages, "maxnreg": shares and shares.maxnreg}
    kernel, combine = _kernels(shares is not None)
    launch = Bound.of(kernel, plan.grid, GIVEN, values, constants, q.device, **options)
    merge, last = None, shares is not None and shares.merge == "last"
    if partial and not last:
        merge = _merge(combine, plan, constants, n, values, q.device)
    limit = n["pages"] if cache.block_table is not None else n.get("caches", 0)
    counted = shares.items if shares and partial and last else 0
    return Decoder(plan, launch, merge, (partial * n["dim_v"], 2 * partial), counted, limit)


def _kernels(shares: bool) -> tuple[Any, Any]:
    """What folds the keys and what merges, of a `DecodePlan` or of an `InvariantPlan`."""
    if shares:
        from ...kernels.cache.attention_decode import attention_decode
        from ...kernels.cache.decode_combine import decode_combine

        return attention_decode, decode_combine
    from ...kernels.cache.attention_invariant import attention_invariant, merge_chunks

    return attention_invariant, merge_chunks


@functools.cache
def _stored(as_bytes: bool, pairs: bool) -> dict[str, Slot]:
    """K and V as the kernel takes them: e4m3 as bytes, two elements of V as one of 16 bits."""

    def bytes_of(t: torch.Tensor) -> torch.Tensor:
        return t.view(torch.uint8)

    def pairs_of(t: torch.Tensor) -> torch.Tensor:
        return t.view(torch.int16)

    k = bytes_of if as_bytes else None
    return {"K": Slot("k", k), "V": Slot("v", pairs_of if pairs else k)}


def _heads_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[batch, heads, seq, dim] of [batch, seq, heads, dim]."""
    return shape[0], shape[2], shape[1], shape[3]


def _lies_in_pairs(v: torch.Tensor, problem: "DecodeProblem") -> bool:
    """Two bytes of V can be taken for one element of 16 bits."""
    if problem.storage == "plain" or problem.shared or v.shape[-1] % 2 or v.shape[-1] < 32:
        return False
    return all(stride % 2 == 0 for stride in v.stride()[:-1]) and v.storage_offset() % 2 == 0 and v.data_ptr() % 2 == 0


def _merge(
    kernel: Any, plan: Any, constants: dict[str, Any], sizes: dict[str, int], values: dict[str, Any], device: torch.device
) -> Bound:  # fmt: skip
    """The launch that merges what the main kernel left in parts."""

    kept = {name: value for name, value in constants.items() if name in kernel.arg_names}
    if "BLOCK_S" in kept:
        kept["BLOCK_S"] = min(32, max(1, 4096 // constants["BLOCK_V"]))
    heads = plan.items // sizes["batch"]
    if max(heads, sizes["batch"]) > 65535:
        raise Unsupported(
            f"merging by a kernel takes at most 65535 sequences, and KV heads times row blocks, got {sizes['batch']} and {heads}"
        )
    grid = (min(plan.block_m, plan.rows), heads, sizes["batch"])
    return Bound.of(kernel, grid, GIVEN, values, kept, device)


# ---------------------------------------------------------------- without a GPU


def example_launch(
    dtype: str, dim: int, page: int, seq_q: int = 1, group: int = 4, storage: str = "plain", dim_v: int = 0, causal: bool = True,
    per_page: bool = False, device: str = "h200", merge: bool = False, batch: int = 64, splits: int = 0, watched: bool = False,
    fixed: bool = False, score_mods: tuple[str, ...] = (), **changes: Any,
) -> Example:  # fmt: skip
    """(kernel, args, kwargs) of a call on tensors without memory: to compile ahead of time.  dim_v: V is so much of K.  fixed:
    with numerics="invariant"."""
    from ...plan import plan_decode, plan_invariant
    from ...plan.device import device_named
    from .cached_call import cached_sizes

    dt = getattr(torch, dtype)
    stored = dt if storage == "plain" else getattr(torch, storage)
    q = meta(batch, seq_q, 2 * group, dim, dtype=dt)
    k = meta(64, page, 2, dim, dtype=stored) if page else meta(batch, 4096, 2, dim, dtype=stored)
    v = k[..., :dim_v] if dim_v else k
    scale = None if storage == "plain" else meta(64, 2) if per_page else meta(2)
    cache = Cache(meta(batch, dtype=torch.int32), block_table=meta(batch, 32, dtype=torch.int32) if page else None)
    slopes, cap = meta(2 * group), 30.0 * ("softcap" in score_mods)
    call = Call(causal=causal, softcap=cap, alibi_slopes=slopes if "alibi" in score_mods else None, source=cache,
                scales=Scales(k=scale, v=scale))  # fmt: skip
    sizes = cached_sizes(q, k, v, call, quantised=True, shared=bool(dim_v))
    record = device_named(device)
    plan: Any = (plan_invariant if fixed else plan_decode)(
        problem_of_decode(q, k, v, call, sizes, bool(dim_v)), record, splits
    )
    changes |= {} if fixed else {"merge": "kernel" if merge else "last"}
    made = bind_decode(q, k, v, call, sizes, replace(plan, **changes), watched)
    out_shape, lse_shape = cached_shapes(sizes, cache)
    out, lse, floats = meta(*out_shape, dtype=dt), meta(*lse_shape), meta(64)
    noted = (meta(WORDS, dtype=torch.int64), 1, made.limit, 0, 0, 32)
    alone = splits == 1 or (fixed and made.plan.splits == 1)
    parts = (None, None, None) if alone else (floats, floats, meta(64, dtype=torch.int32))
    bound = made.merge if merge else made.launch
    assert bound is not None
    return bound.example((q, k, v, out, lse, call, *parts, noted))
