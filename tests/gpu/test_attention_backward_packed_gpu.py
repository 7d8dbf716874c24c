"""The Gluon kernels for the gradients of packed sequences on sm_90 against the fp64 oracle and the dense kernels."""

import random

import pytest
import torch

import tilefold
from cases import packed, rand, same
from cases.backward_kernels import ADDED, APART, DENSE, MASKS, ORDERED, PACKED, several
from cases.device import DEVICE, SM_90, SPARE, captured, compiled_once, memory_beside
from cases.gradient import upstream
from tilefold.plan.backward import attention_backward_packed

pytestmark = [pytest.mark.no_poison, SM_90]
BF = torch.bfloat16
LENGTHS = [
    ([500, 0, 33, 1, 1000], [700, 30, 0, 999, 1000]),
    ([64, 128, 64, 127, 129], [64, 128, 64, 127, 129]),
    ([2000], [63]),
    ([0, 0, 65, 0], [0, 5, 1300, 0]),
    ([1] * 70, [3] * 70),
]


@pytest.mark.parametrize("dtype", [BF, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize(
    ("kernel", "together"),
    several({"packed": [(1,), (2,)], "reduce": [(None,)], "ordered": [(None,)], "apart": [(None,)]}),
)
def test_lengths(monkeypatch, kernel, together, options, dim, dtype):
    if together is not None:
        monkeypatch.setattr(attention_backward_packed, "tiles_together", lambda *args: together)
    for i, lengths in enumerate(LENGTHS):  # heads of its own for each case and number: bound launches are kept
        heads = 2 * (together or 2) + 4 * (i % 2)
        kernel.held(*packed(*lengths, h=heads, hk=2, d=dim, dv=dim, dtype=dtype, device=DEVICE), **options)


@pytest.mark.parametrize("dims", [(96, 96), (80, 72), (72, 72), (128, 64), (64, 128), (48, 40), (104, 112)], ids=str)
@pytest.mark.parametrize("options", MASKS[:3], ids=str)
@pytest.mark.parametrize("kernel", several({"reduce": [()], "ordered": [()]}))
def test_head_dims(kernel, options, dims):
    for lengths in LENGTHS[:3]:
        kernel.held(*packed(*lengths, h=4, hk=2, d=dims[0], dv=dims[1], dtype=BF, device=DEVICE), **options)


@pytest.mark.parametrize("dims", [(256, 256), (192, 128), (192, 192), (160, 136), (128, 192), (64, 256)], ids=str)
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("kernel", several({"packed": [()]}))
def test_wide_head_dims(kernel, options, dims):
    """Of two warpgroups, one of which zeroes what is behind a sequence's end."""
    for i, lengths in enumerate(LENGTHS):
        heads = (4, 2) if i % 2 else (3, 3)
        dtype = BF if i else torch.float16
        kernel.held(*packed(*lengths, *heads, d=dims[0], dv=dims[1], dtype=dtype, device=DEVICE), **options)


@pytest.mark.parametrize("dims", [(256, 256), (192, 128), (160, 136)], ids=str)
@pytest.mark.parametrize("options", MASKS[:3], ids=str)
@pytest.mark.parametrize("kernel", several({"packed": [()]}))
def test_softcap(kernel, options, dims):
    for i, lengths in enumerate(LENGTHS):
        dtype = BF if i else torch.float16
        kernel.held(*packed(*lengths, 4, 2, d=dims[0], dv=dims[1], dtype=dtype, device=DEVICE), softcap=5.0, **options)


SUNK = {"packed": [(64,), (128,), (192,)], "reduce": [(64,), (128,)], "ordered": [(64,), (96,)], "apart": [(64,)]}


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (0, 0)}], ids=str)
@pytest.mark.parametrize(("kernel", "dim"), several(SUNK))
def test_sinks(kernel, dim, options):
    sinks = torch.tensor([0.3, -60.0, 20.0, -2.0], dtype=BF, device=DEVICE)
    for lengths in LENGTHS:
        kernel.held(*packed(*lengths, 4, 2, d=dim, dv=dim, dtype=BF, device=DEVICE), sinks=sinks, **options)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kernel", several({"packed": [()], "reduce": [()], "ordered": [()], "apart": [()]}))
def test_random_lengths(kernel, seed):
    pick = random.Random(seed)
    some = (0, 0, 1, 63, 64, 65, 128, 300, 1111)
    batch = pick.choice((1, 2, 5, 30))
    lengths_q = [*(pick.choice(some) for _ in range(batch)), 200]
    lengths_k = lengths_q if seed % 3 == 0 else [*(pick.choice(some) for _ in range(batch)), 99]
    dim = pick.choice((64, 128, 192) if kernel is PACKED else (64, 128))
    heads = pick.choice(((4, 4) if kernel is not APART else (4, 1), (8, 2)))
    tensors, where = packed(lengths_q, lengths_k, *heads, d=dim, dv=dim, dtype=BF, device=DEVICE)
    kernel.held(tensors, where, **pick.choice(MASKS))


@pytest.mark.parametrize("kernel", [PACKED, ADDED, ORDERED])
def test_strides(kernel):
    """q, k and v cut from one fused projection, a dout that is one number everywhere, none for the lse."""
    _, where = packed([333, 70], [333, 70], device=DEVICE)
    tensors = rand(403, 3, 4, 64, dtype=BF, device=DEVICE).unbind(1)
    kernel.held(tensors, where, causal=True)
    ones = torch.ones(403, 4, 64, dtype=BF, device=DEVICE)
    whole = kernel.run(tensors, ones, None, where)
    assert kernel.alike(whole, kernel.run(tensors, ones[:1, :1, :1].expand(403, 4, 64), None, where))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("kernel", "dim"),
    several({"packed": [(64,), (128,), (192,), (256,)], "reduce": [(64,), (128,)], "ordered": [(64,), (128,)]}),
)
@pytest.mark.parametrize("options", MASKS[:3], ids=str)
def test_neighbours(kernel, options, dim, bad):
    """Every second sequence, and the rows of no sequence, are not finite: of the others nothing changes, not even a bit.  Rows of
    no sequence have zero gradients."""
    lengths = [100, 37, 200, 1, 130, 64], [90, 300, 31, 65, 130, 1]
    (q, k, v), (cu_q, cu_k, max_q, max_k) = packed(*lengths, h=4, hk=2, d=dim, dv=dim, dtype=BF, device=DEVICE)
    front, tail = 5, 150

    def wider(t, outside, dim=0):
        head, end = (
            torch.full_like(t.narrow(dim, 0, 1).expand(*t.shape[:dim], n, *t.shape[dim + 1 :]), outside)
            for n in (front, tail)
        )
        return torch.cat([head, t, end], dim)

    dout, dlse = upstream(q, v)
    where = (cu_q + front, cu_k + front, max_q, max_k)
    clean = [wider(t, 0.0) for t in (q, k, v, dout)]
    clean = kernel.run(clean[:3], clean[3], wider(dlse, 0.0, 1), where, options)
    kept_q, kept_k = (torch.zeros(t.shape[0], dtype=torch.bool, device=DEVICE) for t in (q, k))
    for i in range(0, 6, 2):
        kept_q[cu_q[i] : cu_q[i + 1]] = True
        kept_k[cu_k[i] : cu_k[i + 1]] = True
    dirty = [t.clone() for t in (q, k, v, dout)]
    for t, kept in zip(dirty, (kept_q, kept_k, kept_k, kept_q), strict=True):
        t[~kept] = bad
    dirty = [wider(t, bad) for t in dirty]
    got = kernel.run(dirty[:3], dirty[3], wider(dlse, float("nan"), 1), where, options)
    inner = slice(front, -tail)
    pairs = zip(clean, got, (kept_q, kept_k, kept_k), strict=True)
    assert kernel.alike(*zip(*[(a[inner][kept], b[inner][kept]) for a, b, kept in pairs], strict=True))
    for a, b in zip(clean, got, strict=True):
        for t in (a, b):
            assert (t[:front] == 0).all()
            assert (t[-tail:] == 0).all()


@pytest.mark.parametrize(
    ("kernel", "dense", "dim"), [(PACKED, DENSE, 128), (PACKED, DENSE, 192), (ORDERED, ORDERED, 128)]
)
def test_equals_dense(kernel, dense, dim):
    """Sequences of one length, a multiple of 128, give the bits of the dense kernel."""
    tensors, where = packed([512] * 4, [512] * 4, h=4, hk=2, d=dim, dv=128, dtype=BF, device=DEVICE)
    dout, dlse = upstream(tensors[0], tensors[2])
    causal = {"call": {"causal": True}}
    got = kernel.run(tensors, dout, dlse, where, **causal)
    *tensors, dout = (t.view(4, 512, *t.shape[1:]) for t in (*tensors, dout))
    like = dense.run(tensors, dout, dlse.view(4, 4, 512).transpose(0, 1).contiguous(), **causal)
    assert same(got, [b.reshape_as(a) for a, b in zip(got, like, strict=True)])


@pytest.mark.parametrize(("kernel", "changes"), [(PACKED, {"keys_at_once": 64 * 25}), (ORDERED, {})])
def test_graph_follows_the_offsets(kernel, changes):
    """A captured backward pass is replayed with other lengths, among them none, and other numbers."""
    lengths = [1000, 500, 300, 248]
    (q, k, v), (cu_q, cu_k, _, _) = packed(lengths, lengths, h=8, hk=4, d=128, dv=128, dtype=BF, device=DEVICE)
    tensors = tuple(t.requires_grad_() for t in (q, k, v))
    where = (cu_q, cu_k, 1200, 1200)
    plan = kernel.plan(tensors, where, call={"causal": True}, **changes)
    dout = rand(*q.shape, dtype=q.dtype, device=DEVICE)

    def step():
        out = tilefold.attention_varlen(*tensors, *where, causal=True, backward_plan=plan)
        return torch.autograd.grad(out, tensors, dout)

    graph, got = captured(step)
    offsets = [0, 1000, 1500, 1800, 2048], [0, 0, 0, 1200, 1201], [5, 69, 133, 1333, 2000], [0, 1, 2, 3, 4], [0] * 5
    for ends in offsets:
        cu_q.copy_(torch.tensor(ends, dtype=torch.int32))
        cu_k.copy_(torch.tensor(ends if ends[1] != 69 else [0, 700, 700, 800, 1900], dtype=torch.int32))
        with torch.no_grad():
            q.copy_(rand(*q.shape, dtype=q.dtype, device=DEVICE))
        graph.replay()
        first, last = ends[0], ends[-1]
        for a, b in zip(got, step(), strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))
        assert (got[0][:first] == 0).all()
        assert (got[0][last:] == 0).all()
        assert got[0].isfinite().all()


@pytest.mark.parametrize("kernel", [PACKED, ORDERED])
def test_memory_and_compilations(kernel):
    """No more beside the gradients than the plan says; other lengths, tokens and sequences compile nothing."""
    from tilefold.kernels.hopper.attention_backward_packed import attention_backward_packed
    from tilefold.kernels.hopper.attention_backward_reduce import attention_backward_reduce

    function = attention_backward_packed if kernel is PACKED else attention_backward_reduce

    def run(lengths, h, hk):
        tensors, where = packed(lengths, lengths, h=h, hk=hk, d=64, dv=64, dtype=BF, device=DEVICE)
        tensors = tuple(t.requires_grad_() for t in tensors)
        plan = kernel.plan(tensors, where, call={"causal": True})
        out = tilefold.attention_varlen(*tensors, *where, causal=True, backward_plan=plan)
        dout = torch.randn_like(out)
        _, extra = memory_beside(lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True))
        assert extra <= plan.scratch_bytes + SPARE

    batches = ([300, 20], 4, 2), ([1, 1, 1], 1, 1), ([700, 64, 5, 128], 8, 8), ([33] * 17, 5, 5)
    compiled_once(function, [lambda one=one: run(*one) for one in batches])
