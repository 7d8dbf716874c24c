"""Dense attention as an operation: eager, differentiable, and one opaque operator for torch.compile, FakeTensor and tracing.

Block-sparse attention writes its operators by hand; what they share is at the end of this file.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import torch

from ...errors import Unsupported
from ...types import Constant, ModArgs
from ..call import Call, check_options, shapes_of
from ..flat import named as name_of
from ..flat import value_of
from ..operator import Gradient, Operation
from ..watch import refuse_gradients
from .attention import forward

__all__ = [
    "ATTENTION",
    "HOOKS",
    "describe_args",
    "named",
    "named_values",
    "refuse_unserved",
    "resolved",
]

AnyCall = TypeVar("AnyCall", bound=Any)  # a Call or a SparseCall
HOOKS = ("score_mod", "mask_mod", "plan", "score_grad", "backward_plan")
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
    from ..backward.backward_parts import require_score_grad

    require_score_grad(call.score_mod, call.score_grad)


def _ready(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
    from ..backward.attention_backward import check_differentiable

    check_differentiable(q, k, v, call)


def _before(q: Any, k: Any, v: Any, call: Call) -> None:
    check_options(call)


ATTENTION = Operation(
    "attention", forward, _fake, Gradient(("q", "k", "v", "bias", "sinks"), _gradients, _require, _ready), _before
)
"""(out, lse) of `tilefold.attention` and `attention_varlen`."""


# ---------------------------------------------------------------- for operators that are written by hand


def refuse_unserved(
    op: str, served: str, hooks: str, mod_tensors: Sequence[torch.Tensor], slopes: torch.Tensor | None = None
) -> None:
    """Unsupported for a gradient that nobody can make; served: what gets one."""
    args = ((f"a tensor of score_args or mask_args of tilefold::{op}", t) for t in mod_tensors)
    refuse_gradients((("alibi_slopes", slopes), *args), served)
    keys = dict(zip(HOOKS, hooks.split("|"), strict=True)) if hooks else {}
    if keys.get("score_mod") and not keys.get("score_grad"):
        raise Unsupported(f"a gradient of tilefold::{op} with score_mod also needs score_grad")


def named_values(
    names: Sequence[str],
    hooks: str,
    tensors: Sequence[torch.Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    order: str,
) -> dict[str, Any]:
    """The fields of a call that the hooks (`names`, in the order of the keys in `hooks`) and the args of their mods fill."""
    if not hooks:
        return {}
    left = {"t": iter(tensors), "i": iter(ints), "f": iter(floats)}
    score_args, mask_args = (_interleaved(kinds, left) for kinds in order.split("|"))
    values = (Constant(key).value if key else None for key in hooks.split("|"))
    return {**dict(zip(names, values, strict=True)), "score_args": score_args, "mask_args": mask_args}


def _interleaved(kinds: str, left: dict[str, Iterator[Any]]) -> ModArgs:
    return tuple(next(left[kind]) for kind in kinds)


def describe_args(score_args: ModArgs, mask_args: ModArgs) -> tuple[list[torch.Tensor], list[int], list[float], str]:
    """The args of both mods as three lists and the word that says how they interleave."""
    args = (*score_args, *mask_args)
    order = "".join(map(_kind, score_args)) + "|" + "".join(map(_kind, mask_args))
    tensors, ints, floats = ([a for a in args if _kind(a) == kind] for kind in "tif")
    return tensors, ints, floats, order


def _kind(arg: Any) -> str:
    return "t" if isinstance(arg, torch.Tensor) else "f" if isinstance(arg, float) else "i"


def resolved(call: AnyCall) -> AnyCall:
    """The call with the objects that its `Constant`s name."""
    hooks = (call.score_mod, call.mask_mod, call.plan, call.score_grad, call.backward_plan)
    if hooks == NO_HOOKS or Constant not in map(type, hooks):
        return call
    return cast("AnyCall", call._replace(**{name: value_of(getattr(call, name)) for name in HOOKS}))


def named(*hooks: Any) -> str:
    """The keys of the hooks' `Constant`s with | between, an empty key where there is none; "" if there are none at all."""
    return "|".join(map(name_of, hooks)) if any(hook is not None for hook in hooks) else ""
