"""tilefold as torch's flash attention: the operators by themselves, under autograd and torch.compile, packed, what is kept, and
taking it back.  They are put into the dispatcher for CPU tensors here, where torch has none."""

import importlib.metadata
import importlib.util
from functools import partial

import pytest
import torch
from torch.nn import attention as registry

import tilefold
from cases import graph_gives, hold, hold_back, packed, qkv, rand, same
from cases.gradient import WHERE
from tilefold import Unsupported, reference
from tilefold.integrations import torch_flash
from tilefold.integrations.torch_flash import CALLS

pytest.importorskip("torch.nn.attention.varlen")
if not hasattr(registry, "register_flash_attention_impl"):
    pytest.skip("torch 2.11 has what this needs", allow_module_level=True)
from torch.nn.attention import varlen

pytestmark = pytest.mark.interpreter
HALVES = [torch.float16, torch.bfloat16]
OPS = torch.ops.aten


@pytest.fixture(autouse=True)
def _counted():
    CALLS.clear()


@pytest.fixture
def door():
    handle = torch_flash.activate("CPU")
    yield handle
    handle.remove()


def flash(q, k, v, causal=False, dropout_p=0.0, **options):
    """As torch's SDPA calls it, with its result."""
    return OPS._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, causal, False, **options
    )


def leaves(*tensors):
    return [t.detach().requires_grad_() for t in tensors]


# How q, k and v of [2, rows, heads, 32] may lie in memory.
MEMORY = {
    "rows first": lambda t: t.contiguous(),
    "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "sequences inside": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "a part of qkv": lambda t: torch.stack((t, t), 2)[:, :, 1],
    "a part of heads": lambda t: torch.cat((t, t), 3)[..., : t.shape[3]],
}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", HALVES)
def test_both_passes_in_every_memory_layout(door, dtype, memory):
    """fp64, torch's own for the CPU, and the strides that compiled code is told."""
    given = [MEMORY[memory](t) for t in qkv(2, 37, 37, 4, 4, 32, dtype=dtype)]
    q, k, v = leaves(*given)
    results = flash(q, k, v, causal=True, scale=0.3)
    grad = MEMORY[memory](rand(2, 37, 4, 32, dtype=dtype))
    _, _, *grads = hold_back(results[:2], reference.attention, q, k, v, back=[grad], causal=True, scale=0.3)
    assert (CALLS.forward, CALLS.backward, CALLS.kept.total()) == (1, 1, 0)
    for mine, t in zip((results[0], *grads), (q, q, k, v), strict=True):
        assert mine.stride() == torch.empty_like(t).stride()
    theirs = OPS._scaled_dot_product_flash_attention_for_cpu(
        *(t.transpose(1, 2) for t in given), is_causal=True, scale=0.3
    )[0]
    hold(theirs.transpose(1, 2), reference.attention, *given, what="of torch", causal=True, scale=0.3)


@pytest.mark.parametrize(
    ("sq", "sk", "heads", "kv", "dim", "options"),
    [
        (1, 70, 8, 1, 64, {"causal": True}),
        (33, 50, 7, 1, 40, {"causal": True}),
        (50, 33, 4, 2, 96, {"causal": True}),  # rows without a key
        (40, 40, 4, 2, 16, {"window_size_left": 9, "window_size_right": 0}),
        (40, 40, 4, 2, 16, {"window_size_left": 5, "causal": True}),
        (40, 21, 2, 2, 8, {"window_size_left": -1, "window_size_right": 3, "scale": 1.0}),
    ],
)
def test_shapes_and_windows(door, sq, sk, heads, kv, dim, options):
    q, k, v = leaves(*qkv(1, sq, sk, heads, kv, dim, dtype=torch.bfloat16))
    out, lse, *_ = flash(q, k, v, **options)
    grad = rand(*out.shape, dtype=out.dtype)
    sides = tuple(options.pop(f"window_size_{side}", -1) for side in ("left", "right"))
    hold_back((out, lse), reference.attention, q, k, v, back=[grad], window=sides, **options)


@pytest.mark.parametrize("memory", ["rows first", "heads first"])
def test_usual_memory_layouts_are_not_copied(door, monkeypatch, memory):
    """What SDPA is given by models: views of projections, and tensors with heads first."""
    monkeypatch.setattr(torch, "empty_like", None)
    q, k, v = leaves(*(MEMORY[memory](t) for t in qkv(2, 9, 9, 2, 2, 16, dtype=torch.float16)))
    out = flash(q, k, v)[0]
    torch.autograd.grad(out, (q, k, v), rand(2, 9, 2, 16, dtype=torch.float16))
    assert out.stride() == q.stride()


def test_nothing_to_do(door):
    q = torch.empty(0, 5, 2, 16, dtype=torch.float16, requires_grad=True)
    out, lse, *_ = flash(q, q, q)
    out.sum().backward()
    assert out.shape == q.shape == q.grad.shape and lse.shape == (0, 2, 5)


def test_a_gradient_from_sum(door):
    """Every element of it lies at one address."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 19, 19, 2, 2, 32, dtype=torch.float16))
    flash(q, k, v)[0].sum().backward()
    assert CALLS.backward == 1
    again = torch.autograd.grad(tilefold.attention(q, k, v).sum(), (q, k, v))
    assert same((q.grad, k.grad, v.grad), again)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (11, 0)])
@pytest.mark.parametrize("dtype", HALVES)
def test_varlen_attn(door, dtype, window):
    """torch's function over the operator: an empty sequence, odd lengths, grouped heads, lse."""
    (q, k, v), place = packed([37, 0, 5, 64], [37, 3, 21, 64], dtype=dtype)
    mine = leaves(q, k, v)
    out, lse = varlen.varlen_attn(
        *mine, *place, window_size=window, enable_gqa=True, return_aux=varlen.AuxRequest(lse=True)
    )
    grad = rand(*out.shape, dtype=dtype)
    hold_back(
        (out, lse),
        partial(reference.attention_varlen, **dict(zip(WHERE, place, strict=True)), window=window),
        *mine,
        back=[grad],
    )
    assert (CALLS.forward, CALLS.backward, CALLS.kept.total()) == (1, 1, 0)


@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="torch 2.13 has varlen_attn_out")
def test_varlen_attn_out(door):
    (q, k, v), place = packed([9, 30], [9, 30], dtype=torch.float16)
    out = torch.empty_like(q)
    made = varlen.varlen_attn_out(out, q, k, v, *place, enable_gqa=True)
    assert made is out
    assert torch.equal(out, varlen.varlen_attn(q, k, v, *place, enable_gqa=True))


def test_jagged_tensors(door, monkeypatch):
    """As torch takes them apart where it chooses flash attention, which it does for CUDA."""
    sdpa = pytest.importorskip("torch.nested._internal.sdpa")
    monkeypatch.setattr(sdpa, "_select_sdp_backend", lambda *_: registry.SDPBackend.FLASH_ATTENTION)
    lengths = [19, 1, 40]
    (q, k, v), place = packed(lengths, lengths, h=4, hk=4, dtype=torch.bfloat16)
    nested = [torch.nested.nested_tensor_from_jagged(t, place[0].long()).detach().requires_grad_() for t in (q, k, v)]
    heads = [t.transpose(1, 2) for t in nested]
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    grad = rand(*q.shape, dtype=torch.bfloat16)
    grads = torch.autograd.grad(out, nested, torch.nested.nested_tensor_from_jagged(grad, nested[0].offsets()))
    assert (CALLS.forward, CALLS.backward, CALLS.kept.total()) == (1, 1, 0)
    mine = leaves(q, k, v)
    want = tilefold.attention_varlen(*mine, *place, causal=True)
    assert torch.equal(out.values(), want)
    assert same([t.values() for t in grads], torch.autograd.grad(want, mine, grad))


@pytest.mark.parametrize("packing", [False, True])
def test_dropout_is_the_same_in_both_passes(door, packing):
    """By the seed that the state holds, as `attention` drops by it."""
    (q, k, v), place = packed([20, 33], [20, 33], dtype=torch.float16)
    mine, other = leaves(q, k, v), leaves(q, k, v)
    if packing:
        out, _, state, *_ = OPS._flash_attention_forward(*mine, *place, 0.3, True, False)
        seed = state.view(torch.int64)[:1]
        want = tilefold.attention_varlen(*other, *place, causal=True, dropout_p=0.3, dropout_seed=seed)
    else:
        out, _, state, *_ = flash(*(t[None] for t in mine), causal=True, dropout_p=0.3)
        seed = state.view(torch.int64)[:1]
        want = tilefold.attention(*(t[None] for t in other), causal=True, dropout_p=0.3, dropout_seed=seed)
    assert torch.equal(out, want)
    grad = rand(*out.shape, dtype=out.dtype)
    assert same(torch.autograd.grad(out, mine, grad), torch.autograd.grad(want, other, grad))
    assert (CALLS.forward, CALLS.backward) == (1, 1)
    first, second = (flash(q[None], k[None], v[None], dropout_p=0.3)[2] for _ in range(2))
    assert not torch.equal(first, second)


# ---------------------------------------------------------------- compiled


@pytest.mark.no_poison
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(door, backend):
    """Fullgraph, both passes: what torch's fake kernels say is so.  A call for each layout in memory, all in one graph; inductor,
    which compiles each, has those that are not as a result of torch would lie."""
    memory = MEMORY.values() if backend == "aot_eager" else [MEMORY[n] for n in ("sequences inside", "a part of heads")]

    def loss(*tensors):
        calls = (tensors[i : i + 3] for i in range(0, len(tensors), 3))
        return sum((flash(q * 2, k, v, causal=True)[0] * 3).square().sum() for q, k, v in calls)

    given = [lie(t) for lie in memory for t in qkv(2, 24, 24, 4, 2, 32, dtype=torch.bfloat16)]
    eager, compiled = leaves(*given), leaves(*given)
    torch._dynamo.reset()
    torch.compile(loss, backend=backend, fullgraph=True)(*compiled).backward()
    assert (CALLS.forward, CALLS.backward) == (len(memory), len(memory))
    loss(*eager).backward()
    assert all(a.grad.stride() == b.grad.stride() for a, b in zip(eager, compiled, strict=True))
    if backend == "aot_eager":
        assert same([t.grad for t in eager], [t.grad for t in compiled])


@pytest.mark.no_poison
def test_varlen_attn_compiled(door):
    (q, k, v), place = packed([12, 20], [12, 20], dtype=torch.bfloat16)

    def attend(*tensors):
        return varlen.varlen_attn(*tensors, *place, window_size=(-1, 0), enable_gqa=True)

    graph_gives(attend, *leaves(q, k, v))


@pytest.mark.no_poison
@pytest.mark.parametrize("memory", MEMORY)
def test_opcheck(door, memory):
    q, k, v = (MEMORY[memory](t) for t in qkv(2, 9, 9, 2, 2, 16, dtype=torch.float16))
    given = q, k, v, None, None, 9, 9, 0.0, True, False
    torch.library.opcheck(OPS._flash_attention_forward.default, given, test_utils=("test_schema", "test_faketensor"))


# ---------------------------------------------------------------- what torch keeps


@pytest.fixture
def original():
    """Kernels in torch's place: they return what they were given."""
    library, seen = torch.library.Library("aten", "IMPL", "CPU"), []

    def forward(q, *given, **options):
        seen.append((q, *given, options))
        return torch.full_like(q, 7), q.new_zeros(1), q.new_zeros(1), q.new_zeros(1), q.new_zeros(1)

    def gradients(*given, **options):
        seen.append((*given, options))
        return tuple(torch.full_like(t, 7) for t in given[1:4])

    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", gradients, "CPU")
    yield seen
    library._destroy()


SLOPES = torch.ones(2)
KEPT = {
    "alibi_slopes": ({"alibi_slopes": SLOPES}, "alibi_slopes"),
    "seqused_k": ({"seqused_k": torch.ones(1, dtype=torch.int32)}, "seqused_k"),
    "debug": ({"debug": True}, "return_debug_mask"),
    "dtype": ({"dtype": torch.float32}, "torch.float32"),
    "dims": ({"dv": 8}, "head dims that differ"),
    "offsets": ({"cu": True}, "cum_seq_q or cum_seq_k alone"),
    "scale": ({"scale": -1.0}, "ValueRangeError scale"),
    "heads": ({"kv": 3}, "ShapeError q"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_torch_keeps_is_counted(original, door, name):
    changes, reason = KEPT[name]
    given = dict(changes)
    heads = 3 if given.pop("kv", None) else 2
    dv, dtype = given.pop("dv", 16), given.pop("dtype", torch.float16)
    q, k, v = qkv(1, 6, 6, 2, heads, 16, dv, dtype=dtype)
    cu = torch.tensor([0, 6], dtype=torch.int32) if given.pop("cu", False) else None
    for _ in range(2):
        out = OPS._flash_attention_forward(q, k, v, cu, None, 6, 6, 0.0, True, given.get("debug", False),
                                           **{n: x for n, x in given.items() if n != "debug"})[0]  # fmt: skip
        assert (out == 7).all()
    assert CALLS.kept == {f"forward: {reason}": 2} and CALLS.forward == 0
    assert torch.equal(original[0][0], q)
    assert str(CALLS) == f"tilefold: 0 forward, 0 backward; torch's own: 2\n  2 forward: {reason}"


def test_gradients_that_torch_keeps(original, door):
    q, k, v = qkv(1, 6, 6, 2, 2, 16, dtype=torch.float32)
    out = lse = torch.zeros(1)
    nothing = torch.zeros(())
    made = OPS._flash_attention_backward(
        q, q, k, v, out, lse, None, None, 6, 6, 0.0, False, nothing, nothing, scale=0.5
    )
    assert all((t == 7).all() for t in made)
    assert CALLS.kept == {"backward: torch.float32": 1}
    assert original[0][-1] == {"scale": 0.5}


def test_what_torch_dropped_has_gradients_of_torch(original, door):
    """A forward pass with return_debug_mask is torch's own, so its backward pass is, whose calls look as any other's."""
    q, k, v = leaves(*qkv(1, 6, 6, 2, 2, 16, dtype=torch.float16))
    out = OPS._flash_attention_forward(q, k, v, None, None, 6, 6, 0.5, False, True)[0]
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all((t == 7).all() for t in grads)
    assert CALLS.kept == {"forward: return_debug_mask": 1, "backward: dropout of torch's own forward": 1}
    out = flash(q, k, v, dropout_p=0.5)[0]
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert (CALLS.forward, CALLS.backward, CALLS.kept.total()) == (1, 1, 2)


def test_what_torch_keeps_draws_no_number(original, door):
    q, k, v = qkv(1, 6, 6, 2, 2, 16, dtype=torch.float32)
    before = torch.get_rng_state()
    flash(q, k, v, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(
    "num_splits" not in str(OPS._flash_attention_forward.default._schema), reason="torch 2.13 has num_splits"
)
def test_splits_and_pages_are_torch_s(original, door):
    q, k, v = qkv(1, 6, 6, 2, 2, 16, dtype=torch.float16)
    flash(q, k, v, num_splits=1)
    flash(q, k, v, block_table=torch.zeros(1, 1, dtype=torch.int32))
    assert CALLS.kept == {"forward: num_splits": 1, "forward: block_table": 1}


def test_without_a_kernel_of_torch(door):
    q, k, v = qkv(1, 6, 6, 2, 2, 16)
    with pytest.raises(Unsupported, match="_flash_attention_forward is not served here .torch.float32., .* for CPU"):
        flash(q, k, v)


# ---------------------------------------------------------------- registration


@pytest.fixture
def registered():
    tilefold.register("torch")
    yield
    tilefold.unregister("torch")


def test_registered_activated_restored(registered):
    tilefold.register("torch")  # once more
    assert "tilefold" in registry.list_flash_attention_impls()
    assert registry.current_flash_attention_impl() is None
    registry.activate_flash_attention_impl("tilefold")
    assert registry.current_flash_attention_impl() == "tilefold"
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CUDA")
    registry.activate_flash_attention_impl("tilefold")  # takes itself back first
    registry.restore_flash_attention_impl()
    assert registry.current_flash_attention_impl() is None
    assert (
        torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CUDA")
        == torch.cuda.is_available()
    )


def test_unregister_restores(registered):
    registry.activate_flash_attention_impl("tilefold")
    tilefold.unregister("torch")
    assert registry.current_flash_attention_impl() is None
    assert "tilefold" not in registry.list_flash_attention_impls()
    tilefold.unregister("torch")  # nothing
    with pytest.raises(ValueError, match="Unknown flash attention impl 'tilefold'"):
        registry.activate_flash_attention_impl("tilefold")


def test_another_implementation_stays(registered):
    handle = torch_flash.activate("CPU")
    registry.register_flash_attention_impl("another", register_fn=lambda: handle)
    try:
        registry.activate_flash_attention_impl("another")
        tilefold.unregister("torch")
        assert registry.current_flash_attention_impl() == "another"
        registry.restore_flash_attention_impl()
    finally:
        registry._registry._FLASH_ATTENTION_IMPLS.pop("another")
    q, k, v = qkv(1, 6, 6, 2, 2, 16, dtype=torch.float16)
    with pytest.raises(NotImplementedError):
        flash(q, k, v)


def test_it_asks_for_torch_2_11(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.10.0+cpu")
    with pytest.raises(
        Unsupported, match=r"tilefold.register\('torch'\) needs torch 2.11 or newer, and 2.10.0.cpu is installed"
    ):
        tilefold.register("torch")


def test_rocm_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.1")
    with pytest.raises(Unsupported, match="torch.version.hip is set"):
        torch_flash.activate()


@pytest.mark.parametrize("before", [[3, 1, 2, 0], [1, 2, 0, 3]])
def test_flash_becomes_the_first_backend(monkeypatch, before):
    """cuDNN is number 3, flash number 1; an order that somebody set since stays."""
    order = [list(before)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_: 0)
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: order[-1])
    monkeypatch.setattr(torch._C, "_set_sdp_priority_order", order.append)
    handle = torch_flash.activate()
    assert order[-1] == [1, *(each for each in before if each != 1)]
    handle.remove()
    assert order[-1] == before
    handle = torch_flash.activate()
    order.append([2, 1, 0, 3])
    handle.remove()
    assert order[-1] == [2, 1, 0, 3]
