"""Dropout of probabilities: one mask for forward and backward, every tile and layout, as the fp64 oracle makes it."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilefold
from cases import check, graph_gives, packed, qkv, rand
from cases.gradient import BOX_BACKWARD, check_gradients, gradients
from cases.refusals import refuses
from tilefold.ops.call import Call
from tilefold.ops.dense.library import ATTENTION
from tilefold.plan import AttentionProblem, device_named, plan_attention
from tilefold.plan.limits import Tile
from tilefold.reference.attention import philox


def seed(device, value=12345):
    return torch.tensor([value], dtype=torch.int64, device=device)


@pytest.mark.interpreter
def test_philox():
    """The oracle's generator gives the published known answers (Random123's), and Triton's the same as the oracle's."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(out, seed, N: tl.constexpr):
        i = tl.arange(0, N)
        numbers, _, _, _ = tl.philox(tl.load(seed), i, i * 3, 5, 7, 7)
        tl.store(out + i, numbers.to(tl.int64))

    zero = torch.zeros((), dtype=torch.int64)
    assert [int(philox(0, zero, zero, zero, zero, rounds)) for rounds in (7, 10)] == [0x5F6FB709, 0x6627E8D5]
    every = torch.tensor(0xFFFFFFFF)
    assert int(philox(-1, every, every, every, every, 10)) == 0x408F276D
    out, i = torch.empty(64, dtype=torch.int64), torch.arange(64)
    for value in (0, 12345, -1, -(1 << 63), (1 << 62) + 99):
        kernel[(1,)](out, seed("cpu", value), 64)
        assert torch.equal(out, philox(value, i, 3 * i, torch.tensor(5), torch.tensor(7)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_and_gradients(dtype, device):
    q, k, v = qkv(2, 20, 33, 4, 2, 16, dtype=dtype, device=device)
    drop = {"dropout_p": 0.3, "dropout_seed": seed(device)}
    check(q, k, v, causal=True, **drop)
    check_gradients(q, k, v, causal=True, **drop)
    kernel = None if dtype == torch.float32 else BOX_BACKWARD
    extra = {"bias": rand(1, 4, 1, 33, device=device), "sinks": rand(4, device=device), "softcap": 3.0}
    check_gradients(q, k, v, tile=(32, 16), kernel=kernel, window=(14, 9), **extra, **drop)


def test_packed(device):
    """The mask goes by index in the sequence, so packed sequences drop what padded ones do."""
    tensors, where = packed([20, 0, 7], [33, 5, 12], h=2, hk=1, d=16, dv=8, device=device)
    drop = {"dropout_p": 0.2, "dropout_seed": seed(device), "causal": True}
    check(*tensors, varlen=where, **drop)
    check_gradients(*tensors, varlen=where, **drop)
    heads_first = (t.transpose(1, 2) for t in qkv(1, 20, 33, 2, 1, 16, device=device))
    check_gradients(*heads_first, layout="bhsd", dropout_p=0.2, dropout_seed=seed(device))


def test_mask(device):
    """With V the identity and scores alike, out is the mask: as likely as asked, independent of tiles, another for each seed,
    sequence and head, kept entries scaled."""
    n = 128
    q = torch.zeros(2, 64, 2, 16, device=device)
    k, v = torch.zeros(2, n, 2, 16, device=device), torch.eye(n, device=device)[None, :, None].expand(2, n, 2, n)
    plan = tilefold.attention_plan(q, k, v, dropout_p=0.25)
    masks = []
    for value, tile in ((1, (64, 64)), (1, (16, 32)), (2, (128, 16))):
        given = plan.with_tile(block_m=tile[0], block_n=tile[1])
        out = tilefold.attention(q, k, v, dropout_p=0.25, dropout_seed=seed(device, value), plan=given) * n
        kept = out > 0
        torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / 0.75))
        masks.append(kept)
    assert torch.equal(masks[0], masks[1])
    draws = masks[0].numel()
    for mask in masks:
        assert abs(int(mask.sum()) - 0.75 * draws) < 5 * (0.25 * 0.75 * draws) ** 0.5
    pairs = [
        (masks[0], masks[2]),
        *((masks[0][a], masks[0][b]) for a, b in (((0,), (1,)), ((0, ..., 0, slice(None)), (0, ..., 1, slice(None))))),
    ]
    pairs += [(masks[0][:, 1:], masks[0][:, :-1]), (masks[0][..., 1:], masks[0][..., :-1])]
    for a, b in pairs:  # independent masks agree with probability p^2 + (1 - p)^2
        draws, chance = a.numel(), 0.25**2 + 0.75**2
        assert abs(int((a == b).sum()) - chance * draws) < 5 * (chance * (1 - chance) * draws) ** 0.5


def test_seeds_come_from_the_generator(device):
    q, k, v = qkv(1, 20, 33, 2, 2, 16, device=device)
    torch.manual_seed(7)
    first, second = (tilefold.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(7)
    again = tilefold.attention(q, k, v, dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    plain = tilefold.attention(q, k, v)
    assert torch.equal(plain, tilefold.attention(q, k, v, dropout_p=0.0, dropout_seed=seed(device)))
    assert torch.equal(torch.get_rng_state(), state)


def test_checkpoints_and_same_bits(device):
    """The forward pass made anew drops what the first one did."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 20, 33, 2, 1, 16, dtype=torch.bfloat16, device=device))
    results = []
    for again in (False, True):
        torch.manual_seed(3)

        def layer(q, k, v):
            return tilefold.attention(q, k, v, causal=True, dropout_p=0.4)

        out = checkpoint(layer, q, k, v, use_reentrant=False) if again else layer(q, k, v)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.no_poison
def test_compile(device):
    inputs = [t.requires_grad_() for t in qkv(1, 20, 33, 2, 1, 16, dtype=torch.float16, device=device)]

    def layer(q, k, v, seed):
        return tilefold.attention(q, k, v, dropout_p=0.3, dropout_seed=seed), tilefold.attention(q, k, v, dropout_p=0.3)

    graph_gives(layer, *inputs, seed(device))
    call = Call(causal=True, dropout_p=0.3, dropout_seed=seed(device))
    torch.library.opcheck(ATTENTION.op, ATTENTION.flat(*inputs, call))


def test_refusals(device):
    q, k, v = qkv(1, 8, 8, 2, 2, 16, device=device)
    for p in (1.0, -0.1, float("nan")):
        refuses(tilefold.ValueRangeError, "dropout_p", tilefold.attention, q, k, v, dropout_p=p)
    refuses(tilefold.DtypeError, "dropout_p", tilefold.attention, q, k, v, dropout_p="half")
    with pytest.raises(tilefold.DtypeError, match="dropout_seed"):
        tilefold.attention(q, k, v, dropout_p=0.5, dropout_seed=torch.zeros(1, device=device))
    with pytest.raises(tilefold.ShapeError, match="dropout_seed"):
        tilefold.attention(q, k, v, dropout_p=0.5, dropout_seed=torch.zeros(2, dtype=torch.int64, device=device))


def test_plan(device):
    """No kernel for sm_90, and the plan says so; plans with and without are not taken for one another."""
    problem = AttentionProblem(8, 4096, 4096, 16, 16, 128, 128, dropout=True)
    plan = plan_attention(problem, device_named("h200"))
    assert plan.kernel == "attention_forward_box"
    assert "it has no dropout" in str(plan).lower()
    q, k, v = qkv(1, 20, 33, 2, 2, 16, device=device)
    with pytest.raises(tilefold.PlanError, match="dropout=False, the call has dropout=True"):
        tilefold.attention(q, k, v, dropout_p=0.5, plan=tilefold.attention_plan(q, k, v))
    given = tilefold.attention_backward_plan(q, k, v, dropout_p=0.5).with_tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))
    grads = [
        gradients((q, k, v), q, None, dropout_p=0.5, dropout_seed=seed(device), **b)
        for b in ({}, {"backward_plan": given})
    ]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*grads, strict=True))
