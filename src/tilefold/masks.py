"""Masks as values: which query sees which key, made of parts by `&`, `|` and `~`.

    mask = masks.causal() & masks.documents(cu_seqlens)
    out = tilefold.attention(q, k, v, mask=mask)

Masks are aligned to the bottom right: query i stands at key i + seq_k - seq_q, its *place*.  A mask is frozen, prints as the
expression that made it, and `Mask.dense` is its definition in plain torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from .check import check_whole
from .errors import DtypeError, LayoutError, ShapeError, Unsupported
from .types import ModArgs, ModFunction, Window

__all__ = ["Mask", "blocks", "causal", "documents", "keys", "prefix", "rule", "tensor", "window"]

BANDS: Final = {"prefix": "prefix", "prefix_each": "prefix"}
"""Rules of tilefold.device.mods that kernels may take as their band, and its kind in device.ranges, in small letters.  The rule's
one argument is the `left` of that kind."""
_SIGNS: Final = {"all": " & ", "any": " | "}


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """Which query sees which key; made by the functions of `tilefold.masks`, and by `a & b`, `a | b` and `~a` of two of them.

    kind: "causal", "window", "documents", "prefix", "keys", "tensor", "blocks", "rule"; "all", "any" or "not" of other masks.
    args: what the constructor was given, or the masks.

    Two masks are equal if they are made alike of the same tensors (the same objects) and numbers."""

    kind: str
    args: tuple[Any, ...] = ()

    def __and__(self, other: "Mask") -> "Mask":
        """Both let the query see the key."""
        return _joined("all", self, other)  # type: ignore[no-any-return]

    def __or__(self, other: "Mask") -> "Mask":
        """One of them does."""
        return _joined("any", self, other)  # type: ignore[no-any-return]

    def __invert__(self) -> "Mask":
        """This one does not."""
        return self.args[0] if self.kind == "not" else Mask("not", (self,))

    def __bool__(self) -> bool:
        raise TypeError("a Mask is neither true nor false: combine masks by &, | and ~, not by and, or and not")

    def __repr__(self) -> str:
        if self.kind in _SIGNS:
            return _SIGNS[self.kind].join(_inside(part, self.kind) for part in self.args)
        if self.kind == "not":
            return f"~{_inside(self.args[0], 'not')}"
        shown = [shown_arg(a) for a in (self.args[:2] if self.kind == "rule" else self.args)]
        return f"{self.kind}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and identity_of(self) == identity_of(other)

    def __hash__(self) -> int:
        return hash(identity_of(self))

    def dense(
        self, batch: int, heads: int, seq_q: int, seq_k: int, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """[batch or 1, heads or 1, seq_q, seq_k] bool, true where the query sees the key: the definition, for oracles and to look
        at.  It takes the memory that kernels save.  Unsupported for a `rule` without its twin."""
        index = torch.arange
        places = (
            index(batch, device=device)[:, None, None, None],
            index(heads, device=device)[None, :, None, None],
            index(seq_q, device=device)[:, None],
            index(seq_k, device=device)[None, :],
        )
        seen = _seen(self, places, seq_q, seq_k)
        seen = seen[(None,) * (4 - seen.dim())]
        return seen.expand(*seen.shape[:2], seq_q, seq_k)


def causal() -> Mask:
    """No key after the query: key j <= i + seq_k - seq_q.  Tiles past the diagonal are skipped."""
    return Mask("causal")


def window(left: int | None, right: int | None) -> Mask:
    """At most `left` keys before and `right` keys after the query's place, both included; None or -1: unbounded.  Tiles outside
    are skipped; several windows and `causal` that all have to hold are one window."""
    for name, side in (("left", left), ("right", right)):
        if side is not None:
            check_whole(name, side, -1)
    return Mask("window", (-1 if left is None else left, -1 if right is None else right))


def documents(cu_seqlens: torch.Tensor) -> Mask:
    """Only keys of the query's own document.  cu_seqlens: [documents + 1] int32, contiguous, ascending from 0: document d is keys
    cu_seqlens[d] to cu_seqlens[d + 1] of each sequence.  A query whose place is in none sees nothing.

    On sm_90 `attention` leaves out the tiles between documents of long sequences; `attention_varlen` has none anywhere."""
    _check_integers("cu_seqlens", cu_seqlens, "documents + 1")
    if cu_seqlens.shape[0] < 2:
        raise ShapeError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}: one document has 2 offsets")
    return Mask("documents", (cu_seqlens,))


def prefix(n: "int | torch.Tensor") -> Mask:
    """Prefix-LM: the first n keys are seen by all queries, the others as `causal` says.  n: at least 0, or [batch] int32, which
    the host does not read.  Tiles that no query sees are skipped, forward and backward.

    Source: Raffel et al. 2020 (arXiv:1910.10683, section 3.2.1)."""
    if isinstance(n, torch.Tensor):
        _check_integers("n", n, "batch")
    else:
        check_whole("n", n, 0)
    return Mask("prefix", (n,))


def keys(lengths: torch.Tensor) -> Mask:
    """Key j of sequence b is there if j < lengths[b]: padding behind the keys.  lengths: [batch] int32, contiguous."""
    _check_integers("lengths", lengths, "batch")
    return Mask("keys", (lengths,))


def tensor(mask: torch.Tensor) -> Mask:
    """[batch or 1, heads or 1, seq_q or 1, seq_k] bool, true where the query sees the key: what `attention` takes as mask."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        raise DtypeError(f"mask must be a bool tensor, got {shown_arg(mask)}")
    if mask.dim() != 4:
        raise ShapeError(f"mask has shape {tuple(mask.shape)}, expected [batch or 1, heads or 1, seq_q or 1, seq_k]")
    return Mask("tensor", (mask,))


def blocks(kinds: torch.Tensor, block: tuple[int, int], mask: Mask | None = None) -> Mask:
    """Blocks of a table: query i sees key j if the kind of block (i // block[0], j // block[1]) is 2, or if it is 1 and `mask`
    holds (None: it does); not if it is 0.  Blocks are counted from the first query and the first key.

    kinds: [batch or 1, heads or 1, Q blocks, KV blocks] uint8.  block: queries and keys of a block, at least 1.  On sm_90
    `attention` makes its lists of tiles of the table alone, from 2^20 scores a head on.

    Source: FlexAttention's BlockMask (Dong et al. 2024, arXiv:2412.05496)."""
    if not isinstance(kinds, torch.Tensor) or kinds.dtype != torch.uint8:
        raise DtypeError(f"kinds must be a uint8 tensor, got {shown_arg(kinds)}")
    if kinds.dim() != 4:
        raise ShapeError(
            f"kinds has shape {tuple(kinds.shape)}, expected [batch or 1, heads or 1, Q blocks, KV blocks]"
        )
    if not isinstance(block, tuple) or len(block) != 2:
        raise DtypeError(f"block must be a pair (queries, keys), got {block!r}")
    for name, size in zip(("block[0]", "block[1]"), block, strict=True):
        check_whole(name, size, 1)
    if mask is not None and not isinstance(mask, Mask):
        raise DtypeError(f"mask must be a Mask or None, got {shown_arg(mask)}")
    return Mask("blocks", (kinds, block) if mask is None else (kinds, block, mask))


def rule(fn: ModFunction, args: ModArgs = (), twin: Callable[..., torch.Tensor] | None = None) -> Mask:
    """What a @triton.jit function says: fn(score, batch, head, q_index, kv_index, args) -> bool, as `attention` takes mask_mod,
    with args as mask_args.  twin: the same as a Python function of tensors, which `Mask.dense` calls.  Inside torch.compile fn is
    a `tilefold.constant`."""
    if not isinstance(args, tuple):
        raise DtypeError(f"args must be a tuple, got {type(args).__name__}")
    return Mask("rule", (fn, args, twin))


# ---------------------------------------------------------------- what they are made of


def of_window(sides: Window | None, is_causal: bool) -> Mask | None:
    """The mask of the keywords causal and window, None where they cut nothing."""
    left, right = (-1 if side is None else side for side in sides or (-1, -1))
    if is_causal:
        return causal() if left < 0 else window(left, 0)
    return None if (left, right) == (-1, -1) else window(left, right)


def _joined(kind: str, *masks: Any) -> Any:
    if not isinstance(masks[1], Mask):
        return NotImplemented
    parts = [part for mask in masks for part in (mask.args if mask.kind == kind else (mask,))]
    return Mask(kind, tuple(parts))


def _check_integers(name: str, value: object, dims: str) -> None:
    if not isinstance(value, torch.Tensor) or value.dtype != torch.int32:
        raise DtypeError(f"{name} must be an int32 tensor [{dims}], got {shown_arg(value)}")
    if value.dim() != 1:
        raise ShapeError(f"{name} has shape {tuple(value.shape)}, expected [{dims}]")
    if value.shape[0] > 1 and value.stride(0) != 1:
        raise LayoutError(f"{name} must be contiguous, got stride {value.stride(0)}; call {name}.contiguous() first")


def _seen(mask: Mask, places: tuple[torch.Tensor, ...], seq_q: int, seq_k: int) -> torch.Tensor:
    """Where a query sees a key, of any shape that broadcasts to [batch, heads, seq_q, seq_k]; places: batch, head, query, key."""
    i_b, _, i_q, i_k = places
    place = i_q + (seq_k - seq_q)
    kind, args = mask.kind, mask.args
    if kind in ("all", "any", "not"):
        parts = [_seen(part, places, seq_q, seq_k) for part in args]
        found = parts[0]
        for part in parts[1:]:
            found = found & part if kind == "all" else found | part
        return ~found if kind == "not" else found
    if kind == "causal":
        return i_k <= place
    if kind == "window":
        left, right = (seq_q + seq_k if side < 0 else side for side in args)
        return (i_k >= place - left) & (i_k <= place + right)
    if kind == "prefix":
        n = args[0][i_b.flatten()][:, None, None, None] if isinstance(args[0], torch.Tensor) else args[0]
        return (i_k < n) | (i_k <= place)
    if kind == "keys":
        return i_k < args[0][i_b]  # type: ignore[no-any-return]
    if kind == "documents":
        first, last = bounds_of(args[0], seq_k)
        inside = place.clamp(0, max(0, seq_k - 1))
        return (place >= 0) & (i_k >= first[inside]) & (i_k < last[inside])
    if kind == "tensor":
        return args[0]  # type: ignore[no-any-return]
    if kind == "blocks":
        kinds, (block_q, block_k), *inner = args
        found = kinds[:, :, (i_q // block_q).flatten()][..., (i_k // block_k).flatten()]
        return (found == 2) | ((found != 0) & (_seen(inner[0], places, seq_q, seq_k) if inner else True))  # type: ignore[no-any-return]
    _, own, twin = args
    if twin is None:
        raise Unsupported(
            f"{mask!r} has no definition in torch: give rule(fn, args, twin), a Python function of tensors"
        )
    seen: torch.Tensor = twin(None, *places, (*own, seq_q, seq_k))
    return seen


def bounds_of(cu_seqlens: torch.Tensor, seq_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First key and the one after the last, int32 [seq_k] each, of the document that each place is in; 0 where it is in none."""
    place = torch.arange(seq_k, dtype=torch.int32, device=cu_seqlens.device)
    at = torch.searchsorted(cu_seqlens, place, right=True) - 1
    inside = (at >= 0) & (at < cu_seqlens.shape[0] - 1)
    at = at.clamp(0, cu_seqlens.shape[0] - 2)
    return torch.where(inside, cu_seqlens[at], 0), torch.where(inside, cu_seqlens[at + 1], 0)


def shown_arg(value: object) -> str:
    """An argument as it is printed: a tensor by dtype and shape, a function by its name."""
    if isinstance(value, torch.Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} {list(value.shape)}>"
    if isinstance(value, tuple):
        inside = ", ".join(map(shown_arg, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else repr(value)


def identity_of(value: Any) -> Any:
    """A mask or score as what it is compared by: tensors and functions are themselves alone."""
    if isinstance(value, torch.Tensor) or callable(value):
        return type(value), id(value)
    if isinstance(value, tuple):
        return tuple(map(identity_of, value))
    return (value.kind, identity_of(value.args)) if hasattr(value, "kind") else (type(value), value)


def _inside(mask: Mask, kind: str) -> str:
    """A part as it stands in an expression of that kind: & binds closer than |, ~ closer than both."""
    loose = mask.kind == "any" or (mask.kind == "all" and kind == "not")
    return f"({mask!r})" if loose and mask.kind != kind else repr(mask)
