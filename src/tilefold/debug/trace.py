"""Every load and store of Triton's interpreter, seen before it happens: who wrote what, and what would go astray.

The interpreter's one builder makes all memory accesses, those of tensor descriptors and block pointers too, through four methods
(triton 3.6 to 3.9: create_masked_load, create_masked_store, create_atomic_rmw, create_atomic_cas); they are replaced while a
kernel runs. Lanes that would go astray are masked off and recorded, so that a wrong kernel does not take the process with it.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tilefold.debug.guard import Guarded
from tilefold.debug.report import Fault
from tilefold.errors import Unsupported

VERBS = {"store": "stored to", "load": "loaded from"}
METHODS = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")


class Trace:
    """What a kernel did to the given tensors. rank: axes of its grid, once it is started; programs: how many it has, 0 before."""

    def __init__(self, tensors: Sequence[Guarded]) -> None:
        self.tensors = sorted(tensors, key=lambda one: one.low)
        self.lows = np.array([one.low for one in self.tensors], np.uint64)
        self.found: dict[tuple[str, str], Fault] = {}
        self.rank, self.started = 3, False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Replace the builder's methods; Unsupported if this Triton's interpreter has others."""
        builder: Any = interpreter.interpreter_builder
        missing = [name for name in METHODS if not hasattr(builder, name)]
        if missing:
            raise Unsupported(
                f"the interpreter of this Triton has no {', '.join(missing)}; tested with triton 3.6 to 3.9"
            )
        watches: tuple[Any, ...] = (self._load, self._store, self._atomic_rmw, self._atomic_cas)
        for name, watched in zip(METHODS, watches, strict=True):
            setattr(builder, name, partial(watched, getattr(builder, name)))
        options = builder.options  # device_assert is heeded; arithmetic that wraps on purpose is not complained of
        builder.options = dataclasses.replace(options, debug=True, sanitize_overflow=False)
        try:
            yield
        finally:
            builder.options = options
            for name in METHODS:
                delattr(builder, name)  # of the instance: its class's is visible again

    @property
    def program(self) -> tuple[int, ...]:
        """Ids of the running program on the axes of the grid."""
        return tuple(interpreter.interpreter_builder.grid_idx[: self.rank])

    @property
    def programs(self) -> int:
        return int(np.prod(interpreter.interpreter_builder.grid_dim)) if self.started else 0

    def ids(self, linear: int) -> tuple[int, ...]:
        """Program ids from the number that `Guarded.writer` holds."""
        return tuple(int(i) for i in np.unravel_index(linear, interpreter.interpreter_builder.grid_dim))[: self.rank]

    def _linear(self) -> int:
        x, y, z = interpreter.interpreter_builder.grid_idx
        _, along_y, along_z = interpreter.interpreter_builder.grid_dim
        return int((x * along_y + y) * along_z + z)

    def blame(self, kind: str, tensor: str, index: tuple[int, ...] | None, count: int, did: str) -> None:
        """Record what the running program did wrong; later faults of the same kind in the same tensor are counted."""
        text = f"program {as_ids(self.program)} {did}"
        known = self.found.get((kind, tensor)) or Fault(kind, tensor, index, self.program, 0, text)
        self.found[kind, tensor] = dataclasses.replace(known, count=known.count + count)

    def _load(self, original: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        live = _lanes(mask, pointers)
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        astray = self._split(pointers.data, live, width, None)
        if not astray.any():
            return original(pointers, mask, *rest, **named)
        loaded = original(pointers, _masked(live & ~astray), *rest, **named)
        raw = np.array(loaded.data)
        poison = 1 if raw.dtype == bool else 0xFF  # NaN in floats: nothing is known of what lies there
        raw.reshape(-1).view(np.uint8).reshape(-1, raw.itemsize)[astray.reshape(-1)] = poison
        loaded.data = raw
        return loaded

    def _store(
        self, original: Any, pointers: Any, value: Any, mask: Any, *rest: Any, atomic: bool = False, **named: Any
    ) -> Any:
        live = _lanes(mask, pointers)
        astray = self._split(pointers.data, live, value.data.itemsize, value.data, atomic)
        return original(pointers, value, _masked(live & ~astray) if astray.any() else mask, *rest, **named)

    def _atomic_rmw(self, original: Any, operation: Any, *rest: Any, **named: Any) -> Any:
        return self._store(partial(original, operation), *rest, atomic=True, **named)

    def _atomic_cas(self, original: Any, pointers: Any, compare: Any, value: Any, *rest: Any, **named: Any) -> Any:
        live = np.ones(pointers.data.shape, bool)
        if self._split(pointers.data, live, value.data.itemsize, value.data, atomic=True).any():
            raise IndexError("atomic_cas outside of the tensor")  # it has no mask to keep it from happening
        return original(pointers, compare, value, *rest, **named)

    def _split(self, pointers: Any, live: Any, width: int, values: Any, atomic: bool = False) -> Any:
        """Hand each tensor its lanes; returns which live lanes lie outside of all of them, or in gaps when storing.

        pointers: addresses; live: bools, the mask; both of one shape. width: bytes of an access. values: what is stored, None for
        a load."""
        kind = "load" if values is None else "store"
        addresses, flat = pointers.reshape(-1), live.reshape(-1)
        astray = np.zeros(flat.size, bool)
        owner = np.searchsorted(self.lows, addresses, side="right").astype(np.int64) - 1
        for number in np.unique(owner):
            lanes = owner == number
            one = self.tensors[number] if number >= 0 else None
            far = flat & (lanes if one is None else lanes & (addresses >= np.uint64(one.high)))
            if far.any():
                where = f"{int(addresses[far][0]):#x}, far from every tensor that it was given"
                self.blame(kind, "", None, int(far.sum()), f"{VERBS[kind]} address {where}")
            astray |= far
            if one is None:
                continue
            inside = lanes & (addresses >= np.uint64(one.begin)) & (addresses + np.uint64(width) <= np.uint64(one.end))
            outside = lanes & ~far & ~inside & flat
            if outside.any():
                self._outside(one, kind, addresses[outside])
                astray |= outside
            if values is not None:
                bits = np.ascontiguousarray(np.broadcast_to(values, pointers.shape)).reshape(-1)
                astray |= self._stored(one, addresses, flat, inside, bits, atomic)
        return astray.reshape(live.shape)

    def _stored(self, one: Guarded, addresses: Any, live: Any, inside: Any, bits: Any, atomic: bool) -> Any:
        """Record the lanes of a store that lie inside of one tensor; returns those that lie in gaps between its rows."""
        places = np.zeros(addresses.size, np.int64)
        places[inside] = (addresses[inside] - np.uint64(one.begin)) // np.uint64(one.itemsize)
        gaps = np.zeros(addresses.size, bool)
        gaps[inside] = one.element[places[inside]] < 0
        stray = gaps & live
        if stray.any():
            did = f"stored between the rows of {one.name}, {places[stray][0]} elements behind its first"
            self.blame("store", one.name, None, int(stray.sum()), did)
        off = places[inside & ~live & ~gaps]
        off = off[one.skipped[off] < 0]
        one.skipped[off] = self._linear()
        kept = inside & live & ~gaps
        if not kept.any():
            pass
        elif not one.written:
            index = one.index(int(places[kept][0]))
            did = f"stored to {one.name}{at_index(index)}, which is not among the outputs"
            self.blame("input", one.name, index, int(kept.sum()), did)
        elif atomic or bits.itemsize != one.itemsize:  # values of a cast pointer are not those that lie there
            for part in range(max(1, bits.itemsize // one.itemsize)):
                one.writer[places[kept] + part] = self._linear()
        else:
            self._record(one, places[kept], bits[kept].view(one.bits.dtype))
        return stray

    def _record(self, one: Guarded, places: Any, bits: Any) -> None:
        """Who wrote these elements; a race if another program wrote another value before, or two lanes now do."""
        own = self._linear()
        before = one.writer[places]
        clash = (before >= 0) & (before != own) & (one.bits[places] != bits)
        if clash.any():
            lane = int(np.argmax(clash))
            index, first = one.index(int(places[lane])), as_ids(self.ids(int(before[lane])))
            where = (
                f"{one.name}{at_index(index)}, where program {first} had written {one.value(one.bits[places[lane]])}"
            )
            self.blame("race", one.name, index, int(clash.sum()), f"wrote {one.value(bits[lane])} to {where}")
        order = np.argsort(places, kind="stable")
        same = (places[order][1:] == places[order][:-1]) & (bits[order][1:] != bits[order][:-1])
        if same.any():
            lane = int(order[int(np.argmax(same)) + 1])
            index = one.index(int(places[lane]))
            did = f"wrote {one.name}{at_index(index)} in two lanes of one store, differently"
            self.blame("race", one.name, index, int(same.sum()), did)
        one.writer[places] = own

    def _outside(self, one: Guarded, kind: str, addresses: Any) -> None:
        past = addresses >= np.uint64(one.end)
        nearest = int(addresses[past].min() if past.any() else addresses.max())
        away = (nearest - one.end) // one.itemsize + 1 if past.any() else -((nearest - one.begin) // one.itemsize)
        where = "behind the last" if past.any() else "before the first"
        more = f" and at {addresses.size - 1} places more" if addresses.size > 1 else ""
        did = f"{VERBS[kind]} {one.name} {list(one.shape)} outside of it, {away} {where} element{more}"
        self.blame(kind, one.name, None, int(addresses.size), did)


def _lanes(mask: Any, pointers: Any) -> Any:
    """The mask as bools of the pointers' shape."""
    return np.broadcast_to(np.asarray(mask.data, bool), pointers.data.shape)


def _masked(live: Any) -> Any:
    return interpreter.TensorHandle(np.array(live), tl.int1)


def as_ids(program: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, program))})"


def at_index(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]" if index else ""
