"""Formulas of the docs are set without a network and in the colour of the text."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from formulas import BLOCK, SPAN, drawn, set_formulas

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_every_formula_of_the_docs_can_be_set() -> None:
    found = 0
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        found += len(BLOCK.findall(text)) + len(SPAN.findall(text))
        made = set_formulas(text)
        assert not BLOCK.search(made)
        assert not SPAN.search(made), page
    assert found > 30


def test_a_formula_is_a_picture_that_says_its_source() -> None:
    made = ElementTree.fromstring(drawn(r"2^{m_a - m}"))
    assert made.get("aria-label") == r"2^{m_a - m}"
    (path,) = made
    assert path.get("fill") == "currentColor"
    assert path.get("d", "").count("M") >= 5  # a digit, two letters, an index, a sign
    assert "_" not in drawn("m_a").replace("&#95;", "")


def test_size_and_line_follow_the_text() -> None:
    """x ends on the line, p goes below it, and a fraction is higher than a letter."""

    def styles(formula: str) -> dict[str, float]:
        return {name: float(size) for name, size in re.findall(r"([a-z-]+):(-?[\d.]+)em", drawn(formula))}

    assert -0.05 < styles("x")["vertical-align"] <= 0
    assert styles("p")["vertical-align"] < -0.15
    assert 0.3 < styles("x")["height"] < 0.7
    assert styles(r"\dfrac{x}{2}")["height"] > 2 * styles("x")["height"]


def test_code_stays_code_and_a_wrong_formula_is_named() -> None:
    assert set_formulas("```sh\necho $`date`$\n```\n") == "```sh\necho $`date`$\n```\n"
    with pytest.raises(ValueError, match=r"the formula '\\+frac\{1' cannot be set"):
        set_formulas("a $`\\frac{1`$ b")
