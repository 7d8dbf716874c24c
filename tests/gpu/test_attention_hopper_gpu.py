"""The Gluon kernel for dense attention on sm_90 against the fp64 oracle, at lengths, strides and numbers that are hard for it."""

import math
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

import tilefold
from cases import check, hopper, hopper_plan, packed, qkv, rand
from cases.device import DEVICE, SM_90, alike_every_run, by_streams, followed
from cases.hopper import held

HOPPER = "attention_forward_hopper"
pytestmark = [pytest.mark.no_poison, SM_90]
DIMS = [(16, 16), (32, 32), (40, 40), (40, 64), (64, 128), (64, 256), (72, 72), (80, 80), (96, 96), (96, 192), (100, 100),
        (128, 64), (160, 160), (192, 128), (192, 192), (256, 64), (256, 256), (264, 264), (320, 320),
        (512, 512), (512, 128), (512, 40), (64, 384)]  # fmt: skip
MASKS = [{}, {"causal": True}, {"window": (200, 50)}, {"window": (0, 0)}, {"window": (130, -1)}]


def held_packed(lengths_q, lengths_k, changes=None, heads=(4, 2), dims=(128, 128), spoil=False, **options):
    """spoil: what lies before the first sequence and behind the last one is NaN."""
    (q, k, v), (cu_q, cu_k, *_) = packed(
        [5, *lengths_q, 9], [3, *lengths_k, 200], *heads, *dims, dtype=torch.bfloat16, device=DEVICE
    )
    batch = (cu_q[1:-1].clone(), cu_k[1:-1].clone(), max(lengths_q), max(lengths_k))
    if spoil:
        for t, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):
            t[: cu[1]] = math.nan
            t[cu[-2] :] = math.nan
    hopper.held_packed((q, k, v), batch, changes, slice(int(cu_q[1]), int(cu_q[-2])), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_lengths(options, dim, dtype):
    for sq, sk in ((1, 1), (127, 129), (128, 128), (333, 1001), (1001, 333), (64, 2000)):
        q, k, v = qkv(2, sq, sk, 8, 2, dim, dtype=dtype, device=DEVICE)
        held(q, k, v, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (200, 50)}], ids=str)
@pytest.mark.parametrize("dims", DIMS)
def test_head_dims(dims, options):
    dtype = torch.float16 if dims[0] in (96, 256) else torch.bfloat16
    for sq, sk in ((1, 1), (333, 1001), (700, 333)):
        q, k, v = (torch.empty(*t.shape[:-1], -(-t.shape[-1] // 8) * 8, dtype=dtype, device=DEVICE)[..., : t.shape[-1]].copy_(t)
                   for t in qkv(2, sq, sk, 4, 2, *dims))  # fmt: skip
        held(q, k, v, **options)


VERSIONS = [
    (64, {"block_m": 192}),
    (64, {"block_m": 192, "options": ("turns",)}),
    (64, {"block_m": 192, "options": ("turns", "skip", "polynomial 4")}),
    (64, {"block_m": 64, "options": ("skip",)}),
    (64, {"options": ("fence", "polynomial 16")}),
    (96, {"block_m": 192, "block_n": 64}),
    (128, {"block_m": 128, "options": ("fence", "turns")}),
    (128, {"options": ("fence", "skip")}),
    (128, {"options": ("fence", "late")}),
    (128, {"block_m": 128, "options": ("fence", "turns", "skip", "polynomial 2")}),
    (128, {"num_stages": 3, "options": ("fence", "pack")}),
    (192, {"options": ("fence", "turns")}),
    (256, {"options": ("fence", "turns", "skip")}),
    (256, {"options": ("fence", "pack", "skip")}),
    (384, {"options": ("fence", "turns", "skip", "pack")}),
    (512, {"options": ()}),
    (512, {"options": ("fence", "turns", "skip", "pack")}),
    (512, {"block_n": 64, "num_stages": 1, "options": ("fence", "turns", "skip", "late")}),
    (64, {"block_m": 64, "options": ("skip", "lazy")}),
    (64, {"block_m": 192, "options": ("turns", "skip", "lazy")}),
    (96, {"options": ("fence", "turns", "skip", "lazy")}),
    (128, {"block_m": 128, "options": ("fence", "turns", "skip", "lazy")}),
    (128, {"options": ("late", "skip", "lazy", "pack")}),
    (64, {"block_m": 64, "options": ("skip", "lazy", "prefetch")}),
    (64, {"block_m": 192, "options": ("turns", "skip", "lazy", "prefetch")}),
    (128, {"block_m": 128, "options": ("fence", "turns", "skip", "lazy", "prefetch")}),
    (128, {"num_stages": 1, "options": ("fence", "pack", "prefetch")}),
    (72, {"block_m": 192, "block_n": 64, "num_stages": 4, "options": ("fence", "turns", "skip", "lazy", "prefetch")}),
    (40, {"block_m": 192, "block_n": 128, "num_stages": 4, "options": ("turns", "skip", "prefetch")}),
]
LAZY = [one for one in VERSIONS if "lazy" in one[1].get("options", ())]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (130, 5)}], ids=str)
@pytest.mark.parametrize(("dim", "changes"), VERSIONS, ids=str)
def test_versions(dim, changes, options):
    for sq, sk in ((1, 77), (13, 2000), (500, 1001), (1001, 333)):
        q, k, v = qkv(2, sq, sk, 8, 2, dim, dtype=torch.float16 if sq == 500 else torch.bfloat16, device=DEVICE)
        held(q, k, v, changes, **options)


@pytest.mark.parametrize(
    "changes", [{}, {"options": ("skip", "polynomial 4")}, {"options": ("turns", "pack")}], ids=str
)
def test_scores_that_grow_along_the_keys(changes):
    """Every tile has a larger maximum than those before; and a row's first keys may all be masked."""
    q, k, v = qkv(1, 400, 1500, 4, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    k *= torch.linspace(0, 60, 1500, device=DEVICE)[None, :, None, None]
    held(q, k, v, changes)
    held(q, k, v, changes, window=(300, 0))


def jumping(kind, q, k):
    """Scores that rise by more than a tile's sums can hold: of all rows, of some, at the last key, from tile to tile."""
    if kind == "all":
        q *= 30
    elif kind == "some":
        q[:, ::97, 1] *= 60
    elif kind == "the last key":
        k[:, -1] *= 60
    elif kind == "one tile":
        k[:, 700:703] *= 40
        q[:, ::7] *= 20
    else:
        k *= torch.linspace(0, 30, k.shape[1], device=k.device)[None, :, None, None]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (127, 0)}, {"window": (200, 130)}], ids=str)
@pytest.mark.parametrize(("dim", "changes"), LAZY, ids=str)
def test_scores_that_jump(dim, changes, options):
    """What a sum cannot hold is made again, wherever it comes, and every run gives the same bits."""
    sinks = rand(8, device=DEVICE) * 20
    for kind in ("all", "some", "the last key", "one tile", "rising"):
        for dtype in (torch.bfloat16, torch.float16):
            for batch, sq, sk in ((1, 333, 1001), (5, 1024, 1024)):
                q, k, v = qkv(batch, sq, sk, 8, 2, dim, dtype=dtype, device=DEVICE)
                jumping(kind, q, k)
                held(q, k, v, changes, **options)
        held(q, k, v, changes, sinks=sinks, **options)
        plan = hopper_plan(tilefold.attention_plan(q, k, v, **options), **changes)
        alike_every_run(partial(tilefold.attention, q, k, v, plan=plan, **options), 10)


def test_jumps_of_packed_sequences_and_of_nan():
    """NaN is not made again, and stays in its rows."""
    changes = {"options": ("fence", "turns", "skip", "lazy")}
    held_packed((300, 0, 77, 1000, 3), (500, 9, 77, 1500, 0), changes, causal=True)
    q, k, v = qkv(1, 3000, 5000, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    plan = tilefold.attention_plan(q, k, v)
    assert "lazy" in plan.options
    hopper.nan_stays(partial(tilefold.attention, q, k, v, plan=plan), q[0, 100, 0])


@pytest.mark.parametrize(
    "changes",
    [{}, {"options": ("pack",)}, {"block_m": 128, "block_n": 128, "num_stages": 2, "options": ("skip", "turns")}],
    ids=str,
)
def test_sinks(changes):
    sinks = rand(8, device=DEVICE)
    sinks[1], sinks[2], sinks[3] = -math.inf, 30.0, -1e30
    for options in ({}, {"causal": True}):
        q, k, v = qkv(2, 333, 200, 8, 2, 128, dtype=torch.bfloat16, device=DEVICE)
        held(q, k, v, changes, sinks=sinks, **options)
        held(q, k, v, changes, sinks=torch.stack((sinks, sinks), 1)[:, 1], **options)


@pytest.mark.parametrize("changes", [{}, {"options": ("tanh",)}], ids=str)
@pytest.mark.parametrize("dim", [64, 256])
def test_softcap(changes, dim):
    for cap, options in ((5.0, {}), (50.0, {"causal": True})):
        q, k, v = qkv(2, 333, 500, 4, 2, dim, dtype=torch.bfloat16, device=DEVICE)
        held(q * 4, k, v, changes, softcap=cap, **options)


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize(
    "changes", [{}, {"block_m": 64}, {"block_m": 128, "options": ("turns", "skip", "prefetch")}], ids=str
)
def test_packed(options, changes):
    pairs = ((300, 300), (0, 50), (129, 700), (1, 400), (128, 128), (64, 0), (700, 90))
    held_packed(*zip(*pairs, strict=True), changes, spoil=True, **options)


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (256, 256), (320, 320), (512, 512)])
def test_packed_head_dims(dims):
    held_packed((100, 1, 517), (100, 300, 517), dims=dims, spoil=True, causal=True)
    held_packed([17] * 150, [17] * 150, heads=(2, 2), dims=dims)
    held_packed((100, 300), (222, 333), dims=dims, softcap=20.0, sinks=rand(4, device=DEVICE))


def test_a_neighbour_full_of_nan_is_not_seen():
    (q, k, v), batch = packed([200, 150, 99], [200, 150, 99], 4, 4, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    plan = hopper_plan(tilefold.attention_plan(q, k, v, **dict(zip(hopper.WHERE, batch, strict=True)), causal=True))
    clean = tilefold.attention_varlen(q, k, v, *batch, causal=True, plan=plan)
    for t in (q, k, v):
        t[200:350] = math.nan
    out = tilefold.attention_varlen(q, k, v, *batch, causal=True, plan=plan)
    assert out[200:350].isnan().all()
    assert torch.equal(out[:200], clean[:200])
    assert torch.equal(out[350:], clean[350:])


@pytest.mark.parametrize("heads", [(1, 1), (12, 12), (12, 3), (7, 1)])
def test_heads(heads):
    q, k, v = qkv(3, 400, 700, *heads, 128, dtype=torch.bfloat16, device=DEVICE)
    held(q, k, v, causal=True)


@pytest.mark.parametrize("dim", [64, 128])
def test_strides_and_layouts(dim):
    packed = rand(2, 500, 3, 4, dim, dtype=torch.bfloat16, device=DEVICE).unbind(2)
    held(*packed)
    transposed = [t.transpose(1, 2) for t in qkv(2, 4, 4, 500, 500, dim, dtype=torch.bfloat16, device=DEVICE)]
    held(*transposed, causal=True)
    held(*(t.transpose(1, 2) for t in packed), layout="bhsd")


def test_the_plan_takes_it():
    q, k, v = qkv(1, 4096, 4096, 16, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    assert tilefold.attention_plan(q, k, v).kernel == HOPPER
    check(q, k, v, None)
    odd = torch.empty(1, 4096, 16, 132, dtype=torch.bfloat16, device=DEVICE)[..., :128].copy_(q)
    assert tilefold.attention_plan(odd, k, v).kernel != HOPPER  # rows of 264 bytes are no boxes
    check(odd, k, v, None)


def test_hard_numbers():
    """Logits of 1e4, and numbers below the least normal one."""
    for size in (100.0, 1e-30):
        q, k, v = (t * size for t in qkv(1, 300, 500, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE))
        held(q, k, v, scale=1.0)
    q, k, v = qkv(1, 300, 500, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    v[:, :, 1] *= 1e-38
    held(q, k, v)


def test_nan_stays_in_its_rows():
    q, k, v = qkv(1, 512, 512, 2, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    plan = hopper_plan(tilefold.attention_plan(q, k, v, causal=True))
    hopper.nan_stays(partial(tilefold.attention, q, k, v, causal=True, plan=plan), q[0, 100, 0])


@pytest.mark.parametrize(("dim", "changes"), VERSIONS, ids=str)
def test_versions_give_the_same_bits_every_run(dim, changes):
    q, k, v = qkv(2, 1500, 1500, 16, 4, dim, dtype=torch.bfloat16, device=DEVICE)
    plan = hopper_plan(tilefold.attention_plan(q, k, v, causal=True), **changes)
    alike_every_run(lambda: tilefold.attention(q, k, v, causal=True, plan=plan), 20)


@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_the_same_bits_every_run(options):
    q, k, v = qkv(2, 3000, 3000, 16, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    assert tilefold.attention_plan(q, k, v, **options).kernel == HOPPER
    alike_every_run(lambda: tilefold.attention(q, k, v, return_lse=True, **options), 50)


def test_graph_and_streams():
    q, k, v = qkv(1, 2048, 2048, 16, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    step = partial(tilefold.attention, q, k, v, causal=True)
    by_streams(step, followed(step, *[lambda: q.copy_(rand(*q.shape, dtype=q.dtype, device=DEVICE))] * 3))


@pytest.mark.parametrize("causal", [False, True])
def test_reduce_overhead(causal):
    """torch.compile with CUDA graphs: the same bits as without, in later calls with new values too, gradients included."""
    torch._dynamo.reset()

    def step(q, k, v):
        out = tilefold.attention(2 * q, k, v, causal=causal) + 1
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    def fold(q, k, v):
        return tilefold.attention(2 * q, k, v, causal=causal) + 1

    compiled = torch.compile(fold, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        q, k, v = (t.requires_grad_() for t in qkv(2, 1024, 1024, 16, 4, 128, dtype=torch.bfloat16, device=DEVICE))
        assert tilefold.attention_plan(q, k, v, causal=causal).kernel == HOPPER
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            torch.testing.assert_close(compiled(q, k, v), fold(q, k, v))
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(q, k, v)
        got = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        torch.testing.assert_close(got, step(q, k, v)[1:])


def test_the_environment_turns_it_off():
    code = (
        "import torch, tilefold; q = torch.randn(1, 4096, 16, 128, device='cuda', dtype=torch.bfloat16); "
        "print(tilefold.attention_plan(q, q, q).kernel)"
    )
    for value, kernel in (("1", "attention_forward_box"), ("0", HOPPER)):
        found = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TILEFOLD_DISABLE_HOPPER": value},
            capture_output=True,
            text=True,
        )
        assert found.stdout.strip() == kernel, found.stderr
