"""One operation in three forms: a plain call, an autograd function, an operator of torch's dispatcher.

    plain        eager, no gradient asked for: the host function itself
    function     eager with gradients, and, as torch.func wants it, transformed: it takes autograd functions, no operators
    dispatched   torch.compile, FakeTensor, tracing, tensor subclasses: one opaque operator each way

The three share their forward, their backward and what is kept between, so that they cannot differ.  An `Operation` makes all
three of functions of tensors, numbers and records.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import torch

from ..errors import Unsupported
from . import records
from .flat import Arguments, several
from .hopper import inside_operator
from .watch import (
    in_forward_mode,
    is_open,
    is_transformed,
    refuse_gradients,
    refuse_tangents,
    refuse_transforms,
    resolved,
    wants_gradient,
    watchers,
)


class Gradient(NamedTuple):
    """How an operation is differentiated, once.

    served: the names of the tensors that get a gradient, like them and contiguous.
    mods: the name of the args of a mod, the first that a record has, whose tensors get one, too; "" for none.
    fresh(tensor): memory for its gradient where that is not contiguous.
    make(args, results, grads, wanted): theirs, and then those of the mod's tensors in order, None where there is none; grads: of
        the results, None for 0.
    require(*args): raises for an argument whose derivative nobody gave.
    ready(*args): raises everything that would stop the gradient; asked before the forward pass is launched.  Returns what
        forward's function `recorded` returns, which `make` then finds as `prepared` of a record among the arguments; so does
        that function itself where there is no other.
    unread: numbers of the results that `make` does not read, or what says them of args; they are not kept, it gets None for them.
    kept(tensors, needs): the tensors of a call that `make` reads, None for others; needs: which of them require a gradient.
        `make` gets None for the others, through the dispatcher an example without memory of its own.
    still: numbers of the results through which no gradient passes.
    same: pairs of what is served, by numbers, whose gradients are one tensor, which the second has in the dispatcher."""

    served: tuple[str, ...]
    make: Callable[..., Sequence[torch.Tensor | None]]
    require: Callable[..., None] = lambda *args: None
    ready: Callable[..., Any] | None = None
    unread: tuple[int, ...] | Callable[..., Sequence[int]] = ()
    kept: Callable[[Sequence[Any], Sequence[bool]], Sequence[Any]] = lambda tensors, needs: tensors
    still: tuple[int, ...] = ()
    same: tuple[tuple[int, int], ...] = ()
    fresh: Callable[[torch.Tensor], torch.Tensor] = lambda t: t.new_empty(t.shape)
    mods: str = ""


class Operation:
    """The operators tilefold::name and tilefold::name_backward, and their eager forms, by the annotations of `forward`.

    forward(*args): the results; or a `recorded` function, of the same arguments, whose record `run(record, *args)` makes them.
    fake(*args): results without values, after all checks that need no device; the operator's schema is that of its annotations
        where forward is recorded, else that of forward's.
    gradient: how it is differentiated; or what Unsupported says to who asks for it.
    before(*args): raises what is wrong with a call whatever its tensors, while it is traced.
    parts: the records that a record among the arguments may hold here; a field without one of them is no part of the schema.

    Who has to see a call follows from its key and from torch's state: of a recorded function it is decided once for each key, and
    kept in the record's `ways`.

    A call raises Unsupported for a forward-mode tangent, inside torch.func's vmap and jvp, and for a tensor that requires a
    gradient and gets none; so does a derivative of the gradient."""

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        fake: Callable[..., Any],
        gradient: Gradient | str,
        before: Callable[..., object] = lambda *args: None,
        parts: tuple[type, ...] = (),
    ) -> None:
        self.name, self.gradient, self.before = f"tilefold::{name}", gradient, before
        self.prepare: Any = forward if hasattr(forward, "made_at") else None
        self.forward = forward = self._forward if self.prepare is not None else forward
        annotated = forward if self.prepare is None else fake
        self.arguments = arguments = Arguments(annotated, parts)
        self.results = max(1, len(get_args(inspect.signature(annotated).return_annotation)))

        def launch(*flat: Any) -> Any:
            with inside_operator():
                return forward(*arguments.whole(flat))

        self.op = _custom_op(self.name, launch, arguments.parameters(), *[torch.Tensor] * self.results)
        self.op.register_fake(lambda *flat: fake(*arguments.whole(flat)))
        if isinstance(gradient, str):

            def refuse(ctx: Any, *grads: Any) -> Any:
                raise Unsupported(gradient)

            self.op.register_autograd(refuse)
            return
        self.served = tuple(arguments.tensors.index(each) for each in gradient.served)
        self.needed = several(self.served)
        self.unserved = several([at for at in range(len(arguments.tensors)) if at not in self.served])
        *others, last = (*gradient.served, gradient.mods) if gradient.mods else gradient.served
        self.text = f"{', '.join(others)} and {last}" if others else last
        self.ready: Callable[..., Any] = gradient.ready or self.prepare or (lambda *args: None)
        self.gradient_op = self._gradient_op(gradient)
        self.op.register_autograd(self._differentiate, setup_context=self._keep)
        self.function, self.transformed = self._functions(gradient)

    def __call__(self, *args: Any) -> Any:
        """The results, by the cheapest way that everyone who watches can follow."""
        if self.prepare is not None and not (
            torch.compiler.is_compiling()
            or torch._C._functorch.peek_interpreter_stack() is not None  # `is_open`, in every call
            or torch._C._len_torch_dispatch_stack() > 0
            or torch.autograd.forward_ad._current_level >= 0
        ):
            try:
                found = records.CACHE.get(key := (self.prepare.operation, self.prepare.key_of(*args)))
            except (AttributeError, RuntimeError, TypeError):  # the checks say which argument is wrong
                return self.first(*args)
            if found is None and (found := self.prepare.near_at(key, args)) is None:
                return self.first(*args, key=key)
            if (way := found.ways[torch.is_grad_enabled()]) is not None:
                return way(found, *args)
        return self.first(*args)

    def first(self, *args: Any, key: Any = None) -> Any:
        """The results of a call whose way is not known, which is kept from here on where it follows from the call's key; key: if
        it has no record yet."""
        if torch.compiler.is_compiling():
            return self.dispatched(*args)
        transformed = is_transformed()
        tensors, others = self.arguments.given(args)
        watched, wanted = watchers(tensors)
        if others and not wanted:
            wanted = wants_gradient(others)
        wanted = wanted and (torch.is_grad_enabled() or in_forward_mode())
        forward_only = isinstance(self.gradient, str)
        if (watched and not transformed) or (forward_only and (transformed or wanted)):
            return self.dispatched(*args)
        given, args = args, self.arguments.resolved(args)
        kept = self.prepare is not None and given is args and not is_open()
        if not transformed and not wanted:
            return self.plain(args, kept, key)
        bare, fixed, more = self.arguments.take(args)
        if in_forward_mode() or wants_gradient([*self.unserved(fixed), *more]):
            named = self.arguments.named(args, fixed)
            refuse_tangents(named)
            self._refuse_unserved(named)
        if transformed:
            refuse_transforms(self.name)
            return self.transformed.apply(None, bare, *fixed, *more)
        found = self.ready(*args)
        alone = not more and not any(t is not None for t in fixed[len(self.arguments.places) :])
        way = self._with_gradient_alone if alone else self._with_gradient
        if kept:
            found.ways[True] = way
        return way(found, *args)

    def plain(self, args: tuple[Any, ...], kept: bool, key: Any = None) -> Any:
        """The results of an eager call that nobody watches; kept: those of its key all come this way; key: as of `first`."""
        if self.prepare is None:
            return self.forward(*args)
        found = self.prepare.made_at(key, args) if kept and key is not None else self.prepare(*args)
        if kept:
            found.ways[torch.is_grad_enabled()] = found.run
        return found.run(found, *args)

    def _forward(self, *args: Any) -> Any:
        """The results of a call by its record."""
        found = self.prepare(*args)
        return found.run(found, *args)

    def _with_gradient(self, found: Any, *args: Any) -> Any:
        """The results of an eager call, with a node of autograd; found: the call's record, None without one."""
        return self._applied(found, args, *self.arguments.take(args))

    def _with_gradient_alone(self, found: Any, *args: Any) -> Any:
        """The same of a call whose records hold no tensors."""
        return self._applied(found, args, *self.arguments.alone(args))

    def _applied(self, found: Any, args: tuple[Any, ...], bare: list[Any], fixed: Any, more: Any) -> Any:
        if found is not None and self.arguments.prepared:
            args = self.arguments.prepared_with(args, bare, found)
        return self.function.apply((found, args), bare, *fixed, *more)

    def dispatched(self, *args: Any) -> Any:
        """The results, through the dispatcher."""
        self.before(*args)
        return self.op(*self.flat(*args))

    def flat(self, *args: Any) -> tuple[Any, ...]:
        """The arguments as the schema has them."""
        return self.arguments.flat(args)

    def gradients(self, wanted: Sequence[bool], grads: Sequence[Any], results: Sequence[Any], *args: Any) -> Any:
        """Gradients of what gets one, empty where not wanted, through the dispatcher."""
        return self.gradient_op(list(wanted), *grads, *results, *self.flat(*args))

    def _several(self, results: Any) -> Any:
        """The results of an operator as a tuple, also a single one."""
        return (results,) if isinstance(results, torch.Tensor) else results

    def _keep_results(self, ctx: Any, output: Any, args_of: Callable[[], tuple[Any, ...]]) -> Sequence[Any]:
        """The results that the gradient reads, None for others."""
        gradient, results = self.gradient, self._several(output)
        assert isinstance(gradient, Gradient)
        ctx.set_materialize_grads(False)
        if gradient.still:
            ctx.mark_non_differentiable(*[results[i] for i in gradient.still])
        unread = gradient.unread(*args_of()) if callable(gradient.unread) else gradient.unread
        return [None if i in unread else t for i, t in enumerate(results)] if unread else results

    def _refuse_unserved(self, named: dict[str, Any]) -> None:
        """Unsupported for a tensor that requires a gradient and gets none."""
        served = {*self.gradient.served, self.gradient.mods}  # type: ignore[union-attr]
        refuse_gradients(((name, t) for name, t in named.items() if name.partition("[")[0] not in served), self.text)

    def _places(self, count: int) -> tuple[int, ...]:
        """Of what gets a gradient, among all tensors; count: of a mod's that do."""
        first = len(self.arguments.tensors)
        return *self.served, *range(first, first + count)

    # ---------------------------------------------------------------- eager

    def _functions(self, gradient: Gradient) -> tuple[Any, Any]:
        """The autograd functions.  They take the call's record and the arguments whole, or None; the arguments without their
        tensors; and the tensors one by one, so that autograd and torch.func see every one."""
        arguments, count = self.arguments, self.results
        absent = (False,) * (len(arguments.tensors) - len(arguments.places))  # of a call whose records hold none

        def forward(whole: Any, bare: Any, *tensors: Any) -> Any:
            if whole is not None:
                found, args = whole
                return self.forward(*args) if found is None else found.run(found, *args)
            args = arguments.joined(bare, tensors)
            if is_transformed() and wants_gradient(tensors):  # if only functorch watches, the backward pass says so
                self.ready(*args)
            return self.forward(*args)

        def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.bare = inputs[1]
            kept = self._keep_results(ctx, output, lambda: arguments.joined(inputs[1], inputs[2:]))
            ctx.save_for_backward(*kept, *gradient.kept(inputs[2:], ctx.needs_input_grad[2:]))

        def backward(ctx: Any, *grads: Any) -> Any:
            needs = ctx.needs_input_grad[2:]
            back: list[Any] = [None] * (len(needs) + len(absent))
            for grad in grads:  # a generator in all() takes longer
                if grad is not None:
                    break
            else:
                return (None,) * (2 + len(needs))
            wanted, places = self.needed((*needs, *absent)), self.served
            if gradient.mods and len(needs) > len(arguments.places):
                places = self._places(arguments.count_of(ctx.bare, gradient.mods))
                wanted = tuple([needs[at] for at in places])
            for at, one in zip(places, made(ctx.bare, wanted, *map(resolved, grads), *ctx.saved_tensors), strict=True):
                back[at] = one
            return None, None, *back[: len(needs)]

        def make(bare: Any, wanted: tuple[bool, ...], *tensors: Any) -> Any:
            grads, results, inputs = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
            return tuple(gradient.make(arguments.joined(bare, inputs), results, grads, wanted))

        made = first_derivative(self.name, make, self._refuse_second)
        return differentiable(forward, keep, backward)

    def _refuse_second(self, ctx: Any, *grads: Any) -> Any:
        raise Unsupported(f"{self.name} has first derivatives only: this call differentiates its gradient")

    # ---------------------------------------------------------------- the dispatcher

    def _gradient_op(self, gradient: Gradient) -> Any:
        arguments, count = self.arguments, self.results

        def parts(flat: tuple[Any, ...]) -> tuple[Any, ...]:
            return flat[:count], flat[count : 2 * count], flat[2 * count :]

        def launch(wanted: Sequence[bool], *flat: Any) -> Any:
            grads, results, inputs = parts(flat)
            found = gradient.make(arguments.whole(inputs), results, grads, tuple(wanted))
            made = [t if asked else None for t, asked in zip(found, wanted, strict=True)]
            return returned([inputs[0].new_empty(0) if t is None else own(t, grads) for t in made])

        def own(t: torch.Tensor, grads: Sequence[Any]) -> torch.Tensor:
            """What an operator may return: none of its inputs."""
            return t.clone(memory_format=torch.contiguous_format) if any(t is grad for grad in grads) else t

        def fake(wanted: Sequence[bool], *flat: Any) -> Any:
            inputs = parts(flat)[2]
            tensors = [*inputs[: len(arguments.tensors)], *(inputs[len(arguments.tensors)] if gradient.mods else ())]
            made = zip((tensors[at] for at in self._places(len(wanted) - len(self.served))), wanted, strict=True)
            like = inputs[0]
            return returned([like.new_empty(0) if t is None or not asked else gradient.fresh(t) for t, asked in made])

        def returned(made: list[Any]) -> Any:
            fixed = made[: len(self.served)]
            if gradient.mods:
                return *fixed, made[len(self.served) :]
            return fixed[0] if len(fixed) == 1 else tuple(fixed)

        kinds: list[tuple[str, Any]] = [("wanted", Sequence[bool])]
        kinds += [(f"grad_{i}", torch.Tensor | None) for i in range(count)]
        kept: Any = torch.Tensor | None if gradient.unread else torch.Tensor
        kinds += [(f"result_{i}", kept) for i in range(count)]
        results: list[Any] = [torch.Tensor] * len(self.served) + [list[torch.Tensor]] * bool(gradient.mods)
        op = _custom_op(f"{self.name}_backward", launch, [*kinds, *arguments.parameters()], *results)
        op.register_fake(fake)
        op.register_autograd(self._refuse_second)
        return op

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        count = len(self.arguments.tensors)
        more = inputs[count] if self.arguments.open else ()
        results = self._keep_results(ctx, output, lambda: self.arguments.whole(inputs))
        kept = self.gradient.kept(inputs[:count], ctx.needs_input_grad[:count])  # type: ignore[union-attr]
        pairs = zip(inputs, kept, strict=False)
        tensors = [t.new_empty(()).expand(t.shape) if t is not None and one is None else one for t, one in pairs]
        ctx.save_for_backward(*results, *tensors, *more)
        ctx.rest = inputs[count + self.arguments.open :]

    def _differentiate(self, ctx: Any, *grads: Any) -> Any:
        count = len(self.arguments.tensors)
        results, tensors = ctx.saved_tensors[: self.results], ctx.saved_tensors[self.results :]
        more = list(tensors[count:])
        flat = [*tensors[:count], *([more] if self.arguments.open else []), *ctx.rest]
        args = self.arguments.whole(flat)
        self._refuse_unserved(self.arguments.named(args, tensors[:count]))
        self.gradient.require(*args)  # type: ignore[union-attr]
        back: list[Any] = [None] * (count + len(more))
        if any(grad is not None for grad in grads):
            gradient = self.gradient
            assert isinstance(gradient, Gradient)
            needs = [*ctx.needs_input_grad[:count], *(ctx.needs_input_grad[count] if gradient.mods else ())]
            places = self._places(self.arguments.count_of(args, gradient.mods))
            wanted = [bool(needs[at]) for at in places]
            asked_of = wanted.copy()
            for one, other in gradient.same:
                asked_of[one], asked_of[other] = asked_of[one] or asked_of[other], False
            found = list(self._several(self.gradient_op(asked_of, *grads, *results, *flat)))
            found = [*found[:-1], *found[-1]] if gradient.mods else found
            for one, other in gradient.same:
                found[other] = found[one]
            for at, one, asked in zip(places, found, wanted, strict=True):
                back[at] = one if asked else None
        # beside a list of tensors torch takes an empty list for another and wants one back
        lists: list[Any] = [
            [] if self.arguments.open and isinstance(one, Sequence) and len(one) == 0 and one != "" else None
            for one in ctx.rest
        ]
        return *back[:count], *([back[count:]] if self.arguments.open else []), *lists


def _custom_op(name: str, function: Any, parameters: list[tuple[str, Any]], *results: Any) -> Any:
    """An operator of the dispatcher whose schema says what `parameters` and the kinds of its results say."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    made = results[0] if len(results) == 1 else tuple[results]  # type: ignore[valid-type]
    function.__signature__ = inspect.Signature(
        [inspect.Parameter(each, kind, annotation=annotation) for each, annotation in parameters],
        return_annotation=made,
    )
    return torch.library.custom_op(name, function, mutates_args=())


def differentiable(
    forward: Callable[..., Any], keep: Callable[..., None], backward: Callable[..., Any]
) -> tuple[Any, Any]:
    """An autograd function, and the same as torch.func wants it: its context is set up apart, for which torch binds the arguments
    to their names in each call."""

    def both(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        keep(ctx, inputs, output)
        return output

    transformed = _made("Transformed", forward=forward, setup_context=keep, backward=backward)
    return _made("Differentiable", forward=both, backward=backward), transformed


def first_derivative(name: str, make: Callable[..., Any], refuse: Callable[..., Any]) -> Callable[..., Any]:
    """What makes the gradients of an operation; where somebody could differentiate them it is an autograd function that refuses,
    in which torch.func unwraps the tensors."""
    second = _made("Gradient", forward=make, setup_context=lambda ctx, inputs, output: None, backward=refuse)

    def made(*args: Any) -> Any:
        if is_transformed():
            refuse_transforms(f"the gradient of {name}")
            return second.apply(*args)
        return second.apply(*args) if torch.is_grad_enabled() else make(*args)

    return made


def _made(name: str, **methods: Callable[..., Any]) -> Any:
    """An autograd function."""
    return type(name, (torch.autograd.Function,), {key: staticmethod(fn) for key, fn in methods.items()})
