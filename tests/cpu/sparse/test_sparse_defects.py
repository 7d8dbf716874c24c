"""Defects that other block-sparse kernels are reported to have, each as a test of the forward pass."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilefold
from cases import qkv, rand
from cases.index import cache, held, lists, plan_of
from tilefold import BlockIndex
from tilefold.ops.launch import Launch
from tilefold.ops.sparse import sparse as sparse_ops


def listed(order, seq_q, seq_k, device, **sizes):
    """One query block whose list is `order`."""
    indices = torch.tensor([[[order]]], dtype=torch.int32, device=device)
    counts = torch.full((1, 1, 1), len(order), dtype=torch.int32, device=device)
    return BlockIndex(indices, counts, 16, 16, seq_q, seq_k, **sizes)


def test_masks_go_by_block_and_not_by_place_in_the_list(device):
    """The valid tokens of a block, the tail of the last one and the causal mask follow the block wherever it is listed."""
    sizes = torch.tensor([16, 2, 16, 7, 6], dtype=torch.int32, device=device)
    q, k, v = qkv(1, 16, 70, 2, 2, 16, device=device)
    results = []
    for order in ([1, 2, 3, 4], [4, 1, 3, 2], [3, 4, 2, 1]):
        index = listed(order, 16, 70, device, block_sizes=sizes)
        results.append(held("sparse_attention", (q, k, v), index, {}, causal=True))
        where = {
            f"cu_seqlens_{side}": torch.tensor([0, n], dtype=torch.int32, device=device)
            for side, n in (("q", 16), ("k", 70))
        }
        same = held("sparse_attention_varlen", (q[0], k[0], v[0]), index, where, causal=True)
        assert torch.equal(same[0], results[-1][0][0]) and torch.equal(same[1], results[-1][1][0])
    for out, lse in results[1:]:
        torch.testing.assert_close(out, results[0][0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(lse, results[0][1], atol=1e-6, rtol=1e-5)


class Allocations(TorchDispatchMode):
    """Numbers of elements of every tensor that an operator makes on memory of its own."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for t in result if isinstance(result, tuple) else (result,):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                self.sizes.append(t.numel())
        return result


@pytest.mark.no_poison  # which fills what it allocates, and would be counted
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", ["sparse_attention", "sparse_attention_varlen", "sparse_attention_paged"])
def test_strided_and_cached_keys_are_taken_as_they_lie(name, splits, monkeypatch, device):
    """No copy of q, k or v and nothing of size [Q, KV]: the kernel is given their own memory, and what is allocated is out, lse
    and, with splits, their parts."""
    seq_q, seq_k, heads, dim = 20, 70, 4, 32
    index, where = lists(1, heads, seq_q, seq_k, device=device), {}
    q = rand(1, 2 * seq_q, heads, 2 * dim, device=device)[:, ::2, :, :dim]
    pool = rand(1, 2 * seq_k, 2, 3, dim, device=device)[:, ::2]  # K and V of a longer, interleaved cache
    tensors = (q, pool[:, :, :, 0], pool[:, :, :, 1])
    if name == "sparse_attention_varlen":
        tensors = tuple(t[0] for t in tensors)
        for side, length in (("q", seq_q), ("k", seq_k)):
            where[f"cu_seqlens_{side}"] = torch.tensor([0, length], dtype=torch.int32, device=device)
    if name == "sparse_attention_paged":
        pages, where = cache([seq_k], 16, d=dim, dv=dim, device=device)
        tensors = (q, *torch.stack(pages[1:], 3).unbind(3))
    assert not any(t.is_contiguous() for t in tensors)
    plan = plan_of(*tensors, index, **where).with_tile(splits=splits)
    run = getattr(tilefold, name)
    run(*tensors, index, **where, plan=plan)  # what is made once for all calls like this one is made here
    launched = []
    monkeypatch.setattr(
        sparse_ops, "check_lists", lambda lists: None
    )  # the interpreter's look at values is no part of the call
    monkeypatch.setattr(Launch, "__call__", lambda self, args: launched.append(args))
    # straight to the kernels though something watches
    monkeypatch.setattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
    with Allocations() as made:
        run(*tensors, index, **where, plan=plan, check=False)
    assert [getattr(t, "base", t).data_ptr() for t in launched[0][:3]] == [t.data_ptr() for t in tensors]
    rows = seq_q * heads
    parts = [splits * rows * dim, splits * rows] if splits > 1 else []
    assert sorted(made.sizes) == sorted([rows * dim, rows, *parts])


@pytest.mark.interpreter
@pytest.mark.parametrize(("part", "place", "value"), [("indices", (0, 0, 0, 1), 2**29), ("indices", (0, 0, 0, 1), -1),
                                                      ("counts", (0, 0, 0), 4), ("counts", (0, 0, 0), -1)])  # fmt: skip
def test_list_values_out_of_range_are_refused_in_the_interpreter(part, place, value, device):
    """On a GPU nobody may read them on the host; here they would end the process."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 16, 80, 2, 2, 16, device=device))
    index = listed([1, 4, 0], 16, 80, device)
    getattr(index, part)[place] = value
    with pytest.raises(tilefold.ValueRangeError, match=rf"index.{part}\[0, 0, 0.*\] is {value}, expected 0 to"):
        tilefold.sparse_attention(q, k, v, index)
    past = listed([1, 4, 7], 16, 80, device)  # what a row does not mean is not looked at
    past.counts.fill_(2)
    tilefold.sparse_attention(q, k, v, past)
