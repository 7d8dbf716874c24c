"""numerics="invariant": a query's bits depend on its own sequence alone; accuracy, plans, what is refused.

The interpreter's products are a library's, whose bits depend on a row's place in a tile; here they are summed in order."""

import contextlib
from dataclasses import replace

import pytest
import torch

import tilefold
from cases import DEEP, hold, judge, one_graph, qkv, rand, same
from cases.decode import E4M3, INT8, Case, run
from cases.invariant import WAYS, draw, products_in_order  # noqa: F401
from cases.mods import slanted, slanted_twin, sliding, sliding_twin
from cases.refusals import refuses
from tilefold import DtypeError, PlanError, Unsupported, ValueRangeError, masks, reference
from tilefold.ops import numerics
from tilefold.plan import AttentionProblem, DecodeProblem, InvariantPlan, device_named, plan_invariant

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_bits(way, seed, device):
    way(draw(seed, device, 150, FLOATS))


@pytest.mark.interpreter
def test_the_ways_find_other_bits(device):
    """What the kernels of numerics="fast" give is found out."""
    found = set()
    for seed in range(4):
        one = draw(seed, device, 150, FLOATS)
        one.options["numerics"] = "fast"
        for way in WAYS[3:5]:
            with contextlib.suppress(AssertionError):
                way(one)
                continue
            found.add(way)
    assert found == set(WAYS[3:5])


# ---------------------------------------------------------------- accuracy


DENSE = {
    "full": {},
    "causal": {"causal": True},
    "window softcap": {"window": (70, 3), "softcap": 4.0},
    "sinks": {"causal": True, "sinks": torch.tensor([0.5, -1.0, float("-inf"), 3.0])},
    "bias mask": {"bias": rand(1, 4, 130, 150), "mask": torch.arange(150).expand(2, 1, 1, -1) % 5 > 0},
    "alibi": {"alibi_slopes": torch.rand(2, 4), "scale": 0.2},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(one, t) for i, one in enumerate(DENSE) for t in (FLOATS if DEEP else (FLOATS[0], FLOATS[1 + i % 2]))],
)
def test_dense(name, dtype, device):
    options = DENSE[name]
    q, k, v = qkv(2, 130, 150, 4, 2, 40, 24, dtype=dtype, device=device)
    options = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    got = tilefold.attention(q, k, v, numerics="invariant", return_lse=True, **options)
    wanted, plain = (reference.attention(q, k, v, dtype=kind, **options) for kind in (torch.float64, dtype))
    for what, *three in zip(("out", "lse"), got, wanted, plain, strict=True):
        judge(*three, f"{what} {dtype} {sorted(options)}")


@pytest.mark.parametrize("storage", [None, E4M3, INT8])
@pytest.mark.parametrize(("page", "splits"), [(0, 1), (7, 3), (64, 2), (0, 4)])
def test_caches(page, splits, storage, device):
    """Chunks in one program and in several; the factors of bytes, by head and by page."""
    more = {"scales": "page" if page == 64 else "head"} if storage else {}
    case = Case([150, 0, 9, 70], 3, heads=4, kv_heads=2, page=page, stored=storage, options={"causal": True}, **more)
    run(case, device, numerics="invariant", num_splits=splits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bytes_with_halves(dtype, device):
    run(Case([100, 20], heads=4, stored=INT8, dtype=dtype, dim=64), device, numerics="invariant")


def test_values_that_are_part_of_the_keys(device):
    run(Case([90, 70], 2, heads=8, dim=96, dim_v=64, page=16, shared=True), device, numerics="invariant", num_splits=2)


def test_packed_queries_and_pads(device):
    case = Case([90, 70, 30], [3, 0, 30], heads=4, kv_heads=2, page=16, pads=[0, 5, 30], options={"causal": True})
    run(case, device, numerics="invariant")


def test_nothing(device):
    for shapes in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        q, k, v = qkv(*shapes, 2, 1, 32, device=device)
        out, lse = tilefold.attention(q, k, v, numerics="invariant", return_lse=True)
        assert out.shape == q.shape
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


def test_strides(device):
    q = rand(2, 4, 140, 32, device=device).transpose(1, 2)[:, ::2]
    k, v = rand(2, 60, 2, 64, device=device).split(32, -1)
    assert not any(t.is_contiguous() for t in (q, k, v))
    made = tilefold.attention(q, k, v, numerics="invariant", return_lse=True)
    assert same(made, tilefold.attention(*(t.contiguous() for t in (q, k, v)), numerics="invariant", return_lse=True))


# ---------------------------------------------------------------- bits


def test_masks_and_rules(device):
    """Neighbours in a batch and rows of nobody, with masks that are values, and tensors."""
    q, k, v = qkv(2, 70, 70, 4, 2, 32, device=device)
    lengths = torch.tensor([5, 33], dtype=torch.int32, device=device)

    for of in (masks.prefix, lambda n: masks.keys(n + 20) & masks.window(30, 0)):
        together = tilefold.attention(q, k, v, mask=of(lengths), numerics="invariant", return_lse=True)
        alone = tilefold.attention(q[1:], k[1:], v[1:], mask=of(lengths[1:]), numerics="invariant", return_lse=True)
        assert same([t[1:] for t in together], alone)
        hold(together[0], reference.attention, q, k, v, mask=of(lengths))


@pytest.mark.interpreter
def test_functions_of_users(device):
    """They are told of one head; their tiles have its rows alone."""
    q, k, v = qkv(2, 70, 70, 4, 2, 32, device=device)
    slopes = torch.rand(4, device=device)
    asked = {"score_mod": slanted, "score_args": (slopes,), "mask_mod": sliding, "mask_args": (40,)}
    out, lse = tilefold.attention(q, k, v, numerics="invariant", return_lse=True, **asked)
    twins = {**asked, "score_mod": slanted_twin, "mask_mod": sliding_twin}
    hold((out, lse), reference.attention, q, k, v, **twins)
    last = tilefold.attention(q[1:, -3:], k[1:], v[1:], numerics="invariant", return_lse=True, **asked)
    assert same((out[1:, -3:], lse[1:, :, -3:]), last)


def test_queries_over_bytes_do_not_see_one_another(device):
    """Queries far from one another in size share a tile: a factor of the tile would round the small ones."""
    q, x = rand(1, 2, 2, 32, dtype=torch.bfloat16, device=device), rand(1, 70, 1, 32, device=device)
    codes, scale = tilefold.quantize_kv(x, INT8)
    q[:, 0] *= 2.0**-36
    asked = {"k_scale": scale * 2.0**36, "v_scale": scale, "numerics": "invariant", "return_lse": True}
    both = tilefold.attention_kvcache(q, codes, codes, **asked)
    assert same((both[0][:, :1], both[1][..., :1]), tilefold.attention_kvcache(q[:, :1], codes, codes, **asked))


@pytest.mark.interpreter
def test_the_constants_are_what_fixes_bits(device):
    """Keys of a tile and of a chunk do; the rows of a tile, the programs and the stages do not."""
    q, k, v = qkv(1, 20, 100, 2, 1, 32, device=device)
    plan = tilefold.attention_plan(q, k, v, causal=True, numerics="invariant")
    assert isinstance(plan, InvariantPlan)

    def bits(**fields):
        made = replace(plan, **fields)
        return tilefold.attention(q, k, v, causal=True, plan=made, numerics="fast", return_lse=True)

    for free in ({"block_m": 16}, {"splits": 2}, {"splits": 3, "block_m": 32}, {"num_stages": 2}):
        assert same(bits(**free), bits())
    for fixed in ({"block_n": 32}, {"chunk": 32}):
        assert not same(bits(**fixed), bits())
        with pytest.raises(PlanError, match=f"plan field {next(iter(fixed))}: numerics"):
            tilefold.attention(q, k, v, causal=True, plan=replace(plan, **fixed), numerics="invariant")
    other = tilefold.attention_kvcache_plan(q[:, :1], k, v)
    with pytest.raises(PlanError, match="plan is a DecodePlan"):
        tilefold.attention_kvcache(q[:, :1], k, v, plan=other, numerics="invariant")


def test_gradients_are_those_of_the_bits(device):
    """The forward pass of training has the bits of inference; the backward pass is the deterministic one that there is."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 70, 70, 4, 2, 32, device=device))
    out = tilefold.attention(q, k, v, causal=True, numerics="invariant")
    out.square().sum().backward()
    with torch.no_grad():
        assert torch.equal(out, tilefold.attention(q, k, v, causal=True, numerics="invariant"))
    wanted = [t.detach().double().requires_grad_() for t in (q, k, v)]
    reference.attention(*wanted, causal=True)[0].square().sum().backward()
    for t, one in zip((q, k, v), wanted, strict=True):
        torch.testing.assert_close(t.grad.double(), one.grad, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- asking for it


def test_contexts(device):
    """The innermost decides, an argument before it; records of either kind are kept apart."""
    q, k, v = qkv(1, 70, 70, 4, 2, 32, device=device)
    fast, asked = (tilefold.attention(q, k, v, numerics=kind) for kind in ("fast", "invariant"))
    assert not torch.equal(fast, asked)
    with tilefold.numerics("invariant"):
        assert torch.equal(tilefold.attention(q, k, v), asked)
        assert torch.equal(tilefold.attention(q, k, v, numerics="fast"), fast)
        with tilefold.numerics("fast"):
            assert torch.equal(tilefold.attention(q, k, v), fast)
        assert torch.equal(tilefold.attention(q, k, v), asked)
    assert torch.equal(tilefold.attention(q, k, v), fast)
    assert torch.equal(tilefold.numerics("invariant")(tilefold.attention)(q, k, v), asked)


@pytest.mark.no_poison
def test_contexts_inside_compiled_functions(device):
    """Those inside are seen where they are traced, those outside whenever the function runs."""
    q, k, v = qkv(1, 70, 70, 4, 2, 32, device=device)
    fast, asked = (tilefold.attention(q, k, v, numerics=kind) for kind in ("fast", "invariant"))

    def inside(q, k, v):
        with tilefold.numerics("invariant"):
            return tilefold.attention(q, k, v)

    for function in (inside, tilefold.numerics("invariant")(lambda q, k, v: tilefold.attention(q, k, v))):
        assert torch.equal(one_graph(function)(q, k, v), asked)
    plain = one_graph(lambda q, k, v: tilefold.attention(q, k, v))
    for _ in range(2):
        assert torch.equal(plain(q, k, v), fast)
        with tilefold.numerics("invariant"):
            assert torch.equal(plain(q, k, v), asked)

    def product(a):
        with tilefold.numerics("invariant"):
            return tilefold.matmul(a, a.mT)

    a = rand(70, 130, device=device)
    assert torch.equal(one_graph(product)(a), tilefold.matmul(a, a.mT, numerics="invariant"))


@pytest.fixture
def environment():
    """Sets what the environment variable said when tilefold was imported."""
    said = numerics.ASKED[0]
    yield lambda word: numerics.ASKED.__setitem__(0, word)
    numerics.ASKED[0] = said


def test_the_environment(device, environment):
    q, k, v = qkv(1, 70, 70, 4, 2, 32, device=device)
    environment("invariant")
    assert torch.equal(tilefold.attention(q, k, v), tilefold.attention(q, k, v, numerics="invariant"))
    environment("exact")
    refuses(ValueRangeError, "TILEFOLD_NUMERICS must be fast or invariant, got 'exact'", tilefold.attention, q, k, v)


def test_refusals(device):
    q, k, v = qkv(1, 70, 70, 4, 2, 32, device=device)
    for wrong, error in (("exact", ValueRangeError), (True, DtypeError)):
        for call in (tilefold.attention, tilefold.attention_kvcache, tilefold.attention_plan):
            with pytest.raises(error, match="numerics must be 'fast', 'invariant' or None, got"):
                call(q, k, v, numerics=wrong)
    with pytest.raises(ValueRangeError, match="numerics must be"), tilefold.numerics("exact"):
        pass
    refuses(Unsupported, "dropout_p is not 0", tilefold.attention, q, k, v, dropout_p=0.5, numerics="invariant")
    lengths = torch.tensor([70], dtype=torch.int32, device=device)
    with pytest.raises(Unsupported, match="cascade=True with numerics"):
        tilefold.attention_shared_prefix(
            q[:, :1], k, v, prefix_length=9, cache_seqlens=lengths, cascade=True, numerics="invariant"
        )
    index = tilefold.BlockIndex.from_map(torch.ones(1, 1, 2, 2, dtype=torch.bool, device=device), seq_q=70, seq_k=70)
    with tilefold.numerics("invariant"), pytest.raises(Unsupported, match="sparse attention with numerics"):
        tilefold.sparse_attention(q, k, v, index)
    with tilefold.numerics("invariant"), pytest.raises(Unsupported, match="e4m3 tensors with numerics"):
        tilefold.attention(*(t.to(E4M3) for t in (q, k, v)))


@pytest.mark.no_poison
def test_fake_tensors(device):
    with torch._subclasses.FakeTensorMode():
        q, k, v = (torch.empty(1, 70, heads, 32) for heads in (4, 2, 2))
        assert tilefold.attention(q, k, v, numerics="invariant").shape == q.shape


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200", "mi300x"])
@pytest.mark.parametrize(
    "shape", [(128, 128, "bfloat16"), (64, 64, "float16"), (256, 256, "bfloat16"), (40, 24, "float32")]
)
def test_plans_fix_what_moves_bits(shape, name):
    """Whatever batch, lengths and SMs; 64 rows have the warps' rows of 128 where both occur."""
    dim, dim_v, dtype = shape

    def planned(batch, seq_q, seq_k, splits=0, page=0):
        asked = AttentionProblem(batch, seq_q, seq_k, 16, 4, dim, dim_v, dtype, causal=True)
        return plan_invariant(DecodeProblem(asked, page_size=page), device_named(name), splits)

    plans = [
        planned(1, 1, 100),
        planned(64, 1, 100_000),
        planned(4, 4096, 4096),
        planned(1, 300, 300, page=16),
        planned(1, 1, 9000, 5),
    ]
    assert len({(p.block_n, p.chunk, p.block_m // p.num_warps) for p in plans}) == 1
    for plan in plans:
        plan.require_invariant()
        assert "numerics=invariant" in str(plan)
        assert InvariantPlan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="plan field block_m: numerics"):
        replace(plans[0], block_m=plans[0].block_m // 2 if plans[0].block_m > 16 else 64).require_invariant()


def test_several_programs_share_the_chunks_of_few_rows():
    def planned(batch, seq_q, seq_k):
        asked = AttentionProblem(batch, seq_q, seq_k, 32, 8, 128, 128, causal=True)
        return plan_invariant(DecodeProblem(asked), device_named("h200"))

    assert (planned(1, 1, 32768).splits, planned(1, 1, 1000).splits, planned(4, 4096, 4096).splits) == (32, 1, 1)
    assert planned(64, 1, 4096).splits == 4  # with a chunk each, though tiles alone would fill the SMs
    lone = AttentionProblem(1, 32, 1 << 18, 4, 1, 128, 128, causal=True)
    assert plan_invariant(DecodeProblem(lone), device_named("h200")).splits == 128  # at most
    assert planned(16, 1, 1 << 20).splits == 1  # the states of all chunks would take more memory than is given to them


def test_a_wrong_page_is_noted(device):
    """check="device": what is out of range is replaced before the kernel, and noted."""
    q, k, v = qkv(1, 1, 16, 2, 1, 32, device=device)
    asked = {
        "block_table": torch.tensor([[0, 7]], dtype=torch.int32, device=device),
        "numerics": "invariant",
        "check": "device",
    }
    tilefold.last_fault()
    tilefold.attention_kvcache(q, k, v, cache_seqlens=torch.tensor([32], dtype=torch.int32, device=device), **asked)
    assert "block_table[0, 1] is 7" in str(tilefold.last_fault())
