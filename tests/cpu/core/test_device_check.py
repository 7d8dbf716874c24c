"""check="device": no index is followed out of a tensor, the first wrong one is noted, the other sequences are exact."""

import dataclasses
import functools

import pytest
import torch

import tilefold
from cases import one_graph, rand
from cases.device_check import FAR, OPERATIONS, cases_of, changed, decoding
from cases.refusals import refuses
from tilefold.compat.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from tilefold.errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from tilefold.ops import faults

NAMES = [(op, name) for op in OPERATIONS for name in cases_of(op, torch.device("cpu"))]


@pytest.fixture(autouse=True)
def no_note():
    tilefold.last_fault()
    yield
    assert tilefold.last_fault() is None  # every test has looked


made_once = functools.cache(cases_of)
RIGHT = {}
"""Results of right calls, which several faults are beside."""


@pytest.mark.parametrize(("operation", "name"), NAMES)
def test_a_fault_is_named_and_hurts_nobody_else(operation, name, device):
    case = made_once(operation, device)[name]
    argument, position, value = case.fault
    if id(case.arguments) not in RIGHT:
        RIGHT[id(case.arguments)] = case.run(**case.arguments)
    right = RIGHT[id(case.arguments)]
    got = case.run(**case.arguments | case.wrong, check="device")
    fault = tilefold.last_fault()
    assert fault is not None
    assert (fault.operation, fault.argument, fault.position, fault.value) == (operation, argument, position, value)
    assert not fault.low <= value <= fault.high or argument.startswith("cu_seqlens")  # which may also descend
    assert fault.count >= 1
    assert got.shape == right.shape
    if case.exact is not None:
        rows = torch.tensor(case.exact, dtype=torch.long, device=device)
        assert torch.equal(got[rows], right[rows])
    with pytest.raises(ValueRangeError) as caught:
        case.run(**case.arguments | case.wrong, check=True)
    if case.said:
        assert str(caught.value) == fault.message


@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_a_right_call_has_the_same_bits_and_no_fault(operation, device):
    seen = []
    for case in cases_of(operation, device).values():
        if any(case.arguments is call for call in seen):
            continue
        seen.append(case.arguments)
        got, right = case.run(**case.arguments, check="device"), case.run(**case.arguments)
        assert torch.equal(got.nan_to_num(-1.0), right.nan_to_num(-1.0))  # rows of no sequence are not written: poison
        assert tilefold.last_fault() is None


def test_the_note_is_kept_until_somebody_clears_it(device):
    call = decoding(device)
    wrong = call | {"block_table": changed(call["block_table"], (1, 0), FAR)}
    tilefold.attention_kvcache(**wrong, check="device")
    later = call | {"cache_seqlens": changed(call["cache_seqlens"], (2,), -1)}
    tilefold.attention_kvcache(**later, check="device")
    for fault in (tilefold.last_fault(clear=False), tilefold.last_fault(device, clear=False), tilefold.last_fault()):
        assert fault is not None
        assert (fault.argument, fault.position, fault.count) == ("block_table", (1, 0), 2)
    assert str(fault) == f"attention_kvcache: block_table[1, 0] is {FAR}, expected 0 to 8 (the first of 2 faults)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        fault.count = 0
    assert tilefold.last_fault() is None
    tilefold.attention_kvcache(**later, check="device")
    fault = tilefold.last_fault()
    assert str(fault) == "attention_kvcache: cache_seqlens[2] leads to -1 keys, there is room for 24"


@pytest.mark.parametrize("tokens", [1, 70])
def test_the_first_of_several_in_a_long_table(tokens, device):
    """One program looks at 600 entries, more than it loads at a time; those behind the last key are nobody's."""
    k, v = (rand(8, 1, 1, 16, device=device) for _ in range(2))
    table = torch.zeros(2, 700, dtype=torch.int32, device=device)
    table[1, [44, 300, 299, 599, 600, 699]] = torch.tensor([-1, FAR, -FAR, 8, 8, 8], dtype=torch.int32, device=device)
    lengths = torch.tensor([600, 600], dtype=torch.int32, device=device)
    call = {"q": rand(2, tokens, 2, 16, device=device), "k_cache": k, "v_cache": v, "cache_seqlens": lengths}
    got = tilefold.attention_kvcache(**call, block_table=table, num_splits=1, check="device")
    fault = tilefold.last_fault()
    assert (fault.argument, fault.position, fault.value, fault.count) == ("block_table", (1, 44), -1, 4)
    right = tilefold.attention_kvcache(**call, block_table=torch.zeros_like(table), num_splits=1)
    assert torch.equal(got[0], right[0])
    table[1, 44] = table[1, 299] = 0
    tilefold.attention_kvcache(**call, block_table=table, num_splits=1, check="device")
    fault = tilefold.last_fault()
    assert (fault.position, fault.value, fault.count) == ((1, 300), FAR, 2)


def test_kernels_and_host_number_arguments_alike():
    from tilefold.device import fault

    names = ("LENGTHS", "PADS", "BATCH_INDEX", "TABLE", "CU_Q", "CU_K", "MAX_Q", "MAX_K", "COUNTS", "INDICES", "BLOCK_SIZES",
             "QUERY_SIZES", "ROOM")  # fmt: skip
    numbers = [getattr(fault, name).value for name in names]
    assert numbers == list(range(1, len(faults.ARGUMENTS) + 1))
    assert max(numbers) < fault.ARGUMENTS.value
    expected = ["cache_seqlens", "cache_leftpad", "cache_batch_idx", "block_table", "cu_seqlens_q", "cu_seqlens_k",
                "max_seqlen_q", "max_seqlen_k", "index.counts", "index.indices", "index.block_sizes", "index.query_sizes",
                "cache_seqlens"]  # fmt: skip
    assert list(faults.ARGUMENTS) == expected


@pytest.mark.parametrize("operation", ["attention_varlen", "sparse_attention", "sparse_attention_varlen"])
def test_gradients_follow_what_the_forward_pass_followed(operation, device):
    case = next(c for c in cases_of(operation, device).values() if c.exact)
    right = {name: case.arguments[name].clone().requires_grad_() for name in ("q", "k", "v")}
    wrong = {name: t.detach().clone().requires_grad_() for name, t in right.items()}
    rows = torch.tensor(case.exact, device=device)
    case.run(**case.arguments | right)[rows].sum().backward()
    case.run(**case.arguments | case.wrong | wrong, check="device")[rows].sum().backward()
    assert tilefold.last_fault() is not None
    assert torch.equal(wrong["q"].grad[rows], right["q"].grad[rows])
    assert all(t.grad.isfinite().all() for t in wrong.values())


@pytest.mark.no_poison
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_compiled(operation, device):
    case = next(iter(cases_of(operation, device).values()))
    compiled = one_graph(lambda **call: case.run(**call, check="device"))
    assert torch.equal(compiled(**case.arguments), case.run(**case.arguments))
    assert tilefold.last_fault() is None
    compiled(**case.arguments | case.wrong)
    fault = tilefold.last_fault()
    assert fault is not None
    assert (fault.operation, fault.argument, fault.position, fault.value) == (operation, *case.fault)


# ---------------------------------------------------------------- the environment, and what has no argument for it


@pytest.fixture
def by_default(monkeypatch):
    return lambda value: monkeypatch.setattr(faults, "DEFAULT", value)


def test_the_environment_is_the_default(by_default, device):
    call = decoding(device)
    wrong = call | {"block_table": changed(call["block_table"], (1, 0), FAR)}
    by_default("device")
    tilefold.attention_kvcache(**wrong)
    assert "block_table[1, 0]" in str(tilefold.last_fault())
    by_default("1")
    refuses(ValueRangeError, "block_table[1, 0]", tilefold.attention_kvcache, **wrong)
    tilefold.attention_kvcache(**wrong, check="device")
    assert tilefold.last_fault() is not None
    by_default("yes please")
    with pytest.raises(ValueRangeError, match="TILEFOLD_CHECK must be 0, 1 or device, got 'yes please'"):
        tilefold.attention_kvcache(**call)


def test_flash_attention_with_a_cache(by_default, device):
    call = decoding(device)
    k, v = (torch.randn(3, 1, 2, 16, device=device) for _ in range(2))
    lengths = call["cache_seqlens"] - 1
    where = {"cache_seqlens": lengths, "block_table": call["block_table"]}
    right = flash_attn_with_kvcache(call["q"], call["k_cache"].clone(), call["v_cache"].clone(), k, v, **where)
    by_default("device")
    caches = call["k_cache"].clone(), call["v_cache"].clone()
    assert torch.equal(flash_attn_with_kvcache(call["q"], *caches, k, v, **where), right)
    assert tilefold.last_fault() is None
    for name, place, value in (("block_table", (1, 2), FAR), ("cache_seqlens", (1,), 24)):
        caches = call["k_cache"].clone(), call["v_cache"].clone()
        wrong = where | {name: changed(where[name], place, value)}
        got = flash_attn_with_kvcache(call["q"], *caches, k, v, **wrong)
        fault = tilefold.last_fault()
        assert (fault.operation, fault.argument, fault.position, fault.value) == (
            "flash_attn_with_kvcache", name, place, value)  # fmt: skip
        assert torch.equal(got[::2], right[::2])


def test_appending_counts_tokens(device):
    """Of 40 tokens of two heads, in pages of 4: those past the room and those in pages that do not exist, each once."""
    k, v = (rand(40, 2, 16, device=device) for _ in range(2))
    caches = [torch.zeros(9, 4, 2, 16, device=device) for _ in range(2)]
    ints = {"dtype": torch.int32, "device": device}
    table = torch.tensor([[0, 1, 2, 3, FAR], [4, 5, -1, 6, 7]], **ints)
    where = {"cache_seqlens": torch.tensor([3, 2], **ints), "cu_seqlens": torch.tensor([0, 20, 40], **ints)}
    tilefold.kvcache_append(k, v, *caches, block_table=table, **where, check="device")
    fault = tilefold.last_fault()
    assert (fault.argument, fault.position, fault.value) == ("block_table", (0, 4), FAR)
    assert fault.count == 4 + 3 + 4 + 2  # entry (0, 4) and past the room, entry (1, 2) and past the room
    rows = torch.cat([page.reshape(4, 2, 16) for page in caches[0][[0, 1, 2, 3]]])
    assert torch.equal(rows[3:], k[:13]) and not rows[:3].any() and not caches[0][8].any()


def test_flash_attention_of_packed_sequences(by_default, device):
    by_default("device")
    q, k, v = (torch.randn(20, 2, 16, device=device) for _ in range(3))
    cu = torch.tensor([0, 8, 20], dtype=torch.int32, device=device)
    right = flash_attn_varlen_func(q, k, v, cu, cu, 12, 12)
    used = torch.tensor([8, 12], dtype=torch.int32, device=device)
    assert tilefold.last_fault() is None
    got = flash_attn_varlen_func(q, k, v, cu, changed(cu, (2,), FAR), 12, 12)
    assert str(tilefold.last_fault()).startswith("flash_attn_varlen_func: cu_seqlens_k must ascend")
    assert torch.equal(got[:8], right[:8])
    got = flash_attn_varlen_func(q, k, v, cu, cu, 12, 12, seqused_k=changed(used, (1,), FAR))
    assert str(tilefold.last_fault()).startswith(f"flash_attn_varlen_func: seqused_k[1] leads to {FAR} keys")
    flash_attn_varlen_func(q, k, v, cu, cu, 12, 12, leftpad_k=changed(used, (0,), -1))
    assert tilefold.last_fault().argument == "leftpad_k"


def test_a_paged_cache_follows_the_environment(by_default, device):
    cache = tilefold.PagedKVCache(1, 2, 16, num_pages=8, page_size=4, max_sequences=2, max_tokens=16, dtype=torch.float32,
                                  device=device)  # fmt: skip
    first, second = cache.add(), cache.add()
    k, v = (torch.randn(2, 3, 2, 16, device=device) for _ in range(2))
    q = torch.randn(2, 3, 4, 16, device=device)
    batch = cache.batch([first, second], 3)
    by_default("device")
    cache.append(0, k, v, batch)
    cache.attend(0, q, batch)
    assert tilefold.last_fault() is None
    batch.block_table[1, 0] = FAR  # nobody but a kernel gone wrong does that
    cache.append(0, k, v, batch)
    assert tilefold.last_fault().operation == "kvcache_append"
    cache.attend(0, q, batch)
    fault = tilefold.last_fault()
    assert (fault.operation, fault.argument, fault.position) == ("attention_kvcache", "block_table", (1, 0))


def test_a_cache_without_pages(device):
    call = decoding(device)
    none = call | {name: call[name][:0] for name in ("k_cache", "v_cache")}
    nobody = none | {"cache_seqlens": torch.zeros_like(call["cache_seqlens"])}
    assert not tilefold.attention_kvcache(**nobody, check="device").any()
    assert tilefold.last_fault() is None
    assert not tilefold.attention_kvcache(**none, check="device").any()
    fault = tilefold.last_fault()
    assert (fault.argument, fault.position[1], fault.high) == ("block_table", 0, -1)


# ---------------------------------------------------------------- what is refused


def test_refusals(device):
    call = decoding(device)
    with pytest.raises(ValueRangeError, match="check must be a bool or 'device', got 'gpu'"):
        tilefold.attention_kvcache(**call, check="gpu")
    refuses(DtypeError, "check must be a bool or 'device', got 1", tilefold.attention_kvcache, **call, check=1)
    none = {name: call[name][:0] for name in ("k_cache", "v_cache")} | {"block_table": None}
    with pytest.raises(ShapeError, match="k_cache has no caches"):
        tilefold.attention_kvcache(
            **call | none | {"cache_batch_idx": torch.zeros_like(call["cache_seqlens"])}, check="device"
        )
    case = next(iter(cases_of("attention_varlen", device).values())).arguments
    with pytest.raises(Unsupported, match="with bias or mask"):
        tilefold.attention_varlen(**case, bias=torch.zeros(1, 1, 1, 50, device=device), check="device")
