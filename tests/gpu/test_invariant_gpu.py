"""numerics="invariant" on a GPU: 2,016 draws of a sequence that is computed in many ways, none of which may move a bit; products;
accuracy, graphs, compiled functions."""

import products
import pytest
import torch

import tilefold
from cases import judge, qkv, rand, same
from cases.device import DEVICE, SM_90, captured, no_waiting
from cases.invariant import WAYS, draw
from cases.matmul import matrix
from tilefold import reference
from tilefold.ops.device import device_of
from tilefold.ops.matrix.operands import operands
from tilefold.ops.matrix.product import Epilogue, problem_of
from tilefold.plan import AttentionPlan, DecodeProblem, InvariantPlan, plan_invariant
from tilefold.plan.matrix.matmul import plan_matmul
from tilefold.quant import quantize_weight

pytestmark = pytest.mark.no_poison
BF16 = torch.bfloat16
KINDS, SEEDS = 16, 21  # compilations; draws of each in each way


LENGTHS = [(2500, 2500), (1024, 1024), (1023, 2047), (1025, 2049), (700, 3071), (129, 1), (300, 6145)]
SEEN = {"all": {}, "causal": {"causal": True}, "window": {"window": (700, 0)}, "sides": {"window": (130, 77)}}


def on_one_kernel(plan):
    """The plan of the same call by attention_invariant alone."""
    assert isinstance(plan, AttentionPlan), plan
    assert plan.kernel == "attention_forward_hopper"
    return plan_invariant(DecodeProblem(plan.problem, equal=not plan.problem.varlen), plan.device)


@SM_90
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(
    "dims", [(24, 24), (48, 48), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
)
def test_prompts_by_two_kernels(dims, dtype, seen):
    """Blocks of 64, 128 and 192 rows, packed heads, sinks: the kernel for sm_90 has the bits of the portable one."""
    for i, (seq_q, seq_k) in enumerate(LENGTHS):
        for batch, heads, kv_heads in ((2, 16, 4), (9, 14, 2), (1, 64, 64)):
            q, k, v = qkv(batch, seq_q, seq_k, heads, kv_heads, *dims, dtype, DEVICE)
            asked = {"numerics": "invariant", **SEEN[seen]}
            if i % 2:
                asked["sinks"] = rand(heads, device=DEVICE)
            plan = tilefold.attention_plan(q, k, v, **asked)
            if isinstance(plan, InvariantPlan):  # few rows for a whole device
                assert batch * seq_q * heads < 66 * 192
                continue
            got, one = (
                tilefold.attention(q, k, v, plan=p, return_lse=True, **asked) for p in (None, on_one_kernel(plan))
            )
            assert same(got, one), (dims, dtype, seen, seq_q, seq_k, heads, plan.tile)


@SM_90
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize(
    ("dim", "dtype"), [(64, torch.float16), (80, BF16), (128, BF16), (256, BF16), (256, torch.float16)]
)
def test_packed_prompts_by_two_kernels(dim, dtype, seen):
    """Each sequence of a packed batch alone, over a cache, by the other kernel."""
    each = [(1, 1), (64, 1024), (1000, 1000), (0, 5), (1025, 1025), (65, 3000), (2047, 2048), (700, 700)]
    asked = {"numerics": "invariant", "return_lse": True, **SEEN[seen]}
    parts = [[t[0] for t in qkv(1, *pair, 8, 2, dim, None, dtype, DEVICE)] for pair in each]
    q, k, v = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    cu = [
        torch.tensor([0, *torch.tensor(side).cumsum(0)], dtype=torch.int32, device=DEVICE)
        for side in zip(*each, strict=True)
    ]
    at = tilefold.attention_plan(q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_seqlen_q=2047, max_seqlen_k=3000,
                                 numerics="invariant", **SEEN[seen])  # fmt: skip
    assert at.kernel == "attention_forward_hopper"
    out, lse = tilefold.attention_varlen(q, k, v, *cu, 2047, 3000, **asked)
    for (n, _), mine, begin in zip(each, parts, cu[0].tolist()[:-1], strict=True):
        if n == 0:
            continue
        alone = tilefold.attention_kvcache(*(t[None] for t in mine), **asked)
        assert same((out[begin : begin + n], lse[:, begin : begin + n]), (alone[0][0], alone[1][0])), (n, seen)


@SM_90
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("dim", [48, 64, 128, 192, 256])
def test_maxima_that_grow_between_two_tiles(dim, seen):
    """The kernel for sm_90 folds two tiles at a time in bfloat16: the second one's scores are often much larger here."""
    q, k, v = qkv(2, 2500, 2500, 16, 4, dim, None, BF16, DEVICE)
    at = torch.arange(2500, device=DEVICE)
    chosen = torch.rand(2500, device=DEVICE) < 0.02
    asked = {"numerics": "invariant", **SEEN[seen]}
    for size in (torch.exp(at / 500 - 2), 1 + 12 * chosen, torch.where(at % 128 < 64, 0.1, 1 + at / 180)):
        larger = (k * size[:, None, None]).to(BF16)
        plan = tilefold.attention_plan(q, larger, v, **asked)
        got, one = (
            tilefold.attention(q, larger, v, plan=p, return_lse=True, **asked) for p in (None, on_one_kernel(plan))
        )
        assert plan.block_n == (128 if dim <= 128 else 64)
        assert same(got, one)


@pytest.mark.parametrize("kind", range(KINDS))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_bits(way, kind):
    for seed in range(SEEDS):
        way(draw(kind + KINDS * seed, DEVICE, 3000, (BF16, BF16, torch.float16, torch.float32), KINDS))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_prompts_and_tokens(dim):
    """Many rows of a tile and few: 128 rows with 8 warps, and 64 with 4."""
    q, k, v = qkv(2, 2500, 2500, 16, 4, dim, None, BF16, DEVICE)
    whole = tilefold.attention(q, k, v, causal=True, numerics="invariant", return_lse=True)
    for first, end in ((0, 1), (1023, 1024), (1024, 1025), (2000, 2003), (2497, 2500)):
        for splits in (0, 1, 2, 3):
            lengths = torch.full((2,), end, dtype=torch.int32, device=DEVICE)
            asked = {"cache_seqlens": lengths, "causal": True, "numerics": "invariant", "num_splits": splits}
            out, lse = tilefold.attention_kvcache(q[:, first:end], k, v, return_lse=True, **asked)
            assert same((out, lse), (whole[0][:, first:end], whole[1][..., first:end]))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_against_fp64(dtype):
    for dim, dim_v in ((128, 128), (64, 64), (256, 256), (40, 24)):
        q, k, v = qkv(2, 700, 2100, 8, 2, dim, dim_v, dtype, DEVICE)
        got = tilefold.attention(q, k, v, causal=True, numerics="invariant", return_lse=True)
        wanted, plain = (reference.attention(q, k, v, causal=True, dtype=kind) for kind in (torch.float64, dtype))
        for what, *three in zip(("out", "lse"), got, wanted, plain, strict=True):
            judge(*three, f"{what} D={dim} {dtype}")


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_products(dtype):
    a, w = rand(300, 1040, device=DEVICE).to(dtype), rand(520, 1040, device=DEVICE).to(dtype)
    whole = tilefold.matmul(a, w.t(), numerics="invariant")
    for rows in (1, 7, 16, 64, 65, 128, 200):
        for first in (0, 3, 100):
            assert torch.equal(
                tilefold.matmul(a[first : first + rows], w.t(), numerics="invariant"), whole[first : first + rows]
            )
    if dtype.itemsize > 1:
        many = tilefold.bmm(a.expand(3, -1, -1), w.t(), numerics="invariant")
        assert torch.equal(many[1], whole)


@SM_90
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("turned", [(False, True), (False, False), (True, True)])
def test_products_by_every_tile(turned, dtype):
    """Columns, steps, both numbers of rows, and the kernel for sm_90: one chain of products over k, the same bits."""
    for m, n, k in ((1, 520, 1040), (70, 520, 4096), (300, 1000, 1000)):
        a, b = (
            matrix(*shape, dtype=dtype, device=DEVICE, turned=t)
            for shape, t in zip(((m, k), (k, n)), turned, strict=True)
        )
        for bias, activation in ((None, "none"), (rand(n, dtype=dtype, device=DEVICE), "relu")):
            asked = {"bias": bias, "activation": None if activation == "none" else activation}
            whole = tilefold.matmul(a, b, numerics="invariant", **asked)
            problem = problem_of(operands(a, b, bias, False), Epilogue(activation, out_dtype=dtype), False)
            base, seen = plan_matmul(problem, device_of(DEVICE)), set()
            for plan in products.tiles_of(base):
                seen.add(plan.kernel)
                got = tilefold.matmul(a, b, plan=plan, numerics="invariant", **asked)
                assert torch.equal(got, whole), (m, n, k, plan.kernel, plan.tile)
            assert len(seen) == 1 + problem.descriptors


@pytest.mark.parametrize(("bits", "dtype"), [(4, BF16), (8, torch.float16), (3, BF16), (2, BF16), (4, torch.float32)])
def test_lowbit(bits, dtype):
    weight = quantize_weight(rand(512, 1024, dtype=dtype, device=DEVICE), bits=bits, group=128)
    x = rand(300, 1024, dtype=dtype, device=DEVICE)
    whole = tilefold.lowbit_matmul(x, weight, numerics="invariant")
    for rows in (1, 7, 16, 17, 64, 200):
        assert torch.equal(tilefold.lowbit_matmul(x[100 - rows // 2 :][:rows], weight, numerics="invariant"),
                           whole[100 - rows // 2 :][:rows])  # fmt: skip


@SM_90
@pytest.mark.parametrize(
    ("bits", "scheme", "group", "dtype"),
    [(4, "asymmetric", 128, BF16), (4, "symmetric", 32, torch.float16), (8, "asymmetric", 64, BF16), (3, "asymmetric", 128, BF16),
     (2, "symmetric", None, BF16), (8, "symmetric", 128, torch.float16)],
)  # fmt: skip
def test_few_bits_have_the_bits_of_their_floats(bits, scheme, group, dtype):
    """Whichever path a number of rows takes: the product with the dequantised weight."""
    weight = quantize_weight(rand(1032, 2048, dtype=dtype, device=DEVICE), bits=bits, group=group, scheme=scheme)
    floats, bias, paths = weight.dequantize(dtype), rand(1032, dtype=dtype, device=DEVICE), set()
    for rows in (1, 5, 40, 200, 700, 9000):
        x = rand(rows, 2048, dtype=dtype, device=DEVICE)
        paths.add(tilefold.lowbit_matmul_plan(x, weight, numerics="invariant").path)
        got = tilefold.lowbit_matmul(x, weight, bias, numerics="invariant")
        assert torch.equal(got, tilefold.matmul(x, floats.t(), bias=bias, numerics="invariant")), rows
    assert {"tile", "dequantise"} <= paths


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [64, 100, 512, 4096, 16384])
def test_rows_of_rms_norm(columns, dtype):
    """A row has the bits that it has alone: out, the sum and dx, of plain rows and of turned heads and tokens."""
    x, other, dout = (rand(300, columns, dtype=dtype, device=DEVICE) for _ in range(3))
    weight, angles = rand(columns, dtype=dtype, device=DEVICE), rand(300, columns // 4, device=DEVICE)

    def turned(x, angles, heads):
        shape = (heads, columns // heads)
        w = weight.view(shape) if heads > 1 else weight
        return tilefold.ops.rms_norm_rotary(x.view(1, -1, *shape), w, angles.cos(), angles.sin()).view(x.shape)

    ways = [
        lambda x, other, angles: [tilefold.ops.rms_norm(x, weight)],
        lambda x, other, angles: tilefold.ops.rms_norm(x, weight, other),
        lambda x, other, angles: [turned(x, angles, 1)],
        lambda x, other, angles: [turned(x, angles[:, : columns // 8], 2)],
    ]
    for way in ways:

        def call(rows, way=way):
            own, *others = (t[rows].clone() for t in (x, other, angles, dout))
            made = way(own.requires_grad_(), *others[:2])
            return *made, *torch.autograd.grad(made[0], own, others[2])

        whole = call(slice(None))
        for first, count in ((0, 1), (3, 2), (235, 7), (100, 24), (200, 65)):
            rows = slice(first, first + count)
            assert same(call(rows), [t[rows] for t in whole]), (ways.index(way), first, count)


def test_graphs_and_compiled_functions():
    q, k, v = qkv(2, 1, 5000, 28, 4, 128, None, BF16, DEVICE)

    def call(q, k, v):
        return tilefold.attention(q, k, v, causal=True, return_lse=True, numerics="invariant")

    right = call(q, k, v)
    with no_waiting():
        again = call(q, k, v)
    assert same(right, again)
    assert same(right, torch.compile(call, fullgraph=True)(q, k, v))
    graph, kept = captured(lambda: call(q, k, v))
    graph.replay()
    assert same(right, kept)
    with tilefold.numerics("invariant"):
        compiled = torch.compile(lambda q, k, v: tilefold.attention(q, k, v, causal=True), fullgraph=True)
        assert torch.equal(compiled(q, k, v), right[0])
