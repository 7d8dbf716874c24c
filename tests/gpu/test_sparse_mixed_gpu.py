"""The fine branch with gates and the other branch in its epilogue, against fp64; and the pipeline that uses it."""

import pytest
import torch

from cases import judge, qkv, rand
from cases.device import DEVICE, captured
from tilefold import BlockIndex, reference, sparse
from tilefold.ops.call import Call
from tilefold.ops.source import Lists
from tilefold.ops.sparse.sparse_mixed import attend_and_fuse
from tilefold.reference.rounding import stored

B, S, H = 2, 500, 4
GATES = [(None, None), ((H,), (B, S, H)), ((B, S, H), None), (None, (H,)), ((B, S, H, 1), (B, S, H, 64))]


def lists(block, layout, **options):
    """Random lists, one of them empty."""
    blocks = -(-S // block)
    chosen = torch.rand(B, H, blocks, blocks) < 0.6
    chosen[:, 0, 0] = False
    index = BlockIndex.from_map(chosen.to(DEVICE), block_q=block, block_k=block, seq_q=S, seq_k=S, **options)
    return index, Call(lists=Lists.of(index), layout=layout)


def held(dim, dtype, block, shapes, layout="bshd", **options):
    q, k, v = qkv(B, S, S, H, 2, dim, dtype=dtype, device=DEVICE)
    index, call = lists(block, layout, **options)
    branch = rand(B, S, H, dim, dtype=dtype, device=DEVICE)
    if "query_sizes" in options:
        past = torch.arange(S, device=DEVICE) % block >= options["query_sizes"].long().repeat_interleave(block)[:S]
        branch[:, past] = 0.0
    gates = [
        None if s is None else rand(*s[:3], *s[3:4] and (min(s[3], dim),), dtype=dtype, device=DEVICE) for s in shapes
    ]

    def mixed():
        fine, _ = reference.sparse_attention(q, k, v, index)
        return reference.fuse(branch, stored(fine), *gates)  # in one launch it is not stored

    given = [q, k, v, branch, *gates]
    if layout == "bhsd":
        given = [g if g is None or g.dim() < 3 else g.transpose(1, 2) for g in given]
    got = attend_and_fuse(*given[:3], call, *given[3:])
    if layout == "bhsd":
        got = got.transpose(1, 2)
    judge(
        got, mixed(), reference.deviating(mixed, dtype), f"out D={dim} {dtype} {block} {shapes} {layout} {[*options]}"
    )


@pytest.mark.parametrize("shapes", GATES)
@pytest.mark.parametrize("block", [64, 128])
def test_gates(shapes, block):
    held(64, torch.bfloat16, block, shapes)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_dtypes_and_layouts(dim, dtype, layout):
    held(dim, dtype, 64, ((B, S, H), (H,)), layout)


def test_sizes():
    sizes = torch.randint(0, 65, (8,), dtype=torch.int32, device=DEVICE)
    held(128, torch.bfloat16, 64, ((H,), (B, S, H)), block_sizes=sizes, query_sizes=sizes.flip(0).clone())


def test_fp32_and_other_heads_take_two_launches():
    held(96, torch.bfloat16, 64, ((H,), None))
    held(64, torch.float32, 64, ((H,), (B, S, H)))


def test_pipeline_with_and_without_stages():
    """One launch or two: apart by the rounding of the fine branch."""
    q, k, v = qkv(1, 1024, 1024, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    gates = {"gate_coarse": rand(1, 1024, 4, device=DEVICE), "gate_fine": rand(1, 1024, 4, device=DEVICE)}
    options = {"select": sparse.SelectOptions(method="top_k", top_k=5), **gates}
    at_once = sparse.sparse_video_attention(q, k, v, **options)
    apart, _ = sparse.sparse_video_attention(q, k, v, return_stages=True, **options)
    assert (at_once.float() - apart.float()).abs().max() <= 2**-7 * apart.float().abs().max()
    assert not torch.equal(at_once, apart)


def test_a_captured_pipeline_selects_anew():
    """Replays with other inputs select other blocks, and are what a fresh call gives."""
    tensors = [*qkv(1, 1024, 1024, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)]
    gate = rand(1, 1024, 4, device=DEVICE)

    def call(**more):
        select = sparse.SelectOptions(method="top_k", top_k=4)
        return sparse.sparse_video_attention(*tensors, select=select, gate_coarse=gate, **more)

    graph, out = captured(call)
    seen = []
    for _ in range(3):
        for t, new in zip(tensors, qkv(1, 1024, 1024, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE), strict=True):
            t.copy_(new)
        graph.replay()
        assert torch.equal(out, call())
        seen.append(call(return_stages=True)[1].index.to_map())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("dim", [64, 128])
def test_other_lengths_and_strides(dim):
    """One after the other in a process: what is kept of the first call has its lengths and strides alone."""
    for length, joined in ((640, True), (640, False), (1280, False), (320, True), (1280, True)):
        q, k, v = torch.randn(1, length, 3, H, dim, dtype=torch.bfloat16, device=DEVICE).unbind(2)
        if not joined:
            q, k, v = q.contiguous(), k.contiguous(), v
        gates = [torch.randn(1, length, H, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        options = {"select": sparse.SelectOptions("top_k", sparsity=0.5), "return_stages": True}
        with torch.no_grad():
            got = sparse.sparse_video_attention(
                q, k, v, gate_coarse=gates[0], gate_fine=gates[1], select=options["select"]
            )
            out, stages = sparse.sparse_video_attention(q, k, v, gate_coarse=gates[0], gate_fine=gates[1], **options)
        want, _ = reference.sparse_attention(q, k, v, stages.index)
        want = reference.fuse(stages.coarse_out, want, *gates)
        for one in (got, out):
            assert (one.double() - want).norm() <= 0.01 * want.norm(), (length, joined)
