"""tilefold as a flash attention of torch: the functions that its dispatcher then calls, in place of the kernels for CUDA.

Three operators are replaced: the lower ones, which scaled_dot_product_attention, varlen_attn and nested tensors call.  What torch
does around them stays torch's: the choice of a backend, head dims padded to 8, autograd, fake kernels."""

import contextlib
import functools
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import attention as registry

from ..errors import TilefoldError, Unsupported
from ..ops.backward.attention_backward import backward, differentiable
from ..ops.call import Call
from ..ops.dense.attention import forward, prepare
from ..ops.records import recorded
from ..ops.source import Packed, facts_of

Tensor = torch.Tensor
Maybe = torch.Tensor | None
FORWARD, INPLACE, BACKWARD = (
    f"_flash_attention_{name}" for name in ("forward", "forward_no_dropout_inplace", "backward")
)
FLASH = int(registry.SDPBackend.FLASH_ATTENTION)  # type: ignore[call-overload]
SEEDS = (1 << 63) - 1


@dataclass
class Calls:
    """How many calls of torch's operators ran here, and how many its own kernels took, by reason.

    `print` it; `clear()` begins anew."""

    forward: int = 0
    backward: int = 0
    kept: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        self.forward = self.backward = 0
        self.kept.clear()

    def __str__(self) -> str:
        kept = "".join(f"\n  {count} {reason}" for reason, count in self.kept.most_common())
        return f"tilefold: {self.forward} forward, {self.backward} backward; torch's own: {self.kept.total()}{kept}"


CALLS = Calls()
"""Of this process."""


class Handle:
    """What is in place of torch's kernels, until `remove()`."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.originals: dict[str, Any] = {}  # torch's own kernels, where it has some for the key
        for name in (FORWARD, INPLACE, BACKWARD):
            with contextlib.suppress(RuntimeError):  # "no kernel", or no such operator in this torch
                self.originals[name] = torch.library.get_kernel(f"aten::{name}", key)
        self.keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        self.library: Any = torch.library.Library("aten", "IMPL", key)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*[Oo]verriding a previously registered kernel", category=UserWarning
            )
            for name, function in ((FORWARD, _forward), (INPLACE, _inplace), (BACKWARD, _backward)):
                if hasattr(torch.ops.aten, name):  # the second is younger than the others
                    self.library.impl(name, functools.partial(function, self), key)
        self.before = _flash_first() if key == "CUDA" and torch.cuda.is_available() else None

    def remove(self) -> None:
        """torch's own kernels again, and the order of its backends."""
        self.library = None
        if self.before is not None and torch._C._get_sdp_priority_order() == _first(self.before):
            torch._C._set_sdp_priority_order(self.before)
        self.before = None

    def keep(self, name: str, reason: str, *given: Any, **options: Any) -> Any:
        """What torch's own kernel makes of a call."""
        CALLS.kept[f"{name.removeprefix('_flash_attention_')}: {reason}"] += 1
        if (original := self.originals.get(name)) is None:
            raise Unsupported(
                f"aten::{name} is not served here ({reason}), and torch has no kernel of its own for {self.key}"
            )
        return original.call_boxed(self.keys, *given, **options)


def activate(key: str = "CUDA") -> Handle:
    """Put the functions here in place of torch's kernels; key: of its dispatcher."""
    if torch.version.hip:
        raise Unsupported(
            "torch.version.hip is set: torch's flash attention keeps other random states on ROCm; accepted: CUDA"
        )
    return Handle(key)


def register(name: str) -> None:
    """The name for `torch.nn.attention.activate_flash_attention_impl`."""
    registry.register_flash_attention_impl(name, register_fn=activate)


def unregister(name: str) -> None:
    """Deactivate it, where it is active, and take the name out."""
    from torch.nn.attention import _registry

    if registry.current_flash_attention_impl() == name:
        registry.restore_flash_attention_impl()
    _registry._FLASH_ATTENTION_IMPLS.pop(name, None)


# ---------------------------------------------------------------- the operators

# numbers, below: max_q, max_k, dropout_p, is_causal and return_debug_mask, as the operators have them.


def _forward(
    handle: Handle, q: Tensor, k: Tensor, v: Tensor, cu_q: Maybe, cu_k: Maybe, *numbers: Any, **options: Any
) -> Any:
    """(out, lse, random state, nothing, nothing) of aten::_flash_attention_forward.

    q, k, v: [batch, seq, heads, dim] or, with cu_q and cu_k, packed.  lse as here: of a row without a live key it is -inf."""
    made = _attend(q, k, v, cu_q, cu_k, numbers, options)
    if type(made) is str:
        results = handle.keep(FORWARD, made, q, k, v, cu_q, cu_k, *numbers, **options)
        if numbers[2]:  # its gradients have to drop what it dropped
            results[2].dropped_by_torch = True
        return results
    out, lse, state = made
    device = q.device
    if state is None:
        state = torch.empty_strided((2,), (1,), dtype=torch.uint64, device=device)
    unused = torch.empty_strided((), (), dtype=torch.uint64, device=device)
    return out, lse, state, unused, torch.empty_strided((0,), (1,), dtype=q.dtype, device=device)


def _inplace(
    handle: Handle, out: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_q: Maybe, cu_k: Maybe, *numbers: Any, **options: Any
) -> Any:  # fmt: skip
    """lse of aten::_flash_attention_forward_no_dropout_inplace, which writes into out, by a copy."""
    made = _attend(q, k, v, cu_q, cu_k, numbers, options)
    if type(made) is str:
        return handle.keep(INPLACE, made, out, q, k, v, cu_q, cu_k, *numbers, **options)
    out.copy_(made[0])
    return made[1]


def _backward(
    handle: Handle, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Maybe, cu_k: Maybe, max_q: int,
    max_k: int, dropout_p: float, causal: bool, state: Maybe, unused: Maybe, **options: Any,
) -> Any:  # fmt: skip
    """(dq, dk, dv) of aten::_flash_attention_backward, in the memory layouts of q, k and v."""
    numbers = max_q, max_k, dropout_p, causal, False
    if dropout_p and getattr(state, "dropped_by_torch", False):
        found: Any = "dropout of torch's own forward"
    else:
        found = _found(q, k, v, cu_q, cu_k, numbers, options)
    if isinstance(found, Served):
        call = _filled(found.call, cu_q, cu_k, numbers, state)
        tensors = [t.transpose(1, 2) for t in (q, k, v, out, dout)] if found.turned else (q, k, v, out, dout)
        try:
            made: Any = backward((*tensors[:4], lse), tensors[4], None, call, WANTED)
        except TilefoldError as error:
            if dropout_p:  # what was dropped was chosen here
                raise
            found = _said(error)
        else:
            CALLS.backward += 1
            made = [t.transpose(1, 2) for t in made[:3]] if found.turned else made[:3]
            return tuple([_laid_out(t, like) for t, like in zip(made, (q, k, v), strict=True)])
    given = dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, causal, state, unused
    return handle.keep(BACKWARD, found, *given, **options)


WANTED = (True, True, True, False, False)  # gradients of q, k, v, and of what these calls have not


# ---------------------------------------------------------------- what they share


class Served(NamedTuple):
    """A call that is served, with its record and without its tensors.

    turned: heads come before rows in memory, so q, k and v are turned first; out then has the strides that it should."""

    call: Call
    turned: bool


def _attend(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Maybe, cu_k: Maybe, numbers: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """(out in q's memory layout, lse, random state if something is dropped); or why not."""
    found = _found(q, k, v, cu_q, cu_k, numbers, options)
    if type(found) is str:
        return found
    (call, turned), state = found, None
    if numbers[2]:  # two uint64, as torch's kernel leaves; the first is the seed of what is dropped
        state = torch.randint(-SEEDS, SEEDS, (2,), dtype=torch.int64, device=q.device).view(torch.uint64)
    if cu_q is not None or numbers[2]:
        call = _filled(call, cu_q, cu_k, numbers, state)
    if turned:
        out, lse = forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), call)
        out = out.transpose(1, 2)
    else:
        out, lse = forward(q, k, v, call)
    CALLS.forward += 1
    return _laid_out(out, q), lse, state


def _found(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Maybe, cu_k: Maybe, numbers: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """A `Served`; or why torch's own kernel takes the call."""
    if not options.keys() <= SERVED:
        for name in options.keys() - SERVED:
            if options[name] is not None:
                return name
        options = {name: options[name] for name in options.keys() & SERVED}
    return _served(q, k, v, cu_q, cu_k, (*numbers, *options.items()))


SERVED = {"scale", "window_size_left", "window_size_right"}


def _key(q: Tensor, k: Tensor, v: Tensor, cu_q: Maybe, cu_k: Maybe, numbers: tuple[Any, ...]) -> Any:
    """Everything that `_served` depends on.  No type of a tensor, no negation: the dispatcher has dealt with these."""
    return (
        q.shape, q.stride(), q.dtype, q.device, q.data_ptr() & 15 == 0, k.shape, k.stride(), k.dtype, k.device,
        k.data_ptr() & 15 == 0, v.shape, v.stride(), v.dtype, v.device, v.data_ptr() & 15 == 0, numbers,
        cu_q is None or facts_of(cu_q), cu_k is None or facts_of(cu_k),
    )  # fmt: skip


@recorded("torch's flash attention", _key)
def _served(q: Tensor, k: Tensor, v: Tensor, cu_q: Maybe, cu_k: Maybe, numbers: tuple[Any, ...]) -> Served | str:
    """The call and its record, without tensors; or why torch's own kernel takes it.  The same for both passes, so that both drop
    the same; numbers: with the options behind them."""
    _, _, dropout_p, causal, debug = numbers[:5]
    options = dict(numbers[5:])
    if debug:
        return "return_debug_mask"
    if (cu_q is None) != (cu_k is None):
        return "cum_seq_q or cum_seq_k alone"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return str(q.dtype)
    if q.shape[-1] != v.shape[-1]:
        return "head dims that differ"
    sides = options.get("window_size_left"), options.get("window_size_right")
    turned = cu_q is None and q.dim() == 4 and q.stride(2) > q.stride(1)
    window, layout = None if sides == (None, None) else sides, "bhsd" if turned else "bshd"
    call = Call(causal, window, options.get("scale"), 0.0, layout, dropout_p=dropout_p)  # type: ignore[arg-type]
    if turned:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    try:
        state = torch.empty((2,), dtype=torch.uint64, device=q.device) if dropout_p else None
        whole = _filled(call, cu_q, cu_k, numbers, state)
        prepared = differentiable(q, k, v, whole) if dropout_p else prepare(q, k, v, whole)
    except TilefoldError as error:
        return _said(error)
    return Served(call._replace(prepared=prepared), turned)


def _filled(call: Call, cu_q: Maybe, cu_k: Maybe, numbers: tuple[Any, ...], state: Maybe) -> Call:
    """With offsets and seed."""
    source = None if cu_q is None else Packed(cu_q, cu_k, *numbers[:2])  # type: ignore[arg-type]
    return call._replace(source=source, dropout_seed=state.view(torch.int64)[:1] if numbers[2] else None)  # type: ignore[union-attr]


def _said(error: TilefoldError) -> str:
    """The kind of an error and the argument that it names: few, however many shapes there are."""
    return f"{type(error).__name__} {str(error).split(maxsplit=1)[0]}"


def _laid_out(made: Tensor, like: Tensor) -> Tensor:
    """`made` with the strides that torch's fake kernels tell compiled code, those of `empty_like`: mostly it has them."""
    if made.stride() == like.stride() or _fits(made.shape, made.stride(), like.stride()):
        return made
    return torch.empty_like(like).copy_(made)


@functools.lru_cache(maxsize=1024)
def _fits(shape: tuple[int, ...], strides: tuple[int, ...], like: tuple[int, ...]) -> bool:
    """Whether empty_like of a tensor with strides `like` has `strides`, but for dimensions of one element."""
    wanted = torch.empty_like(torch.empty_strided(shape, like, device="meta")).stride()
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, wanted, strict=True)) or 0 in shape


def _first(order: list[int]) -> list[int]:
    return [FLASH, *(each for each in order if each != FLASH)]


def _flash_first() -> list[int]:
    """Let torch try flash attention before its other backends, and return the order that it had: on some GPUs cuDNN is first.
    torch sets its order in its first choice, so one is made."""
    q = torch.empty((1, 1, 1, 8), dtype=torch.float16, device="cuda")
    torch._fused_sdp_choice(q, q, q)
    before: list[int] = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(_first(before))
    return before
