"""torch's own functions over tilefold on a GPU: scaled_dot_product_attention and varlen_attn against fp64, nested tensors,
compiled, in CUDA graphs, what torch keeps, taking it back, and a small model's training."""

import inspect
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import tilefold
from cases import hold, hold_back, judge, packed, qkv, rand, same
from cases.device import DEVICE, followed
from cases.gradient import WHERE
from tilefold import reference
from tilefold.integrations import torch_flash
from tilefold.integrations.torch_flash import CALLS

if not hasattr(registry, "register_flash_attention_impl"):
    pytest.skip("torch 2.11 has what this needs", allow_module_level=True)
from torch.nn.attention import varlen

pytestmark = pytest.mark.no_poison
HALVES = [torch.float16, torch.bfloat16]
NAMES = ("out", "dq", "dk", "dv")


@pytest.fixture(autouse=True)
def active():
    CALLS.clear()
    tilefold.register("torch")
    registry.activate_flash_attention_impl("tilefold")
    yield
    tilefold.unregister("torch")


def leaves(*tensors):
    return [t.detach().requires_grad_() for t in tensors]


def heads_first(*tensors):
    """[batch, seq, heads, dim] as SDPA has it, in the same memory."""
    return [t.transpose(1, 2) for t in tensors]


def held(run, tensors, oracle):
    """Result and gradients of leaves, beside fp64 and plain torch; oracle(q, k, v, dtype): out."""
    mine = leaves(*tensors)
    return hold_back(run(*mine), oracle, *mine)


def dense(**options):
    """The oracle of SDPA's arguments."""
    return lambda q, k, v, dtype: reference.attention(*heads_first(q, k, v), dtype=dtype, **options)[0].transpose(1, 2)


def counted(forward, backward, **kept):
    assert (CALLS.forward, CALLS.backward, dict(CALLS.kept)) == (forward, backward, kept), str(CALLS)


# ---------------------------------------------------------------- scaled_dot_product_attention


@pytest.mark.parametrize("memory", ["rows first", "heads first", "a part of qkv"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "dim"), [(515, 64), (1000, 128), (129, 96), (70, 256)])
def test_sdpa(rows, dim, dtype, causal, memory):
    tensors = heads_first(*qkv(2, rows, rows, 4, 4, dim, dtype=dtype, device=DEVICE))
    if memory == "heads first":
        tensors = [t.contiguous() for t in tensors]
    elif memory == "a part of qkv":
        tensors = torch.stack([t.transpose(1, 2) for t in tensors], 2).unbind(2)
        tensors = heads_first(*tensors)
    held(partial(sdpa, is_causal=causal), tensors, dense(causal=causal))
    counted(1, 1)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (14, 2), (8, 4)])
def test_grouped_heads_and_a_scale(heads, kv_heads, dtype):
    tensors = heads_first(*qkv(1, 333, 333, heads, kv_heads, 64, dtype=dtype, device=DEVICE))
    own = partial(sdpa, is_causal=True, scale=0.2, enable_gqa=True)
    held(own, tensors, dense(causal=True, scale=0.2))
    counted(1, 1)


@pytest.mark.parametrize(("sq", "sk"), [(1, 4097), (77, 1030), (300, 5)])
def test_other_lengths_and_a_head_dim_that_torch_pads(sq, sk):
    tensors = heads_first(*qkv(2, sq, sk, 4, 4, 59, dtype=torch.bfloat16, device=DEVICE))
    held(sdpa, tensors, dense())
    counted(1, 1)


def test_dropout():
    """As `attention` drops by the seed in torch's state; by torch's generator, so a checkpoint drops the same."""
    q, k, v = qkv(2, 200, 200, 4, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    mine, other = leaves(q, k, v), leaves(q, k, v)
    out, _, state, *_ = torch.ops.aten._flash_attention_forward(*mine, None, None, 200, 200, 0.2, True, False)
    seed = state.view(torch.int64)[:1]
    want = tilefold.attention(*other, causal=True, dropout_p=0.2, dropout_seed=seed)
    grad = rand(*out.shape, dtype=out.dtype, device=DEVICE)
    assert torch.equal(out, want)
    assert same(torch.autograd.grad(out, mine, grad), torch.autograd.grad(want, other, grad))
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        mine = leaves(*heads_first(q, k, v))

        def run(*tensors):
            return sdpa(*tensors, is_causal=True, dropout_p=0.2)

        made = torch.utils.checkpoint.checkpoint(run, *mine, use_reentrant=False) if checkpointed else run(*mine)
        results.append((made.detach(), *torch.autograd.grad(made, mine, grad.transpose(1, 2))))
    assert same(*results)
    assert not CALLS.kept


def test_same_bits_every_run():
    tensors = heads_first(*qkv(2, 700, 700, 4, 2, 128, dtype=torch.bfloat16, device=DEVICE))
    mine, grad = leaves(*tensors), rand(2, 4, 700, 128, dtype=torch.bfloat16, device=DEVICE)

    def run():
        out = sdpa(*mine, is_causal=True, enable_gqa=True)
        return out.detach(), *torch.autograd.grad(out, mine, grad)

    assert same(run(), run())


def test_flash_is_first_while_it_is_active():
    """Where cuDNN is torch's first choice."""
    q = torch.empty(1, 1, 8, 64, dtype=torch.float16, device=DEVICE)
    assert torch._fused_sdp_choice(q, q, q) == int(SDPBackend.FLASH_ATTENTION)
    order = torch._C._get_sdp_priority_order()
    registry.restore_flash_attention_impl()
    before = torch._C._get_sdp_priority_order()
    assert sorted(order) == sorted(before)
    registry.activate_flash_attention_impl("tilefold")
    assert torch._C._get_sdp_priority_order() == order


# ---------------------------------------------------------------- packed and nested


def varlen_attn(q, k, v, place, **options):
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
        options["enable_gqa"] = True
    return varlen.varlen_attn(q, k, v, *place, **options)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (60, 0)])
@pytest.mark.parametrize("dtype", HALVES)
def test_varlen_attn(dtype, window):
    tensors, place = packed([200, 0, 131, 513], [200, 3, 131, 513], h=4, hk=2, d=64, dv=64, dtype=dtype, device=DEVICE)
    mine, oracle = (
        leaves(*tensors),
        partial(reference.attention_varlen, **dict(zip(WHERE, place, strict=True)), window=window),
    )
    out = varlen_attn(*mine, place, window_size=window)
    hold_back(out, lambda *x, dtype: oracle(*x, dtype=dtype)[0], *mine)
    counted(1, 1)
    hold(varlen_attn(*tensors, place, window_size=window, return_aux=varlen.AuxRequest(lse=True)), oracle, *tensors)


@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="this torch has no varlen_attn_out")
def test_varlen_attn_out():
    (q, k, v), place = packed([90, 301], [90, 301], h=4, hk=4, d=64, dv=64, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(q)
    varlen.varlen_attn_out(out, q, k, v, *place)
    counted(1, 0)
    assert torch.equal(out, varlen.varlen_attn(q, k, v, *place))


@pytest.mark.parametrize(("layout", "causal"), [(torch.strided, False), (torch.jagged, False), (torch.jagged, True)])
def test_nested_tensors(layout, causal):
    """Each sequence for itself; strided ones without gradients, as torch has them."""
    lengths = [90, 17, 256]
    parts = [[rand(n, 4, 64, dtype=torch.bfloat16, device=DEVICE) for n in lengths] for _ in range(3)]
    grads = layout is torch.jagged
    nested = [torch.nested.nested_tensor(each, layout=layout, requires_grad=grads) for each in parts]
    out = sdpa(*(t.transpose(1, 2) for t in nested), is_causal=causal).transpose(1, 2)
    assert CALLS.forward == 1 and not CALLS.kept, str(CALLS)
    dout = [rand(n, 4, 64, dtype=torch.bfloat16, device=DEVICE) for n in lengths]
    made = [out.unbind()]
    if grads:
        grad = torch.nested.as_nested_tensor(dout, layout=layout)
        packed_grad = torch.nested.nested_tensor_from_jagged(grad.values(), out.offsets())
        made += [t.unbind() for t in torch.autograd.grad(out, nested, packed_grad)]
        assert CALLS.backward == 1
    for i in range(len(lengths)):
        tensors = [t[i][None].transpose(1, 2) for t in parts]
        got = [t[i].detach()[None].transpose(1, 2) for t in made]
        sides = []
        for dtype in (torch.float64, torch.bfloat16):
            mine = leaves(*(t.double() for t in tensors))
            exact = dense(causal=causal)(*mine, dtype=dtype)
            sides.append((exact.detach(), *torch.autograd.grad(exact, mine, dout[i][None].transpose(1, 2).double())))
        for name, one, exact, plain in zip(NAMES, got, *sides, strict=False):
            judge(one, exact, plain, f"{name} of sequence {i}")


# ---------------------------------------------------------------- compiled, captured


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("memory", ["rows first", "heads first"])
def test_compiled(memory, mode):
    tensors = heads_first(*qkv(2, 200, 200, 4, 4, 64, dtype=torch.bfloat16, device=DEVICE))
    tensors = tensors if memory == "rows first" else [t.contiguous() for t in tensors]
    grad = rand(2, 4, 200, 64, dtype=torch.bfloat16, device=DEVICE)

    def run(q, k, v):
        return sdpa(q, k, v, is_causal=True)

    torch._dynamo.reset()
    compiled, mine = torch.compile(run, fullgraph=True, mode=mode), leaves(*tensors)
    for _ in range(4):  # warm, captured, replayed
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*mine)
        got = out.detach().clone(), *(t.clone() for t in torch.autograd.grad(out, mine, grad))
    assert CALLS.forward >= 1 and CALLS.backward >= 1 and not CALLS.kept, str(CALLS)
    eager = run(*mine)
    assert same(got, (eager.detach(), *torch.autograd.grad(eager, mine, grad)))


def test_varlen_attn_compiled():
    tensors, place = packed([200, 131], [200, 131], h=4, hk=4, d=64, dv=64, dtype=torch.bfloat16, device=DEVICE)

    def run(q, k, v):
        return varlen.varlen_attn(q, k, v, *place, window_size=(-1, 0))

    torch._dynamo.reset()
    grad = rand(*tensors[0].shape, dtype=torch.bfloat16, device=DEVICE)
    results = []
    for function in (run, torch.compile(run, fullgraph=True)):
        mine = leaves(*tensors)
        out = function(*mine)
        results.append((out.detach(), *torch.autograd.grad(out, mine, grad)))
    assert same(*results)
    counted(2, 2)


def test_a_cuda_graph_with_other_inputs():
    q, k, v = heads_first(*qkv(2, 300, 300, 4, 4, 64, dtype=torch.bfloat16, device=DEVICE))
    change = partial(q.copy_, rand(2, 4, 300, 64, dtype=torch.bfloat16, device=DEVICE))
    followed(partial(sdpa, q, k, v, is_causal=True), change)


# ---------------------------------------------------------------- what torch keeps, and torch again


def test_restore_gives_torch_s_bits_back():
    q, k, v = heads_first(*qkv(2, 333, 333, 4, 4, 64, dtype=torch.bfloat16, device=DEVICE))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        registry.restore_flash_attention_impl()
        before = sdpa(q, k, v, is_causal=True)
        registry.activate_flash_attention_impl("tilefold")
        ours = sdpa(q, k, v, is_causal=True)
        counted(1, 0)
        registry.restore_flash_attention_impl()
        assert torch.equal(sdpa(q, k, v, is_causal=True), before)
    counted(1, 0)
    assert torch.equal(ours.transpose(1, 2), tilefold.attention(*heads_first(q, k, v), causal=True))


def test_what_is_not_served_has_torch_s_bits_and_is_counted():
    q, k, v = qkv(2, 128, 128, 4, 4, 64, dtype=torch.float16, device=DEVICE)

    def debugged():  # what was dropped is shown
        torch.manual_seed(5)
        return torch.ops.aten._flash_attention_forward(q, k, v, None, None, 128, 128, 0.2, False, True)

    ours = debugged()
    counted(0, 0, **{"forward: return_debug_mask": 1})
    registry.restore_flash_attention_impl()
    theirs = debugged()
    assert same([ours[i] for i in (0, 1)], [theirs[i] for i in (0, 1)])


def test_what_torch_dropped_has_gradients_of_torch():
    tensors = heads_first(*qkv(2, 128, 128, 4, 4, 64, dtype=torch.float16, device=DEVICE))

    def debugged():
        torch.manual_seed(5)
        mine = leaves(*tensors)
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        out = attend(*mine, dropout_p=0.2, is_causal=False, return_debug_mask=True)[0]
        return torch.autograd.grad(out, mine, torch.ones_like(out))

    ours = debugged()
    counted(0, 0, **{"forward: return_debug_mask": 1, "backward: dropout of torch's own forward": 1})
    registry.restore_flash_attention_impl()
    torch.testing.assert_close(ours, debugged())


def test_gradients_that_torch_keeps(monkeypatch):
    """The forward pass from here, the gradients from torch's kernel: its lse is the same."""
    tensors = heads_first(*qkv(2, 200, 200, 4, 4, 64, dtype=torch.bfloat16, device=DEVICE))

    def refuses(*_):
        raise tilefold.Unsupported("dout is refused by this test")

    monkeypatch.setattr(torch_flash, "backward", refuses)
    held(partial(sdpa, is_causal=True), tensors, dense(causal=True))
    counted(1, 0, **{"backward: Unsupported dout": 1})


def test_other_backends_stay_torch_s():
    """A mask, fp32: torch does not ask its flash attention."""
    q, k, v = heads_first(*qkv(1, 64, 64, 2, 2, 64, dtype=torch.float16, device=DEVICE))
    sdpa(q, k, v, attn_mask=torch.zeros(64, 64, dtype=torch.float16, device=DEVICE))
    sdpa(q.float(), k.float(), v.float())
    counted(0, 0)


# ---------------------------------------------------------------- a model


class Block(torch.nn.Module):
    """One of a small GPT."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x):
        b, n, width = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(sdpa(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, width))
        return x + self.mlp(self.norms[1](x))


def curve(dtype, steps=60):
    """Losses of a small GPT on the same tokens from the same start, the attention in `dtype`."""
    torch.manual_seed(11)
    width, words, rows = 128, 64, 200
    model = torch.nn.Sequential(
        torch.nn.Embedding(words, width), Block(width, 4), Block(width, 4), torch.nn.Linear(width, words)
    )
    model = model.to(DEVICE)
    step = torch.randint(1, 7, (16, 1))
    tokens = ((torch.randint(words, (16, 1)) + step * torch.arange(rows + 1)) % words).to(
        DEVICE
    )  # a rule to be learned
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def test_a_small_gpt_trains_as_with_flash():
    """Losses are as far from those of fp32 as flash's and plain torch's are, and far below where they began; the same bits again,
    if the other layers give the same bits again.  One run alone says little: rounding grows with the steps."""
    ours = curve(torch.bfloat16)
    assert (CALLS.forward, CALLS.backward) == (120, 120)
    again = curve(torch.bfloat16)
    with sdpa_kernel(SDPBackend.MATH):
        others = [curve(torch.bfloat16) for _ in range(2)]
    assert torch.equal(ours, again) or not torch.equal(*others)
    registry.restore_flash_attention_impl()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = curve(torch.bfloat16)
    with sdpa_kernel(SDPBackend.MATH):
        exact = curve(torch.float32)
    ours, theirs = (ours - exact).abs(), (torch.stack([flash, *others]) - exact).abs()
    assert exact[-1] < 0.5 * exact[0]
    assert ours.mean() <= 2 * theirs.mean() and ours.max() <= 2 * theirs.max(), f"{ours.max()} beside {theirs.max()}"
