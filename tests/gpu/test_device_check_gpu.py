"""check="device" on a GPU: the faults of the interpreter's test, kernels for sm_90, graphs whose inputs go bad after the capture.

A read outside a tensor need not fail; this tells:
    compute-sanitizer --tool memcheck python -m pytest -n 0 tests/gpu/test_device_check_gpu.py
"""

import pytest
import torch

import tilefold
from cases.device import DEVICE, captured, no_waiting
from cases.device_check import FAR, OPERATIONS, cases_of

BF16 = torch.bfloat16
pytestmark = pytest.mark.no_poison
NAMES = [(op, name) for op in OPERATIONS for name in cases_of(op, torch.device("cpu"))]
# Programs share the keys of all sequences evenly: another length is another cut, and other last bits.
CUT_TOGETHER = ("attention_kvcache", "attention_shared_prefix")


@pytest.fixture(autouse=True)
def no_note():
    tilefold.last_fault()
    yield
    assert tilefold.last_fault() is None


def same(got, right, together):
    if together:
        torch.testing.assert_close(got, right, atol=1e-5 if got.dtype == torch.float32 else 2e-2, rtol=1e-2)
    else:
        assert torch.equal(got, right)


@pytest.mark.parametrize(("operation", "name"), NAMES)
def test_a_fault_is_named_and_hurts_nobody_else(operation, name):
    case = cases_of(operation, DEVICE)[name]
    argument, position, value = case.fault
    right = case.run(**case.arguments)
    assert torch.equal(case.run(**case.arguments, check="device").nan_to_num(-1.0), right.nan_to_num(-1.0))
    assert tilefold.last_fault() is None
    got = case.run(**case.arguments | case.wrong, check="device")
    fault = tilefold.last_fault()
    assert fault is not None
    several = (
        fault.count > 1 and fault.position != position
    )  # programs are in no order: any of the faults may be the first
    assert (fault.operation, fault.argument) == (operation, argument) or several
    assert (fault.position, fault.value) == (position, value) or several
    if case.exact is not None:
        rows = torch.tensor(case.exact, dtype=torch.long, device=DEVICE)
        same(got[rows], right[rows], operation in CUT_TOGETHER)


def decode_step(batch, page):
    pages = 2048 // page
    q = torch.randn(batch, 1, 32, 128, device=DEVICE, dtype=BF16)
    k, v = (torch.randn(batch * pages, page, 8, 128, device=DEVICE, dtype=BF16) for _ in range(2))
    table = torch.randperm(batch * pages, device=DEVICE).int().view(batch, pages)
    lengths = torch.randint(1, 2000, (batch,), device=DEVICE, dtype=torch.int32)
    return {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths, "block_table": table}


def varlen_step(dim):
    q, k, v = (torch.randn(4096, heads, dim, device=DEVICE, dtype=BF16) for heads in (16, 4, 4))
    cu = torch.tensor([0, 1000, 1200, 3000, 4096], device=DEVICE, dtype=torch.int32)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu.clone(), "max_seqlen_q": 2048,
            "max_seqlen_k": 2048, "causal": True}  # fmt: skip


def sparse_step(dim):
    q, k, v = (torch.randn(2, 4096, 8, dim, device=DEVICE, dtype=BF16) for _ in range(3))
    keep = torch.rand(2, 8, 64, 64, device=DEVICE) < 0.35
    keep[..., 0] = True
    return {"q": q, "k": k, "v": v, "index": tilefold.BlockIndex.from_map(keep)}


STEPS = {
    "decode, pages of 16": (tilefold.attention_kvcache, lambda: decode_step(6, 16), "block_table", (2, 0), FAR),
    "decode, pages of 64": (tilefold.attention_kvcache, lambda: decode_step(1, 64), "block_table", (0, 0), -1),
    "lengths": (tilefold.attention_kvcache, lambda: decode_step(6, 16), "cache_seqlens", (2,), FAR),
    "packed, D=64": (tilefold.attention_varlen, lambda: varlen_step(64), "cu_seqlens_q", (4,), FAR),
    "packed, D=128": (tilefold.attention_varlen, lambda: varlen_step(128), "cu_seqlens_k", (4,), FAR),
    "packed, descending": (tilefold.attention_varlen, lambda: varlen_step(128), "cu_seqlens_k", (0,), -FAR),
    "lists, D=64": (tilefold.sparse_attention, lambda: sparse_step(64), "index.indices", (1, 3, 5, 0), FAR),
    "lists, D=128": (tilefold.sparse_attention, lambda: sparse_step(128), "index.indices", (1, 3, 63, 0), -FAR),
    "counts": (tilefold.sparse_attention, lambda: sparse_step(128), "index.counts", (1, 3, 63), FAR),
}  # fmt: skip


@pytest.mark.parametrize("name", list(STEPS))
def test_a_graph_whose_inputs_go_bad(name):
    run, make, argument, place, value = STEPS[name]
    call = make()
    right = run(**call)
    run(**call, check="device")  # compiled
    with no_waiting():
        run(**call, check="device")
    graph, out = captured(lambda: run(**call, check="device"))
    graph.replay()
    assert torch.equal(out, right)
    assert tilefold.last_fault() is None
    tensor = getattr(call["index"], argument.split(".")[1]) if "index" in argument else call[argument]
    kept = tensor[place].item()
    tensor[place] = value
    for _ in range(2):
        graph.replay()
    fault = tilefold.last_fault()
    assert (fault.argument, fault.position, fault.value) == (argument, place, value)
    assert fault.count >= 2
    others = range(1000) if argument.startswith("cu") and place[0] else range(len(out))
    rows = torch.tensor([i for i in others if i != place[0] or "cu" in argument], dtype=torch.long, device=DEVICE)
    if not (argument.startswith("cu") and place[0] == 0):
        same(out[rows], right[rows], run is tilefold.attention_kvcache)
    tensor[place] = kept
    graph.replay()
    assert torch.equal(out, right)


@pytest.mark.parametrize("operation", ["varlen", "sparse"])
def test_gradients(operation):
    step, run = (
        (varlen_step, tilefold.attention_varlen) if operation == "varlen" else (sparse_step, tilefold.sparse_attention)
    )
    call = step(128)
    for name in ("q", "k", "v"):
        call[name].requires_grad_()
    run(**call, check="device").sum().backward()
    want = [call[name].grad.clone() for name in ("q", "k", "v")]
    for name in ("q", "k", "v"):
        call[name].grad = None
    run(**call).sum().backward()
    assert all(torch.equal(call[name].grad, g) for name, g in zip(("q", "k", "v"), want, strict=True))
    if operation == "varlen":
        call["cu_seqlens_q"][4] = FAR
    else:
        call["index"].indices[1, 3, 5, 0] = FAR
    run(**call, check="device").sum().backward()
    assert tilefold.last_fault() is not None
    assert all(call[name].grad.isfinite().all() for name in ("q", "k", "v"))


def test_appending_under_a_graph():
    call = decode_step(6, 16)
    k, v = (torch.randn(6, 1, 8, 128, device=DEVICE, dtype=BF16) for _ in range(2))
    where = {"cache_seqlens": call["cache_seqlens"], "block_table": call["block_table"]}
    pair = call["k_cache"], call["v_cache"]
    graph, _ = captured(lambda: tilefold.kvcache_append(k, v, *pair, **where, check="device"))
    before = pair[0].clone()
    call["cache_seqlens"][3] = FAR
    graph.replay()
    fault = tilefold.last_fault()
    assert (fault.operation, fault.argument, fault.position, fault.value) == (
        "kvcache_append",
        "cache_seqlens",
        (3,),
        FAR,
    )
    assert torch.equal(before, pair[0])
