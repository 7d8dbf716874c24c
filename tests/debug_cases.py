"""Kernels that ask, print and stop, for the interpreter and, by their builders, for ahead-of-time compilation; faulty kernels."""

import ctypes
from typing import Any

import torch
import triton
import triton.language as tl

from tilefold import debug
from tilefold.debug import when

N, BLOCK = 70, 32  # 3 programs, the last one with 6 elements


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


@triton.jit
def scale_rows(x, out, work, rows, columns, stride_x, stride_out, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    """out[r, c] = 2 x[r, c], a program for each row and block of columns; work [rows] int32 takes 5."""
    row, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    if FAULT == "short":
        mask = at < columns - 1
    if FAULT == "long":
        mask = at <= columns
    value = tl.load(x + row * stride_x + at, (at < columns) | (FAULT == "load")).to(tl.float32) * 2
    if FAULT == "wrong":
        value = tl.where((row == 2) & (at >= 33), value + 1, value)
    if FAULT == "nan":
        value = tl.where((row == 1) & (at == 40), float("nan"), value)
    if FAULT == "input":
        tl.store(x + row * stride_x + at, value, mask)
    if FAULT == "race":
        tl.store(out + at, value, mask)
    elif FAULT == "lanes":
        tl.store(out + row * stride_out + at // 2, value, mask)
    elif FAULT == "far":
        tl.store(out + row * stride_out + at + (1 << 40), value, mask)
    elif FAULT == "below":
        tl.store(out + row * stride_out + at - 3, value, mask)
    else:
        tl.store(out + row * stride_out + at, value, mask)
    if FAULT == "raise":
        tl.device_assert(row < 2, "no row 2")
    tl.store(work + row, 5)


def scribble(pointer):
    """A write that the interpreter does not make."""
    ctypes.memset(int(pointer.handle.data[0]) - 1, 0, 1)


@triton.jit
def goes_behind(out):
    scribble(out)
    tl.store(out, 1.0)


@triton.jit
def count_and_fill(x, total, wide, mask, n, BLOCK: tl.constexpr):
    """total[0] += sum(x) in any order; wide, 4 bytes an element, is written by halves; mask = x > 0."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x[0] + at, at < n, other=0)
    tl.atomic_add(total, tl.sum(value, 0))
    halves = wide.to(tl.pointer_type(tl.int16))
    tl.store(halves + 2 * at, value.to(tl.int16), at < n)
    tl.store(halves + 2 * at + 1, tl.zeros([BLOCK], tl.int16), at < n)
    tl.store(mask + at, value > 0, at < n)


@triton.heuristics({"BLOCK": lambda args: 16})
@triton.jit
def negate(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, (-tl.load(x + at, at < n).to(tl.float32)).to(out.dtype.element_ty), at < n)


@triton.jit
def arrive(counter, LAST: tl.constexpr):
    """Each program counts itself; the last one to come resets the counter, for the next launch."""
    before = tl.atomic_add(counter, 1)
    if before == LAST:
        tl.store(counter, 0)


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
