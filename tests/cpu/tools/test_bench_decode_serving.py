"""What `tilefold bench decode` hands to libraries that are not installed here: stand-ins that read it as those do."""

import types
from dataclasses import replace

import pytest
import torch

from tilefold.bench.decode import peers as decode_peers
from tilefold.bench.decode import serving as decode_serving
from tilefold.bench.decode.cases import DecodeCase
from tilefold.bench.decode.inputs import DecodeJudge, make_decode_inputs
from tilefold.bench.decode.serving import DECODE_PEERS
from tilefold.errors import Unsupported

EVEN = DecodeCase((64, 64), 4, 2, 16, 16)
CASES = (EVEN, replace(EVEN, lengths=(5, 90, 33), page=16), replace(EVEN, page=64, dtype="float16"))


def gathered(pages, numbers, length):
    """Keys or values [length, heads, dim] of a sequence in pages."""
    return pages[numbers.long()].flatten(0, 1)[:length]


def attention(q, k, v, causal=False):
    """q [S, H, D], k, v [N, Hkv, D]: plain attention of a sequence."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q)) if causal else None
    tensors = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


class PagedWrapper:
    """flashinfer's wrappers: pages of a sequence from indptr, the last one's length; causal with several queries."""

    starts = None

    def __init__(self, space, layout, use_tensor_cores=False):
        assert (space.dtype, layout) == (torch.uint8, "NHD")

    def plan(self, indptr, indices, last, heads, kv_heads, dim, page, *, q_data_type, kv_data_type, causal=False):
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32
        assert q_data_type == kv_data_type
        self.shape, self.causal = (heads, kv_heads, dim), causal
        ends = indptr.tolist()
        self.sequences = [
            (indices[first:end], (end - first - 1) * page + tail)
            for first, end, tail in zip(ends, ends[1:], last.tolist(), strict=False)
        ]

    def run(self, q, caches):
        assert self.shape == (q.shape[1], caches[0].shape[2], q.shape[2])
        starts = range(len(q) + 1) if self.starts is None else self.starts.tolist()
        return torch.cat([
            attention(q[first:end], *(gathered(cache, *where) for cache in caches), self.causal)
            for first, end, where in zip(starts, starts[1:], self.sequences, strict=False)
        ])  # fmt: skip


class PrefillWrapper(PagedWrapper):
    """The one for several queries, whose plan begins with where each sequence's queries do."""

    def plan(self, starts, *where, **options):
        self.starts = starts
        super().plan(*where, **options)


FLASHINFER = types.SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=PagedWrapper, BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper
)


def triton_decode(q, k, v, out, lse, table, lengths, partials, splits, scale, page_size=1, logit_cap=0.0):
    """vLLM's function."""
    assert page_size == k.shape[1]
    assert partials.shape == (*q.shape[:2], splits, v.shape[-1] + 1)
    assert lse.shape == q.shape[:2]
    assert scale == pytest.approx(q.shape[-1] ** -0.5)
    for b, n in enumerate(lengths.tolist()):
        out[b] = attention(q[b : b + 1], *(gathered(cache, table[b], n) for cache in (k, v)))[0]


def older_triton_decode(q, k, v, o, req_to_token, *rest):
    """The one before it gave an lse."""
    triton_decode(q, k, v, o, torch.empty(q.shape[:2]), req_to_token, *rest)


def fa4_func(q, k, v, causal=False):
    return torch.stack([attention(*each, causal) for each in zip(q, k, v, strict=True)]), None


def fa4_varlen_func(q, k, v, seqused_k=None, page_table=None, causal=False):
    keys = [[gathered(t, page_table[b], n) for t in (k, v)] for b, n in enumerate(seqused_k.tolist())]
    return torch.stack([attention(one, *each, causal) for one, each in zip(q, keys, strict=True)]), None


def judged(name, case):
    """The verdicts over two sets of inputs, each by its own judge."""
    sets = [make_decode_inputs(case, "cpu", seed) for seed in range(2)]
    calls = DECODE_PEERS[name].prepare(sets)
    return [DecodeJudge(one).verdict(call()) for one, call in zip(sets, calls.calls, strict=True)]


@pytest.fixture
def modules(monkeypatch):
    """Stand-ins by module name, in place of what is not installed."""
    found = {"flashinfer": FLASHINFER}
    fake = types.SimpleNamespace(import_module=found.__getitem__)
    for module in (decode_serving, decode_peers):
        monkeypatch.setattr(module, "importlib", fake)
        monkeypatch.setattr(module, "importable", found.__contains__)
    sms = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    return found


@pytest.mark.parametrize("case", [*CASES, replace(CASES[1], queries=4)], ids=lambda case: case.name)
def test_flashinfer_gets_pages_and_lengths(modules, case):
    assert all(one.ok for one in judged("flashinfer", case))
    assert DECODE_PEERS["flashinfer"].refuses(case, "cuda") is None


@pytest.mark.parametrize("function", [triton_decode, older_triton_decode])
@pytest.mark.parametrize(
    "case", [*CASES, replace(EVEN, kv_heads=1, dim_qk=40, dim_v=32, shared=True)], ids=lambda c: c.name
)
def test_vllm_gets_pages_and_room_for_its_splits(modules, case, function):
    modules[decode_serving.VLLM_MODULES[1]] = types.SimpleNamespace(decode_attention_fwd=function)
    assert all(one.ok for one in judged("vllm", case))
    assert DECODE_PEERS["vllm"].refuses(replace(case, queries=2), "cuda") == "takes one query a sequence"


@pytest.mark.parametrize("case", [*CASES, replace(EVEN, queries=4), replace(EVEN, cache="int8")], ids=lambda c: c.name)
def test_fa4_gets_plain_caches_and_uneven_ones_in_pages(modules, case):
    modules["flash_attn.cute"] = types.SimpleNamespace(flash_attn_func=fa4_func, flash_attn_varlen_func=fa4_varlen_func)
    assert all(one.ok for one in judged("fa4", case))
    modules["flash_attn.cute"].flash_attn_varlen_func = lambda q, k, v, seqused_k=None: None
    if case.uneven:
        with pytest.raises(Unsupported, match="flash_attn_varlen_func has no page_table"):
            judged("fa4", case)


@pytest.mark.no_poison
@pytest.mark.parametrize("case", [EVEN, replace(CASES[1], queries=4), replace(EVEN, cache="fp8")], ids=lambda c: c.name)
def test_flex_sees_each_sequence_to_its_end(monkeypatch, case):
    """Without compilation, which the CPU does not need to show what is masked."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    assert all(one.ok for one in judged("flex", case))


@pytest.mark.parametrize("queries", [1, 4])
def test_math_takes_a_mask_from_the_bottom_right(queries):
    assert all(one.ok for one in judged("math", replace(EVEN, queries=queries, page=16)))
