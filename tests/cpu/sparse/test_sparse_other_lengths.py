"""Block-sparse calls that differ in lengths alone, on sm_90: what is kept of the first is what a call of its own would have."""

import pytest
import torch

from cases import as_its_own, told
from tilefold.ops import records
from tilefold.ops.bound import stand_in
from tilefold.ops.call import Call
from tilefold.ops.source import Lists, key_of
from tilefold.ops.sparse import sparse, sparse_backward, sparse_backward_hopper, sparse_mixed
from tilefold.plan import device_named


def made(n, m, layout="bshd", heads=64, blocks=(64, 64), sizes=False, batch=2, capacity=4):
    """q, k, v and the call, without memory; sizes: blocks have some."""
    shapes = ((batch, n, heads, 64), (batch, m, 2, 64))
    shapes = tuple(s if layout == "bshd" else (s[0], s[2], s[1], s[3]) for s in shapes)
    q, k, v = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in (shapes[0], *shapes[1:] * 2))
    q_blocks, kv_blocks = -(-n // blocks[0]), -(-m // blocks[1])
    indices = torch.empty(1, heads, q_blocks, capacity, dtype=torch.int32, device="meta")
    counts = torch.empty(1, heads, q_blocks, dtype=torch.int32, device="meta")
    block_sizes = torch.empty(kv_blocks, dtype=torch.int32, device="meta") if sizes else None
    lists = Lists(indices, counts, block_sizes, None, *blocks, n, m)
    return q, k, v, Call(causal=n == m, layout=layout, lists=lists)


def family_of(q, k, v, call):
    return sparse._key_of_any_length(key_of(q, k, v, call), call)


@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "bhsd"}, {"blocks": (128, 128)}, {"sizes": True}, {"heads": 2}],
    ids=["", "bhsd", "128", "sizes", "few"],
)
@pytest.mark.parametrize(
    "lengths",
    [
        ((1000, 1000), (1777, 1777), (1770, 1770), (999, 999), (3333, 3333)),
        ((512, 1024), (640, 4096), (640, 1024), (1000, 1024), (200, 2048)),
    ],
)
def test_the_record_is_that_of_a_call_of_its_own(options, lengths, monkeypatch):
    monkeypatch.setattr(sparse, "device_of", lambda *args: device_named("h200"))
    monkeypatch.setattr("tilefold.ops.hopper.bound_or_none", lambda kind, bind, *_: bind())
    monkeypatch.setattr(records, "CACHE", {})
    near = sparse.prepare(*made(*lengths[0], **options))
    for others in lengths[1:]:
        given = made(*others, **options)
        own = sparse.prepare_anew(*given)
        with monkeypatch.context() as alone:
            alone.setattr(sparse, "prepare_anew", None)
            again = sparse.prepare(*given)
        assert near.plan.kernel == again.plan.kernel == "sparse_forward_hopper" and again.bound is not near.bound
        as_its_own(again, own, *given)


def mixed_arguments(prepared, q, k, v, call):
    """What the launch with gates gets that is bound to a record, descriptors by what they say."""
    out, gate = (
        torch.empty(prepared.out_shape, dtype=q.dtype, device="meta"),
        torch.empty(call_heads(q, call), device="meta"),
    )
    bound = sparse_mixed.bind(prepared, call, out, out, gate, None)
    lse = torch.empty(prepared.lse_shape, device="meta")
    return told(bound.arguments((q, k, v, out, lse, call, out, gate, None)))


def call_heads(q, call):
    return q.shape[2 if call.layout == "bshd" else 1]


@pytest.mark.parametrize("options", [{}, {"layout": "bhsd"}, {"batch": 1}], ids=["", "bhsd", "one"])
def test_the_launch_with_gates_is_that_of_a_call_of_its_own(options, monkeypatch):
    """Of other lengths, and of tensors whose rows lie otherwise: k beside v, and each by itself."""
    monkeypatch.setattr(sparse, "device_of", lambda *args: device_named("h200"))
    monkeypatch.setattr("tilefold.ops.hopper.bound_or_none", lambda kind, bind, *_: bind())
    monkeypatch.setattr(records, "CACHE", {})
    q, k, v, call = first = made(1024, 1024, **options)
    sparse.prepare(*first)
    joint = torch.empty(*q.shape[:-1], 2 * q.shape[-1], dtype=q.dtype, device="meta")[..., : q.shape[-1]]
    for given in (made(640, 640, **options), (joint, k, v, call), made(1088, 1088, **options)):
        own = sparse.prepare_anew(*given)
        with monkeypatch.context() as alone:
            alone.setattr(sparse, "prepare_anew", None)
            again = sparse.prepare(*given)
        assert mixed_arguments(again, *given) == mixed_arguments(own, *given)


def bound_backward(q, k, v, call):
    """(The bound backward pass of a call, what its launches are given, descriptors by what they say)."""
    out, kv_blocks, blocks = torch.empty_like(q), -(-call.lists.seq_k // call.lists.block_k), call.lists.indices.shape
    indices = torch.empty(*blocks[:2], kv_blocks, blocks[2], dtype=torch.int32, device="meta")
    turned = call.lists._replace(indices=indices, counts=indices[..., 0].contiguous())
    lse = torch.empty(2, blocks[1], call.lists.seq_q, device="meta")
    bound = sparse_backward._bound(sparse.prepare(q, k, v, call), (q, k, v, out, lse), out, None, call, turned)
    kinds = torch.int32, torch.int32, torch.float32, *[one.dtype for one in bound.buffers]  # places, edges, sums
    given = (q, k, v, out, lse, out, None, call, turned, *map(stand_in, kinds))
    found = [(tuple(one.shape), one.dtype) for one in bound.buffers] + [bound.spans]
    for one in (bound.statistics, bound.places, bound.main):
        found += [one.launch.grid, one.launch.keywords, one.launch.fn, *told(one.arguments(given))]
    return bound, found


@pytest.mark.parametrize("options", [{}, {"layout": "bhsd"}, {"blocks": (128, 128)}, {"heads": 2}, {"capacity": 24}])
def test_the_backward_pass_is_that_of_a_call_of_its_own(options, monkeypatch):
    for module in (sparse, sparse_backward):
        monkeypatch.setattr(module, "device_of", lambda *args: device_named("h200"))
    monkeypatch.setattr("tilefold.ops.hopper.bound_or_none", lambda kind, bind, *_: bind())
    monkeypatch.setattr(sparse_backward_hopper, "chosen_or_none", lambda plan, given, kind, bind, *_: bind())
    monkeypatch.setattr(records, "CACHE", {})
    planned = []
    plan_of = sparse_backward._plan
    monkeypatch.setattr(sparse_backward, "_plan", lambda *args: planned.append(args) or plan_of(*args))
    lengths = (1000, 1900), (1770, 1777), (1769, 1780), (1770, 1777 + 128), (1765, 1780)
    for (n, m), times in zip(lengths, (1, 2, 2, 3, 3), strict=True):
        q, k, v, call = made(n, m, **options)
        bound, again = bound_backward(q, k, v, call)
        assert len(planned) == times and bound.places.launch.grid[0] > 0
        assert bound.spans or "capacity" not in options  # whose lists are long enough for spans
        with monkeypatch.context() as alone:
            alone.setattr(records, "CACHE", {})
            assert again == bound_backward(q, k, v, call)[1]
        planned.pop()


def test_what_is_no_length_has_a_key_of_its_own():
    q, k, v, call = made(1024, 1024)
    key = family_of(q, k, v, call)
    assert key is not None and key == family_of(*made(640, 640))
    for other in (
        made(1000, 1000),  # the last block is cut
        made(1024, 1024, sizes=True),
        made(1024, 1024, blocks=(128, 64)),
        made(1024, 1024, heads=32),
        (q, k, v, call._replace(softcap=30.0)),
        (q, k, v, call._replace(lists=call.lists._replace(seq_q=1023))),
        (q, k, v[:, :-1], call),
        (q, k, v, call._replace(mask=q)),
    ):
        assert family_of(*other) != key
