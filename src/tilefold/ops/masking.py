"""From masks and scores as values to what kernels take: the one place that knows both.

A mask becomes at most four things, all of which have to hold:

    window     the band: tiles outside it are skipped
    mask       a bool tensor, an operand of the kernel
    mask_mod   a function, or the `Rules` of several, with mask_args: looked at for each score
    a band     the first of the `Rules`, where there is no window and the kernels have its kind: a prefix

What is joined by & is taken apart: bands meet in one window, tensors in one tensor.  What is under | or ~ becomes rules.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..errors import DeviceError, DtypeError, ShapeError, Unsupported, ValueRangeError
from ..masks import Mask, bounds_of, of_window, rule
from ..scores import Score
from ..types import TILE, Constant, Layout, ModArgs, Rule, Rules
from .call import UNBOUNDED, window_of
from .flat import value_of
from .source import Packed

BAND = ("causal", "window")
NAMES = {"softcap": "softcap", "alibi": "alibi_slopes", "bias": "bias", "rule": "score_mod"}


class Terms(NamedTuple):
    """The keywords of `attention` that masks and scores stand for, as given or as spelled out."""

    causal: Any = False
    window: Any = None
    softcap: Any = 0.0
    alibi_slopes: Any = None
    bias: Any = None
    mask: Any = None
    score_mod: Any = None
    score_args: ModArgs = ()
    mask_mod: Any = None
    mask_args: ModArgs = ()
    score_grad: Any = None


class Sizes(NamedTuple):
    """Of the call that a mask is for."""

    batch: int
    heads: int
    seq_q: int
    seq_k: int
    device: torch.device


def spelled(
    q: Any, k: Any, given: Terms, score: Score | None, layout: Layout = "bshd", packed: Packed | None = None
) -> Terms:
    """The keywords with the masks and scores in them as kernels take them.  Raises DtypeError, ShapeError, DeviceError,
    ValueRangeError or Unsupported, naming what is wrong."""
    if score is not None:
        given = _with_score(given, score)
    if not isinstance(given.mask, Mask):
        return given
    where = _sizes(q, k, layout, packed), packed is not None
    alone = given.mask_mod is None and given.mask_args == () and isinstance(given.causal, bool)
    if torch.compiler.is_compiling() or not alone:
        return given._replace(**_split(_parts(given), *where))
    # Of a mask that many layers share: of the last sizes that it was used for.
    key = where, given.causal, repr(given.window), _versions(given.mask) if _computes(given.mask) else ()
    kept = given.mask.__dict__.get("_kept")
    if kept is None or kept[0] != key or key[-1] == ANEW:
        with torch.inference_mode(False):  # so that torch counts changes of what is worked out: there are none
            kept = key, _split(_parts(given), *where)
        given.mask.__dict__["_kept"] = kept
    return given._replace(**kept[1])


ANEW = (None,)  # versions of tensors whose changes nobody counts


def _versions(mask: Mask) -> tuple[Any, ...]:
    """Where the tensors of a mask lie, and how often torch has changed each in place; ANEW where what is worked out from them
    must not be kept: nothing counts, or a CUDA graph that is captured has to work it out again."""
    tensors = list(_tensors(mask.args))
    if any(t.is_inference() for t in tensors):
        return ANEW
    if any(t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing():
        return ANEW
    return tuple([(t.data_ptr(), t._version) for t in tensors])


def _tensors(args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, tuple | Mask):
            yield from _tensors(arg.args if isinstance(arg, Mask) else arg)


def _computes(mask: Mask) -> bool:
    """Whether a mask becomes tensors that are worked out from those it holds, whose numbers may change from call to call."""
    if mask.kind == "documents":
        return True
    parts = [part for part in mask.args if isinstance(part, Mask)]
    return sum(part.kind == "tensor" for part in parts) > 1 or any(map(_computes, parts))


def spelled_for_lists(
    q: Any, given: Terms, score: Score | None, sizes: tuple[int, int, int], layout: Layout, packed: bool
) -> Terms:
    """`spelled` for lists of blocks, which have causal as their only band and no operands: a window and tensors become rules.
    sizes: batch, and queries and keys of the index."""
    if score is not None:
        given = _with_score(given, score)
        for name in ("alibi_slopes", "bias"):
            if getattr(given, name) is not None:
                raise Unsupported(
                    f"{name} of a score over lists of blocks: these have softcap and a rule, which may add anything"
                )
    if given.mask is None:
        return given
    if not isinstance(given.mask, Mask):
        raise DtypeError(
            f"mask must be a tilefold.Mask or None over lists of blocks, got {type(given.mask).__name__}; a tensor as "
            "masks.tensor(mask)"
        )
    room = None
    if isinstance(q, torch.Tensor) and q.dim() in (3, 4):
        room = Sizes(sizes[0], q.shape[1 if packed or layout == "bhsd" else 2], *sizes[1:], q.device)
    return given._replace(**_split(_parts(given), room, packed, operands=False))


def spelled_for_cache(q: Any, given: Terms, score: Score | None, sizes: tuple[int, int, int]) -> Terms:
    """`spelled` for the kernels of caches, which have bands, one tensor, softcap and ALiBi.  sizes: batch, queries, keys."""
    if score is not None:
        given = _with_score(given, score)
    if isinstance(given.mask, Mask):
        heads = q.shape[-2] if isinstance(q, torch.Tensor) and q.dim() > 1 else 1
        room = Sizes(sizes[0], heads, *sizes[1:], q.device) if isinstance(q, torch.Tensor) else None
        given = given._replace(**_split(_parts(given), room, False))
    for name, value in (("bias", given.bias), ("score_mod", given.score_mod), ("mask_mod", given.mask_mod)):
        if value is not None:
            what = "its score" if name != "mask_mod" else "its mask"
            raise Unsupported(
                f"attention_kvcache takes causal, windows and one tensor as masks, softcap and ALiBi as scores; {what} needs "
                f"{name}.  Keys that are not there are cache_seqlens' and cache_leftpad's"
            )
    return given


def holds_tensor(mask_mod: Any) -> bool:
    """Whether a rule reads a mask by places of queries and keys."""
    return isinstance(mask_mod, Rules) and any(rule.function == "keep" for rule in mask_mod.rules)


def named_terms(
    options: dict[str, Any], q: Any, k: Any, layout: Layout = "bshd", packed: Packed | None = None
) -> dict[str, Any]:
    """`spelled` for keywords in a dict, which it leaves alone."""
    score = options.get("score")
    rest = {name: value for name, value in options.items() if name != "score"}
    if score is None and not isinstance(rest.get("mask"), Mask):
        return rest
    given = Terms(**{name: rest[name] for name in Terms._fields if name in rest})
    made = spelled(q, k, given, score, layout, packed)
    return rest | {name: value for name, value in made._asdict().items() if name in rest or value is not None}


# ---------------------------------------------------------------- scores


def _with_score(given: Terms, score: Any) -> Terms:
    if not isinstance(score, Score):
        raise DtypeError(f"score must be a tilefold.Score or None, got {type(score).__name__}")
    for name, off in Terms()._asdict().items():
        value = getattr(given, name)
        if name in (*NAMES.values(), "score_args", "score_grad") and not (value is off or value == off):
            raise ValueRangeError(
                f"score and {name} were given: one of the two says what happens to scores.  "
                f"Join both as one value, such as scores.softcap(30.0).then(scores.bias(bias))"
            )
    made: dict[str, Any] = {}
    for kind, args in score.steps:
        made[NAMES[kind]] = args[0]
        if kind == "rule":
            made |= {"score_args": args[1], "score_grad": args[2]}
    return given._replace(**made)


# ---------------------------------------------------------------- masks


def _sizes(q: Any, k: Any, layout: Layout, packed: Packed | None) -> Sizes | None:
    """None for tensors that the call's own checks refuse."""
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor)):
        return None
    if packed is not None:
        if not isinstance(packed.cu_q, torch.Tensor) or packed.cu_q.dim() != 1 or q.dim() != 3:
            return None
        return Sizes(packed.cu_q.shape[0] - 1, q.shape[1], packed.max_q, packed.max_k, q.device)
    if q.dim() != 4 or k.dim() != 4:
        return None
    rows, heads = (1, 2) if layout == "bshd" else (2, 1)
    return Sizes(q.shape[0], q.shape[heads], q.shape[rows], k.shape[rows], q.device)


def _split(parts: list[Mask], sizes: Sizes | None, packed: bool, operands: bool = True) -> dict[str, Any]:
    """What masks that all have to hold become.  operands: the kernels take windows and a tensor."""
    left, right = -1, -1
    tensors: list[torch.Tensor] = []
    rest: list[Mask] = []
    for part in parts:
        if part.kind in BAND:
            sides = (-1, 0) if part.kind == "causal" else part.args
            left, right = (_narrower(a, b) for a, b in zip((left, right), sides, strict=True))
        elif part.kind == "tensor":
            tensors += part.args
        else:
            rest.append(part)
    if right == 0:  # what no query sees of a prefix is cut anyway
        rest = [part for part in rest if part.kind != "prefix"]
    rest.sort(key=lambda part: part.kind != "prefix")  # the first is the band, where there is no window
    mask, others = _one_tensor(tensors, sizes) if operands else (None, tensors)
    rest += [Mask("tensor", (t,)) for t in others]
    only_causal = not operands and (left, right) == (-1, 0)
    if not operands and not only_causal and (left, right) != (-1, -1):
        rest.append(Mask("window", (left, right)))
    mask_mod, mask_args = _rules(rest, sizes, packed)
    return {
        "causal": only_causal,
        "window": None if (left, right) == (-1, -1) or not operands else (left, right),
        "mask": mask,
        "mask_mod": mask_mod,
        "mask_args": mask_args,
    }


def _parts(given: Terms) -> list[Mask]:
    """The masks that all have to hold: those of the value, and of the keywords beside it."""
    masks = [given.mask]
    window_of(tuple(given.window) if isinstance(given.window, list) else given.window, given.causal)
    band = of_window(given.window, given.causal)
    masks += [band] if band is not None else []
    masks += [rule(given.mask_mod, given.mask_args)] if given.mask_mod is not None else []
    if given.mask_mod is None and given.mask_args:
        raise ValueRangeError("mask_args were given without mask_mod")
    return [part for mask in masks for part in (mask.args if mask.kind == "all" else (mask,))]


def _narrower(a: int, b: int) -> int:
    return max(a, b) if min(a, b) < 0 else min(a, b)


def _one_tensor(tensors: list[torch.Tensor], sizes: Sizes | None) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The operand, and those that would make it larger than the largest of them: they become rules."""
    if len(tensors) < 2 or sizes is None:
        return (tensors[0] if tensors else None), tensors[1:]
    for t in tensors:
        _check_mask(t, sizes)
    tensors = sorted(tensors, key=torch.Tensor.numel, reverse=True)
    whole, others = tensors[0], []
    for t in tensors[1:]:
        if all(a == b or a == 1 for a, b in zip(t.shape, whole.shape, strict=True)):
            whole = torch.logical_and(whole, t)
        else:
            others.append(t)
    return whole, others


def _rules(parts: list[Mask], sizes: Sizes | None, packed: bool) -> tuple[Any, ModArgs]:
    """(mask_mod, mask_args) of masks that all have to hold."""
    if not parts:
        return None, ()
    args: list[Any] = []
    trees = [_tree(part, args, sizes, packed) for part in parts]
    if len(trees) == 1 and type(trees[0]) is Rule and not isinstance(trees[0].function, str):
        return trees[0].function, tuple(args)
    made = Rules(("all", *trees))
    if not torch.compiler.is_compiling():
        _check_names(made)
        return _kept(made), tuple(args)
    if any(not isinstance(each.function, str | Constant) for each in made.rules):
        raise Unsupported(
            "inside torch.compile, functions of masks.rule have to be passed as tilefold.constant(...), made outside it"
        )
    return Constant(made.text), tuple(args)


@functools.lru_cache(maxsize=4096)
def _kept(made: Rules) -> Rules:
    """Always the same object for the same rules: calls are told apart by it."""
    return made


def _tree(part: Mask, args: list[Any], sizes: Sizes | None, packed: bool) -> Any:
    """A mask as a tree of `Rules`, whose args are added to those given."""
    if part.kind in ("all", "any", "not"):
        return (part.kind, *[_tree(each, args, sizes, packed) for each in part.args])
    if part.kind == "blocks":
        own = _table(part, sizes)
        kind = "_tiles" if all(size % TILE == 0 for size in part.args[1]) else ""
        listed = Rule(f"listed{kind}", len(own))
        if len(part.args) == 2:
            args += own
            return listed
        args += own + own
        return ("any", Rule(f"whole{kind}", len(own)), ("all", listed, _tree(part.args[2], args, sizes, packed)))
    function, own = _rule(part, sizes, packed)
    args += own
    return Rule(function, len(own))


def _rule(part: Mask, sizes: Sizes | None, packed: bool) -> tuple[Any, ModArgs]:
    """The name of a function in device.mods, or the caller's function, and its args."""
    kind, args = part.kind, part.args
    if kind == "rule":
        return (args[0] if torch.compiler.is_compiling() else value_of(args[0])), args[1]
    if kind == "causal":
        return "causal", ()
    if kind == "window":
        return "window", tuple(UNBOUNDED if side < 0 else side for side in args)
    if kind == "documents":
        if packed:
            raise Unsupported(
                "documents in attention_varlen: sequences are packed there, each document is one; in attention they are masked"
            )
        _check_device("cu_seqlens", args[0], sizes)
        return "between", () if sizes is None else bounds_of(args[0], sizes.seq_k)
    if kind == "tensor":
        _check_mask(args[0], sizes)
        strides = zip(args[0].shape[:3], args[0].stride(), strict=False)
        return "keep", (args[0], *(0 if size == 1 else stride for size, stride in strides), args[0].stride(3))
    name = "lengths" if kind == "keys" else "n"
    if isinstance(args[0], torch.Tensor):
        _check_device(name, args[0], sizes)
        if sizes is not None and args[0].shape[0] != sizes.batch:
            raise ShapeError(f"{name} has shape {tuple(args[0].shape)}, expected [{sizes.batch}]: one entry a sequence")
    return ("prefix_each" if kind == "prefix" and isinstance(args[0], torch.Tensor) else kind), args


def _table(part: Mask, sizes: Sizes | None) -> ModArgs:
    """The args of the rules of a table of blocks."""
    kinds, block = part.args[:2]
    if sizes is not None:
        _check_device("kinds", kinds, sizes)
        rows, columns = (-(-n // size) for n, size in zip(sizes[2:4], block, strict=True))
        wanted = ((1, sizes.batch), (1, sizes.heads), (rows,), (columns,))
        if any(size not in allowed for size, allowed in zip(kinds.shape, wanted, strict=True)):
            raise ShapeError(
                f"kinds of a mask has shape {tuple(kinds.shape)}, expected [{sizes.batch} or 1, {sizes.heads} or 1, {rows}, "
                f"{columns}] for blocks of {block[0]} queries and {block[1]} keys"
            )
    strides = (0 if size == 1 else stride for size, stride in zip(kinds.shape, kinds.stride(), strict=True))
    return kinds, *strides, *block


def _check_device(name: str, t: torch.Tensor, sizes: Sizes | None) -> None:
    if sizes is not None and t.device != sizes.device:
        raise DeviceError(f"{name} of a mask is on {t.device}, but q is on {sizes.device}")


def _check_mask(t: torch.Tensor, sizes: Sizes | None) -> None:
    if sizes is None:
        return
    _check_device("tensor", t, sizes)
    wanted = ((1, sizes.batch), (1, sizes.heads), (1, sizes.seq_q), (sizes.seq_k,))
    if any(size not in allowed for size, allowed in zip(t.shape, wanted, strict=True)):
        raise ShapeError(
            f"a tensor of a mask has shape {tuple(t.shape)}, expected [{sizes.batch} or 1, {sizes.heads} or 1, "
            f"{sizes.seq_q} or 1, {sizes.seq_k}]"
        )


def _check_names(made: Rules) -> None:
    """Triton tells functions apart by module and name: it would call the first of two that share them."""
    seen: dict[tuple[str, str], Any] = {}
    for function in (each.function for each in made.rules if not isinstance(each.function, str)):
        inner = getattr(function, "fn", function)
        name = (getattr(inner, "__module__", ""), getattr(inner, "__qualname__", ""))
        if seen.setdefault(name, function) is not function:
            raise Unsupported(
                f"two functions of this mask are called {'.'.join(name)}, and Triton tells functions apart by their names: "
                "give one of them another name, or write one function that takes args"
            )
