"""Pages whose examples are tasks of a reader: they run as they stand, on the CPU."""

import re
from pathlib import Path

import pytest
import torch

import tilefold
from sources import run_source

DOCS = Path(__file__).resolve().parents[3] / "docs"
pytestmark = pytest.mark.interpreter


def blocks(name, part="guides"):
    """The Python of a page without its device."""
    text = (DOCS / part / name).read_text(encoding="utf-8")
    return [one.replace(', device="cuda"', "") for one in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)]


def test_a_mod(capsys):
    names = {}
    *first, gradient = blocks("mod.md")
    for block in first:
        run_source(block, names)
    torch.testing.assert_close(names["out"].double(), names["exact"], atol=2e-2, rtol=2e-2)
    assert "masks: user" in capsys.readouterr().out
    assert names["mask"].dense(1, 1, 256, 256)[0, 0].diagonal(-4).all()
    run_source(gradient, names)
    ours, slopes = names["slopes"].grad, names["slopes"].detach().double().requires_grad_()
    apart = (torch.arange(256)[:, None] - torch.arange(256)).abs()
    bias = -slopes[None, :, None, None] * apart
    exact, _ = tilefold.reference.attention(*(names[x].double() for x in "qkv"), bias=bias)
    exact.square().sum().backward()
    torch.testing.assert_close(ours.double(), slopes.grad, atol=0.05 * float(slopes.grad.abs().max()), rtol=0)


def planted(**wrong):
    """q, k and v with a NaN in one row of head 0 of each name."""
    torch.manual_seed(0)
    given = {name: torch.randn(1, 40, 2, 16) for name in "qkv"}
    for name, row in wrong.items():
        given[name][0, row, 0, 3] = torch.nan
    return given


def test_a_nan(capsys):
    """The table of causes is what the examples show."""
    whose, finite, index = blocks("nan.md")
    for wrong, out, lse in (
        ({"q": 20}, range(20, 21), range(20, 21)),
        ({"k": 20}, range(20, 40), range(20, 40)),
        ({"v": 39}, range(40), ()),  # one tile holds all keys
    ):
        names = {"tilefold": tilefold, **planted(**wrong)}
        run_source(whose, names)
        assert names["out"].isnan().any(-1)[0, :, 0].nonzero().flatten().tolist() == list(out), wrong
        assert names["lse"].isnan()[0, 0].nonzero().flatten().tolist() == list(lse), wrong
        assert not names["out"][0, :, 1].isnan().any()
        capsys.readouterr()
        run_source(finite, names)
        assert [line for line in capsys.readouterr().out.splitlines() if " False " in line] == [
            f"{next(iter(wrong))} False nan"
        ]
    pages = torch.zeros(4, 16, 2, 16)
    names = {"tilefold": tilefold, "q": torch.zeros(1, 1, 2, 16), "k_cache": pages, "v_cache": pages}
    names |= {"lengths": torch.tensor([20], dtype=torch.int32), "table": torch.tensor([[3, 9]], dtype=torch.int32)}
    with pytest.raises(tilefold.ValueRangeError, match=r"block_table.*9"):
        run_source(index, names)


def test_a_video_model_without_weights():
    pytest.importorskip("diffusers", minversion="0.42", exc_type=ImportError, reason="needs diffusers 0.42")
    (example,) = (block for block in blocks("video_models.md") if "WanTransformer3DModel(" in block)
    torch.manual_seed(0)
    run_source(example, {"torch": torch, "video": tilefold.video})


def test_block_sparse():
    names = {}
    for block in blocks("sparse.md", "explanation"):
        run_source(block, names)


@pytest.mark.parametrize("keys", [24, 0])
def test_a_merge(keys):
    """Also of rows that are dead in both parts: 0 with lse -inf, not NaN."""
    (example,) = blocks("merge.md", "explanation")
    q, k, v = (torch.randn(1, n, 2, 16) for n in (16, keys, keys))
    names = {"tilefold": tilefold, "torch": torch, "q": q, "k": k, "v": v, "cut": keys // 3}
    run_source(example, names)
    for got, want in zip((names["out"], names["lse"]), tilefold.attention(q, k, v, return_lse=True), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
