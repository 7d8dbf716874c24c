"""Attention with q, k and v in e4m3, forward only: check, plan, then the kernel for sm_90, or bf16 attention."""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...check import TensorSpec, bind
from ...errors import DtypeError, ShapeError, Unsupported
from ...types import Layout
from ..bound import Bound, Box, Example, Prepared, Slot, attribute, strides_named
from ..call import NARROW_HEAD_DIM, Call, check_heads, check_options, layout_hint, result_shapes, scale_of, window_of
from ..device import device_of
from ..flat import value_of
from ..hopper import shared_layout
from ..numerics import refuse_invariant
from ..operator import Operation
from ..records import recorded
from ..source import UNSCALED, Scales, key_of
from ..watch import is_transformed, refuse_at_once
from .attention_parts import (
    describe_box,
    head_strides,
    hooks_of,
    kind_of,
    lengths_of,
    problem_of,
    shared_values,
    sides_named,
)
from .fp8 import DESCALES, E4M3, refuse_packed

if TYPE_CHECKING:
    from ...plan import AttentionFp8Plan, AttentionProblem, Device

GIVEN = ("q", "k", "v", "out", "lse", "call", "made")
"""What a call gives to the launches; made: V transposed."""
TRANSPOSED_AT_ONCE = 128  # keys
Pair = tuple[torch.Tensor, torch.Tensor]


class Transposing(NamedTuple):
    """The launch that transposes V, and the one that attends; called as a `Bound` of attention is."""

    transpose: Bound
    launch: Bound
    shape: tuple[int, ...]  # of V transposed

    def __call__(self, given: tuple[Any, ...]) -> None:
        made = torch.empty(self.shape, dtype=torch.uint8, device=given[0].device)
        self.transpose(given := (*given, made))
        self.launch(given)


def _specs(q: str, k: str, v: str) -> tuple[TensorSpec, ...]:
    tensors = (TensorSpec(n, d, (E4M3,), contiguous_last=True) for n, d in (("q", q), ("k", k), ("v", v)))
    heads = (("q_descale", "batch q_descales"), ("k_descale", "batch kv_heads"), ("v_descale", "batch kv_heads"))
    return (*tensors, *(TensorSpec(n, d, (torch.float32,), optional=True) for n, d in heads))


SPECS = {
    "bshd": _specs("batch seq_q heads dim_qk", "batch seq_k kv_heads dim_qk", "batch seq_k kv_heads dim_v"),
    "bhsd": _specs("batch heads seq_q dim_qk", "batch kv_heads seq_k dim_qk", "batch kv_heads seq_k dim_v"),
}


def _run(p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Pair:
    """(out, lse) by the kernel for e4m3 tensors."""
    out = torch.empty(p.out_shape, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device=q.device)
    if p.bound is not None:
        p.bound((q, k, v, out, lse, call))
    return out, lse


# ---------------------------------------------------------------- the first time


def sizes_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> dict[str, int]:
    """Check every tensor; the sizes of all named dimensions."""
    try:
        return _sizes_of(q, k, v, call)
    except ShapeError as error:
        hint = layout_hint(call.layout, lambda other: _sizes_of(q, k, v, call._replace(layout=other)))
        raise ShapeError(f"{error}{hint}") from None


def _sizes_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> dict[str, int]:
    descales = {f"{name}_descale": t for name, t in call.scales._asdict().items()}
    sizes = bind(SPECS[call.layout], {"q": q, "k": k, "v": v, **descales})
    check_heads(sizes, most=NARROW_HEAD_DIM)
    given = sizes.get("q_descales", sizes["heads"])
    if given not in (sizes["heads"], sizes["kv_heads"]):
        raise ShapeError(
            f"q_descale has shape {tuple(call.scales.q.shape)}, expected [batch, heads] or [batch, kv_heads], "  # type: ignore[union-attr]
            f"{sizes['heads']} or {sizes['kv_heads']} numbers for each of {sizes['batch']}"
        )
    return sizes


def result_shapes_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out and lse, after the checks that need no device."""
    check_options(call)
    return result_shapes(call, sizes_of(q, k, v, call))


@recorded("attention of e4m3", key_of)
def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Prepared:
    """The record of this call's shapes and options, which checks everything."""
    return _prepare(q, k, v, call)


def _prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, on: "Device | None" = None) -> Prepared:
    """`prepare` of a call that is like none before.  on: its plan alone, as on that device."""
    from ...plan import AttentionFp8Plan, plan_attention_fp8
    from ..hopper import bound_or_none, disabled

    refuse_invariant("attention of e4m3 tensors", "its tiles follow lengths", call.numerics)
    shapes = result_shapes_of(q, k, v, call)
    sizes = sizes_of(q, k, v, call)
    if call.plan is not None and not isinstance(call.plan, AttentionFp8Plan):
        raise DtypeError(f"plan must be an AttentionFp8Plan or None for e4m3 inputs, got {type(call.plan).__name__}")
    device = on or device_of(q.device)
    if 0 in (*shapes[1], sizes["batch"], sizes["seq_q"]):
        return Prepared(None, *shapes, keep=hooks_of(call), run=_run)
    window = window_of(call.window, call.causal)
    problem = problem_of(q, k, k, call, sizes, window, dtype="bfloat16")  # V's boxes are those of its transposed copy
    plan = call.plan or plan_attention_fp8(problem, device, portable=disabled())
    if call.plan is not None:
        plan.check(problem, device)
    if on is not None:
        return Prepared(plan, *shapes)
    if call.plan is None and plan.kernel == "attention_forward_fp8":
        made = functools.partial(_bind, q, k, v, call, plan, shapes)
        found = bound_or_none("FP8", made, lambda p: _compile(p, q, k, v, call))
        if found is not None:
            return found
        plan = plan_attention_fp8(problem, device, portable=True)
    return _bind(q, k, v, call, plan, shapes)


def _bind(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, plan: "AttentionFp8Plan",
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> Prepared:  # fmt: skip
    """Kernels, descriptors, run-time scalars and compile-time constants of this call under this plan."""
    from ...plan.dense import fp8_hopper as rules
    from ...plan.problem import padded_head_dim

    n = plan.problem
    scale = scale_of(call, n.dim_qk)
    if plan.kernel != rules.KERNEL:
        return Prepared(plan, *shapes, None, scale, hooks_of(call), run=_dequantised)
    from ..hopper import WORK_COUNTER, require

    require("plan.kernel", plan.kernel)
    from ...kernels.dense.transpose_values import transpose_values
    from ...kernels.hopper.attention_fp8 import attention_forward_fp8

    window = window_of(call.window, call.causal)
    blocks, items = -(-n.seq_q // plan.block_m), plan.grid[0]
    places = rules.places_of(n.seq_k)
    turned = n.batch, n.kv_heads, n.dim_v, places
    parts = -(-places // TRANSPOSED_AT_ONCE)
    constants, options = _constants(plan, kind_of(window))
    values = {
        **shared_values(lengths_of(n), scale, q, k, v, shapes[0], call.layout),
        **_boxes(q, k, torch.empty(turned, dtype=E4M3, device="meta"), call.layout, plan),
        "Counter": WORK_COUNTER,
        "q_blocks": blocks,
        "items": items,
        **sides_named(window),
        "q_group": 1 if call.scales.q is None else n.heads // call.scales.q.shape[1],
    }
    for name, factor in call.scales._asdict().items():
        values[f"{name.upper()}Scale"] = attribute("call", f"scales.{name}", factor)
        values |= strides_named(name, (0, 0) if factor is None else factor.stride(), "bh")
    transposition = {
        "V": Slot("v", lambda t: t.view(torch.uint8)),  # bytes to bytes
        "Out": Slot("made"),
        "seq_k": n.seq_k,
        "heads": n.kv_heads,
        "blocks": parts,
        "places": places,
        **strides_named("", head_strides(v, call.layout), "bnh"),
    }
    turning = {"DIM": n.dim_v, "BLOCK_D": padded_head_dim(n.dim_v), "BLOCK_N": TRANSPOSED_AT_ONCE}
    turn = Bound.of(transpose_values, n.batch * n.kv_heads * parts, GIVEN, transposition, turning, q.device)
    programs = min(plan.device.sms, items)
    main = Bound.of(attention_forward_fp8, programs, GIVEN, values, constants, q.device, **options)
    bound = Transposing(turn, main, turned)
    return Prepared(plan, *shapes, bound, scale, hooks_of(call), run=_run)


def _constants(plan: "AttentionFp8Plan", kind: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile-time constants and launch options: what the plan's tile and versions make of the kernel."""
    from ...plan.dense import fp8_hopper as rules
    from ...plan.dense.attention_hopper import consumers_of, polynomial_of
    from ...plan.hopper import PRODUCER_REGISTERS, REGISTERS

    n, consumers = plan.problem, consumers_of(plan.tile)
    at_launch, folding = REGISTERS[consumers]
    constants = {
        "KIND": kind,
        "DIM_QK": rules.fp8_width(n.dim_qk),
        "DIM_V": rules.fp8_width(n.dim_v),
        "COLUMNS": n.dim_v,
        "KEYS": plan.block_n,
        "SLOTS": plan.num_stages,
        "CONSUMERS": consumers,
        "DIRECT": "direct" in plan.options,
        "FENCE": "fence" in plan.options,
        "PING_PONG": "turns" in plan.options,
        "POLYNOMIAL": polynomial_of(plan.options),
        "CONSUMER_REGISTERS": folding,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    return constants, {"num_warps": plan.num_warps, "maxnreg": at_launch}


def _boxes(
    q: torch.Tensor, k: torch.Tensor, turned: torch.Tensor, layout: Layout, plan: "AttentionFp8Plan"
) -> dict[str, Slot]:
    """The descriptors of Q, K and V^T [B, H, D, places]: rows of 128 bytes at most lie together."""
    from ...kernels.hopper.gluon import TensorDescriptor
    from ...plan.dense.fp8_hopper import fp8_width

    panel = min(128, fp8_width(plan.problem.dim_qk))

    def box(t: torch.Tensor, order: Layout, rows: int, columns: int) -> Box:
        return describe_box(t, order, rows, columns, TensorDescriptor, shared_layout((1, 1, rows, columns), E4M3))

    rows = fp8_width(plan.problem.dim_v)
    values = box(turned, "bhsd", rows, plan.block_n)
    return {
        "q_desc": Slot("q", box(q, layout, 64, panel).over),
        "k_desc": Slot("k", box(k, layout, plan.block_n, panel).over),
        "v_desc": Slot("made", lambda made: values.over(made.view(E4M3))),
    }


def _compile(p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
    """Compile both kernels for this call, without a result; what the compiler raises passes through."""
    out = torch.empty(p.out_shape, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device="meta")
    given = q, k, v, out, lse, call, torch.empty(p.bound.shape, dtype=torch.uint8, device="meta")
    p.bound.transpose.compile(given)
    p.bound.launch.compile(given)


def _dequantised(p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Pair:
    """bf16 attention, which holds every e4m3 number exactly; q takes the factors of the scores, out that of the values."""
    from .attention import forward as attend

    heads = p.plan.problem.heads

    def spread(t: torch.Tensor) -> torch.Tensor:
        """A factor for each query head, as q and out have theirs."""
        t = t.repeat_interleave(heads // t.shape[1], 1)
        return t[:, None, :, None] if call.layout == "bshd" else t[:, :, None, None]

    wide = q.to(torch.bfloat16)
    for t in call.scales[:2]:
        if t is not None:
            wide = wide * spread(t)  # fp32, rounded once below
    out, lse = attend(
        wide.to(torch.bfloat16),
        k.to(torch.bfloat16),
        v.to(torch.bfloat16),
        call._replace(scale=p.scale, scales=UNSCALED, plan=None),
    )
    factor = call.scales.v
    return (out if factor is None else (out * spread(factor)).to(torch.bfloat16)), lse


# ---------------------------------------------------------------- the operation


def refuse_others(q: torch.Tensor, **options: Any) -> None:
    """Unsupported, naming it, for an option that e4m3 attention does not have."""
    for name, value in options.items():
        numbers = {"softcap": 0.0, "dropout_p": 0.0}  # what is no number is given, too
        if value is not None and value != () and not (isinstance(value, int | float) and value == numbers.get(name)):
            raise Unsupported(
                f"{name} was given with q of dtype float8_e4m3fn, which has causal, window, scale, layout, descales and plan: "
                "dequantise q, k and v to bfloat16 for the rest"
            )


def plan_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any], on: "Device | None" = None
) -> "AttentionFp8Plan":
    """The plan of a call given by keywords.  on: as on that device."""
    options.pop("return_lse", None)
    if any(
        options.pop(name, None) is not None for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    ):
        refuse_packed(q)
    mine = {name: options.pop(name) for name in ("causal", "window", "scale", "layout") if name in options}
    scales, given = Scales(*(options.pop(name, None) for name in DESCALES)), value_of(options.pop("plan", None))
    refuse_others(q, **options)
    call = _tidy(Call(**mine, scales=scales, plan=given))
    plan: AttentionFp8Plan | None = (_prepare(q, k, v, call, on) if on else prepare(q, k, v, call)).plan
    if plan is None:
        raise Unsupported(
            f"q has shape {tuple(q.shape)}: there is no query, so nothing is launched and there is no plan"
        )
    return plan


def _tidy(call: Call) -> Call:
    """A window given as a list is a pair too."""
    window = tuple(call.window) if isinstance(call.window, list) else call.window
    return call._replace(window=window)


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    out_shape, lse_shape = result_shapes_of(q, k, v, call)
    return q.new_empty(out_shape, dtype=torch.bfloat16), q.new_empty(lse_shape, dtype=torch.float32)


ATTENTION_FP8 = Operation(
    "attention_fp8",
    prepare,
    _fake,
    "attention of float8_e4m3fn tensors has no gradients: differentiate bfloat16 attention instead",
    lambda q, k, v, call: check_options(call),
    (Scales,),
)


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse); Unsupported if a gradient is asked for."""
    tensors = {"q": q, "k": k, "v": v, **dict(zip(DESCALES, call.scales, strict=True))}
    refuse_at_once(tensors, "attention of float8_e4m3fn tensors has none: detach() it, or use bfloat16")
    if not torch.compiler.is_compiling() and is_transformed():
        raise Unsupported("attention of float8_e4m3fn tensors has no transforms of torch.func")
    return ATTENTION_FP8(q, k, v, _tidy(call))  # type: ignore[no-any-return]


# ---------------------------------------------------------------- without a GPU


def example_launch(problem: "AttentionProblem", plan: "AttentionFp8Plan") -> Example:
    """(kernel, args, kwargs) of a call that has this problem and plan, on tensors without memory: to compile ahead of time."""
    p, given = _example(problem, plan)
    bound: Bound = p.bound.launch
    return bound.example(given)


def example_transposition(problem: "AttentionProblem", plan: "AttentionFp8Plan") -> Example:
    """The same of transpose_values."""
    p, given = _example(problem, plan)
    bound: Bound = p.bound.transpose
    return bound.example(given)


def _example(n: "AttentionProblem", plan: "AttentionFp8Plan") -> tuple[Prepared, tuple[Any, ...]]:
    shapes = (
        (n.batch, n.seq_q, n.heads, n.dim_qk),
        (n.batch, n.seq_k, n.kv_heads, n.dim_qk),
        (n.batch, n.seq_k, n.kv_heads, n.dim_v),
    )
    q, k, v = (torch.empty(shape, dtype=E4M3, device="meta") for shape in shapes)
    factor = torch.empty(n.batch, n.kv_heads, device="meta")
    call = Call(n.causal, n.window, scales=Scales(factor, factor, factor), plan=plan)
    p = _bind(q, k, v, call, plan, result_shapes_of(q, k, v, call))
    made = torch.empty(p.bound.shape, dtype=torch.uint8, device="meta")
    out, lse = torch.empty(p.out_shape, dtype=torch.bfloat16, device="meta"), torch.empty(p.lse_shape, device="meta")
    return p, (q, k, v, out, lse, call, made)
