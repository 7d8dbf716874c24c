"""The public API as text, a line a name: `python scripts/docs/public_api.py` shows what changed, `--write` renews the list.

Names come from every `__all__`, as the reference has them; functions with their signatures, classes with their bases, fields and
public methods, values with nothing more.  A name that several modules have stands in full where it is documented.  The commands
of `tilefold` follow, with their arguments and options.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any

import griffe
import site_api
import typer

from tilefold.cli.app import app

__all__ = ["KEPT", "commands", "difference", "lines"]

KEPT = Path(__file__).resolve().parents[2] / "tests" / "public_api.txt"
# Public modules that guides describe, and the reference does not.
BESIDE = ("tilefold.compat.fastvideo_kernel", "tilefold.compat.flex_attention")
OWN = {"--help", "--install-completion", "--show-completion"}  # typer's


def _text(value: object) -> str:
    """An expression of the source on one line."""
    return " ".join(str(value).split())


def signature(found: griffe.Function) -> str:
    """Parameters with kinds, annotations and defaults, then what is returned."""
    parts: list[str] = []
    kinds = [one.kind for one in found.parameters]
    for index, one in enumerate(found.parameters):
        kind = one.kind
        if kind is griffe.ParameterKind.keyword_only and not any(
            earlier in (griffe.ParameterKind.keyword_only, griffe.ParameterKind.var_positional)
            for earlier in kinds[:index]
        ):
            parts.append("*")
        star = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(kind, "")
        text = star + one.name + (f": {_text(one.annotation)}" if one.annotation is not None else "")
        if one.default is not None and not star:
            text += f" = {_text(one.default)}"
        parts.append(text)
        only = griffe.ParameterKind.positional_only
        if kind is only and (index + 1 == len(kinds) or kinds[index + 1] is not only):
            parts.append("/")
    returned = f" -> {_text(found.returns)}" if found.returns is not None else ""
    return f"({', '.join(parts)}){returned}"


def _members(path: str, found: griffe.Class) -> list[str]:
    """Fields, properties and public methods that the class itself or a base of this package has."""
    lines = []
    methods = [one for one in found.members.values() if isinstance(one, griffe.Function)]
    bodies = [(one.lineno or 0, one.endlineno or 0) for one in methods if "property" not in one.labels]
    for name, member in sorted(found.all_members.items()):
        if name != "__init__" and name != "__call__" and name.startswith("_"):
            continue
        target = member.final_target if isinstance(member, griffe.Alias) else member
        if isinstance(target, griffe.Function):
            lines.append(f"{path}.{name}{signature(target)}")
        elif isinstance(target, griffe.Attribute):
            if name in found.members and any(first <= (target.lineno or 0) <= last for first, last in bodies):
                continue  # a function sets it on itself; a base's lines may be of another file
            kind = f": {_text(target.annotation)}" if target.annotation is not None else ""
            default = (
                f" = {_text(target.value)}" if target.value is not None and "property" not in target.labels else ""
            )
            lines.append(f"{path}.{name}{kind}{default}")
    return lines


def described(path: str, what: griffe.Object) -> list[str]:
    """A public name's lines."""
    if isinstance(what, griffe.Function):
        return [f"{path}{signature(what)}"]
    if isinstance(what, griffe.Class):
        return [f"class {path}({', '.join(_text(base) for base in what.bases)})", *_members(path, what)]
    return [f"module {path}" if isinstance(what, griffe.Module) else path]


def _beside(module: griffe.Module) -> list[str]:
    """The names of a module that the reference has no page of; what it hands on from another library by its name there."""
    found = []
    for name in map(str, module.exports or ()):
        goal = module.imports.get(name, f"{module.path}.{name}")
        inside = goal.startswith("tilefold.")
        what = site_api.package()[tuple(goal.split(".")[1:])] if inside else None
        target = what.final_target if isinstance(what, griffe.Alias) else what
        path = f"{module.path}.{name}"
        found += [f"{path} = {goal}"] if target is None else described(path, target)
    return found


def commands(name: str, command: Any) -> list[str]:
    """A command's line, with its arguments and options by name, then those of its commands."""
    given = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    names = [one.name.upper() for one in given]
    names += sorted("/".join((*one.opts, *one.secondary_opts)) for one in options if not {*one.opts} & OWN)
    inside = getattr(command, "commands", {})
    return [
        " ".join(["$", name, *names]),
        *(line for key in sorted(inside) for line in commands(f"{name} {key}", inside[key])),
    ]


def lines() -> list[str]:
    """The public API: names, sorted, then the command line."""
    owners, found = site_api.owners(), []
    for one in site_api.public_names():
        owner = owners[one.defined]
        found += [f"{one.path} = {owner.path}"] if owner != one else described(one.path, site_api.definition(one))
    for path in BESIDE:
        found += _beside(site_api.module_of(path))
    found.sort(key=lambda line: line.removeprefix("class ").removeprefix("module ").replace("(", " ", 1))
    return found + commands("tilefold", typer.main.get_command(app))


def difference() -> list[str]:
    """What was kept (-) and what is there (+), without what is equal."""
    kept = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.is_file() else []
    return [one for one in difflib.unified_diff(kept, lines(), "kept", "now", lineterm="", n=0) if one[:2] != "@@"]


def main() -> None:
    """Show the difference, or write the list."""
    if sys.argv[1:] == ["--write"]:
        KEPT.write_text("\n".join(lines()) + "\n", encoding="utf-8")
    elif found := difference():
        raise SystemExit("\n".join([*found, "", "If this is meant: make api API=--write, and a line in CHANGELOG.md"]))


if __name__ == "__main__":
    main()
