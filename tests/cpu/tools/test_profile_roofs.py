"""The kernels that measure roofs compute what their names say, the record survives its file, and bounds use it."""

import dataclasses
import functools
import operator
from dataclasses import replace

import pytest
import torch

from tilefold.plan import device_named
from tilefold.profiling import roofs
from tilefold.profiling.roof_launches import FMA_BLOCK, Work, sizes_of

pytestmark = pytest.mark.interpreter
INTERPRETER = device_named("interpreter")


@pytest.fixture
def work(device):
    return Work(INTERPRETER, device, sizes_of(INTERPRETER))


def every(numbers):
    """The exclusive or of all."""
    return functools.reduce(operator.xor, numbers.tolist())


def test_reading_reads_everything_once(work):
    work.read()()
    assert every(work.out) == every(work.buffers[0]) != 0
    assert every(work.out[:1]) not in (0, every(work.buffers[0])), "the programs share it"


def test_every_program_reads_the_whole_of_l2s_part(work):
    work.read_l2()()
    assert work.sizes.l2_turns % 2 == 1  # an even number of turns would cancel out
    want = every(work.buffers[0][: work.sizes.l2_elements])
    assert want != 0
    assert (work.out[: work.l2_programs] == want).all()


def test_writing_and_copying_reach_every_element(work):
    work.write()()
    assert (work.buffers[1] == 7).all()
    work.copy()()
    assert torch.equal(*work.buffers)


@pytest.mark.parametrize("dtype", ["float16", "tf32", "int8"])
def test_products(work, dtype):
    work.multiply(dtype)()
    a, b, sums = work.product
    want = work.sizes.turns * (a.double() @ b.double().T).sum()
    torch.testing.assert_close(sums.double(), want.expand_as(sums), rtol=1e-3, atol=1e-2)
    # a turn does one product of the tiles, in every program
    assert work.flops_of(dtype) == 2 * a.shape[0] * b.shape[0] * a.shape[1] * work.sizes.turns * work.programs


def test_multiply_adds_and_exponentials(work):
    steps = 8 * work.sizes.turns
    for name, step in (("multiply", lambda x, s: x * s + s), ("exponentials", lambda x, s: torch.exp2(-x))):
        getattr(work, name)(*(["float32"] if name == "multiply" else []))()
        x = start = work.start.double()
        for _ in range(steps):
            x = step(x, start)
        torch.testing.assert_close(work.product[2].double(), x.sum().expand(work.programs), rtol=1e-4, atol=0)
    assert work.exps == steps * FMA_BLOCK * work.programs
    assert work.flops_of("float32") == 2 * work.exps


@pytest.fixture(scope="module")
def measured():
    return roofs.measure_roofs(INTERPRETER, torch.device("cpu"))


def test_measuring_fills_every_field(measured):
    for name in ("dram_read", "dram_write", "dram_copy", "l2_read", "exps", "launch_device", "launch_host"):
        assert getattr(measured, name) > 0
    assert dict(measured.flops).keys() == {"float16", "tf32", "int8", "float32"}
    assert len(measured.rows()) == 6 + len(measured.flops)  # one launch: the interpreter has no device beside the host
    assert len(dataclasses.replace(measured, device="NVIDIA H200").rows()) == 7 + len(measured.flops)
    assert not any(text.startswith(("0.0 ", "0.00")) for _, text, _ in measured.rows())
    assert measured.dram == max(measured.dram_read, measured.dram_write, measured.dram_copy)


def test_the_file_of_a_machine(measured, tmp_path, monkeypatch):
    monkeypatch.setenv(roofs.FOLDER_VARIABLE, str(tmp_path / "roofs"))
    assert roofs.load_roofs() is None
    path = roofs.store_roofs(measured)
    assert path.parent == tmp_path / "roofs"
    assert roofs.load_roofs() == measured
    # another driver, torch or triton is another machine
    assert roofs.store_roofs(replace(measured, driver="999.1")) != path
    assert roofs.load_roofs() == measured
    path.write_text("{}")
    assert roofs.load_roofs() is None, "what cannot be read is measured again"
    monkeypatch.setenv(roofs.FOLDER_VARIABLE, "off")
    assert roofs.store_roofs(measured) is None and roofs.load_roofs() is None


def test_bounds_use_what_was_measured(measured):
    device = device_named("h200")
    made = replace(
        measured, dram_read=4.5e12, dram_copy=4.2e12, dram_write=4.1e12, l2_read=9e12, flops=(("float16", 7e14),)
    )
    found = roofs.with_roofs(device, made)
    assert found.dram_rate == 4.5e12 and found.measured_l2_bytes_per_s == 9e12
    assert found.matmul_rate("float16") == 7e14
    assert found.matmul_rate("bfloat16") == device.matmul_rate("bfloat16"), "what was not measured stays"
    assert "measured" in found.source
    assert roofs.with_roofs(device, None) is device


def test_sizes_of_a_device():
    for name in ("h200", "a100", "l4", "mi300x"):
        device = device_named(name)
        sizes = sizes_of(device)
        assert sizes.elements * 4 >= 4 * device.l2_bytes, "DRAM buffers must not fit L2"
        assert device.l2_bytes / 8 <= sizes.l2_elements * 4 <= device.l2_bytes / 4
        assert sizes.l2_elements % sizes.block == sizes.elements % sizes.block == 0
