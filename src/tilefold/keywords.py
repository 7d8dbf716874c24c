"""Keywords that a function does not have: the error says what other libraries mean by them, and what they are called here."""

import difflib
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

__all__ = ["refusing", "unexpected", "unexpected_of"]

F = TypeVar("F", bound=Callable[..., Any])

_WINDOW = "a pair (left, right), both ends included; None or -1 is unbounded"
_BY_MOD = "a mask_mod does what a window does, or the lists of blocks do"
_MASK = (
    ("mask", "bool, true where the query sees the key, or a Mask; a floating point one is bias"),
    ("mask_mod", "a @triton.jit function that says which query sees which key"),
)
NAMES: dict[str, tuple[tuple[tuple[str, str], ...], str]] = {
    # theirs -> ((ours, what is to be known of it), ..), the first that the function has is named; what holds if it has none
    "is_causal": ((("causal", "aligned to the bottom right, torch's is_causal to the top left: with as many queries as keys they "
                    "are the same"),), ""),
    "softmax_scale": ((("scale", ""),), ""),
    "sm_scale": ((("scale", ""),), ""),
    "scaling": ((("scale", ""),), ""),
    "attn_mask": (_MASK, ""),
    "attention_mask": (_MASK, ""),
    "attn_bias": ((("bias", ""), ("score_mod", "")), ""),
    "block_mask": ((("mask_mod", "sparse_attention takes the blocks: BlockIndex.from_flex(block_mask)"),), ""),
    "enable_gqa": ((), "leave it out: k and v may always have fewer heads than q"),
    "window_size": ((("window", _WINDOW),), _BY_MOD),
    "sliding_window": ((("window", f"{_WINDOW}; w keys up to the query's own are (w - 1, 0)"),), _BY_MOD),
    "logits_soft_cap": ((("softcap", ""),), ""),
    "soft_cap": ((("softcap", ""),), ""),
    "dropout": ((("dropout_p", ""),), "there is no dropout here"),
    "p": ((("dropout_p", ""),), "there is no dropout here"),
    "s_aux": ((("sinks", ""),), ""),
    "learnable_sink": ((("sinks", ""),), ""),
    "tensor_layout": ((("layout", "'bshd' or 'bhsd'"),), ""),
    "return_attn_probs": ((("return_lse", "probabilities are not kept"),), ""),
    "return_softmax_lse": ((("return_lse", ""),), ""),
    "page_table": ((("block_table", ""),), ""),
    "seqused_k": ((("cache_seqlens", ""),), ""),
}  # fmt: skip


def refusing(function: F) -> F:
    """The function itself, whose last parameter, `**others`, only catches what it refuses: `inspect.signature` leaves it out."""
    signature = inspect.signature(function)
    known = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=known)  # type: ignore[attr-defined]
    return function


def unexpected_of(function: Callable[..., Any], others: Iterable[str]) -> TypeError:
    """The error for keywords that the function, one of `refusing`, does not have."""
    return unexpected(function.__name__, next(iter(others)), inspect.signature(function).parameters)


def _traced() -> bool:
    """Whether Dynamo is at work, which has no way through difflib and would say that instead."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def unexpected(function: str, given: str, accepted: Iterable[str]) -> TypeError:
    """The error for a keyword that the function of that name does not have; accepted: those it has."""
    text, accepted = f"{function}() got an unexpected keyword argument {given!r}", tuple(accepted)
    ours, instead = NAMES.get(given, ((), ""))
    for name, note in ours:
        if name in accepted:
            return TypeError(f"{text}: here it is {name}{f' ({note})' if note else ''}")
    near = [] if _traced() else difflib.get_close_matches(given, accepted, 1, 0.75)
    tail = f": {instead}" if instead else f": did you mean {near[0]}?" if near else ""
    return TypeError(text + tail)
