"""tilefold's operators in torch's dispatcher, so that torch.compile, FakeTensor and tracing see one opaque op.

Eager calls do not pass here: the dispatcher would cost more than the launch.  An operator's schema cannot hold functions or
mixed tuples, so the hooks (HOOKS below) travel by the names of their `Constant`s, and the args of the mods as three lists with a
word that says how they interleave: "tif|t" is score_args (tensor, int, float) and mask_args (tensor,).
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import torch

from ...errors import Unsupported
from ...types import Constant, Layout, ModArgs, constant
from ..call import Call, Packed, check_options, shapes_of, value_of
from ..hopper import inside_operator
from ..watch import refuse_gradients
from .attention import forward

__all__ = [
    "HOOKS",
    "attention_backward_op",
    "attention_op",
    "describe_args",
    "dispatched",
    "named",
    "named_values",
    "refuse_unserved",
    "resolved",
]

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
AnyCall = TypeVar("AnyCall", bound=Any)  # a Call or a SparseCall
HOOKS = ("score_mod", "mask_mod", "plan", "score_grad", "backward_plan")
NO_HOOKS = (None,) * len(HOOKS)


@torch.library.custom_op("tilefold::attention", mutates_args=())
def attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
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
    mod_tensors: Sequence[torch.Tensor],
    mod_ints: Sequence[int],
    mod_floats: Sequence[float],
    mod_order: str,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `tilefold.attention`, or of `attention_varlen` if cu_seqlens are given; hooks: "" or the names of
    constants, in the order of HOOKS, with | between, an empty name where there is none."""
    mods = named_values(HOOKS, hooks, mod_tensors, mod_ints, mod_floats, mod_order)
    call = _call(alibi_slopes, bias, mask, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
                 window_left, window_right, scale, softcap, layout, dropout_p, dropout_seed)  # fmt: skip
    with inside_operator():
        return forward(q, k, v, call._replace(deterministic=deterministic, **mods))


@attention_op.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
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
    mod_tensors: Sequence[torch.Tensor],
    mod_ints: Sequence[int],
    mod_floats: Sequence[float],
    mod_order: str,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(alibi_slopes, bias, mask, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
                 window_left, window_right, scale, softcap, layout, dropout_p, dropout_seed)  # fmt: skip
    out_shape, lse_shape = shapes_of(q, k, v, call)
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=torch.float32)


@torch.library.custom_op("tilefold::attention_backward", mutates_args=())
def attention_backward_op(
    wanted: Sequence[bool],
    dout: torch.Tensor,
    dlse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
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
    mod_tensors: Sequence[torch.Tensor],
    mod_ints: Sequence[int],
    mod_floats: Sequence[float],
    mod_order: str,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
    deterministic: bool,
) -> Gradients:
    """Gradients of q, k, v, bias and sinks of `tilefold::attention` from those of out and lse; empty where not wanted."""
    mods = named_values(HOOKS, hooks, mod_tensors, mod_ints, mod_floats, mod_order)
    call = _call(alibi_slopes, bias, mask, sinks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
                 window_left, window_right, scale, softcap, layout, dropout_p, dropout_seed)  # fmt: skip
    from ..backward.attention_backward import backward  # here: `import tilefold` stays light

    call = call._replace(deterministic=deterministic, **mods)
    grads = backward((q, k, v, out, lse), dout, dlse, call, tuple(wanted))
    return cast("Gradients", tuple(q.new_empty(0) if g is None else g for g in grads))


@attention_backward_op.register_fake
def _(
    wanted: Sequence[bool], dout: torch.Tensor, dlse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, alibi_slopes: torch.Tensor | None, bias: torch.Tensor | None, mask: torch.Tensor | None,
    sinks: torch.Tensor | None, *args: Any,
) -> Gradients:  # fmt: skip
    from ..backward.attention_backward import made_of

    targets = zip((q, k, v, bias, sinks), made_of(wanted), strict=True)
    grads = (t.new_empty(t.shape) if t is not None and w else q.new_empty(0) for t, w in targets)
    return cast("Gradients", tuple(grads))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:9], inputs[23], *inputs[18])
    ctx.rest = inputs[9:18], inputs[19:23], inputs[24]


def _differentiate(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[Any, ...]:
    out, lse, *saved = ctx.saved_tensors
    tensors, seed, mod_tensors = saved[:9], saved[9], list(saved[10:])
    need = ctx.needs_input_grad
    options, numbers, deterministic = ctx.rest
    refuse_unserved("attention", "q, k, v, bias and sinks", options[-1], mod_tensors, tensors[3])
    wanted = [bool(need[i]) for i in (0, 1, 2, 4, 6)]
    grads = attention_backward_op(
        wanted, dout, dlse, out, lse, *tensors, *options, mod_tensors, *numbers, seed, deterministic
    )
    dq, dk, dv, dbias, dsinks = (g if w else None for g, w in zip(grads, wanted, strict=True))
    # torch takes an empty list for a list of tensors and wants one back.
    empty: list[Any] = [[] if len(given) == 0 else None for given in numbers[:2]]
    return dq, dk, dv, None, dbias, None, dsinks, *(None,) * 11, [None] * len(mod_tensors), *empty, *(None,) * 4


def refuse_unserved(
    op: str, served: str, hooks: str, mod_tensors: Sequence[torch.Tensor], slopes: torch.Tensor | None = None
) -> None:
    """Unsupported for a gradient that nobody can make; served: what gets one."""
    args = ((f"a tensor of score_args or mask_args of tilefold::{op}", t) for t in mod_tensors)
    refuse_gradients((("alibi_slopes", slopes), *args), served)
    keys = dict(zip(HOOKS, hooks.split("|"), strict=True)) if hooks else {}
    if keys.get("score_mod") and not keys.get("score_grad"):
        raise Unsupported(f"a gradient of tilefold::{op} with score_mod also needs score_grad")


attention_op.register_autograd(_differentiate, setup_context=_keep)


def _call(
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
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
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
) -> Call:
    packed = None if cu_q is None or cu_k is None else Packed(cu_q, cu_k, max_q, max_k)
    return Call(
        causal, (left, right), scale, softcap, cast("Layout", layout), alibi_slopes, bias, mask, sinks, packed=packed,
        dropout_p=dropout_p, dropout_seed=dropout_seed,
    )  # fmt: skip


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


def dispatched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as ops.dense.attention.forward, through the dispatcher."""
    check_options(call)
    left, right = (-1 if side is None else side for side in call.window or (None, None))
    hooks = named(*(getattr(call, name) for name in HOOKS))
    cu_q, cu_k, max_q, max_k = call.packed or (None, None, 0, 0)
    result = attention_op(q, k, v, call.alibi_slopes, call.bias, call.mask, call.sinks, cu_q, cu_k, max_q, max_k, call.causal,
                          left, right, call.scale, call.softcap, call.layout, hooks,
                          *describe_args(call.score_args, call.mask_args), float(call.dropout_p), call.dropout_seed,
                          call.deterministic)  # fmt: skip
    return cast("tuple[torch.Tensor, torch.Tensor]", result)


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
    return "|".join(map(_named, hooks)) if any(hook is not None for hook in hooks) else ""


def _named(hook: Any) -> str:
    if hook is None:
        return ""
    if isinstance(hook, Constant):
        return hook.key
    if torch.compiler.is_compiling():
        raise Unsupported(
            "inside torch.compile, mod functions and plans have to be passed as tilefold.constant(...), made outside it"
        )
    return constant(hook).key
