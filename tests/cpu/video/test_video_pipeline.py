"""The pipeline composed of its stages: fp64, gradients, stages on request, compilation, refusals; what lists leave out."""

import pytest
import torch

from cases import graph_gives, judge, qkv, rand
from cases.refusals import refuses
from tilefold import reference
from tilefold.errors import DtypeError, ValueRangeError
from tilefold.plan.device import H200
from tilefold.plan.sparse.video import VideoShape
from tilefold.sparse import BlockIndex, CoarseOptions, GridTiling, SelectOptions, sparse_video_attention, video_window
from tilefold.video.measure import dense_results, least_seconds, left_out

EVEN, RAGGED = GridTiling((4, 2, 8), (2, 2, 4)), GridTiling((3, 3, 6), (2, 2, 4))  # 4 and 8 blocks of 16
RECORDS = ("coarse_out", "scores", "gini", "tau", "mass", "fine_out", "fine_lse")


def inputs(tiling, batch=1, heads=2, kv_heads=1, dim=16, dtype=torch.float32, device="cpu", dense=False):
    """(q, k, v), options with weights and gates."""
    tensors = qkv(batch, tiling.padded, tiling.padded, heads, kv_heads, dim, dtype=dtype, device=device)
    width = (tiling.block_count, tiling.padded) if dense else (tiling.slots,)
    options = {
        "weight_k": (rand(kv_heads, *width) * 0.2 + 1 / tiling.slots).to(device),
        "weight_v": (rand(kv_heads, *width) * 0.2 + 1 / tiling.slots).to(device),
        "gate_coarse": rand(batch, tiling.padded, heads, dtype=dtype, device=device),
        "gate_fine": rand(batch, tiling.padded, heads, dtype=dtype, device=device),
        "block": tiling.slots,
        "block_sizes": tiling.sizes(device),
        "query_sizes": tiling.sizes(device),
    }
    return tensors, options


@pytest.mark.parametrize("tiling", [EVEN, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("kind", ["block", "dense", "pooled"])
def test_against_the_oracle(kind, tiling, device):
    tensors, options = inputs(tiling, device=device, dense=kind == "dense")
    if kind == "pooled":
        options["weight_k"] = options["weight_v"] = None
    options["coarse"] = CoarseOptions(kind)
    out, got = sparse_video_attention(*tensors, **options, return_stages=True)
    oracle, want = reference.sparse_video_attention(*tensors, **options, index=got.index, return_stages=True)
    plain, _ = reference.sparse_video_attention(
        *tensors, **options, index=got.index, return_stages=True, dtype=torch.float32
    )
    valid = torch.arange(tiling.slots, device=device) < tiling.block_sizes(device)[:, None]
    valid = valid.flatten()
    judge(out[:, valid], oracle[:, valid], plain[:, valid], "out")
    assert not out[:, ~valid].any(), "queries past query_sizes are 0"
    for name in RECORDS[:2]:
        assert torch.allclose(getattr(got, name).double(), getattr(want, name), atol=1e-5), name


def test_stages_are_what_the_call_used(device):
    tensors, options = inputs(RAGGED, batch=2, device=device)
    out, got = sparse_video_attention(*tensors, **options, return_stages=True)
    assert torch.equal(sparse_video_attention(*tensors, **options), out)
    rows = (2, 2, RAGGED.block_count)
    assert got.scores.shape == (*rows, RAGGED.block_count)
    assert all(getattr(got, name).shape == rows for name in ("gini", "tau", "mass"))
    assert bool((got.mass >= got.tau - 1e-5).all())
    fine, lse = reference.sparse_attention(*tensors, got.index)
    assert torch.allclose(got.fine_out.double(), fine, atol=1e-5)
    assert got.fine_lse.shape == (2, 2, RAGGED.padded)
    assert (got.index.seq_q, got.index.block_q) == (RAGGED.padded, RAGGED.slots)


def test_options_reach_their_stage(device):
    tensors, options = inputs(EVEN, device=device)
    top = SelectOptions("top_k", top_k=3)
    _, got = sparse_video_attention(*tensors, **options, select=top, return_stages=True)
    assert bool((got.index.counts == 3).all())
    _, got = sparse_video_attention(
        *tensors, **options, select=SelectOptions(min_blocks=2, max_blocks=2), return_stages=True
    )
    assert bool((got.index.counts == 2).all())
    peak, mean = (
        sparse_video_attention(*tensors, **options, coarse=CoarseOptions(reduction=r), return_stages=True)[1].scores
        for r in ("max", "mean")
    )
    assert bool((peak >= mean - 1e-6).all()) and not torch.equal(peak, mean)


def test_layout(device):
    tensors, options = inputs(EVEN, device=device)
    out = sparse_video_attention(*tensors, **options)
    turned = {n: t.transpose(1, 2) if n.startswith("gate") else t for n, t in options.items()}
    other = sparse_video_attention(*(t.transpose(1, 2) for t in tensors), **turned, layout="bhsd")
    assert torch.equal(other.transpose(1, 2), out)


@pytest.mark.parametrize("tiling", [EVEN, RAGGED], ids=["even", "ragged"])
def test_gradients(tiling, device):
    """Of q, k, v, both weights and both gates, against fp64 autograd over the lists that were used."""
    tensors, options = inputs(tiling, device=device)
    names = ("weight_k", "weight_v", "gate_coarse", "gate_fine")
    wanted = [*tensors, *(options[name] for name in names)]
    for t in wanted:
        t.requires_grad_()
    out, got = sparse_video_attention(*tensors, **options, return_stages=True)
    dout = torch.where(
        tiling.tile(torch.ones(1, tiling.tokens, device=device))[..., None, None] > 0, torch.randn_like(out), 0.0
    )
    grads = torch.autograd.grad(out, wanted, dout)
    wide = [t.detach().double().requires_grad_() for t in wanted]
    given, options = wide[:3], {**options, **dict(zip(names, wide[3:], strict=True))}
    results = []
    for dtype in (torch.float64, torch.float32):
        made = reference.sparse_video_attention(*given, **options, index=got.index, dtype=dtype)
        results.append(torch.autograd.grad(made, wide, dout.double()))
    for name, *three in zip(("q", "k", "v", *names), grads, *results, strict=True):
        judge(*three, f"gradient of {name}")


def test_lists_that_are_given(device):
    tensors, options = inputs(RAGGED, device=device)
    sizes = {"block_sizes": RAGGED.sizes(device), "query_sizes": RAGGED.sizes(device)}
    lengths = {"seq_q": RAGGED.padded, "seq_k": RAGGED.padded, "block_q": 16, "block_k": 16}
    index = BlockIndex.from_predicate(video_window(RAGGED.blocks, 1), **lengths, device=device, **sizes)
    call = {"coarse": None, "index": index, "gate_fine": options["gate_fine"]}
    out, got = sparse_video_attention(*tensors, **call, return_stages=True)
    oracle, plain = (
        reference.sparse_video_attention(*tensors, **call, dtype=t) for t in (torch.float64, torch.float32)
    )
    judge(out, oracle, plain, "out")
    assert got.scores is None and got.index is index


@pytest.mark.no_poison
def test_compile_fullgraph(device):
    tensors, options = inputs(RAGGED, device=device)
    for t in tensors:
        t.requires_grad_()

    def layer(q, k, v):
        out, made = sparse_video_attention(2 * q, k, v, **options, return_stages=True)
        return out, made.scores, made.index.counts

    graph_gives(layer, *tensors)


INDEX = BlockIndex.from_map(torch.ones(1, 1, 2, 2, dtype=torch.bool), block_q=16, block_k=16)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"coarse": None}, ValueRangeError, "coarse is None and index is None"),
        ({"index": INDEX}, ValueRangeError, "index was given with a coarse branch"),
        (
            {"coarse": None, "index": INDEX, "weight_k": torch.ones(16)},
            ValueRangeError,
            "weight_k was given with coarse=None",
        ),
        (
            {"coarse": None, "index": INDEX, "block_sizes": torch.ones(2)},
            ValueRangeError,
            "block_sizes was given with coarse=None",
        ),
        ({"coarse": "block"}, DtypeError, "coarse must be a CoarseOptions or None, got 'block'"),
        (
            {"coarse": None, "index": INDEX, "select": SelectOptions()},
            ValueRangeError,
            "select was given with coarse=None",
        ),
        ({"select": "gini"}, DtypeError, "select must be a SelectOptions or None, got 'gini'"),
        ({"layout": "sbhd"}, ValueRangeError, "layout must be 'bshd' or 'bhsd', got 'sbhd'"),
    ],
)
def test_errors(options, error, text):
    with pytest.raises(error, match=text):
        sparse_video_attention(*qkv(1, 32, 32, 2, 2, 16), **{"block": 16, **options})


def test_records_refuse_unknown_names():
    refuses(ValueRangeError, "kind must be one of block, dense, pooled, got 'mean'", CoarseOptions, "mean")
    refuses(ValueRangeError, "reduction must be one of mean, max, got 'sum'", CoarseOptions, reduction="sum")
    for options, text in (
        ({"method": "top_k"}, "method 'top_k' needs top_k or sparsity, got neither"),
        (
            {"method": "top_k", "top_k": 3, "sparsity": 0.8},
            "method 'top_k' needs top_k or sparsity, got top_k and sparsity",
        ),
        ({"top_k": 3}, "top_k is for method 'top_k', got method 'gini'"),
        ({"method": "top_k", "sparsity": 80}, "sparsity must be at most 1, got 80"),
    ):
        with pytest.raises(ValueRangeError, match=f"^{text}$"):
            SelectOptions(**options)
    refuses(ValueRangeError, "method must be one of 'gini', 'top_p', 'top_k', got 'top'", SelectOptions, "top")


# ---------------------------------------------------------------- what lists leave out


@pytest.mark.parametrize("grid", [(3, 5, 6), (4, 4, 8)])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_left_out(grid, kv_heads, device):
    """Mass by probabilities themselves; the error by outputs of the oracle; tokens that pad a cube count nowhere."""
    tiling = GridTiling(grid, (2, 2, 4))
    n, scale = tiling.block_count, 0.3
    q, k, v = (rand(2, tiling.padded, h, 8, device=device) for h in (4, kv_heads, kv_heads))
    keep = torch.rand(1, 4, n, n, device=device) > 0.5
    keep[..., 0] = True  # no empty row
    index = BlockIndex.from_map(keep, block_q=16, block_k=16)
    got = left_out(q, k, v, index, tiling, scale, dense_results(q, k, v, tiling, scale))
    q, k, v = (tiling.untile(one).double().cpu() for one in (q, k, v))
    block = (tiling.destination() // tiling.slots).cpu()
    seen = keep.cpu()[:, :, block][:, :, :, block]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(4 // kv_heads, 2)) * scale
    mass = (scores.softmax(-1) * seen).sum(-1).mean((0, 2))
    exact, sparse = (reference.attention(q, k, v, mask=mask, scale=scale)[0] for mask in (None, seen))
    error = (sparse - exact).square().sum((0, 1, 3)).sqrt() / exact.square().sum((0, 1, 3)).sqrt()
    torch.testing.assert_close(got.listed.cpu(), keep.float().mean((0, 2, 3)).cpu())
    torch.testing.assert_close(got.mass.cpu().double(), mass, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.error.cpu().double(), error, rtol=1e-4, atol=1e-6)


def test_least_seconds():
    """Dense attention of Wan 14B at 720p: 4 N^2 D H operations at the rate of bf16 products; of a tenth of the pairs a tenth."""
    shape = VideoShape(1, 40, 40, 75600, 128)
    sparse, dense = least_seconds(shape, 0.1, H200)
    assert dense == pytest.approx(
        max(4 * 75600**2 * 128 * 40 / H200.matmul_rate("bfloat16"), 75600**2 * 40 / H200.exp_rate)
    )
    assert 0.1 * dense < sparse < 0.13 * dense
    assert least_seconds(shape, 0.2, H200)[0] > sparse
