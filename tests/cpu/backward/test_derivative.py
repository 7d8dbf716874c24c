"""The derivative of a score_mod, made from its source: each rule and random compositions against differences in fp64; refusals;
gradients of attention."""

import linecache
import random

import pytest
import torch
import triton
import triton.language as tl

import tilefold
from cases import graph_gives, qkv, relative, squashed, squashed_twin
from cases.gradient import check_gradients
from sources import run_source
from tilefold import Unsupported
from tilefold.device import approximate, mods
from tilefold.ops import derivative
from tilefold.ops.derivative import derivative_of, is_one

pytestmark = pytest.mark.interpreter
ROWS, STEP = 16, 1e-6
HEAD = "(score, batch, head, q_index, kv_index, args):\n"


@triton.jit
def squared_plus(x, y):
    z = x * x
    return z + y


SPACE = {"tl": tl, "squared_plus": squared_plus, "mods": mods, "approximate": approximate}


def made(body, space=SPACE):
    """The mod with this body, a text of one line or of several."""
    text = f"def mod{HEAD}" + "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))
    names = dict(space)
    run_source(text, names)
    return triton.jit(names["mod"])


@triton.jit
def both(X, Out, Slope, MOD: tl.constexpr, DERIVATIVE: tl.constexpr, ROWS: tl.constexpr, args):
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    x = tl.load(X + i * ROWS + j)
    tl.store(Out + i * ROWS + j, MOD(x, 1, 2, i, j, args) + tl.zeros([ROWS, ROWS], tl.float64))
    tl.store(Slope + i * ROWS + j, DERIVATIVE(x, 1, 2, i, j, args))


def values(x, mod, args=()):
    """(the new scores, their derivatives) of scores in fp64."""
    out, slope = torch.empty_like(x), torch.empty_like(x)
    both[(1,)](x, out, slope, mod, derivative_of(mod), ROWS, (*args, ROWS, ROWS))
    return out, slope


@pytest.mark.parametrize(
    ("body", "one"),
    [
        ("return score", True),
        ("return score + tl.load(args[0] + q_index - kv_index)", True),
        ("score = score - tl.abs(q_index - kv_index) * 0.5\nreturn score", True),
        (
            "far = q_index > kv_index\nif head > 2:\n    return score + 1.0\nreturn score - tl.where(far, 1.0, 0.0)",
            True,
        ),
        ("return score * 1.0", False),
        ("return tl.where(q_index > kv_index, score, 0.0)", False),
        ("return 2.0 * score", False),
        ("score = score * 2.0\nreturn score + 1.0", False),
        ("if head > 2:\n    return score\nreturn score * score", False),
        ("if head > 2:\n    score = score * 3.0\nreturn score", False),
        ("x = score * 2.0\nreturn x", False),
        ("return 1.0 + 0.0 * q_index", False),
    ],
)
def test_a_derivative_that_is_one_is_known(body, one):
    """Then kernels multiply by nothing."""
    assert is_one(derivative_of(made(body))) == one
    assert is_one(derivative_of(mods.bias))
    assert not is_one(mods.softcap_slope), "which nobody derived"


def differences(x, mod, args=()):
    above, below = (values(x + step, mod, args)[0] for step in (STEP, -STEP))
    return (above - below) / (2 * STEP)


def holds(body, x=None, args=()):
    """Whether the derivative is that of differences, to the rounding of these."""
    mod = made(body)
    x = torch.linspace(0.3, 2.5, ROWS * ROWS, dtype=torch.float64).reshape(ROWS, ROWS) if x is None else x
    wanted, got = differences(x, mod, args), values(x, mod, args)[1]
    assert wanted.isfinite().all()
    return torch.allclose(got, wanted, rtol=1e-6, atol=1e-6 * (1 + float(values(x, mod, args)[0].abs().max())))


EXPRESSIONS = """
score
-score
score + 2
2 - score
score - 3.0 * score
score * score
score / 3
2 / score
score / (1 + score)
tl.exp(score)
tl.exp2(score * 0.5)
tl.log(score)
tl.log2(1 + score)
tl.sqrt(score)
tl.math.rsqrt(score)
tl.sin(score)
tl.cos(2 * score)
tl.erf(score)
tl.abs(score - 1.1111)
tl.maximum(score, 1.2345)
tl.minimum(2 * score, score + 1.2345)
tl.clamp(score, 0.5001, 2.0001)
tl.fma(score, score, 1.0)
tl.sigmoid(score)
tl.where(q_index > kv_index, score, 0)
tl.where(score > 1.2345, score * score, score)
tl.where((score > 1.0001) & (score < 2.0001), score, 2 * score)
tl.where(~(score > 1.0001), score, 2 * score)
score if args[0] > 0 else 2 * score
squared_plus(score, 3 * score)
squared_plus(y=score, x=2.0)
squared_plus(2.0, 3.0) + score
mods.softcap_exact(score, batch, head, q_index, kv_index, (3.0,))
approximate.tanh(2 * score) + score
tl.load(args) if False else score
score.to(tl.float64) * 2
tl.zeros_like(score) + score
q_index - kv_index + 0.0
""".strip().split("\n")


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions(expression):
    assert holds(f"return {expression}")


STATEMENTS = {
    "docstring": '"""What it does."""\nreturn 2 * score',
    "reassigned": "score = score * score\nscore = score + score * 2\nreturn score",
    "added to": "x = score\nx *= score\nx += 1\nx /= score\nx -= score\nreturn x",
    "annotated": "x: tl.float32 = score * 2\nreturn x * x",
    "not any more": "x = score\nx = 3.0\nreturn x * score",
    "unpacked": "a, b, seq_q, seq_k = args\nreturn score * a + b",
    "starred": "a, *rest = args\nreturn score * a",
    "branch": "if args[0] > 1:\n    x = score * score\nelse:\n    x = 1.0\nreturn x * score",
    "one branch": "x = score * 0.5\nif args[0] > 100:\n    x = x * x\nreturn x",
    "a branch that returns": "if args[0] > 1:\n    return score * score\nreturn score",
    "nested": "if args[0] > 1:\n    x = score\n    if args[1] > 100:\n        x = 1.0\nelse:\n    x = 2.0\nreturn x * x",
    "asserted": "tl.static_assert(True)\nreturn score",
}


@pytest.mark.parametrize("body", STATEMENTS.values(), ids=STATEMENTS.keys())
def test_statements(body):
    assert holds(body, args=(2.0, 5.0))


def composed(draw, depth):
    """A random expression of positive numbers that are nowhere far from 1."""
    if depth == 0:
        return draw.choice(("score", "score", "1.5", "(q_index + 1) * 0.1", "args[0]"))
    a, b = (composed(draw, depth - 1) for _ in range(2))
    return draw.choice((
        f"({a} + {b})", f"({a}) * ({b}) * 0.5", f"({a}) / (1 + {b})", f"tl.exp(-({a}))", f"tl.log(1 + {a})",
        f"tl.sqrt(0.1 + {a})", f"tl.sigmoid({a})", f"tl.where(q_index > kv_index, {a}, {b})", f"tl.exp2(0.1 * ({a}) / (1 + {b}))",
        f"squared_plus({a}, {b}) * 0.5", f"tl.abs(2.0 + tl.sin({a}))", f"tl.math.rsqrt(0.2 + {a})", f"tl.erf({a})",
        f"({a} if args[0] > 1 else {b})", f"tl.fma({a}, 0.3, {b})",
    ))  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_random_compositions(seed):
    """25 mods each."""
    draw = random.Random(seed)
    for _ in range(25):
        lines = [
            f"x = {composed(draw, 2)}",
            f"y = x + {composed(draw, 2)}",
            f"return y + {composed(draw, 1)} + tl.exp(-x)",
        ]
        x = torch.rand(ROWS, ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.2
        assert holds("\n".join(lines), x, (1.25,)), lines


def test_forms_that_round_as_ieee_does():
    """Of fp32 alone."""
    x = torch.linspace(0.3, 2.5, ROWS * ROWS).reshape(ROWS, ROWS)
    torch.testing.assert_close(values(x, made("return tl.sqrt_rn(score)"))[1], 0.5 / x.sqrt())
    torch.testing.assert_close(values(x, made("return tl.math.div_rn(2.0, score)"))[1], -2 / x**2)


@pytest.mark.parametrize("name", derivative.LIBDEVICE)
def test_rules_of_libdevice(name):
    """The interpreter has no libdevice: the formulas alone, against torch's derivatives."""
    x = torch.linspace(0.3, 2.5, 50, dtype=torch.float64, requires_grad=True)
    y = getattr(torch, {"fabs": "abs"}.get(name, name))(x)
    (wanted,) = torch.autograd.grad(y.sum(), x)
    names = {derivative.OWN: torch, "x": x, "y": y, "d": torch.ones_like(x)}
    torch.testing.assert_close(eval(derivative.LIBDEVICE[name], names).detach(), wanted)


def test_ties():
    """Of equal arguments the first counts; abs has derivative 0 at 0, clamp 1 at its limits."""
    zero = torch.zeros(ROWS, ROWS, dtype=torch.float64)
    for expression, slope in {
        "tl.maximum(score, 2 * score)": 1, "tl.maximum(2 * score, score)": 2, "tl.minimum(3 * score, score)": 3,
        "tl.abs(score)": 0, "tl.clamp(score, 0.0, 1.0)": 1,
    }.items():  # fmt: skip
        assert values(zero, made(f"return {expression}"))[1].eq(slope).all(), expression


def test_what_does_not_depend_on_the_score_has_no_derivative():
    """Nothing is computed for it: the derivative of a mod that adds is 1, whatever it adds."""
    derived = derivative_of(relative)
    text = "".join(linecache.getlines(derived.fn.__code__.co_filename))
    assert "return _d_score" in text and text.count("_d_") == 2
    assert derivative_of(relative) is derived


REFUSED = {
    "for i in tl.static_range(2):\n    score = score * 2\nreturn score": "`for i in .*only assignments",
    "while score > 0:\n    score = score - 1\nreturn score": "only assignments",
    "return score % 2": "`score % 2`: this operator",
    "return score // 2": "`score // 2`: this operator",
    "return tl.sum(score, 0)": r"`tl.sum\(score, 0\)`: in sum, ",
    "return tl.load(args[0] + score)": r"tl.load is not differentiated",
    "return score[:, None]": "this is not differentiated",
    "return tl.softmax(score)": r"`tl.softmax\(score\)`: in softmax, ",
    "return score.sum()": "the method sum",
    "a, b = score, 2\nreturn a": "a tuple depends|this is not differentiated",
    "return score if score > 0 else 2.0": "a condition depends on the score",
    "if score > 0:\n    return score\nreturn 2.0 * score": "a condition depends on the score",
    "return unknown(score)": "what is called is not known",
    "return tl.tanh(score)": r"`tl.tanh`: .*no attribute 'tanh' \(tanh is 2 \* tl.sigmoid",
    "return tl.clamp(1.0, score, 2.0)": "its limits depend",
    "return tl.floor(score)": "tl.floor is not differentiated",
    "return": "it returns nothing",
}


@pytest.mark.parametrize("body", REFUSED)
def test_refusals(body):
    with pytest.raises(Unsupported, match=f"(?s)mod, .*(?:{REFUSED[body]}).*give score_grad"):
        derivative_of(made(body))


def test_without_a_source():
    names = dict(SPACE)
    exec(f"def mod{HEAD}    return score", names)
    with pytest.raises((Unsupported, OSError)):  # Triton itself wants the source
        derivative_of(triton.jit(names["mod"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_of_attention(dtype, device):
    """Held to fp64, of a mod without score_grad."""
    q, k, v = qkv(1, 33, 41, 4, 2, 16, dtype=dtype, device=device)
    derived = {"score_mod": squashed, "score_args": (3.0,), "twins": {"score_mod": squashed_twin}}
    check_gradients(q, k, v, causal=True, **derived)


@pytest.mark.parametrize("api", ["attention_varlen", "sparse_attention"])
def test_other_layouts_have_the_same_gradients(api, device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 33, 33, 4, 2, 16, device=device))
    options = {"score_mod": squashed, "score_args": (3.0,), "causal": True}
    index = tilefold.BlockIndex.from_map(torch.ones(1, 4, 1, 1, dtype=torch.bool, device=device), seq_q=33, seq_k=33)
    cu = torch.tensor([0, 33], dtype=torch.int32, device=device)
    wanted = torch.autograd.grad(tilefold.attention(q, k, v, **options).square().sum(), (q, k, v))
    if api == "attention_varlen":
        out = tilefold.attention_varlen(q[0], k[0], v[0], cu, cu, 33, 33, **options)
    else:
        out = tilefold.sparse_attention(q, k, v, index, **options)
    for got, one in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(got, one, rtol=2e-5, atol=2e-5)


@pytest.mark.no_poison
def test_under_the_compiler(device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 17, 17, 2, 2, 16, device=device))
    mod = tilefold.constant(squashed)

    def run(q):
        return tilefold.attention(q, k, v, score_mod=mod, score_args=(2.0,))

    graph_gives(run, q)
