"""Whether the dense kernels over lists of tiles serve a call whose mask is a table of blocks (`masks.blocks`)."""

import math
from typing import NamedTuple

import torch

from ..backward.attention_backward import backward_plan_of
from ..call import Call, check_hooks, check_options, sizes_of
from ..dense import attention
from ..dense.attention_parts import hooks_of, problem_of
from ..device import device_of
from ..records import recorded
from ..source import key_of


class Refusals(NamedTuple):
    """Why they do not, as sentences, or None where they do."""

    forward: str | None
    backward: str | None
    keep: tuple[object, ...]  # objects whose id is part of the key


@recorded("lists of tiles", key_of)
def tiles_refusals(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Refusals:
    """Why the kernels do not serve a call of `attention`; checks it, and compiles the forward kernel that it would have."""
    from ...plan.backward.attention_backward_reduce import ReduceOptions
    from ...plan.dense.attention_hopper import KERNEL, lists_refusal

    check_options(call)
    sizes = sizes_of(q, k, v, call)
    check_hooks(call, q.device)
    keep = hooks_of(call)
    if 0 in (math.prod(q.shape), sizes["seq_q"], sizes["seq_k"]):
        return Refusals(*("there is nothing to compute",) * 2, keep)
    problem = problem_of(q, k, v, call, sizes, (-1, -1))
    if refusal := lists_refusal(problem, device_of(q.device, "attention")):
        return Refusals(*(f"{KERNEL} is not taken: {refusal}",) * 2, keep)
    plan = attention.prepare(q, k, v, call).plan
    if "lists" not in getattr(plan, "options", ()):
        return Refusals(*(f"{getattr(plan, 'kernel', 'another kernel')} is taken for all tiles",) * 2, keep)
    backward = backward_plan_of(problem, call, q, False)
    if isinstance(backward.options, ReduceOptions) and backward.options.lists:
        return Refusals(None, None, keep)
    return Refusals(None, f"the backward pass would look at all tiles ({backward.kernel}: {backward.reason})", keep)
