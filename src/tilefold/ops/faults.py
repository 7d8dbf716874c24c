"""Wrong values of index tensors, found by kernels: the note that they leave on each device, and the sentence that it becomes.

`check="device"`: kernels follow no value out of a tensor, and note the first that would have led there.  Nobody waits for them:
`last_fault` reads the note, when it is asked.  What is in the note: device.fault.
"""

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import DeviceError, DtypeError, Unsupported, ValueRangeError
from .device import interpreting
from .watch import is_transformed, is_watched

VARIABLE = "TILEFOLD_CHECK"
DEFAULT = os.environ.get(VARIABLE, "")  # read once, when tilefold is imported
_DEFAULTS: dict[str, Any] = {"": False, "0": False, "1": True, "device": "device"}

Mode = bool | str
WORDS = 16  # of a note; int64
_NOTES: dict[int, torch.Tensor] = {}

# In the order of their numbers in notes: append only.
OPERATIONS = (
    "attention_kvcache",
    "attention_shared_prefix",
    "kvcache_append",
    "attention_varlen",
    "sparse_attention",
    "sparse_attention_varlen",
    "sparse_attention_paged",
    "apply_rotary",
    "flash_attn_with_kvcache",
    "flash_attn_varlen_func",
)
# As device.fault numbers them, from 1.
ARGUMENTS = (
    "cache_seqlens",
    "cache_leftpad",
    "cache_batch_idx",
    "block_table",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "index.counts",
    "index.indices",
    "index.block_sizes",
    "index.query_sizes",
    "cache_seqlens",
)
_OTHER_NAMES = {
    ("kvcache_append", "cu_seqlens_q"): "cu_seqlens",
    ("kvcache_append", "max_seqlen_q"): "max_seqlen",
    ("apply_rotary", "cu_seqlens_q"): "cu_seqlens",
    ("apply_rotary", "max_seqlen_q"): "max_seqlen",
    ("flash_attn_varlen_func", "cache_seqlens"): "seqused_k",
    ("flash_attn_varlen_func", "cache_leftpad"): "leftpad_k",
    ("sparse_attention_varlen", "max_seqlen_q"): "index.seq_q",
    ("sparse_attention_varlen", "max_seqlen_k"): "index.seq_k",
}


class Watch(NamedTuple):
    """A call that is watched on the device: the operation's number; the fewest keys of a sequence; where its table lies in the
    caller's: the first column, and how many there are (0: as many as it has)."""

    operation: int
    fewest: int = 0
    shift: int = 0
    columns: int = 0


@dataclass(frozen=True)
class Fault:
    """A value that a kernel did not follow, the first since the last look; `print` says it in a sentence.

    operation, argument: what was called, and which of its tensors holds the value.
    position: where in that tensor.
    value: what stands there; for max_seqlen_q and its kin the length of sequence `position`.
    low, high: what is accepted.
    count: how many wrong values kernels met since the last look, those of calls that came later and of replays too.
    message: the sentence, in the words of the ValueRangeError that check=True raises."""

    operation: str
    argument: str
    position: tuple[int, ...]
    value: int
    low: int
    high: int
    count: int
    message: str

    def __str__(self) -> str:
        others = "" if self.count == 1 else f" (the first of {self.count} faults)"
        return f"{self.operation}: {self.message}{others}"


# ---------------------------------------------------------------- asking for it


def mode_of(check: object) -> Mode:
    """What a call's `check` asks for: False, True (read on the host, raise) or "device"; None: what the environment says."""
    if check is None:
        found = _DEFAULTS.get(DEFAULT)
        if found is None:
            raise ValueRangeError(f"{VARIABLE} must be 0, 1 or device, got {DEFAULT!r}")
        if found is True and torch.compiler.is_compiling():
            raise Unsupported(
                f"{VARIABLE}=1 reads index tensors on the host, which torch.compile cannot: use {VARIABLE}=device"
            )
        return found  # type: ignore[no-any-return]
    if isinstance(check, str):
        if check != "device":
            raise ValueRangeError(f"check must be a bool or 'device', got {check!r}")
        return check
    if not isinstance(check, bool):
        raise DtypeError(f"check must be a bool or 'device', got {check!r}")
    if check and torch.compiler.is_compiling():
        raise Unsupported("check=True reads index tensors on the host: call it outside torch.compile")
    return check


def mode_for(check: object, offsets: object) -> Mode:
    """`mode_of` of a call with packed sequences.  True where nothing is asked for and the offsets lie on the CPU: reading them
    costs nothing there."""
    if check is not None or _DEFAULTS.get(DEFAULT, True):
        return mode_of(check)
    readable = isinstance(offsets, torch.Tensor) and offsets.is_cpu and type(offsets) is torch.Tensor
    return readable and not (torch.compiler.is_compiling() or is_transformed() or is_watched((offsets,)))


def watch_of(operation: str) -> Watch:
    return Watch(OPERATIONS.index(operation) + 1)


def asked(check: object, operation: str) -> bool | Watch:
    """A call's `check`, or the mode that it is, as the functions of `ops.cache` take it; None: the environment alone says."""
    if check is False or (check is None and not DEFAULT):
        return False
    mode = mode_of(check)
    return watch_of(operation) if mode == "device" else bool(mode)


def require_kernels(device: torch.device) -> None:
    """DeviceError where functions of torch serve a device instead of kernels: these leave no notes."""
    from ..plan.architecture import architecture_at

    found = architecture_at(device.type, interpreting())
    if found is not None and found.planner:
        raise DeviceError(
            f"check='device' has kernels look, on a GPU or in Triton's interpreter, but tensors are on {device}: check=True "
            "looks at them there"
        )


def note_of(device: torch.device) -> torch.Tensor:
    """The device's note, at the same address for good.  Its first use on a device makes it, and waits."""
    index = _index(device)
    note = _NOTES.get(index)
    if note is None:
        if index >= 0 and torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                "check='device' for the first time on this device, while a CUDA graph is captured: what faults are noted in must "
                "outlive the graph; call it, or tilefold.last_fault(), once before the capture"
            )
        note = _NOTES[index] = torch.zeros(WORDS, dtype=torch.int64, device=device)
        if index >= 0:
            torch.cuda.synchronize(device)  # other streams are to find zeros
    return note


def _index(device: torch.device) -> int:
    """-1: the CPU, where the interpreter runs."""
    if device.type == "cpu":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


# ---------------------------------------------------------------- reading it


def last_fault(device: torch.device | str | int | None = None, *, clear: bool = True) -> Fault | None:
    """The first value of an index tensor that a kernel under check="device" did not follow since the last look, None if there is
    none.  Waits for all work on the device.

    device: default the current GPU (in the interpreter the CPU).  clear: the next look is for what comes after this one.

    Not while a CUDA graph is being captured: Unsupported."""
    where = _device(device)
    if where.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise Unsupported("last_fault waits for the device, which a CUDA graph that is being captured cannot")
        torch.cuda.synchronize(where)
    note = note_of(where)
    words = note.tolist()
    if words[1] == 0:
        return None
    if clear:
        note.zero_()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
    return _fault(words)


def _device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        if interpreting() or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _fault(words: list[int]) -> Fault:
    code, count, flat, outer, middle, inner, value, low, high, more = words[:10]
    operation, number = OPERATIONS[code // 64 - 1], code % 64
    name = ARGUMENTS[number - 1]
    argument = _OTHER_NAMES.get((operation, name), name)
    position: tuple[int, ...] = ()
    for size in (inner, middle, outer):
        if size:
            flat, position = flat // size, (flat % size, *position)
    position = (flat, *position)
    sentence = _sentence(operation, argument, number, position, value, low, high, more)
    return Fault(operation, argument, position, value, low - more, high - more, count, sentence)


_TAILS = {
    "index.counts": ", the capacity of the lists",
    "index.indices": ", the last KV block",
}


def _sentence(
    operation: str, argument: str, number: int, position: tuple[int, ...], value: int, low: int, high: int, more: int
) -> str:  # fmt: skip
    """As the checks on the host say it."""
    name, place = ARGUMENTS[number - 1], ", ".join(map(str, position))
    if number == 13:
        return f"{argument}[{place}] is {value}: {more} more tokens do not fit into {high} rows"
    if name in ("max_seqlen_q", "max_seqlen_k"):
        return too_long(operation, name, position[0], value, high)
    if name.startswith("cu_seqlens"):
        return f"{argument} must ascend from 0 to at most {high}, got {value} at {place}"
    if name == "cache_seqlens" and operation == "sparse_attention_paged":
        return f"{argument}[{place}] is {value}, expected 0 to {high}, the keys that index counts"
    if name == "cache_seqlens" and operation == "attention_shared_prefix" and value + more < low:
        return f"{argument}[{place}] is {value}, expected at least {low - more}: the prefix and its own queries"
    if name == "cache_seqlens" and operation == "attention_shared_prefix":
        return f"{argument}[{place}] is {value}, the cache has room for {high - more} keys"
    if name == "cache_seqlens":
        return f"{argument}[{place}] leads to {value + more} keys, there is room for {high}"
    if name == "cache_leftpad":
        return f"{argument}[{place}] is {value}, expected at least 0"
    return f"{argument}[{place}] is {value}, expected {low} to {high}{_TAILS.get(argument, '')}"


def name_in(operation: str, argument: str) -> str:
    """What an operation calls one of ARGUMENTS."""
    return _OTHER_NAMES.get((operation, argument), argument)


def too_long(operation: str, name: str, sequence: int, length: int, longest: int) -> str:
    """A packed sequence has more rows than the call says; name: "max_seqlen_q" or "max_seqlen_k"."""
    argument, offsets = (name_in(operation, n) for n in (name, f"cu_seqlens_{name[-1]}"))
    return f"{argument} must be at least {length}, the length of sequence {sequence} in {offsets}, got {longest}"
