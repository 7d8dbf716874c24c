"""The kernels of conv2d, add, transpose and both RMSNorms, as planned for real devices, compile for targets under two Tritons."""

import pytest

from aot_cases import DEVICES, Results, compiled, job
from tilefold.plan import device_named
from tilefold.plan.matrix.conv import ConvProblem, plan_conv
from tilefold.plan.matrix.rms_norm import RMSNormProblem, plan_rms_norm
from tilefold.plan.matrix.transpose import TransposeProblem, plan_transpose

PROBLEMS = {
    "3x3": ConvProblem(32, 256, 14, 14, 256, (3, 3), (14, 14), pad=(1, 1)),
    "3x3 stride 2": ConvProblem(32, 128, 56, 56, 128, (3, 3), (28, 28), stride=(2, 2), pad=(1, 1)),
    "1x1": ConvProblem(32, 256, 56, 56, 64, (1, 1), (56, 56)),
    "first": ConvProblem(32, 3, 224, 224, 64, (7, 7), (112, 112), stride=(2, 2), pad=(3, 3)),
}
FIRST = {
    "1x1": ConvProblem(32, 64, 56, 56, 256, (1, 1), (56, 56), x_last=False, y_last=False),
    "3x3": ConvProblem(32, 64, 56, 56, 64, (3, 3), (56, 56), pad=(1, 1), x_last=False, y_last=False),
    "odd": ConvProblem(32, 512, 7, 7, 2048, (1, 1), (7, 7), x_last=False, y_last=False),
    "7x7": ConvProblem(32, 3, 224, 224, 64, (7, 7), (112, 112), (2, 2), (3, 3), x_last=False, y_last=False),
}
CHANNELS_FIRST = {
    (f"{part} {name} channels-first", "sm_90"): job(
        "matrix.conv", "sm_90", plan=plan_conv(FIRST[name], device_named("h200")), part=part
    )
    for name, part in (*((name, "forward") for name in FIRST), ("1x1", "weight"))
}
COPIED = plan_conv(FIRST["3x3"], device_named("h200"))
COPY = {("copy", "sm_90"): job("matrix.conv_layout:example_copy", "sm_90", plan=COPIED)}
TENSOR = {
    (f"{part} {name}", target): job("matrix.conv", target, plan=plan_conv(made, device_named(device)), part=part)
    for name, made in PROBLEMS.items()
    for part in ("forward", "input", "weight")
    for target, device in DEVICES.items()
    if (target == "sm_90" and (part != "input" or name != "first")) or (name == "3x3" and part == "forward")
}
MOVED = TransposeProblem(4096, 4096, 2, (4096, 1))
STREAMING = {
    (f"transpose {method}", "sm_90"): job(
        "matrix.transpose", "sm_90", dtype="bfloat16", plan=plan_transpose(MOVED, device_named("h200"), method)
    )
    for method in ("registers", "strides", "descriptors")
}
STREAMING |= {
    (f"add {strided}", "sm_90"): job("matrix.add", "sm_90", dtype="bfloat16", strided=strided == "strided")
    for strided in ("flat", "strided")
}
NORM = {
    (f"norm {part} {columns}", "sm_90"): job(
        "matrix.rms_norm",
        "sm_90",
        plan=plan_rms_norm(RMSNormProblem(8192, columns, 2, True), device_named("h200")),
        dtype="bfloat16",
        part=part,
    )
    for part, columns in (("forward", 4096), ("backward", 4096), ("backward", 16384), ("forward", 100))
}
TURNED = {
    (f"norm rotary {part} {name} {'interleaved' if interleaved else 'halves'}", "sm_90"): job(
        "matrix.rms_norm_rotary",
        "sm_90",
        plan=plan_rms_norm(RMSNormProblem(rows, 128 * (heads if "heads" in name else 1), 2), device_named("h200")),
        dtype="bfloat16",
        heads=heads,
        together="heads" in name,
        interleaved=interleaved,
        part=part,
    )
    for name, heads, rows in (("12 heads", 12, 8192), ("40 heads", 40, 8192), ("a head", 12, 8192 * 12))
    for interleaved in (True, False)
    for part in ("forward", "backward")
}
NEWEST = ("forward 3x3", "weight 3x3", "transpose descriptors")
results = compiled(__name__, TENSOR | CHANNELS_FIRST | COPY | STREAMING | NORM | TURNED, NEWEST)


@pytest.mark.parametrize(("name", "target"), TENSOR)
def test_products(results: Results, name: str, target: str) -> None:
    """The target's own tensor instructions, nothing spilled (on sm_100 two registers before the loop, whose tile is sm_90's), no
    product made to wait for another by the assembler."""
    spills = "outside loops" if target == "sm_100" else "none"
    assert results.of(name, target).problems(spills=spills) == ()


@pytest.mark.parametrize(("name", "target"), CHANNELS_FIRST)
def test_channels_first(results: Results, name: str, target: str) -> None:
    """As above; x, weight and result are loaded and stored 16 bytes at a time, four channels of a padded input 8; planes of 49
    pixels by element, lanes along pixels (along channels every store had a division of its own, and registers spilled)."""
    report = results.clean(name, target)
    loads, stores = (report.opcodes.get(op, 0) for op in ("LDGSTS", "STG"))
    assert report.opcodes.get("LDG", 0) == 0 and 12 <= loads <= 40 and 4 <= stores <= (64 if "odd" in name else 16)


@pytest.mark.parametrize(("name", "target"), STREAMING | COPY)
def test_streaming_kernels(results: Results, name: str, target: str) -> None:
    """Wide loads and stores: 16 bytes a thread, or a whole box; beside them the flat sum has its last block's, one by one."""
    report = results.clean(name, target, tensor="none")
    assert sum(report.opcodes.get(op, 0) for op in ("LDG", "STG")) <= (54 if name == "add flat" else 16)


@pytest.mark.parametrize(("name", "target"), NORM)
def test_norms(results: Results, name: str, target: str) -> None:
    """A row stays in registers, but for three of 16384 columns, outside the loop: each tensor is loaded once, 16 bytes a thread
    where rows are aligned."""
    report = results.clean(name, target, tensor="none", spills="outside loops" if "16384" in name else "none")
    assert report.opcodes.get("LDG", 0) <= (80 if "100" in name else 17)


@pytest.mark.parametrize(("name", "target"), TURNED)
def test_turned_norms(results: Results, name: str, target: str) -> None:
    """As norms, in registers without spills; loads of x, weight and tables are 16 bytes a thread."""
    report = results.clean(name, target, tensor="none")
    assert report.opcodes.get("LDG", 0) <= 21 and report.opcodes.get("STG", 0) <= 10
