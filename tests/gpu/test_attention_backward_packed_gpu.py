"""The Gluon kernel for the gradients of packed sequences on sm_90 against the fp64 oracle and the portable kernels."""

import random

import pytest
import torch

import tilefold
from cases import judge, packed, rand
from gradient_cases import WHERE, gradients, oracle
from graphs import captured
from tilefold.plan import attention_backward_packed as rules
from tilefold.plan.attention_backward_hopper import KERNEL

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.no_poison,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]
MASKS = [{}, {"causal": True}, {"window": (200, 50)}, {"window": (0, 0)}, {"window": (130, -1)}, {"window": (-1, 64)}]
LENGTHS = [
    ([500, 0, 33, 1, 1000], [700, 30, 0, 999, 1000]),
    ([64, 128, 64, 127, 129], [64, 128, 64, 127, 129]),
    ([2000], [63]),
    ([0, 0, 65, 0], [0, 5, 1300, 0]),
    ([1] * 70, [3] * 70),
]


def forced(tensors, where, portable=False, keys_at_once=None, **options):
    """A plan with the kernel, whether plans take it by themselves or not."""
    plan = tilefold.attention_backward_plan(*tensors, **dict(zip(WHERE, where, strict=True)), **options)
    if portable:
        return plan.with_tiles(kernel="attention_backward")
    return plan.with_tiles(kernel=KERNEL, keys_at_once=keys_at_once)


def upstream(q):
    return rand(*q.shape, dtype=q.dtype, device=DEVICE), rand(q.shape[1], q.shape[0], device=DEVICE)


def ours(tensors, where, dout, dlse, **options):
    at_once = {"keys_at_once": options.pop("keys_at_once", None), "portable": options.pop("portable", False)}
    plan = forced(tensors, where, **at_once, **options)
    return gradients(tensors, dout, dlse, where, backward_plan=plan, **options)


def held(tensors, where, **options):
    """Hold the kernel to the oracle; how many lines there are changes nothing."""
    dout, dlse = upstream(tensors[0])
    got = ours(tensors, where, dout, dlse, **options)
    want, plain = (oracle(tensors, dout, dlse, dtype, where, **options) for dtype in (torch.float64, tensors[0].dtype))
    for name, a, b, c in zip(("dq", "dk", "dv"), got, want, plain, strict=True):
        judge(a, b, c, f"{name} {where[0].tolist()} {where[1].tolist()} {tensors[0].dtype} {options}")
    least = (-(-where[3] // 64) + 1) * 64
    again = ours(tensors, where, dout, dlse, keys_at_once=least, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("together", [1, 2])
def test_lengths(monkeypatch, together, options, dim, dtype):
    """With one tile of queries an item for dq, and with two."""
    monkeypatch.setattr(rules, "tiles_together", lambda *args: together)
    for i, lengths in enumerate(LENGTHS):  # heads of its own for each case and number: bound launches are kept
        held(
            *packed(*lengths, h=2 * together + 4 * (i % 2), hk=2, d=dim, dv=dim, dtype=dtype, device=DEVICE), **options
        )


@pytest.mark.parametrize("heads", [(1, 1), (12, 12), (12, 3), (7, 1)])
@pytest.mark.parametrize("options", MASKS[:3], ids=str)
def test_heads(heads, options):
    tensors, where = packed(
        [300, 100, 0, 517], [300, 250, 64, 77], *heads, d=128, dv=128, dtype=torch.bfloat16, device=DEVICE
    )
    held(tensors, where, **options)


@pytest.mark.parametrize("seed", range(12))
def test_random_lengths(seed):
    pick = random.Random(seed)
    some = (0, 0, 1, 63, 64, 65, 128, 300, 1111)
    batch = pick.choice((1, 2, 5, 30))
    lengths_q = [*(pick.choice(some) for _ in range(batch)), 200]
    lengths_k = lengths_q if seed % 3 == 0 else [*(pick.choice(some) for _ in range(batch)), 99]
    dim = pick.choice((64, 128))
    tensors, where = packed(
        lengths_q, lengths_k, *pick.choice(((4, 4), (8, 2))), d=dim, dv=dim, dtype=torch.bfloat16, device=DEVICE
    )
    held(tensors, where, **pick.choice(MASKS))


def test_strides():
    """q, k and v cut from one fused projection, a dout that is one number everywhere, none for the lse."""
    _, where = packed([333, 70], [333, 70], device=DEVICE)
    q, k, v = rand(403, 3, 4, 64, dtype=torch.bfloat16, device=DEVICE).unbind(1)
    held((q, k, v), where, causal=True)
    ones = torch.ones(403, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    whole = ours((q, k, v), where, ones, None)
    same = ours((q, k, v), where, ones[:1, :1, :1].expand(403, 4, 64), None)
    assert all(torch.equal(a, b) for a, b in zip(whole, same, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", MASKS[:3], ids=str)
def test_neighbours(options, dim, bad):
    """Every second sequence, and the rows of no sequence, are not finite: of the others nothing changes, not even a bit.  Rows of
    no sequence have zero gradients."""
    (q, k, v), (cu_q, cu_k, max_q, max_k) = packed(
        [100, 37, 200, 1, 130, 64],
        [90, 300, 31, 65, 130, 1],
        h=4,
        hk=2,
        d=dim,
        dv=dim,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    front, tail = 5, 150

    def wider(t, outside, dim=0):
        ends = (
            torch.full_like(t.narrow(dim, 0, 1).expand(*t.shape[:dim], n, *t.shape[dim + 1 :]), outside)
            for n in (front, tail)
        )
        head, end = ends
        return torch.cat([head, t, end], dim)

    dout, dlse = upstream(q)
    where = (cu_q + front, cu_k + front, max_q, max_k)
    clean = ours(tuple(wider(t, 0.0) for t in (q, k, v)), where, wider(dout, 0.0), wider(dlse, 0.0, 1), **options)
    kept_q, kept_k = (torch.zeros(t.shape[0], dtype=torch.bool, device=DEVICE) for t in (q, k))
    for i in range(0, 6, 2):
        kept_q[cu_q[i] : cu_q[i + 1]] = True
        kept_k[cu_k[i] : cu_k[i + 1]] = True
    dirty = [t.clone() for t in (q, k, v, dout)]
    for t, kept in zip(dirty, (kept_q, kept_k, kept_k, kept_q), strict=True):
        t[~kept] = bad
    got = ours(
        tuple(wider(t, bad) for t in dirty[:3]), where, wider(dirty[3], bad), wider(dlse, float("nan"), 1), **options
    )
    for a, b, kept in zip(clean, got, (kept_q, kept_k, kept_k), strict=True):
        inner = slice(front, -tail)
        assert torch.equal(a[inner][kept], b[inner][kept])
        for t in (a, b):
            assert (t[:front] == 0).all()
            assert (t[-tail:] == 0).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1000, 0)}], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_fifty_runs_and_the_portable_kernels(dim, options):
    """Lines that are used many times; no synchronisation; the same bits; what the portable kernels make, to rounding."""
    pick = random.Random(dim)
    lengths = [min(6000, int(pick.lognormvariate(6.4, 1.0))) for _ in range(48)]
    tensors, where = packed(lengths, lengths, h=16, hk=8, d=dim, dv=dim, dtype=torch.bfloat16, device=DEVICE)
    plan = forced(tensors, where, **options)
    dout, dlse = upstream(tensors[0])
    first = gradients(tensors, dout, dlse, where, backward_plan=plan, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs = [gradients(tensors, dout, dlse, where, backward_plan=plan, **options) for _ in range(50)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for run in runs for a, b in zip(first, run, strict=True))
    other = ours(tensors, where, dout, dlse, portable=True, **options)
    for a, b in zip(first, other, strict=True):
        assert (a.double() - b.double()).norm() <= 1e-2 * b.double().norm()


def test_equals_dense():
    """Sequences of one length, a multiple of 64, give the bits of the dense kernel."""
    tensors, where = packed([512] * 4, [512] * 4, h=4, hk=2, d=128, dv=128, dtype=torch.bfloat16, device=DEVICE)
    dout, dlse = upstream(tensors[0])
    got = ours(tensors, where, dout, dlse, causal=True)
    q, k, v, d = (t.view(4, 512, *t.shape[1:]) for t in (*tensors, dout))
    plan = tilefold.attention_backward_plan(q, k, v, causal=True).with_tiles(kernel=KERNEL)
    same = gradients((q, k, v), d, dlse.view(4, 4, 512).transpose(0, 1).contiguous(), backward_plan=plan, causal=True)
    assert all(torch.equal(a, b.reshape_as(a)) for a, b in zip(got, same, strict=True))


def test_graph_follows_the_offsets():
    """A captured backward pass is replayed with other lengths, among them none, and other numbers."""
    (q, k, v), (cu_q, cu_k, _, _) = packed(
        [1000, 500, 300, 248], [1000, 500, 300, 248], h=8, hk=4, d=128, dv=128, dtype=torch.bfloat16, device=DEVICE
    )
    tensors = tuple(t.requires_grad_() for t in (q, k, v))
    where = (cu_q, cu_k, 1200, 1200)
    plan = forced(tensors, where, keys_at_once=64 * 25, causal=True)
    dout = rand(*q.shape, dtype=q.dtype, device=DEVICE)

    def step():
        out = tilefold.attention_varlen(*tensors, *where, causal=True, backward_plan=plan)
        return torch.autograd.grad(out, tensors, dout)

    graph, got = captured(step)
    for ends in (
        [0, 1000, 1500, 1800, 2048],
        [0, 0, 0, 1200, 1201],
        [5, 69, 133, 1333, 2000],
        [0, 1, 2, 3, 4],
        [0] * 5,
    ):
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


def test_memory_and_compilations():
    """No more beside the gradients than the plan says; other lengths, tokens and sequences compile nothing."""
    from tilefold.kernels.hopper.attention_backward_packed import attention_backward_packed

    def compiled():
        return sum(len(caches[0]) for caches in attention_backward_packed.device_caches.values())

    def run(lengths, h, hk):
        tensors, where = packed(lengths, lengths, h=h, hk=hk, d=64, dv=64, dtype=torch.bfloat16, device=DEVICE)
        tensors = tuple(t.requires_grad_() for t in tensors)
        plan = forced(tensors, where, causal=True)
        out = tilefold.attention_varlen(*tensors, *where, causal=True, backward_plan=plan)
        dout = torch.randn_like(out)
        torch.autograd.grad(out, tensors, dout, retain_graph=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, tensors, dout)
        extra = torch.cuda.max_memory_allocated() - before - sum(g.numel() * g.element_size() for g in grads)
        assert extra <= plan.scratch_bytes + 8192

    run([300, 20], 4, 2)
    before = compiled()
    for case in (([1, 1, 1], 1, 1), ([700, 64, 5, 128], 8, 8), ([33] * 17, 5, 5)):
        run(*case)
    assert compiled() == before
