"""Packed sequences against the fp64 oracle: odd and zero lengths, per-sequence alignment, options, rows of no sequence."""

import pytest
import torch

import tilefold
from cases import check, packed, prefix, prefix_twin, rand, relative, relative_twin

LENGTHS = [
    ([20, 0, 33, 1], [10, 30, 0, 5]),
    ([17], [40]),
    ([0, 0], [3, 4]),
    ([64, 31], [64, 31]),
    ([5, 40, 16], [90, 2, 16]),
]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("band", [{}, {"causal": True}, {"window": (9, 3)}, {"causal": True, "window": (12, None)}])
def test_lengths(lengths, band, device):
    tensors, where = packed(*lengths, device=device)
    if where[2] == 0:
        out, lse = tilefold.attention_varlen(*tensors, *where, return_lse=True, **band)
        assert out.shape == (0, 4, 32)
        assert lse.shape == (4, 0)
    else:
        check(*tensors, varlen=where, **band)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_and_dims(dtype, device):
    tensors, where = packed([20, 7], [33, 12], d=40, dv=24, dtype=dtype, device=device)
    check(*tensors, varlen=where, causal=True)


def test_strides(device):
    """q, k and v cut from one fused projection."""
    _, where = packed([20, 7], [20, 7], device=device)
    q, k, v = rand(27, 3, 4, 32, device=device).unbind(1)
    check(q, k, v, varlen=where, causal=True)


def test_options(device):
    tensors, where = packed([20, 0, 33], [10, 30, 25], device=device)
    check(
        *tensors, varlen=where, softcap=2.0, alibi_slopes=rand(3, 4, device=device).abs(), sinks=rand(4, device=device)
    )
    check(*tensors, varlen=where, bias=rand(3, 4, 33, 30, device=device), mask=rand(1, 1, 33, 30, device=device) > -0.5)
    check(*tensors, varlen=where, bias=rand(1, 4, 1, 30, device=device), causal=True)
    check(*tensors, varlen=where, mask_mod=prefix, mask_args=(4,), twins={"mask_mod": prefix_twin})
    hook = {"score_mod": relative, "score_args": (rand(4, 9, device=device), 4)}
    check(*tensors, varlen=where, **hook, twins={"score_mod": relative_twin}, causal=True)


def test_maxima_may_be_loose(device):
    tensors, (cu_q, cu_k, max_q, max_k) = packed([20, 7], [33, 12], device=device)
    check(*tensors, varlen=(cu_q, cu_k, max_q + 50, max_k + 50), causal=True)


def test_rows_of_no_sequence_are_left_alone(device):
    """The poisoned output shows which rows were written."""
    (q, k, v), (cu_q, cu_k, max_q, max_k) = packed([20, 7], [33, 12], device=device)
    extra = rand(5, 4, 32, device=device)
    out, lse = tilefold.attention_varlen(torch.cat([q, extra]), k, v, cu_q, cu_k, max_q, max_k, return_lse=True)
    assert not out[:27].isnan().any()
    assert out[27:].isnan().all()
    assert lse[:, 27:].isnan().all()


def test_equals_dense(device):
    """Equal lengths give the bits of the dense call under the same tiles."""
    (q, k, v), where = packed([20, 20, 20], [33, 33, 33], device=device)
    out, lse = check(q, k, v, varlen=where, causal=True)
    dense = [t.view(3, -1, *t.shape[1:]) for t in (q, k, v)]
    plan = tilefold.attention_plan(*dense, causal=True).with_tile(block_m=16, block_n=16, num_warps=4, num_stages=2)
    same, same_lse = tilefold.attention(*dense, causal=True, return_lse=True, plan=plan)
    assert torch.equal(same.view_as(out), out)
    assert torch.equal(same_lse.transpose(0, 1).reshape_as(lse), lse)


def packed_calls(offsets, longest, check, device):
    """Every public function that takes cu_seqlens, over the same 30 rows."""
    x = rand(30, 2, 16, device=device)
    cu = torch.tensor(offsets, dtype=torch.int32, device=device)
    batch = len(offsets) - 1
    cache = rand(batch, 40, 2, 16, device=device)
    lengths = torch.full((batch,), 30, dtype=torch.int32, device=device)
    angles = torch.ones(64, 4, device=device)
    index = tilefold.BlockIndex.from_map(torch.ones(1, 1, -(-longest // 16), -(-longest // 16), dtype=torch.bool, device=device),
                                         block_q=16, block_k=16, seq_q=longest, seq_k=longest)  # fmt: skip
    yield "max_seqlen_q", lambda: tilefold.attention_varlen(x, x, x, cu, cu, longest, longest, check=check)
    yield "index.seq_q", lambda: tilefold.sparse_attention_varlen(x, x, x, index, cu, cu, check=check)
    yield "max_seqlen", lambda: tilefold.apply_rotary(x, angles, angles, cu_seqlens=cu, max_seqlen=longest, check=check)
    held = {"cache_seqlens": lengths, "check": check}
    yield (
        "max_seqlen_q",
        lambda: tilefold.attention_kvcache(x, cache, cache, cu_seqlens_q=cu, max_seqlen_q=longest, **held),
    )
    yield (
        "max_seqlen_q",
        lambda: tilefold.attention_shared_prefix(
            x, cache, cache, prefix_length=0, cu_seqlens_q=cu, max_seqlen_q=longest, **held
        ),
    )
    yield (
        "max_seqlen",
        lambda: tilefold.kvcache_append(
            x, x, cache, cache, cu_seqlens=cu, max_seqlen=longest, cache_seqlens=0 * lengths, check=check
        ),
    )


READ = [pytest.param(None, marks=pytest.mark.interpreter), True]


@pytest.mark.parametrize("check", READ)
@pytest.mark.parametrize("which", range(6))
def test_offsets_that_do_not_begin_at_0_are_refused(which, check, device):
    """Where they can be read without waiting, and on request; the rows before them would be computed by nobody."""
    _, call = list(packed_calls([3, 20, 30], 17, check, device))[which]
    with pytest.raises(tilefold.ValueRangeError, match=r"cu_seqlens\w* must begin at 0, got \[3, 20, 30\]: the 3 rows"):
        call()
    _, call = list(packed_calls([0, 17, 27], 17, check, device))[which]
    call()


@pytest.mark.parametrize("check", READ)
@pytest.mark.parametrize("which", range(6))
def test_a_max_seqlen_below_the_longest_is_refused(which, check, device):
    name, call = list(packed_calls([0, 17, 30], 16, check, device))[which]
    with pytest.raises(tilefold.ValueRangeError, match=rf"{name} (must be at least 17, .* got 16|is 16, but)"):
        call()


@pytest.mark.interpreter
@pytest.mark.parametrize("offsets", [[0, 30], [0, 20, 10, 27], [-1, 27]])
def test_offsets_are_checked_in_the_interpreter(offsets):
    (q, k, v), (cu, _, _, _) = packed([20, 7], [20, 7])
    bad = torch.tensor(offsets, dtype=torch.int32)
    with pytest.raises(tilefold.ValueRangeError, match="cu_seqlens_q must ascend"):
        tilefold.attention_varlen(q, k, v, bad, bad, 20, 20)
