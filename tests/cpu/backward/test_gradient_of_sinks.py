"""The launches that make the gradient of sinks beside kernels which keep delta for themselves."""

import pytest
import torch

import tilefold
from cases import packed, qkv
from cases.gradient import gradients, upstream
from tilefold.ops.backward.attention_backward_sinks import SinksBound
from tilefold.ops.call import Call
from tilefold.ops.dense.attention import prepare
from tilefold.ops.source import Packed


@pytest.mark.parametrize("with_lse", [True, False])
@pytest.mark.parametrize("case", ["dense", "bhsd", "packed"])
def test_beside_another_kernel(device, case, with_lse):
    """The same bits as beside the portable kernels, in any layout; rows that see no key, and sinks that weigh nothing or all."""
    sinks, where, source = torch.tensor([0.3, -torch.inf, 20.0, -2.0], device=device), None, None
    layout = "bhsd" if case == "bhsd" else "bshd"
    if case == "packed":
        (q, k, v), where = packed([33, 0, 5], [20, 4, 7], dtype=torch.float16, device=device)
        source = Packed(*where)
    else:
        q, k, v = qkv(2, 33, 20, 4, 2, 32, dtype=torch.float16, device=device)
    if case == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    options = {"causal": True, **({} if where else {"layout": layout})}
    dout, dlse = upstream(q, v, layout, with_lse)
    *_, want = gradients((q, k, v), dout, dlse, where, sinks=sinks, **options)
    attend = tilefold.attention if where is None else tilefold.attention_varlen
    out, lse = attend(q, k, v, *(where or ()), sinks=sinks, return_lse=True, **options)
    call = Call(causal=True, layout=layout, sinks=sinks, source=source)
    bound = SinksBound.of(prepare(q, k, v, call).problem, out, dout, call)
    assert torch.equal(bound.gradient(out, dout, lse, dlse, call), want)
    assert (want[[0, 3]] != 0).all() and want[1] == 0
