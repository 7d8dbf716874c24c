"""The Gluon kernel for dense gradients on sm_90 where queries come in spans: forced small ones against the fp64 oracle, long
calls against the portable kernels."""

import pytest
import torch

import tilefold
from cases import judge, qkv, rand
from gradient_cases import gradients, oracle
from graphs import captured
from tilefold.ops.backward import attention_backward
from tilefold.ops.call import Call
from tilefold.plan.attention_backward_hopper import KERNEL

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.no_poison,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]
MASKS = [{}, {"causal": True}, {"window": (200, 50)}, {"window": (0, 0)}, {"window": (130, -1)}, {"window": (-1, 64)}]
LENGTHS = ((1, 1), (129, 127), (333, 1001), (1001, 333), (700, 700), (2000, 63))


def planned(q, k, v, queries, portable=False, **options):
    keys = options.pop("keys_at_once", None)
    plan = tilefold.attention_backward_plan(q, k, v, **options)
    if portable:
        return plan.with_tiles(kernel="attention_backward_box")
    return plan.with_tiles(kernel=KERNEL, queries_at_once=queries, keys_at_once=keys)


def upstream(q, v, layout="bshd"):
    heads, rows = (q.shape[1], q.shape[2]) if layout == "bhsd" else (q.shape[2], q.shape[1])
    return rand(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=DEVICE), rand(q.shape[0], heads, rows, device=DEVICE)


def held(q, k, v, queries=(64, 192), **options):
    """Spans against the oracle; with whole stripes dq has the same bits as of one launch, where tiles of keys begin alike."""
    dout, dlse = upstream(q, v, options.get("layout", "bshd"))
    want, plain = (oracle((q, k, v), dout, dlse, d, **options) for d in (torch.float64, q.dtype))
    whole = gradients((q, k, v), dout, dlse, backward_plan=planned(q, k, v, 0, **options), **options)
    for each in queries:
        found = [
            gradients((q, k, v), dout, dlse, backward_plan=planned(q, k, v, each, keys_at_once=keys, **options), **options)
            for keys in (None, None, 64)
        ]  # fmt: skip
        note = f"{tuple(q.shape)} {tuple(k.shape)} {q.dtype} spans of {each} {options}"
        for got in found[1:]:
            for name, a, b, c in zip(("dq", "dk", "dv"), got, want, plain, strict=True):
                judge(a, b, c, f"{name} {note}")
        assert all(torch.equal(a, b) for a, b in zip(*found[:2], strict=True)), note
        assert all(torch.equal(a, b) for a, b in zip(found[0][1:], found[2][1:], strict=True)), note
        if "window" not in options and not options.get(
            "causal"
        ):  # a cut mask meets other tiles: another order of dq's sums
            assert torch.equal(found[0][0], whole[0]), note


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_lengths(options, dim, dtype):
    for sq, sk in LENGTHS:
        held(*qkv(2, sq, sk, 4, 2, dim, dtype=dtype, device=DEVICE), **options)


@pytest.mark.parametrize("dims", [(256, 256), (256, 128), (96, 96), (80, 72)], ids=str)
@pytest.mark.parametrize("options", MASKS[:3], ids=str)
def test_head_dims(options, dims):
    for sq, sk in ((333, 1001), (1001, 333)):
        held(*qkv(2, sq, sk, 4, 2, *dims, dtype=torch.bfloat16, device=DEVICE), (192,), **options)


@pytest.mark.parametrize("heads", [(1, 1), (12, 3), (7, 1)])
@pytest.mark.parametrize("options", MASKS[:3], ids=str)
def test_heads(heads, options):
    held(*qkv(3, 400, 700, *heads, 128, dtype=torch.bfloat16, device=DEVICE), (128,), **options)


def test_strides_and_layouts():
    packed = rand(2, 500, 3, 4, 128, dtype=torch.bfloat16, device=DEVICE).unbind(2)
    held(*packed, (192,))
    held(*(t.transpose(1, 2) for t in packed), (192,), layout="bhsd", causal=True)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1000, 0)}], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_thirty_runs(dim, options):
    """Rooms and sums that are used by one launch after the other; no synchronisation; the same bits."""
    q, k, v = qkv(1, 4096, 4096, 16, 4, dim, dtype=torch.bfloat16, device=DEVICE)
    plan = planned(q, k, v, 512, keys_at_once=1024, **options)
    dout, dlse = upstream(q, v)
    first = gradients((q, k, v), dout, dlse, backward_plan=plan, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs = [gradients((q, k, v), dout, dlse, backward_plan=plan, **options) for _ in range(30)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for run in runs for a, b in zip(first, run, strict=True))
    other = gradients((q, k, v), dout, dlse, backward_plan=planned(q, k, v, 0, portable=True, **options), **options)
    for a, b in zip(first, other, strict=True):
        assert (a.double() - b.double()).norm() <= 1e-2 * b.double().norm()


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_long_groups(options):
    """What the portable kernels served before: by itself in spans, in the memory that the plan names."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 32768, 32768, 32, 8, 128, dtype=torch.bfloat16, device=DEVICE))
    plan = tilefold.attention_backward_plan(q, k, v, **options)
    assert (plan.kernel, len(plan.spans)) == (KERNEL, 3)
    out = tilefold.attention(q, k, v, **options)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = torch.autograd.grad(out, (q, k, v), dout)
    extra = torch.cuda.max_memory_allocated() - before - sum(g.numel() * g.element_size() for g in got)
    assert extra <= plan.scratch_bytes + 8192
    want = gradients((q, k, v), dout, None, backward_plan=planned(q, k, v, 0, portable=True, **options), **options)
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).norm() <= 1e-2 * b.double().norm()


def test_keys_of_several_ranks():
    """As context parallelism calls it: lse and out over all keys, gradients that are summands of keys and of queries."""
    q, k, v = qkv(1, 1000, 1400, 8, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    dout, dlse = upstream(q, v)
    with torch.no_grad():
        out, lse = tilefold.attention(q, k, v, return_lse=True)
    sums = [torch.zeros(t.shape, device=DEVICE) for t in (q, k, v)]
    handed_on = 0.0  # variance of dq: its summands are rounded
    for low, high in ((0, 600), (600, 1400)):
        kk, vv = k[:, low:high], v[:, low:high]
        call = Call(backward_plan=planned(q, kk, vv, 256))
        parts = attention_backward.backward((q, kk, vv, out, lse), dout, dlse, call, (True,) * 3 + (False,) * 2, False)
        sums[0] += parts[0]
        handed_on = handed_on + (parts[0].double() * 2.0**-8).square() / 3
        sums[1][:, low:high], sums[2][:, low:high] = parts[1], parts[2]
    want, plain = (oracle((q, k, v), dout, dlse, d) for d in (torch.float64, q.dtype))
    plain = (want[0] + ((plain[0] - want[0]).square() + handed_on).sqrt(), *plain[1:])
    for name, a, b, c in zip(("dq", "dk", "dv"), sums, want, plain, strict=True):
        judge(a.to(q.dtype), b, c, name)


def test_graph():
    q, k, v = (t.requires_grad_() for t in qkv(1, 2048, 2048, 16, 4, 128, dtype=torch.bfloat16, device=DEVICE))
    plan = planned(q, k, v, 512, causal=True)
    dout = rand(1, 2048, 16, 128, dtype=torch.bfloat16, device=DEVICE)

    def step():
        return torch.autograd.grad(tilefold.attention(q, k, v, causal=True, backward_plan=plan), (q, k, v), dout)

    graph, got = captured(step)
    for _ in range(3):
        with torch.no_grad():
            q.copy_(rand(*q.shape, dtype=q.dtype, device=DEVICE))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, step(), strict=True))


def test_one_compilation_serves_all_spans():
    from tilefold.kernels.hopper.attention_backward import attention_backward_hopper

    def compiled():
        return sum(len(caches[0]) for caches in attention_backward_hopper.device_caches.values())

    def run(sq, sk, queries):
        q, k, v = qkv(1, sq, sk, 4, 1, 64, dtype=torch.bfloat16, device=DEVICE)
        dout, dlse = upstream(q, v)
        plan = planned(q, k, v, queries, keys_at_once=64, causal=True)
        gradients((q, k, v), dout, dlse, backward_plan=plan, causal=True)

    run(400, 400, 128)
    before = compiled()
    for sizes in ((1000, 700, 64), (333, 1001, 192), (65, 129, 64)):
        run(*sizes)
    assert compiled() == before
