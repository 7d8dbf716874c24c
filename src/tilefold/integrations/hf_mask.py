"""The mask function for transformers: from its description of a mask to what tilefold takes, dense only if it must be.

Transformers describes a mask by composed functions of (batch, head, query, key).  Those of known parts (causal, sliding window,
packed sequences) become a `Visible`; for others transformers' own dense boolean mask is made, which is right for all."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import masking_utils

from ..errors import Unsupported
from ..ops.route import STACK
from .visible import Rows, Visible


class Rule(NamedTuple):
    """What a composed mask function says.

    causal: keys up to the query only.  left, right: keys at most so many places before and after it, None: any.
    documents: [batch, tokens] integers, the same where tokens belong to the same packed sequence."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    documents: torch.Tensor | None = None

    def __and__(self, other: "Rule") -> "Rule":
        pairs = (self.left, other.left), (self.right, other.right)
        left, right = (min((side for side in pair if side is not None), default=None) for pair in pairs)
        documents = self.documents if other.documents is None else other.documents
        return Rule(self.causal or other.causal, left, right, documents)

    @property
    def window(self) -> tuple[int, int] | None:
        if self.left is None and self.right is None:
            return None
        return tuple(-1 if side is None else side for side in (self.left, self.right))  # type: ignore[return-value]


def read_rule(function: Callable[..., Any]) -> Rule | None:
    """The rule of a mask function of transformers; None if it has a part that is not known."""
    if function is masking_utils.causal_mask_function:
        return Rule(causal=True)
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return Rule()
    if torch.compiler.is_compiling() or getattr(function, "__module__", None) != masking_utils.__name__:
        return None  # what a closure holds cannot be asked for inside a compiled function
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return None
    held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    match function.__qualname__.split(".")[0]:
        case "and_masks":
            return _conjunction(held["mask_functions"])
        case "sliding_window_overlay":
            return Rule(left=held["sliding_window"] - 1)
        case "sliding_window_bidirectional_overlay":
            return Rule(left=held["sliding_window"], right=held["sliding_window"])
        case "packed_sequence_mask_function":
            return Rule(documents=held["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence":  # the same distances: positions only start anew in every sequence
            return read_rule(held["mask_function"])
    return None


def _conjunction(functions: tuple[Callable[..., Any], ...]) -> Rule | None:
    found = Rule()
    for function in functions:
        rule = read_rule(function)
        if rule is None or (rule.documents is not None and found.documents is not None):
            return None
        found = found & rule
    return found


def make_mask(
    batch_size: int, kv_length: int, mask_function: Callable[..., Any], **facts: Any
) -> torch.Tensor | Visible | None:
    """The mask of one kind of layer in one forward pass.

    Args:
        batch_size, kv_length: of the mask; mask_function: what it shows; facts: the other keyword arguments that transformers
            gives to mask functions: `q_length` and `q_offset`, or in older versions `cache_position`; `kv_offset`;
            `attention_mask`, the padding as [batch, tokens] bool; `allow_is_causal_skip` and `allow_is_bidirectional_skip`.

    Returns:
        None where the layer's own `is_causal` says all; a bool tensor [batch, 1, queries, keys], true where visible (with
        stride 0 along the queries if it is only padding); or a `Visible`.

    With one query the host reads no value of the device, nor inside torch.compile or while a CUDA graph is captured.  Else there
    is one, to find out whether there is padding at all, and one each for a static cache and for packed sequences."""
    facts |= {"batch_size": batch_size, "kv_length": kv_length, "mask_function": mask_function}
    rule = read_rule(mask_function)
    if STACK:
        return _sharded(rule, facts)
    older = "cache_position" in facts
    q_length = facts["cache_position"].shape[0] if older else facts["q_length"]
    if rule is None or _must_be_tensor(rule, facts, q_length, older):
        return _dense(rule, facts)
    end = _end(rule, facts, q_length, older)
    live, offset = facts.get("attention_mask"), facts.get("kv_offset", 0)
    if q_length == 1 and (
        live is not None or rule.documents is not None or isinstance(end, torch.Tensor) or end != kv_length
    ):
        if torch.compiler.is_compiling() or not _is_step(rule, facts, end):
            return _dense(rule, facts)  # one row, as many bytes as keys; of one shape at every step of a static cache
        return _step(facts, end)
    if isinstance(end, torch.Tensor):
        if not _readable(end):
            return _dense(rule, facts)
        end = int(end)
    if not (q_length <= end <= kv_length if rule.causal else end == kv_length):
        return _dense(rule, facts)
    if live is not None:
        if isinstance(offset, torch.Tensor) or live.ndim != 2:
            return _dense(rule, facts)
        live = _padding(live, offset, end)
        if _readable(live) and bool(live.all()):
            live = None
    rows = None
    if rule.documents is not None:
        if live is not None or not _readable(rule.documents) or q_length != kv_length:
            return _dense(rule, facts)
        rows = _rows(rule.documents, batch_size)
    shape = (batch_size, 1, q_length, kv_length)
    if rule.window is None and rows is None and end == kv_length:
        # A decoder made to see both ways has layers that do not know it, and take None for causal.
        if live is None and (rule.causal or getattr(facts.get("config"), "is_causal", True)):
            return None
        if not rule.causal and live is not None:
            return live[:, None, None, :].expand(shape)
    return Visible(shape, rule.causal, rule.window, end, live, rows)


def _is_step(rule: Rule, facts: dict[str, Any], end: Any) -> bool:
    """One query that sees every key before it, of a model that does not read the mask itself: a step of generation."""
    live, offset = facts.get("attention_mask"), facts.get("kv_offset", 0)
    simple = rule.causal and rule.window is None and rule.documents is None
    static = isinstance(end, torch.Tensor) or end != facts["kv_length"]  # of these no version allows the skip
    simple = simple and (static or "cache_position" in facts or facts.get("allow_is_causal_skip", True))
    return simple and not isinstance(offset, torch.Tensor) and offset == 0 and (live is None or live.ndim == 2)


def _step(facts: dict[str, Any], end: Any) -> Visible:
    """What the query of a step sees; the shape is the same at every step of a static cache, and nothing is read by the host."""
    batch, room, live = facts["batch_size"], facts["kv_length"], facts.get("attention_mask")
    keys = None if live is None else _padding(live, 0, room)
    lengths = None
    if isinstance(end, torch.Tensor):
        lengths = end.reshape(1).to(torch.int32).repeat(batch)
    elif end != room:
        device = facts.get("device", None if live is None else live.device)
        lengths = torch.full((batch,), end, dtype=torch.int32, device=device)
    return Visible((batch, 1, 1, room), True, None, room, keys, None, lengths)


def _sharded(rule: Rule | None, facts: dict[str, Any]) -> Visible | None:
    """Inside context_parallel, where a row is a part of the tokens: the rule alone, which the sharding applies to all of them.

    What looks like packed sequences, positions that do not go on by one, are the pieces that this rank has."""
    if rule is None:
        advice = "; compile the layers instead of the model" if torch.compiler.is_compiling() else ""
        raise Unsupported(f"this model's mask inside context_parallel: served are causal and sliding windows{advice}")
    live = facts.get("attention_mask")
    if live is not None and not (_readable(live) and bool(live.all())):
        raise Unsupported(
            "padding inside context_parallel: leave attention_mask out, and pack sequences instead (shard takes their offsets)"
        )
    length = facts["cache_position"].shape[0] if "cache_position" in facts else facts["q_length"]
    if length != facts["kv_length"]:
        raise Unsupported(
            f"{facts['kv_length']} keys for {length} queries inside context_parallel: pass use_cache=False, no cache is served"
        )
    return Visible((facts["batch_size"], 1, length, length), rule.causal, rule.window, length, None, None)


def _must_be_tensor(rule: Rule, facts: dict[str, Any], q_length: int, older: bool) -> bool:
    """Whether the model reads the mask itself.

    It says so by the skip that it does not allow.  Older versions forbid the causal one for static caches too, and all do for
    packed sequences, where no model reads the mask."""
    if not rule.causal:
        return not facts.get("allow_is_bidirectional_skip", older)
    return not (older or rule.documents is not None or q_length == 1 or facts.get("allow_is_causal_skip", True))


def _end(rule: Rule, facts: dict[str, Any], q_length: int, older: bool) -> Any:
    """One past the last query's key: an int, or a tensor of one element where only the device knows it."""
    if not rule.causal and rule.window is None:
        return facts["kv_length"]
    offset = facts.get("kv_offset", 0)
    if not older:
        return facts.get("q_offset", 0) + q_length - offset
    if facts.get("allow_is_causal_skip", True) or rule.documents is not None:
        return facts["kv_length"]  # the cache grows: its last key is the last query's
    return facts["cache_position"][-1] + 1 - offset


def _padding(live: torch.Tensor, offset: int, end: int) -> torch.Tensor:
    """[batch, end] bool of the keys from `offset` on; places that the given mask does not reach are not visible."""
    live = live[:, offset : offset + end].bool()
    missing = end - live.shape[1]
    return torch.nn.functional.pad(live, (0, missing)) if missing > 0 else live


def _rows(documents: torch.Tensor, batch_size: int) -> Rows:
    """Where sequences begin, over the tokens of all rows of the batch."""
    documents = documents.expand(batch_size, -1)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = first.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(starts, (0, 1), value=documents.numel()).to(torch.int32)
    return Rows(offsets, int(offsets.diff().max()))


def _readable(tensor: torch.Tensor) -> bool:
    """Whether the host may wait for a value of this tensor."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _dense(rule: Rule | None, facts: dict[str, Any]) -> torch.Tensor:
    """The boolean mask [batch, 1, queries, keys], true where visible; nothing is read by the host.

    Transformers' own function would do for all, but some versions of it read where a sliding cache begins, at every token."""
    mask: torch.Tensor
    if rule is None or rule.documents is not None:
        mask = masking_utils.sdpa_mask(
            **(facts | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        )
        return mask
    live, at = facts.get("attention_mask"), facts.get("cache_position")
    device = at.device if at is not None else facts.get("device", None if live is None else live.device)
    if at is None:
        at = torch.arange(facts["q_length"], device=device) + facts.get("q_offset", 0)
    keys = torch.arange(facts["kv_length"], device=device) + facts.get("kv_offset", 0)
    distance = at[:, None] - keys  # how far a key lies before its query
    mask = torch.ones_like(distance, dtype=torch.bool)
    if rule.causal:
        mask = mask & (distance >= 0)
    if rule.left is not None:
        mask = mask & (distance <= rule.left)
    if rule.right is not None:
        mask = mask & (distance >= -rule.right)
    if live is not None:
        seen = live[:, keys.clamp(max=live.shape[1] - 1)].bool() & (keys < live.shape[1])
        mask = mask & seen[:, None, :]
        return mask[:, None]
    return mask.expand(facts["batch_size"], 1, -1, -1)
