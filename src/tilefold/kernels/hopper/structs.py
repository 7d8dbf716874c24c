"""Aggregates whose constructor is made of their fields, and types of fields."""

import linecache

from .gluon import aggregate, constexpr_function, field, gl

Value = gl.tensor | gl.constexpr  # of the device, or a constant, None among them
Buffer = gl.shared_memory_descriptor | gl.constexpr


def struct(cls):
    """An aggregate whose constructor takes its fields, in their order or by name; a field may have a default.

    The constructor has a source of its own, as a dataclass's, because Triton hashes sources."""
    defaults = {name: vars(cls)[name] for name in cls.__annotations__ if name in vars(cls)}
    named = ", ".join(f"{name}={defaults[name]!r}" if name in defaults else name for name in cls.__annotations__)
    lines = [f"def __init__(self, {named}):\n", *(f"    self.{name} = field({name})\n" for name in cls.__annotations__)]
    file = f"<constructor of {cls.__module__}.{cls.__qualname__}>"
    linecache.cache[file] = (0, None, lines, file)
    names = {"field": field, "__name__": cls.__module__}
    exec(compile("".join(lines), file, "exec"), names)
    for name in defaults:
        delattr(cls, name)
    cls.__init__ = constexpr_function(names["__init__"])
    return aggregate(cls)
