"""An extension for the API reference: the project's docstrings, plain text with `name: what it is` lines, as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe
import site_api

__all__ = ["Prose", "as_markdown"]

SECTION = re.compile(r"(Args|Returns|Raises|Yields|Source|Example):\s*$")
ITEM = re.compile(r"(?P<names>[*\w.\[\]]+(?:, [*\w.\[\]]+)*): +(?P<text>\S.*)$")
PAGE = re.compile(r"(\bdocs/[\w/\\]+\.md\b)")  # underscores escaped
TITLES = {"Args": "Arguments"}
# Begins what is said of the whole, not of the item before it.  In a section a line that is not indented does so, too.
SPEAKS = re.compile(r"(Raises|Returns) +[A-Z(`]")


class Prose(griffe.Extension):
    """Rewrites every docstring when its object is loaded."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Called once for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, known_names(obj), obj.path, own_names(obj))


def known_names(obj: griffe.Object) -> set[str]:
    """What an item of this docstring may be about: parameters, fields, attributes."""
    names: set[str] = set()
    if isinstance(obj, griffe.Function):
        names |= {parameter.name for parameter in obj.parameters}
    if isinstance(obj, griffe.Class):
        names |= set(obj.members) | set(
            re.findall(r"\b[a-z]+_\w+(?=[\w, ]*: )", obj.docstring.value if obj.docstring else "")
        )
        if isinstance(made := obj.members.get("__init__"), griffe.Function):
            names |= {parameter.name for parameter in made.parameters}
    return names


def own_names(obj: griffe.Object) -> frozenset[str]:
    """What a word of this docstring means before it means a public name elsewhere: members of its class, parameters."""
    owner = obj if obj.is_class else obj.parent if obj.parent is not None and obj.parent.is_class else None
    given = {parameter.name for parameter in obj.parameters} if isinstance(obj, griffe.Function) else set()
    return frozenset(given | set(owner.members if owner is not None else ()))


def as_markdown(text: str, known: set[str], path: str = "", own: frozenset[str] = frozenset()) -> str:
    """The docstring of `path`: sections become headings in bold, lines about a parameter items of a list.  own: words that
    are no links."""
    out: list[str] = []
    section, item = False, False  # inside an indented section; inside an item, whose further lines belong to it
    after = False  # in a paragraph that began in a line of an item: lines may still be indented
    for line in text.expandtabs().split("\n"):
        if found := SECTION.match(line):
            out += ["", f"**{TITLES.get(found[1], found[1])}**", ""]
            section, item, after = True, False, False
            continue
        if section and line and not line.startswith("    "):
            section, item = False, False
        body = line[4:] if section else line
        if not body.strip():
            out.append("")
            item = after = False
            continue
        if body.startswith("    ") and not (item or after):
            out.append(body)  # a block of code
            continue
        for number, piece in enumerate(pieces(body.strip(), known)):
            begins = number == 0 and item and body[0].islower() and out[-1].endswith((".", ";"))  # after a whole item
            if (found := ITEM.match(piece)) and (begins or is_item(found["names"], known, section)):
                out += [] if item else [""]
                names = ", ".join(f"`{name}`" for name in found["names"].split(", "))
                out.append(f"- {names}: {escape(found['text'], path, own)}")
                item, after = True, False
            elif item and (not body.startswith(" ") if section else SPEAKS.match(piece)):
                out += ["", escape(piece, path, own)]
                item, after = False, True
            else:
                out.append(("    " if item else "") + escape(piece, path, own))
    return "\n".join(out).strip() + "\n"


def pieces(line: str, known: set[str]) -> list[str]:
    """The line, cut where a sentence ends and an item begins, or what it raises: `heads: of q. dim: of all.` is two."""
    found, start = [], 0
    for end in re.finditer(r"[.;] +(?=[a-zR])", line):
        begins = ITEM.match(line[end.end() :])
        if SPEAKS.match(line[end.end() :]) or (begins and set(begins["names"].split(", ")) <= known):
            found.append(line[start : end.end()].rstrip(" ;"))
            start = end.end()
    return [*found, line[start:]]


def is_item(names: str, known: set[str], section: bool) -> bool:
    """In a section of arguments every `name: ...` is one; elsewhere what has the name of a parameter or field."""
    bare = {name.strip("*").split("[")[0].split(".")[0] for name in names.split(", ")}
    return bare <= known or (section and not known)


def escape(line: str, path: str, own: frozenset[str] = frozenset()) -> str:
    """Stars and underscores are arithmetic here, not emphasis; pages, and public names between backticks, become links."""
    parts = line.split("`")
    for i, part in enumerate(parts):
        if i % 2 == 0:
            pieces = PAGE.split(re.sub(r"([*_])", r"\\\1", part).replace("<", "&lt;"))
            parts[i] = "".join(linked(piece) if j % 2 else piece for j, piece in enumerate(pieces))
        else:
            anchor = None if part in own else anchor_of(part, path)
            parts[i] = f"[`{part}`][{anchor}]" if anchor else f"`{part}`"
    return "".join(parts) if len(parts) % 2 else line


def linked(page: str) -> str:
    """A link from the API to a page that a docstring names by its place in the checkout.  Underscores are escaped; mkdocs makes
    no addresses of files' names here."""
    bare = page.replace("\\", "").removeprefix("docs/").removesuffix(".md")
    return f"[{bare.rpartition('/')[2].replace('_', ' ')}](../{bare}.html)"


def anchor_of(text: str, path: str) -> str | None:
    """Where the public name `text` is documented, as seen from `path`: in the same part, else in tilefold, else the only one."""
    found = [one for one in site_api.public_names() if text in (one.name, one.path)]
    near = [one for one in found if path.startswith(one.module + ".")]
    near = sorted(near, key=lambda one: -len(one.module)) or (found if len(found) == 1 else [])
    if not near or near[0].defined == path:
        return None
    return site_api.owners()[near[0].defined].anchor
