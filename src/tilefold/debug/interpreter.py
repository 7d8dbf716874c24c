"""Triton's interpreter with its bookkeeping done once: what kernels compute, and what is refused, stays the same.

A tile operation of the interpreter is a few microseconds of numpy and hundreds of Python around it.  Each function here takes
out one part of that; a Triton that does it another way is left as it is.
"""

# mypy: disable-error-code="misc, name-defined, attr-defined"

import contextlib
from typing import Any

import triton.language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder


def patch_interpreter() -> None:
    """Make Triton's interpreter several times as fast for the rest of the process; results and errors stay the same.

    It replaces functions inside `triton.runtime.interpreter` and `triton.language`, of every kernel that the process interprets,
    tilefold's or not.  Compiled kernels are left alone.  Call it once, after TRITON_INTERPRET=1 is set; more calls do nothing.
    """
    if hasattr(interpreter, "patched_by_tilefold"):
        return
    interpreter.patched_by_tilefold = True
    for patch in (
        patch_once_a_launch,
        patch_block_types,
        patch_numpy_types,
        patch_overflow_checks,
        patch_calls,
        patch_operands,
    ):
        with contextlib.suppress(AttributeError):  # of what this Triton does not have, before anything is replaced
            patch()


def patch_once_a_launch() -> None:
    """Its launches replace the functions of triton.language by their own and put them back at the end.  It does the same again
    whenever a device function is called, where all of them are replaced already: that took half of a launch's time."""
    patch_lang, patched = interpreter._patch_lang, set[int]()  # modules whose functions are replaced just now
    seen: dict[Any, set[int]] = {}

    class Scope(interpreter._LangPatchScope):
        """A launch's: when it ends, nothing is replaced."""

        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch(fn: Any) -> Any:
        modules = seen.get(fn)
        if modules is None:  # as patch_lang looks for them
            modules = seen[fn] = {
                id(value) for value in fn.__globals__.values() if value is triton.language or value is core
            }
        if modules and modules <= patched:
            return Scope()
        scope = Scope()
        scope._changes = patch_lang(fn)._changes
        patched.update(modules)
        return scope

    interpreter._patch_lang = patch


def patch_block_types() -> None:
    """A block type and a tensor's shape are looked up by element type and sizes, where they were made before."""
    first, tensor_first = core.block_type.__init__, core.tensor.__init__
    kept: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [s.value if type(s) is core.constexpr else s for s in shape]
        key = (element_ty.__class__, element_ty.name, *sizes) if all(type(s) is int for s in sizes) else None
        if key is None or key not in kept:
            first(self, element_ty, shape)
            if key is not None:
                kept[key] = {name: self.__dict__[name] for name in ("shape", "numel", "name")}
            return
        self.element_ty = element_ty
        self.__dict__.update(kept[key])

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        name = type.name if type.is_block() else ""
        if name not in shapes:
            tensor_first(self, handle, type)
            shapes[name] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[name]

    core.block_type.__init__, core.tensor.__init__ = init, tensor_init


def patch_numpy_types() -> None:
    """numpy's type of an element is looked up, not in a table made for each question."""
    found, kept = interpreter._get_np_dtype, dict[Any, Any]()

    def look_up(kind: Any) -> Any:
        key = kind.__class__, kind.name
        if key not in kept:
            kept[key] = found(kind)
        return kept[key]

    interpreter._get_np_dtype = look_up


def patch_overflow_checks() -> None:
    """Whether integers overflow is computed for an assertion that needs `debug`, which the interpreter's options leave off."""
    slow = TritonSemantic.binary_op_sanitize_overflow_impl

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug or not isinstance(self.builder, InterpreterBuilder):
            slow(self, lhs, rhs, binary_op)

    TritonSemantic.binary_op_sanitize_overflow_impl = check


def patch_calls() -> None:
    """A function of triton.language is called through what it wraps, and its arguments are not copied."""
    first, wrapper = interpreter._patch_attr, core.builtin(lambda: None).__code__

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        if len(scope) != 1 or getattr(member, "__code__", None) is not wrapper:
            first(obj, name, member, builder, *scope)
            return
        semantic, inner = interpreter.TritonSemantic(builder), member.__wrapped__

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return inner(*args, **options)

        scope[0].set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr


KEPT = 1024  # numbers as tensors
ELEMENTS = 1 << 14  # of the largest


def patch_operands() -> None:
    """What an operation does to its operands (casts, splats, broadcasts) follows from their types and is found once for each
    pair; a number becomes a tensor once, of memory that is not written."""
    first, tensor, plain = TritonSemantic.binary_op_type_checking_impl, core.tensor, (int, float, bool)
    kept: dict[Any, tuple[Any, Any]] = {}
    numbers: dict[Any, Any] = {}

    def check(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        left, right = type(lhs) is tensor, type(rhs) is tensor
        known = (left or type(lhs) in plain) and (right or type(rhs) in plain) and (left or right)
        if not known or type(self.builder) is not InterpreterBuilder:
            return first(self, lhs, rhs, *flags, **named)
        a = (lhs.type.__class__, lhs.type.name) if left else (type(lhs), lhs)
        b = (rhs.type.__class__, rhs.type.name) if right else (type(rhs), rhs)
        key = (a, b, flags, *named.items())
        found = kept.get(key) if left and right else numbers.get(key)
        if found is None:
            found = first(self, lhs, rhs, *flags, **named)
            one, other = (_conversion(x, y) for x, y in zip((lhs, rhs), found, strict=True))
            if left and right:
                kept[key] = one, other
            elif (number := found[left]).handle.data.size <= ELEMENTS:
                if len(numbers) >= KEPT:
                    numbers.clear()
                number.handle.data.flags.writeable = False
                numbers[key] = (one, number) if left else (number, other)
            return found
        one, other = found
        return (_converted(self, lhs, one) if left else one), (_converted(self, rhs, other) if right else other)

    TritonSemantic.binary_op_type_checking_impl = check
    broadcast, conversions = TritonSemantic.broadcast_impl_value, dict[Any, tuple[Any, Any]]()

    def broadcast_both(self: Any, lhs: Any, rhs: Any) -> Any:
        if type(self.builder) is not InterpreterBuilder:
            return broadcast(self, lhs, rhs)
        key = lhs.type.__class__, lhs.type.name, rhs.type.__class__, rhs.type.name
        if key not in conversions:
            found = broadcast(self, lhs, rhs)
            conversions[key] = _conversion(lhs, found[0]), _conversion(rhs, found[1])
            return found
        one, other = conversions[key]
        return _converted(self, lhs, one), _converted(self, rhs, other)

    TritonSemantic.broadcast_impl_value = broadcast_both


def _conversion(x: Any, y: Any) -> Any:
    """How an operand becomes what takes part: None as it is, else its new element type or None, and its new type or None."""
    if x is y or not hasattr(x, "handle"):
        return None
    cast = x.type.scalar != y.type.scalar
    same = x.type.is_block() == y.type.is_block() and x.handle.data.shape == y.handle.data.shape
    return (y.type.scalar if cast else None), (None if same else y.type)


def _converted(semantic: Any, x: Any, way: Any) -> Any:
    """The operand, cast and broadcast."""
    if way is None:
        return x
    element, kind = way
    if element is not None:
        x = semantic.cast(x, element)
    if kind is None:
        return x
    if not x.type.is_block():
        return semantic.tensor(semantic.builder.create_splat(kind, x.handle), kind)
    handle, sizes = x.handle, kind.get_block_shapes()
    for _ in range(len(sizes) - len(x.type.get_block_shapes())):
        handle = semantic.builder.create_expand_dims(handle, 0)
    return semantic.tensor(semantic.builder.create_broadcast(handle, list(sizes)), kind)
