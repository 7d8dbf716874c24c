"""Masks and scores as values: against their own definition in plain torch, and against the keywords that say the same."""

import pytest
import torch
import triton

import tilefold
from cases import (
    check,
    dilated,
    dilated_twin,
    graph_gives,
    ints,
    one,
    packed,
    qkv,
    rand,
    relative,
    relative_twin,
    small_plan,
)
from cases import prefix as by_mod
from cases.gradient import check_gradients, gradients
from cases.refusals import refuses
from examples import examples
from tilefold import DtypeError, Mask, Score, ShapeError, Unsupported, ValueRangeError, masks, reference, scores
from tilefold.device import ranges
from tilefold.ops.masking import Terms, _computes, _tensors, spelled

SQ, SK = 37, 45


def every(device):
    """Each constructor, and what is made of several; batch 2, heads 4."""
    rows = rand(2, 1, SQ, SK, device=device) > -0.7
    lengths, cu = ints(40, 13, device=device), ints(0, 7, 7, 30, 41, device=device)
    kinds = (3 * rand(2, 4, 4, 5, device=device).sigmoid()).to(torch.uint8)
    return {
        "causal": masks.causal(),
        "window": masks.window(9, 3),
        "documents": masks.documents(cu),
        "prefix": masks.prefix(19),
        "prefix of each": masks.prefix(ints(3, 33, device=device)),
        "keys": masks.keys(lengths),
        "tensor": masks.tensor(rows),
        "rule": masks.rule(dilated, (3,), dilated_twin),
        "blocks": masks.blocks(kinds.mT.contiguous().mT, (11, 10), masks.keys(lengths) | masks.prefix(9)),
        "blocks alone": masks.blocks(kinds[:1, :1], (11, 10)) & masks.causal(),
        "bands": masks.window(20, None) & masks.window(None, 5) & masks.causal(),
        "tensors": masks.tensor(rows)
        & masks.tensor(rows[:1, :, :1])
        & masks.tensor(rand(1, 4, 1, SK, device=device) > -1),
        "prefix and more": masks.keys(lengths) & masks.prefix(21) & masks.rule(dilated, (3,), dilated_twin),
        "prefix in a window": masks.prefix(21) & masks.window(30, 8),
        "either": masks.window(4, 0) | masks.keys(ints(5, 0, device=device)) | masks.documents(cu),
        "not": ~masks.documents(cu) & masks.causal(),
        "nested": ~((masks.causal() & masks.tensor(rows)) | masks.rule(dilated, (2,), dilated_twin)) | masks.prefix(4),
        "nothing": masks.causal() & ~masks.causal(),
    }


NAMES = tuple(every("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_forward(name, device):
    mask = every(device)[name]
    check(*qkv(2, SQ, SK, 4, 2, 16, dtype=torch.float16, device=device), mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["prefix", "prefix of each", "nested"])
def test_dtypes(name, dtype, device):
    check(*qkv(2, SQ, SK, 4, 1, 24, dtype=dtype, device=device), (32, 16), mask=every(device)[name])


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("nothing", "window", "causal", "tensor", "bands")])
def test_gradients(name, device):
    unjudged = ("dq", "dk", "dv") if name == "nothing" else ()
    check_gradients(
        *qkv(2, SQ, SK, 4, 2, 16, dtype=torch.float16, device=device), mask=every(device)[name], unjudged=unjudged
    )


def test_gradients_of_a_prefix_in_fp32_with_bias_and_sinks(device):
    """Every kernel of the backward pass: weights, dq, dk and dv, the bias's."""
    options = {"bias": rand(1, 4, SQ, SK, device=device), "sinks": rand(4, device=device)}
    for n in (23, ints(0, 40, device=device)):
        check_gradients(*qkv(2, SQ, SK, 4, 2, 16, device=device), mask=masks.prefix(n), **options)


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 31, 45, 99])
def test_lengths_of_a_prefix(n, device):
    """Each against the tile grid, shorter and longer than the keys, and with fewer and more queries than keys."""
    for sq, sk in ((SK, SK), (20, SK), (SK, 20)):
        q, k, v = qkv(1, sq, sk, 1, 1, 16, dtype=torch.float16, device=device)
        check(q, k, v, mask=masks.prefix(n))
        if sq > 20:
            check_gradients(q, k, v, mask=masks.prefix(n), lse=False)


def test_packed(device):
    tensors, where = packed([19, 23, 0, 7], [23, 23, 5, 20], h=2, hk=1, d=16, dv=16, dtype=torch.float16, device=device)
    slopes, rows = rand(4, 2, device=device).abs(), rand(4, 1, 23, 23, device=device) > -0.7
    check(*tensors, varlen=where, mask=masks.tensor(rows) | masks.rule(dilated, (3,), dilated_twin))
    score = scores.softcap(3.0).then(scores.alibi(slopes))
    for mask, more in (
        (masks.prefix(ints(20, 3, 1, 40, device=device)), {}),
        (masks.prefix(8) & masks.keys(ints(30, 20, 5, 9, device=device)), {"score": score}),
    ):
        check(*tensors, varlen=where, mask=mask, **more)
        check_gradients(*tensors, varlen=where, mask=mask, lse=False, **more)
    with pytest.raises(Unsupported, match="documents in attention_varlen"):
        tilefold.attention_varlen(*tensors, *where, mask=masks.documents(ints(0, 5, device=device)))


# ---------------------------------------------------------------- the band of a prefix


def test_a_prefix_skips_tiles(monkeypatch, device):
    """NaN in keys that no query of a tile sees stays there: their tiles are not read, forward or backward."""
    q, k, v = qkv(1, 64, 64, 1, 1, 16, device=device)
    poisoned = v.clone()
    poisoned[:, 32:] = float("nan")  # past the prefix: only queries from 32 on see them
    plan = small_plan(q, k, v, mask=masks.prefix(20))
    assert plan.problem.mask_mods == ("prefix",)
    out = tilefold.attention(q, k, poisoned, mask=masks.prefix(20), plan=plan)
    assert torch.isfinite(out[:, :32]).all()
    rule = masks.prefix(20) & masks.window(None, 63)  # the same mask, as a rule: 0 times NaN
    assert torch.isnan(tilefold.attention(q, k, poisoned, mask=rule)[:, :32]).any()
    q.requires_grad_()
    backward = small_plan_backward(q, k, v)
    out = tilefold.attention(q, k, poisoned, mask=masks.prefix(20), plan=plan, backward_plan=backward)
    (dq,) = torch.autograd.grad(out[:, :32].sum(), q)
    assert torch.isfinite(dq[:, :32]).all()


def small_plan_backward(q, k, v):
    tile = tilefold.plan.Tile(16, 16, 4, 1)
    return tilefold.attention_backward_plan(q, k, v, mask=masks.prefix(20)).with_tiles(tile, tile, tile)


def test_hopper_says_why_a_prefix_is_not_its_own():
    problem = tilefold.AttentionProblem(2, 4096, 4096, 16, 4, 128, 128, mask_mods=("prefix",))
    plan = tilefold.plan_attention(problem, tilefold.plan.device_named("h200"))
    assert plan.kernel != "attention_forward_hopper"
    assert any("not a prefix" in each.why for each in plan.rejected)
    assert "prefix" in str(plan)


def test_one_definition_of_bands():
    """Hopper's kernels and the host use those of the portable ones."""
    from tilefold.kernels.hopper import backward_mask, mask, score_mods
    from tilefold.ops.dense.attention_parts import kind_of

    for module, names in ((mask, ("FULL", "WINDOW")), (score_mods, ("CAUSAL",)),
                          (backward_mask, ("FULL", "CAUSAL", "WINDOW"))):  # fmt: skip
        assert all(getattr(module, name) is getattr(ranges, name) for name in names)
    kinds = [kind_of(w, band) for w, band in (((-1, -1), ""), ((-1, 0), ""), ((3, 2), ""), ((-1, -1), "prefix"))]
    assert kinds == [int(getattr(ranges, name).value) for name in ("FULL", "CAUSAL", "WINDOW", "PREFIX")]


# ---------------------------------------------------------------- the same as keywords


def test_every_rule_is_there_in_triton_and_in_torch(device):
    from tilefold.cpu import rules
    from tilefold.device import mods

    q, k, _ = qkv(2, SQ, SK, 4, 2, 16, device=device)
    made = [spelled(q, k, Terms(mask=mask), None).mask_mod for mask in every(device).values()]
    names = {rule.function for one in made for rule in getattr(one, "rules", ()) if isinstance(rule.function, str)}
    assert {"prefix", "prefix_each", "keys", "between", "keep", "listed", "whole"} <= names
    for name in (*names, "every", "either", "inverse"):
        assert hasattr(mods, name) and hasattr(rules, name), name


def test_keywords_are_shorthands(device):
    """The same bits, whichever way a mask or a score is spelled."""
    q, k, v = qkv(2, SQ, SK, 4, 2, 16, dtype=torch.float16, device=device)
    rows, bias, slopes = (
        rand(2, 1, SQ, SK, device=device) > -0.7,
        rand(1, 4, SQ, SK, device=device),
        rand(4, device=device),
    )
    table = rand(4, 9, device=device)
    for values, keywords in (
        ({"mask": masks.causal()}, {"causal": True}),
        ({"mask": masks.window(9, None), "causal": True}, {"window": (9, 0)}),
        ({"mask": masks.tensor(rows), "window": (9, 3)}, {"mask": rows, "window": [9, 3]}),
        ({"mask": masks.rule(dilated, (3,))}, {"mask_mod": dilated, "mask_args": (3,)}),
        ({"mask": masks.causal() & masks.tensor(rows), "mask_mod": dilated, "mask_args": (3,)},
         {"mask": rows, "causal": True, "mask_mod": dilated, "mask_args": (3,)}),
        ({"score": scores.softcap(3.0).then(scores.alibi(slopes)).then(scores.bias(bias))},
         {"softcap": 3.0, "alibi_slopes": slopes, "bias": bias}),
        ({"score": scores.rule(relative, (table, 4), one)}, {"score_mod": relative, "score_args": (table, 4), "score_grad": one}),
    ):  # fmt: skip
        assert torch.equal(tilefold.attention(q, k, v, **values), tilefold.attention(q, k, v, **keywords))
        assert tilefold.attention_plan(q, k, v, **values) == tilefold.attention_plan(q, k, v, **keywords)


def test_gradient_of_a_bias_in_a_score(device):
    tensors = qkv(1, 19, 23, 2, 1, 16, device=device)
    bias, dout = rand(1, 2, 19, 23, device=device), rand(1, 19, 2, 16, device=device)
    expected = gradients(tensors, dout, None, bias=bias)
    own = bias.clone().requires_grad_()
    out = tilefold.attention(*tensors, score=scores.bias(own))
    (got,) = torch.autograd.grad(out, own, dout)
    assert torch.equal(got, expected[3])


def test_scores_have_their_definition(device):
    q, k, v = qkv(2, SQ, SK, 4, 2, 16, dtype=torch.float16, device=device)
    table, slopes = rand(4, 9, device=device), rand(2, 4, device=device).abs()
    score = scores.softcap(2.5).then(scores.alibi(slopes)).then(scores.rule(relative, (table, 4), one, relative_twin))
    check(q, k, v, score=score, mask=masks.prefix(20))
    check_gradients(q, k, v, score=score, mask=masks.prefix(20))


def test_lists_and_caches(device):
    q, k, v = qkv(1, 64, 64, 2, 1, 16, device=device)
    index = tilefold.BlockIndex.from_map(
        torch.ones(1, 1, 4, 4, dtype=torch.bool, device=device), block_q=16, block_k=16
    )
    rows = rand(1, 2, 64, 64, device=device) > -0.7
    for mask in (
        masks.causal(),
        masks.prefix(20),
        masks.window(5, 9) & masks.tensor(rows),
        ~masks.keys(ints(40, device=device)),
    ):
        out, lse = tilefold.sparse_attention(q, k, v, index, mask=mask, score=scores.softcap(3.0), return_lse=True)
        want = tilefold.attention(q, k, v, mask=mask, softcap=3.0, return_lse=True)
        torch.testing.assert_close(out, want[0])
        torch.testing.assert_close(lse, want[1])
        plan = tilefold.sparse_plan(q, k, v, index, mask=mask)
        assert plan.problem.attention.causal is (mask == masks.causal())
    refuses(DtypeError, "masks.tensor(mask)", tilefold.sparse_attention, q, k, v, index, mask=rows)
    with pytest.raises(Unsupported, match="alibi_slopes of a score over lists"):
        tilefold.sparse_attention(q, k, v, index, score=scores.alibi(rand(2, device=device)))
    new = q[:, :3]
    lengths = ints(50, device=device)
    for mask, keywords in ((masks.causal(), {"causal": True}), (masks.window(9, 0) & masks.tensor(rows[:, :, :3]),
                                                               {"window": (9, 0), "mask": rows[:, :, :3]})):  # fmt: skip
        options = {"cache_seqlens": lengths, "mask": mask, "score": scores.softcap(3.0)}
        got = tilefold.attention_kvcache(new, k, v, **options)
        assert torch.equal(got, tilefold.attention_kvcache(new, k, v, cache_seqlens=lengths, softcap=3.0, **keywords))
        assert "softcap" in tilefold.attention_kvcache_plan(new, k, v, **options).problem.attention.score_mods
    refuses(Unsupported, "its mask needs mask_mod", tilefold.attention_kvcache, new, k, v, mask=masks.keys(lengths))


def test_a_mask_that_is_used_again(device):
    """What was worked out for other sizes, or from other numbers, is not taken."""
    q, k, v = qkv(2, SQ, SK, 4, 2, 16, device=device)
    lengths, cu = ints(40, 13, device=device), ints(0, 20, SK, device=device)
    rows, column = rand(2, 1, SQ, SK, device=device) > -0.7, rand(1, 1, 1, SK, device=device) > -1
    for mask in (
        masks.prefix(lengths) & masks.keys(lengths),
        masks.documents(cu),
        masks.tensor(rows) & masks.tensor(column),
    ):
        first = tilefold.attention(q, k, v, mask=mask)
        assert torch.equal(tilefold.attention(q, k, v, mask=mask), first)
        lengths.copy_(ints(7, 33, device=device))
        cu.copy_(ints(0, 5, SK, device=device))
        column.logical_not_()
        check(q, k, v, mask=mask)
        if mask.kind != "all":
            check(q[:, :20], k[:, :30], v[:, :30], mask=mask)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_kept_until_they_change(name, device):
    """So that lists of tiles are: what a mask becomes has the same tensors in each call."""
    q, k, _ = qkv(2, SQ, SK, 4, 2, 16, device=device)
    mask = every(device)[name]

    def tensors_of(**beside):
        made = spelled(q, k, Terms(mask=mask, **beside), None)
        return made.mask_mod, [t for t in (made.mask, *made.mask_args) if isinstance(t, torch.Tensor)]

    def kept(**beside):
        (mod, first), (other, second) = tensors_of(**beside), tensors_of(**beside)
        assert mod is other
        return all(a is b for a, b in zip(first, second, strict=True))

    assert kept() and kept(causal=True) and kept(window=(9, 0))
    _, before = tensors_of()
    for t in _tensors(mask.args):
        t.copy_(t.clone())
    _, after = tensors_of()
    assert all(a is b for a, b in zip(before, after, strict=True)) is (not _computes(mask))
    with torch.inference_mode():
        mask = every(device)[name]
    assert kept() is (not _computes(mask))


# ---------------------------------------------------------------- random ones


hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
LEAVES = st.sampled_from(
    ["causal", "window", "documents", "prefix", "prefix of each", "keys", "tensor", "blocks", "rule"]
)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda each: st.one_of(st.tuples(st.just("~"), each), st.tuples(st.sampled_from("&|"), each, each)),
    max_leaves=5,
)


def made(tree, leaves):
    if isinstance(tree, str):
        return leaves[tree]
    parts = [made(part, leaves) for part in tree[1:]]
    return ~parts[0] if tree[0] == "~" else parts[0] & parts[1] if tree[0] == "&" else parts[0] | parts[1]


@hypothesis.given(
    tree=EXPRESSIONS, dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), group=st.sampled_from([1, 2, 4]),
    backward=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
@examples(14)
def test_expressions(tree, dtype, group, backward, seed, device):
    torch.manual_seed(seed)
    leaves = every(device)
    mask = made(tree, leaves)
    tensors = qkv(2, SQ, SK, 4, 4 // group, 16, dtype=dtype, device=device)
    check(*tensors, (32, 16), mask=mask)
    seen = mask.dense(2, 4, SQ, SK, device).sum(-1)
    if backward and dtype != torch.float32 and int(seen.max()) > 4:
        check_gradients(*tensors, mask=mask, lse=False)


# ---------------------------------------------------------------- values


def test_they_print_and_compare():
    cu, other = ints(0, 4), ints(0, 4)
    mask = masks.causal() & (masks.documents(cu) | masks.prefix(3)) & ~(masks.window(2, None) & masks.keys(cu))
    assert repr(mask) == "causal() & (documents(<int32 [2]>) | prefix(3)) & ~(window(2, -1) & keys(<int32 [2]>))"
    assert repr(masks.rule(dilated, (3, cu))) == "rule(dilated, (3, <int32 [2]>))"
    assert ~~mask is mask
    assert masks.causal() == masks.causal()
    assert hash(masks.documents(cu)) == hash(masks.documents(cu))
    assert masks.documents(cu) == masks.documents(cu) != masks.documents(other)
    assert len({masks.prefix(3), masks.prefix(3), masks.prefix(4)}) == 2
    with pytest.raises(AttributeError):
        mask.kind = "any"
    with pytest.raises(TypeError, match="combine masks by &"):
        masks.causal() and masks.prefix(3)
    with pytest.raises(TypeError):
        masks.causal() & cu
    score = scores.softcap(30.0).then(scores.bias(torch.zeros(1, 1, 1, 4)))
    assert repr(score) == "softcap(30.0).then(bias(<float32 [1, 1, 1, 4]>))"
    assert repr(scores.rule(relative, (3,), one)) == "rule(relative, (3,), grad=one)"
    assert scores.softcap(3.0) == scores.softcap(3)
    assert isinstance(mask, Mask)
    assert isinstance(score, Score)


def refusals(device):
    q, k, v = qkv(2, 20, 20, 4, 2, 16, device=device)

    def call(**options):
        return tilefold.attention(q, k, v, **options)

    lengths = ints(3, 4, 5, device=device)
    return {
        "left must be an int": (DtypeError, lambda: masks.window(1.5, 0)),
        "right must be at least -1, got -2": (ValueRangeError, lambda: masks.window(0, -2)),
        "n must be at least 0, got -3": (ValueRangeError, lambda: masks.prefix(-3)),
        "n must be an int32 tensor": (DtypeError, lambda: masks.prefix(torch.tensor([1]))),
        "lengths must be an int32 tensor": (DtypeError, lambda: masks.keys([3])),
        "lengths has shape": (ShapeError, lambda: masks.keys(ints(1)[None])),
        "cu_seqlens must be contiguous": (tilefold.LayoutError, lambda: masks.documents(ints(0, 1, 2, 3)[::2])),
        "one document has 2 offsets": (ShapeError, lambda: masks.documents(ints(0))),
        "mask must be a bool tensor": (DtypeError, lambda: masks.tensor(torch.zeros(1, 1, 1, 1))),
        "expected .batch or 1": (ShapeError, lambda: masks.tensor(torch.zeros(3, 3, dtype=torch.bool))),
        "args must be a tuple": (DtypeError, lambda: masks.rule(dilated, [3])),
        "has no definition in torch": (Unsupported, lambda: masks.rule(dilated, (3,)).dense(1, 1, 2, 2)),
        "cap must be greater than 0": (ValueRangeError, lambda: scores.softcap(0.0)),
        "slopes must be a float32": (DtypeError, lambda: scores.alibi([1.0])),
        "slopes has shape": (ShapeError, lambda: scores.alibi(torch.zeros(1, 1, 1))),
        "tensor must be a float16": (DtypeError, lambda: scores.bias(torch.zeros(1, 1, 1, 1, dtype=torch.int32))),
        "tensor has shape": (ShapeError, lambda: scores.bias(torch.zeros(3))),
        "softcap after bias": (Unsupported, lambda: scores.bias(torch.zeros(1, 1, 1, 1)).then(scores.softcap(3.0))),
        "two steps of softcap": (Unsupported, lambda: scores.softcap(2.0).then(scores.softcap(3.0))),
        r"then\(\) takes a Score": (DtypeError, lambda: scores.softcap(2.0).then(3.0)),
        "score must be a tilefold.Score": (DtypeError, lambda: call(score=3.0)),
        "score and softcap were given": (ValueRangeError, lambda: call(score=scores.softcap(2.0), softcap=3.0)),
        "score and bias were given": (
            ValueRangeError, lambda: call(score=scores.softcap(2.0), bias=torch.zeros(1, 1, 1, 20, device=device))),
        "lengths has shape .3,., expected .2.": (ShapeError, lambda: call(mask=masks.keys(lengths))),
        "n has shape .3,., expected .2.": (ShapeError, lambda: call(mask=masks.prefix(lengths))),
        "n of a mask is on meta": (tilefold.DeviceError, lambda: call(mask=masks.prefix(ints(1, 2, device="meta")))),
        "a tensor of a mask has shape": (
            ShapeError, lambda: call(mask=~masks.tensor(torch.zeros(3, 1, 20, 20, dtype=torch.bool, device=device)))),
        "fn of masks.rule must be a @triton.jit function": (
            DtypeError, lambda: call(mask=masks.causal() | masks.rule(dilated_twin, (3,)))),
        "fn of masks.rule takes": (ValueRangeError, lambda: call(mask=~masks.rule(by_mod))),
        "causal must be a bool": (DtypeError, lambda: call(mask=masks.prefix(3), causal=1)),
        "mask_args were given without mask_mod": (ValueRangeError, lambda: call(mask=masks.prefix(3), mask_args=(1,))),
    }  # fmt: skip


@pytest.mark.parametrize("message", refusals("cpu"))
def test_refusals(message, device):
    error, call = refusals(device)[message]
    with pytest.raises(error, match=message):
        call()


def early(at):
    @triton.jit
    def seen(score, batch, head, q_index, kv_index, args):
        return kv_index < at

    return seen


def test_two_functions_of_one_name(device):
    """Triton would call the first for both."""
    first, second = early(3), early(4)
    q, k, v = qkv(1, 20, 20, 2, 1, 16, device=device)
    with pytest.raises(Unsupported, match="two functions of this mask are called"):
        tilefold.attention(q, k, v, mask=masks.rule(first) & masks.rule(second))


# ---------------------------------------------------------------- torch.compile


@pytest.mark.no_poison
@pytest.mark.parametrize("name", ["prefix", "prefix of each", "bands", "tensors", "nested", "not"])
def test_compiled(name, device):
    q, k, v = qkv(2, SQ, SK, 4, 2, 16, dtype=torch.float16, device=device)
    fn, mask = tilefold.constant(dilated), every(device)[name]
    if name == "nested":
        mask = masks.rule(fn, (3,)) | mask.args[1] | ~masks.causal()

    def layer(q, k, v):
        return tilefold.attention(2 * q, k, v, mask=mask, score=scores.softcap(4.0)) + 1

    graph_gives(layer, q, k, v, times=2)


@pytest.mark.no_poison
def test_compiled_with_masks_made_inside_and_gradients(device):
    q, k, v = qkv(2, SQ, SK, 4, 2, 16, device=device)
    lengths = ints(40, 13, device=device)

    def layer(q, k, v, lengths, n):
        mask = masks.prefix(n) & masks.keys(lengths) | masks.window(2, 2)
        return tilefold.attention(q, k, v, mask=mask)

    leaves = [t.requires_grad_() for t in (q, k, v)]
    graph_gives(layer, *leaves, lengths, 7)


def test_reference_is_the_definition():
    """A prefix by hand."""
    seen = masks.prefix(2).dense(1, 1, 4, 4)[0, 0]
    assert seen.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert masks.documents(ints(0, 1, 3)).dense(1, 1, 2, 4)[0, 0].int().tolist() == [[0, 1, 1, 0], [0, 0, 0, 0]]
    assert masks.keys(ints(1, 3)).dense(2, 1, 1, 4)[:, 0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]
    q, k, v = qkv(1, 4, 4, 1, 1, 8)
    by_hand, _ = reference.attention(q, k, v, mask=seen[None, None])
    assert torch.equal(reference.attention(q, k, v, mask=masks.prefix(2))[0], by_hand)
