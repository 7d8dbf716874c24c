"""The coarse stage against its fp64 oracle, forward and backward: kinds, sizes, groups, lengths, strides, refusals."""

import math
from dataclasses import replace

import pytest
import torch

import tilefold
from cases import hold_back, qkv, rand, same
from cases.coarse import held, padding, run, sized, weights
from cases.refusals import refuses, refuses_given
from tilefold import reference, sparse
from tilefold.errors import DtypeError, LayoutError, ShapeError, Unsupported, ValueRangeError
from tilefold.ops import records
from tilefold.plan import device_named
from tilefold.plan.limits import Tile
from tilefold.plan.problem import AttentionProblem
from tilefold.plan.sparse import coarse as plans
from tilefold.plan.sparse.coarse import CoarseProblem, plan_coarse

KINDS = ("block", "dense", "pooled")
HALVES = (torch.bfloat16, torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float32) for kind in KINDS), *zip(KINDS, HALVES, strict=True)]
)
def test_kinds(kind, dtype, device):
    """Batch, a group of 2, V of another width, learned weights per head, lengths off the block and unequal."""
    q, k, v = qkv(2, 37, 54, 4, 2, 32, 24, dtype=dtype, device=device)
    w = weights(kind, 2, 54, 16, dtype=dtype, device=device)
    held(q, k, v, *w, kind=kind, block=16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_reductions(kind, reduction, device):
    q, k, v = qkv(1, 40, 40, 2, 2, 16, device=device)
    w = weights(kind, None, 40, 16, device=device) if kind == "dense" else ()
    held(q, k, v, *w, kind=kind, reduction=reduction, block=16, scale=0.4)


@pytest.mark.parametrize("size", [0.01, 8.0], ids=["flat", "peaked"])
def test_flat_and_peaked_rows(size, device):
    """Probabilities that are all alike, and such as are 0 or 1: scores up to 60, of whose lse, an fp32 number, a backward pass in
    fp32 keeps fewer digits than one that has the probabilities; fp16 does not notice."""
    q, k, v = qkv(1, 48, 96, 2, 1, 16, device=device)
    held(q * size, k * size, v, block=16, gradients=size < 1)
    held((q * size).half(), (k * size).half(), v.half(), block=16)
    got = sparse.coarse(q * size, k * size, v, block=16)
    assert torch.allclose(got.scores.sum(-1), torch.ones(1, 2, 3, device=device), atol=1e-5)


def test_equal_rows(device):
    """All rows alike: every score is 1 / rows."""
    q = rand(1, 32, 2, 16, device=device)
    k = v = rand(1, 1, 2, 16, device=device).expand(1, 80, 2, 16).contiguous()
    scores = sparse.coarse(q, k, v, block=16).scores
    assert torch.allclose(scores, torch.full_like(scores, 1 / 5), atol=1e-6)


@pytest.mark.parametrize("sizes", [[0, 16, 5, 16, 6], [16, 0, 0, 3, 6], [16, 1, 16, 16, 0], [0, 0, 0, 0, 0]],
                         ids=["first", "middle", "last", "all"])  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_dead_blocks_and_poisoned_padding(kind, sizes, device):
    """Blocks without a token are dead columns; what lies past a block's tokens may be NaN and gets gradient 0."""
    q, k, v = qkv(1, 48, 70, 2, 1, 16, device=device)
    given = sized(sizes, device=device)
    w = weights(kind, 1, 70, 16, device=device)
    options = {"kind": kind, "block": 16, "block_sizes": given}
    clean, gradients = held(q, k, v, *w, **options)
    dead = given == 0
    assert not clean.scores[..., dead].any()
    if bool(dead.all()):
        assert not clean.out.any() and bool((clean.lse == -math.inf).all())
    poisoned = padding(70, 16, given)
    k[:, poisoned], v[:, poisoned] = math.nan, math.nan
    dirty, dirty_gradients = run(sparse.coarse, (q, k, v, *w), options)
    assert same(clean, dirty)
    assert same(gradients, dirty_gradients)
    assert not dirty_gradients[1][:, poisoned].any() and not dirty_gradients[2][:, poisoned].any()


@pytest.mark.parametrize("kind", ["block", "pooled"])
def test_query_sizes(kind, device):
    """Queries past their block's size give 0, count in no score, may hold NaN, and get gradient 0; blocks may have none."""
    q, k, v = qkv(2, 70, 48, 4, 2, 16, device=device)
    for given in (
        sized([16, 0, 3, 16, 6], device=device),
        torch.randint(0, 7, (2, 4, 5), dtype=torch.int32, device=device),
    ):
        options = {"kind": kind, "block": 16, "query_sizes": given}
        clean, gradients = held(q, k, v, **options)
        if given.dim() == 1:
            poisoned = padding(70, 16, given)
            assert not clean.out[:, poisoned].any() and not clean.scores[:, :, 1].any()
            dirty_q = q.clone()
            dirty_q[:, poisoned] = math.nan
            dirty, dirty_gradients = run(sparse.coarse, (dirty_q, k, v), options)
            assert same(clean, dirty)
            assert same(gradients, dirty_gradients)
            assert not gradients[0][:, poisoned].any()


def test_sizes_per_batch_and_head(device):
    q, k, v = qkv(2, 40, 40, 4, 2, 16, device=device)
    for shape in ((2, 3), (1, 3), (2, 2, 3), (2, 1, 3), (1, 2, 3)):
        given = torch.randint(0, 9, shape, dtype=torch.int32, device=device)
        held(q, k, v, block=16, block_sizes=given, gradients=shape == (2, 2, 3))


@pytest.mark.parametrize("group", [1, 4])
def test_groups_of_heads(group, device):
    q, k, v = qkv(1, 33, 49, 4, 4 // group, 16, dtype=torch.bfloat16, device=device)
    held(q, k, v, block=16, block_sizes=sized([16, 0, 9, 1], device=device))


@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 1), (16, 17), (1, 300), (65, 15)])
def test_lengths(seq_q, seq_k, device):
    q, k, v = qkv(1, seq_q, seq_k, 1, 1, 16, dtype=torch.float16, device=device)
    for kind in ("block", "pooled"):
        held(q, k, v, kind=kind, block=16)


@pytest.mark.parametrize("block", [32, 64, 128])
def test_blocks(block, device):
    """128: two programs share a block of queries, and their scores are put together."""
    q, k, v = qkv(1, 140, 3 * block + 5, 1, 1, 16, device=device)
    for reduction in ("mean", "max"):
        queries = sized([block, 3] if block == 128 else [block] * (-(-140 // block)), device=device)
        held(q, k, v, block=block, reduction=reduction, query_sizes=queries, gradients=reduction == "mean")


@pytest.mark.parametrize(("dim", "dim_v"), [(1, 3), (40, 80), (128, 256), (256, 64)])
def test_head_dims(dim, dim_v, device):
    q, k, v = qkv(1, 20, 40, 1, 1, dim, dim_v, dtype=torch.float16, device=device)
    held(q, k, v, *weights("block", 1, 40, 16, device=device), block=16)


def test_strides_and_layouts(device):
    """Cut from one tensor, every second token, heads first: taken as they lie, with the same result."""
    q, k, v = rand(2, 48, 3, 2, 16, device=device).unbind(2)
    assert not q.is_contiguous()
    want, gradients = held(q, k, v, block=16)
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    for kind in KINDS:
        w = weights(kind, 2, 48, 16, device=device) if kind == "dense" else ()
        held(*turned, *w, block=16, layout="bhsd", kind=kind)
    got = sparse.coarse(*turned, block=16, layout="bhsd", return_lse=True)
    assert torch.equal(got.out.transpose(1, 2), want.out)
    assert torch.equal(got.scores, want.scores) and torch.equal(got.lse, want.lse)
    held(*(rand(2, 96, 2, 16, device=device)[:, ::2] for _ in range(3)), block=16)


def test_the_same_bits_every_run(device):
    inputs = *qkv(1, 70, 70, 4, 2, 16, dtype=torch.float16, device=device), *weights("block", 2, 70, 16, device=device)
    first, *others = (run(sparse.coarse, inputs, {"block": 16}) for _ in range(3))
    for other in others:
        assert same((*first[0], *first[1]), (*other[0], *other[1]))


def test_nothing_to_compute(device):
    """Empty batches, no queries, no keys, no heads."""
    for b, sq, sk, h in ((0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 0, 2), (1, 5, 5, 0), (1, 0, 0, 1)):
        q, k, v = (t.requires_grad_() for t in qkv(b, sq, sk, h, h, 16, device=device))
        for kind in ("block", "pooled"):
            got = sparse.coarse(q, k, v, kind=kind, block=16, return_lse=True)
            want = reference.coarse(q, k, v, kind=kind, block=16, return_lse=True) if sk and h else None
            assert got.out.shape == (b, sq, h, 16) and got.scores.shape == (b, h, -(-sq // 16), -(-sk // 16))
            assert want is None or got.lse.shape == want.lse.shape
            assert not got.out.any() and bool((got.lse == -math.inf).all())
            assert all(not g.any() for g in torch.autograd.grad(got.out.sum() + got.lse.exp().sum(), (q, k, v)))


@pytest.fixture
def planned(monkeypatch):
    """Change the fields of every plan that is made from here on."""

    def change(**fields):
        def plan(problem, device):
            made = plan_coarse(problem, device)
            boxes = fields.get("boxes", made.boxes)
            return replace(made, **{**fields, "boxes": (*boxes[:2], boxes[2] and not problem.query_masked)})

        monkeypatch.setattr(plans, "plan_coarse", plan)
        monkeypatch.setattr(records, "CACHE", {})

    return change


@pytest.mark.parametrize("kind", KINDS)
def test_boxes(kind, planned, device):
    """Rows, queries and gradients by tensor descriptors: tails, dead rows, dead queries, groups, heads first."""
    planned(boxes=(True, True, True))
    q, k, v = qkv(2, 37, 54, 4, 2, 32, 48, dtype=torch.float16, device=device)
    w = weights(kind, None, 54, 16, dtype=torch.float16, device=device)
    sizes = {"block_sizes": sized([16, 0, 7, 3], device=device), "query_sizes": sized([16, 0, 3], device=device)}
    held(q, k, v, *w, kind=kind, block=16, **sizes)
    held(*(t.transpose(1, 2) for t in (q, k, v)), *w, kind=kind, block=16, layout="bhsd")


def test_tiles_and_shares(planned, device):
    """Tiles of rows that are cut, several programs a query block, shares that are uneven, and more shares than tiles."""
    q, k, v = qkv(1, 70, 500, 2, 1, 16, device=device)
    given = torch.randint(0, 17, (32,), dtype=torch.int32, device=device)
    small = Tile(16, 32, 4, 1)
    for shares, block, dim in ((1, 64, 8), (3, 16, 16), (9, 64, 8)):
        planned(forward=small, queries=small, keys=Tile(16, 32, 4, 1), shares=shares)
        held(q, k, v[:, :, :, :dim], block=block, block_sizes=given[: -(-500 // block)])


# ---------------------------------------------------------------- parts


def test_weights_of_the_mean_are_the_mean(device):
    """To the last bit, also in blocks that are not full: that is what the factor block / valid is for."""
    for dtype in (torch.float32, torch.bfloat16):
        x = rand(2, 70, 3, 24, dtype=dtype, device=device)
        given = sized([16, 7, 1, 3, 5], device=device)
        even = torch.full((16,), 1 / 16, device=device)
        for options in ({}, {"block_sizes": given}):
            assert torch.equal(sparse.project(x, even, block=16, **options), sparse.project(x, block=16, **options))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("kind", ["block", "dense"])
def test_project(kind, layout, device):
    """Rows of many blocks, a weight shared by all heads or each with its own, against the oracle."""
    x = rand(2, 70, 3, 40, dtype=torch.float16, device=device)
    x = x if layout == "bshd" else x.transpose(1, 2)
    for heads in (None, 1, 3):
        w = weights(kind, heads, 70, 16, device=device)[0].requires_grad_()
        options = {"kind": kind, "block": 16, "layout": layout, "block_sizes": sized([16, 0, 9, 16, 2], device=device)}
        leaf = x.detach().requires_grad_()
        hold_back(sparse.project(leaf, w, **options), reference.project, leaf, w, what=f"{kind} {heads}", **options)


def test_attend_rows_is_coarse_over_rows_made_before(device):
    """A dead row may hold NaN, and gets gradient 0."""
    q, k, v = qkv(2, 40, 70, 4, 2, 16, device=device)
    options = {"block": 16, "block_sizes": sized([16, 0, 9, 16, 2], device=device)}
    want = sparse.coarse(q, k, v, **options, return_lse=True)
    rows = [sparse.project(x, **options) for x in (k, v)]
    for x in rows:
        x[:, 1] = math.nan
        x.requires_grad_()
    q.requires_grad_()
    got = sparse.attend_rows(q, *rows, **options, return_lse=True)
    assert same(got, want)
    _, _, dk, dv = hold_back(got.out, lambda *x, **dtype: reference.attend_rows(*x, **options, **dtype).out, q, *rows)
    assert not dk[:, 1].any() and not dv[:, 1].any()


def test_second_derivatives_are_refused(device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 16, 16, 1, 1, 16, device=device))
    (dq,) = torch.autograd.grad(sparse.coarse(q, k, v, block=16).out.sum(), q, create_graph=True)
    refuses(Unsupported, "first derivatives only", dq.sum().backward)


# ---------------------------------------------------------------- what is refused

Q, K = (1, 40, 4, 16), (1, 40, 2, 16)
REFUSED = [
    ({"kind": "mean"}, ValueRangeError, "kind must be 'block', 'dense' or 'pooled', got 'mean'"),
    ({"reduction": "sum"}, ValueRangeError, "reduction must be 'mean' or 'max', got 'sum'"),
    ({"scale": 0.0}, ValueRangeError, "scale must be greater than 0, got 0.0"),
    ({"scale": "1"}, DtypeError, "scale must be a number, got '1' of type str"),
    ({"block": 24}, ValueRangeError, "block must be a power of two and at least 16 tokens, got 24"),
    ({"block": 8}, ValueRangeError, "block must be a power of two and at least 16 tokens, got 8"),
    ({"block": 16.0}, DtypeError, "block must be an int, got float"),
    ({"layout": "sbhd"}, ValueRangeError, "layout must be 'bshd' or 'bhsd', got 'sbhd'"),
    ({"kind": "dense"}, ValueRangeError,
     "weight_k must be a tensor with kind='dense', [blocks, seq] or [kv_heads, blocks, seq]; got None"),
    ({"weight_k": torch.zeros(4, 16)}, ShapeError,
     "weight_k has shape (4, 16), expected [heads|1, block]: dimension 0 (heads) is 4, should be 2 or 1"),
    ({"weight_v": torch.zeros(8)}, ShapeError,
     "weight_v has shape (8,), expected [block]: dimension 0 (block) is 8, should be 16"),
    ({"weight_k": torch.zeros(16, dtype=torch.int32)}, DtypeError,
     "weight_k has dtype int32, accepted: float16, bfloat16, float32"),
    ({"block_sizes": torch.zeros(3)}, DtypeError, "block_sizes has dtype float32, accepted: int32"),
    ({"block_sizes": torch.zeros(4, dtype=torch.int32)}, ShapeError,
     "block_sizes has shape (4,), expected [blocks]: dimension 0 (blocks) is 4, should be 3"),
    ({"query_sizes": torch.zeros(2, dtype=torch.int32)}, ShapeError,
     "query_sizes has shape (2,), expected [q_blocks]: dimension 0 (q_blocks) is 2, should be 3"),
    ({"k": torch.zeros(1, 40, 3, 16)}, ShapeError,
     "v has shape (1, 40, 2, 16), expected [batch, seq_k, kv_heads, dim_v]: dimension 2 (kv_heads) is 2, should be 3 as in k"),
    ({"k": torch.zeros(K, dtype=torch.float16)}, DtypeError,
     "k has dtype float16, but q has float32: they must be the same (nothing is converted silently)"),
    ({"v": torch.zeros(1, 41, 2, 16)}, ShapeError,
     "v has shape (1, 41, 2, 16), expected [batch, seq_k, kv_heads, dim_v]: dimension 1 (seq_k) is 41, should be 40 as in k"),
    ({"weight_k": 0.5}, DtypeError, "weight_k must be a torch.Tensor or None, got float"),
    ({"block_sizes": [16, 16, 8]}, DtypeError, "block_sizes must be a torch.Tensor or None, got list"),
    ({"query_sizes": [16, 16, 8]}, DtypeError, "query_sizes must be a torch.Tensor or None, got list"),
    ({"q": None}, DtypeError, "q must be a torch.Tensor, got NoneType"),
    ({"q": torch.zeros(1, 40, 16, 4).transpose(2, 3)}, LayoutError,
     "q needs a contiguous last dimension (stride 1), got strides (2560, 64, 1, 4) for shape (1, 40, 4, 16); "
     "call q.contiguous() first if a copy is acceptable"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), REFUSED, ids=[text[:40] for _, _, text in REFUSED])
def test_refusals(changes, error, text, device):
    given = {"q": torch.zeros(Q), "k": torch.zeros(K), "v": torch.zeros(K), "block": 16, **changes}
    refuses_given(error, text, sparse.coarse, device, **given)


def test_refusals_of_the_parts(device):
    x = torch.zeros(1, 40, 2, 300, device=device)
    refuses(Unsupported, "x has head dim 300; accepted: 1 to 256", sparse.project, x, block=16)
    with pytest.raises(ValueRangeError, match="kind must be 'block' or 'dense', got 'pooled'"):
        sparse.project(x, kind="pooled", block=16)
    q, rows = torch.zeros(1, 40, 3, 16, device=device), torch.zeros(1, 5, 2, 16, device=device)
    refuses(ShapeError, "q has 3 heads and rows_k has 2", sparse.attend_rows, q, rows, rows, block=16)


# ---------------------------------------------------------------- plans


def test_plans_print_and_refuse():
    n = AttentionProblem(1, 23296, 364, 12, 12, 128, 128)
    plan = plan_coarse(CoarseProblem(n, 64), device_named("h200"))
    assert "23296 queries in blocks of 64, 364 rows" in str(plan)
    assert plan.boxes == (True, True, True) and plan.parts == 1
    assert plan_coarse(CoarseProblem(n, 256), device_named("h200")).parts == 4
    for nothing in ({"seq_q": 0}, {"seq_k": 0}, {"batch": 0}):
        assert plan_coarse(CoarseProblem(replace(n, **nothing), 64), device_named("h200")).parts == 1
    assert plan.grid("keys")[0] * plan.shares >= 2 * 132
    masked = plan_coarse(CoarseProblem(n, 16, "mean", True, True), device_named("h200"))
    assert masked.keys.block_m == 16 and masked.boxes == (True, True, False)
    refuses(ValueRangeError, "reduction must be one of 'mean', 'max', 'each', got 'sum'", CoarseProblem, n, 64, "sum")


def test_public_names():
    for name in ("coarse", "project", "attend_rows", "fuse", "CoarseResult"):
        assert name in tilefold.sparse.__all__
