"""Who has to see a call is decided once for each key: nothing that the decision depends on may change beside the key."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilefold
from cases import rand
from cases.refusals import refuses
from tilefold import BlockIndex, LayoutError, Unsupported, ValueRangeError
from tilefold.ops import records
from tilefold.ops.call import Call
from tilefold.ops.source import key_of

B, N, H, D = 1, 32, 2, 16


def tensors(device, dtype=torch.float32, n=N):
    return [rand(B, n, H, D, device=device).to(dtype) for _ in range(3)]


def index_of(device, n=N):
    return BlockIndex.from_map(
        torch.ones(B, H, n // 16, n // 16, dtype=torch.bool, device=device), block_q=16, block_k=16
    )


def lengths_of(device, n=N):
    return torch.full((B,), n, dtype=torch.int32, device=device)


def call_of(name, device, n=N):
    """The call as a function of q, k and v."""
    if name == "attention":
        return lambda q, k, v, **options: tilefold.attention(q, k, v, **options)
    if name == "sparse_attention":
        index = index_of(device, n)
        return lambda q, k, v, **options: tilefold.sparse_attention(q, k, v, index, **options)
    lengths = lengths_of(device, n)
    return lambda q, k, v, **options: tilefold.attention_kvcache(q, k, v, cache_seqlens=lengths, **options)


NAMES = ("attention", "sparse_attention", "attention_kvcache")
OPERATORS = {name: f"tilefold.{name}.default" for name in NAMES}


class Seen(TorchDispatchMode):
    """The operators of tilefold that come along."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith("tilefold"):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    """A tensor that wants to see its operators."""


@pytest.mark.parametrize("name", NAMES)
def test_a_warm_call_is_seen_by_who_comes_later(name, device):
    call, given = call_of(name, device), tensors(device)
    out = call(*given)
    assert torch.equal(call(*given), out)
    with Seen() as seen:
        assert torch.equal(call(*given), out)
    assert seen.names == [OPERATORS[name]]
    for at in range(3):
        one = [t.as_subclass(Subclass) if i == at else t for i, t in enumerate(given)]
        assert type(call(*one)) is Subclass, at
    assert type(call(*given)) is torch.Tensor


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("name", NAMES[:2])
def test_a_warm_call_has_a_gradient_when_a_tensor_asks_for_one(name, at, device):
    call, given = call_of(name, device), tensors(device)
    asking = [t.clone().requires_grad_(i == at) for i, t in enumerate(given)]
    with torch.no_grad():
        out = call(*asking)
    assert not out.requires_grad and not call(*given).requires_grad
    for _ in range(2):
        again = call(*asking)
        assert again.requires_grad and torch.equal(again, out)
        (grad,) = torch.autograd.grad(again.sum(), [asking[at]])
        assert grad.shape == given[at].shape
    with torch.inference_mode():
        assert not call(*asking).requires_grad
    assert not call(*[t.detach() for t in asking]).requires_grad


@pytest.mark.parametrize("at", range(3))
def test_a_warm_call_over_a_cache_refuses_a_gradient(at, device):
    call, given = call_of("attention_kvcache", device), tensors(device)
    with torch.no_grad():
        call(*[t.clone().requires_grad_(i == at) for i, t in enumerate(given)])
    out = call(*given)
    asking = call(*[t.clone().requires_grad_(i == at) for i, t in enumerate(given)])
    refuses(Unsupported, "forward only", asking.sum().backward)
    assert not out.requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_transforms_and_forward_mode_see_a_warm_call(name, device):
    call, given = call_of(name, device), tensors(device)
    call(*given)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[0], torch.ones_like(given[0]))
        refuses(Unsupported, "tangent", call, dual, *given[1:])
    with pytest.raises((Unsupported, RuntimeError), match="vmap|Batching rule"):
        torch.func.vmap(call)(*[t[None] for t in given])
    if name != "attention_kvcache":
        grad = torch.func.grad(lambda q: call(q, *given[1:]).sum())(given[0])
        asking = given[0].clone().requires_grad_()
        (wanted,) = torch.autograd.grad(call(asking, *given[1:]).sum(), [asking])
        assert torch.equal(grad, wanted)
    assert torch.equal(call(*given), call(*given))


def changed(name, device):
    """Calls that differ from the plain one in one thing."""
    q, k, v = tensors(device)
    shifted = torch.empty(q.numel() + 1, device=device)[1:].view(q.shape).copy_(q)
    halves = [t.half() for t in (q, k, v)]
    yield "dtype", halves, {}
    yield "stride", (q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {}
    yield "stride of v", (q, k, v.transpose(1, 2).contiguous().transpose(1, 2)), {}
    yield "alignment", (shifted, k, v), {}
    yield "causal", (q, k, v), {"causal": True}
    yield "scale", (q, k, v), {"scale": 0.5}
    yield "softcap", (q, k, v), {"softcap": 3.0}
    if name != "sparse_attention":
        yield "window", (q, k, v), {"window": (3, 0)}
        yield "sinks", (q, k, v), {"sinks": torch.ones(H, device=device)}
        yield "slopes", (q, k, v), {"alibi_slopes": torch.ones(H, device=device)}
    if name != "attention_kvcache":
        yield "layout", [t.transpose(1, 2) for t in (q, k, v)], {"layout": "bhsd"}
    else:
        yield "the same memory", (q, k, k), {}


@pytest.mark.parametrize("name", NAMES)
def test_no_call_takes_the_record_of_another(name, device, monkeypatch):
    call = call_of(name, device)
    plain = tensors(device)
    call(*plain)
    refuses(LayoutError, "negation", call, torch._neg_view(plain[0]), *plain[1:])
    for what, given, options in changed(name, device):
        call(*plain)  # warm
        for _ in range(2):
            warm = call(*given, **options, return_lse=True)
        with monkeypatch.context() as anew:
            anew.setattr(records, "CACHE", {})
            cold = call(*given, **options, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(warm, cold, strict=True)), what


@pytest.mark.parametrize("name", NAMES)
def test_other_lengths_and_other_lists(name, device, monkeypatch):
    for n in (32, 48, 32, 16, 48):
        call, given = call_of(name, device, n), tensors(device, n=n)
        warm = call(*given)
        with monkeypatch.context() as anew:
            anew.setattr(records, "CACHE", {})
            assert torch.equal(warm, call(*given)), n


def test_a_warm_call_follows_the_values_of_lists_and_lengths(device):
    q, k, v = tensors(device)
    index, lengths = index_of(device), lengths_of(device)
    whole = tilefold.sparse_attention(q, k, v, index), tilefold.attention_kvcache(q, k, v, cache_seqlens=lengths)
    index.counts.fill_(1)
    lengths.fill_(16)
    half = tilefold.sparse_attention(q, k, v, index), tilefold.attention_kvcache(q, k, v, cache_seqlens=lengths)
    first = tilefold.attention(q, k[:, :16], v[:, :16])
    for a, b in zip(whole, half, strict=True):
        assert not torch.equal(a, b)
        torch.testing.assert_close(b, first)


def test_wrong_values_are_found_in_a_warm_call(device):
    q, k, v = tensors(device)
    lengths = lengths_of(device)
    tilefold.attention_kvcache(q, k, v, cache_seqlens=lengths)
    lengths.fill_(N + 1)
    refuses(ValueRangeError, "cache_seqlens", tilefold.attention_kvcache, q, k, v, cache_seqlens=lengths, check=True)
    tilefold.last_fault()
    tilefold.attention_kvcache(q, k, v, cache_seqlens=lengths, check="device")
    fault = tilefold.last_fault()
    assert fault is not None and fault.argument == "cache_seqlens"


@pytest.mark.parametrize("name", NAMES[:2])
def test_kinds_are_looked_at_in_a_warm_call(name, device):
    call, given = call_of(name, device), tensors(device)
    call(*given)
    for option, value in (("causal", 1), ("return_lse", 1), ("softcap", True), ("scale", 0)):
        with pytest.raises(tilefold.TilefoldError, match=option):
            call(*given, **{option: value})


def test_a_constant_is_resolved_in_every_call(device):
    """Its plan is what it names, so no way is kept for it."""
    q, k, v = tensors(device)
    plan = tilefold.attention_plan(q, k, v)
    named = tilefold.constant(plan)
    for _ in range(3):
        assert torch.equal(tilefold.attention(q, k, v, plan=named), tilefold.attention(q, k, v, plan=plan))


def test_the_key_holds_what_decides_the_way(device):
    q, k, v = tensors(device)
    asking = q.clone().requires_grad_()
    assert key_of(q, k, v, Call()) != key_of(asking, k, v, Call())
    assert key_of(q, k, v, Call()) != key_of(q, k, v, Call(deterministic=False))
    assert key_of(q, k, v, Call()) != key_of(q.as_subclass(Subclass), k, v, Call())
    assert key_of(q, k, v, Call()) == key_of(q.clone(), k, v, Call())
