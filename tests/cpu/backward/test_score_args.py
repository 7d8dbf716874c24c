"""Gradients of the tensors that a score_mod reads: against fp64, the same bits every run, and what is refused by name."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

import tilefold
from cases import loads as mods
from cases import one_graph, packed, qkv, rand, relative, relative_twin, same
from cases.gradient import check_gradients
from sources import run_source
from tilefold import PlanError, Unsupported, scores
from tilefold.ops.call import Call
from tilefold.ops.dense.library import ATTENTION
from tilefold.ops.loads import loads_of

pytestmark = pytest.mark.interpreter
HEAD = "(score, batch, head, q_index, kv_index, args):\n"
HEADS, SEQ_Q, SEQ_K = 4, 37, 45


def leaf(*shape, dtype=torch.float32):
    return rand(*shape, dtype=dtype).requires_grad_()


def args_of(name, dtype=torch.float32):
    """(mod, its args, its twin)."""
    table = leaf(HEADS, SEQ_Q, SEQ_K, dtype=dtype)
    columns = torch.randperm(SEQ_K, dtype=torch.int32)
    args = {
        "by_head": (leaf(HEADS, dtype=dtype),),
        "relative": (leaf(HEADS, 17, dtype=dtype), 8),
        "bucketed": (leaf(8, HEADS, dtype=dtype), HEADS),
        "by_index": (table, *table.stride()),
        "tempered": (rand(1, dtype=dtype)[0].requires_grad_(),),
        "mixed": (leaf(HEADS, dtype=dtype), leaf(SEQ_K, dtype=dtype), columns, 21),
    }[name]
    if name == "relative":
        return relative, args, relative_twin
    return getattr(mods, name), args, getattr(mods, f"{name}_twin")


def checked(name, q, k, v, dtype=torch.float32, **options):
    mod, args, twin = args_of(name, dtype)
    unjudged = ("dargs[0]",) if name == "tempered" else ()
    check_gradients(q, k, v, score_mod=mod, score_args=args, twins={"score_mod": twin}, unjudged=unjudged, **options)


NAMES = ["by_head", "relative", "bucketed", "by_index", "tempered", "mixed"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in NAMES),
        *((name, torch.float16) for name in NAMES[1::2]),
        *((name, torch.bfloat16) for name in NAMES[::2]),
    ],
)
def test_gradients(name, dtype):
    checked(name, *qkv(2, SEQ_Q, SEQ_K, HEADS, 2, 16, dtype=dtype), dtype, causal=name == "bucketed")


OPTIONS = {
    "everything else": {
        "softcap": 20.0,
        "window": (30, 5),
        "sinks": True,
        "mask": True,
        "alibi_slopes": True,
        "bias": True,
    },
    "layout": {"layout": "bhsd", "causal": True},
    "odd dims": {"dims": (24, 40), "scale": 0.3},
    "one tile": {"tile": (64, 64)},
    "boxes": {"kernel": "attention_backward_box", "dtype": torch.float16},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_beside_other_options(options):
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    q, k, v = qkv(2, SEQ_Q, SEQ_K, HEADS, 1, *options.pop("dims", (16, 16)), dtype=dtype)
    if options.get("layout"):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    made = {
        "sinks": lambda: rand(HEADS),
        "mask": lambda: torch.rand(2, 1, SEQ_Q, SEQ_K) > 0.3,
        "bias": lambda: rand(1, 1, 1, SEQ_K),
        "alibi_slopes": lambda: torch.rand(HEADS) * 0.1,
    }
    options = {name: made[name]() if name in made else value for name, value in options.items()}
    checked("mixed", q, k, v, dtype, **options)


@pytest.mark.parametrize("name", ["bucketed", "mixed"])
def test_packed_sequences(name):
    tensors, where = packed([20, 0, 33, 1], [10, 30, 45, 5], h=HEADS, hk=2, d=16, dv=8)
    checked(name, *tensors, varlen=where, causal=True)


def test_a_bias_by_index_is_a_bias():
    """Under dropout, too."""
    q, k, v = qkv(2, SEQ_Q, SEQ_K, HEADS, 2, 16)
    mod, args, _ = args_of("by_index")
    bias = args[0].detach()[None].requires_grad_()
    options = {"dropout_p": 0.3, "dropout_seed": torch.tensor([5]), "window": (20, 3)}
    one = tilefold.attention(q, k, v, score_mod=mod, score_args=args, **options)
    other = tilefold.attention(q, k, v, bias=bias, **options)
    dout = rand(*one.shape)
    (got,), (wanted,) = (torch.autograd.grad(out, t, dout) for out, t in ((one, args[0]), (other, bias)))
    torch.testing.assert_close(got, wanted[0], rtol=1e-5, atol=1e-5)


def results(fn, args, **options):
    """Gradients of q and of the tensors in args that require one."""
    q, k, v = qkv(2, SEQ_Q, SEQ_K, HEADS, 2, 16)
    leaves = [q.requires_grad_(), *(each for each in args if isinstance(each, torch.Tensor) and each.requires_grad)]
    out = tilefold.attention(q, k, v, score_mod=fn, score_args=args, **options)
    return torch.autograd.grad(out.square().sum(), leaves)


def backwards(monkeypatch):
    """Have the interpreter run the programs from the last to the first."""
    builder = interpreter.interpreter_builder
    real = builder.set_grid_idx

    def turned(x, y, z):
        real(builder.grid_dim[0] - 1 - x, y, z)

    monkeypatch.setattr(builder, "set_grid_idx", turned)


def test_the_order_of_programs_does_not_matter(monkeypatch):
    """For sums of integers, and it does for those in fp32."""
    mod, args, _ = args_of("relative")
    torch.manual_seed(1)
    wanted = results(mod, args)
    torch.manual_seed(1)
    floats = results(mod, args, deterministic=False)
    backwards(monkeypatch)
    torch.manual_seed(1)
    assert same(results(mod, args), wanted)
    torch.manual_seed(1)
    turned = results(mod, args, deterministic=False)
    assert not torch.equal(turned[1], floats[1])
    for got in (floats, turned):
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-5, atol=1e-5 * float(wanted[1].abs().max()))
        assert torch.equal(got[0], wanted[0])


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("exponent", [-90, 60, 80])
def test_sums_of_any_size(exponent, deterministic):
    """Integers count in units of a part of the whole sum: gradients 2^150 times as large are as exact."""
    mod, args, _ = args_of("relative")
    q, k, v = qkv(1, SEQ_Q, SEQ_K, HEADS, 2, 16)
    out = tilefold.attention(q, k, v, score_mod=mod, score_args=args, deterministic=deterministic)
    one, other = (torch.autograd.grad(out, args[0], factor * out.detach(), True)[0] for factor in (1.0, 2.0**exponent))
    assert torch.equal(other, one * 2.0**exponent) or not deterministic
    torch.testing.assert_close(other, one * 2.0**exponent, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_not_finite_shows():
    """In all of the tensor: the units of its sums are unknown."""
    (factors,), q = args_of("by_head")[1], rand(1, SEQ_Q, HEADS, 16)
    out = tilefold.attention(q, q, q, score_mod=mods.by_head, score_args=(factors,))
    for value in (float("nan"), float("inf")):
        dout = torch.ones_like(out)
        dout[0, 5, 1, 2] = value
        (got,) = torch.autograd.grad(out, factors, dout, retain_graph=True)
        assert got.isnan().all()


@pytest.mark.parametrize("seqs", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_compute(seqs):
    """No queries, or no keys; a tensor without elements."""
    table, q = leaf(HEADS, 17), rand(2, seqs[0], HEADS, 16)
    k = rand(2, seqs[1], HEADS, 16)
    out = tilefold.attention(q, k, k, score_mod=relative, score_args=(table, 8))
    (got,) = torch.autograd.grad(out.sum(), table)
    assert got.shape == table.shape
    assert not got.any()


@triton.jit
def strided(score, batch, head, q_index, kv_index, args):
    """args = (table [H, 8, Sk], its strides, another that nothing is loaded from)."""
    table, stride_h, stride_n, stride_k, unread, *extent = args
    return score + tl.load(table + head * stride_h + (q_index % 8) * stride_n + kv_index * stride_k)


TABLES = {
    "transposed": lambda: rand(SEQ_K, 8, HEADS).requires_grad_().permute(2, 1, 0),
    "a part": lambda: rand(9, 10, 3 * SEQ_K).requires_grad_()[3 : 3 + HEADS, 1:9, 2::2],
    "broadcast": lambda: rand(1, 8, 1).requires_grad_().expand(HEADS, 8, SEQ_K),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_strides(table):
    """The gradient is laid out by its tensor's strides while it is made, and comes contiguous."""
    table, unread = table(), leaf(3)
    q = rand(1, SEQ_Q, HEADS, 16)
    k = rand(1, SEQ_K, HEADS, 16)

    def gradient(t):
        options = {"score_mod": strided, "score_args": (t, *t.stride(), unread)}
        out = tilefold.attention(q, k, k, **options)
        return torch.autograd.grad(out.square().sum(), (t, unread, table._base if t is table else t))

    got, nothing, base = gradient(table)
    wanted = gradient(table.detach().contiguous().requires_grad_())[0]
    assert not nothing.any()
    assert got.is_contiguous()
    assert got.shape == table.shape
    torch.testing.assert_close(base.sum(), wanted.sum(), rtol=1e-4, atol=1e-4)
    if 0 in table.stride():
        torch.testing.assert_close(base, wanted.sum((0, 2), keepdim=True), rtol=1e-4, atol=1e-4)
    else:
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_outside_of_the_tensor_nothing_is_written():
    """A mod may load from what lies around a tensor: that gets no gradient, and its memory stays."""
    whole = rand(3 * SEQ_K)
    part = whole[SEQ_K : 2 * SEQ_K].requires_grad_()
    q = rand(1, SEQ_K, HEADS, 16)
    mod = made("return score + tl.load(args[0] + kv_index + 7)")
    out = tilefold.attention(q, q, q, score_mod=mod, score_args=(part,))
    (got,) = torch.autograd.grad(out.square().sum(), part)
    moved = whole[SEQ_K + 7 : 2 * SEQ_K + 7].clone().requires_grad_()
    other = made("return score + tl.load(args[0] + kv_index)")
    out = tilefold.attention(q, q, q, score_mod=other, score_args=(moved,))
    (wanted,) = torch.autograd.grad(out.square().sum(), moved)
    torch.testing.assert_close(got[7:], wanted[:-7], rtol=1e-5, atol=1e-5)
    assert not got[:7].any()


# ---------------------------------------------------------------- what is derived, and what is refused


def made(body):
    """The mod with this body."""
    names = {"tl": tl, "bucket_of": mods.bucket_of, "inner": inner}
    run_source(f"def mod{HEAD}" + "".join(f"    {line}\n" for line in body.strip("\n").split("\n")), names)
    return triton.jit(names["mod"])


@triton.jit
def inner(x, table):
    return x + tl.load(table)


SERVED = {
    "a name": "t = args[0]\nreturn score * tl.load(t + head)",
    "from behind": "t = args[-3]\nreturn score * tl.load(t + head)",
    "unpacked": "t, seq_q, seq_k = args\np = t + head\nreturn score * tl.load(pointer=p)",
    "starred": "t, *rest = args\nreturn score * tl.load(t + head)",
    "moved on": "t = args[0]\nt += head\nreturn score * tl.load(t)",
    "kept": "x = score * tl.load(args[0] + head)\ny = x\nx = 1.0\nreturn y * x",
    "of two dimensions": "return score * tl.load(args[0] + head + (q_index - kv_index) * 0)",
    "of rows": "return score * tl.load(args[0] + head + q_index * 0)",
    "of one element": "return score * tl.load(args[0] + head + q_index * 0 + kv_index * 0, mask=(q_index + kv_index) >= 0)",
    "its dtype": "t = args[0]\nreturn score * tl.load(t + head).to(t.dtype.element_ty)",
    "a branch beside it": "x = tl.load(args[0] + head)\nif args[1] > 0:\n    x = x * 1.0\nreturn score * x",
}


@pytest.mark.parametrize("body", SERVED.values(), ids=SERVED.keys())
def test_ways_to_load_the_same(body):
    q, factors = rand(1, 20, HEADS, 16), leaf(HEADS)
    found = []
    for mod in (mods.by_head, made(body)):
        out = tilefold.attention(q, q, q, score_mod=mod, score_args=(factors,))
        found.append(torch.autograd.grad(out.square().sum(), factors)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5 * float(found[0].abs().max()))


REFUSED = {
    "return score + tl.load(args[0] + score.to(tl.int32))": "where it lies depends on the score",
    "p = args[0] + score.to(tl.int32)\nreturn score + tl.load(p)": "where it lies depends on the score",
    "return score + tl.load(args[0], mask=score > 0, other=0.0)": "where it lies depends on the score",
    "i = tl.load(args[0]).to(tl.int32)\nreturn score + tl.load(args[0] + i)": "tl.load is not differentiated",
    "if args[1] > 0:\n    score += tl.load(args[0])\nreturn score": "in a branch or a loop is not served",
    "for i in range(2):\n    score += tl.load(args[0] + i)\nreturn score": "in a branch or a loop is not served",
    "return score + (tl.load(args[0]) if args[1] > 0 else 0.0)": "in a conditional expression is not served",
    "return inner(score, args[0])": "another function gets the tensor",
    "return inner(score, *args)": "another function gets the tensor",
    "p = tl.where(head > 0, args[0], args[1])\nreturn score + tl.load(p)": "another function gets the tensor",
    "p = args[0]\nif head > 0:\n    p = args[1]\nreturn score + tl.load(p)": r"any of score_args\[0\], score_args\[1\]",
    "if head > 0:\n    return score\nreturn score + tl.load(args[0])": "it is not the last statement",
    "if head > 0:\n    return score\nelse:\n    return score + tl.load(args[0])": "it is no `return` with a value",
    "return score * tl.floor(tl.load(args[0]))": "tl.floor is not differentiated",
    "return score + (0.0 if tl.load(args[0]) > 0 else 1.0)": "in a conditional expression",
    "x = tl.load(args[0])\nif x > 0:\n    score *= 2\nreturn score": r"depends on what it loads from score_args\[0\]",
}


@pytest.mark.parametrize("body", REFUSED)
def test_refusals(body):
    """Before anything is launched, with the mod, the expression, and what to do."""
    q, table = rand(1, 20, HEADS, 16), leaf(HEADS)
    given = {"score_mod": made(body), "score_grad": mods.by_head, "score_args": (table, rand(HEADS))}
    with pytest.raises(Unsupported, match=rf"(?s)mod, `.*(?:{REFUSED[body]}).*detach\(\) score_args\[0\]"):
        tilefold.attention(q, q, q, **given)


def test_a_tensor_whose_elements_share_memory():
    q, table = rand(1, 20, HEADS, 16), leaf(20).unfold(0, HEADS, 1)
    with pytest.raises(
        Unsupported, match=r"score_args\[0\] requires a gradient, but elements of it share memory \(strides \(1, 1"
    ):
        tilefold.attention(q, q, q, score_mod=mods.by_head, score_args=(table,))


def test_loads_are_found_once_a_mod():
    assert loads_of(mods.mixed, 4, (0, 1, 2), (0, 1)) is loads_of(mods.mixed, 4, (0, 1, 2), (0, 1))
    assert [each.arg for each in loads_of(mods.mixed, 4, (0, 1, 2), (0, 1))] == [1, 0, 1]
    assert [each.arg for each in loads_of(mods.mixed, 4, (0, 1, 2), (1,))] == [1, 1]
    assert loads_of(mods.tempered, 1, (0,), ()) == ()


# ---------------------------------------------------------------- plans, compilers, functorch


def test_plans():
    """The plan says what the gradients take, keeps as JSON, and is refused where it does not fit."""
    q, k, v = qkv(1, SEQ_Q, SEQ_K, HEADS, 2, 16)
    mod, args, _ = args_of("mixed")
    options = {"score_mod": mod, "score_args": args}
    plan = tilefold.attention_backward_plan(q, k, v, **options)
    assert (plan.loads, plan.load_passes) == ((HEADS, SEQ_K), 2)
    assert "2 tensors of score_args, 49 elements" in str(plan)
    assert "4 more products a pair" in str(plan)
    assert type(plan).from_json(plan.to_json()) == plan
    bare = tilefold.attention_backward_plan(q, k, v, score_mod=mod, score_args=tuple(map(detached, args)))
    assert (bare.loads, bare.load_passes) == ((), 0)
    assert plan.scratch_bytes - bare.scratch_bytes == 8 * 49 + 4 * 2 * plan.grids[3][0]
    once = tilefold.attention_backward_plan(q, k, v, deterministic=False, **options)
    assert once.load_passes == 1
    assert "2 more products a pair; adds fp32" in str(once)
    assert once.scratch_bytes - bare.scratch_bytes == 4 * 49
    with pytest.raises(PlanError, match="gradients of loads of None, the call has"):
        tilefold.attention(q, k, v, backward_plan=bare, **options)
    for wrong, match in (
        ({"loads": (0,)}, "loads"),
        ({"load_passes": 3}, "must be 1 or 2"),
        ({"loads": ()}, "must be 0"),
    ):
        with pytest.raises(PlanError, match=match):
            dataclasses.replace(plan, **wrong)
    out = tilefold.attention(q, k, v, backward_plan=plan, **options)  # and where not all are asked for
    wanted = torch.autograd.grad(out.sum(), args[:2], retain_graph=True)
    assert same(torch.autograd.grad(out.sum(), args[1], retain_graph=True), wanted[1:])


def detached(arg):
    return arg.detach() if isinstance(arg, torch.Tensor) else arg


@pytest.mark.no_poison
def test_compilers_and_functorch():
    """The eager bits; a gradient of the gradient is refused."""
    q, k, v = qkv(1, SEQ_Q, SEQ_K, HEADS, 2, 16)
    named = tilefold.constant(mods.mixed)
    factors, rows, columns, entries = args_of("mixed")[1]

    def loss(factors, rows, mod=named):
        out = tilefold.attention(q, k, v, score_mod=mod, score_args=(factors, rows, columns, entries), causal=True)
        return out.square().sum()

    wanted = torch.autograd.grad(loss(factors, rows), (factors, rows))
    compiled = one_graph(loss)
    assert same(torch.autograd.grad(compiled(factors, rows), (factors, rows)), wanted)
    (alone,) = torch.autograd.grad(compiled(factors.detach(), rows), rows)
    assert torch.equal(alone, wanted[1])
    assert same(torch.func.grad(loss, argnums=(0, 1))(factors.detach(), rows.detach()), wanted)
    (once,) = torch.autograd.grad(loss(factors, rows), factors, create_graph=True)
    with pytest.raises(Unsupported, match="first derivatives only"):
        once.sum().backward()


@pytest.mark.no_poison
def test_the_operator_of_the_gradient():
    q, k, v = (t.requires_grad_() for t in qkv(1, 20, 33, HEADS, 2, 16))
    call = Call(score_mod=mods.mixed, score_args=args_of("mixed")[1])
    torch.library.opcheck(ATTENTION.op, ATTENTION.flat(q, k, v, call))
    out, lse = ATTENTION.dispatched(q.detach(), k, v, call)
    for wanted in ([True] * 3 + [False] * 2 + [True, True, False], [False] * 6 + [True, False]):
        flat = ATTENTION.flat(*(t.detach() for t in (q, k, v)), call)
        given = (wanted, out.detach(), None, out.detach(), lse.detach(), *flat)
        torch.library.opcheck(ATTENTION.gradient_op, given, test_utils=("test_schema", "test_faketensor"))


def test_values_of_scores():
    """A `scores.rule` is the same."""
    q, (factors,) = rand(1, 20, HEADS, 16), args_of("by_head")[1]
    calls = ({"score": scores.rule(mods.by_head, (factors,))}, {"score_mod": mods.by_head, "score_args": (factors,)})
    got, wanted = (torch.autograd.grad(tilefold.attention(q, q, q, **each).square().sum(), factors) for each in calls)
    assert same(got, wanted)
