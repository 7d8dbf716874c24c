"""Few queries of `attention` on a GPU: long keys against fp64, graphs, compiled functions, the same bits, no synchronisation."""

import pytest
import torch

import tilefold
from cases import check, packed, qkv, same
from cases.device import DEVICE, captured, no_waiting
from tilefold.plan import DecodePlan

pytestmark = pytest.mark.no_poison
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize(("batch", "seq_q", "keys", "heads", "kv_heads"), [
    (1, 1, 8192, 28, 4), (8, 1, 3001, 28, 4), (64, 1, 100, 32, 8), (1, 16, 5000, 8, 1), (3, 64, 700, 2, 2), (2, 5, 300, 7, 1),
])  # fmt: skip
def test_against_fp64(batch, seq_q, keys, heads, kv_heads, dtype):
    for dim, dim_v in ((128, 128), (40, 24)):
        q, k, v = qkv(batch, seq_q, keys, heads, kv_heads, dim, dim_v, dtype, DEVICE)
        assert isinstance(tilefold.attention_plan(q, k, v, causal=True), DecodePlan)
        for options in (
            {"causal": True},
            {"window": (500, 0)},
            {"softcap": 20.0, "sinks": torch.randn(heads, device=DEVICE)},
        ):
            check(q, k, v, tile=None, **options)
        lost = torch.rand(batch, 1, 1, keys, device=DEVICE) > 0.5
        check(q, k, v, tile=None, causal=True, mask=lost)


def test_packed():
    tensors, offsets = packed([1, 3, 0, 2], [5000, 17, 100, 900], 28, 4, 128, 128, BF16, DEVICE)
    check(*tensors, tile=None, varlen=offsets, causal=True)


def test_graphs_compiled_functions_and_bits():
    q, k, v = qkv(2, 1, 4097, 28, 4, 128, None, BF16, DEVICE)

    def call(q, k, v):
        return tilefold.attention(q, k, v, causal=True, return_lse=True)

    right = call(q, k, v)
    with no_waiting():
        again = call(q, k, v)
    assert same(right, again)
    found = torch.compile(call, fullgraph=True)(q, k, v)
    assert same(right, found)
    graph, kept = captured(lambda: call(q, k, v))
    for _ in range(3):
        q.normal_()
        graph.replay()
        assert same(kept, call(q, k, v))
