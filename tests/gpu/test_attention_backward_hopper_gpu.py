"""The Gluon kernels for the gradients of dense attention on sm_90 against the fp64 oracle and the portable kernels; the runs of
the packed one are beside theirs, the rest of it is in test_attention_backward_packed_gpu."""

import math
import random

import pytest
import torch

import tilefold
from cases import packed, qkv, rand, same
from cases.backward_kernels import ADDED, ALL, DENSE, KEYS, MASKS, ORDERED, PACKED, SPANS, several
from cases.device import (
    DEVICE,
    SM_90,
    SPARE,
    by_streams,
    compiled_once,
    followed,
    memory_beside,
    near,
    repeated,
    take_kernels_away,
)
from cases.gradient import gradients, judged, oracle, upstream
from tilefold.ops.backward import attention_backward
from tilefold.ops.call import Call
from tilefold.plan.backward import attention_backward_hopper
from tilefold.plan.backward.attention_backward_hopper import KERNEL, kept_bytes, slots
from tilefold.plan.backward.attention_backward_reduce import KERNEL as REDUCE

pytestmark = [pytest.mark.no_poison, SM_90]
BF = torch.bfloat16
LENGTHS = ((1, 1), (127, 129), (128, 128), (333, 1001), (1001, 333), (64, 2000), (2000, 63))
SPAN_LENGTHS = ((1, 1), (129, 127), (333, 1001), (1001, 333), (700, 700), (2000, 63))


@pytest.mark.parametrize("dtype", [BF, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize(
    ("kernel", "together"),
    several({"dense": [(1,), (2,)], "spans": [(None,)], "reduce": [(None,)], "ordered": [(None,)]}),
)
def test_lengths(monkeypatch, kernel, together, options, dim, dtype):
    """together: tiles of queries an item for dq."""
    if together is not None:
        monkeypatch.setattr(attention_backward_hopper, "PAIRS_FROM", 1 << 30 if together == 1 else 0)
    for sq, sk in SPAN_LENGTHS if kernel is SPANS else LENGTHS:
        kernel.held(qkv(2, sq, sk, 4, 2, dim, dtype=dtype, device=DEVICE), **options)


def rounded_once(q, k, v, dout):
    """dq, dk, dv [B, S, H, D] in fp32, in which P and dS alone are rounded, once, for their products."""
    q, k, v, dout, dtype = *(t.transpose(1, 2).float() for t in (q, k, v, dout)), q.dtype
    scale = q.shape[-1] ** -0.5
    p = (q @ k.mT * scale).softmax(-1)
    p16 = p.to(dtype).float()
    delta = ((p16 @ v).to(dtype).float() * dout).sum(-1, keepdim=True)
    ds = (p * (dout @ v.mT - delta)).to(dtype).float()
    return [t.transpose(1, 2).to(dtype) for t in (ds @ k * scale, ds.mT @ q * scale, p16.mT @ dout)]


@pytest.mark.parametrize("dtype", [BF, torch.float16])
@pytest.mark.parametrize(
    ("kernel", "dim"),
    several({
        "dense": [(64,), (128,), (256,)],
        "reduce": [(64,), (80,), (96,), (128,)],
        "ordered": [(64,), (128,)],
    }),
)  # fmt: skip
def test_rounding(kernel, dim, dtype):
    """At most 1.1 times the mean error of such gradients, as PyTorch's tests of FlexAttention ask.  P in 16 bits as a factor of
    dS, too, gives dq and dk 1.23."""
    tensors = qkv(1, 2048, 2048, 4, 4, dim, dtype=dtype, device=DEVICE)
    dout, _ = upstream(tensors[0], tensors[2], lse=False)
    want = oracle(tensors, dout, None, torch.float64)
    far = [
        [float((a.double() - b).abs().mean()) for a, b in zip(some, want, strict=True)]
        for some in (kernel.run(tensors, dout, None), rounded_once(*tensors, dout))
    ]
    assert all(a <= 1.1 * b for a, b in zip(*far, strict=True)), far


DIMS = (256, 256), (192, 128), (96, 96), (80, 72), (64, 128), (128, 64), (48, 40)
WIDE = (256, 128), (192, 192), (128, 192), (160, 136), (200, 72), (64, 256)
NARROW = (16, 16), (32, 48), (40, 40)
IN_PARTS = (96, 96), (80, 80), (72, 72), (88, 96), (72, 64), (64, 80)  # of products of 64 and 16 or 32 columns
HEAD_DIMS = {
    "dense": [(dims, options) for options in MASKS for dims in DIMS]
    + [(dims, options) for options in MASKS[:3] for dims in WIDE],
    "spans": [(dims, options) for options in MASKS[:3] for dims in (*DIMS[:4], *WIDE[1:5])],
    "reduce": [(dims, {}) for dims in (*NARROW, *IN_PARTS)],
    "ordered": [(dims, options) for options in MASKS[:3] for dims in (*NARROW, *IN_PARTS, (104, 112))],
    "apart": [(dims, options) for options in MASKS[:3] for dims in (*IN_PARTS[:3], (128, 128))],
}


@pytest.mark.parametrize(("kernel", "dims", "options"), several(HEAD_DIMS))
def test_head_dims(kernel, dims, options):
    """Padded to whole panels of 64 columns, where dq is added in memory to 80 or 96, too; above 128 there are two consumers."""
    dtype = torch.float16 if kernel is DENSE and options.get("causal") else BF
    changes = {"queries_at_once": 192} if kernel is SPANS else {}
    for sq, sk in LENGTHS if kernel is DENSE else ((333, 1001), (1001, 333)):
        kernel.held(qkv(2, sq, sk, 4, 2, *dims, dtype=dtype, device=DEVICE), None, changes, **options)


HEADS = [((1, 1),), ((12, 12),), ((12, 3),), ((7, 1),)]


@pytest.mark.parametrize(
    ("kernel", "heads"),
    several({"dense": HEADS, "spans": [HEADS[0], *HEADS[2:]], "reduce": HEADS, "ordered": HEADS, "packed": HEADS}),
)
@pytest.mark.parametrize("options", MASKS[:3], ids=str)
def test_heads(options, kernel, heads):
    if kernel is PACKED:
        lengths = [300, 100, 0, 517], [300, 250, 64, 77]
        kernel.held(*packed(*lengths, *heads, d=128, dv=128, dtype=BF, device=DEVICE), **options)
    else:
        changes = {"queries_at_once": 128} if kernel is SPANS else {}
        kernel.held(qkv(3, 400, 700, *heads, 128, dtype=BF, device=DEVICE), None, changes, **options)


SUNK = {
    "dense": [(64,), (128,), (192,)],
    "spans": [(128,)],
    "reduce": [(96,)],
    "ordered": [(64,), (128,)],
    "apart": [(64,)],
}


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (0, 0)}], ids=str)
@pytest.mark.parametrize(("kernel", "dim"), several(SUNK))
def test_sinks(kernel, dim, options):
    """Their gradient, too; some queries see no key, and the sink alone.  A sink may weigh nothing, or all."""
    sinks = torch.tensor([0.3, -60.0, 20.0, -2.0], dtype=BF, device=DEVICE)
    changes = {"queries_at_once": 128} if kernel is SPANS else {}
    kernel.held(qkv(2, 700, 333, 4, 2, dim, dtype=BF, device=DEVICE), None, changes, sinks=sinks, **options)


CAPPED = [(256, 256), (192, 128), (160, 136), (128, 192)]


@pytest.mark.parametrize("dtype", [BF, torch.float16])
@pytest.mark.parametrize("options", MASKS[:3], ids=str)
@pytest.mark.parametrize(
    ("kernel", "dims"), several({"dense": [(d,) for d in CAPPED], "spans": [(d,) for d in CAPPED[:2]]})
)
def test_softcap(kernel, dims, options, dtype):
    """Of wide heads; with sinks, too."""
    changes = {"queries_at_once": 192} if kernel is SPANS else {}
    sinks = torch.tensor([0.3, -60.0, 20.0, -2.0], dtype=dtype, device=DEVICE)
    for sq, sk, more in ((333, 1001, {}), (1001, 333, {"sinks": sinks})):
        kernel.held(
            qkv(2, sq, sk, 4, 2, *dims, dtype=dtype, device=DEVICE), None, changes, softcap=5.0, **more, **options
        )


@pytest.mark.parametrize(
    ("kernel", "dim"),
    several({"dense": [(64,), (128,)], "spans": [(128,)], "reduce": [(64,), (128,)], "ordered": [(64,)]}),
)
def test_strides_and_layouts(kernel, dim):
    changes = {"queries_at_once": 192} if kernel is SPANS else {}
    fused = rand(2, 500, 3, 4, dim, dtype=BF, device=DEVICE).unbind(2)
    kernel.held(fused, None, changes)
    turned = tuple(t.transpose(1, 2) for t in fused)
    kernel.held(turned, None, changes, layout="bhsd", causal=kernel is SPANS)
    if kernel is not SPANS:
        transposed = [t.transpose(1, 2) for t in qkv(2, 4, 4, 500, 500, dim, dtype=BF, device=DEVICE)]
        kernel.held(transposed, None, changes, causal=True)


def test_outer_gradients_that_no_box_reads():
    """A dout that is one number everywhere, one with odd strides, none for the lse, and gradients of some inputs only."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 200, 300, 4, 2, 64, dtype=BF, device=DEVICE))
    plan = DENSE.plan((q, k, v), call={"causal": True})

    def grads(dout, inputs):
        out = tilefold.attention(q, k, v, causal=True, backward_plan=plan)
        return torch.autograd.grad(out, inputs, dout)

    ones = torch.ones(1, 200, 4, 64, dtype=BF, device=DEVICE)
    odd = torch.empty(1, 200, 4, 65, dtype=BF, device=DEVICE)[..., :64].copy_(ones)
    whole = grads(ones, (q, k, v))
    for dout in (ones[:, :1, :1, :1].expand(1, 200, 4, 64), odd):
        assert same(grads(dout, (q, k, v)), whole)
    for i, t in enumerate((q, k, v)):
        assert torch.equal(grads(ones, (t,))[0], whole[i])


RUNS = {"dense": [(50, 64), (50, 128), (50, 256)], "packed": [(50, 64), (50, 128)], "reduce": [(30, 64), (30, 128)],
        "ordered": [(50, 64), (50, 128)], "spans": [(30, 64), (30, 128), (30, 256)]}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1000, 0)}], ids=str)
@pytest.mark.parametrize(("kernel", "times", "dim"), several(RUNS))
def test_many_runs_and_another_kernel(kernel, times, dim, options):
    """Rooms, lines and sums that are used many times; no synchronisation; the same bits; what another kernel makes, to rounding:
    the portable one, or for sums without an order the one that the plan takes."""
    where, changes = None, {}
    if kernel is PACKED:
        pick = random.Random(dim)
        lengths = [min(6000, int(pick.lognormvariate(6.4, 1.0))) for _ in range(48)]
        tensors, where = packed(lengths, lengths, h=16, hk=8, d=dim, dv=dim, dtype=BF, device=DEVICE)
    elif kernel is SPANS:
        tensors = qkv(1, 4096, 4096, 16, 4, dim, dtype=BF, device=DEVICE)
        changes = {"queries_at_once": 512, "keys_at_once": 1024}
    else:
        tensors = qkv(2, 4096, 4096, 16, 8, dim, dtype=BF, device=DEVICE)
    plan = kernel.plan(tensors, where, call=options, **changes)
    dout, dlse = upstream(tensors[0], tensors[2])
    first, runs = repeated(lambda: gradients(tensors, dout, dlse, where, backward_plan=plan, **options), times)
    assert all(kernel.alike(first, run) for run in runs)
    own = {} if kernel is ADDED else {"backward_plan": kernel.plan(tensors, where, portable=True, call=options)}
    assert near(first, gradients(tensors, dout, dlse, where, **own, **options))


def test_splits_of_a_long_head():
    """Two heads of 20000 keys in KV splits by the plan's own rule, against the portable kernels."""
    tensors = qkv(1, 20000, 20000, 2, 2, 128, dtype=BF, device=DEVICE)
    dout, dlse = upstream(tensors[0], tensors[2])
    got = DENSE.run(tensors, dout, dlse, keys_at_once=4096)
    assert near(got, gradients(tensors, dout, dlse, backward_plan=DENSE.plan(tensors, portable=True)))


@pytest.mark.parametrize(
    ("kernel", "dim", "tile"),
    several({"dense": [(128, 64)], "reduce": [(64, 128), (128, 128)], "ordered": [(64, 128), (128, 128)]}),
)
def test_hard_numbers(kernel, dim, tile):
    """Logits of 1e4, numbers below the least normal one, and a NaN that stays in the tiles of queries it is in."""
    for size in (100.0, 1e-30):
        q, k, v = (t * size for t in qkv(1, 300, 500, 4, 4, dim, dtype=BF, device=DEVICE))
        dout, _ = upstream(q, v)
        got = gradients((q, k, v), dout, None, backward_plan=kernel.plan((q, k, v)), scale=1.0)
        assert all(g.isfinite().all() for g in got)
    q, k, v = qkv(1, 512, 512, 2, 2, dim, dtype=BF, device=DEVICE)
    dout, _ = upstream(q, v)
    causal = {"call": {"causal": True}}
    clean = kernel.run((q, k, v), dout, None, **causal)
    q[0, 500, 0] = math.nan
    dirty = kernel.run((q, k, v), dout, None, **causal)
    assert dirty[0][0, 500, 0].isnan().all()
    assert not dirty[0][:, : 512 - tile].isnan().any()
    alike = ALL if kernel.ordered else KEYS
    assert same([a[:, :, 1] for a in clean[alike]], [b[:, :, 1] for b in dirty[alike]])  # the other head
    if kernel.ordered:
        assert torch.equal(clean[0][:, : 512 - tile, 0], dirty[0][:, : 512 - tile, 0])


@pytest.mark.parametrize(
    ("kernel", "kv_heads"), several({"dense": [(16,)], "spans": [(4,)], "reduce": [(16,)], "ordered": [(16,)]})
)
def test_graph_and_streams(kernel, kv_heads):
    q, k, v = (t.requires_grad_() for t in qkv(1, 2048, 2048, 16, kv_heads, 128, dtype=BF, device=DEVICE))
    plan = kernel.plan((q, k, v), call={"causal": True}, **kernel.long)
    dout = rand(1, 2048, 16, 128, dtype=BF, device=DEVICE)

    def step():
        return torch.autograd.grad(tilefold.attention(q, k, v, causal=True, backward_plan=plan), (q, k, v), dout)

    got = followed(step, *[lambda: q.copy_(rand(*q.shape, dtype=q.dtype, device=DEVICE))] * 3, alike=kernel.alike)
    if kernel in (DENSE, ORDERED):
        by_streams(step, got)


@pytest.mark.parametrize(("kernel", "changes"), several({
    "dense": [({"heads_at_once": 2, "keys_at_once": 4096},), ({"heads_at_once": 2, "keys_at_once": 1024},)], "reduce": [({},)],
    "ordered": [({},)],
}))  # fmt: skip
def test_memory(kernel, changes):
    """Beside the gradients: room for dS, sums between KV splits or fp32 sums of dq, statistics, as the plan says."""
    tensors = tuple(t.requires_grad_() for t in qkv(1, 4096, 4096, 16, 16, 128, dtype=BF, device=DEVICE))
    plan = kernel.plan(tensors, call={"causal": True}, **changes)
    out = tilefold.attention(*tensors, causal=True, backward_plan=plan)
    dout = torch.randn_like(out)
    _, extra = memory_beside(lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True))
    assert extra <= plan.scratch_bytes + SPARE
    if kernel is DENSE:
        assert kept_bytes(plan.problem, plan.device, 2, changes["keys_at_once"]) < plan.scratch_bytes
        assert slots(plan.problem, plan.device, 2, changes["keys_at_once"]) >= 2


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_long_groups(options):
    """Where dS has no room: dq is added in order, in the memory that the plan names."""
    tensors = tuple(t.requires_grad_() for t in qkv(1, 32768, 32768, 32, 8, 128, dtype=BF, device=DEVICE))
    plan = tilefold.attention_backward_plan(*tensors, **options)
    assert (plan.kernel, len(plan.spans)) == (REDUCE, 1)
    out = tilefold.attention(*tensors, **options)
    dout = torch.randn_like(out)
    got, extra = memory_beside(lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True))
    assert extra <= plan.scratch_bytes + SPARE
    other = SPANS.plan(tensors, portable=True, call=options)
    assert near(got, gradients(tensors, dout, None, backward_plan=other, **options))


def test_one_compilation_serves_all_lengths():
    from tilefold.kernels.hopper.attention_backward import attention_backward_hopper as function

    def run(b, sq, sk, h, hk, options, **changes):
        tensors = qkv(b, sq, sk, h, hk, 64, dtype=BF, device=DEVICE)
        DENSE.run(tensors, *upstream(tensors[0], tensors[2]), call=options, **changes)

    windows = (
        (1, 320, 300, 2, 1, (100, 3)),
        (1, 64, 1, 1, 1, (7, 0)),
        (2, 640, 1024, 16, 2, (1, 1)),
        (3, 17, 777, 5, 5, (5000, 10)),
    )
    compiled_once(function, [lambda at=at: run(*at[:5], {"window": at[5]}) for at in windows])
    spans = (400, 400, 128), (1000, 700, 64), (333, 1001, 192), (65, 129, 64)
    causal = {"causal": True}
    compiled_once(
        function, [lambda at=at: run(1, *at[:2], 4, 1, causal, queries_at_once=at[2], keys_at_once=64) for at in spans]
    )


def test_falls_back_with_a_warning(monkeypatch):
    tensors = qkv(1, 321, 333, 2, 2, 128, dtype=BF, device=DEVICE)
    dout, dlse = upstream(tensors[0], tensors[2])
    wanted = gradients(tensors, dout, dlse, backward_plan=DENSE.plan(tensors, portable=True))
    assert tilefold.attention_backward_plan(*tensors).kernel == KERNEL
    take_kernels_away(monkeypatch)
    with pytest.warns(RuntimeWarning, match="a portable one serves instead"):
        got = gradients(tensors, dout, dlse)
    assert same(got, wanted)
    with pytest.raises(tilefold.TilefoldError, match="taken away"):
        DENSE.run(tensors, dout, dlse, keys_at_once=64)


def test_compiled():
    """torch.compile passes deterministic on."""
    tensors = tuple(t.requires_grad_() for t in qkv(1, 16384, 16384, 4, 2, 64, dtype=BF, device=DEVICE))
    dout = rand(1, 16384, 4, 64, dtype=BF, device=DEVICE)
    assert tilefold.attention_backward_plan(*tensors, causal=True, deterministic=False).kernel == REDUCE

    def f(q, k, v):
        return tilefold.attention(q, k, v, causal=True, deterministic=False)

    want = torch.autograd.grad(f(*tensors), tensors, dout)
    got = torch.autograd.grad(torch.compile(f, fullgraph=True)(*tensors), tensors, dout)
    assert ADDED.alike(want, got)


def test_keys_of_several_ranks():
    """As context parallelism calls it: lse and out over all keys, gradients that are summands of keys and of queries."""
    q, k, v = qkv(1, 1000, 1400, 8, 2, 128, dtype=BF, device=DEVICE)
    dout, dlse = upstream(q, v)
    with torch.no_grad():
        out, lse = tilefold.attention(q, k, v, return_lse=True)
    sums = [torch.zeros(t.shape, device=DEVICE) for t in (q, k, v)]
    handed_on = 0.0  # variance of dq: its summands are rounded
    for low, high in ((0, 600), (600, 1400)):
        kk, vv = k[:, low:high], v[:, low:high]
        call = Call(backward_plan=SPANS.plan((q, kk, vv), queries_at_once=256))
        parts = attention_backward.backward((q, kk, vv, out, lse), dout, dlse, call, (True,) * 3 + (False,) * 2, False)
        sums[0] += parts[0]
        handed_on = handed_on + (parts[0].double() * 2.0**-8).square() / 3
        sums[1][:, low:high], sums[2][:, low:high] = parts[1], parts[2]
    want, plain = (oracle((q, k, v), dout, dlse, d) for d in (torch.float64, q.dtype))
    plain = (want[0] + ((plain[0] - want[0]).square() + handed_on).sqrt(), *plain[1:])
    judged([t.to(q.dtype) for t in sums], want, plain, "")
