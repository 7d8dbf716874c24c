"""Problems, devices and limits are values with exact arithmetic; costs against counting one by one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.refusals import refuses
from examples import examples
from tilefold.errors import DeviceError, DtypeError, ShapeError, ValueRangeError
from tilefold.plan import DEVICES, AttentionProblem, attention_cost, bound, device_named, live_pairs
from tilefold.plan.cost import live_keys, visited_tiles
from tilefold.plan.limits import BOX, POINTER, Tile, box_refusal, registers_estimate, shared_bytes, tile_violation

GOOD = AttentionProblem(2, 100, 200, 8, 2, 64, 32)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"batch": -1}, ShapeError, "batch must be at least 0, got -1"),
        ({"seq_q": -3}, ShapeError, "seq_q must be at least 0, got -3"),
        ({"heads": 0}, ShapeError, "heads must be at least 1, got 0"),
        ({"kv_heads": 3}, ShapeError, "kv_heads must divide heads, got kv_heads=3 and heads=8"),
        ({"dim_qk": 0}, ShapeError, "dim_qk must be at least 1, got 0"),
        ({"seq_k": 2.0}, DtypeError, "seq_k must be an integer, got 2.0 of type float"),
        ({"batch": True}, DtypeError, "batch must be an integer, got True of type bool"),
        ({"dtype": "float64"}, DtypeError, "dtype must be one of bfloat16, float16, float32, got 'float64'"),
        ({"causal": 1}, DtypeError, "causal must be True or False, got 1"),
        ({"window": (-2, 0)}, ValueRangeError, "got (-2, 0)"),
        ({"window": [1, 0]}, ValueRangeError, "window must be a tuple (left, right) of two integers, got [1, 0]"),
        ({"window": (1,)}, ValueRangeError, "window must be a tuple (left, right) of two integers, got (1,)"),
        ({"score_mods": "softcap"}, ValueRangeError, "score_mods must be a tuple of names"),
        ({"mask_mods": ("",)}, ValueRangeError, "mask_mods must be a tuple of names"),
    ],
)
def test_bad_values_are_refused_by_name(change: dict[str, object], error: type[Exception], text: str) -> None:
    refuses(error, text, replace, GOOD, **change)


def test_problems_are_values() -> None:
    assert replace(GOOD) == GOOD
    assert hash(replace(GOOD)) == hash(GOOD)
    assert (GOOD.group, GOOD.block_qk, GOOD.block_v, GOOD.itemsize) == (4, 64, 64, 2)
    assert replace(GOOD, causal=True, window=(5, 9)).sides == (5, 0)


@pytest.mark.parametrize(("dim", "width"), [(1, 16), (16, 16), (17, 32), (40, 64), (96, 128), (129, 256), (256, 256)])
def test_head_dims_are_padded_to_powers_of_two(dim: int, width: int) -> None:
    assert replace(GOOD, dim_qk=dim).block_qk == width


@pytest.mark.parametrize(
    ("dim_qk", "dim_v", "width"),
    [
        (40, 24, 64),
        (33, 17, 64),
        (20, 10, 32),
        (128, 20, 64),
        (128, 72, 128),
        (24, 40, 64),
        (16, 16, 16),
        (64, 256, 256),
    ],
)
def test_values_have_the_swizzle_of_keys(dim_qk: int, dim_v: int, width: int) -> None:
    """Under ptxas 12.8 narrower tiles of V went wrong; 64 columns of 16 bits are the widest swizzle."""
    assert replace(GOOD, dim_qk=dim_qk, dim_v=dim_v).block_v == width


def test_device_records_are_complete() -> None:
    assert {"h200", "h100", "b200", "a100", "l4", "rtx4090", "mi300x", "interpreter"} == set(DEVICES)
    for name, device in DEVICES.items():
        assert device.name == name
        assert device.smem_per_block <= device.smem_per_sm
        assert device.source.split(":")[0] in ("datasheet", "measured")
        for dtype in ("float16", "bfloat16", "float32", "tf32"):
            assert device.matmul_rate(dtype) > 0
        assert hash(replace(device)) == hash(device)


def test_devices_are_found_by_name() -> None:
    assert device_named("H200") is DEVICES["h200"]
    assert device_named("RTX 4090") is DEVICES["rtx4090"]
    with pytest.raises(DeviceError, match=r"device must be one of h200, h100, .*, got 'h300'"):
        device_named("h300")
    with pytest.raises(DeviceError, match="device h200 has no matrix rate for dtype 'float8'"):
        device_named("h200").matmul_rate("float8")


# ---------------------------------------------------------------- limits


# device, head dim, tile, kernel, dtype, bytes of shared memory, registers per thread; none of these spills over 8 bytes
COMPILED = [
    ("h200", 64, Tile(128, 64, 8, 3), BOX, "bfloat16", 66560, 108),
    ("h200", 64, Tile(128, 128, 8, 3), BOX, "bfloat16", 115712, 220),
    ("h200", 128, Tile(64, 64, 4, 3), BOX, "bfloat16", 115712, 139),
    ("h200", 128, Tile(64, 64, 4, 2), BOX, "bfloat16", 82944, 138),
    ("h200", 128, Tile(128, 64, 8, 3), POINTER, "bfloat16", 131072, 172),
    ("h200", 128, Tile(16, 128, 4, 3), POINTER, "bfloat16", 139264, 163),
    ("h200", 256, Tile(64, 32, 4, 2), BOX, "bfloat16", 98336, 196),
    ("h200", 128, Tile(32, 16, 4, 2), POINTER, "float32", 34944, 190),
    ("h200", 64, Tile(64, 32, 8, 2), POINTER, "float32", 41216, 92),
    ("b200", 128, Tile(64, 64, 4, 3), BOX, "bfloat16", 115712, 139),
    ("b200", 256, Tile(64, 32, 4, 2), BOX, "bfloat16", 98368, 168),
    ("a100", 64, Tile(128, 64, 4, 3), POINTER, "bfloat16", 49152, 255),
    ("a100", 128, Tile(128, 64, 8, 3), POINTER, "bfloat16", 98304, 227),
    ("a100", 256, Tile(64, 32, 8, 2), POINTER, "bfloat16", 69632, 211),
    ("a100", 256, Tile(32, 64, 4, 3), POINTER, "bfloat16", 151552, 201),
    ("mi300x", 64, Tile(128, 64, 4, 2), POINTER, "bfloat16", 16384, 260),
    ("mi300x", 128, Tile(128, 64, 4, 2), POINTER, "bfloat16", 32768, 370),
    ("mi300x", 128, Tile(64, 64, 4, 2), POINTER, "bfloat16", 40960, 304),
    ("mi300x", 256, Tile(64, 32, 4, 2), POINTER, "bfloat16", 36864, 336),
    ("mi300x", 256, Tile(16, 16, 4, 2), POINTER, "float32", 33792, 200),
]


@pytest.mark.parametrize(("name", "dim", "tile", "kernel", "dtype", "shared", "registers"), COMPILED)
def test_estimates_match_compilations(
    name: str, dim: int, tile: Tile, kernel: str, dtype: str, shared: int, registers: int
) -> None:
    device, problem = device_named(name), AttentionProblem(1, 4096, 4096, 4, 4, dim, dim, dtype, causal=True)
    assert tile_violation(problem, device, kernel, tile) is None
    # Never too small, or a launch could fail; rarely too large, or good tiles would be refused.
    assert shared <= shared_bytes(problem, device, tile) <= shared * 1.05
    assert registers_estimate(problem, device, kernel, tile) == pytest.approx(registers, rel=1 / 3)


def test_modifications_that_load_per_score_need_shared_memory() -> None:
    device, tile = device_named("h200"), Tile(64, 64, 4, 3)
    plain = AttentionProblem(1, 4096, 4096, 4, 4, 128, 128)
    light = AttentionProblem(1, 4096, 4096, 4, 4, 128, 128, score_mods=("softcap", "alibi"))
    heavy = AttentionProblem(1, 4096, 4096, 4, 4, 128, 128, score_mods=("bias",), mask_mods=("mask",))
    assert shared_bytes(light, device, tile) == shared_bytes(plain, device, tile)
    assert shared_bytes(heavy, device, tile) == shared_bytes(plain, device, tile) + 3 * 64 * 64 * 5


def test_box_refusals_say_why() -> None:
    problem = AttentionProblem(1, 4096, 4096, 4, 4, 128, 128)
    assert box_refusal(problem, device_named("h200")) is None
    assert "sm_80 has no tensor-descriptor loads" in str(box_refusal(problem, device_named("a100")))
    assert "gfx942 has no tensor-descriptor loads" in str(box_refusal(problem, device_named("mi300x")))


# ---------------------------------------------------------------- costs


def visible(problem: AttentionProblem, query: int, key: int) -> bool:
    """The definition of the mask, written without sharing anything with the code under test."""
    position = query + problem.seq_k - problem.seq_q
    if problem.causal and key > position:
        return False
    left, right = problem.window
    return not (left >= 0 and key < position - left) and not (right >= 0 and key > position + right)


Sizes = tuple[int, int, int, int, int, int, int]

side = st.integers(-1, 70)
problems = st.builds(
    AttentionProblem,
    batch=st.integers(0, 3),
    seq_q=st.integers(0, 60),
    seq_k=st.integers(0, 60),
    heads=st.just(6),
    kv_heads=st.sampled_from([1, 2, 3, 6]),
    dim_qk=st.integers(1, 256),
    dim_v=st.integers(1, 256),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    causal=st.booleans(),
    window=st.tuples(side, side),
)


@examples(300)
@given(problems)
def test_live_pairs_and_keys_are_counted_exactly(problem: AttentionProblem) -> None:
    live = [(i, j) for i in range(problem.seq_q) for j in range(problem.seq_k) if visible(problem, i, j)]
    assert live_pairs(problem) == len(live)
    assert live_keys(problem) == len({j for _, j in live})


@examples(300)
@given(problems, st.sampled_from([16, 32, 64]), st.sampled_from([16, 32, 64]))
def test_visited_tiles_are_counted_exactly(problem: AttentionProblem, block_m: int, block_n: int) -> None:
    visited = 0
    for start in range(0, problem.seq_q, block_m):
        rows = range(start, min(start + block_m, problem.seq_q))
        keys = [j for i in rows for j in range(problem.seq_k) if visible(problem, i, j)]
        visited += max(keys) // block_n - min(keys) // block_n + 1 if keys else 0
    assert visited_tiles(problem, block_m, block_n) == visited


def test_counts_of_huge_problems_need_no_loop() -> None:
    n = 2**30
    problem = AttentionProblem(1, n, n, 1, 1, 128, 128, causal=True)
    assert live_pairs(problem) == n * (n + 1) // 2
    assert visited_tiles(problem, 64, 64) == (n // 64) * (n // 64 + 1) // 2


def test_flops_bytes_and_exponentials() -> None:
    problem = AttentionProblem(2, 1, 8192, 28, 4, 128, 64, score_mods=("softcap", "alibi"))
    cost = attention_cost(problem)
    assert cost.flops == 2 * 8192 * (128 + 64) * 2 * 28
    elements = 2 * (28 * 128 + 28 * 64 + 8192 * 4 * (128 + 64))
    assert cost.bytes == elements * 2 + 2 * 28 * 4
    assert cost.exps == 2 * (8192 * 2 * 28), "a softcap takes one exponential more"


def test_a_window_reads_only_the_keys_it_shows() -> None:
    windowed = AttentionProblem(1, 1, 1_000_000, 8, 8, 128, 128, causal=True, window=(127, 0))
    assert live_keys(windowed) == 128
    assert attention_cost(windowed).bytes == (8 + 8 * 128) * 256 * 2 + 8 * 4


@pytest.mark.parametrize(
    ("sizes", "dtype", "resource"),
    [
        ((1, 16384, 16384, 16, 16, 128, 128), "bfloat16", "tensor pipe"),
        ((1, 1, 8192, 28, 4, 128, 128), "bfloat16", "DRAM"),
        ((1, 16384, 16384, 16, 16, 16, 16), "bfloat16", "exp unit"),
        ((1, 4096, 4096, 16, 16, 64, 64), "float32", "FP32 pipe"),
        ((0, 4096, 4096, 16, 16, 64, 64), "float32", "none"),
    ],
)
def test_the_bound_names_the_resource(sizes: Sizes, dtype: str, resource: str) -> None:
    problem = AttentionProblem(*sizes, dtype=dtype)
    found = bound(attention_cost(problem), device_named("h200"), dtype)
    assert found.resource == resource
    assert found.seconds == max(seconds for _, seconds in found.times)


def test_measured_roofs_replace_the_datasheet() -> None:
    h200, h100 = device_named("h200"), device_named("h100")
    assert h200.matmul_rate("bfloat16") == 760e12
    assert h200.matmul_rate("float16") == h100.matmul_rate("float16") == 989.4e12
    assert h200.dram_rate == 4.27e12
    assert h200.exp_rate == pytest.approx(3.87e12, rel=0.01)
