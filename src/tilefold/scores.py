"""Changes of scores as values: what happens to a score before the softmax, one step after the other.

    score = scores.softcap(30.0).then(scores.alibi(slopes))
    out = tilefold.attention(q, k, v, score=score)

Steps are joined by `then`, not by a sign: their order matters, a bias in front of a softcap is another score than one behind it.
Kernels apply softcap, ALiBi, bias and a rule in this order, each at most once; what asks for more is refused by name and can be
written as one `rule`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch

from .check import FLOATS, check_number
from .errors import DtypeError, ShapeError, Unsupported
from .masks import identity_of, shown_arg
from .types import ModArgs, ModFunction

__all__ = ["Score", "alibi", "bias", "rule", "softcap"]

ORDER: Final = ("softcap", "alibi", "bias", "rule")
"""In which kernels apply them."""


@dataclass(frozen=True, eq=False, repr=False)
class Score:
    """What happens to the scores, step by step; made by the functions of `tilefold.scores` and joined by `then`.

    steps: (kind, args) of each; kind: "softcap", "alibi", "bias" or "rule", args: what the constructor was given.

    Two are equal if their steps are made alike of the same tensors (the same objects) and numbers."""

    steps: tuple[tuple[str, tuple[Any, ...]], ...]

    def then(self, other: "Score") -> "Score":
        """This one, then the other one.  Unsupported, naming the step, where kernels cannot: they go by softcap, alibi, bias,
        rule, each at most once."""
        if not isinstance(other, Score):
            raise DtypeError(f"then() takes a Score, got {type(other).__name__}")
        steps = (*self.steps, *other.steps)
        for (before, _), (after, _) in pairwise(steps):
            if ORDER.index(before) >= ORDER.index(after):
                what = f"two steps of {after}" if before == after else f"{after} after {before}"
                raise Unsupported(
                    f"{what}: kernels apply {', '.join(ORDER)} in this order, each at most once; write both as one rule"
                )
        return Score(steps)

    def __repr__(self) -> str:
        shown = [f"{kind}({', '.join(_shown(kind, args))})" for kind, args in self.steps]
        return shown[0] + "".join(f".then({step})" for step in shown[1:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Score) and identity_of(self.steps) == identity_of(other.steps)

    def __hash__(self) -> int:
        return hash(identity_of(self.steps))

    def dense(self, scores: torch.Tensor) -> torch.Tensor:
        """The new scores of scores [batch, heads, seq_q, seq_k], in their dtype: the definition, for oracles; differentiable.
        Unsupported for a `rule` without its twin."""
        for kind, args in self.steps:
            scores = _applied(kind, args, scores)
        return scores


def softcap(cap: float) -> Score:
    """cap * tanh(score / cap), cap greater than 0 (Gemma 2, arXiv:2408.00118, section 2)."""
    return Score((("softcap", (check_number("cap", cap, above=0.0),)),))


def alibi(slopes: torch.Tensor) -> Score:
    """score - slope * distance of the key from the query's place.  slopes: [heads] or [batch, heads] fp32; no gradient.

    Source: Press et al. 2022 (arXiv:2108.12409)."""
    if not isinstance(slopes, torch.Tensor) or slopes.dtype != torch.float32:
        raise DtypeError(f"slopes must be a float32 tensor [heads] or [batch, heads], got {shown_arg(slopes)}")
    if slopes.dim() not in (1, 2):
        raise ShapeError(f"slopes has shape {tuple(slopes.shape)}, expected [heads] or [batch, heads]")
    return Score((("alibi", (slopes,)),))


def bias(tensor: torch.Tensor) -> Score:
    """score + tensor, which is [batch or 1, heads or 1, seq_q or 1, seq_k], floating point, and gets a gradient."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOATS:
        raise DtypeError(f"tensor must be a float16, bfloat16 or float32 tensor, got {shown_arg(tensor)}")
    if tensor.dim() != 4:
        raise ShapeError(
            f"tensor has shape {tuple(tensor.shape)}, expected [batch or 1, heads or 1, seq_q or 1, seq_k]"
        )
    return Score((("bias", (tensor,)),))


def rule(
    fn: ModFunction,
    args: ModArgs = (),
    grad: ModFunction | None = None,
    twin: Callable[..., torch.Tensor] | None = None,
) -> Score:
    """What a @triton.jit function makes of the score: fn(score, batch, head, q_index, kv_index, args), as `attention` takes
    score_mod, with args as score_args.  grad: the same for the derivative of the new score by the given one; None: it is made of
    fn's source, if that is differentiable.
    twin: the same as fn as a Python function of tensors, which `Score.dense` calls.  Inside torch.compile fn and grad are
    `tilefold.constant`s."""
    if not isinstance(args, tuple):
        raise DtypeError(f"args must be a tuple, got {type(args).__name__}")
    return Score((("rule", (fn, args, grad, twin)),))


def _shown(kind: str, args: tuple[Any, ...]) -> list[str]:
    if kind != "rule":
        return [shown_arg(arg) for arg in args]
    fn, own, grad, _ = args
    return [shown_arg(fn), shown_arg(own)] + ([f"grad={shown_arg(grad)}"] if grad is not None else [])


def _applied(kind: str, args: tuple[Any, ...], scores: torch.Tensor) -> torch.Tensor:
    batch, heads, seq_q, seq_k = scores.shape
    index = torch.arange
    i_q, i_k = index(seq_q, device=scores.device)[:, None], index(seq_k, device=scores.device)[None, :]
    if kind == "softcap":
        return args[0] * torch.tanh(scores / args[0])  # type: ignore[no-any-return]
    if kind == "alibi":
        slopes = args[0] if args[0].dim() == 2 else args[0][None]
        return scores - slopes.to(scores.dtype)[:, :, None, None] * (i_q + (seq_k - seq_q) - i_k).abs()  # type: ignore[no-any-return]
    if kind == "bias":
        return scores + args[0].to(scores.dtype)  # type: ignore[no-any-return]
    fn, own, _, twin = args
    if twin is None:
        raise Unsupported(f"rule({shown_arg(fn)}) has no definition in torch: give twin, a Python function of tensors")
    i_b, i_h = (
        index(batch, device=scores.device)[:, None, None, None],
        index(heads, device=scores.device)[:, None, None],
    )
    return twin(scores, i_b, i_h, i_q, i_k, (*own, seq_q, seq_k))  # type: ignore[no-any-return]
