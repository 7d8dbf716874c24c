"""Kernels that ask, print and stop, for the interpreter and, by their builders, for ahead-of-time compilation."""

from typing import Any

import torch
import triton
import triton.language as tl

from tilefold import debug
from tilefold.debug import when


@triton.jit
def ask_device(out, here):
    if when("=1"):
        tl.store(out + here, 7)


@triton.jit
def ask(out, DEEP: tl.constexpr):
    """Each program of a grid [4, 4] notes which conditions hold, as bits of its element."""
    here = tl.program_id(0) * 4 + tl.program_id(1)
    found = 0
    if debug.when("0,>1"):
        found += 1
    if when("!=2, <=1") & (here != 4):
        found += 2
    if when("*,"):
        found += 4
    chosen = when(DEEP)
    found += chosen.to(tl.int32) * 8
    tl.store(out + here, found)
    ask_device(out + 16, here)


@triton.jit
def say(source, out, BLOCK: tl.constexpr):
    """Prints in a loop, by a text, by a scalar and by nothing that is known before."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(2):
        value = tl.load(source + i * BLOCK + lanes)
        total += value
        debug.print_if("0", value, i, step=i)
        debug.print_if(tl.max(value, 0) > 100.0, BLOCK, total=total)
    debug.print_if(False, total)
    tl.store(out + lanes, total)


@triton.jit
def stop(out):
    debug.breakpoint_if("1")
    tl.store(out, 1)


@triton.jit
def misspelt(out):
    if when("0,>x"):
        tl.store(out, 1)


@triton.jit
def on_tile(out, BLOCK: tl.constexpr):
    debug.print_if(tl.arange(0, BLOCK) > 1, BLOCK)


def build(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A kernel by name with example arguments."""
    words = torch.empty(64, dtype=torch.int32)
    numbers = torch.empty(256, dtype=torch.bfloat16)
    kernels: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
        "ask": (ask, (words,), {"DEEP": ">=2,=3"}),
        "say": (say, (numbers, numbers.float()), {"BLOCK": 128}),
        "stop": (stop, (words,), {}),
        "misspelt": (misspelt, (words,), {}),
        "on_tile": (on_tile, (words,), {"BLOCK": 8}),
    }
    return kernels[name]
