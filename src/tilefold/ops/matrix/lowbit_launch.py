"""The launches behind `lowbit_matmul`: each bound once for a weight and a kind of activations."""

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ...check import FLOATS, TensorSpec, bind
from ...errors import DtypeError, PlanError, ShapeError
from ...quant import QuantizedTensor
from ..bound import Bound, Box, Example, Slot, meta, strides_named
from ..cache.decode_counters import counters
from ..device import device_of, interpreting
from ..numerics import is_invariant
from ..records import recorded, remember
from ..serve import function_at
from ..source import facts_of
from .product import Epilogue, product

if TYPE_CHECKING:
    from ...plan.device import Device
    from ...plan.matrix.lowbit import LowbitPlan, LowbitProblem

PARTS = ("Packed", "High", "Scales", "Zeros", "Table")
GIVEN = ("X", *PARTS, "Bias", "Out", "Part", "Arrived")
"""What a call gives to the kernels of products; Part, Arrived: of splits."""


def check(x: Any, weight: QuantizedTensor, bias: Any) -> None:
    """Raise unless x and bias fit the weight."""
    n, k = weight.shape
    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() < 1 or x.shape[-1] != k:
        raise ShapeError(f"x must be [..., K] with K = {k} like weight, got {list(x.shape)}")
    names = " ".join([*(f"d{i}" for i in range(x.dim() - 1)), "K"])
    bind((TensorSpec("x", names, FLOATS, contiguous_last=True),), {"x": x})
    spec = TensorSpec("bias", "N", FLOATS, optional=True, same_dtype_as="x", contiguous_last=True)
    bind((spec,), {"x": x, "bias": bias}, known={"N": n}, beside=("x", x))
    if weight.device != x.device:
        bind((TensorSpec("weight", "a b c", (torch.int32,)),), {"weight": weight.packed}, beside=("x", x))


def dequantise(weight: QuantizedTensor, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """The weight [N, K] in `dtype`, columns as stored: the bits of `weight.dequantize(dtype)` but for the order."""
    n, k = weight.shape
    if out is None:
        out = torch.empty(n, k, dtype=dtype, device=weight.device)
    if (own := function_at("lowbit_matmul", weight.device)) is not None:
        own((weight, out))
    else:
        _bind_dequantise(weight, out)((*_parts(weight), out))
    return out


def _parts(weight: QuantizedTensor) -> tuple[torch.Tensor | None, ...]:
    """What every kernel reads of a weight, as PARTS names it."""
    return weight.packed, weight.packed_high, weight.scales, weight.zeros, weight.table


def _facts(weight: QuantizedTensor) -> Any:
    """What of a weight decides launches and compilations."""
    zeros = None if weight.zeros is None else weight.zeros.dtype
    table, perm, one = weight.table is not None, weight.perm is not None, weight.scales.numel() == 1
    return weight.shape, weight.bits, weight.group, weight.scales.dtype, one, zeros, table, perm, weight.device


def _shared_values(weight: QuantizedTensor) -> dict[str, int]:
    """What all kernels take of a weight by the same names."""
    n, k = weight.shape
    blocks, rows = weight.packed.shape[:2]
    steps = (
        (0, 0) if weight.scales.numel() == 1 else (n, 1)
    )  # of scales and zeros, group and row; 0 where one holds for all
    sizes = {"N": n, "K": k, "rows": rows, "group": weight.group, "groups": weight.groups, "blocks": blocks}
    return {**sizes, **strides_named("s", steps, "gn")}


@recorded("dequantise", lambda weight, out: (_facts(weight), out.dtype, out.stride(0)))
def _bind_dequantise(weight: QuantizedTensor, out: torch.Tensor) -> Bound:
    from ...kernels.matrix.lowbit_dequantise import lowbit_dequantise

    if weight.device.type != "meta":
        device_of(weight.device)
    n, k = weight.shape
    blocks = weight.packed.shape[0]
    slabs = {8: 2, 4: 4, 3: 8, 2: 8}[weight.bits]
    block_n = 64
    constants = {
        "BITS": weight.bits,
        "EMULATE": interpreting(),
        "EVEN": k % (32 * slabs) == 0,
        "SLABS": slabs,
        "WHOLE": weight.group % 32 == 0 or weight.groups == 1,
        "BLOCK_N": block_n,
    }
    programs, values = blocks * -(-n // block_n), {**_shared_values(weight), "stride_on": out.stride(0)}
    return Bound.of(lowbit_dequantise, programs, (*PARTS, "Out"), values, constants, weight.device)


# ---------------------------------------------------------------- products

_BOUND: dict[int, tuple[Any, dict[Any, Any]]] = {}  # by id of a weight: a weak reference to it, and its calls


def call(
    x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None, deterministic: bool, plan: "LowbitPlan | None",
    numerics: str = "",
) -> torch.Tensor:  # fmt: skip
    """x [..., K] times the weight's transpose, plus bias, by a plan or the planner's own."""
    fixed = is_invariant(numerics)
    found = _BOUND.get(id(weight))
    if found is None or found[0]() is not weight:
        number = id(weight)
        found = _BOUND[number] = (weakref.ref(weight, lambda _: _BOUND.pop(number, None)), {})
    key = None
    if isinstance(x, torch.Tensor):
        given = None if bias is None else facts_of(bias) if isinstance(bias, torch.Tensor) else type(bias)
        key = facts_of(x), given, deterministic, plan, fixed
    run = found[1].get(key) or remember(found[1], key, _prepare(x, weight, bias, deterministic, plan, fixed))
    made: torch.Tensor = run(x, weight, bias)
    return made


def plan_of(
    x: torch.Tensor, weight: QuantizedTensor, deterministic: bool, fixed: bool = False, on: "Device | None" = None
) -> "LowbitPlan":
    """The planner's plan for a call; fixed: with numerics="invariant"; on: as on that device."""
    from ...plan.matrix.lowbit import invariant_lowbit, plan_lowbit
    from ..hopper import disabled

    problem, device = problem_of(x, weight, deterministic), on or device_of(x.device)
    return (invariant_lowbit if fixed else plan_lowbit)(problem, device, disabled())


def problem_of(x: torch.Tensor, weight: QuantizedTensor, deterministic: bool) -> "LowbitProblem":
    """What the planner is told of a call."""
    from ...plan.matrix.lowbit import LowbitProblem

    n, k = weight.shape
    zeros = "none"
    if weight.table is not None:
        zeros = "table"
    elif weight.zeros is not None:
        zeros = "integer" if weight.zeros.dtype == torch.uint8 else "float"
    rows = x.numel() // k
    aligned = x.data_ptr() % 16 == 0 and _flat(x).stride(0) * x.element_size() % 16 == 0
    dtype, scales = (str(t.dtype).removeprefix("torch.") for t in (x, weight.scales))
    return LowbitProblem(rows, n, k, weight.bits, weight.group, zeros, dtype, scales, aligned, deterministic)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """x as [M, K]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _prepare(x: Any, weight: QuantizedTensor, bias: Any, deterministic: bool, plan: "LowbitPlan | None",
             fixed: bool) -> Any:  # fmt: skip
    """The function that makes calls like this one, after all checks."""
    check(x, weight, bias)
    by_float = _in_order if fixed else _dequantised
    if function_at("lowbit_matmul", x.device) is not None:  # which makes the weight
        if plan is not None:
            title = device_of(x.device, "lowbit_matmul").title
            raise PlanError(f"plan is for {plan.device.name}, the call is on {title}")
        return by_float if weight.perm is None else functools.partial(_permuted, by_float)
    example = x if weight.perm is None else x.index_select(x.dim() - 1, weight.perm)
    chosen = plan is not None
    if plan is None:
        plan = plan_of(example, weight, deterministic, fixed)
    elif plan.problem != problem_of(example, weight, deterministic):
        raise PlanError(f"plan is for {plan.problem}, the call is {problem_of(example, weight, deterministic)}")
    elif plan.device != device_of(x.device):
        raise PlanError(f"plan is for {plan.device.name}, the call is on {device_of(x.device).name}")
    if fixed:
        plan.require_invariant()
    if plan.problem.m == 0:
        made = by_float
    else:
        bound, plan = bound_of(example, weight, bias, plan, chosen, fixed)
        made = by_float if bound is None else functools.partial(_multiplied, bound, plan)
    return made if weight.perm is None else functools.partial(_permuted, made)


def bound_of(
    x: torch.Tensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None,
    plan: "LowbitPlan",
    chosen: bool,
    fixed: bool = False,
) -> tuple[Bound | None, "LowbitPlan"]:
    """The launch of a plan, None for "dequantise", and the plan that is followed.

    Where this Triton does not compile a kernel for sm_90 that the caller has not chosen, a portable one, after a warning; fixed:
    with numerics="invariant"."""
    from ...plan.matrix.lowbit import OF_SM_90, invariant_lowbit, plan_lowbit
    from ..hopper import bound_or_none

    if plan.path in OF_SM_90 and not chosen:

        def compile(bound: Bound) -> None:
            row = meta(plan.problem.m, plan.problem.k, dtype=x.dtype)
            out = meta(plan.problem.m, plan.problem.n, dtype=x.dtype)
            bound.compile((_flat(x), *_parts(weight), bias, out, *_room(plan, row)))

        bound = bound_or_none("low-bit matrix product", lambda: _BINDERS[plan.path](x, weight, plan), compile)
        if bound is not None:
            return bound, plan
        plan = (invariant_lowbit if fixed else plan_lowbit)(plan.problem, plan.device, portable=True)
    return None if plan.path == "dequantise" else _BINDERS[plan.path](x, weight, plan), plan


def _dequantised(x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    return plain_product(x, dequantise(weight, x.dtype), bias)


def _in_order(x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`_dequantised` by our own product, whose bits do not depend on other rows."""
    after = Epilogue(out_dtype=x.dtype, numerics="invariant")
    made = product(_flat(x), dequantise(weight, x.dtype).t(), bias, None, None, after)[0]
    return made.view(*x.shape[:-1], made.shape[-1])


def plain_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x weight^T + bias by torch, in x's dtype inside torch.autocast, too."""
    if not torch.is_autocast_enabled(x.device.type):
        return torch.nn.functional.linear(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        return torch.nn.functional.linear(x, weight, bias)


def _permuted(run: Any, x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    assert weight.perm is not None
    made: torch.Tensor = run(x.index_select(x.dim() - 1, weight.perm), weight, bias)
    return made


def _multiplied(
    bound: Bound, plan: "LowbitPlan", x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [..., K] -> [..., n], by one launch."""
    out = x.new_empty((*x.shape[:-1], plan.problem.n))
    bound((_flat(x), *_parts(weight), bias, out, *_room(plan, x)))
    return out


def _room(plan: "LowbitPlan", x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where the splits of K leave their sums, and the counters of who has arrived."""
    if plan.parts == 1:
        return None, None
    n, m = plan.problem.n, plan.problem.m
    counted = plan.items * (plan.block_n // 64 if plan.path == "hopper" else 1)
    make = torch.zeros if plan.atomic else torch.empty
    part = make((1 if plan.atomic else plan.parts) * m * n, dtype=torch.float32, device=x.device)
    return part, torch.empty(counted, dtype=torch.int32, device="meta") if x.is_meta else counters(counted, x.device)


def _bound(kernel: Any, plan: "LowbitPlan", values: dict[str, Any], constants: dict[str, Any], device: torch.device,
           **options: int) -> Bound:  # fmt: skip
    """The launch of a product; what every kernel has of a plan is among its constants."""
    p, early = plan.problem, plan.early and plan.device.dependent_launches
    shared = {"BITS": p.bits, "CHUNK": p.chunk, "SPLITS": plan.parts, "EARLY": early, "BLOCK_M": plan.block_m}
    registers = plan.registers if plan.registers and plan.device.has("ptx") else None  # of a thread
    grid = plan.items, plan.parts, 1
    return Bound.of(kernel, grid, GIVEN, values, {**constants, **shared}, device, maxnreg=registers, **options)


def _bind_tile(x: torch.Tensor, weight: QuantizedTensor, plan: "LowbitPlan") -> Bound:
    """The launch of the portable kernel."""
    from ...kernels.matrix.lowbit_matmul import lowbit_matmul

    p = plan.problem
    exact = 2 if not p.exact else 1 if plan.scaled == "before" else 0
    words = p.n % 4 == 0 and p.exact and weight.scales.numel() > 1
    constants = {
        "HOW": exact if exact != 1 or p.scales == p.dtype else 2,
        "GROUP": 0 if p.group >= p.k else p.group,
        "ATOMIC": plan.atomic,
        "ASM": plan.device.has("ptx"),
        "EMULATE": interpreting(),
        "EVEN": p.k % (p.slabs * 32) == 0,
        "WORDS": words,
        "JOIN": plan.join,
        "BLOCK_N": plan.block_n,
        "STAGES": plan.stages,
    }
    values = {**_values(x, weight, plan), "Lanes": _lanes(x.device) if words else None}
    options = {"num_warps": plan.num_warps, "num_stages": plan.stages}
    return _bound(lowbit_matmul, plan, values, constants, x.device, **options)


def _values(x: torch.Tensor, weight: QuantizedTensor, plan: "LowbitPlan") -> dict[str, Any]:
    p = plan.problem
    more = {"M": p.m, "each": plan.each, "stride_xm": _flat(x).stride(0), "stride_om": p.n}
    return {**_shared_values(weight), **more}


def _lanes(device: torch.device) -> torch.Tensor:
    """0, 1, 2, 3 on a device."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # written by replays alone: this call's own
        return torch.arange(4, dtype=torch.int32, device=device)
    return _kept_lanes(device)


@functools.cache
def _kept_lanes(device: torch.device) -> torch.Tensor:
    return torch.arange(4, dtype=torch.int32, device=device)


def _bind_rows(x: torch.Tensor, weight: QuantizedTensor, plan: "LowbitPlan") -> Bound:
    """The launch of the kernel for few rows of x."""
    from ...kernels.hopper.lowbit_rows import lowbit_rows as kernel

    p = plan.problem
    constants = {
        "GROUP": min(p.group, p.blocks * p.slabs * 32),
        "EVEN": p.k % (p.slabs * 32) == 0,
        "BLOCK_N": plan.block_n,
        "DEPTH": plan.stages,
    }
    return _bound(kernel, plan, _values(x, weight, plan), constants, x.device, num_warps=plan.num_warps)


def _bind_hopper(x: torch.Tensor, weight: QuantizedTensor, plan: "LowbitPlan") -> Bound:
    """The launch of the kernel of sm_90 for many rows of x."""
    from ...kernels.hopper.gluon import TensorDescriptor, gl
    from ...kernels.hopper.lowbit_matmul import lowbit_matmul_hopper as kernel

    def box(t: torch.Tensor, block: list[int], swizzle: int) -> Box:
        shared = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=2)
        return Box(t, list(t.shape), [max(t.stride(0), t.shape[1]), 1], block, TensorDescriptor, shared)

    def plane(t: torch.Tensor) -> torch.Tensor:
        return t.view(torch.int16).view(-1, 32)

    def slot(name: str, t: torch.Tensor | None) -> Slot | None:
        if t is None:
            return None
        planes = box(plane(t), [64, 32], 64)
        return Slot(name, lambda given: planes.over(plane(given)))

    boxes = {
        "x_desc": Slot("X", box(_flat(x), [plan.block_m, 64], 128).over),
        "w_desc": slot("Packed", weight.packed),
        "h_desc": slot("High", weight.packed_high),
    }
    constants = {"CONSUMERS": plan.block_n // 64, "SLOTS": plan.stages}
    return _bound(kernel, plan, {**_values(x, weight, plan), **boxes}, constants, x.device)


_BINDERS = {"tile": _bind_tile, "rows": _bind_rows, "hopper": _bind_hopper}


def example_launch(plan: "LowbitPlan") -> Example:
    """(kernel, args, kwargs) of a planned call on tensors without memory: to compile ahead of time."""
    x, weight = example_tensors(plan)
    if plan.path == "dequantise":
        out = meta(*weight.shape, dtype=x.dtype)
        return _bind_dequantise(weight, out).example((*_parts(weight), out))
    bound = _BINDERS[plan.path](x, weight, plan)
    return bound.example((x, *_parts(weight), None, x.new_empty(plan.problem.m, plan.problem.n), *_room(plan, x)))


def example_tensors(plan: "LowbitPlan") -> tuple[torch.Tensor, QuantizedTensor]:
    """x and the weight of such a call, without memory."""
    from ...quant.packing import packed_shapes

    p = plan.problem
    of_scales = getattr(torch, p.scales)
    groups = -(-p.k // p.group)
    planes = [meta(*shape, dtype=torch.int32) for shape in packed_shapes(p.bits, (p.n, p.k))]
    zeros = {"integer": torch.uint8, "float": of_scales}.get(p.zeros)
    weight = QuantizedTensor(
        packed=planes[0],
        packed_high=planes[1] if len(planes) == 2 else None,
        scales=meta(groups, p.n, dtype=of_scales),
        zeros=None if zeros is None else meta(groups, p.n, dtype=zeros),
        table=meta(2**p.bits) if p.zeros == "table" else None,
        bits=p.bits,
        group=p.group,
        shape=(p.n, p.k),
        scheme={"none": "symmetric", "table": "table"}.get(p.zeros, "asymmetric"),
        dtype=of_scales,
    )
    return meta(p.m, p.k, dtype=getattr(torch, p.dtype)), weight
