"""How many kernels calls of many lengths, mask tensors and numbers would compile on a GPU: counted where there is none.

`python tests/compile_once.py` plans for a device, binds every launch to tensors of the CPU and, instead of launching, counts two
things: the keys of ops.launch, and those by which Triton finds what it has compiled.  It prints {case: {kernel: [by ops.launch,
by Triton]}} as JSON.
"""

import contextlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # triton reads it when it is imported

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import compute_cache_key, create_function_from_signature

import tilefold
from tilefold import masks
from tilefold.ops import hopper, launch, records
from tilefold.ops.integers import general
from tilefold.plan import device_named

DEVICES = {"a100": 80, "h100": 90}
LENGTHS = [n + n % 7 for n in range(400, 1400, 10)]  # 100, of which some are multiples of 16
Keys = dict[str, tuple[set[Any], set[str]]]


@triton.jit
def windowed(score, batch, head, q_index, kv_index, args):
    """args = (table [longest], entries, factor)."""
    table, entries, factor, seq_q, seq_k = args
    distance = tl.minimum(tl.abs(q_index + (seq_k - seq_q) - kv_index), entries - 1)
    return score + factor * tl.load(table + distance)


@triton.jit
def near(score, batch, head, q_index, kv_index, args):
    """args = (widths [B], least)."""
    widths, least, seq_q, seq_k = args
    return tl.abs(q_index + (seq_k - seq_q) - kv_index) < tl.maximum(tl.load(widths + batch), least)


@contextlib.contextmanager
def counted(device: str) -> Iterator[Keys]:
    """Calls on the CPU are planned for `device`; what would be compiled, by kernels."""
    found: Keys = defaultdict(lambda: (set(), set()))
    record, backend = device_named(device), make_backend(GPUTarget("cuda", DEVICES[device], 32))
    binders: dict[Any, Any] = {}

    def count(self: Any, args: Any) -> None:
        ours, tritons = found[self.fn.__name__]
        ours.add(self._key(args))
        kept.append(launch.args_functions(args))
        if self.fn not in binders:
            binders[self.fn] = create_function_from_signature(self.fn.signature, self.fn.params, backend)
        _, specialisation, options = binders[self.fn](*general(args), **self.keywords)
        tritons.add(compute_cache_key({}, specialisation, options))

    kept: list[Any] = []  # ids in keys stay what they are of
    modules = [m for name, m in sys.modules.items() if name.startswith("tilefold.ops") and hasattr(m, "device_of")]
    records.CACHE.clear()  # of another device's plans
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "device_of", return_value=record))
        counter = torch.zeros(1, dtype=torch.int32)
        stack.enter_context(mock.patch.object(hopper, "work_counter", return_value=counter))
        for name in ("__call__", "compile"):
            stack.enter_context(mock.patch.object(launch.Launch, name, count))
        yield found


def dense(n: int, **options: Any) -> None:
    """Attention of about n tokens and its gradients."""
    q, k, v = (torch.empty(1, n - 5 * (which == 0), 2, 64, dtype=torch.bfloat16).requires_grad_() for which in range(3))
    tilefold.attention(q, k, v, **options).sum().backward()


def packed(n: int, **options: Any) -> None:
    q, k, v = (torch.empty(n + 30, 2, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    cu = torch.tensor([0, 30, n + 30], dtype=torch.int32)
    tilefold.attention_varlen(q, k, v, cu, cu, n, n, **options).sum().backward()


def sparse(n: int, **options: Any) -> None:
    """Block-sparse attention over all blocks."""
    q, k, v = (torch.empty(1, n, 2, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    keep = torch.ones(1, 2, -(-n // 64), -(-n // 64), dtype=torch.bool)
    index = tilefold.BlockIndex.from_map(keep, block_q=64, block_k=64, seq_q=n, seq_k=n)
    tilefold.sparse_attention(q, k, v, index, **options).sum().backward()


def of_args(n: int) -> dict[str, Any]:
    """Another table, and other numbers: 1, multiples of 16, and others."""
    args = (torch.empty(n), (1, 16 * n, n)[n % 3], n / 7)
    return {"score_mod": windowed, "score_args": args, "mask_mod": near, "mask_args": (torch.empty(1), n % 33)}


def learned(n: int) -> dict[str, Any]:
    table = torch.empty(n).requires_grad_()
    return {"score_mod": windowed, "score_args": (table, n, 1.0)}


CASES: dict[str, Callable[[int], None]] = {
    "plain": dense,
    "causal": lambda n: dense(n, causal=True),
    "window": lambda n: dense(n, window=(n // 3, n % 17)),
    "mask": lambda n: dense(n, mask=torch.empty(1, 1, n - 5, n, dtype=torch.bool)),
    "bias": lambda n: dense(n, bias=torch.empty(1, 2, n - 5, n, dtype=torch.bfloat16)),
    "prefix": lambda n: dense(n, mask=masks.prefix(n // 2)),
    "mods": lambda n: dense(n, **of_args(n)),
    "learned": lambda n: dense(n, **learned(n)),
    "sparse": sparse,
    "sparse mods": lambda n: sparse(n, **of_args(n)),
    "packed": lambda n: packed(n, causal=True),
    "packed mods": lambda n: packed(n, **of_args(n)),
}

if __name__ == "__main__":
    torch.set_num_threads(1)  # threads would wait for one another more than they work
    result: dict[str, Any] = {}
    for device in DEVICES:
        for name, call in CASES.items():
            with counted(device) as found:
                for n in LENGTHS:
                    call(n)
            counts = {kernel: [len(ours), len(tritons)] for kernel, (ours, tritons) in sorted(found.items())}
            result[f"{name} {device}"] = counts
    print(json.dumps(result))
