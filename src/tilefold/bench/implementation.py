"""What implementations of attention get, and how a function of q, k and v becomes the call that is timed."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.bench.attention.cases import Case
from tilefold.bench.attention.lists import lists_of
from tilefold.bench.family import Calls, normal_numbers
from tilefold.plan.problem import AttentionProblem
from tilefold.sparse import BlockIndex

Result = Any  # the output [B, Sq, H, Dv], or the gradients (dq, dk, dv) in the shapes of q, k and v
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Inputs:
    """q [B, Sq, H, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv] of one case, on one device; of a packed batch [1, tokens, H, D].

    index: the lists of a sparse case, there too. grad: the gradient of the output [B, Sq, H, Dv] of a backward case.
    offsets: where each sequence of a packed batch begins, and the end: [B + 1] int32.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    index: BlockIndex | None = None
    grad: Tensor | None = None
    offsets: Tensor | None = None

    @property
    def problem(self) -> AttentionProblem:
        return self.case.problem


def make_inputs(case: Case, device: str, seed: int = 0) -> Inputs:
    """Standard-normal q, k, v and gradient, the same for a seed and device, and the case's lists, whatever the seed."""
    p = case.problem
    normal = normal_numbers(device, seed, p.dtype)
    batch, seq_q, seq_k = (1, sum(case.lengths), sum(case.lengths)) if case.lengths else (p.batch, p.seq_q, p.seq_k)
    q = normal(batch, seq_q, p.heads, p.dim_qk)
    k = normal(batch, seq_k, p.kv_heads, p.dim_qk)
    v = normal(batch, seq_k, p.kv_heads, p.dim_v)
    index = None if case.pattern is None else lists_of(case.pattern, p).to(device)
    grad = normal(batch, seq_q, p.heads, p.dim_v) if case.backward else None
    ends = torch.tensor([0, *case.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Inputs(case, q, k, v, index, grad, ends.to(device) if case.lengths else None)


def prepared(
    inputs: Inputs, function: Function, context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Calls:
    """The call of a function of (q, k, v) in the case's direction: the function itself, or torch's gradient through it, over a
    graph that is made here once and kept."""
    if inputs.grad is None:
        q, k, v = inputs.q, inputs.k, inputs.v
        return Calls([lambda: function(q, k, v)], context)
    grad, leaves = inputs.grad, [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    with context(), torch.enable_grad():
        out = function(*leaves)
    return Calls([lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)], context)


def window_of(problem: AttentionProblem) -> tuple[int, int] | None:
    """The problem's window as the public functions take it."""
    return None if problem.window == (-1, -1) else problem.window


def output_of(result: Any) -> Any:
    """The output of a function that gives it alone or with an lse behind it, as its version has it."""
    return result[0] if isinstance(result, tuple) else result


SDPA = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}


def sdpa_only(backend: str) -> AbstractContextManager[Any]:
    """While it is open, torch's scaled_dot_product_attention takes that backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found: AbstractContextManager[Any] = sdpa_kernel(getattr(SDPBackend, SDPA[backend]))
    return found
