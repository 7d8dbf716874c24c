"""attention_kvcache under torch.compile, without reads on the host, without gradients; its plan as the caller's own."""

import dataclasses

import pytest
import torch

import tilefold
from cases import graph_gives, one_graph, rand
from cases.decode import small
from cases.host import NoReads
from cases.refusals import refuses

pytestmark = pytest.mark.no_poison


def test_compiled_is_the_eager_call(device):
    graph_gives(tilefold.attention_kvcache, causal=True, return_lse=True, **small(device))
    cache = rand(6, 8, 1, 320, device=device)  # V as a part of K has head dims that are refused otherwise
    shared = small(device, q=rand(2, 1, 4, 320, device=device))
    del shared["k_cache"], shared["v_cache"]

    def latent(c, **a):
        return tilefold.attention_kvcache(k_cache=c, v_cache=c[..., :256], **a)

    graph_gives(latent, cache, **shared)


def test_the_operator_is_what_its_schema_says(device):
    from tilefold.ops.cache.kvcache import ATTENTION_KVCACHE
    from tilefold.ops.call import Call
    from tilefold.ops.source import Cache

    given_now = small(device)
    cache = Cache(given_now["cache_seqlens"], block_table=given_now["block_table"])
    tensors = (given_now[name] for name in ("q", "k_cache", "v_cache"))
    flat = ATTENTION_KVCACHE.flat(*tensors, Call(causal=True, source=cache), False)
    torch.library.opcheck(ATTENTION_KVCACHE.op, flat, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.interpreter
def test_nothing_is_read_on_the_host(device, monkeypatch):
    from tilefold.ops import operator
    from tilefold.ops.cache import kvcache

    monkeypatch.setattr(kvcache, "check_contents", lambda *args: None)
    monkeypatch.setattr(operator, "watchers", lambda tensors: (False, False))  # the launch itself runs under the mode
    call = small(device)
    with NoReads("_local_scalar_dense", "nonzero"):
        tilefold.attention_kvcache(**call)


def test_a_plan_is_followed_or_refused(device):
    call = small(device)
    plan = tilefold.attention_kvcache_plan(**call)
    tilefold.attention_kvcache(**call, plan=dataclasses.replace(plan, block_n=16, merge="kernel"))
    other = {name: t for name, t in call.items() if name != "block_table"}
    other["k_cache"], other["v_cache"] = (rand(2, 16, 2, 16, device=device) for _ in range(2))
    refuses(tilefold.PlanError, "page_size", tilefold.attention_kvcache, **other, plan=plan)
    looking = one_graph(lambda **a: tilefold.attention_kvcache(check=True, **a))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="check=True reads index tensors on the host"):
        looking(**call)


def test_stale_lengths_stay_inside(device, monkeypatch):
    """Nobody looks at them on a GPU before the kernel does: past the room they count as the room."""
    from tilefold.ops.cache import kvcache

    monkeypatch.setattr(kvcache, "check_contents", lambda *args: None)
    k = rand(2, 16, 2, 16, device=device)
    q = rand(2, 1, 4, 16, device=device)
    far = torch.tensor([1 << 29, -5], dtype=torch.int32, device=device)
    right = torch.tensor([16, 0], dtype=torch.int32, device=device)
    got = tilefold.attention_kvcache(q, k, k, cache_seqlens=far)
    assert torch.equal(got, tilefold.attention_kvcache(q, k, k, cache_seqlens=right))
