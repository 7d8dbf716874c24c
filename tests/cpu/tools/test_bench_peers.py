"""The adapters of block-sparse peers, against stand-ins that compute by fp64 what the real libraries' signatures promise."""

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from tilefold import BlockIndex, reference
from tilefold.bench.attention import block_peers
from tilefold.bench.attention.cases import DECODE, VIDEO, Case
from tilefold.bench.attention.lists import Pattern
from tilefold.bench.attention.peers import DEFAULT_PEERS, IMPLEMENTATIONS, flex_mask
from tilefold.bench.implementation import make_inputs
from tilefold.bench.judge import Judge
from tilefold.errors import Unsupported
from tilefold.ops.environment import importable
from tilefold.ops.environment import installed as version_of
from tilefold.ops.sparse import sparse
from tilefold.plan import device_named
from tilefold.plan.problem import AttentionProblem
from tilefold.plan.sparse.sparse import plan_sparse
from tilefold.plan.sparse.sparse_backward import plan_sparse_backward

PROBLEM = AttentionProblem(2, 192, 256, 2, 2, 16, 16, dtype="float32")
RANDOM = Case("sparse", PROBLEM, Pattern("random", 50, 64, 64))
UNEVEN = Case("sparse", PROBLEM, Pattern("uneven", 0, 64, 64))
CASES = [RANDOM, UNEVEN, replace(RANDOM, backward=True), replace(UNEVEN, backward=True)]


def attended(q, k, v, indices, counts, block):
    """What a library that takes [B, H, S, D] and lists gives: out and lse in fp32."""
    assert all(t.is_contiguous() for t in (q, k, v, indices, counts))
    assert indices.dtype == counts.dtype == torch.int32
    index = BlockIndex(indices, counts, block, block, q.shape[2], k.shape[2], check=True)
    out, lse = reference.sparse_attention(q, k, v, index, layout="bhsd")
    return out.to(q.dtype), lse.to(q.dtype)


def gradients(grad, q, k, v, indices, counts, block):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(attended(*leaves, indices, counts, block)[0], leaves, grad)


def judged(name, case):
    inputs = make_inputs(case, "cpu")
    prepared = IMPLEMENTATIONS[name].prepare(inputs)
    with prepared.context():
        result = prepared.call()
    assert Judge(inputs).verdict(result).ok
    return result


@pytest.fixture
def bsa(monkeypatch):
    """cudnn.block_sparse_attention, and the options that it was given."""
    given = []

    def lists(indices, options):
        given.append(options)
        counts = options.get("q2k_block_nums")
        return indices, torch.full(indices.shape[:3], indices.shape[3]).int() if counts is None else counts

    def forward(q, k, v, indices, *, kv_splits, **options):
        out, lse = attended(q, k, v, *lists(indices, options | {"kv_splits": kv_splits}), options["sparse_block_size"])
        return {"o_tensor": out, "lse_tensor": lse}

    def backward(grad, q, k, v, out, lse, indices, **options):
        assert out.shape == grad.shape
        assert lse.shape == out.shape[:3]
        dq, dk, dv = gradients(grad, q, k, v, *lists(indices, options), options["sparse_block_size"])
        return {"dq_tensor": dq, "dk_tensor": dk, "dv_tensor": dv}

    module = ModuleType("cudnn.block_sparse_attention")
    module.block_sparse_attention_forward, module.block_sparse_attention_backward = forward, backward
    monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))
    monkeypatch.setitem(sys.modules, "cudnn.block_sparse_attention", module)
    return given


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cudnn_block_sparse(bsa, case):
    judged("bsa", case)
    assert all(("q2k_block_nums" in options) == (case.pattern.kind == "uneven") for options in bsa)
    assert {options["sparse_block_size"] for options in bsa} == {64}
    assert bsa[0]["kv_splits"] == "auto"


def test_cudnn_block_sparse_is_given_splits_where_there_are_few_queries(bsa, monkeypatch):
    properties = SimpleNamespace(multi_processor_count=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    judged("bsa", Case("sparse", replace(PROBLEM, batch=1, seq_q=64, seq_k=1024), Pattern("random", 50)))
    assert bsa[0]["kv_splits"] == 8
    judged("bsa", Case("sparse", replace(PROBLEM, seq_q=384), Pattern("random", 0, 128, 128)))
    assert bsa[1]["kv_splits"] == 1


@pytest.fixture
def fastvideo(monkeypatch):
    """The two files of fastvideo-kernel."""

    def by_triton(grad, q, k, v, out, lse, indices, counts, query_indices, query_counts, sizes):
        index = BlockIndex(indices, counts, 64, 64, q.shape[2], k.shape[2]).transpose()
        assert torch.equal(index.to_map(), by_key(q, k, query_indices, query_counts).to_map())
        return gradients(grad, q, k, v, indices, counts, 64)

    def by_key(q, k, indices, counts):
        return BlockIndex(indices, counts, 64, 64, k.shape[2], q.shape[2], check=True)

    def by_kittens(q, k, v, out, lse, grad, indices, counts, sizes):
        turned = by_key(q, k, indices, counts).transpose()
        assert sizes.tolist() == [64] * (k.shape[2] // 64)
        return [t.double() for t in gradients(grad, q, k, v, turned.indices, turned.counts, 64)]

    def forward(q, k, v, indices, counts, sizes):
        assert sizes.dtype == torch.int32
        assert sizes.tolist() == [64] * (k.shape[2] // 64)
        return attended(q, k, v, indices, counts, 64)

    files = {
        "triton_kernels/block_sparse_attn_triton.py": SimpleNamespace(
            triton_block_sparse_attn_forward=forward, triton_block_sparse_attn_backward=by_triton
        ),
        "_C/fastvideo_kernel_ops*.so": SimpleNamespace(block_sparse_fwd=forward, block_sparse_bwd=by_kittens),
    }
    monkeypatch.setattr(block_peers, "_fastvideo_file", files.__getitem__)


@pytest.mark.parametrize("name", ["fastvideo", "tk"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fastvideo(fastvideo, name, case):
    result = judged(name, case)
    assert all(t.dtype == torch.float32 for t in (result if case.backward else [result]))


class BlockSparseTensorsTorch(NamedTuple):
    """FA4's record, the fields that are used."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    block_size: tuple[int, int]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_flash_attention_4(monkeypatch, case):
    def attend(q, k, v, *, causal, block_sparse_tensors: BlockSparseTensorsTorch, block_sparse_tensors_bwd=None):
        lists = block_sparse_tensors
        assert not causal
        assert not lists.mask_block_cnt.any()
        assert lists.mask_block_idx.shape == lists.full_block_idx.shape
        assert (block_sparse_tensors_bwd is not None) == case.backward
        geometry = (*lists.block_size, q.shape[1], k.shape[1])
        index = BlockIndex(lists.full_block_idx, lists.full_block_cnt, *geometry, check=True)
        if case.backward:
            turned = block_sparse_tensors_bwd
            want = index.transpose()
            assert turned.block_size == lists.block_size
            assert torch.equal(want.to_map(), want.with_tensors(turned.full_block_idx, turned.full_block_cnt).to_map())
        return reference.sparse_attention(q, k, v, index)[0].to(q.dtype), None

    package, sparsity = ModuleType("flash_attn.cute"), ModuleType("flash_attn.cute.block_sparsity")
    package.flash_attn_func, sparsity.BlockSparseTensorsTorch = attend, BlockSparseTensorsTorch
    for module in (ModuleType("flash_attn"), package, sparsity):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    judged("fa4", case)


@pytest.mark.parametrize("lengths", [(), (70, 130)], ids=["dense", "packed"])
@pytest.mark.parametrize("name", ["fa4", "fa4-det"])
def test_flash_attention_4_is_deterministic_only_where_its_name_says_so(monkeypatch, name, lengths):
    """One and the same function; a packed batch goes to the other one, with where its sequences begin."""
    given = []

    def attend(q, k, v, *, causal, deterministic=False):
        given.append(deterministic)
        return reference.attention(q, k, v, causal=causal)[0].to(q.dtype), None

    def packed(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, deterministic=False):
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert max_seqlen_q == max_seqlen_k == max(lengths)
        ends = cu_seqlens_q.tolist()
        parts = [[t[None, a:b] for t in (q, k, v)] for a, b in pairwise(ends)]
        return torch.cat([attend(*part, causal=causal, deterministic=deterministic)[0][0] for part in parts]), None

    package = ModuleType("flash_attn.cute")
    package.flash_attn_func, package.flash_attn_varlen_func = attend, packed
    for module in (ModuleType("flash_attn"), package):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    longest = max(lengths, default=192)
    sizes = replace(PROBLEM, batch=2, seq_q=longest, seq_k=longest, causal=True, varlen=bool(lengths))
    judged(name, Case("dense", sizes, backward=True, lengths=lengths))
    assert set(given) == {name == "fa4-det"}


def test_flex_attention_is_given_the_lists_and_views_of_the_inputs(monkeypatch):
    seen = {}

    def spy(q, k, v, **options):
        seen.update(q=q, **options)
        return q

    monkeypatch.setattr(torch, "compile", lambda function, dynamic, mode: spy)
    inputs = make_inputs(RANDOM, "cpu")
    out = IMPLEMENTATIONS["flex"].prepare(inputs).call()
    assert seen["q"].shape == (2, 2, 192, 16)
    assert seen["q"].data_ptr() == out.data_ptr() == inputs.q.data_ptr()
    assert torch.equal(seen["block_mask"].to_dense().bool(), inputs.index.to_map())
    assert seen["enable_gqa"] is False
    assert seen["kernel_options"] == {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3}
    assert IMPLEMENTATIONS["flex"].prepare(make_inputs(Case("dense", PROBLEM), "cpu")).call().shape == (2, 192, 2, 16)
    assert seen["kernel_options"] is None


def test_flex_masks_whole_blocks():
    inputs = make_inputs(UNEVEN, "cpu")
    mask = flex_mask(inputs)
    assert torch.equal(mask.to_dense().bool(), inputs.index.to_map())
    assert not mask.kv_num_blocks.any()
    assert mask.seq_lengths == (192, 256)
    assert flex_mask(make_inputs(Case("dense", PROBLEM), "cpu")) is None


# --- the portable plans ---------------------------------------------------------------------------------------------------------


def test_the_portable_plans_are_a_row_of_its_own_only_where_another_is_the_default():
    inputs = make_inputs(RANDOM, "cpu")
    assert block_peers.portable_plans(inputs) is None
    with pytest.raises(Unsupported, match="it is what tilefold runs by itself here"):
        IMPLEMENTATIONS["portable"].prepare(inputs)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("gluon", [(), ("sparse",), ("sparse_backward",), ("sparse", "sparse_backward")])
def test_the_portable_row_follows_the_plans_that_count(monkeypatch, gluon, backward):
    """On an H200, where a Gluon kernel serves one direction, both or none: a forward case has no backward plan to ask about."""
    real = sparse.prepare
    problem = replace(PROBLEM, dtype="bfloat16", dim_qk=128, dim_v=128)
    inputs = make_inputs(replace(RANDOM, problem=problem, backward=backward), "cpu")
    assert block_peers.portable_plans(inputs) is None  # and the call is kept as this machine serves it

    def prepare(q, k, v, call):
        return SimpleNamespace(
            plan=SimpleNamespace(problem=real(q, k, v, call).plan.problem, device=device_named("h200"))
        )

    monkeypatch.setattr(block_peers, "prepare", prepare)
    for module, refusal in (("sparse", "hopper_refusal"), ("sparse_backward", "hopper_backward_refusal")):
        why = None if module in gluon else "not here"
        monkeypatch.setattr(f"tilefold.plan.sparse.{module}.{refusal}", lambda *_, why=why: why)
    caches = plan_sparse.cache_clear, plan_sparse_backward.cache_clear
    for clear in caches:
        clear()
    try:
        found = block_peers.portable_plans(inputs)
    finally:
        for clear in caches:
            clear()
    if gluon == () or (gluon == ("sparse_backward",) and not backward):
        assert found is None
    else:
        assert [plan.kernel for plan in found] == ["sparse_forward_box", "sparse_backward_box"]


# --- refusals -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """A machine with every peer and an sm_90 GPU."""
    monkeypatch.setattr(block_peers, "version_of", lambda package: "1.0")
    monkeypatch.setattr("tilefold.bench.family.importable", lambda module: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


MAIN = Case("sparse", VIDEO, Pattern("random", 80))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("bsa", {}, None),
        ("tk", {}, None),
        ("fastvideo", {}, None),
        ("fa4", {}, None),
        ("flex", {}, None),
        ("bsa", {"kv_heads": 3}, None),
        ("bsa", {"kv_heads": 3, "backward": True}, "its backward takes bfloat16, head dim 128 and as many KV heads"),
        ("bsa", {"dim_qk": 64, "dim_v": 64, "backward": True}, "its backward takes bfloat16, head dim 128"),
        ("bsa", {"dtype": "float16"}, None),
        ("bsa", {"dtype": "float16", "backward": True}, "its backward takes bfloat16"),
        ("bsa", {"dtype": "float32"}, "takes float16 and bfloat16 only"),
        ("bsa", {"dim_qk": 192, "dim_v": 192}, "takes head dims of 64, 96, 128 only"),
        ("bsa", {"pattern": Pattern("random", 80, 128, 128)}, None),
        ("bsa", {"pattern": Pattern("random", 80, 64, 128)}, "takes square blocks of 64 or 128 only"),
        ("bsa", {"causal": True}, "takes attention without masks beyond its lists only"),
        ("bsa", {"seq_q": 23290}, "takes whole blocks only"),
        ("bsa", {"pattern": None}, "takes lists of blocks only"),
        ("tk", {"pattern": Pattern("random", 80, 128, 128)}, "takes square blocks of 64 only"),
        ("tk", {"dtype": "float16"}, "takes bfloat16 only"),
        ("fastvideo", {"kv_heads": 3}, "takes as many KV heads as query heads only"),
        ("fa4", {"backward": True}, "its backward takes KV blocks of 128 on sm_90"),
        ("fa4", {"backward": True, "pattern": Pattern("random", 80, 128, 128)}, None),
        ("fa4-det", {"backward": True, "pattern": None}, None),
        ("fa4-det", {"pattern": None}, "a row of its own for gradients of dense attention only"),
        ("fa4-det", {"backward": True}, "a row of its own for gradients of dense attention only"),
        ("fa4-det", {"backward": True, "pattern": None, "dtype": "float32"}, "takes float16 and bfloat16 only"),
        ("portable", {"pattern": None}, "a row of its own in the family sparse only"),
    ],
)
def test_a_peer_says_what_it_cannot_take(installed, name, change, reason):
    problem = replace(VIDEO, **{key: value for key, value in change.items() if hasattr(VIDEO, key)})
    pattern = change.get("pattern", MAIN.pattern)
    found = IMPLEMENTATIONS[name].refuses(Case("sparse", problem, pattern, change.get("backward", False)), "cuda")
    assert found is None if reason is None else found.startswith(reason)


def test_flash_attention_4_has_no_deterministic_gradients_on_sm_120(installed, monkeypatch):
    case = replace(MAIN, family="dense", pattern=None, backward=True)
    assert IMPLEMENTATIONS["fa4-det"].refuses(case, "cuda") is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (12, 0))
    assert IMPLEMENTATIONS["fa4-det"].refuses(case, "cuda") == "its backward has no deterministic form on sm_120"
    assert IMPLEMENTATIONS["fa4"].refuses(case, "cuda") is None


def test_tk_wants_the_gpu_that_it_was_compiled_for(installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert IMPLEMENTATIONS["tk"].refuses(MAIN, "cuda") == "was compiled for sm_90 only"
    assert IMPLEMENTATIONS["tk"].refuses(MAIN, "cpu") == "needs an NVIDIA GPU"


def test_what_is_not_installed_says_so():
    for name, package in (
        ("bsa", "nvidia-cudnn-frontend"),
        ("tk", "fastvideo-kernel"),
        ("fastvideo", "fastvideo-kernel"),
    ):
        if version_of(package) is None:
            assert IMPLEMENTATIONS[name].refuses(MAIN, "cuda") == f"{package} is not installed"
    assert version_of("no-such-distribution") is None
    assert not importable("no_such_package.part")


def test_usual_peers_exist_and_only_some_know_lists():
    for by_device in DEFAULT_PEERS.values():
        for names in by_device.values():
            assert set(names) <= set(IMPLEMENTATIONS)
    lists = {name for name, each in IMPLEMENTATIONS.items() if each.lists}
    assert lists == {"tilefold", "portable", "bsa", "tk", "fastvideo", "fa4", "flex"}
    ours = {name for name, each in IMPLEMENTATIONS.items() if each.ours}
    assert ours == {"tilefold", "non-deterministic", "portable"}
    assert IMPLEMENTATIONS["cudnn"].refuses(Case("sparse", DECODE, Pattern("random", 90)), "cpu") == "needs a GPU"


def test_nondeterministic_is_a_row_where_it_is_another_kernel():
    nondeterministic = IMPLEMENTATIONS["non-deterministic"]
    short = AttentionProblem(1, 64, 64, 2, 2, 64, 64)
    assert "gradients of dense attention only" in nondeterministic.refuses(Case("forward", short), "cpu")
    backward = Case("backward", short, backward=True)
    assert nondeterministic.refuses(backward, "cpu") is None
    with pytest.raises(Unsupported, match="the plan takes attention_backward in either case"):
        nondeterministic.prepare(make_inputs(backward, "cpu"))
