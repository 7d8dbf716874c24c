"""tilefold's own rows of a benchmark: the public functions as a user calls them, and by kernels that a plan would not take."""

from typing import Any

from torch import Tensor

import tilefold
from tilefold.bench.attention.block_peers import portable_plans
from tilefold.bench.attention.cases import Case
from tilefold.bench.family import Calls
from tilefold.bench.implementation import Inputs, prepared, window_of
from tilefold.errors import Unsupported


def prepare_tilefold(inputs: Inputs) -> Calls:
    """The public function, as a user calls it."""
    p, index, ends = inputs.problem, inputs.index, inputs.offsets
    window = window_of(p)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if index is not None:
            return tilefold.sparse_attention(q, k, v, index, causal=p.causal)
        if ends is None:
            return tilefold.attention(q, k, v, causal=p.causal, window=window)
        lengths = ends, ends, p.seq_q, p.seq_q
        return tilefold.attention_varlen(q[0], k[0], v[0], *lengths, causal=p.causal, window=window)[None]

    return prepared(inputs, function)


def prepare_nondeterministic(inputs: Inputs) -> Calls:
    """Non-deterministic gradients, where a plan makes them by another kernel then."""
    causal, window = inputs.problem.causal, window_of(inputs.problem)
    tensors = (inputs.q, inputs.k, inputs.v)
    kept, free = (
        tilefold.attention_backward_plan(*tensors, causal=causal, window=window, deterministic=d).kernel
        for d in (True, False)
    )
    if kept == free:
        raise Unsupported(f"the plan takes {kept} in either case")

    return prepared(
        inputs, lambda q, k, v: tilefold.attention(q, k, v, causal=causal, window=window, deterministic=False)
    )


def prepare_portable(inputs: Inputs) -> Calls:
    """`sparse_attention` by the portable kernels, where a plan takes another one by itself."""
    index, plans = inputs.index, portable_plans(inputs)
    if index is None or plans is None:
        raise Unsupported("it is what tilefold runs by itself here")
    plan, backward = plans
    return prepared(
        inputs, lambda q, k, v: tilefold.sparse_attention(q, k, v, index, plan=plan, backward_plan=backward)
    )


def tilefold_refuses(case: Case, device: str) -> str | None:
    return None if case.problem.plain else "this adapter takes plain attention only"


def nondeterministic_refuses(case: Case, device: str) -> str | None:
    if case.pattern is not None or case.problem.varlen or not case.backward:
        return "a row of its own for gradients of dense attention only"
    return tilefold_refuses(case, device)


def portable_refuses(case: Case, device: str) -> str | None:
    if case.pattern is None:
        return "a row of its own in the family sparse only"
    return tilefold_refuses(case, device)
