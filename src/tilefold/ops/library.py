"""tilefold's operators in torch's dispatcher, so that torch.compile, FakeTensor and tracing see one opaque op.

Eager calls do not pass here: the dispatcher would cost more than the launch.  An operator's schema cannot hold functions,
so a call's hooks (score_mod, mask_mod, plan) travel as the key of a record that this module keeps, and inside a compiled
function they have to be `Constant`s, whose names a tracer can read.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import Unsupported
from ..types import Constant, Layout, ModArgs, ModFunction, constant
from .attention import forward
from .call import Call, Packed, shapes_of

if TYPE_CHECKING:
    from ..plan import AttentionPlan

__all__ = ["attention_op", "dispatched"]

_HOOKS: "dict[str, tuple[ModFunction | None, ModArgs, ModFunction | None, ModArgs, AttentionPlan | None]]" = {}
_KEYS: dict[Any, str] = {}
_NUMBERS = itertools.count()


class _Slot:
    """Stands in a kept args tuple where a tensor of the call goes."""


@torch.library.custom_op("tilefold::attention", mutates_args=())
def attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    mod_tensors: Sequence[torch.Tensor],
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window_left: int,
    window_right: int,
    scale: float | None,
    softcap: float,
    layout: str,
    hooks: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `tilefold.attention`, or of `attention_varlen` if cu_seqlens are given; hooks: "" or a kept key."""
    return forward(q, k, v, _call(alibi_slopes, bias, mask, sinks, mod_tensors, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                  max_seqlen_k, causal, window_left, window_right, scale, softcap, layout, hooks))  # fmt: skip


@attention_op.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    mod_tensors: Sequence[torch.Tensor],
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(alibi_slopes, bias, mask, sinks, mod_tensors, *rest)
    out_shape, lse_shape = shapes_of(q, k, v, call)
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=torch.float32)


def _refuse_gradient(ctx: Any, *gradients: Any) -> Any:
    raise Unsupported("gradients of tilefold::attention are not implemented in this release")


attention_op.register_autograd(_refuse_gradient)


def _call(
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    mod_tensors: Sequence[torch.Tensor],
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    left: int,
    right: int,
    scale: float | None,
    softcap: float,
    layout: str,
    hooks: str,
) -> Call:
    score_mod, score_args, mask_mod, mask_args, plan = _HOOKS[hooks] if hooks else (None, (), None, (), None)
    tensors = iter(mod_tensors)
    score_args, mask_args = (
        tuple(next(tensors) if isinstance(a, _Slot) else a for a in args) for args in (score_args, mask_args)
    )
    packed = None if cu_q is None or cu_k is None else Packed(cu_q, cu_k, max_q, max_k)
    order = cast("Layout", layout)
    return Call(causal, (left, right), scale, softcap, order, alibi_slopes, bias, mask, sinks, score_mod, score_args,
                mask_mod, mask_args, packed, plan)  # fmt: skip


def dispatched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as ops.attention.forward, through the dispatcher."""
    left, right = (-1 if side is None else side for side in call.window or (None, None))
    score_tensors, score_numbers = _apart(call.score_args)
    mask_tensors, mask_numbers = _apart(call.mask_args)
    hooks = ""
    if call.score_mod is not None or call.mask_mod is not None or call.plan is not None:
        names = tuple(_named(hook) for hook in (call.score_mod, call.mask_mod, call.plan))
        hooks = _key_of_hooks(names, score_numbers, mask_numbers)
    cu_q, cu_k, max_q, max_k = call.packed or (None, None, 0, 0)
    result = attention_op(q, k, v, call.alibi_slopes, call.bias, call.mask, call.sinks, score_tensors + mask_tensors, cu_q, cu_k,
                        max_q, max_k, call.causal, left, right, call.scale, float(call.softcap), call.layout, hooks)  # fmt: skip
    return cast("tuple[torch.Tensor, torch.Tensor]", result)


def _apart(args: ModArgs) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """The tensors among args, and args with None in their places."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    return tensors, tuple(None if isinstance(a, torch.Tensor) else a for a in args)


def _named(hook: Any) -> str:
    """The key of a hook's `Constant`."""
    if hook is None:
        return ""
    if isinstance(hook, Constant):
        return hook.key
    if torch.compiler.is_compiling():
        raise Unsupported(
            "inside torch.compile, score_mod, mask_mod and plan have to be passed as tilefold.constant(...), made outside it"
        )
    return constant(hook).key


def _key_of_hooks(names: tuple[str, ...], score_numbers: ModArgs, mask_numbers: ModArgs) -> str:
    """Keep the hooks and return their key; the same hooks give the same key."""
    identity = (names, tuple(map(_typed, score_numbers)), tuple(map(_typed, mask_numbers)))
    if identity not in _KEYS:
        score_args, mask_args = (
            tuple(_Slot() if a is None else a for a in numbers) for numbers in (score_numbers, mask_numbers)
        )
        score_mod, mask_mod, plan = (Constant(name).value if name else None for name in names)
        _KEYS[identity] = key = str(next(_NUMBERS))
        _HOOKS[key] = (score_mod, score_args, mask_mod, mask_args, plan)
    return _KEYS[identity]


def _typed(number: Any) -> Any:
    """1, 1.0 and True are equal, but not the same argument."""
    return type(number), number


# What torch.compiler.assume_constant_result sets; calling it here would import torch._dynamo, and with it Triton.
_key_of_hooks._dynamo_marked_constant = True  # type: ignore[attr-defined]
