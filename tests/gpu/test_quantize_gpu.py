"""Models in few bits on a GPU: moved there layer by layer, captured, compiled; the benchmark's peers are right."""

import pytest
import torch
from torch import nn

import tilefold
from cases import judge, rand
from cases.device import captured
from tilefold import reference
from tilefold.bench.matrix.lowbit import LOWBIT, LowbitCase
from tilefold.bench.run import run_case
from tilefold.bench.setting import Options
from tilefold.nn import LowBitLinear

WIDTH = 1024


def stack(layers=4, dtype=torch.bfloat16, device="cpu"):
    made = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(layers)))
    for layer in made:
        layer.weight.data, layer.bias.data = rand(WIDTH, WIDTH, dtype=dtype) * WIDTH**-0.5, rand(WIDTH, dtype=dtype)
    return made.to(device)


def test_only_codes_and_one_layer_are_ever_on_the_device():
    model = stack(64)
    x = rand(3, WIDTH, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    report = tilefold.quantize(model, 4, device="cuda", progress=False)
    peak = torch.cuda.max_memory_allocated() - start
    assert all(t.is_cuda for t in [*model.parameters(), *model.buffers()])
    # Codes, and the temporaries of rounding one layer of 2 MiB, fp32 and fp64 among them: not the 128 MiB of all.
    assert peak < report.after + 24 * 2 * WIDTH * WIDTH < report.before
    assert model(x).isfinite().all()


@pytest.mark.no_poison
@pytest.mark.parametrize("rows", [1, 16, 200])
def test_captured_and_loaded_again(rows):
    layer, other = (LowBitLinear.from_linear(stack(1, device="cuda")[0], 4) for _ in range(2))
    x = rand(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    for _ in range(2):
        want = layer(x)
    graph, out = captured(lambda: layer(x))
    graph.replay()
    assert torch.equal(out, want)
    layer.load_state_dict(other.state_dict())
    graph.replay()
    assert torch.equal(out, other(x)) and not torch.equal(out, want)


@pytest.mark.no_poison
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode):
    model = stack(2, device="cuda")
    tilefold.quantize(model, 4, progress=False)
    x = rand(2, WIDTH, dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.no_grad():
        for _ in range(3):
            got = compiled(x).clone()
        assert torch.equal(got, model(x))


def test_gradients_of_x():
    layer = LowBitLinear.from_linear(stack(1, device="cuda")[0], 4)
    x = rand(33, WIDTH, dtype=torch.bfloat16, device="cuda").requires_grad_()
    dout = rand(33, WIDTH, dtype=torch.bfloat16, device="cuda")
    (got,) = torch.autograd.grad(layer(x), x, dout)
    weight = layer.weight

    def product():
        return dout.double() @ weight.dequantize(torch.float64)

    judge(got, product(), reference.deviating(product, torch.bfloat16), "gradient")


@pytest.mark.no_poison
@pytest.mark.parametrize("case", [LowbitCase(1, 1024, 1024), LowbitCase(16, 1024, 1024)], ids=lambda case: case.name)
def test_the_benchmark_measures_who_is_there(case):
    peers = [LOWBIT.peers[name] for name in ("tilefold", *LOWBIT.defaults["cuda"])]
    row = run_case(LOWBIT, case, peers, "cuda", Options(1), lambda *_: None)
    cells = {cell.implementation: cell for cell in row.cells}
    assert cells["tilefold"].status == cells["cublas"].status == cells["tinygemm"].status == "ok", row.cells
    assert cells["tilefold"].graph is not None and row.floor_ms > 0
