"""One operation in three coats: a plain call, an autograd function, an operator of torch's dispatcher.

    plain        eager, no gradient asked for: the host function itself
    function     eager with gradients, and torch.func, which takes autograd functions but not the dispatcher's
    dispatched   torch.compile, FakeTensor, tracing, tensor subclasses: one opaque operator each way

The three share their forward, their backward and what is kept between, so that they cannot differ.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import Unsupported
from .watch import (
    in_forward_mode,
    is_transformed,
    is_watched,
    refuse_tangents,
    refuse_transforms,
    resolved,
    wants_gradient,
)

__all__ = ["Operator", "one_by_one"]


class Operator:
    """An operation on flat positional arguments with a first derivative.

    name: as in "tilefold::name"; the gradient's is name_backward.
    forward(*args), fake(*args): the results, and results without values after all checks; annotated for torch's schema.
    gradient(*arguments), gradient_fake(*arguments): what the backward pass makes; annotated, too.
    keep(ctx, inputs, output): as setup_context of an autograd function.
    arguments(ctx, *grads): those of `gradient`; None to pass no gradient.
    give(ctx, results): the gradients of all args of forward, None for what gets none.

    A call raises Unsupported for a forward-mode tangent, whether gradients are enabled or not, and inside torch.func's vmap and
    jvp; so does a derivative of the gradient."""

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        fake: Callable[..., Any],
        gradient: Callable[..., Any],
        gradient_fake: Callable[..., Any],
        keep: Callable[..., None],
        arguments: Callable[..., tuple[Any, ...] | None],
        give: Callable[..., tuple[Any, ...]],
    ) -> None:
        self.name, self.forward = f"tilefold::{name}", forward
        self.arguments = tuple(inspect.signature(forward).parameters)
        self.op = torch.library.custom_op(f"tilefold::{name}", mutates_args=())(forward)
        self.op.register_fake(fake)
        self.gradient_op = torch.library.custom_op(f"tilefold::{name}_backward", mutates_args=())(gradient)
        self.gradient_op.register_fake(gradient_fake)
        gradient_op = self.gradient_op

        def refuse(ctx: Any, *grads: Any) -> Any:
            raise Unsupported(f"tilefold::{name} has first derivatives only: this call differentiates its gradient")

        def differentiate(ctx: Any, *grads: Any) -> Any:
            given = arguments(ctx, *grads)
            return (None,) * len(ctx.needs_input_grad) if given is None else give(ctx, gradient_op(*given))

        self.gradient_op.register_autograd(refuse)
        self.op.register_autograd(differentiate, setup_context=keep)
        self.function = _function(self.name, forward, gradient, keep, arguments, give, refuse)

    def __call__(self, *args: Any) -> Any:
        """The results, by the cheapest way that everyone who watches can follow."""
        transformed = is_transformed()
        if torch.compiler.is_compiling() or (not transformed and is_watched(args)):
            return self.op(*args)
        if in_forward_mode():
            refuse_tangents(dict(zip(self.arguments, args, strict=True)))  # no_grad does not stop them
        if transformed:
            refuse_transforms(self.name)
        if transformed or (torch.is_grad_enabled() and wants_gradient(args)):
            return self.function.apply(*args)
        return self.forward(*args)


def one_by_one(
    call: Callable[..., torch.Tensor], count: int, dims: Sequence[int | None], *tensors: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """`vmap` of an autograd function for operations that have no batched form: a call for each of `count` slices along dims."""
    pairs = tuple(zip(tensors, dims, strict=True))
    return torch.stack([call(*(t if d is None else t.select(d, i) for t, d in pairs)) for i in range(count)]), 0


def _function(
    name: str,
    forward: Callable[..., Any],
    gradient: Callable[..., Any],
    keep: Callable[..., None],
    arguments: Callable[..., tuple[Any, ...] | None],
    give: Callable[..., tuple[Any, ...]],
    refuse: Callable[..., Any],
) -> Any:
    """The autograd function; its backward is one of its own, in which torch.func unwraps the tensors."""

    def no_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept: there is no second derivative."""

    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_transforms(f"the gradient of {name}")
        given = arguments(ctx, *map(resolved, grads))
        return (None,) * len(ctx.needs_input_grad) if given is None else give(ctx, second.apply(*given))

    def made(name: str, **methods: Callable[..., Any]) -> Any:
        return type(name, (torch.autograd.Function,), {key: staticmethod(fn) for key, fn in methods.items()})

    second = made("Gradient", forward=gradient, setup_context=no_context, backward=refuse)
    return made("Differentiable", forward=forward, setup_context=keep, backward=backward)
