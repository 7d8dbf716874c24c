"""Gradients of dense attention against fp64 autograd: bands, lengths, dims, dtypes, groups, strides, lse, empty inputs."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilefold
from cases import judge, looped, one, qkv, rand, relative
from cases.gradient import BOX_BACKWARD, check_gradients, gradients, oracle
from tilefold import reference
from tilefold.plan.backward.attention_backward import AttentionBackwardPlan
from tilefold.plan.limits import Tile

BANDS = [
    {},
    {"causal": True},
    {"window": (17, 5)},
    {"causal": True, "window": (20, 7)},
    {"window": (None, 3)},
    {"window": (0, 0)},
]


@pytest.mark.parametrize("shape", [(1, 48, 48, 1, 1, 16), (1, 33, 50, 2, 1, 16), (2, 50, 19, 1, 1, 16)])
def test_bands(shape, device):
    q, k, v = qkv(*shape, dtype=torch.float16, device=device)
    for i, band in enumerate(BANDS):
        kernel = (None, BOX_BACKWARD)[(i + shape[0]) % 2]
        check_gradients(q, k, v, lse=i % 2 == 1, tile=((32, 16), (16, 32))[i // 2 % 2], kernel=kernel, **band)


def test_range_edges(device):
    """Every offset of the diagonal against the tile grid, both ways: an off-by-one in a range shows at one shift."""
    bands = ({"causal": True}, {"window": (7, 4)}, {"window": (-1, 3)})
    for i, sk in enumerate((2, 3, 15, 16, 17, 20, 21, 33)):  # with a single key, dq is 0 but for rounding
        q, k, v = qkv(1, 20, sk, 1, 1, 16, dtype=torch.float16, device=device)
        for band in (bands[0], bands[1 + i % 2]):
            check_gradients(q, k, v, **band)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype, device):
    q, k, v = qkv(1, 37, 50, 4, 2, 32, 24, dtype=dtype, device=device)
    check_gradients(q, k, v, causal=True)
    check_gradients(q, k, v, tile=None, window=(30, 2), sinks=rand(4, dtype=dtype, device=device))


@pytest.mark.parametrize("dims", [(1, 1), (3, 5), (40, 24), (64, 96), (128, 64), (256, 256), (320, 512), (512, 512)])
def test_head_dims(dims, device):
    check_gradients(*qkv(1, 21, 37, 1, 1, *dims, dtype=torch.float16, device=device), causal=True)


@pytest.mark.parametrize("group", [3, 7])
def test_groups(group, device):
    check_gradients(*qkv(1, 18, 20, 2 * group, 2, 16, device=device), causal=True)


def test_strides(device):
    """Cut from one fused projection, both layouts, every second row, broadcast; dout with stride 0."""
    q, k, v = rand(2, 30, 3, 2, 32, dtype=torch.float16, device=device).unbind(2)
    check_gradients(q, k, v, causal=True, kernel=BOX_BACKWARD)
    got = check_gradients(*(t.transpose(1, 2) for t in (q, k, v)), causal=True, layout="bhsd")
    assert [g.shape for g in got] == [(2, 2, 30, 32)] * 3
    q, k, v = (rand(1, 60, 2, 48, dtype=torch.float16, device=device)[:, ::2, :, 8:40] for _ in range(3))
    check_gradients(q, k, v, causal=True)
    wide = rand(1, 20, 1, 16, device=device).expand(2, 20, 2, 16)
    check_gradients(wide, wide, wide, causal=True)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    got = torch.autograd.grad(tilefold.attention(*leaves).sum(), leaves)
    ones = torch.ones(*q.shape[:3], 32, dtype=torch.float16, device=device)
    for name, a, b, c in zip(
        ("dq", "dk", "dv"), got, *(oracle((q, k, v), ones, None, d) for d in (torch.float64, q.dtype)), strict=True
    ):
        judge(a, b, c, name)


def test_dead_rows(device):
    """Queries before every key: no gradient, and no NaN, whatever dlse says."""
    q, k, v = qkv(1, 40, 13, 2, 1, 16, device=device)
    dq = check_gradients(q, k, v, causal=True)[0]
    assert not dq[:, :27].any()
    mask = rand(1, 2, 40, 13, device=device) > 0
    mask[:, :, 7] = False
    check_gradients(q, k, v, mask=mask)
    got = check_gradients(q, k, v, mask=torch.zeros_like(mask), sinks=rand(2, device=device), lse=False)
    assert not any(g.any() for g in got)


def test_huge_scores(device):
    """Scores of 1e4: nothing overflows, and a probability is as good as its lse, which fp32 knows to eps times its size."""
    q, k, v = qkv(1, 20, 34, 1, 1, 16, device=device)
    q, k = 100 * q, 100 * k[:, ::2].repeat_interleave(2, 1)  # every row has two keys that share it
    dout = rand(1, 20, 1, 16, device=device)
    limit = torch.finfo(torch.float32).eps * torch.einsum("bqhd,bkhd->bhqk", q, k).abs().max() / 4 * 1.4427
    got, want = gradients((q, k, v), dout, None), oracle((q, k, v), dout, None, torch.float64)
    assert got[0].isfinite().all()  # 0 but for rounding: what one key of a pair gives, the other takes
    for a, b in zip(got[1:], want[1:], strict=True):
        assert (a - b).norm() <= limit * b.norm()


def test_empty(device):
    q, k, v = qkv(1, 7, 5, 2, 2, 16, device=device)
    got = gradients((q, k[:, :0], v[:, :0]), torch.ones_like(q), rand(1, 2, 7, device=device), sinks=rand(2, device=device),
                    bias=rand(1, 2, 7, 0, device=device))  # fmt: skip
    assert [g.shape for g in got] == [(1, 7, 2, 16), (1, 0, 2, 16), (1, 0, 2, 16), (1, 2, 7, 0), (2,)]
    assert not got[0].any()
    got = gradients(
        (q[:, :0], k, v), q[:, :0], None, bias=rand(1, 1, 1, 5, device=device), sinks=rand(2, device=device)
    )
    assert [g.shape for g in got] == [(1, 0, 2, 16), k.shape, v.shape, (1, 1, 1, 5), (2,)]
    assert not any(g.any() for g in got)


def test_only_what_is_asked(device):
    q, k, v = qkv(1, 20, 20, 2, 2, 16, device=device)
    extra = {"bias": rand(1, 2, 20, 20, device=device), "sinks": rand(2, device=device)}
    dout = rand(1, 20, 2, 16, device=device)
    everything = gradients((q, k, v), dout, None, **extra)
    for wanted in range(5):
        leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((q, k, v, *extra.values()))]
        tilefold.attention(*leaves[:3], bias=leaves[3], sinks=leaves[4]).backward(dout)
        assert [t.grad is not None for t in leaves] == [i == wanted for i in range(5)]
        assert torch.equal(leaves[wanted].grad, everything[wanted])


def test_only_lse_and_double_use(device):
    """A gradient of lse alone; a result that is used twice; q, k and v that are one tensor."""
    q, k, v = qkv(1, 20, 33, 2, 2, 16, device=device)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    _, lse = tilefold.attention(*leaves, return_lse=True)
    dlse = rand(1, 2, 20, device=device)
    got = torch.autograd.grad(lse, leaves, dlse)
    zero = torch.zeros(1, 20, 2, 16, device=device)
    for name, a, b, c in zip(
        ("dq", "dk", "dv"), got, *(oracle((q, k, v), zero, dlse, d) for d in (torch.float64, q.dtype)), strict=True
    ):
        judge(a, b, c, name)
    grads = []
    for fn, dtype in ((tilefold.attention, None), (reference.attention, torch.float64), (reference.attention, q.dtype)):
        x = (q if dtype is None else q.double()).detach().requires_grad_()
        out = fn(x, x, x, causal=True, **({} if dtype is None else {"dtype": dtype}))
        out = out if isinstance(out, torch.Tensor) else out[0]
        grads += torch.autograd.grad((out * out.detach().cos()).sum() + out.square().sum(), x)
    judge(*grads, "dx")


def test_same_bits_and_checkpoints(device):
    """Twice the same; and the same again when the forward pass is made anew, by activation checkpointing."""
    q, k, v = qkv(1, 20, 33, 2, 1, 16, dtype=torch.bfloat16, device=device)
    extra = {"bias": rand(1, 2, 1, 33, device=device), "sinks": rand(2, device=device), "causal": True}
    dout = rand(1, 20, 2, 16, dtype=torch.bfloat16, device=device)
    first = gradients((q, k, v), dout, None, **extra)
    for reentrant in (None, False):
        leaves = [t.detach().requires_grad_() for t in (q, k, v, extra["bias"], extra["sinks"])]

        def layer(q, k, v, bias, sinks):
            return tilefold.attention(q, k, v, bias=bias, sinks=sinks, causal=True)

        out = layer(*leaves) if reentrant is None else checkpoint(layer, *leaves, use_reentrant=reentrant)
        out.backward(dout)
        assert all(torch.equal(a, t.grad) for a, t in zip(first, leaves, strict=True))


def test_in_place_changes_are_found(device):
    """Everything that the backward pass reads is watched by autograd: a mask that changed in between is an error."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 8, 8, 1, 1, 16, device=device))
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device=device)
    out = tilefold.attention(q, k, v, mask=mask)
    mask[..., 3] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_refusals(device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 8, 8, 2, 2, 16, device=device))
    table, learned = rand(2, 9, device=device), rand(2, 9, device=device).requires_grad_()
    with pytest.raises(tilefold.Unsupported, match="(?s)looped, `for _ in .*give score_grad"):
        tilefold.attention(q, k, v, score_mod=looped)
    with pytest.raises(tilefold.Unsupported, match=r"mask_args\[0\] requires a gradient"):
        tilefold.attention(q, k, v, mask_mod=relative, mask_args=(learned, 4))
    with pytest.raises(tilefold.Unsupported, match="alibi_slopes requires a gradient"):
        tilefold.attention(q, k, v, alibi_slopes=rand(2, device=device).requires_grad_())
    with pytest.raises(tilefold.DtypeError, match="score_grad must be a @triton.jit function"):
        tilefold.attention(q, k, v, score_mod=relative, score_grad=len, score_args=(table, 4))
    with pytest.raises(tilefold.ValueRangeError, match="score_grad was given without score_mod"):
        tilefold.attention(q, k, v, score_grad=one)
    with pytest.raises(tilefold.DtypeError, match="backward_plan must be an AttentionBackwardPlan"):
        tilefold.attention(q, k, v, backward_plan=3)


def test_plan(device):
    """JSON both ways, printed, and held to its problem; shares are made where a broadcast bias leaves a device idle."""
    from tilefold.plan import AttentionProblem, device_named
    from tilefold.plan.backward.attention_backward import plan_attention_backward

    q, k, v = (t.requires_grad_() for t in qkv(1, 40, 50, 4, 2, 16, device=device))
    plan = tilefold.attention_backward_plan(q, k, v, causal=True)
    assert AttentionBackwardPlan.from_json(plan.to_json()) == plan
    assert "attention_backward" in str(plan) and ", causal" in str(plan)
    for fields in (
        {"queries": Tile(8, 16, 4, 1)},
        {"keys": Tile(16, 48, 4, 1)},
        {"kernel": "flash"},
        {"bias_shares": 1},
    ):
        with pytest.raises(tilefold.PlanError, match=next(iter(fields))):
            plan.with_tiles(**fields)
    with pytest.raises(tilefold.PlanError, match="causal=True, the call has causal=False"):
        tilefold.attention(q, k, v, backward_plan=plan)
    bias = rand(1, 4, 40, 50, device=device).requires_grad_()
    with pytest.raises(tilefold.PlanError, match="bias gradient of None"):
        tilefold.attention(
            q, k, v, bias=bias, backward_plan=tilefold.attention_backward_plan(q, k, v, bias=bias.detach())
        )
    problem = AttentionProblem(2, 4096, 4096, 16, 4, 128, 128, score_mods=("bias",))
    big = plan_attention_backward(problem, device_named("h200"), (1, 1, 1))
    assert (big.kernel, big.bias_shares, big.grids[2]) == ("attention_backward_reduce", 3, (128, 3, 1))
    assert "3 shares" in str(big) and "Other gradients have portable kernels" in big.reason
    assert big.with_tiles(kernel="attention_backward_box").grids[2] == big.grids[2]
    alone = big.with_tiles(bias_shares=1)
    assert alone.scratch_bytes == big.scratch_bytes - 3 * 4 * 4096  # of one share nothing is kept
    rows = plan_attention_backward(problem, device_named("h200"), (2, 16, 4096), exact_bias=True)
    assert (rows.bias_shares, rows.scores, rows.keys) == (1, Tile(128, 64, 8, 2), Tile(64, 128, 4, 2))
    with pytest.raises(tilefold.PlanError, match="scores.shared_bytes: needs"):
        rows.with_tiles(scores=Tile(256, 128, 8, 2))
    with pytest.raises(tilefold.PlanError, match="scores.block_m: must be a power of two from 16 to 256, got 512"):
        rows.with_tiles(scores=Tile(512, 16, 8, 1))  # no box has so many rows
    with pytest.raises(tilefold.PlanError, match="bias: its gradient of .* is asked for, and the problem has no bias"):
        plan_attention_backward(replace(problem, score_mods=()), device_named("h200"), (2, 16, 4096))
    assert plan_attention_backward(problem, device_named("a100")).kernel == "attention_backward"
