"""docs/guides/cookbook_wan.md: its code runs over a small pipeline of Diffusers with random weights; what it computes is true."""

import re
from pathlib import Path

import pytest
import torch

import tilefold
from cases.cli import command
from sources import run_source
from tilefold import video
from tilefold.plan.device import H100
from tilefold.plan.sparse.video import VideoShape
from tilefold.video.measure import least_seconds
from torch_cpu import torch_cpu  # noqa: F401

pytest.importorskip("diffusers", minversion="0.42", exc_type=ImportError, reason="needs diffusers 0.42")
pytestmark = pytest.mark.no_poison

DOCS = Path(__file__).resolve().parents[3] / "docs"
GUIDE = (DOCS / "guides/cookbook_wan.md").read_text(encoding="utf-8")
RECORD = (DOCS / "performance/video_transformer.md").read_text(encoding="utf-8")
SMALLER = {
    "height=480": "height=64",
    "width=832": "width=64",
    "num_frames=81": "num_frames=17",
    'Diffusers", 50': 'Diffusers", 4',
    "steps=10": "steps=1",
    "steps=50": "steps=4",
    "(15, 30, 45)": "(1, 3)",
    "bfloat16": "float32",
    "cuda": "cpu",
    "error 0.02": "error 0.2",
}


def small(text):
    """The same at a size for the CPU."""
    for large, less in SMALLER.items():
        assert large in GUIDE
        text = text.replace(large, less)
    return text


@pytest.fixture
def pretrained(monkeypatch):
    """What `from_pretrained` of Diffusers gives: random weights, 5 x 4 x 4 tokens, a text that nobody encodes."""
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    transformer = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, text_dim=8, freq_dim=16, ffn_dim=16, num_layers=2, rope_max_seq_len=32
    )  # fmt: skip

    def made(name, vae=vae, torch_dtype=None):
        pipe = WanPipeline(None, None, vae, FlowMatchEulerDiscreteScheduler(shift=3.0), transformer)
        texts = torch.randn(2, 1, 7, 8, generator=torch.Generator().manual_seed(1)).unbind()
        pipe.encode_prompt = lambda *args, **options: texts
        pipe.set_progress_bar_config(disable=True)
        return pipe

    monkeypatch.setattr(AutoencoderKLWan, "from_pretrained", lambda name, subfolder, torch_dtype: vae)
    monkeypatch.setattr(WanPipeline, "from_pretrained", made)
    monkeypatch.setattr(video.model, "fitting_cube", lambda sizes: (1, 4, 4))  # small enough for several blocks


@pytest.mark.usefixtures("torch_cpu")
def test_from_a_pipeline_to_a_calibrated_one(pretrained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    fences = re.findall(r"^```(\w*)( title=\"(\S+)\")?\n(.*?)^```", GUIDE, re.M | re.S)
    for language, _, file, text in fences:
        if file:
            Path(file).write_text(small(text))
        elif language == "python":
            run_source(small(text), names)
        else:
            calibrate, show = small(text).splitlines()
            command()(calibrate.removeprefix("tilefold "))
            assert show.startswith("tilefold video show out/wan/policy.json")
            command()(show.removeprefix("tilefold ").replace("layer 3 --head 5", "layer 1 --head 1"), "--quick")
    dense, sparse, calibrated = (names[one] for one in ("dense", "sparse", "calibrated"))
    assert dense.shape == sparse.shape == calibrated.shape == (17, 3, 64, 64)
    assert 0 <= float(dense.min()) < float(dense.max()) <= 1
    assert not torch.equal(dense, sparse)
    assert float(names["psnr"](dense, sparse).mean()) > 20
    assert set(names["errors"]) == {0, 1}
    assert len(names["errors"][0]) == 3 * 2, "a step of four is dense, and each step runs with and without the prompt"
    assert isinstance(names["policy"], video.ByLayer)
    transformer = names["pipe"].transformer
    names["step_loss"](transformer, torch.randn(1, 16, 5, 8, 8), torch.randn(1, 7, 8)).backward()
    assert all(p.grad is not None for n, p in transformer.named_parameters() if ".attn1." in n)


def rows(text, first):
    """The cells of a table, given how its head begins."""
    table = text[text.index(f"| {first}") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


SHAPES = {"1.3B": (12, 32760, 36608, 30, 1536, 8960), "14B": (40, 75600, 80640, 40, 5120, 13824)}


def least(size, left_out):
    """(attention of a layer, a layer, layers): ms by an H100's rates.  Products of k and v of 512 text tokens are left out."""
    heads, tokens, slots, layers, dim, ffn = SHAPES[size]
    _, dense = least_seconds(VideoShape(1, heads, heads, tokens, 128), 1.0, H100)
    sparse, _ = least_seconds(VideoShape(1, heads, heads, slots, 128), 1 - left_out, H100)
    attention = 1e3 * (sparse if left_out else dense)
    return attention, attention + 2e3 * tokens * dim * (6 * dim + 2 * ffn) / H100.matmul_rate("bfloat16"), layers


def test_the_least_times_are_the_plans():
    seen = rows(RECORD, "computed")
    assert len(seen) == 8
    for name, *cells in seen:
        size, share = re.fullmatch(r"(\S+), (?:(\d+) % left out|dense)", name).groups()
        attention, layer, layers = least(size, int(share or 0) / 100)
        wanted = attention, layers * layer / 1e3, least(size, 0)[1] / layer
        for cell, value in zip(cells, wanted, strict=True):
            digits = len(cell.partition(".")[2])
            assert cell == f"{value:.{digits}f}", (name, cell, value)


def test_the_grids_are_those_of_the_models():
    for size, grid in (("1.3B", (21, 30, 52)), ("14B", (21, 45, 80))):
        tiling = tilefold.sparse.GridTiling(grid, video.fitting_cube(grid))
        assert SHAPES[size][1:3] == (tiling.tokens, tiling.padded)


def test_what_the_guide_says_it_costs():
    attention, layer, layers = least("1.3B", 0)
    sparse, sparse_layer, _ = least("1.3B", 0.8)
    dense_pass, sparse_pass = (one * layers / 1e3 for one in (layer, sparse_layer))
    passes = [(100, 100 * dense_pass), (100, 20 * dense_pass + 80 * (sparse_pass + (attention - sparse) / 1e3))]
    passes.append((235, 193 * dense_pass + 42 * sparse_pass))
    for (_, said, seconds), (number, wanted) in zip(rows(GUIDE, "step | forward"), passes, strict=True):
        assert sum(map(int, re.findall(r"\d+", said))) == number
        assert abs(float(seconds) - wanted) < 0.5
    assert f"{attention / layer:.0%}".replace("%", " %") in GUIDE
    blocks, listed = 36608 // 64, 12 * (36608 // 64) * 115 * 4 / 2**30
    assert blocks - int(0.8 * blocks) == 115
    assert f"{listed:.3f}; {30 * listed:.2f}" in GUIDE


def test_the_guides_weights():
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=30)
    count = sum(p.numel() for p in model.parameters())
    assert f"{count / 1e9:.2f} billion weights in bf16 | {2 * count / 2**30:.1f} |" in GUIDE
