"""Problems and devices refuse bad values, naming the argument."""

from dataclasses import replace

import pytest

from tilefold.errors import DeviceError, DtypeError, ShapeError, TilefoldError, ValueRangeError
from tilefold.plan import DEVICES, AttentionProblem, device_named

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
    with pytest.raises(error) as caught:
        replace(GOOD, **change)  # type: ignore[arg-type]
    assert text in str(caught.value)
    assert isinstance(caught.value, TilefoldError)


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
