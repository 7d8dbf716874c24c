"""The kernels behind the flash_attn functions compile for their targets under two Tritons, without spills in loops."""

import pytest

from aot_cases import DEVICES, Results, compiled
from tilefold.aot import Job

ROTARY = [
    ("bfloat16", 128, 64, False),
    ("bfloat16", 128, 64, True),
    ("float32", 59, 16, True),
    ("float16", 256, 48, False),
]
CACHED = [("bfloat16", 128, 0, 1), ("bfloat16", 128, 256, 1), ("bfloat16", 128, 7, 1), ("bfloat16", 128, 256, 256),
          ("float16", 59, 0, 64), ("bfloat16", 256, 256, 64), ("float32", 64, 16, 4)]  # fmt: skip
APPEND = [("bfloat16", 128, 0, 64), ("bfloat16", 128, 256, 0), ("float32", 59, 7, 16)]
CODED = [
    ("bfloat16", 128, 16, 64, "float8_e4m3fn", True, 8, 64, True),
    ("bfloat16", 128, 16, 64, "float8_e4m3fn", False, 0, 4096, True),
    ("float16", 128, 0, 0, "int8", True, 0, 4096, True),
    ("bfloat16", 128, 256, 64, "float8_e4m3fn", True, 8, 4096, False),
]
# Rotary in halves with an odd number of pairs: codes are stored one by one after a way through shared memory.
ODD = [
    ("float16", 256, 16, 93, "int8", True, 0, 64, True, False),
    ("bfloat16", 128, 0, 29, "int8", False, 8, 4096, True, False),
]
MERGE = [("bfloat16", 128), ("float32", 300)]
MIXED = [("bfloat16", 128, "float32", "bfloat16")]  # the last merge of many
WEIGHTS = [("bfloat16", 128), ("float32", 256)]
EVERYWHERE = (ROTARY[1], CACHED[1], APPEND[0], CODED[3])


def jobs(kind, builder, names, cases):
    return {
        (f"{kind} {' '.join(map(str, case))}", target): Job(
            builder, {**dict(zip(names, case, strict=True)), **({"device": device} if kind == "cached" else {})}, target
        )
        for case in cases
        for target, device in DEVICES.items()
        if target == "sm_90" or case in EVERYWHERE
    }


JOBS = {
    **jobs("rotary", "tilefold.ops.cache.rotary:example_launch", ("dtype", "dim", "pairs", "interleaved"), ROTARY),
    **jobs("cached", "tilefold.ops.cache.cached:example_launch", ("dtype", "dim", "page", "seq_q"), CACHED),
    **jobs("append", "tilefold.ops.cache.cache_append:example_launch", ("dtype", "dim", "page", "pairs"), APPEND),
    **jobs(
        "coded",
        "tilefold.ops.cache.cache_append:example_launch",
        ("dtype", "dim", "page", "pairs", "cache", "packed", "heads", "tokens", "native"),
        CODED,
    ),
    **jobs(
        "odd",
        "tilefold.ops.cache.cache_append:example_launch",
        ("dtype", "dim", "page", "pairs", "cache", "packed", "heads", "tokens", "native", "interleaved"),
        ODD,
    ),
    **jobs("merge", "tilefold.ops.cache.merge:example_launch", ("dtype", "dim"), MERGE),
    **jobs("merge", "tilefold.ops.cache.merge:example_launch", ("dtype", "dim", "first", "to"), MIXED),
    **jobs("weights", "tilefold.ops.dense.attention_weights:example_launch", ("dtype", "dim"), WEIGHTS),
}
NEWEST = ("rotary bfloat16 128 64 True", "cached bfloat16 128 0 1", "cached bfloat16 128 256 256", "append bfloat16 128 0 64",
          "merge bfloat16 128",
          "coded bfloat16 128 16 64 float8_e4m3fn True 8 64 True", "weights bfloat16 128",
          *(f"odd {' '.join(map(str, case))}" for case in ODD))  # fmt: skip

PRODUCTS = [key for key in JOBS if key[0].startswith(("cached", "weights"))]
STREAMING = [key for key in JOBS if key not in PRODUCTS]
results = compiled(__name__, JOBS, NEWEST)


@pytest.mark.parametrize(("name", "target"), PRODUCTS)
def test_kernels_with_products(results: Results, name: str, target: str) -> None:
    """Tensor instructions of some kind (16 rows are too few for the newest), and no spilled register in a loop."""
    tensor = "none" if "float32" in name else "any"
    report = results.clean(name, target, tensor=tensor, spills="outside loops")
    assert report.loop_spills == 0


@pytest.mark.parametrize(("name", "target"), STREAMING)
def test_streaming_kernels(results: Results, name: str, target: str) -> None:
    """Nothing spilled."""
    assert results.of(name, target).problems(tensor="none") == ()


@pytest.mark.parametrize("name", [name for name, _ in JOBS if name.startswith("odd")])
def test_codes_are_stored_and_not_converted(results: Results, name: str) -> None:
    """ptxas 12.8 and 12.9 make of a store of the low byte of what a float instruction wrote a conversion of its value."""
    report = results.of(name, "sm_90").report
    assert report is not None
    assert "F2IP" not in report.opcodes
    assert report.ptx.get("div.rn", 0) > 0  # the codes' quotients: this is the kernel that is meant
