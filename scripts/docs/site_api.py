"""The API reference's pages: every public name of every public module, found in the source without importing it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import griffe

__all__ = ["MODULES", "Name", "owners", "page_of", "pages", "public_names"]

SOURCE = Path(__file__).resolve().parents[2] / "src"
# In the order of the navigation, each with what it is for.
MODULES = {
    "tilefold": "attention, caches, errors",
    "tilefold.sparse": "lists of blocks and the stages of video attention",
    "tilefold.paged": "KV caches in pages",
    "tilefold.nn": "torch modules, models in few bits",
    "tilefold.ops": "matrix products, convolution, transposition",
    "tilefold.quant": "weights in few bits",
    "tilefold.parallel": "several GPUs",
    "tilefold.plan": "plans, devices, costs",
    "tilefold.reference": "oracles in fp64, and the tolerance",
    "tilefold.debug": "helpers for writing kernels",
    "tilefold.profiling": "what bounds each kernel",
    "tilefold.ladder": "attention in five short programs",
    "tilefold.aot": "compilation ahead of time",
    "tilefold.compat.flash_attn": "flash-attention's functions",
}
HEADLESS = """
    options:
      show_root_heading: false
      show_root_toc_entry: false
      members: false"""


@dataclass(frozen=True)
class Name:
    """One name of a module's __all__: where it is public, what it is called there, and where it is defined.

    hidden: a file of the same name lies there (tilefold.sparse.coarse): as a dotted name of the source it means that file."""

    module: str
    name: str
    defined: str
    hidden: bool = False

    @property
    def path(self) -> str:
        """The dotted name by which a user has it."""
        return f"{self.module}.{self.name}"

    @property
    def anchor(self) -> str:
        """What the reference has it by."""
        return self.defined if self.hidden else self.path


@cache
def package() -> griffe.Module:
    """tilefold as its source says; nothing is imported."""
    found = griffe.load("tilefold", search_paths=[str(SOURCE)], allow_inspection=False)
    assert isinstance(found, griffe.Module)
    return found


def module_of(path: str) -> griffe.Module:
    """A module by its dotted name."""
    inside = path.split(".")[1:]
    found = package()[tuple(inside)] if inside else package()
    assert isinstance(found, griffe.Module), path
    return found


@cache
def public_names() -> tuple[Name, ...]:
    """Every public name of every module above, module by module, as each __all__ has it.  A module without one is an error."""
    found = []
    for path in MODULES:
        module = module_of(path)
        if not module.exports:
            raise ValueError(f"{path} has no __all__")
        for export in module.exports:
            name = str(export)
            imported = module.imports.get(name)
            hidden = module[name].is_module and imported not in (None, module[name].path)
            member = package()[tuple(imported.split(".")[1:])] if hidden and imported else module[name]
            target = member.final_target if isinstance(member, griffe.Alias) else member
            found.append(Name(path, name, target.path, hidden))
    return tuple(found)


@cache
def owners() -> dict[str, Name]:
    """By definition, the name that documents it: in the part that defines it, else in tilefold itself, else the first."""
    shown: dict[str, list[Name]] = {}
    for one in public_names():
        shown.setdefault(one.defined, []).append(one)

    def rank(one: Name) -> tuple[bool, bool]:
        inside = one.module != "tilefold" and one.defined.startswith(one.module + ".")
        return (not inside, one.module != "tilefold")

    return {defined: min(names, key=rank) for defined, names in shown.items()}


def definition(one: Name) -> griffe.Object:
    """What a name stands for, in the source."""
    found = package()[tuple(one.defined.split(".")[1:])]
    assert isinstance(found, griffe.Object), one.path
    return found


def page_of(module: str) -> str:
    """The page of a module, below docs/."""
    return f"api/{module}.md"


def page(path: str) -> str:
    """One module's page: what it says of itself, what is documented elsewhere, then its own names."""
    names = [one for one in public_names() if one.module == path]
    own = [one for one in names if owners()[one.defined] == one]
    links = [f"[`{one.name}`][{owners()[one.defined].anchor}]" for one in names if one not in own]
    parts = [f"# {path}", f"::: {path}" + HEADLESS]
    if links:
        parts.append(f"Also here, documented with the part that defines them: {', '.join(links)}.")
    for one in sorted(
        own, key=lambda one: (definition(one).is_class, definition(one).is_attribute)
    ):  # what is called first
        parts.append(f"::: {one.anchor}" + _options(one))
    return "\n\n".join(parts) + "\n"


def _options(one: Name) -> str:
    """Programs of the ladder show their function and their cost; what is a value shows that it is there."""
    member = definition(one)
    options = [f"heading: {one.path}", f"toc_label: {one.name}"] if one.hidden else []
    options += ["members: [attention, cost, tile_for]"] if member.is_module else []
    options += ["show_if_no_docstring: true"] if member.is_attribute else []
    return "".join(["\n    options:", *(f"\n      {option}" for option in options)]) if options else ""


def pages() -> dict[str, str]:
    """Markdown by page, the index first."""
    lines = ["# API reference", "Made from the docstrings of every public name.", "| module | |\n|---|---|"]
    lines[-1] += "".join(f"\n| [`{path}`]({path}.md) | {what} |" for path, what in MODULES.items())
    every: dict[str, list[str]] = {}
    for one in public_names():
        every.setdefault(one.name, []).append(f"[{one.module}][{owners()[one.defined].anchor}]")
    lines.append("## All names")
    lines.append(
        "\n".join(
            f"- `{name}`: {', '.join(where)}" for name, where in sorted(every.items(), key=lambda x: x[0].lower())
        )
    )
    return {"api/index.md": "\n\n".join(lines) + "\n", **{page_of(path): page(path) for path in MODULES}}
