"""The guides' examples run as they stand, one after the other."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"


def examples(name: str, device: str) -> list[str]:
    """The page's Python; without a GPU, for the interpreter, and without what captures a graph."""
    found = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.S)
    if device == "cuda":
        return found
    return [text.replace('"cuda"', f'"{device}"') for text in found if "CUDAGraph" not in text]


@pytest.mark.no_poison
def test_the_guide_to_caches_runs(device):
    names: dict[str, object] = {}
    texts = examples("explanation/cache_append.md", device)
    assert len(texts) == 4
    for text in texts:
        exec(text, names)
    assert names["pages_k"].any() and names["eighths"][0].float().any()  # type: ignore[attr-defined,index]
    assert names["out"].isfinite().all()  # type: ignore[attr-defined]


@pytest.mark.no_poison
def test_the_guide_to_pages_runs(device):
    names: dict[str, object] = {}
    texts = examples("explanation/paged_cache.md", device)
    assert len(texts) == (5 if device == "cuda" else 4)
    for text in texts:
        exec(text, names)
    assert names["cache"].sequences == ()  # type: ignore[attr-defined]


@pytest.mark.no_poison
def test_the_page_of_checks_runs(device):
    names: dict[str, object] = {}
    (text,) = examples("reference/checks.md", device)
    exec(text, names)
    assert names["fault"].argument == "block_table"  # type: ignore[attr-defined]
