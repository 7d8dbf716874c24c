"""Dense attention as an operation: eager, differentiable, and one opaque operator for torch.compile, FakeTensor and tracing."""

from collections.abc import Sequence
from typing import Any

import torch

from ...types import Constant
from ..call import Call, check_options, shapes_of
from ..flat import value_of
from ..operator import Gradient, Operation
from ..source import Packed
from .attention import prepare
from .attention_parts import HOOKS, hooks_of

NO_HOOKS = (None,) * len(HOOKS)
Pair = tuple[torch.Tensor, torch.Tensor]


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Pair:
    out_shape, lse_shape = shapes_of(q, k, v, call)
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=torch.float32)


def _gradients(
    args: tuple[Any, ...], results: Pair, grads: tuple[Any, Any], wanted: tuple[bool, ...]
) -> Sequence[torch.Tensor | None]:
    from ..backward.attention_backward import backward  # here: `import tilefold` stays light

    q, k, v, call = args
    dout = torch.zeros_like(results[0]) if grads[0] is None else grads[0]
    return backward((q, k, v, *results), dout, grads[1], call, wanted)


def _require(q: Any, k: Any, v: Any, call: Call) -> None:
    from ..backward.attention_backward_loads import loads_of_call, needed
    from ..backward.backward_parts import score_slope

    score_slope(call.score_mod, call.score_grad)
    if loads := needed(call):
        loads_of_call(call, loads)


def _ready(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Any:
    from ..backward.attention_backward import differentiable

    return differentiable(q, k, v, call)


def _before(q: Any, k: Any, v: Any, call: Call) -> None:
    check_options(call)


ATTENTION = Operation(
    "attention",
    prepare,
    _fake,
    Gradient(("q", "k", "v", "bias", "sinks"), _gradients, _require, _ready, mods="score_args"),
    _before,
    (Packed,),
)
"""(out, lse) of `tilefold.attention` and `attention_varlen`."""


def resolved(call: Call) -> Call:
    """The call with the objects that its `Constant`s name."""
    hooks = hooks_of(call)
    if hooks == NO_HOOKS or Constant not in map(type, hooks):
        return call
    return call._replace(**{name: value_of(getattr(call, name)) for name in HOOKS})
