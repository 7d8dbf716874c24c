"""Attention of e4m3 tensors as an operation; there are no gradients."""

from typing import TYPE_CHECKING, Any

import torch

from ...errors import Unsupported
from ..call import Call, check_options
from ..flat import value_of
from ..operator import Operation
from ..source import Scales
from ..watch import is_transformed, refuse_at_once
from .attention_fp8 import prepare, result_shapes_of
from .fp8 import DESCALES, refuse_packed

if TYPE_CHECKING:
    from ...plan import AttentionFp8Plan


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
    mine = {name: options.pop(name) for name in ("causal", "window", "scale", "layout") if name in options}
    scales, given = Scales(*(options.pop(name, None) for name in DESCALES)), value_of(options.pop("plan", None))
    refuse_others(q, **options)
    plan: AttentionFp8Plan | None = prepare(q, k, v, _tidy(Call(**mine, scales=scales, plan=given))).plan
    if plan is None:
        raise Unsupported(
            f"q has shape {tuple(q.shape)}: there is no query, so nothing is launched and there is no plan"
        )
    return plan


def _tidy(call: Call) -> Call:
    """A window given as a list is a pair too."""
    window = tuple(call.window) if isinstance(call.window, list) else call.window
    return call._replace(window=window)


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    out_shape, lse_shape = result_shapes_of(q, k, v, call)
    return q.new_empty(out_shape, dtype=torch.bfloat16), q.new_empty(lse_shape, dtype=torch.float32)


ATTENTION_FP8 = Operation(
    "attention_fp8",
    prepare,
    _fake,
    "attention of float8_e4m3fn tensors has no gradients: differentiate bfloat16 attention instead",
    lambda q, k, v, call: check_options(call),
    (Scales,),
)


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse); Unsupported if a gradient is asked for."""
    tensors = {"q": q, "k": k, "v": v, **dict(zip(DESCALES, call.scales, strict=True))}
    refuse_at_once(tensors, "attention of float8_e4m3fn tensors has none: detach() it, or use bfloat16")
    if not torch.compiler.is_compiling() and is_transformed():
        raise Unsupported("attention of float8_e4m3fn tensors has no transforms of torch.func")
    return ATTENTION_FP8(q, k, v, _tidy(call))  # type: ignore[no-any-return]
