"""The Gluon kernel for the gradients of dense attention on sm_90 against the fp64 oracle and the portable kernels."""

import math

import pytest
import torch

import tilefold
from cases import judge, qkv, rand
from gradient_cases import gradients, oracle
from graphs import captured
from tilefold.plan import attention_backward_hopper as rules
from tilefold.plan.attention_backward_hopper import KERNEL, kept_bytes, rooms

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.no_poison,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]
MASKS = [{}, {"causal": True}, {"window": (200, 50)}, {"window": (0, 0)}, {"window": (130, -1)}, {"window": (-1, 64)}]
LENGTHS = ((1, 1), (127, 129), (128, 128), (333, 1001), (1001, 333), (64, 2000), (2000, 63))


def forced(q, k, v, portable=False, **options):
    """A plan with the kernel, whether plans take it by themselves or not."""
    at_once = {name: options.pop(name, None) for name in ("heads_at_once", "keys_at_once")}
    plan = tilefold.attention_backward_plan(q, k, v, **options)
    if portable:
        return plan.with_tiles(kernel="attention_backward_box")
    return plan.with_tiles(kernel=KERNEL, **at_once)


def upstream(q, v, layout="bshd"):
    heads, rows = (q.shape[1], q.shape[2]) if layout == "bhsd" else (q.shape[2], q.shape[1])
    dout = rand(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=DEVICE)
    return dout, rand(q.shape[0], heads, rows, device=DEVICE)


def held(q, k, v, **options):
    """Hold the kernel to the oracle; stripes of keys change nothing but rounding, heads at a time nothing at all."""
    dout, dlse = upstream(q, v, options.get("layout", "bshd"))
    got = gradients((q, k, v), dout, dlse, backward_plan=forced(q, k, v, **options), **options)
    want, plain = (oracle((q, k, v), dout, dlse, d, **options) for d in (torch.float64, q.dtype))
    note = f"{tuple(q.shape)} {tuple(k.shape)} {q.dtype} {options}"
    for name, a, b, c in zip(("dq", "dk", "dv"), got, want, plain, strict=True):
        judge(a, b, c, f"{name} {note}")
    again = gradients((q, k, v), dout, dlse, backward_plan=forced(q, k, v, heads_at_once=1, **options), **options)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    striped = gradients((q, k, v), dout, dlse, backward_plan=forced(q, k, v, keys_at_once=64, **options), **options)
    assert all(torch.equal(a, b) for a, b in zip(got[1:], striped[1:], strict=True))
    judge(striped[0], want[0], plain[0], f"dq in stripes {note}")
    return got, dout, dlse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("together", [1, 2])
def test_lengths(monkeypatch, together, options, dim, dtype):
    """With one tile of queries an item for dq, and with two."""
    monkeypatch.setattr(rules, "PAIRS_FROM", 1 << 30 if together == 1 else 0)
    for sq, sk in LENGTHS:
        held(*qkv(2, sq, sk, 4, 2, dim, dtype=dtype, device=DEVICE), **options)


@pytest.mark.parametrize("dims", [(256, 256), (256, 128), (96, 96), (80, 72), (64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_head_dims(options, dims):
    """Padded to 64, 128 or 256 columns; 256 has a kernel of its own."""
    dtype = torch.float16 if options.get("causal") else torch.bfloat16
    for sq, sk in LENGTHS:
        held(*qkv(2, sq, sk, 4, 2, *dims, dtype=dtype, device=DEVICE), **options)


@pytest.mark.parametrize("heads", [(1, 1), (12, 12), (12, 3), (7, 1)])
@pytest.mark.parametrize("options", MASKS[:3], ids=str)
def test_heads(heads, options):
    held(*qkv(3, 400, 700, *heads, 128, dtype=torch.bfloat16, device=DEVICE), **options)


@pytest.mark.parametrize("dim", [64, 128])
def test_strides_and_layouts(dim):
    packed = rand(2, 500, 3, 4, dim, dtype=torch.bfloat16, device=DEVICE).unbind(2)
    held(*packed)
    transposed = [t.transpose(1, 2) for t in qkv(2, 4, 4, 500, 500, dim, dtype=torch.bfloat16, device=DEVICE)]
    held(*transposed, causal=True)
    held(*(t.transpose(1, 2) for t in packed), layout="bhsd")


def test_outer_gradients_that_no_box_reads():
    """A dout that is one number everywhere, one with odd strides, none for the lse, and gradients of some inputs only."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 200, 300, 4, 2, 64, dtype=torch.bfloat16, device=DEVICE))
    plan = forced(q, k, v, causal=True)

    def grads(dout, inputs):
        out = tilefold.attention(q, k, v, causal=True, backward_plan=plan)
        return torch.autograd.grad(out, inputs, dout)

    ones = torch.ones(1, 200, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    odd = torch.empty(1, 200, 4, 65, dtype=torch.bfloat16, device=DEVICE)[..., :64].copy_(ones)
    whole = grads(ones, (q, k, v))
    for dout in (ones[:, :1, :1, :1].expand(1, 200, 4, 64), odd):
        assert all(torch.equal(a, b) for a, b in zip(grads(dout, (q, k, v)), whole, strict=True))
    for i, t in enumerate((q, k, v)):
        assert torch.equal(grads(ones, (t,))[0], whole[i])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1000, 0)}], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_fifty_runs_and_the_portable_kernels(dim, options):
    """Rooms that are used many times; no synchronisation; the same bits; what the portable kernels make, to rounding."""
    q, k, v = qkv(2, 4096, 4096, 16, 8, dim, dtype=torch.bfloat16, device=DEVICE)
    plan = forced(q, k, v, **options)
    dout, dlse = upstream(q, v)
    first = gradients((q, k, v), dout, dlse, backward_plan=plan, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs = [gradients((q, k, v), dout, dlse, backward_plan=plan, **options) for _ in range(50)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for run in runs for a, b in zip(first, run, strict=True))
    other = gradients((q, k, v), dout, dlse, backward_plan=forced(q, k, v, portable=True, **options), **options)
    for a, b in zip(first, other, strict=True):
        assert (a.double() - b.double()).norm() <= 1e-2 * b.double().norm()


def test_stripes_of_a_long_head():
    """Two heads of 20000 keys in stripes by the plan's own rule, against the portable kernels."""
    q, k, v = qkv(1, 20000, 20000, 2, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    plan = forced(q, k, v, keys_at_once=4096)
    dout, dlse = upstream(q, v)
    got = gradients((q, k, v), dout, dlse, backward_plan=plan)
    want = gradients((q, k, v), dout, dlse, backward_plan=forced(q, k, v, portable=True))
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).norm() <= 1e-2 * b.double().norm()


def test_hard_numbers():
    """Logits of 1e4, numbers below the least normal one, and a NaN that stays in the tiles it is in."""
    for size in (100.0, 1e-30):
        q, k, v = (t * size for t in qkv(1, 300, 500, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE))
        dout, _ = upstream(q, v)
        got = gradients((q, k, v), dout, None, backward_plan=forced(q, k, v), scale=1.0)
        assert all(g.isfinite().all() for g in got)
    q, k, v = qkv(1, 512, 512, 2, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    dout, _ = upstream(q, v)
    plan = forced(q, k, v, causal=True)
    clean = gradients((q, k, v), dout, None, backward_plan=plan, causal=True)
    q[0, 500, 0] = math.nan
    dirty = gradients((q, k, v), dout, None, backward_plan=plan, causal=True)
    assert dirty[0][0, 500, 0].isnan().all()
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[:, :, 1], b[:, :, 1])  # the other head
    assert torch.equal(clean[0][:, :448, 0], dirty[0][:, :448, 0])


def test_graph_and_streams():
    q, k, v = (t.requires_grad_() for t in qkv(1, 2048, 2048, 16, 16, 128, dtype=torch.bfloat16, device=DEVICE))
    plan = forced(q, k, v, causal=True)
    dout = rand(1, 2048, 16, 128, dtype=torch.bfloat16, device=DEVICE)

    def step():
        return torch.autograd.grad(tilefold.attention(q, k, v, causal=True, backward_plan=plan), (q, k, v), dout)

    graph, got = captured(step)
    for _ in range(3):
        with torch.no_grad():
            q.copy_(rand(*q.shape, dtype=q.dtype, device=DEVICE))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, step(), strict=True))
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for stream in streams * 5:
        with torch.cuda.stream(stream):
            results.append(step())
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, got, strict=True))


def test_memory():
    """Beside the gradients: room for dS as the plan says, sums between stripes, statistics."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 4096, 4096, 16, 16, 128, dtype=torch.bfloat16, device=DEVICE))
    for keys in (4096, 1024):
        plan = forced(q, k, v, causal=True, heads_at_once=2, keys_at_once=keys)
        out = tilefold.attention(q, k, v, causal=True, backward_plan=plan)
        dout = torch.randn_like(out)
        torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, (q, k, v), dout)
        extra = torch.cuda.max_memory_allocated() - before - sum(g.numel() * g.element_size() for g in grads)
        assert extra <= plan.scratch_bytes + 8192
        problem, device = plan.problem, plan.device
        assert kept_bytes(problem, device, 2, keys) < plan.scratch_bytes
        assert rooms(problem, device, 2, keys) >= 2


def test_one_compilation_serves_all_lengths():
    from tilefold.kernels.hopper.attention_backward import attention_backward_hopper

    def compiled():
        return sum(len(caches[0]) for caches in attention_backward_hopper.device_caches.values())

    def run(b, sq, sk, h, hk, window):
        q, k, v = qkv(b, sq, sk, h, hk, 64, dtype=torch.bfloat16, device=DEVICE)
        dout, dlse = upstream(q, v)
        gradients((q, k, v), dout, dlse, backward_plan=forced(q, k, v, window=window), window=window)

    run(1, 320, 300, 2, 1, (100, 3))
    before = compiled()
    for b, sq, sk, h, hk, window in (
        (1, 64, 1, 1, 1, (7, 0)),
        (2, 640, 1024, 16, 2, (1, 1)),
        (3, 17, 777, 5, 5, (5000, 10)),
    ):
        run(b, sq, sk, h, hk, window)
    assert compiled() == before


def test_falls_back_with_a_warning(monkeypatch):
    from tilefold.kernels import hopper
    from tilefold.ops import hopper as ops

    q, k, v = qkv(1, 321, 333, 2, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    dout, dlse = upstream(q, v)
    wanted = gradients((q, k, v), dout, dlse, backward_plan=forced(q, k, v, portable=True))
    assert tilefold.attention_backward_plan(q, k, v).kernel == KERNEL
    monkeypatch.setattr(ops, "_WARNED", set())
    monkeypatch.setattr(hopper, "refusal", lambda: "it was taken away for this test")
    with pytest.warns(RuntimeWarning, match="a portable one serves instead"):
        got = gradients((q, k, v), dout, dlse)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    with pytest.raises(tilefold.TilefoldError, match="taken away"):
        gradients((q, k, v), dout, dlse, backward_plan=forced(q, k, v, keys_at_once=64))
