"""Gradients of the tensors that a score_mod reads (score_args), beside those of its scores.

`ops.loads` derives what each tl.load is worth; the kernel adds that up by the places that were loaded.  A gradient is added up in
memory laid out as the tensor is, so that a mod may compute places by strides of its own.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import Unsupported
from ..bound import Bound, Slot
from ..call import Call
from .backward_parts import tiled

if TYPE_CHECKING:
    from ...plan.backward.attention_backward import AttentionBackwardPlan
    from ..loads import Load

GIVEN = ("Q", "K", "V", "DOut", "Lse2", "Delta", "Sizes", "sites", "call")
"""What a call gives to the kernel."""
EXPONENTS = -100, 126  # of the size of a sum that fp32 has a reciprocal for; a smaller one is as good as the least
UNITS = 58  # log2 of device.loads.UNITS


class LoadsBound(NamedTuple):
    """The launches: what finds the size of the sums, None for sums in fp32, and what adds."""

    loads: "tuple[Load, ...]"
    measure: Bound | None
    add: Bound
    programs: int
    sites: int  # a power of two that holds the loads


def needed(call: Call, wanted: Sequence[bool] | None = None) -> tuple[int, ...]:
    """Which of score_args get a gradient; wanted: of its tensors, in order, None for those that require one."""
    if type(call.score_args) is not tuple or not call.score_args:
        return ()
    tensors = [(i, t) for i, t in enumerate(call.score_args) if isinstance(t, torch.Tensor)]
    if wanted is None:
        return tuple([i for i, t in tensors if t.requires_grad])
    return tuple([i for (i, _), asked in zip(tensors, wanted, strict=False) if asked])


def loads_of_call(call: Call, loads: tuple[int, ...]) -> "tuple[Load, ...]":
    """The loads of the call's score_mod from these of score_args.  Unsupported names one that has no derivative, and a tensor
    whose elements share memory in another way than by broadcasting."""
    from ..loads import loads_of  # here: `import tilefold` stays light

    for i in loads:
        if shares_memory(call.score_args[i]):
            raise Unsupported(
                f"score_args[{i}] requires a gradient, but elements of it share memory (strides "
                f"{call.score_args[i].stride()}): pass a contiguous copy"
            )
    tensors = tuple([i for i, t in enumerate(call.score_args) if isinstance(t, torch.Tensor)])
    return loads_of(call.score_mod, len(call.score_args), tensors, loads)


def shares_memory(t: torch.Tensor) -> bool:
    """Whether two elements may be at one address, but for a stride of 0."""
    reach = 0
    for stride, size in sorted((stride, n) for n, stride in zip(t.shape, t.stride(), strict=True) if stride and n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def extent_of(t: torch.Tensor) -> int:
    """How many elements lie between its first and its last, both included."""
    return 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 1


def elements_of(call: Call, loads: tuple[int, ...]) -> tuple[int, ...]:
    """How many elements each of these of score_args spans."""
    return tuple([extent_of(call.score_args[i]) for i in loads])


def no_gradients(call: Call, wanted: Sequence[bool], zeros: tuple[int, ...] = ()) -> tuple[torch.Tensor | None, ...]:
    """For each tensor of score_args that `wanted` speaks of None, or zeros."""
    tensors = [(i, t) for i, t in enumerate(call.score_args) if isinstance(t, torch.Tensor)][: len(wanted)]
    return tuple([torch.zeros(t.shape, dtype=t.dtype, device=t.device) if i in zeros else None for i, t in tensors])


def bind_loads(
    plan: "AttentionBackwardPlan",
    constants: Mapping[str, Any],
    values: Mapping[str, Any],
    device: torch.device,
    call: Call,
    loads: tuple[int, ...],
) -> LoadsBound | None:
    """The launches for these of score_args; None without any."""
    if not loads:
        return None
    from ...device import loads as passes
    from ...device import mods
    from ...kernels.backward.attention_backward_loads import attention_backward_loads
    from ...plan.problem import next_power_of_two

    found = loads_of_call(call, loads)
    sites = next_power_of_two(len(found))
    once = plan.load_passes == 1
    count = len(values["slopes"])
    units = {**values, "slopes": ((mods.unit_slope, ()),) * count, "sites": Slot("sites")}

    def bound(which: Any) -> Any:
        chosen = {**constants, "PASS": which.value, "SITES": sites}
        return tiled(attention_backward_loads, plan.scores, plan.grids[3], GIVEN, units, chosen, device)

    measure = None if once else bound(passes.MEASURE)
    return LoadsBound(found, measure, bound(passes.ADD_FLOATS if once else passes.ADD), plan.grids[3][0], sites)


def gradients_of_loads(
    bound: LoadsBound, tensors: tuple[torch.Tensor, ...], call: Call, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """As `no_gradients`, for those that are wanted; tensors: q, k, v, dout, lse in base 2 and delta of the backward pass."""
    device, once = tensors[0].device, bound.measure is None
    asked = needed(call, wanted)
    sums, facts = {}, {}
    for i in asked:
        extent = extent_of(call.score_args[i])
        sums[i] = torch.zeros(extent, dtype=torch.float32 if once else torch.int64, device=device)
        facts[i] = torch.full((2,), float(extent), dtype=torch.float64, device=device)
    sites = tuple([(each.function, call.score_args[each.arg], facts[each.arg], sums[each.arg]) for each in bound.loads])
    sizes = torch.zeros((bound.programs, bound.sites), dtype=torch.float32, device=device)
    given = (*tensors, sizes, sites, call)
    unit = torch.ones((), dtype=torch.float64, device=device)
    if bound.measure is not None:
        bound.measure(given)
        of_sites = sizes.sum(0, dtype=torch.float64)
        for i in asked:
            size = sum((of_sites[j] for j, each in enumerate(bound.loads) if each.arg == i), torch.zeros_like(unit))
            exponent = torch.frexp(size).exponent.clamp(*EXPONENTS)
            facts[i][1] = torch.where(size.isfinite(), torch.ldexp(unit, -exponent), size - size)
    bound.add(given)
    made = list(no_gradients(call, wanted))
    places = [i for i, t in enumerate(call.score_args) if isinstance(t, torch.Tensor)]
    for i in asked:
        total = sums[i] if once else sums[i].double() / (facts[i][1] * float(1 << UNITS))
        made[places.index(i)] = laid_out(total, call.score_args[i])
    return tuple(made)


def laid_out(total: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The gradient of t, contiguous, from sums laid out as t is: what is broadcast has it once, and else zeros."""
    own = [min(n, 1) if stride == 0 else n for n, stride in zip(t.shape, t.stride(), strict=True)]
    part = total.as_strided(own, t.stride()).to(t.dtype) if t.numel() else total.new_empty(own, dtype=t.dtype)
    if tuple(own) == tuple(t.shape):
        return part.clone(memory_format=torch.contiguous_format)
    made = torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    made[tuple(slice(0, n) for n in own)] = part
    return made
