"""examples/train_sparse_video.py: a small run learns back what sparsity cost, and says so; what did not learn is found."""

from dataclasses import replace

import pytest

import train_sparse_video as example
from torch_cpu import torch_cpu  # noqa: F401

pytestmark = [pytest.mark.long, pytest.mark.no_poison, pytest.mark.usefixtures("torch_cpu")]
SMALL = replace(example.SIZES["tiny"], grid=(4, 8, 8), dense=120, sparse=40, videos=32)


def test_a_small_run(monkeypatch, capsys):
    """In 40 steps the sparse model is below what it lost, and below the dense one it was made of."""
    monkeypatch.setitem(example.SIZES, "tiny", SMALL)
    assert example.main(["--tiny", "--sparsity", "0.87", "--recover", "-100"]) == 0
    said = capsys.readouterr().out
    rows = [line.split("|")[1:3] for line in said.splitlines() if line.startswith("| ") and "loss" not in line]
    assert [what.strip() for what, _ in rows] == [
        "dense, 120 steps", "dense, 40 steps more", "87% left out", "87% left out, 40 steps",
    ]  # fmt: skip
    dense, control, before, after = (float(loss) for _, loss in rows)
    assert control < dense < before
    assert after < dense
    assert "came back" in said


def test_what_does_not_learn_is_found(monkeypatch):
    """Exit code 1 where nothing comes back."""
    monkeypatch.setattr(example, "run", lambda *args: {"dense": 1.0, "control": 0.9, "before": 1.2, "after": 1.05})
    assert example.main(["--tiny"]) == 1
    assert example.main(["--tiny", "--recover", "0.2"]) == 0
