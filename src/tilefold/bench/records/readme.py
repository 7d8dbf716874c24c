"""Tables inside documents that say where they belong: what stands between two marks is replaced by the newest figures.

    <!-- tilefold bench dense -->
    <!-- end -->

A word after the family's name tells two blocks of one family apart: `<!-- tilefold bench dense backward -->`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilefold.errors import ValueRangeError

BLOCK = re.compile(
    r"(<!-- tilefold bench (?P<name>[^\n]*?) -->\n)(?P<text>.*?)(?P<end>^[ \t]*<!-- end -->)", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Place:
    """A document, and which of a family's blocks in it; label "": the one without."""

    path: Path
    label: str = ""

    def name(self, family: str) -> str:
        """What the mark of a family's block says."""
        return f"{family} {self.label}".strip()

    def blocks(self) -> list[str]:
        """The names of all blocks. ValueRangeError if it cannot be read, or a block's end is missing."""
        text = self._text()
        found = [match["name"].strip() for match in BLOCK.finditer(text)]
        marks = len(re.findall(r"^[ \t]*<!-- tilefold bench ", text, re.MULTILINE))
        if marks != len(found) or any("<!-- tilefold bench " in match["text"] for match in BLOCK.finditer(text)):
            raise ValueRangeError(
                f"{self.path}: a block that begins with <!-- tilefold bench ... --> has no <!-- end -->"
            )
        return found

    def check(self, families: Sequence[str]) -> None:
        """ValueRangeError unless at least one of the families has its block, so that a run is not lost for want of one."""
        found = self.blocks()
        wanted = [self.name(family) for family in families]
        if not any(name in found for name in wanted):
            marks = " or ".join(f"<!-- tilefold bench {name} -->" for name in wanted)
            there = f"; it has {', '.join(found)}" if found else ""
            raise ValueRangeError(f"{self.path} has no block {marks} ... <!-- end -->{there}")

    def write(self, texts: dict[str, str]) -> list[str]:
        """Put each family's text into its block; the names of those that were there."""
        named = {self.name(family): text for family, text in texts.items()}
        text, done = refreshed(self._text(), named)
        self.path.write_text(text, encoding="utf-8")
        return done

    def _text(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueRangeError(f"--refresh must be a text file, {self.path}: {error}") from None


def place_of(text: str) -> Place:
    """FILE or FILE#LABEL."""
    path, _, label = text.partition("#")
    return Place(Path(path), label.strip())


def refreshed(document: str, texts: dict[str, str]) -> tuple[str, list[str]]:
    """The document with the text of each block that has one, and the names of those."""
    done: list[str] = []

    def replace(match: re.Match[str]) -> str:
        name = match["name"].strip()
        if name not in texts:
            return match[0]
        done.append(name)
        return f"{match[1]}\n{texts[name].strip()}\n\n{match['end']}"

    return BLOCK.sub(replace, document), done
