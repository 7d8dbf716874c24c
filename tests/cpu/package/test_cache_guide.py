"""The guides' examples run as they stand, one after the other."""

import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).resolve().parents[3] / "docs" / "explanation"


def examples(name: str, device: str) -> list[str]:
    """The page's Python; without a GPU, for the interpreter, and without what captures a graph."""
    found = re.findall(r"```python\n(.*?)```", (GUIDES / name).read_text(), re.S)
    if device == "cuda":
        return found
    return [text.replace('"cuda"', f'"{device}"') for text in found if "CUDAGraph" not in text]


@pytest.mark.no_poison
def test_the_guide_to_caches_runs(device):
    names: dict[str, object] = {}
    texts = examples("cache_append.md", device)
    assert len(texts) == 5
    for text in texts:
        exec(text, names)
    assert names["pages_k"].any() and names["eighths"][0].float().any()  # type: ignore[attr-defined,index]
    assert names["out"].isfinite().all()  # type: ignore[attr-defined]


@pytest.mark.no_poison
def test_the_guide_to_pages_runs(device):
    names: dict[str, object] = {}
    texts = examples("paged_cache.md", device)
    assert len(texts) == (5 if device == "cuda" else 4)
    for text in texts:
        exec(text, names)
    assert names["cache"].sequences == ()  # type: ignore[attr-defined]
