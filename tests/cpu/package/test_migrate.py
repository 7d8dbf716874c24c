"""The guides for who comes from another library: examples run, what is said of others is so, what is called refused is."""

import importlib
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

import tilefold
from sources import run_source
from tilefold import reference
from tilefold.compat.flash_attn import flash_attn_func
from tilefold.compat.flash_attn.register import uninstall

DOCS = Path(__file__).parents[3] / "docs"
PAGE = "\n".join(
    (DOCS / f"{name}.md").read_text(encoding="utf-8")
    for name in ("guides/flash_attn", "guides/torch", "guides/flex_attention", "guides/migrate", "reference/papers")
)
pytestmark = pytest.mark.interpreter  # mods that were never in a file have no source to compile
NEAR = {"atol": 2e-6, "rtol": 1e-5}


def examples(title):
    """The Python examples of one section, in order."""
    (section,) = (part for part in PAGE.split("\n## ") if part.startswith(title))
    return [part.split("```")[0].replace(', device="cuda"', "") for part in section.split("```python\n")[1:]]


def run(title):
    """What the names of a section's examples hold in the end, and in the order of the examples."""
    names, after = {}, []
    for example in examples(title):
        run_source(example, names)
        after.append(dict(names))
    return after


def test_flash_attn():
    try:
        first, second = run("From flash-attn")
    finally:
        uninstall()
    exact, lse = reference.attention(*(first[x] for x in "qkv"), scale=0.2, causal=True, window=(16, 0))
    torch.testing.assert_close(first["theirs"].double(), exact, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(first["lse"].double(), lse, atol=1e-4, rtol=1e-5)
    exact, _ = reference.attention_varlen(*(second[x] for x in ("q", "k", "v", "cu", "cu")), 50, 50, causal=True)
    torch.testing.assert_close(second["theirs"].double(), exact, atol=2e-3, rtol=2e-3)


def test_sdpa():
    with sdpa_kernel(SDPBackend.MATH):
        assert len(run("From torch's scaled_dot_product_attention")) == 3


def test_flex_attention():
    """FlexAttention has no backward pass on the CPU: the gradients are held to those of the formula."""
    last = run("From FlexAttention")[-1]
    i, j = torch.arange(200)[:, None], torch.arange(200)
    bias = hidden((last["document"] == last["document"][:, None]) & (i >= j)) - last["slope"][:, None, None] * (i - j)
    grads = []
    for call in (
        lambda q, k, v: tilefold.attention(q, k, v, causal=True, layout="bhsd", **last["mods"]),
        lambda q, k, v: tilefold.sparse_attention(q, k, v, last["index"], causal=True, layout="bhsd", **last["mods"]),
        lambda q, *kv: formula(*(x.transpose(1, 2) for x in (q, *(x.repeat_interleave(2, 1) for x in kv))), bias)[0],
    ):
        given = [last[name].clone().requires_grad_() for name in ("q", "k", "v")]
        grads.append(torch.autograd.grad(call(*given).square().sum(), given))
    for found in grads[:2]:
        for a, b in zip(found, grads[2], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def formula(q, k, v, bias=None, scale=None):
    """(out, lse) as xformers documents them, in fp64: [batch, seq, heads, dim], a bias that is added."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    score = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    score = score if bias is None else score + bias
    return (score.softmax(-1) @ v).transpose(1, 2), score.logsumexp(-1)


def hidden(seen):
    """The mask that an attn_bias of xformers stands for: 0 where it is seen, else -inf."""
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


def test_xformers():
    (last,) = run("From xformers")
    out, lse = formula(*(last[x] for x in "qkv"), bias=hidden(torch.ones(40, 40, dtype=torch.bool).tril()), scale=0.2)
    torch.testing.assert_close(last["ours"].double(), out, **NEAR)
    torch.testing.assert_close(last["lse"].double(), lse, **NEAR)
    blocks = torch.block_diag(torch.ones(20, 20).tril(), torch.ones(50, 50).tril()).bool()
    out, _ = formula(*[last["packed"]] * 3, bias=hidden(blocks))
    torch.testing.assert_close(last["together"].double(), out, **NEAR)
    key, value = (last[x][:, :, :, None].expand_as(last["grouped"]).flatten(2, 3) for x in ("key", "value"))
    out, _ = formula(last["grouped"].flatten(2, 3), key, value)
    torch.testing.assert_close(last["in_groups"].flatten(2, 3).double(), out, **NEAR)


I, J = torch.arange(8)[:, None], torch.arange(20)[None]
BIAS = torch.randn(1, 2, 8, 20, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("bias", "options"),
    [
        (BIAS, {"bias": BIAS}),
        (hidden(I + 12 >= J), {"causal": True}),
        (hidden((I + 12 >= J) & (I + 12 - J < 5)), {"causal": True, "window": (4, 0)}),
        (hidden((J >= I + 12 - 3) & (J <= I + 12 + 2)), {"window": (3, 2)}),
    ],
    ids=["tensor", "LowerTriangularFromBottomRight", "...LocalAttention", "LocalAttentionFromBottomRight"],
)
def test_masks_of_xformers(bias, options):
    q, k, v = torch.randn(2, 8, 2, 16), torch.randn(2, 20, 2, 16), torch.randn(2, 20, 2, 24)
    torch.testing.assert_close(tilefold.attention(q, k, v, **options).double(), formula(q, k, v, bias)[0], **NEAR)


def test_causal_masks_of_xformers_from_the_top_left():
    q, k, v = torch.randn(2, 8, 2, 16), torch.randn(2, 20, 2, 16), torch.randn(2, 20, 2, 24)
    found = tilefold.attention(q, k[:, :8], v[:, :8], causal=True).double()
    torch.testing.assert_close(found, formula(q, k, v, hidden(I >= J))[0], **NEAR)
    bias = BIAS[..., :8]
    found = tilefold.attention(q, k[:, :8], v[:, :8], causal=True, bias=bias).double()
    torch.testing.assert_close(found, formula(q, k[:, :8], v[:, :8], hidden(J[:, :8] <= I) + bias)[0], **NEAR)


def test_rows_that_see_no_key():
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    none = torch.zeros(8, 8, dtype=torch.bool)
    ours, lse = tilefold.attention(q, k, v, mask=none[None, None], layout="bhsd", return_lse=True)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=none)
    assert not ours.any() and not theirs.any() and (lse == -torch.inf).all()
    flex, aux = flex_attention(
        q, k, v, return_aux=AuxRequest(lse=True),
        score_mod=lambda score, b, h, i, j: torch.where(i < 0, score, -torch.inf),
    )  # fmt: skip
    assert not flex.any() and (aux.lse == -torch.inf).all()
    empty = k.transpose(1, 2)[:, :0]
    flash, flash_lse, _ = flash_attn_func(q.transpose(1, 2), empty, empty, return_attn_probs=True)
    assert not flash.any() and (flash_lse == torch.inf).all()


@triton.jit
def twice(score, batch, head, q_index, kv_index, args):
    while score is None:
        score = score * 2
    return score


@triton.jit
def plus(score, batch, head, q_index, kv_index, args):
    table, seq_q, seq_k = args
    return score + tl.load(table + kv_index)


X = torch.randn(2, 2, 8, 16, generator=torch.Generator().manual_seed(4))
WANTS = X.clone().requires_grad_()
LEARNED = torch.zeros(8, requires_grad=True)


@pytest.mark.parametrize(
    ("inputs", "options", "text"),
    [
        ((X.double(),) * 3, {}, "q has dtype float64, accepted: float16, bfloat16, float32"),
        ((torch.ones(1, 1, 1, 513),) * 3, {}, "513"),
        ((X, X, X), {"scale": 0.0}, "scale must be greater than 0, got 0.0"),
        ((X, X, X), {"mask": torch.ones(8, 8, dtype=torch.bool)}, "mask has 2 dimensions"),
        ((X, X, X), {"mask": torch.ones(1, 1, 8, 1, dtype=torch.bool)}, "dimension 3 (seq_k) is 1, should be 8"),
        ((X, X, X), {"bias": torch.ones(1, 1, 8, 1)}, "dimension 3 (seq_k) is 1, should be 8"),
        ((X[0],) * 3, {}, "q has 3 dimensions"),
        ((X, X[:1], X[:1]), {}, "k has shape (1, 2, 8, 16)"),
        ((X.mT,) * 3, {}, "q needs a contiguous last dimension"),
        ((WANTS, X, X), {"score_mod": twice}, "score_grad"),
        ((X, X, X), {"mask_mod": plus, "mask_args": (LEARNED,)}, "mask_args[0] requires a gradient"),
    ],
)  # fmt: skip
def test_what_is_refused(inputs, options, text):
    with pytest.raises(tilefold.TilefoldError) as caught:
        tilefold.attention(*inputs, layout="bhsd", **options)
    assert text in str(caught.value)


def test_no_second_derivatives_and_no_vmap():
    (first,) = torch.autograd.grad(tilefold.attention(WANTS, X, X, layout="bhsd").sum(), WANTS, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        first.sum().backward()
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(lambda x: tilefold.attention(x[None], X[:1], X[:1], layout="bhsd"))(X)


def test_names_of_papers():
    """The section's lists are those of the map, its result is dense attention's under the map, and each name is there."""
    (last,) = run("From VSA, FastVideo and")
    keep = last["block_map"]
    for index, num, map_ in (
        (last["q2k_index"], last["q2k_num"], keep),
        (last["k2q_index"], last["k2q_num"], keep.transpose(-1, -2)),
    ):
        assert torch.equal(num, map_.sum(-1, dtype=torch.int32))
        for b, h, row in itertools.product(*(range(n) for n in num.shape)):
            assert index[b, h, row, : num[b, h, row]].tolist() == map_[b, h, row].nonzero()[:, 0].tolist()
    valid = torch.arange(16) < last["variable_block_sizes"][:, None]
    seen = keep.repeat_interleave(16, -2)[..., :100, :].repeat_interleave(16, -1) & valid.flatten()
    exact, lse = reference.attention(*(last[x] for x in "qkv"), mask=seen[..., :100])
    torch.testing.assert_close(last["out"].double(), exact, **NEAR)
    torch.testing.assert_close(last["lse"].double(), lse, **NEAR)
    assert str(last["first_of_later_rows"])


@pytest.mark.parametrize(
    "name", re.findall(r"`((?:sparse|debug|nn)\.\w+)", PAGE.split("\n## From VSA, FastVideo and")[1])
)
def test_names_of_papers_are_names_here(name):
    part, attribute = name.split(".")
    assert hasattr(importlib.import_module(f"tilefold.{part}"), attribute)
