"""The kernel of e4m3 attention on sm_90 against the fp64 oracle of the dequantised inputs: lengths, masks, versions, graphs."""

import math

import pytest
import torch

import tilefold
from cases.device import DEVICE, SM_90, alike_every_run, captured
from cases.fp8 import check, quantised
from tilefold import reference
from tilefold.kernels.dense.transpose_values import transpose_values

KERNEL = "attention_forward_fp8"
pytestmark = [pytest.mark.no_poison, SM_90]
MASKS = [{}, {"causal": True}, {"window": (200, 50)}, {"window": (0, 0)}, {"window": (130, -1)}]
VERSIONS = [
    (64, {"options": ("fence", "turns")}),
    (64, {"options": ("turns", "polynomial 4")}),
    (64, {"options": ("direct", "turns"), "block_m": 192}),
    (64, {"options": ()}),
    (128, {"options": ("direct", "fence", "turns")}),
    (128, {"options": ("fence",)}),
    (128, {"options": ("turns",), "block_n": 64}),
    (128, {"options": ("fence", "turns"), "num_stages": 2}),
    (256, {"options": ("direct", "fence", "turns"), "kernel": KERNEL}),
]


def held(tensors, factors, changes=None, **options):
    """Hold the kernel to the oracle; changes: of its plan."""
    plan = tilefold.attention_plan(*tensors, **factors, **options)
    plan = plan.with_tile(**{"kernel": KERNEL, **(changes or {})})
    return check(*tensors, factors, plan=plan, **options)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_lengths(options, dim, layout):
    for sq, sk in ((1, 1), (127, 129), (128, 128), (333, 1001), (1001, 333), (64, 2000)):
        tensors, factors = quantised(2, sq, sk, 8, 2, dim, device=DEVICE, layout=layout)
        held(tensors, factors, layout=layout, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (48, 64), (64, 128), (80, 80), (96, 100), (128, 64), (112, 128), (256, 64)])
def test_head_dims(dims, options):
    for sq, sk in ((1, 1), (333, 1001), (700, 333)):
        held(*quantised(2, sq, sk, 4, 2, *dims, device=DEVICE), **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (130, 5)}], ids=str)
@pytest.mark.parametrize(("dim", "changes"), VERSIONS, ids=str)
def test_versions(dim, changes, options):
    for sq, sk in ((1, 77), (500, 1001), (1001, 333)):
        held(*quantised(2, sq, sk, 8, 2, dim, device=DEVICE), changes, **options)


@pytest.mark.parametrize("n", [4096, 16384])
def test_sums_of_many_keys_of_one_sign(n):
    """What the tensor cores' own sums would lose: their error grows with the number of keys."""
    tensors, factors = quantised(1, 256, n, 2, 1, 128, device=DEVICE, mean=1.0)
    held(tensors, factors)


def test_scores_that_grow_along_the_keys():
    """Every tile has a larger maximum than those before, and a row's first keys may all be masked."""
    q, k, v = (torch.randn(1, n, h, 128, device=DEVICE) for n, h in ((400, 4), (1500, 1), (1500, 1)))
    k = k * torch.linspace(0, 20, 1500, device=DEVICE)[None, :, None, None]
    tensors, factors = [], {}
    for name, t in (("q", q), ("k", k), ("v", v)):
        x, factors[f"{name}_descale"] = tilefold.quantize_fp8(t)
        tensors.append(x)
    held(tensors, factors)
    held(tensors, factors, window=(300, 0))


def test_rows_that_see_nothing_and_numbers_that_are_none():
    (q, k, v), factors = quantised(1, 300, 100, 2, 1, 128, device=DEVICE)
    out, lse = held((q, k, v), factors, causal=True)
    assert (out[:, :200] == 0).all()
    assert (lse[..., :200] == -math.inf).all()
    q = q.float()
    q[0, 250, 1, 3] = math.nan
    out = tilefold.attention(q.to(torch.float8_e4m3fn), k, v, **factors, causal=True)
    assert out[0, 250, 1].isnan().all()
    assert not out[0, 250, 0].isnan().any()
    assert not out[0, 249].isnan().any()


def test_strides_factors_and_none():
    (q, k, v), factors = quantised(2, 200, 300, 4, 2, 128, device=DEVICE)
    wide = torch.zeros(2, 300, 2, 160, device=DEVICE).to(torch.float8_e4m3fn)[..., :128]
    wide.copy_(k)
    held((q, wide, v), factors)
    by_kv_head = factors["q_descale"][:, ::2]
    held((q, k, v), {**factors, "q_descale": by_kv_head})
    held((q, k, v), {}, scale=2e-5)
    held((q, k, v), {"v_descale": factors["v_descale"]}, scale=2e-5)
    odd = torch.zeros(2, 200, 4, 136, device=DEVICE).to(torch.float8_e4m3fn)[..., 3:131]
    odd.copy_(q)
    plan = tilefold.attention_plan(odd, k, v, **factors)
    assert plan.kernel == "dequantise"
    check(odd, k, v, factors)


def test_dequantised_beside_the_kernel(monkeypatch):
    monkeypatch.setenv("TILEFOLD_DISABLE_HOPPER", "1")
    tensors, factors = quantised(2, 333, 500, 4, 2, 96, device=DEVICE)  # a shape of this test alone: plans are kept
    assert tilefold.attention_plan(*tensors, **factors).kernel == "dequantise"
    check(*tensors, factors, causal=True)


@pytest.mark.parametrize("n", [1, 15, 16, 1000])
def test_transposition(n):
    v = torch.randint(0, 256, (2, n, 3, 128), dtype=torch.uint8, device=DEVICE)
    places = -(-n // 16) * 16
    made = torch.full((2, 3, 128, places), 255, dtype=torch.uint8, device=DEVICE)
    blocks = -(-places // 128)
    transpose_values[(6 * blocks,)](v, made, n, 3, blocks, places, *v.stride()[:3], DIM=128, BLOCK_D=128, BLOCK_N=128)
    place = torch.arange(places, device=DEVICE)
    key = place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2
    padded = torch.cat((v, torch.zeros(2, places - n, 3, 128, dtype=torch.uint8, device=DEVICE)), 1)
    assert torch.equal(made, padded[:, key].permute(0, 2, 3, 1))


def test_the_same_bits_every_time():
    (q, k, v), factors = quantised(2, 1000, 3000, 8, 2, 128, device=DEVICE)
    alike_every_run(lambda: tilefold.attention(q, k, v, **factors, causal=True, return_lse=True), 50)


def test_a_graph_replayed_with_other_numbers():
    (q, k, v), factors = quantised(1, 700, 900, 8, 2, 128, device=DEVICE)
    other, changed = quantised(1, 700, 900, 8, 2, 128, device=DEVICE, gain=2.0)
    graph, out = captured(lambda: tilefold.attention(q, k, v, **factors, causal=True))
    for to, since in (*zip((q, k, v), other, strict=True), *((factors[name], changed[name]) for name in factors)):
        to.copy_(since)
    for _ in range(3):
        graph.replay()
    assert torch.equal(out, tilefold.attention(*other, **changed, causal=True))


def test_compiled():
    torch._dynamo.reset()
    (q, k, v), factors = quantised(2, 300, 400, 4, 2, 64, device=DEVICE)

    def layer(q, k, v, factors):
        return tilefold.attention(q, k, v, **factors, causal=True) * 2

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        assert torch.equal(compiled(q, k, v, factors), layer(q, k, v, factors))


def test_many_tokens():
    (q, k, v), factors = quantised(1, 200, 70000, 2, 1, 128, device=DEVICE)
    out, lse = tilefold.attention(q, k, v, **factors, return_lse=True)
    exact, plain = (reference.attention_fp8(q, k, v, **factors, dtype=d) for d in (torch.float64, q.dtype))
    assert reference.compare(out, exact[0], plain[0]).ok
    assert reference.compare(lse, exact[1], plain[1], unit=1.0).ok
