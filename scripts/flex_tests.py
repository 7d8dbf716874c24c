"""PyTorch's own tests of FlexAttention on tilefold's functions: test/inductor/test_flex_attention.py of the torch installed.

    python scripts/flex_tests.py FILE --out FOLDER [--sample 520] [--shard 1/3] [--seconds 540]
    python scripts/flex_tests.py FILE --out FOLDER [--shard 1/4] --rest
    python scripts/flex_tests.py --table FOLDER/flex_tests_*.jsonl

What a test compiles by torch.compile runs tilefold, what it calls as it is runs torch: the tests compare the two.  torch.compile
itself is left out where its backend is inductor, so tests that look at what it makes cannot pass: EXPECTED names these, and
others that cannot, with reasons.  A result that is not near enough is a failure, whatever its test is called.  The sample takes
the tests in turns, with parameters at random.  FILE is read where it is.
"""

import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch_cases import Suite, main

EXPECTED = {
    "looks at what torch.compile makes, or counts its graphs": (
        r"epilogue_fused|logsumexp_only_return|fw_bw_graph|symbol_closure|free_symbol|no_recompile|recompile_changed|"
        r"dynamic_shapes|score_mods(_automatic)?_dynamic|max_autotune|kernel_options_argument|layout_freeze|logging|"
        r"inspect_bug|compile_counts|tracing|make_fx|export|cudagraph|cuda_graphable|_tma|tensor_subclass|aot_eager"
    ),
    "float64": r"gradcheck|float64|fp64|graph_correctness",
    "expects an error, where tilefold computes or has other words": (
        r"error_message|error_with|_fails$|invalid_block|mismatched|same_device|wrong_device|cant_lower|vs_sequence_lengths|"
        r"unsupported|raises|validate|symmetric_bias"
    ),
    "the mod has a reduction, or a tensor of several elements": r"reduction_unrolled|dist_pos",
    "the mod is a torch.autograd.Function": r"autograd_function",
    "max_scores": r"max_scores|return_max|return_aux",
    "FlashAttention as a backend of FlexAttention": r"flash|_cute",
    "several GPUs": r"multi_?gpu|cuda_1",
}
"""Why tests of which names cannot pass."""


# ---------------------------------------------------------------- the two FlexAttentions


class Doors:
    """flex_attention as the tests see it, and torch.compile: inside of what is compiled tilefold's, outside of it torch's."""

    def __init__(self, file: Path) -> None:
        from torch.nn.attention import flex_attention as module

        from tilefold.compat import flex_attention as ours

        self.module, self.file = module, str(file)
        self.theirs, self.compile, self.compile_module = module.flex_attention, torch.compile, torch.nn.Module.compile
        ours.install()
        self.ours = ours.flex_attention
        self.inside = threading.local()
        self.calls = 0
        module.flex_attention = torch.compiler.disable(self.flex_attention)
        torch.compile = self.compiled
        torch.nn.Module.compile = functools.partialmethod(compile_module, self)  # type: ignore[method-assign, assignment]

    def flex_attention(self, *args: Any, **options: Any) -> Any:
        if not getattr(self.inside, "depth", 0):
            return self.theirs(*args, **options)
        self.calls += 1
        return self.ours(*args, **options)

    def compiled(self, model: Any = None, **options: Any) -> Any:
        """torch.compile: of the tests by inductor the function as it is, inside of which tilefold is called."""
        if sys._getframe(1).f_code.co_filename != self.file or options.get("backend", "inductor") != "inductor":
            return self.compile(model, **options)
        return self.entering if model is None else self.entering(model)

    def entering(self, function: Callable[..., Any]) -> Any:
        def entered(*args: Any, **options: Any) -> Any:
            self.inside.depth = getattr(self.inside, "depth", 0) + 1
            try:
                return function(*args, **options)
            finally:
                self.inside.depth -= 1

        return functools.wraps(function)(entered) if hasattr(function, "__name__") else entered


def compile_module(model: torch.nn.Module, doors: Doors, *_: Any, **options: Any) -> None:
    """torch.nn.Module.compile, as `Doors.compiled`."""
    if options.get("backend", "inductor") != "inductor":
        doors.compile_module(model, **options)
    else:
        model._compiled_call_impl = doors.entering(model._call_impl)


def begin(file: Path, without: bool) -> Callable[[], int]:
    if without:
        return lambda: 0
    doors = Doors(file)
    return lambda: doors.calls


SUITE = Suite(
    name="flex_tests",
    title="PyTorch's own tests of FlexAttention on tilefold's functions",
    file="test/inductor/test_flex_attention.py of the torch installed",
    sample=520,
    expected=EXPECTED,
    begin=begin,
)

if __name__ == "__main__":
    sys.exit(main(SUITE))
