"""Attention of e4m3 tensors in torch's dispatcher, and which way a call takes; there are no gradients."""

from typing import TYPE_CHECKING, Any, cast

import torch

from ...errors import Unsupported
from ...types import Constant, Layout
from ..call import check_options, value_of
from ..hopper import inside_operator
from ..watch import is_transformed, is_watched, refuse_tangents
from .attention_fp8 import Fp8Call, forward, plain_call, prepare, result_shapes_of
from .fp8 import DESCALES, refuse_packed
from .library import named

if TYPE_CHECKING:
    from ...plan import AttentionFp8Plan

__all__ = ["attention_fp8_op", "plan_of", "refuse_others", "run"]


def refuse_others(q: torch.Tensor, **options: Any) -> None:
    """Unsupported, naming it, for an option that e4m3 attention does not have."""
    for name, value in options.items():
        numbers = {"softcap": 0.0, "dropout_p": 0.0}  # what is no number is given, too
        if value is not None and value != () and not (isinstance(value, int | float) and value == numbers.get(name)):
            raise Unsupported(
                f"{name} was given with q of dtype float8_e4m3fn, which has causal, window, scale, layout, descales and plan: "
                "dequantise q, k and v to bfloat16 for the rest"
            )


def plan_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> "AttentionFp8Plan":
    """The plan of a call given by keywords."""
    options.pop("return_lse", None)
    if any(
        options.pop(name, None) is not None for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    ):
        refuse_packed(q)
    mine = {name: options.pop(name) for name in Fp8Call._fields if name in options}
    refuse_others(q, **options)
    plan = prepare(q, k, v, _tidy(Fp8Call(**mine))._replace(plan=value_of(mine.get("plan")))).plan
    if plan is None:
        raise Unsupported(
            f"q has shape {tuple(q.shape)}: there is no query, so nothing is launched and there is no plan"
        )
    return plan


def _tidy(call: Fp8Call) -> Fp8Call:
    """A window given as a list is a pair too."""
    window = tuple(call.window) if isinstance(call.window, list) else call.window
    return call._replace(window=window)


@torch.library.custom_op("tilefold::attention_fp8", mutates_args=())
def attention_fp8_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    causal: bool,
    window_left: int,
    window_right: int,
    scale: float | None,
    layout: str,
    plan: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `tilefold.attention` with e4m3 inputs; plan: "" or the name of a constant."""
    named = Constant(plan).value if plan else None
    window = window_left, window_right
    with inside_operator():
        call = Fp8Call(causal, window, scale, cast("Layout", layout), q_descale, k_descale, v_descale, named)
        return forward(q, k, v, call)


@attention_fp8_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_descale: torch.Tensor | None, k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None, causal: bool, window_left: int, window_right: int, scale: float | None, layout: str,
    plan: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    window = window_left, window_right
    call = Fp8Call(causal, window, scale, cast("Layout", layout), q_descale, k_descale, v_descale)
    out_shape, lse_shape = result_shapes_of(q, k, v, call)
    return q.new_empty(out_shape, dtype=torch.bfloat16), q.new_empty(lse_shape, dtype=torch.float32)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise Unsupported("attention of float8_e4m3fn tensors has no gradients: differentiate bfloat16 attention instead")


attention_fp8_op.register_autograd(_refuse)


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Fp8Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Straight to the kernel when eager, through torch's dispatcher when traced; Unsupported if a gradient is asked for."""
    call = _tidy(call)
    tensors = {"q": q, "k": k, "v": v, **{name: getattr(call, name) for name in DESCALES}}
    compiling = torch.compiler.is_compiling()
    if not compiling:  # a tracer knows of no tangents and no functorch
        refuse_tangents(tensors)
        if is_transformed():
            raise Unsupported("attention of float8_e4m3fn tensors has no transforms of torch.func")
    for name, t in tensors.items():
        if torch.is_grad_enabled() and isinstance(t, torch.Tensor) and t.requires_grad:
            raise Unsupported(
                f"{name} requires a gradient, but attention of float8_e4m3fn tensors has none: detach() it, or use bfloat16"
            )
    if compiling or is_watched(tensors.values()):
        return _dispatched(q, k, v, call)
    return forward(q, k, v, call._replace(plan=value_of(call.plan)))


def _dispatched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Fp8Call) -> tuple[torch.Tensor, torch.Tensor]:
    check_options(plain_call(call))
    left, right = (-1 if side is None else side for side in call.window or (None, None))
    result = attention_fp8_op(q, k, v, *call[4:7], call.causal, left, right, call.scale, call.layout, named(call.plan))
    return cast("tuple[torch.Tensor, torch.Tensor]", result)
