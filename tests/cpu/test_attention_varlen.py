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


@pytest.mark.interpreter
@pytest.mark.parametrize("offsets", [[0, 30], [0, 20, 10, 27], [-1, 27]])
def test_offsets_are_checked_in_the_interpreter(offsets):
    (q, k, v), (cu, _, _, _) = packed([20, 7], [20, 7])
    bad = torch.tensor(offsets, dtype=torch.int32)
    with pytest.raises(tilefold.ValueRangeError, match="cu_seqlens_q must ascend"):
        tilefold.attention_varlen(q, k, v, bad, bad, 20, 20)
