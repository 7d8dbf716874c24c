"""torch.compile, opcheck and FakeTensor: the op is opaque to a tracer and gives the eager result."""

import pytest
import torch

import tilefold
from cases import graph_gives, one_graph, prefix, qkv, rand, relative
from tilefold.ops.call import Call
from tilefold.ops.dense.library import ATTENTION
from tilefold.ops.source import Packed

pytestmark = pytest.mark.no_poison

OPTIONS = {
    "plain": lambda device: {},
    "causal": lambda device: {"causal": True},
    "window": lambda device: {"window": (9, None), "scale": 0.3, "softcap": 4.0},
    "tensors": lambda device: {
        "bias": rand(1, 4, 20, 33, device=device),
        "mask": rand(2, 1, 20, 33, device=device) > -1,
        "alibi_slopes": rand(4, device=device).abs(),
        "sinks": rand(4, device=device),
    },
    "hooks": lambda device: {
        "score_mod": tilefold.constant(relative),
        "score_args": (rand(4, 9, device=device), 4),
        "mask_mod": tilefold.constant(prefix),
        "mask_args": (3,),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_compile_fullgraph(name, device):
    options = OPTIONS[name](device)
    q, k, v = qkv(2, 20, 33, 4, 2, 32, dtype=torch.float16, device=device)

    def layer(q, k, v, **options):
        out, lse = tilefold.attention(2 * q, k, v, return_lse=True, **options)
        return out + 1, lse

    graph_gives(layer, q, k, v, times=2, **options)


def test_compile_with_changing_maxima_windows_and_args(device):
    """Numbers that Dynamo turns into symbols: the ordinary way to train on packed sequences."""
    hook = tilefold.constant(prefix)

    def layer(q, cu, longest, left, first):
        out = tilefold.attention_varlen(q, q, q, cu, cu, longest, longest, causal=True, window=(left, None))
        return out + tilefold.attention_varlen(q, q, q, cu, cu, longest, longest, mask_mod=hook, mask_args=(first,))

    compiled = one_graph(layer, dynamic=True)
    for n in (30, 31, 47):
        q = rand(n, 2, 16, device=device)
        cu = torch.tensor([0, 10, n], dtype=torch.int32, device=device)
        args = (q, cu, n - 10, n // 3, n // 5)
        assert torch.equal(compiled(*args), layer(*args))


EAGER_ONLY = [
    {"causal": 1},
    {"softcap": True},
    {"window": ()},
    {"score_args": (1,)},
    {"window": (1, 2, 3)},
    {"scale": -1.0},
]


@pytest.mark.parametrize("options", EAGER_ONLY)
def test_compiled_calls_refuse_what_eager_calls_refuse(options, device):
    q, k, v = qkv(1, 8, 8, 2, 2, 16, device=device)
    with pytest.raises(tilefold.TilefoldError):
        tilefold.attention(q, k, v, **options)
    with pytest.raises(Exception):  # noqa: B017, PT011 - Dynamo wraps it in its own
        one_graph(lambda q, k, v: tilefold.attention(q, k, v, **options))(q, k, v)


def test_export_names_what_is_missing(device, monkeypatch):
    """An exported graph finds its hook by the hook's content, or says which one is missing."""
    from tilefold import types

    class Layer(torch.nn.Module):
        def forward(self, q):
            return tilefold.attention(q, q, q, mask_mod=HOOK, mask_args=(3,))

    q = rand(1, 20, 2, 16, device=device)
    exported = torch.export.export(Layer(), (q,), strict=True).module()
    want = Layer()(q)
    assert torch.equal(exported(q), want)
    assert tilefold.constant(prefix) == HOOK
    monkeypatch.setattr(types, "_CONSTANTS", {})
    with pytest.raises(tilefold.Unsupported, match="prefix"):
        exported(q)


HOOK = tilefold.constant(prefix)


def test_tensor_subclasses_see_an_operator(device):
    from torch.testing._internal.two_tensor import TwoTensor

    q, k, v = qkv(1, 8, 8, 2, 2, 16, device=device)
    out = tilefold.attention(q, TwoTensor(k, k), TwoTensor(v, v))
    assert torch.equal(out.a, tilefold.attention(q, k, v))


def test_meta_tensors_give_shapes():
    q = torch.empty(2, 20, 4, 32, device="meta")
    assert tilefold.attention(q, q, q).shape == q.shape


def test_plan_travels_through_the_dispatcher(device):
    q, k, v = qkv(2, 20, 33, 4, 2, 32, device=device)
    plan = tilefold.constant(tilefold.attention_plan(q, k, v).with_tile(block_m=16, block_n=16))
    graph_gives(lambda q, k, v: tilefold.attention(q, k, v, plan=plan), q, k, v)


def test_bare_hooks_are_refused_inside_compile(device):
    q, k, v = qkv(2, 20, 33, 4, 2, 32, device=device)
    table = rand(4, 9, device=device)

    def layer(q, k, v):
        return tilefold.attention(q, k, v, score_mod=relative, score_args=(table, 4))

    with pytest.raises(Exception):  # noqa: B017, PT011 - by tilefold, or by a Dynamo that cannot look at the function
        one_graph(layer)(q, k, v)


def test_constants_in_eager_calls(device):
    q, k, v = qkv(2, 20, 33, 4, 2, 32, device=device)
    hook = {"score_mod": relative, "score_args": (rand(4, 9, device=device), 4)}
    named = {**hook, "score_mod": tilefold.constant(relative)}
    assert torch.equal(tilefold.attention(q, k, v, **named), tilefold.attention(q, k, v, **hook))
    assert tilefold.attention_plan(q, k, v, **named) == tilefold.attention_plan(q, k, v, **hook)


def test_errors_come_at_trace_time(device):
    q, k, v = qkv(2, 20, 33, 4, 2, 32, device=device)
    compiled = one_graph(lambda q, k, v: tilefold.attention(q, k, v))
    with pytest.raises(Exception, match="heads of q must be a multiple"):
        compiled(q[:, :, :3], k, v)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_opcheck(layout, device):
    q, k, v = qkv(2, 20, 33, 4, 2, 32, device=device)
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    bias, sinks = rand(1, 4, 1, 33, device=device), rand(4, device=device)
    call = Call(causal=True, layout=layout, bias=bias, sinks=sinks)
    torch.library.opcheck(ATTENTION.op, ATTENTION.flat(q, k, v, call))


def test_opcheck_varlen(device):
    q, k, v = (rand(30, 2, 16, device=device) for _ in range(3))
    cu = torch.tensor([0, 10, 30], dtype=torch.int32, device=device)
    call = Call(window=(5, 0), scale=0.2, softcap=1.0, source=Packed(cu, cu, 20, 20))
    torch.library.opcheck(ATTENTION.op, ATTENTION.flat(q, k, v, call))


def test_fake_tensors_launch_nothing(device):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(2, 20, 4, 32, device=device) for _ in range(3))
        out, lse = tilefold.attention(q, k, v, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (2, 4, 20)
