"""The launches that make the gradients of sinks, biases and score_args beside kernels which keep delta for themselves."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

import tilefold
from cases import packed, qkv, rand
from cases.gradient import BOX_BACKWARD, gradients, small_backward, upstream
from tilefold import masks
from tilefold.errors import PlanError
from tilefold.ops.backward.attention_backward import _terms_bound, backward_plan_of
from tilefold.ops.backward.attention_backward_loads import elements_of, needed
from tilefold.ops.backward.attention_backward_terms import TermsBound
from tilefold.ops.backward.backward_parts import statistics_by
from tilefold.ops.call import Call
from tilefold.ops.dense.attention import prepare
from tilefold.ops.source import Packed
from tilefold.plan import device_named
from tilefold.plan.backward.attention_backward import plan_attention_backward
from tilefold.plan.backward.attention_backward_reduce import KERNEL, ReduceOptions


@triton.jit
def by_key(score, batch, head, q_index, kv_index, args):
    return score + tl.load(args[0] + kv_index)


def beside(tensors, given, call, wanted):
    """Of the bias, the sinks and the tensors of score_args, as behind a Gluon kernel; given: dout, lse, dlse."""
    dout, lse, dlse = given
    loads = needed(call, wanted[2:])
    bias = tuple(call.bias.shape[:3]) if call.bias is not None and wanted[0] else ()
    prepared = prepare(*tensors[:3], call)
    plan = plan_attention_backward(prepared.problem, prepared.planned.device, bias, loads=elements_of(call, loads))
    bound = _terms_bound(prepared, plan, tensors, (dout, dlse), call, loads)
    rows = statistics_by(bound.delta, tensors[3], dout, lse, dlse)
    return bound.gradients((*tensors[:3], dout, *rows), call, wanted)


@pytest.mark.parametrize("with_lse", [True, False])
@pytest.mark.parametrize("case", ["dense", "bhsd", "packed"])
def test_sinks_beside_another_kernel(device, case, with_lse):
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
    _, got = beside((q, k, v, out), (dout, lse, dlse), call, [False, True])
    assert torch.equal(got, want)
    assert (want[[0, 3]] != 0).all() and want[1] == 0


@pytest.mark.parametrize("shape", [(1, 4, 33, 20), (2, 1, 33, 20), (2, 4, 1, 20)], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_bias_and_tables_beside_another_kernel(device, layout, shape):
    """The same bits as beside the portable kernels: a bias shared by sequences, heads or queries, and a table that a score_mod
    reads behind it."""
    q, k, v = qkv(2, 33, 20, 4, 2, 32, dtype=torch.bfloat16, device=device)
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    bias, table = rand(*shape, dtype=torch.bfloat16, device=device), rand(33, dtype=torch.float32, device=device)
    table.requires_grad_()
    options = {"causal": True, "layout": layout, "bias": bias, "score_mod": by_key, "score_args": (table,)}
    dout, _ = upstream(q, v, layout, False)
    *_, of_bias, of_table = gradients((q, k, v), dout, None, **options)
    with torch.no_grad():
        out, lse = tilefold.attention(q, k, v, return_lse=True, **options)
    call = Call(causal=True, layout=layout, bias=bias, score_mod=by_key, score_args=(table,))
    dbias, dsinks, dtable = beside((q, k, v, out), (dout, lse, None), call, [True, False, True])
    assert torch.equal(dbias, of_bias) and torch.equal(dtable, of_table) and dsinks is None
    assert dbias.any() and dtable.any()


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"mask": masks.prefix(21)}], ids=["full", "causal", "prefix"]
)
@pytest.mark.parametrize("shape", [(2, 1), (1, 4)], ids=str)
def test_by_boxes(device, options, shape):
    """What boxes bring is what pointers do; each sequence of a prefix has a band of its own."""
    q, k, v = qkv(2, 40, 56, 4, 2, 32, dtype=torch.float16, device=device)
    options = options | {"bias": rand(*shape, 40, 56, dtype=torch.float16, device=device)}
    dout, _ = upstream(q, v, "bshd", False)
    tiles = [
        small_backward((q, k, v), (16, 16), kernel, None, None, options)
        for kernel in ("attention_backward", BOX_BACKWARD)
    ]
    pointers, boxes = (gradients((q, k, v), dout, None, backward_plan=plan, **options) for plan in tiles)
    assert all(torch.equal(a, b) for a, b in zip(pointers, boxes, strict=True))
    assert pointers[3].any()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (50, 20)}], ids=str)
@pytest.mark.parametrize("shape", [(1, 4), (2, 1), (1, 1), (2, 4)], ids=str)
def test_ds_that_is_stored(device, options, shape):
    """dS [B, H, keys, queries] in whole tiles, summed up over what shares the bias, at once and in shares; what the band hides
    was not written."""
    bias = rand(*shape, 200, 150, dtype=torch.float16, device=device)
    tensors = qkv(2, 200, 150, 4, 2, 64, dtype=torch.float16, device=device)
    q, k, v = tensors
    call = Call(bias=bias, **options)
    problem = replace(prepare(*tensors, call).problem, bias_descriptors="tiles", descriptors=True)
    late = ReduceOptions(ordered=True, late=True)
    plan = plan_attention_backward(problem, device_named("h200"), tuple(bias.shape[:3]), portable=True)
    plan = plan.with_tiles(kernel=KERNEL, options=replace(late, stored=True))
    stored = torch.full((2 * 4, 256, 256), torch.nan, dtype=torch.float16, device=device)
    stored[:, :150, :200] = rand(8, 150, 200, dtype=torch.float16, device=device)
    where = torch.arange(150, device=device) - torch.arange(200, device=device)[:, None] - (150 - 200)
    left, right = options.get("window", (200, 0 if options else 200))
    seen = (where <= right) & (where >= -left)
    want = stored[:, :150, :200].double().mT.where(seen, 0.0).view(2, 4, 200, 150).sum_to_size(bias.shape)
    stored[:, :150, :200] = stored[:, :150, :200].where(seen.T, torch.nan)
    for shares in {1, min(3, 8 // bias.shape[:2].numel())}:
        bound = TermsBound.of(problem, plan.with_tiles(bias_shares=shares), (q, k, v, q), q, call)
        got, _ = bound.gradients((q, k, v, q), call, [True, False], stored.view(-1, 256))
        assert (got.double() - want).abs().max() <= 2e-3 * want.abs().max()
        assert not got[..., ~seen].any()


def test_a_plan_that_stores_ds_is_given(device):
    """Of training, when the bias is learned no more; and a bias of another dtype."""
    q, k, v = qkv(1, 512, 512, 2, 2, 64, dtype=torch.bfloat16, device=device)
    bias, h200 = rand(1, 2, 512, 512, dtype=torch.bfloat16, device=device), device_named("h200")
    call = Call(bias=bias)
    problem = replace(prepare(q, k, v, call).problem, descriptors=True, query_descriptors=True)
    plan = backward_plan_of(problem, call, q, True, on=h200)
    assert plan.stores_ds and backward_plan_of(problem, call._replace(backward_plan=plan), q, True, on=h200) is plan
    assert not backward_plan_of(problem, call._replace(backward_plan=plan), q, False, on=h200).stores_ds
    wide = Call(bias=bias.float(), backward_plan=plan)
    assert not backward_plan_of(problem, wide._replace(backward_plan=None), q, True, on=h200).stores_ds
    with pytest.raises(
        PlanError, match="stores dS in torch.bfloat16 for the gradient of the bias, which is torch.float32"
    ):
        backward_plan_of(problem, wide, q, True, on=h200)


def test_what_pads_a_bias_stays_out_of_its_gradient(device):
    """Rows and keys behind a packed sequence's end, whatever lies there, get 0."""
    (q, k, v), where = packed([20, 9], [20, 9], dtype=torch.float16, device=device)
    bias = rand(2, 4, 20, 20, dtype=torch.float16, device=device)
    dout, _ = upstream(q, v, "bshd", False)
    *_, clean = gradients((q, k, v), dout, None, where, bias=bias)
    bias[1, :, 9:] = torch.nan
    bias[1, :, :, 9:] = torch.nan
    *_, padded = gradients((q, k, v), dout, None, where, bias=bias)
    assert torch.equal(padded, clean)
    assert not padded[1, :, 9:].any() and not padded[1, :, :, 9:].any()


def test_heads_that_lie_far_apart(device):
    """The third KV head begins more than 2 ** 31 elements behind the first."""
    q, k, v = qkv(1, 16, 16, 3, 3, 16, dtype=torch.float16, device=device)
    bias, (dout, _) = rand(1, 3, 16, 16, dtype=torch.float16, device=device), upstream(q, v, "bshd", False)
    stride = (1 << 30) + 64
    far = torch.empty(2 * stride + 256, dtype=torch.float16, device=device).as_strided(k.shape, (0, 16, stride, 1))
    far.copy_(k)
    near, apart = (gradients((q, each, v), dout, None, bias=bias) for each in (k, far))
    assert all(torch.equal(a, b) for a, b in zip(near, apart, strict=True))
