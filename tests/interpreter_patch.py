"""Triton's interpreter with its bookkeeping done once: what kernels compute, and what is refused, stays the same.

A tile operation of the interpreter is a few microseconds of numpy and hundreds of Python around it.  Each function here takes
out one part of that; a Triton that does it another way is left as it is.
"""

from typing import Any


def patch() -> None:
    """All of them, once a process."""
    patch_once_a_launch()
    patch_tuples()
    patch_block_types()
    patch_numpy_types()
    patch_overflow_checks()


def patch_once_a_launch() -> None:
    """Its launches replace the functions of triton.language by their own and put them back at the end.  It does the same again
    whenever a device function is called, where all of them are replaced already: that took half of a launch's time."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope") or hasattr(interpreter._patch_lang, "patched"):
        return
    patch_lang, patched = interpreter._patch_lang, set[int]()  # modules whose functions are replaced just now
    seen: dict[Any, set[int]] = {}

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc, name-defined]
        """A launch's: when it ends, nothing is replaced."""

        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch(fn: Any) -> Any:
        modules = seen.get(fn)
        if modules is None:  # as patch_lang looks for them
            modules = seen[fn] = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if modules and modules <= patched:
            return Scope()
        scope = Scope()
        scope._changes = patch_lang(fn)._changes
        patched.update(modules)
        return scope

    patch.patched = patched  # type: ignore[attr-defined]
    interpreter._patch_lang = patch


def patch_tuples() -> None:
    """A tuple's type, a text of all its elements' types, is made when it is asked for: shapes of tensors never are."""
    from triton.language import core

    made = getattr(core, "_type_for_tuple_values", None)
    if made is None or hasattr(core.tuple.__init__, "lazy"):
        return
    first, attribute = core.tuple.__init__, core.tuple.__getattr__

    def init(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            first(self, args, type)

    def get(self: Any, name: str) -> Any:
        if name == "type":
            self.type = made(self.values)
            return self.type
        return attribute(self, name)

    init.lazy = True  # type: ignore[attr-defined]
    core.tuple.__init__, core.tuple.__getattr__ = init, get


def patch_block_types() -> None:
    """A block type and a tensor's shape are looked up by element type and sizes, where they were made before."""
    from triton.language import core

    if hasattr(core.block_type.__init__, "kept"):
        return
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

    init.kept = kept  # type: ignore[attr-defined]
    core.block_type.__init__, core.tensor.__init__ = init, tensor_init


def patch_numpy_types() -> None:
    """numpy's type of an element is looked up, not in a table made for each question."""
    from triton.runtime import interpreter

    found = getattr(interpreter, "_get_np_dtype", None)
    if found is None or hasattr(found, "kept"):
        return
    kept: dict[Any, Any] = {}

    def look_up(kind: Any) -> Any:
        key = kind.__class__, kind.name
        if key not in kept:
            kept[key] = found(kind)
        return kept[key]

    look_up.kept = kept  # type: ignore[attr-defined]
    interpreter._get_np_dtype = look_up


def patch_overflow_checks() -> None:
    """Whether integers overflow is computed for an assertion that needs `debug`, which the interpreter's options leave off."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import InterpreterBuilder

    slow = getattr(TritonSemantic, "binary_op_sanitize_overflow_impl", None)
    if slow is None or hasattr(slow, "unless_heard"):
        return

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug or not isinstance(self.builder, InterpreterBuilder):
            slow(self, lhs, rhs, binary_op)

    check.unless_heard = True  # type: ignore[attr-defined]
    TritonSemantic.binary_op_sanitize_overflow_impl = check
