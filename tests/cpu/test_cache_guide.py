"""The guide's examples run as they stand, one after the other."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "cache_append.md"


@pytest.mark.no_poison
def test_the_guide_runs(device):
    names: dict[str, object] = {}
    examples = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(examples) == 3
    for text in examples:
        exec(text.replace('device = "cuda"', f'device = "{device}"'), names)
    assert names["pages_k"].any() and names["eighths"][0].float().any()  # type: ignore[attr-defined,index]
