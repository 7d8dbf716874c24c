"""Block-sparse calls that differ in lengths alone, on sm_90: what is kept of the first is what a call of its own would have."""

import pytest
import torch

from cases import arguments_of
from tilefold.ops import records
from tilefold.ops.call import Call, key_of
from tilefold.ops.source import Lists
from tilefold.ops.sparse import sparse
from tilefold.plan import device_named


def made(n, m, layout="bshd", heads=64, blocks=(64, 64), sizes=False):
    """q, k, v and the call, without memory; sizes: blocks have some."""
    shapes = ((2, n, heads, 64), (2, m, 2, 64))
    shapes = tuple(s if layout == "bshd" else (s[0], s[2], s[1], s[3]) for s in shapes)
    q, k, v = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in (shapes[0], *shapes[1:] * 2))
    q_blocks, kv_blocks = -(-n // blocks[0]), -(-m // blocks[1])
    indices = torch.empty(1, heads, q_blocks, 4, dtype=torch.int32, device="meta")
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

    def prepare(q, k, v, call):
        return sparse.prepare.__wrapped__(q, k, v, call, key_of(q, k, v, call))

    near = prepare(*made(*lengths[0], **options))
    for others in lengths[1:]:
        given = made(*others, **options)
        own = sparse._prepare(*given)
        with monkeypatch.context() as alone:
            alone.setattr(sparse, "_prepare", None)
            again = prepare(*given)
        assert near.plan.kernel == again.plan.kernel == "sparse_forward_hopper" and again.bound is not near.bound
        assert (again.plan, again.out_shape, again.lse_shape, again.scale) == (
            own.plan,
            own.out_shape,
            own.lse_shape,
            own.scale,
        )
        assert str(again.plan) == str(own.plan)
        assert again.bound.launch.grid == own.bound.launch.grid
        assert again.bound.launch.keywords == own.bound.launch.keywords
        assert arguments_of(again, *given) == arguments_of(own, *given)


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
