"""Matrix products of few to many rows: cuBLAS, the default, numerics="invariant", and each tile that plans choose from, in turns.

    PYTHONPATH=src python benchmarks/products.py [--only matmul] [--tiles] [--warm 3/8] [--jsonl FILE]

bf16, microseconds, over inputs that lie in DRAM.  Results are compared first: with cuBLAS, and the invariant ones by their bits.
--tiles: every tile without shares of the sum, and the default with 2 and 4; --warm: compile a part and stop, for processes side
by side.  results/products.jsonl has what was measured, products_before.jsonl the same hour's times before these tiles; tests hold
the plans to both."""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tilefold
from tilefold.bench import timers
from tilefold.errors import PlanError
from tilefold.ops.device import device_of
from tilefold.ops.matrix.operands import operands
from tilefold.ops.matrix.product import Epilogue, problem_of
from tilefold.plan.matrix.lowbit import STEPPED, by_table
from tilefold.plan.matrix.matmul import MatmulPlan, invariant_matmul, plan_matmul
from tilefold.plan.matrix.tiles import DEEP, HOPPER, HOPPER_TILES, PORTABLE, hopper_refusal
from tilefold.quant import QuantizedTensor, quantize_weight

ROWS = (1, 16, 64, 128, 192, 256, 384, 512, 1024, 8192)
WEIGHTS = (
    (4096, 4096),
    (11008, 4096),
    (4096, 11008),
    (1024, 4096),
    (6144, 4096),
    (1536, 1536),
    (1024, 1024),
    (8192, 8192),
)
TURNED = ((4096, 4096), (11008, 4096), (1024, 1024))  # B [K, N] itself, not the transpose of a weight
LOWBIT = ((4096, 4096), (11008, 4096), (4096, 11008))
MOST = 5e-3  # relative L2 error beside cuBLAS
Calls = dict[str, Callable[[], torch.Tensor]]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def named(plan: MatmulPlan) -> str:
    shares = f", {plan.splits} shares" if plan.splits > 1 else ""
    return f"{'sm_90 ' * (plan.kernel == HOPPER)}{plan.block_m}x{plan.block_n}x{plan.block_k}, {plan.num_stages} stages{shares}"


def tiles_of(plan: MatmulPlan) -> Iterator[MatmulPlan]:
    """Every tile with measured steps."""
    shapes = [(PORTABLE, *tile) for tile in DEEP] + [(HOPPER, m, n, 64, 4, stages) for m, n, stages in HOPPER_TILES]
    for kernel, m, n, k, warps, stages in shapes:
        if kernel == HOPPER and hopper_refusal(plan.problem, plan.device):
            continue
        yield plan.with_tile(
            kernel=kernel, block_m=m, block_n=n, block_k=k, num_warps=warps, num_stages=stages, splits=1
        )


def product(m: int, n: int, k: int, turned: bool, tiles: bool) -> tuple[Calls, dict[str, str]]:
    """The calls of a case, and the names of the two plans."""
    a, b = draw(m, k), draw(k, n) if turned else draw(n, k).t()
    problem = problem_of(operands(a, b, None, False), Epilogue(out_dtype=a.dtype), False)
    device = device_of(a.device)
    plans = {"default": plan_matmul(problem, device), "invariant": invariant_matmul(problem, device)}
    calls: Calls = {
        "cuBLAS": lambda: a @ b,
        "default": lambda: tilefold.matmul(a, b),
        "invariant": lambda: tilefold.matmul(a, b, numerics="invariant"),
    }
    every = list(tiles_of(plans["default"])) if tiles else []
    for splits in (2, 4) if tiles else ():
        try:
            every.append(plans["default"].with_tile(splits=splits))
        except PlanError:  # the sum is too short
            continue
    for plan in every:
        if m > plan.block_m - 64 and plan.tile.tiles(problem) <= 24 * device.sms:
            calls[named(plan)] = partial(tilefold.matmul, a, b, plan=plan)
    wanted, whole = calls["cuBLAS"]().double(), calls["invariant"]()
    assert torch.equal(tilefold.matmul(a[-1:], b, numerics="invariant"), whole[-1:]), "a row alone has other bits"
    for name, call in calls.items():
        got = call()
        error = ((got.double() - wanted).norm() / wanted.norm()).item()
        assert error < MOST, (name, m, n, k, error)
        alike = ", 2 shares" not in name and ", 4 shares" not in name and name not in ("cuBLAS", "default")
        assert not alike or torch.equal(got, whole), (name, m, n, k, "other bits")
    return calls, {name: named(plan) for name, plan in plans.items()}


def lowbit(m: int, n: int, k: int, bits: int, tiles: bool) -> tuple[Calls, dict[str, str]]:
    x, weight = draw(m, k), quantize_weight(draw(n, k), bits=bits, group=128)
    plans = {name: tilefold.lowbit_matmul_plan(x, weight, numerics=name) for name in ("fast", "invariant")}
    calls: Calls = {
        "default": lambda: tilefold.lowbit_matmul(x, weight),
        "invariant": lambda: tilefold.lowbit_matmul(x, weight, numerics="invariant"),
    }
    for path, block_n, block_m, stages in STEPPED if tiles else ():
        fields = {"block_n": block_n, "block_m": block_m, "stages": stages, "join": path == "tile", "splits": 1}
        if (m > 64 and block_m == 16) or (m < block_m // 4 and block_m > 16):
            continue
        try:
            plan = replace(plans["invariant"], path=path, num_warps=4, scaled="before", **fields)
        except PlanError:
            plan = replace(plans["invariant"], path=path, num_warps=4, scaled="before", **{**fields, "stages": 2})
        calls[f"{path} {block_n}x{block_m}"] = partial(tilefold.lowbit_matmul, x, weight, plan=plan)
    if tiles and (kept := by_table(plans["fast"].problem, plans["fast"].device)) is not None:
        calls["table"] = partial(tilefold.lowbit_matmul, x, weight, plan=kept)
    if tiles:
        whole_plan = replace(plans["invariant"], path="dequantise")
        calls["dequantise"] = partial(tilefold.lowbit_matmul, x, weight, plan=whole_plan, numerics="invariant")
    check_lowbit(x, weight, calls)
    return calls, {
        name: f"{plan.path} {plan.block_n}x{plan.block_m}, {plan.parts} parts" for name, plan in plans.items()
    }


def check_lowbit(x: torch.Tensor, weight: QuantizedTensor, calls: Calls) -> None:
    """All but the default have the bits of the product with the dequantised weight."""
    floats = weight.dequantize(torch.bfloat16)
    whole = tilefold.matmul(x, floats.t(), numerics="invariant")
    wanted = (x @ floats.t()).double()
    for name, call in calls.items():
        got = call()
        error = ((got.double() - wanted).norm() / wanted.norm()).item()
        assert error < MOST, (name, *x.shape, error)
        assert name in ("default", "table") or torch.equal(got, whole), (name, *x.shape, weight.bits, "other bits")


def cases(only: str | None) -> Iterator[tuple[dict[str, Any], Callable[[bool], tuple[Calls, dict[str, str]]]]]:
    """(fields of the record, what makes the calls)."""
    if only != "lowbit":
        for turned, weights in ((False, WEIGHTS), (True, TURNED)):
            for n, k in weights:
                for m in ROWS:
                    yield (
                        {"kind": "matmul", "m": m, "n": n, "k": k, "turned": turned},
                        partial(product, m, n, k, turned),
                    )
    if only != "matmul":
        for bits in (4, 8):
            for n, k in LOWBIT:
                for m in ROWS:
                    yield {"kind": "lowbit", "m": m, "n": n, "k": k, "bits": bits}, partial(lowbit, m, n, k, bits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["matmul", "lowbit"])
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--warm", metavar="PART/OF")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jsonl")
    options = parser.parse_args()
    part, of = map(int, options.warm.split("/")) if options.warm else (0, 1)
    lines = []
    for i, (record, make) in enumerate(cases(options.only)):
        if i % of != part:
            continue
        torch.manual_seed(0)
        calls, plans = make(options.tiles)
        if options.warm:
            continue
        samplers = {name: partial(timers.queued_samples, call, samples=4) for name, call in calls.items()}
        found = timers.time_alternating(samplers, rounds=options.rounds)
        record |= {
            "device": torch.cuda.get_device_name(),
            "us": {name: round(t.ms * 1e3, 2) for name, t in found.items()},
        }
        record["plans"] = plans
        lines.append(json.dumps(record) + "\n")
        print(*(record[x] for x in record if x not in ("device", "us", "plans")), record["us"], plans, flush=True)
    if options.jsonl and not options.warm:
        Path(options.jsonl).write_text("".join(lines))


if __name__ == "__main__":
    main()
