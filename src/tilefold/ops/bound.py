"""A launch whose arguments go by the names of the kernel's own parameters, and the record of a call of attention that has it."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .integers import general

if TYPE_CHECKING:
    from .launch import Launch


Example = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""(kernel, args, kwargs) of a launch on tensors without memory: to compile ahead of time."""
Grid = int | tuple[int, int, int]


def launch_of(
    kernel: Any, grid: Grid, constants: Mapping[str, Any], device: torch.device | int, **options: Any
) -> "Launch":
    """The launch of a kernel on a grid, or on so many programs.  options: of the launch, None for none; num_warps is 4 if not
    given.  A kernel with the constant EARLY may start before the launch in front of it has ended."""
    from .launch import Launch  # here: `import tilefold` stays light

    options = {"num_warps": 4, "launch_pdl": constants.get("EARLY") or None, **options}
    given = {name: value for name, value in options.items() if value is not None}
    place = device if isinstance(device, int) else device.index or 0
    return Launch(kernel, (grid, 1, 1) if isinstance(grid, int) else grid, constants, given, place)


class Slot(NamedTuple):
    """An argument that differs from call to call: `of` names what the call gives, `make` turns that into the argument."""

    of: str
    make: Callable[[Any], Any] | None = None


class Bound:
    """A kernel's launch, and its arguments: what all calls of a key share, and slots for the rest.

    launch: of the kernel.  given: names of what a call gives, in order.  values: by the kernel's names; more than it has may be
    there, so that kernels share a table.  A parameter without a value is what a call gives by its name; KeyError names one that
    nobody gives."""

    __slots__ = ("_as_given", "_flat", "_made", "_places", "_rest", "_slots", "_template", "_values", "launch", "names")

    def __init__(self, launch: "Launch", given: Sequence[str], values: Mapping[str, Any]) -> None:
        self.launch = launch
        self._values: tuple[Mapping[str, Any], ...] = (values,)
        self.names = launch.names
        self._places = _places_of(self.names)
        self._template: list[Any] = [values.get(name, name) for name in self.names]
        as_given: list[tuple[int, int]] = []
        made: list[tuple[int, int, Callable[[Any], Any]]] = []
        for at, value in enumerate(self._template):
            if type(value) is Slot:
                place = given.index(value.of)
                if value.make is None:
                    as_given.append((at, place))
                else:
                    made.append((at, place, value.make))
                self._template[at] = None
            elif value is self.names[at]:
                if value not in given:
                    raise KeyError(f"{launch.fn.__name__} has a parameter {value!r} that its binding does not know")
                as_given.append((at, given.index(value)))
                self._template[at] = None
        self._as_given, self._made = tuple(as_given), tuple(made)
        self._slots = frozenset(at for at, *_ in (*as_given, *made))
        # what stands behind all that a call gives, where that comes first, in its order and as it is: then nothing is filled in
        in_order = not made and as_given == [(i, i) for i in range(len(given))]
        self._rest: list[Any] | None = self._template[len(given) :] if in_order else None
        self._flat: Flat | bool | None = None if made else False

    @classmethod
    def of(
        cls, kernel: Any, grid: Grid, given: Sequence[str] | int, values: Mapping[str, Any] | tuple[Any, ...],
        constants: Mapping[str, Any], device: torch.device | int, **options: Any,
    ) -> "Bound":  # fmt: skip
        """A launch by `launch_of`, and its arguments.  A number given: of the kernel's first parameters; then values may be those
        of the parameters behind them, in order."""
        if isinstance(given, int):
            names = tuple(kernel.arg_names)
            values = dict(zip(names[given:], values, strict=False)) if isinstance(values, tuple) else values
            given = names[:given]
        assert not isinstance(values, tuple)
        return cls(launch_of(kernel, grid, constants, device, **options), given, values)

    def __call__(self, given: tuple[Any, ...]) -> None:
        """Launch for a call that gives these."""
        flat = self._flat
        if self._rest is not None:
            self.launch([*given, *self._rest])
        elif flat is False:
            self.launch(self.arguments(given))
        elif isinstance(flat, Flat) and self.launch.warm:
            self.launch.flat(flat.arguments(given))
        else:
            arguments = self.arguments(given)
            self.launch(arguments)
            if flat is None:  # many lengths come once: only the second call makes what is for all later ones
                self._flat = True
            elif flat is True and self.launch._compiled is not None:
                self._flat = self._flattened(arguments)

    def _flattened(self, arguments: list[Any]) -> "Flat | bool":
        """The launch as the driver takes it; True: not yet, False: never."""
        places = self.launch.maps
        if not places:
            return places is None
        made = {at: (place, make) for at, place, make in self._made}
        if any(at not in made for at in places):
            return False
        template: list[Any] = []
        where: dict[int, int] = {}
        maps: list[Any] = []
        for at, value in enumerate(self._template):
            where[at] = len(template)
            if at in places:
                place, over = made.pop(at)
                whole = isinstance(getattr(over, "__self__", None), Box)
                maps.append((where[at], place, whole, {}, over, places[at]))
                template += [None, *places[at](arguments[at])[1:]]
            else:
                template.append(value)
        as_given = tuple([(where[at], place) for at, place in self._as_given])
        others = tuple([(where[at], place, make) for at, (place, make) in made.items()])
        return Flat(template, as_given, others, tuple(maps))

    def arguments(self, given: tuple[Any, ...]) -> list[Any]:
        """The kernel's run-time arguments, in its order."""
        if self._rest is not None:
            return [*given, *self._rest]
        arguments = self._template.copy()
        for at, place in self._as_given:
            arguments[at] = given[place]
        for at, place, make in self._made:
            arguments[at] = make(given[place])
        return arguments

    @property
    def values(self) -> dict[str, Any]:
        """What it was made of, and what makes arguments of other lengths."""
        found = {name: value for table in self._values for name, value in table.items()}
        for at, _, make in self._made:
            found[self.names[at]] = found[self.names[at]]._replace(make=make)
        return found

    def found(self, given: tuple[Any, ...]) -> bool:
        """Whether the kernel has been compiled for such a call."""
        return self.launch.found(self.arguments(given))

    def compile(self, given: tuple[Any, ...]) -> None:
        """Compile without launching; tensors may lie anywhere.  Raises what the compiler raises."""
        self.launch.compile(self.arguments(given))

    def example(self, given: tuple[Any, ...]) -> Example:
        """(kernel, args, kwargs) of a call, to compile ahead of time."""
        return self.launch.fn, general(self.arguments(given)), self.launch.keywords

    def with_values(
        self, values: Mapping[str, Any], grid: tuple[int, int, int] | None = None, given: tuple[Any, ...] = ()
    ) -> "Bound":
        """The same launch with other values, on another grid if one is given.

        values: more than the kernel has may be there; a Slot makes its argument of what the slot of this name does.  KeyError for
        another value of a slot.  given: what a call gives, whose tensors' lengths descriptors get that are `like` this one's."""
        made = object.__new__(Bound)
        made.names, made._places, made._template = self.names, self._places, self._template.copy()
        made._values, made._as_given, made._slots = (*self._values, values), self._as_given, self._slots
        template, places, slots, alike = made._template, self._places, self._slots, True
        makes: dict[int, Any] = {}
        for name, value in values.items():
            at = places.get(name)
            if at is None:
                continue
            slot = type(value) is Slot
            if slot != (at in slots):
                raise KeyError(f"{self.launch.fn.__name__} has no parameter {name!r} that is the same in all calls")
            if slot:
                makes[at] = value.make
            elif value != template[at]:
                alike = alike and self.launch.alike(at, template[at], value)
                template[at] = value
        if given:
            for at, place, make in self._made:
                box = getattr(make, "__self__", None)
                if type(box) is Box and box.describe is not None and (own := box.like(given[place])) is not box:
                    makes[at] = own.over
        made._made = (
            tuple([(at, place, makes.get(at, make)) for at, place, make in self._made]) if makes else self._made
        )
        made._rest = None if self._rest is None else template[len(self.names) - len(self._rest) :]
        made._flat = None if self._made else False
        made.launch = self.launch if grid is None and alike else self.launch.on_grid(grid, alike)
        return made


class Flat(NamedTuple):
    """The arguments of a launch with descriptors as Triton 3.6's C launcher takes them: of each a tensor map, shape and strides.

    A map follows from an address; the rest is that of the argument's `Box`.  template, as_given, made: as of `Bound`.  maps:
    (where, what of a call, whether that is the tensor, those of known addresses, what makes a descriptor, what a map of it)."""

    template: list[Any]
    as_given: tuple[tuple[int, int], ...]
    made: tuple[tuple[int, int, Callable[[Any], Any]], ...]
    maps: tuple[tuple[int, int, bool, dict[int, Any], Callable[[Any], Any], Callable[[Any], list[Any]]], ...]

    def arguments(self, given: tuple[Any, ...]) -> list[Any]:
        """`Bound.arguments`."""
        arguments = self.template.copy()
        for at, place in self.as_given:
            arguments[at] = given[place]
        for at, place, make in self.made:
            arguments[at] = make(given[place])
        for at, place, whole, known, over, make in self.maps:
            one = given[place] if whole else over(given[place])
            address = one.data_ptr() if whole else one.base.data_ptr()
            found = known.get(address)
            if found is None:
                if len(known) >= MAPS:
                    known.clear()
                found = known[address] = make(over(one) if whole else one)[0]
            arguments[at] = found
        return arguments


MAPS = 1024  # of a descriptor; tensors that lie elsewhere in every call begin anew


@functools.cache
def _places_of(names: tuple[str, ...]) -> dict[str, int]:
    return {name: at for at, name in enumerate(names)}


_CHECKED: dict[Any, tuple[Any, dict[str, Any]]] = {}  # a descriptor's class and fields, by class, layout and block


class Box:
    """A host tensor descriptor that moves from tensor to tensor of the same shape and strides, or of another length.

    Making one anew costs the host 3 us of checks that the first one already passed; `over` skips them."""

    __slots__ = ("_fields", "_kind", "describe", "rows")

    def __init__(
        self,
        tensor: torch.Tensor,
        shape: list[int],
        strides: list[int],
        block: list[int],
        kind: Any = None,
        layout: Any = None,
    ) -> None:
        """kind: Gluon's descriptor, which also has the layout of the box in shared memory; None: Triton's."""
        # Where a tensor has its length, and the strides from there on.
        self.rows: tuple[int, tuple[int, ...]] | None = None
        self.describe: Callable[[torch.Tensor], Box] | None = None
        key = kind, layout, tuple(block)
        checked = _CHECKED.get(key)
        if checked is None:  # by Triton, once: shape and strides of other lengths are as good
            if kind is None:
                from triton.tools.tensor_descriptor import TensorDescriptor

                kind = TensorDescriptor
            extra = () if layout is None else (layout,)
            checked = _CHECKED[key] = kind, {**kind(tensor, shape, strides, block, *extra).__dict__, "base": None}
        self._kind, fields = checked
        self._fields = {**fields, "shape": shape, "strides": strides}

    def like(self, tensor: torch.Tensor) -> "Box":
        """That of a tensor which differs from this one's in its length, and in strides that follow; this one, if `over` knows."""
        assert self.describe is not None
        if self.rows is not None and tensor.shape[at := self.rows[0]] > 1 and tensor.stride()[at:] == self.rows[1]:
            return self
        return self.describe(tensor)

    def over(self, tensor: torch.Tensor) -> Any:
        """The descriptor of `tensor`, whose base has to be 16-byte aligned."""
        descriptor = object.__new__(self._kind)
        fields = descriptor.__dict__
        fields.update(self._fields)
        fields["base"] = tensor
        if self.rows is not None:
            at, (batch, heads, _, *rest) = self.rows[0], fields["shape"]
            fields["shape"] = [batch, heads, tensor.shape[at], *rest]
            if at and batch > 1:
                fields["strides"] = [tensor.stride(0), *fields["strides"][1:]]
        return descriptor


@dataclass(slots=True)
class Launched:
    """The record of a call that one launch makes: what its result is made by, and the launch, None for nothing to compute."""

    shape: Any
    bound: Bound | None = None
    more: Any = None  # what one operation alone keeps
    run: Any = None  # and below: as of `Prepared`
    ways: list[Any] = field(default_factory=lambda: [None, None])


def attribute(of: str, path: str, value: object) -> Slot | None:
    """The slot of an attribute of what a call gives; None, for the kernel too, where `value`, this call's, is None."""
    return None if value is None else _attribute(of, path)


@functools.cache
def _attribute(of: str, path: str) -> Slot:
    return Slot(of, operator.attrgetter(path))


def strides_named(letter: str, strides: Sequence[int], dims: str | tuple[str, ...]) -> dict[str, int]:
    """The values of stride_qb, stride_qm, stride_qh for ("q", strides, "bmh"); of a packed tensor the last two."""
    return dict(zip(stride_names(letter, dims, len(strides)), strides, strict=True))


@functools.cache
def stride_names(letter: str, dims: str | tuple[str, ...], count: int) -> tuple[str, ...]:
    """The names of the last `count` of these."""
    return tuple(f"stride_{letter}{dim}" for dim in dims[-count:])


@functools.cache
def stand_in(dtype: torch.dtype) -> torch.Tensor:
    """A result without memory, of any shape: to compile a kernel that takes its shape and strides as numbers."""
    return meta(1, dtype=dtype)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A contiguous tensor without memory: for its strides, or as an example to compile with."""
    return torch.empty(shape, dtype=dtype, device="meta")


# ---------------------------------------------------------------- a call of attention


def new_results(
    q: torch.Tensor, out_shape: tuple[int, ...], lse_shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for out and lse.  Shapes with strides: half the time of shapes alone."""
    device = q.device
    return (
        torch.empty_strided(out_shape, contiguous(out_shape), dtype=q.dtype, device=device),
        torch.empty_strided(lse_shape, contiguous(lse_shape), dtype=torch.float32, device=device),
    )


@functools.lru_cache(maxsize=1024)
def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for at in range(len(shape) - 1, 0, -1):
        strides[at - 1] = strides[at] * (shape[at] or 1)
    return tuple(strides)


def run(
    p: "Prepared", q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call of attention that has this record; others: what it gives besides."""
    out, lse = new_results(q, p.out_shape, p.lse_shape)
    if p.bound is not None:
        if p.look is not None:
            p.look(p.sizes, q, k, call)
        p.bound((q, k, v, out, lse, call))
    return out, lse


@dataclass(slots=True)
class Prepared:
    """All that follows from the key of a call of attention: its plan, the shapes of its results, and what is launched."""

    planned: Any  # the plan, or what makes it when somebody asks; None: nothing to compute, or nothing planned
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    bound: Any = None  # what q, k, v, out, lse and the call are given to; None: nothing to compute
    scale: float = 1.0
    keep: tuple[Any, ...] = ()  # objects whose id is part of the key
    look: Callable[..., None] | None = None  # reads what says where keys lie, before the launch
    sizes: Any = None  # of all dimensions, of a call over a cache; of coarse attention, of what its scores are made of
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]] = run
    shared: dict[Any, Any] | None = None  # backward passes of lengths that make the same tiles, if shared
    ways: list[Any] = field(default_factory=lambda: [None, None])  # of `Operation`: without gradients, and with
    further: dict[Any, Any] = field(default_factory=dict)  # other launches of the call, as of its backward passes

    @property
    def plan(self) -> Any:
        """None: nothing to compute.  Of lengths that are new it is made when somebody asks."""
        if callable(self.planned):
            self.planned = self.planned()
        return self.planned

    def of_lengths(self, planned: Any, shapes: Any, bound: Any, shared: Any = None) -> "Prepared":
        """That of a call of other lengths, which shares checks and options."""
        out, lse = shapes
        return Prepared(
            planned, out, lse, bound, self.scale, self.keep, self.look, self.sizes, self.run, shared, self.ways
        )

    @property
    def problem(self) -> Any:
        """That of attention, where there is something to compute."""
        found = self.plan.problem
        return getattr(found, "attention", found)
