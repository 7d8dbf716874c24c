"""Who watches a call: autograd, a compiler, functorch, a dispatch mode, a tensor subclass; asked before every launch."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import Unsupported

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def wants_gradient(tensors: Iterable[Any]) -> bool:
    """Whether one of them requires a gradient or carries a tangent; what is no tensor is for the checks to find."""
    tangents = in_forward_mode()
    for t in tensors:  # a generator in any() takes longer, and every call asks
        if t is not None and isinstance(t, torch.Tensor) and (t.requires_grad or (tangents and _has_tangent(t))):
            return True
    return False


def refuse_tangents(named: Mapping[str, Any]) -> None:
    """Unsupported, naming it, if a tensor carries a forward-mode tangent."""
    if not in_forward_mode():
        return
    for name, t in named.items():
        if isinstance(t, torch.Tensor) and _has_tangent(t):
            raise Unsupported(f"{name} carries a forward-mode tangent, but there are reverse-mode gradients only")


def refuse_batched(named: Mapping[str, Any], what: str) -> None:
    """Unsupported, naming it, if torch.func.vmap has wrapped a tensor; what: who writes in place, which has no such form."""
    if not is_transformed():
        return
    for name, t in named.items():
        if isinstance(t, torch.Tensor) and torch._C._functorch.is_batchedtensor(t):
            raise Unsupported(f"{name} is batched by vmap, but {what} writes in place: call it outside")


def refuse_derivatives(names: Iterable[str], tensors: Iterable[Any], what: str) -> None:
    """Unsupported, naming it, for a tensor with a derivative that a forward-only operator has no chance to refuse: neither
    forward mode nor torch.func.grad asks for its backward pass."""
    if not in_forward_mode() and not is_transformed():
        return
    named = dict(zip(names, tensors, strict=True))
    refuse_tangents(named)
    if torch.is_grad_enabled():
        for name, t in named.items():
            if wants_gradient((t,)):
                raise Unsupported(f"{name} requires a gradient, but {what} is forward only: detach() it")


def refuse_gradients(named: Iterable[tuple[str, Any]], served: str) -> None:
    """Unsupported, naming it, if a tensor requires a gradient that nobody makes; served: those that get one."""
    for name, t in named:
        if isinstance(t, torch.Tensor) and t.requires_grad:
            raise Unsupported(f"{name} requires a gradient, but only {served} get one: detach() it")


def refuse_at_once(named: Mapping[str, Any], why: str) -> None:
    """Unsupported, naming it, for a tensor with a derivative that an operation passes none for; why: what it says of that."""
    if not torch.compiler.is_compiling():  # a tracer knows of no tangents
        refuse_tangents(named)
    if torch.is_grad_enabled():
        for name, t in named.items():
            if isinstance(t, torch.Tensor) and t.requires_grad:
                raise Unsupported(f"{name} requires a gradient, but {why}")


def is_open() -> bool:
    """Whether somebody may see a call whose tensors do not show it: torch.func, a dispatch mode, forward mode."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd.forward_ad._current_level >= 0
    )


def is_transformed() -> bool:
    """Whether functorch (torch.func.grad, vmap) has wrapped the tensors: it takes autograd functions, not the dispatcher's."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def transforms() -> tuple[str, ...]:
    """The transforms of torch.func that are open, outermost first, as torch names them: Grad, Vmap, Jvp, ..."""
    return tuple(each.key().name for each in torch._C._functorch.get_interpreter_stack() or ())


def refuse_transforms(what: str) -> None:
    """Unsupported inside torch.func.vmap and jvp, and so inside jacrev, jacfwd and hessian, which are made of them."""
    if not is_transformed():
        return
    for name in transforms():
        if name in ("Vmap", "Jvp"):
            raise Unsupported(f"{what} has no rule for {name.lower()}: of torch.func, it takes grad and vjp only")


def resolved(grad: Any) -> Any:
    """A gradient, or None, whose memory holds its numbers: autograd may hand over a lazy negation or conjugate, which no kernel
    sees."""
    return grad.resolve_neg().resolve_conj() if grad is not None and (grad.is_neg() or grad.is_conj()) else grad


def is_watched(tensors: Iterable[Any]) -> bool:
    """Whether a dispatch mode or a tensor subclass has to see an operator."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    for t in tensors:  # noqa: SIM110
        if t is not None and isinstance(t, torch.Tensor) and (type(t) not in _PLAIN_TENSORS or t.is_meta):
            return True
    return False


def watchers(tensors: Iterable[Any]) -> tuple[bool, bool]:
    """(`is_watched`, `wants_gradient`) of tensors, in one pass: every call asks."""
    watched, wanted = torch._C._len_torch_dispatch_stack() > 0, False
    tangents = in_forward_mode()
    for t in tensors:
        if t is None or not isinstance(t, torch.Tensor):
            continue
        if type(t) not in _PLAIN_TENSORS or t.is_meta:
            watched = True
        if t.requires_grad or (tangents and _has_tangent(t)):
            wanted = True
    return watched, wanted


def in_forward_mode() -> bool:
    """Whether tensors may carry forward-mode tangents: cheap enough for every call."""
    return torch.autograd.forward_ad._current_level >= 0


def _has_tangent(t: torch.Tensor) -> bool:
    return torch.autograd.forward_ad.unpack_dual(t).tangent is not None
