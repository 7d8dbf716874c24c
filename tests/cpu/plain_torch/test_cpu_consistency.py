"""examples/rl_consistency.py in plain torch: sampling and training have the same bits, and a bit that differs is found."""

import pytest
import torch

import rl_consistency
from torch_cpu import torch_cpu  # noqa: F401

pytestmark = pytest.mark.usefixtures("torch_cpu")
SMALL = ["--layers", "1", "--requests", "4", "--prompt", "20", "--new", "4", "--vocabulary", "11"]


@pytest.mark.parametrize(
    "heads", [["--heads", "4", "--kv-heads", "1"], ["--heads", "2", "--kv-heads", "2", "--dim", "24"]]
)
def test_the_same_bits(heads, capsys):
    assert rl_consistency.main([*SMALL, *heads]) == 0
    text = capsys.readouterr().out
    assert text.count("tilefold, invariant  round") == text.count("torch, SDPA          round") == 2
    assert "the same bits in sampling and training" in text


def test_a_bit_is_found(monkeypatch, capsys):
    take = rl_consistency.Sample.take
    monkeypatch.setattr(rl_consistency.Sample, "take", lambda one, logs: take(one, torch.nextafter(logs, -logs)))
    assert rl_consistency.main([*SMALL, "--rounds", "1"]) == 1
    assert "sampling and training differ" in capsys.readouterr().out
