"""Frozen records to JSON and back, exactly: every field by value, nothing guessed, nothing ignored."""

import json
import types
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from tilefold.errors import PlanError

Record = TypeVar("Record")


def to_json(record: Any, **beside: str) -> str:
    """A record (a dataclass of numbers, strings, tuples and records) as indented JSON; floats keep every bit.  beside: texts that
    are no field of it."""
    return json.dumps(beside | _encode(record), indent=2, allow_nan=False)


def from_json(kind: type[Record], text: str) -> Record:
    """The record of type `kind` that `to_json` wrote. PlanError names a field that is missing, unknown or mistyped."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError) as error:
        raise PlanError(f"text is not JSON: {error}") from None
    record: Record = _decode(kind, value, kind.__name__)
    return record


def _encode(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _decode(kind: Any, value: Any, path: str) -> Any:
    if is_dataclass(kind):
        return _decode_record(kind, value, path)
    origin = get_origin(kind)
    if origin is tuple:
        return _decode_tuple(get_args(kind), value, path)
    accepted = get_args(kind) if origin in (Union, types.UnionType) else (kind,)
    record = next((one for one in accepted if is_dataclass(one)), None)
    if record is not None and isinstance(value, dict):
        return _decode_record(record, value, path)
    if float in accepted and type(value) is int:
        return value
    # `type(value) in`, not isinstance: true is not the number 1.
    if type(value) not in accepted:
        names = " or ".join("null" if one is type(None) else one.__name__ for one in accepted)
        raise PlanError(f"{path} must be {names}, got {value!r}")
    return value


def _decode_record(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise PlanError(f"{path} must be an object, got {value!r}")
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    for name in value:
        if name not in names:
            raise PlanError(f"{path} has no field {name!r}")
    for name in names:
        if name not in value:
            raise PlanError(f"{path}.{name} is missing")
    return kind(**{name: _decode(hints[name], value[name], f"{path}.{name}") for name in names})


def _decode_tuple(kinds: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise PlanError(f"{path} must be a list, got {value!r}")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_decode(kinds[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if len(kinds) != len(value):
        raise PlanError(f"{path} must have {len(kinds)} entries, got {len(value)}")
    return tuple(_decode(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))
