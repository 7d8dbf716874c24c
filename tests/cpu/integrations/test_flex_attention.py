"""tilefold.compat.flex_attention against fp64: the gallery of cases.flex, forward and backward; what is compiled; refusals."""

import inspect
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

from cases import DEEP, flex, judge, pairs, rand
from cases.flex import BATCH, HEADS, MASKS, SCORES, SEQ, blocks, blocks_of, checked, expected, tables_of, tensors
from cases.refusals import refuses
from sources import run_source
from tilefold import DtypeError, ShapeError, Unsupported, ValueRangeError
from tilefold.compat import flex_attention as ours
from tilefold.compat.flex_attention import and_masks, create_block_mask, flex_attention
from tilefold.compat.flex_attention.translate import translated
from tilefold.ops.backward import attention_backward
from tilefold.ops.dense.attention_parts import problem_of
from tilefold.ops.dense.attention_tiles import tiles_of
from tilefold.ops.sparse import classify, listed
from tilefold.plan import AttentionPlan, SparsePlan, device_named, plan_attention

pytestmark = pytest.mark.interpreter
# Those that between them make every function, condition, leaf and join of all; every condition with every number, every join.
SCORE_SEEDS = range(64) if DEEP else (2, 5, 11, 21, 27, 45, 48, 61)
MASK_SEEDS = range(64) if DEEP else (1, 3, 4, 5, 8, 11, 13, 16, 23, 35, 38, 40, 42, 50, 58)
EXTENTS = (BATCH, HEADS, SEQ, SEQ)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    checked(SCORES[name][0], tables_of(name))


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    checked(None, (), MASKS[name], blocks_of(MASKS[name], name))


@pytest.mark.parametrize(("name", "dtype"), [("softcap", torch.bfloat16), ("relative", torch.float16)])
def test_a_score_and_a_mask_in_16_bits(name, dtype):
    mask = MASKS["documents"]
    checked(SCORES[name][0], tables_of(name, dtype), mask, blocks(mask), dtype)


@pytest.mark.parametrize("seed", SCORE_SEEDS)
def test_random_scores(seed):
    """Plus half a score and an element of the table, so that both are read.  Bounded: a score of hundreds is rounded by more than
    its probability can bear, and its error is a whole row's, no statistic.  Nor is that of a table's gradient, a few sums over
    such errors: the gallery judges these."""
    made = flex.random_score(seed)

    def make(table):
        mod = made(table)

        def bounded(score, b, h, q_idx, kv_idx):
            return 4 * torch.tanh(mod(score, b, h, q_idx, kv_idx) / 4) + 0.5 * score + table[h, kv_idx]

        return bounded

    checked(make, tables_of("relative"), judged=5)


@pytest.mark.no_poison
@pytest.mark.parametrize("seed", MASK_SEEDS)
def test_random_masks(seed):
    given = (flex.random_mask(seed), BATCH, HEADS, SEQ, SEQ, "cpu", 16)
    mine, own = create_block_mask(*given), torch_block_mask(*given)
    assert torch.equal(mine.to_dense(), own.to_dense())
    assert torch.equal(mine.full_kv_num_blocks, own.full_kv_num_blocks)


def test_the_example_of_the_page():
    page = (Path(__file__).parents[3] / "docs" / "guides" / "flex_attention.md").read_text(encoding="utf-8")
    names = {}
    run_source(page.split("```python\n")[1].split("```")[0].replace('device="cuda"', 'device="cpu"'), names)
    with torch.no_grad():
        given = [names[x] for x in "qkv"], (lambda: names["distance"], (), names["same_document"])
        want, plain = (expected(*given[0], *given[1], dtype=dtype)[0] for dtype in (torch.float64, torch.float32))
    judge(names["out"].detach(), want, plain, "out")
    assert names["slope"].grad.isfinite().all()


def test_inside_compiled_code():
    """A graph break, and the same result."""
    q, k, v = tensors(kv_heads=HEADS)
    mod = flex.alibi()
    compiled = torch.compile(lambda q: 2 * flex_attention(q + 0, k, v, mod), backend="eager")
    assert torch.equal(compiled(q), 2 * flex_attention(q, k, v, mod))
    made = torch.compile(create_block_mask, backend="eager")(flex.causal, None, None, SEQ, SEQ, "cpu", 16)
    found = torch.compile(flex_attention, backend="eager")(q, k, v, mod, made)
    assert torch.equal(found, flex_attention(q, k, v, mod, blocks(flex.causal)))


def test_results_and_layouts():
    q, k, v = tensors(kv_heads=HEADS)
    want = expected(q.double(), k[:1].double().expand(2, -1, -1, -1), v[:1].double().expand(2, -1, -1, -1), scale=0.3)
    plain = expected(q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1), scale=0.3, dtype=torch.float32)
    for turned in (v, v.transpose(2, 3).contiguous().transpose(2, 3)):
        out, aux = flex_attention(q, k[:1], turned[:1], scale=0.3, return_aux=ours.AuxRequest(lse=True))
        judge(out, want[0], plain[0], "out")
        judge(aux.lse, want[1], plain[1], "lse")
        assert torch.equal(out, flex_attention(q, k[:1], turned[:1], scale=0.3, kernel_options={"BLOCK_M": 64}))


@pytest.mark.parametrize(("order", "block"), [
    *((order, None) for order in ((0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3), (0, 1, 3, 2))),
    ((2, 0, 1, 3), 16), ((0, 1, 3, 2), 16), ((0, 2, 1, 3), 128),
])  # fmt: skip
def test_out_lies_as_the_query_does(order, block):
    """So that view() and reshape() of it do what they do after torch's; with the same numbers and gradients."""
    back = [order.index(dim) for dim in range(4)]
    q, k, v = tensors(kv_heads=HEADS)
    mask = blocks(flex.causal, size=block) if block else None
    want = flex_attention(q, k, v, flex.alibi(), mask)
    turned = [t.permute(order).contiguous().permute(back).requires_grad_() for t in (q, k, v)]
    out = flex_attention(*turned, flex.alibi(), mask)
    assert torch.equal(out, want) and out.stride() == turned[0].stride()
    out.sum().backward()
    given = [t.clone().requires_grad_() for t in (q, k, v)]
    flex_attention(*given, flex.alibi(), mask).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(turned, given, strict=True))


def test_empty_inputs():
    q, k, v = tensors()
    assert flex_attention(q[:, :, :0], k, v, flex.alibi(), enable_gqa=True).shape == (BATCH, HEADS, 0, 16)
    assert flex_attention(q[:0], k[:0], v[:0], flex.alibi(), enable_gqa=True).shape == (0, HEADS, SEQ, 16)


def test_lists_are_kept_with_the_block_mask_until_it_changes():
    q, k, v = tensors(kv_heads=HEADS)
    mask = blocks(flex.causal)
    first = flex_attention(q, k, v, block_mask=mask)
    kept = dict(mask.__dict__["_tilefold"])
    flex_attention(q, k, v, block_mask=mask)
    assert len(kept) == 2 and kept == mask.__dict__["_tilefold"]
    mask.kv_num_blocks[..., 1:] = 0
    mask.full_kv_num_blocks[..., 1:] = 0
    changed = flex_attention(q, k, v, block_mask=mask)
    assert torch.equal(changed[:, :, :16], first[:, :, :16]) and not changed[:, :, 16:].any()


def test_equal_mods_are_one_function_whatever_lengths_and_tensors():
    made = {
        translated(flex.relative(rand(HEADS, n + 50)), (1, HEADS, n, n + 3), CPU, "score_mod").function
        for n in range(20, 40)
    }
    assert len(made) == 1
    windows = {translated(lambda b, h, q, kv, n=n: q - kv < n, EXTENTS, CPU, "mask_mod").function for n in range(2, 30)}
    assert len(windows) == 1
    (one,) = made
    assert "tl.load" in inspect.getsource(one.fn)


def test_distances_are_made_of_converted_indices():
    """But not whole numbers that something else is made of, nor with more tokens than float32 counts."""
    text = ("kv_index.to(tl.float32)", "q_index.to(tl.float32)")
    slopes = rand(HEADS)
    for mod in (lambda s, b, h, i, j: s + slopes[h] * (j - i), lambda s, b, h, i, j: s - (i - j).abs() * 0.5):
        made = inspect.getsource(translated(mod, EXTENTS, CPU, "score_mod").function.fn)
        assert all(each in made for each in text)
        far = inspect.getsource(translated(mod, (1, HEADS, 8, (1 << 24) + 1), CPU, "score_mod").function.fn)
        assert not any(each in far for each in text)
    made = inspect.getsource(translated(lambda s, b, h, i, j: s + (i - j) // 2, EXTENTS, CPU, "score_mod").function.fn)
    assert not any(each in made for each in text)
    q, k, v = tensors(kv_heads=HEADS)

    def mod(score, batch, head, i, j):
        return score - (i - j).abs() * 0.25 + (j - i) * slopes[head]

    out = flex_attention(q, k, v, mod)
    want = torch.einsum("bhid,bhjd->bhij", q.double(), k.double()) * q.shape[-1] ** -0.5
    i, j = torch.arange(SEQ)[:, None], torch.arange(k.shape[2])
    want = want - (i - j).abs() * 0.25 + (j - i) * slopes.double()[:, None, None]
    torch.testing.assert_close(out.double(), want.softmax(-1) @ v.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.no_poison
@pytest.mark.parametrize(
    ("mod", "error", "says"),
    [
        (lambda s, b, h, q, kv: s if q > 3 else 2 * s, Unsupported, "torch.where"),
        (lambda s, b, h, q, kv: torch.digamma(s), Unsupported, "digamma"),
        (lambda s, b, h, q, kv: torch.nn.functional.softplus(s, 2.0), Unsupported, "softplus with these arguments"),
        (lambda s, b, h, q, kv: torch.stack([s, s])[0], Unsupported, "stack"),
        (lambda s, b, h, q, kv: s + torch.ones(SEQ)[q, None], ShapeError, "2 indices"),
        (lambda s, b, h, q, kv: s + torch.ones(SEQ, 2)[q], Unsupported, "dimensions as an operand"),
        (lambda s, b, h, q, kv: s + torch.ones(SEQ, 2)[q, :], Unsupported, "slice"),
        (lambda s, b, h, q, kv: s + torch.ones(SEQ - 1)[q], ShapeError, "q_index, which goes to 45"),
        (lambda s, b, h, q, kv: s + torch.ones(3)[s], Unsupported, "an index of torch.float32"),
        (lambda s, b, h, q, kv: s + torch.ones(3)[5], IndexError, "5"),
        (lambda s, b, h, q, kv: s + torch.ones(SEQ, 2)[q, 5], ShapeError, "element 5 of a dimension of 2"),
        (lambda s, b, h, q, kv: s + torch.ones(SEQ, dtype=torch.complex64)[q], DtypeError, "complex64"),
        (lambda s, b, h, q, kv: None, Unsupported, "NoneType"),
    ],
)
def test_what_has_no_translation_is_refused_by_name(mod, error, says):
    q, k, v = tensors(kv_heads=HEADS)
    with pytest.raises(error, match=says):
        flex_attention(q, k, v, mod)


def test_gradients_by_torch_func():
    """Mods are translated outside of the transformation, whose numbers they would be."""
    q, k, v = tensors(kv_heads=HEADS)
    for mask in (None, blocks(flex.causal)):

        def loss(q, mask=mask):
            return (
                flex_attention(q, k, v, lambda s, b, h, i, j: s * 2 + torch.where(i > j, 0.5, 0.0), mask).square().sum()
            )

        leaf = q.detach().clone().requires_grad_()
        loss(leaf).backward()
        assert torch.allclose(torch.func.grad(loss)(q.detach()), leaf.grad, atol=1e-5)


@pytest.mark.no_poison
def test_calls_that_are_refused():
    q, k, v = tensors()
    refuses(ShapeError, "enable_gqa", flex_attention, q, k, v)
    refuses(ShapeError, "query must be a tensor [batch", flex_attention, q[0], k, v)
    with pytest.raises(ShapeError, match="block_mask is for"):
        flex_attention(q[:, :, 1:], k, v, block_mask=blocks(flex.causal), enable_gqa=True)
    refuses(DtypeError, "BlockMask", flex_attention, q, k, v, block_mask=torch.ones(1), enable_gqa=True)
    refuses(
        DtypeError,
        "got BlockMask: pass it as block_mask=",
        flex_attention,
        q,
        k,
        v,
        blocks(flex.causal),
        enable_gqa=True,
    )
    refuses(
        DtypeError, "score_mod must be a function or None, got str", flex_attention, q, k, v, "causal", enable_gqa=True
    )
    refuses(DtypeError, "return_aux must be an AuxRequest", flex_attention, q, k, v, enable_gqa=True, return_aux=True)
    three = ours.create_block_mask(
        lambda b, h, i, j: (i >= j) & (h < 2), None, 3, SEQ, SEQ
    )  # on the device that there is
    refuses(
        ShapeError, "block_mask is for 3 (heads), query has", flex_attention, q, k, v, block_mask=three, enable_gqa=True
    )
    for sizes, kind, says in (
        ((-1, 8), ValueRangeError, "Q_LEN must be at least 0"),
        ((8, 8.0), DtypeError, "KV_LEN must be an int"),
    ):
        refuses(kind, says, ours.create_block_mask, flex.causal, None, None, *sizes)
    refuses(
        ValueRangeError,
        "BLOCK_SIZE must be at least 1",
        ours.create_block_mask,
        flex.causal,
        None,
        None,
        8,
        8,
        BLOCK_SIZE=0,
    )
    with pytest.raises(Unsupported, match="max_scores"):
        flex_attention(q, k, v, enable_gqa=True, return_aux=ours.AuxRequest(max_scores=True))
    with pytest.raises(Unsupported, match="AuxRequest"):
        flex_attention(q, k, v, enable_gqa=True, return_lse=True, return_aux=ours.AuxRequest(lse=True))


turned_table = torch.randn(SEQ, SEQ)
ADDED = {  # a table's shape, with rows of 16 bytes, and how it is read
    "each": ((BATCH, HEADS, SEQ, SEQ + 3), lambda t, s, b, h, i, j: s + t[b, h, i, j]),
    "of one sequence, longer": ((3, HEADS, SEQ + 16, SEQ + 11), lambda t, s, b, h, i, j: t[2, h, i, j] + s),
    "of one head": ((BATCH, SEQ, SEQ + 3), lambda t, s, b, h, i, j: s + t[b, i, j]),
    "of keys": ((HEADS, BATCH, SEQ + 3), lambda t, s, b, h, i, j: s + t[h, b, j]),
    "of all": ((SEQ, SEQ + 3), lambda t, s, b, h, i, j: s + t[i, j]),
}


@pytest.mark.parametrize("name", ADDED)
def test_a_table_that_is_added_is_a_bias(name):
    """Its kernels read tiles, and make its gradient without a search for places."""
    shape, read = ADDED[name]
    checked(lambda t: partial(read, t), (torch.randn(shape),))
    read = partial(read, torch.randn(shape))
    assert translated(read, EXTENTS, CPU, "score_mod").bias is not None
    q = torch.randn(BATCH, HEADS, SEQ, 16)
    assert ours.flex_attention_plan(q, q, q, score_mod=read).problem.score_mods == ("bias",)


@pytest.mark.parametrize("read", [
    lambda t, s, b, h, i, j: 2 * s + t[i, j], lambda t, s, b, h, i, j: s - t[i, j],
    lambda t, s, b, h, i, j: s + t[i, i], lambda t, s, b, h, i, j: s + t[i, (j - i).abs()], lambda t, s, b, h, i, j: s + t[i, 3],
    lambda t, s, b, h, i, j: s + 2 * t[i, j],
])  # fmt: skip
def test_what_else_is_added_is_no_bias(read):
    made = translated(partial(read, torch.randn(SEQ, SEQ + 3)), EXTENTS, CPU, "score_mod")
    assert made.bias is None


def test_tables_whose_rows_no_box_reads_and_indices_that_are_tensors():
    turned = translated(lambda s, b, h, i, j: s + turned_table[j, i], EXTENTS, CPU, "score_mod")
    assert tiles_of(turned.bias) == ""
    table, first = torch.randn(2, BATCH, HEADS, SEQ, SEQ), torch.tensor(1, dtype=torch.uint8)
    assert translated(lambda s, b, h, i, j: s + table[first, b, h, i, j], EXTENTS, CPU, "score_mod").bias is None


def test_a_learned_table_of_the_call_s_own_size_is_not_copied_for_its_gradient():
    table = torch.randn(1, HEADS, SEQ, SEQ, requires_grad=True)
    node, passed = (
        translated(lambda s, b, h, i, j: s + table[0, h, i, j], EXTENTS, CPU, "score_mod").bias.grad_fn,
        set(),
    )
    while node is not None:
        passed.add(type(node).__name__)
        node = next((after for after, _ in node.next_functions if after is not None), None)
    assert "AccumulateGrad" in passed
    assert not passed & {"SelectBackward0", "SliceBackward0", "IndexBackward0"}


def test_blocks_by_hand_beside_a_table_that_is_learned():
    """A BlockMask without a mask_mod, whose blocks count."""
    counts, order = torch.tensor([[[1, 2, 2]]]).int(), torch.tensor([[[[0, 1, 2], [0, 2, 1], [1, 2, 0]]]]).int()
    by_hand = ours.BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=16, seq_lengths=(SEQ, SEQ))
    listed = torch.tensor([[1, 0, 0], [1, 0, 1], [0, 1, 1]]).bool()

    def mask(b, h, q_idx, kv_idx):
        return listed[q_idx // 16, kv_idx // 16]

    checked(flex.relative, tables_of("relative"), mask, by_hand)
    checked(None, (), mask, by_hand)


def by_hand(size, device="cpu"):
    """(BlockMask, kinds) whose tables show what their mask_mod hides, and the other way round; the same for all heads."""
    kinds = torch.randint(0, 3, (BATCH, 1, -(-SEQ // size), -(-SEQ // size)))
    kinds[1, 0, 0] = 0  # rows without keys
    parts = []
    for kind in (1, 2):
        keep = (kinds == kind).to(torch.int8)
        parts += [keep.sum(-1).int().to(device), keep.argsort(dim=-1, descending=True, stable=True).int().to(device)]
    made = ours.BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=size, mask_mod=flex.causal, seq_lengths=(SEQ, SEQ))
    return made, kinds


@pytest.mark.parametrize(("learned", "size", "dtype"), pairs([True, False], [16, 12], [torch.float32, torch.bfloat16]))
def test_what_the_tables_say_counts(learned, size, dtype):
    """Of blocks of 16 lists are made; of 12, and where a table is learned, the dense kernels look at the table."""
    mask, kinds = by_hand(size)

    def shown(b, h, q_idx, kv_idx):
        kind = kinds[:, 0][b, q_idx // size, kv_idx // size]
        return (kind == 2) | ((kind == 1) & (q_idx >= kv_idx))

    make, tables = (flex.relative, tables_of("relative")) if learned else (None, ())
    checked(make, tables, shown, mask, dtype, judged=7 if dtype == torch.float32 else 5)


def test_which_kernels_serve_a_block_mask(monkeypatch):
    """On sm_90 the dense ones over lists of tiles, where they make gradients, too; the plan says why not."""
    h200, calls = device_named("h200"), []

    def planned(q, k, v, call):
        calls.append(call)
        sizes = dict(zip(("batch", "heads", "seq_q", "dim_qk"), q.shape, strict=True))
        sizes |= {"kv_heads": k.shape[1], "seq_k": k.shape[2], "dim_v": v.shape[3]}
        problem = problem_of(q, k, v, call, sizes, (-1, -1))
        return SimpleNamespace(plan=plan_attention(problem, h200), problem=problem)

    for module in (listed, attention_backward):
        monkeypatch.setattr(module, "device_of", lambda *args: h200)
    monkeypatch.setattr(listed.attention, "prepare", planned)

    def taken(n, dim, dtype=torch.bfloat16, graded=True, size=128):
        q, k, v = (torch.empty(1, 16, n, dim, dtype=dtype, device="meta", requires_grad=graded) for _ in range(3))
        counts = torch.ones(1, 1, -(-n // size), dtype=torch.int32, device="meta")
        order = torch.zeros(1, 1, -(-n // size), -(-n // size), dtype=torch.int32, device="meta")
        tables = (counts, order, counts, order)
        mask = ours.BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=size, mask_mod=flex.causal, seq_lengths=(n, n))
        return ours._planned(q, k, v, None, mask, None, False)

    for made in (taken(2048, 128), taken(2048, 64, torch.float16), taken(2048, 96), taken(2000, 64)):
        assert made.lists is None and classify._is_table(made.options["mask_mod"])
        assert calls.pop().mask_mod is made.options["mask_mod"]
    for made, why in (
        (taken(1000, 64), "scores a head on"),
        (taken(2048, 64, torch.float32), "not float32"),
        (taken(2048, 192), "the backward pass would look at all tiles"),
    ):
        assert made.lists is not None and why in made.why
    assert taken(2048, 64, torch.float32, size=96).lists is None  # block-sparse kernels have no such blocks


def test_the_plan():
    q, k, v = tensors(kv_heads=HEADS)
    assert isinstance(ours.flex_attention_plan(q, k, v, flex.alibi()), AttentionPlan)
    made = ours.flex_attention_plan(q, k, v, block_mask=blocks(flex.causal))
    assert isinstance(made, SparsePlan)
    assert "dense kernels over lists of tiles are not taken: attention_forward_hopper is not taken" in made.reason


@pytest.mark.parametrize("size", [16, (32, 16), 64])
@pytest.mark.parametrize("name", MASKS)
def test_block_masks_are_those_of_torch(name, size):
    given = (MASKS[name], BATCH, HEADS, SEQ, SEQ - 3, "cpu", size)
    mine, own = create_block_mask(*given), torch_block_mask(*given)
    for part in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        for field in (part, f"full_{part}"):
            a, b = getattr(mine, field), getattr(own, field)
            assert a.dtype == b.dtype and torch.equal(a, b), field
    assert (mine.seq_lengths, mine.BLOCK_SIZE, mine.mask_mod) == (own.seq_lengths, own.BLOCK_SIZE, own.mask_mod)


@pytest.mark.no_poison
def test_block_masks_that_torch_makes():
    for options in ({"BLOCK_SIZE": 24}, {"separate_full_blocks": False, "BLOCK_SIZE": 16}):
        given = (flex.causal, None, None, SEQ, SEQ, "cpu")
        mine, own = create_block_mask(*given, **options), torch_block_mask(*given, **options)
        assert torch.equal(mine.to_dense(), own.to_dense())
        assert (mine.full_kv_indices is None) == (own.full_kv_indices is None)


@pytest.mark.no_poison
def test_install_and_uninstall():
    before = theirs.flex_attention, theirs.create_block_mask
    ours.install()
    ours.install()
    try:
        assert theirs.flex_attention is flex_attention
        assert theirs.create_block_mask is create_block_mask
    finally:
        ours.uninstall()
        ours.uninstall()
    assert (theirs.flex_attention, theirs.create_block_mask) == before


def test_masks_joined_by_torch_are_joined_here():
    q, k, v = tensors(kv_heads=HEADS)
    mask = and_masks(flex.causal, flex.document)
    found = flex_attention(q, k, v, block_mask=blocks(mask))
    want = theirs.flex_attention(q, k, v, block_mask=blocks(mask))
    oracle = expected(q.double(), k.double(), v.double(), mask_mod=mask)[0]
    judge(found, oracle, want, "out")
