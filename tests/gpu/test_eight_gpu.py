"""Products of 8 bits and of weights of few bits on a GPU: fp64, exact on whole numbers, recovery of weights, reruns, graphs."""

from dataclasses import replace

import pytest
import torch

from cases import judge, rand
from cases.device import DEVICE, followed
from cases.matmul import check, tensor_core_sums
from tilefold import ops, quant, reference
from tilefold.ops.device import device_of
from tilefold.ops.matrix.eight import bind_plan, matmul_w8a8_plan
from tilefold.plan.matrix.eight import HOPPER, PORTABLE, ROWS, EightProblem, plan_eight
from tilefold.reference.matrix import row_codes

pytestmark = pytest.mark.no_poison
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
KINDS = [torch.int8, torch.float8_e4m3fn]
TILES = {
    "rows 16": {"kernel": ROWS, "block_m": 16, "block_n": 64, "block_k": 256, "stages": 5},
    "rows 16, two consumers, splits": {"kernel": ROWS, "block_m": 16, "block_n": 128, "block_k": 128, "splits": 3},
    "rows 64, splits": {"kernel": ROWS, "block_m": 64, "block_n": 64, "block_k": 128, "splits": 2},
    "rows 128, two consumers, splits": {"kernel": ROWS, "block_m": 128, "block_n": 128, "block_k": 128, "splits": 4},
    "large 128": {"kernel": HOPPER, "block_m": 128, "block_n": 128, "block_k": 128},
    "large 256": {"kernel": HOPPER, "block_m": 128, "block_n": 256, "block_k": 128, "stages": 4, "group": 16},
}


def weight_of(n, k, kind, scale=40):
    return (torch.randn(n, k, device=DEVICE) * scale).clamp(-127, 127).to(kind)


def run(tile, x, weight, scale, bias=None):
    """By a plan of the test's choice, or the planner's own (None)."""
    if tile is None:
        return ops.matmul_w8a8(x, weight, scale, bias)
    if not IS_HOPPER:
        pytest.skip("written for sm_90")
    k = weight.shape[1]
    kind = str(weight.dtype).removeprefix("torch.")
    problem = EightProblem(x.numel() // k, weight.shape[0], k, kind)
    fields = {"num_warps": 4, "stages": 3, "splits": 1, "group": 1, **TILES[tile]}
    return bind_plan(replace(plan_eight(problem, device_of(DEVICE)), **fields), x, weight, scale, bias)(
        x, weight, scale, bias
    )


def hold(tile, x, weight, scale, bias=None):
    got = run(tile, x, weight, scale, bias)
    want, plain = (reference.matmul_w8a8(x, weight, scale, bias, d) for d in (torch.float64, torch.float32))
    if weight.dtype == torch.float8_e4m3fn:
        codes, rows = row_codes(x.flatten(0, -2), weight.dtype)
        plain = (tensor_core_sums(codes, weight) * rows * scale).view(want.shape)
        plain = plain if bias is None else plain + bias.float()
    assert got.dtype == x.dtype and got.shape == want.shape
    judge(got, want, plain, f"{tile} {tuple(x.shape)} {x.dtype} {weight.dtype}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [*TILES, None])
def test_against_fp64(tile, kind):
    """Odd M and N, K of 16 and no multiple of the tile's, one factor or one a row, bias, leading dimensions, strides."""
    for shape, n, dtype, one in (
        ((1, 528), 700, torch.bfloat16, False),
        ((3, 11, 1040), 333, torch.float16, True),
        ((130, 2064), 513, torch.bfloat16, False),
        ((300, 4096), 1032, torch.float16, False),
    ):
        x = rand(*shape, dtype=dtype, device=DEVICE)
        scale = torch.rand(1 if one else n, device=DEVICE) * 0.01 + 0.001
        bias = None if one else rand(n, dtype=dtype, device=DEVICE)
        hold(tile, x, weight_of(n, shape[-1], kind), scale, bias)
    wide = rand(67, 1100, dtype=torch.bfloat16, device=DEVICE)
    hold(tile, wide[::2, 8:1048], weight_of(200, 2080, kind)[:, 1040:], torch.rand(400, device=DEVICE)[::2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [*TILES, None])
def test_whole_numbers_are_exact(tile, kind):
    """Codes that are their numbers, scales that are powers of two: the bits of fp64, in every run."""
    for m, n, k in ((16, 704, 2112), (200, 1000, 4096)):
        x = torch.randint(-3, 4, (m, k), device=DEVICE).to(torch.bfloat16)
        x[torch.arange(m), torch.randint(0, k, (m,))] = 127.0 if kind == torch.int8 else 448.0
        weight = torch.randint(-3, 4, (n, k), device=DEVICE).to(kind)
        scale = 2.0 ** -torch.randint(0, 4, (n,), device=DEVICE).float()
        want = (x.double() @ weight.double().t() * scale.double()).to(torch.bfloat16)
        assert all(torch.equal(run(tile, x, weight, scale), want) for _ in range(4)), (m, n, k)


@pytest.mark.parametrize("tile", [*TILES, None])
def test_long_sums_of_e4m3(tile):
    """All positive: what a wgmma of bytes loses by adding with 14 bits would be a share of the sum that fp32 does not lose."""
    x = rand(40, 16384, dtype=torch.float16, device=DEVICE).abs() + 0.5
    weight = (torch.rand(200, 16384, device=DEVICE) + 0.5).to(torch.float8_e4m3fn)
    scale = torch.full((1,), 2.0**-10, device=DEVICE)
    want = reference.matmul_w8a8(x, weight, scale)
    got = run(tile, x, weight, scale)
    if tile is not None:  # the portable kernel, where it serves, leaves the sums to the tensor cores
        assert float(((got.double() - want) / want).abs().max()) < 2.0**-10
    judge(got, want, reference.matmul_w8a8(x, weight, scale, None, torch.float32).half(), "long")


def test_a_row_longer_than_a_program_holds():
    hold(
        None,
        rand(3, 40000, dtype=torch.bfloat16, device=DEVICE),
        weight_of(64, 40000, torch.int8),
        torch.rand(64, device=DEVICE),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_copy_engine_cannot_read(kind):
    weight = weight_of(100, 1008, kind)
    for cut in (weight[:, :1000], weight[:, 8:]):
        hold(None, rand(5, cut.shape[1], dtype=torch.bfloat16, device=DEVICE), cut, torch.rand(100, device=DEVICE))
    assert matmul_w8a8_plan(torch.empty(5, 1000, device=DEVICE), weight[:, 1:1001]).kernel == PORTABLE
    odd = weight_of(100, 1001, kind)
    hold(None, rand(5, 1001, dtype=torch.bfloat16, device=DEVICE), odd, torch.rand(100, device=DEVICE))
    assert ops.matmul_w8a8(
        rand(0, 1001, dtype=torch.bfloat16, device=DEVICE), odd, torch.rand(100, device=DEVICE)
    ).shape == (0, 100)


@pytest.mark.parametrize("m", [1, 64, 300])
def test_dependent_launches_see_what_came_before(m):
    """A graph of calls one after another: the weight, written by the kernel before, and x, made of the result before."""
    k = 4096
    x, source = rand(m, k, dtype=torch.bfloat16, device=DEVICE), weight_of(k, k, torch.int8)
    weight, scale = torch.zeros_like(source), torch.full((k,), 1e-3, device=DEVICE)

    def chain():
        weight.zero_()
        weight.copy_(source)
        out = ops.matmul_w8a8(x, weight, scale)
        for _ in range(3):
            weight.copy_(weight.roll(1, 0))
            out = ops.matmul_w8a8(ops.matmul_w8a8(out, weight, scale), source, scale)
        return out

    want = chain()
    assert not torch.equal(followed(chain, *[x.normal_] * 5), want)
    assert torch.equal(
        torch.compile(lambda x: ops.matmul_w8a8(x, source, scale), fullgraph=True)(x), ops.matmul_w8a8(x, source, scale)
    )


@pytest.mark.parametrize("columns", [128, 256])
def test_matmul_of_e4m3(columns):
    """By the kernel for sm_90: scales, bias, activations, dtypes of the result, odd N, shares of the sum."""
    if not IS_HOPPER:
        pytest.skip("written for sm_90")
    from tilefold.ops.matrix.operands import operands
    from tilefold.ops.matrix.product import Epilogue, problem_of
    from tilefold.plan.matrix.matmul import plan_matmul

    for m, n, k in ((500, 392, 1008), (1000, 333, 4096), (257, 1032, 128)):
        a, b = (rand(rows, k, device=DEVICE).to(torch.float8_e4m3fn) for rows in (m, n))
        for options in (
            {},
            {"scale_a": torch.rand(1, device=DEVICE) + 0.5, "activation": "gelu"},
            {"scale_a": torch.rand(m, device=DEVICE), "scale_b": torch.rand(n, device=DEVICE), "activation": "silu"},
            {"out_dtype": torch.float32, "bias": rand(m, 1, device=DEVICE)},
            {"out_dtype": torch.float16, "bias": rand(n, dtype=torch.float16, device=DEVICE), "activation": "relu"},
        ):
            scaled = "scale_a" in options or "scale_b" in options
            out_dtype = options.get("out_dtype", torch.bfloat16)
            epilogue = Epilogue(options.get("activation", "none"), out_dtype=out_dtype)
            problem = problem_of(operands(a, b.t(), options.get("bias"), False), epilogue, scaled)
            plan = plan_matmul(problem, device_of(DEVICE)).with_tile(
                kernel="matmul_hopper", block_n=columns, num_stages=4
            )
            got = check(a, b.t(), plan=plan, **options)
            assert torch.equal(got, ops.matmul(a, b.t(), plan=plan, **options))
            if k > 1000:
                check(a, b.t(), plan=plan.with_tile(splits=3), **options)


# ---------------------------------------------------------------- weights of few bits


PATHS = {"rows": 8, "rows of 16": 16, "hopper 64": 64, "hopper 256": 256}


def weight_of_lowbit(n, k, bits, group, zeros=True, dtype=torch.bfloat16):
    """Random and distinct codes, scales and zero points."""
    packed, high = quant.pack(torch.randint(0, 2**bits, (n, k), dtype=torch.uint8), bits)
    shape = (-(-k // group), n)
    return quant.QuantizedTensor(
        packed=packed,
        packed_high=high,
        scales=(0.5 + torch.rand(shape)).to(dtype),
        zeros=torch.randint(0, 2**bits, shape, dtype=torch.uint8) if zeros else None,
        bits=bits,
        group=group,
        shape=(n, k),
        scheme="asymmetric" if zeros else "symmetric",
        dtype=dtype,
    ).to(DEVICE)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_identity_recovers_the_weight(path, bits):
    """N and K off the tiles, a short last group, groups of one slab to whole rows."""
    step = PATHS[path]
    for n, k, group, zeros, dtype in (
        (704, 2112, 128, True, torch.bfloat16),
        (200, 1040, 32, False, torch.float16),
        (200, 1040, 96, True, torch.bfloat16),
        (72, 528, 528, True, torch.float16),
    ):
        weight = weight_of_lowbit(n, k, bits, group, zeros, dtype)
        want = weight.dequantize().t()
        eye = torch.eye(k, dtype=dtype, device=DEVICE)
        for first in sorted({0, step, (k // 2) // step * step, k - step}):
            got = ops.lowbit_matmul(eye[first : first + step].contiguous(), weight)
            assert torch.equal(got, want[first : first + step]), (n, k, group, first)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_the_portable_kernel_recovers_the_weight(bits):
    """N a multiple of four and not; groups of one slab to whole rows; parts of K; scaled after the product and before."""
    own = {"path": "tile", "block_n": 128, "block_m": 16, "num_warps": 4, "stages": 3, "join": True}
    for n, k, group, dtype, scaled in (
        (704, 2112, 128, torch.bfloat16, "after"),
        (202, 1040, 32, torch.float16, "before"),
        (72, 528, 528, torch.float16, "after"),
    ):
        weight = weight_of_lowbit(n, k, bits, group, True, dtype)
        want, eye = weight.dequantize().t(), torch.eye(k, dtype=dtype, device=DEVICE)
        for first in (0, (k // 2) // 16 * 16, k - 16):
            x = eye[first : first + 16].contiguous()
            plan = replace(ops.lowbit_matmul_plan(x, weight), splits=2, scaled=scaled, registers=0, **own)
            assert torch.equal(ops.lowbit_matmul(x, weight, plan=plan), want[first : first + 16]), (n, k, group, first)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_against_fp64_and_the_same_bits(bits):
    weight = weight_of_lowbit(1408, 4096, bits, 128)
    bias = rand(1408, dtype=torch.bfloat16, device=DEVICE)
    for m in (1, 7, 16, 33, 100, 300, 2000):
        x = rand(m, 4096, dtype=torch.bfloat16, device=DEVICE)
        got = ops.lowbit_matmul(x, weight, bias)
        want, plain = (reference.lowbit_matmul(x, weight, bias, d) for d in (torch.float64, torch.bfloat16))
        judge(got, want, plain, f"m {m}")
        assert all(torch.equal(got, ops.lowbit_matmul(x, weight, bias)) for _ in range(3))


def test_graph_replays_see_new_activations():
    weight, x = weight_of_lowbit(704, 4096, 4, 128), rand(4, 4096, dtype=torch.bfloat16, device=DEVICE)
    ops.lowbit_matmul(x, weight)

    def twice():
        return ops.lowbit_matmul(ops.lowbit_matmul(x, weight).repeat(1, 6)[:, :4096].contiguous(), weight)

    followed(twice, *[x.normal_] * 3)
