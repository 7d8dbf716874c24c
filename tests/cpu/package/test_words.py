"""The field's words (docs/reference/glossary.md) and not our own: names that went do not come back."""

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[3] / "src" / "tilefold"

# ours: the field's
GONE = {
    "ticket": "work counter",
    "tickets": "work counter",
    "told": "overflow flag",
    "outgrown": "overflow",
    "soften": "softcap",
    "weigh": "softmax",
    "laws": "properties",
    "mended": "fixed",
    "coats": "forms",
    "pace": "rate",
    "paces": "rates",
    "arts": "kinds",
    "stripe": "KV split",
    "stripes": "KV splits",
    "meet": "warpgroup pair barrier",
    "rooms": "dS ring slots",
}
FILES = sorted(SRC.rglob("*.py"))


def names(path):
    """(line, name) of all that is named in a file, its own name among them."""
    yield 0, path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        for field in ("name", "id", "arg", "attr", "asname"):
            if isinstance(found := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), found


def parts(name):
    return [part.lower() for part in re.split(r"_+|(?<=[a-z0-9])(?=[A-Z])", name)]


def old(path, words):
    """The names of a file that hold one of the words, with the word to take.  A file is parsed if its text holds such a name."""
    if not any(part in words for name in {path.stem, *re.findall(r"\w+", path.read_text())} for part in parts(name)):
        return
    for line, name in names(path):
        for part in parts(name):
            if part in words:
                yield f"{path.relative_to(SRC)}:{line}: {name}: {words[part]}"


@pytest.mark.parametrize(
    "sample", ["def read_ticket(): ...", "x.Tickets", "f(told=1)", "class OutgrownRows: ...", "coats = 1"]
)
def test_an_old_word_is_seen(sample, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.SRC", tmp_path)
    path = tmp_path / "sample.py"
    path.write_text(sample)
    assert len(list(old(path, GONE))) == 1


def test_no_name_holds_a_word_that_went():
    assert not [each for path in FILES for each in old(path, GONE)]
