"""The arguments of an operation as torch's dispatcher takes them: tensors first, then numbers and words; and back again.

An operator's schema holds neither records nor functions nor mixed tuples.  So a record comes as its fields, a hook by the name
of its `Constant`, and the args of a mod as a word that says how they interleave ("tif": a tensor, an int, a float), their ints
and their floats; their tensors are in one list, with those of other mods.  Annotations say what an argument is.
"""

import inspect
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ForwardRef, Literal, Union, get_args, get_origin

import torch

from ..errors import Unsupported
from ..types import Constant, ModArgs, Window, constant

Tensors = list[Any]  # of tensors and None
NO_CHANGE: Callable[[Any], Any] = lambda value: value  # noqa: E731


class Field:
    """A number, a word, or a tensor; and how a value of another kind becomes such."""

    def __init__(
        self, name: str, kind: Any, encode: Callable[[Any], Any] = NO_CHANGE, decode: Callable[[Any], Any] = NO_CHANGE
    ) -> None:
        self.tensors: tuple[str, ...] = (name,) if kind in (torch.Tensor, torch.Tensor | None) else ()
        self.options: tuple[tuple[str, Any], ...] = () if self.tensors else ((name, kind),)
        self.name, self.kind, self.encode_one, self.decode_one = name, kind, encode, decode

    def take(self, value: Any) -> tuple[Any, Tensors, Tensors]:
        """The value without its tensors; the tensors that every call has a place for; those of mods, of which there are any
        number."""
        return (None, [value], []) if self.tensors else (value, [], [])

    def join(self, bare: Any, tensors: Iterator[Any], more: Iterator[Any]) -> Any:
        """What `take` took apart."""
        return next(tensors) if self.tensors else bare

    def encode(self, bare: Any) -> list[Any]:
        """Of a value without its tensors: what a schema has for it."""
        return [] if self.tensors else [self.encode_one(bare)]

    def decode(self, options: Iterator[Any]) -> Any:
        """What `encode` took."""
        return None if self.tensors else self.decode_one(next(options))


class Aside(Field):
    """What a record keeps for itself: no part of a schema, its default for who comes through the dispatcher."""

    def __init__(self, name: str, default: Any = None) -> None:
        super().__init__(name, None)
        self.options, self.default = (), default

    def encode(self, bare: Any) -> list[Any]:
        return []

    def decode(self, options: Iterator[Any]) -> Any:
        return self.default


class Sides(Field):
    """A window: -1 for a side that is unbounded."""

    def __init__(self, name: str) -> None:
        super().__init__(name, None)
        self.options = ((f"{name}_left", int), (f"{name}_right", int))

    def encode(self, bare: Window | None) -> list[Any]:
        return [-1 if side is None else side for side in bare or (None, None)]

    def decode(self, options: Iterator[Any]) -> Window:
        return next(options), next(options)


class Args(Field):
    """What a mod gets."""

    def __init__(self, name: str) -> None:
        super().__init__(name, None)
        self.options = ((f"{name}_kinds", str), (f"{name}_ints", Sequence[int]), (f"{name}_floats", Sequence[float]))

    def take(self, value: ModArgs) -> tuple[Any, Tensors, Tensors]:
        if type(value) is not tuple:  # the checks say so
            return value, [], []
        bare = tuple([None if isinstance(a, torch.Tensor) else a for a in value])
        return bare, [], [a for a in value if isinstance(a, torch.Tensor)]

    def join(self, bare: Any, tensors: Iterator[Any], more: Iterator[Any]) -> Any:
        return tuple([next(more) if a is None else a for a in bare]) if type(bare) is tuple else bare

    def encode(self, bare: ModArgs) -> list[Any]:
        kinds = ["t" if a is None else "f" if isinstance(a, float) else "i" for a in bare]
        ints, floats = ([a for a, one in zip(bare, kinds, strict=True) if one == kind] for kind in "if")
        return ["".join(kinds), ints, floats]

    def decode(self, options: Iterator[Any]) -> ModArgs:
        kinds, ints, floats = next(options), iter(next(options)), iter(next(options))
        return tuple([None if kind == "t" else next(ints if kind == "i" else floats) for kind in kinds])


class Group(Field):
    """Several values: tensors in their places, and what takes more to be taken apart."""

    def __init__(self, name: str, fields: Sequence[Field]) -> None:
        super().__init__(name, None)
        self.fields = tuple(fields)
        self.places = tuple([at for at, field in enumerate(fields) if type(field) is Field and field.tensors])
        self.nested = tuple([(at, field) for at, field in enumerate(fields) if isinstance(field, Args | Group)])
        inner = [fields[at] for at in self.places] + [field for _, field in self.nested]
        self.tensors = tuple([name for field in inner for name in field.tensors])
        self.options = tuple([option for field in fields for option in field.options])
        self.hooks = tuple([at for at, field in enumerate(fields) if field.decode_one is hook_of])

    def take(self, value: Any) -> tuple[Any, Tensors, Tensors]:
        items = list(value)
        tensors, more = [items[at] for at in self.places], []
        for at in self.places:
            items[at] = None
        for at, field in self.nested:
            items[at], fixed, others = field.take(items[at])
            tensors += fixed
            more += others
        return items, tensors, more

    def join(self, bare: Any, tensors: Iterator[Any], more: Iterator[Any]) -> Any:
        items = list(bare)
        for at in self.places:
            items[at] = next(tensors)
        for at, field in self.nested:
            items[at] = field.join(items[at], tensors, more)
        return items

    def encode(self, bare: Any) -> list[Any]:
        return [each for field, item in zip(self.fields, bare, strict=True) for each in field.encode(item)]

    def decode(self, options: Iterator[Any]) -> Any:
        return [field.decode(options) for field in self.fields]


class Pair(Group):
    """A tuple of tensors."""

    def __init__(self, name: str, kinds: Sequence[Any]) -> None:
        super().__init__(name, [field_of(f"{name}_{i}", kind) for i, kind in enumerate(kinds)])

    def join(self, bare: Any, tensors: Iterator[Any], more: Iterator[Any]) -> Any:
        return tuple(super().join(bare, tensors, more))


class Record(Group):
    """A NamedTuple as its fields; where there may be none, a bool says whether there is."""

    def __init__(self, name: str, kind: Any, optional: bool, prefix: str, parts: Sequence[type]) -> None:
        annotations = zip(kind._fields, kind.__annotations__.values(), strict=True)
        fields = [field_of(prefix + each, annotation, optional, parts, False) for each, annotation in annotations]
        for each, field in zip(kind._fields, fields, strict=True):
            if isinstance(field, Aside):
                field.default = kind._field_defaults.get(each)
        super().__init__(name, fields)
        self.kind, self.optional = kind, optional
        self.options = ((name, bool), *self.options) if optional else self.options

    def resolved(self, value: Any) -> Any:
        """The record with the objects that its `Constant`s name."""
        return value._replace(**{self.kind._fields[at]: value_of(value[at]) for at in self.hooks})

    def without(self, value: Any) -> bool:
        """Whether the record holds no tensors, as most do: then it is what `take` would make of it."""
        if not isinstance(value, self.kind):
            return value is None
        for at in self.places:
            if value[at] is not None:
                return False
        return all(
            field.without(value[at]) if isinstance(field, Record) else value[at] == () for at, field in self.nested
        )

    def take(self, value: Any) -> tuple[Any, Tensors, Tensors]:
        if not isinstance(value, self.kind) or self.without(value):
            return value if isinstance(value, self.kind) else None, [None] * len(self.tensors), []
        items, tensors, more = super().take(value)
        return self.kind(*items), tensors, more

    def join(self, bare: Any, tensors: Iterator[Any], more: Iterator[Any]) -> Any:
        taken = [next(tensors) for _ in self.tensors]
        if self.without(bare) and all(t is None for t in taken):
            return bare
        return self.kind(*super().join(bare, iter(taken), more))

    def encode(self, bare: Any) -> list[Any]:
        if bare is None:
            return [empty_of(kind) for _, kind in self.options]
        return [True, *super().encode(bare)] if self.optional else super().encode(bare)

    def decode(self, options: Iterator[Any]) -> Any:
        there = next(options) if self.optional else True
        items = super().decode(options)
        return self.kind(*items) if there else None


def several(places: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """The items at these places, of what is long enough."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda items: tuple([items[at] for at in places])


def empty_of(kind: Any) -> Any:
    """What stands in a schema for a value of a record that is not there."""
    return (
        kind() if kind in (bool, int, float, str) else [] if get_origin(kind) is not Union and get_args(kind) else None
    )


def field_of(
    name: str, annotation: Any, optional: bool = False, parts: Sequence[type] = (), parameter: bool = True
) -> Field:
    """What a parameter or the field of a record is.  optional: of a record that may not be there.  parts: the records that may
    be fields."""
    alternatives = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    if annotation in (torch.Tensor, torch.Tensor | None):
        return Field(name, torch.Tensor | None if optional else annotation)
    if annotation is Any:
        return Aside(name)
    if annotation == Window | None:
        return Sides(name)
    if annotation == ModArgs:
        return Args(name)
    if get_origin(annotation) is tuple and set(get_args(annotation)) <= {int, ...}:
        return Field(name, Sequence[int], list, tuple)
    if get_origin(annotation) is tuple:
        return Pair(name, get_args(annotation))
    if isinstance(annotation, ForwardRef | str) or Constant in alternatives:  # the annotations of plans are text
        return Field(name, str, named, hook_of)
    records = [each for each in alternatives if hasattr(each, "_fields")]
    if records:
        served = [each for each in records if parameter or each in parts]
        if not served:
            return Aside(name)
        top = annotation is served[0]
        return Record(name, served[0], not top, "" if top and parameter else f"{name}_", parts)
    if get_origin(annotation) is Literal:
        return Field(name, str)
    return Field(name, annotation, float) if annotation is float else Field(name, annotation)


class Arguments(Group):
    """Those of a function of tensors, numbers, words and records of these, by its annotations."""

    def __init__(self, function: Callable[..., Any], parts: Sequence[type] = ()) -> None:
        parameters = inspect.signature(function).parameters
        super().__init__("", [field_of(name, each.annotation, parts=parts) for name, each in parameters.items()])
        self.open = any(name.endswith("_kinds") for name, _ in self.options)  # whether mods bring tensors
        self.plain = several(self.places)
        records = [(at, field) for at, field in enumerate(self.fields) if isinstance(field, Group)]
        holding = [(at, record) for at, record in records if record.places or record.nested]  # tensors
        self.records = tuple([(at, several(record.places), record) for at, record in holding])
        self.prepared = [
            at for at, record in records if isinstance(record, Record) and "prepared" in record.kind._fields
        ]
        hooked = [(at, record) for at, record in records if isinstance(record, Record) and record.hooks]
        self.hooked = tuple([(at, several(each.hooks), each, (None,) * len(each.hooks)) for at, each in hooked])

    def given(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The tensors of a call, and None, in any order; and the args of mods.  Every call asks."""
        found = self.plain(args)
        more: tuple[Any, ...] = ()
        for at, tensors_of, record in self.records:
            value = args[at]
            if not isinstance(value, tuple):  # an optional record
                continue
            found += tensors_of(value)
            for i, field in record.nested:
                inside = value[i]
                if isinstance(inside, tuple) and inside:
                    if isinstance(field, Record):
                        found += tuple([inside[j] for j in field.places])
                    else:
                        more += inside
        return found, more

    def resolved(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with the objects that `Constant`s name."""
        for at, hooks_of, record, nothing in self.hooked:
            hooks = hooks_of(args[at])
            if hooks != nothing and Constant in map(type, hooks):
                args = (*args[:at], record.resolved(args[at]), *args[at + 1 :])
        return args

    def named(self, args: tuple[Any, ...], tensors: Tensors) -> dict[str, Any]:
        """The tensors of a call, which `take` found, and the args of mods by what callers call them."""
        found = dict(zip(self.tensors, tensors, strict=True))
        for at, _, record in self.records:
            for i, field in record.nested:
                value = args[at][i] if isinstance(args[at], tuple) else ()
                if isinstance(field, Args) and type(value) is tuple:
                    found |= {f"{record.kind._fields[i]}[{j}]": each for j, each in enumerate(value)}
        return found

    def count_of(self, args: Sequence[Any], name: str) -> int:
        """How many tensors the args of a mod have, which are those of this name; also where `take` took them out."""
        for at, _, record in self.records:
            for i, _field in record.nested:
                if isinstance(args[at], tuple) and args[at]._fields[i] == name and type(args[at][i]) is tuple:
                    return sum(each is None or isinstance(each, torch.Tensor) for each in args[at][i])
        return 0

    def prepared_with(self, args: tuple[Any, ...], bare: list[Any], found: Any) -> tuple[Any, ...]:
        """The arguments, whose record holds what was found of the call; so does that of the bare ones from here on."""
        for at in self.prepared:
            record = type(args[at])
            place = record._fields.index("prepared")
            whole = record(*args[at][:place], found, *args[at][place + 1 :])  # _replace takes three times as long
            bare[at] = whole if bare[at] is args[at] else bare[at]._replace(prepared=found)
            args = (*args[:at], whole, *args[at + 1 :])
        return args

    def alone(self, args: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...], tuple[Any, ...]]:
        """What `take` makes of arguments whose records hold no tensors, but that these have no places."""
        bare = list(args)
        for at in self.places:
            bare[at] = None
        return bare, self.plain(args), ()

    def joined(self, bare: Sequence[Any], tensors: Sequence[Any]) -> tuple[Any, ...]:
        """What `take` took apart, or `alone`; tensors: of both kinds, one behind the other."""
        if len(tensors) == len(self.places):
            args = list(bare)
            for at, tensor in zip(self.places, tensors, strict=True):
                args[at] = tensor
            return tuple(args)
        count = len(self.tensors)
        return tuple(self.join(bare, iter(tensors[:count]), iter(tensors[count:])))

    def flat(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments as a schema has them."""
        bare, tensors, more = self.take(args)
        return (*tensors, *([more] if self.open else []), *self.encode(bare))

    def whole(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        """What `flat` made flat."""
        count = len(self.tensors)
        bare = self.decode(iter(flat[count + self.open :]))
        return self.joined(bare, (*flat[:count], *(flat[count] if self.open else ())))

    def parameters(self) -> list[tuple[str, Any]]:
        """(name, annotation) of what `flat` makes."""
        kinds = {field.name: field.kind for field in leaves(self)}
        tensors = [(name, kinds[name]) for name in self.tensors]
        return [*tensors, *([("mod_tensors", Sequence[torch.Tensor])] if self.open else []), *self.options]


def leaves(group: Group) -> Iterator[Field]:
    """All fields that are no groups."""
    for field in group.fields:
        if isinstance(field, Group):
            yield from leaves(field)
        else:
            yield field


# ---------------------------------------------------------------- hooks


def value_of(hook: Any) -> Any:
    """What a `Constant` names; anything else as it is."""
    return hook.value if isinstance(hook, Constant) else hook


def hook_of(key: str) -> Any:
    """What a name in a schema stands for."""
    return Constant(key).value if key else None


def named(hook: Any) -> str:
    """The key of a hook's `Constant`, "" for None."""
    if hook is None:
        return ""
    if isinstance(hook, Constant):
        return hook.key
    if torch.compiler.is_compiling():
        raise Unsupported(
            "inside torch.compile, mod functions and plans have to be passed as tilefold.constant(...), made outside it"
        )
    return constant(hook).key
