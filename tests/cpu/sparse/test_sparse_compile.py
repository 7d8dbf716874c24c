"""Block-sparse attention under torch.compile, opcheck and FakeTensor: its operators are opaque to a tracer, results are eager."""

import pytest
import torch

import tilefold
from cases import graph_gives, looped, one, one_graph, packed, prefix, qkv, rand, relative, same
from cases.index import cache, held, lists
from tilefold.ops.call import Call
from tilefold.ops.source import Lists, Paged
from tilefold.ops.sparse.sparse_library import SPARSE, SPARSE_PAGED, Turned

pytestmark = pytest.mark.no_poison

OPTIONS = {
    "plain": lambda device: {},
    "causal": lambda device: {"causal": True, "scale": 0.3, "softcap": 4.0},
    "hooks": lambda device: {
        "score_mod": tilefold.constant(relative),
        "score_grad": tilefold.constant(one),
        "score_args": (rand(2, 9, device=device), 4),
    },
}


@pytest.mark.parametrize("name", [*OPTIONS, "packed"])
def test_compile_fullgraph(name, device):
    """Forward and backward, with the index as an argument."""
    if name == "packed":
        tensors, offsets = packed([20, 0, 17], [40, 30, 17], 2, 1, device=device)
        fn, options, where = tilefold.sparse_attention_varlen, {"causal": True}, offsets[:2]
        index = lists(3, 2, 20, 40, device=device)
    else:
        fn, options, where = tilefold.sparse_attention, OPTIONS[name](device), ()
        tensors = qkv(2, 17, 32, 2, 1, 16, dtype=torch.float16, device=device)
        index = lists(2, 2, 17, 32, device=device)

    def layer(q, k, v, index, *where):
        out, lse = fn(2 * q, k, v, index, *where, return_lse=True, **options)
        return out + 1, lse

    graph_gives(layer, *(t.requires_grad_() for t in tensors), index, *where, times=2)


def test_compile_and_opcheck_over_pages(device):
    """Lengths change in place; lists stay, and so does the plan: what a captured graph does.  The operator passes torch's own
    checks."""
    tensors, where = cache([70, 60], 16, device=device)
    index = lists(2, 4, 20, 70, density=1.0, device=device)
    options = {"causal": True, "return_lse": True, "mask_mod": tilefold.constant(prefix), "mask_args": (4,)}
    compiled = one_graph(lambda q, k, v, i, *w: tilefold.sparse_attention_paged(q, k, v, i, *w, **options))
    for lengths in ([70, 33], [1, 0], [17, 0], [70, 60]):
        where["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        traced = compiled(*tensors, index, *where.values())
        assert same(traced, tilefold.sparse_attention_paged(*tensors, index, **where, **options))
        held("sparse_attention_paged", tensors, index, where, causal=True)
    call = Call(lists=Lists.of(index), causal=True, source=Paged(*where.values()))
    some = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(SPARSE_PAGED.op, SPARSE_PAGED.flat(*tensors, call), test_utils=some)


def test_compile_without_gradients_transposes_nothing(device):
    """The transposed lists are inputs of the op only where a gradient may be asked for."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    q, k, v = qkv(1, 32, 48, 2, 2, 16, device=device)
    index = lists(1, 2, 32, 48, device=device)
    compiled = torch.compile(lambda q, k, v: tilefold.sparse_attention(q, k, v, index), fullgraph=True, backend=keep)
    assert torch.equal(compiled(q, k, v), tilefold.sparse_attention(q, k, v, index))
    assert "cumsum" not in graphs[0].code


def test_opcheck(device):
    index = lists(1, 2, 33, 48, device=device)
    q, k, v = (t.requires_grad_() for t in qkv(1, 33, 48, 2, 1, 16, device=device))
    turned = Turned(*index.transpose().tensors()[:2])
    plain = Call(lists=Lists.of(index), causal=True)
    modded = plain._replace(score_mod=relative, score_args=(rand(2, 9, device=device), 4), score_grad=one)
    for call in (plain, modded):
        torch.library.opcheck(SPARSE.op, SPARSE.flat(q, k, v, call, turned))
    for given, match in (
        ((plain, None), "needs the transposed lists"),
        ((plain._replace(score_mod=looped), turned), "give score_grad"),
    ):
        out, _ = SPARSE.dispatched(q, k, v, *given)
        with pytest.raises(tilefold.Unsupported, match=match):
            out.sum().backward()


def test_fake_tensors(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    index = lists(1, 2, 33, 48, device=device)
    q, k, v = qkv(1, 33, 48, 2, 1, 16, 24, dtype=torch.float16, device=device)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out, lse = tilefold.sparse_attention(*(mode.from_tensor(t) for t in (q, k, v)), index, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((1, 33, 2, 24), torch.float16, (1, 2, 33), torch.float32)


def test_functorch_grad(device):
    index = lists(1, 2, 33, 48, device=device)
    q, k, v = qkv(1, 33, 48, 2, 1, 16, device=device)
    got = torch.func.grad(lambda q: tilefold.sparse_attention(q, k, v, index).square().sum())(q)
    inputs = q.clone().requires_grad_()
    (want,) = torch.autograd.grad(tilefold.sparse_attention(inputs, k, v, index).square().sum(), inputs)
    assert torch.equal(got, want)


@pytest.mark.interpreter  # on a GPU Dynamo takes a jit function for a kernel, and some versions stop there in their own words
def test_a_mod_without_a_name_is_refused_inside_a_graph(device):
    index = lists(1, 2, 33, 48, device=device)
    q, k, v = qkv(1, 33, 48, 2, 1, 16, device=device)
    table = rand(2, 9, device=device)

    def layer(q, k, v):
        return tilefold.sparse_attention(q, k, v, index, score_mod=relative, score_args=(table, 4))

    with pytest.raises(Exception, match=r"tilefold\.constant"):
        one_graph(layer)(q, k, v)
