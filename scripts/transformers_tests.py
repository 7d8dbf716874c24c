"""PyTorch's own tests of scaled_dot_product_attention, test/test_transformers.py, on tilefold as torch's flash attention.

    python scripts/transformers_tests.py FILE --out FOLDER [--sample 600] [--shard 1/4] [--seconds 540]
    python scripts/transformers_tests.py FILE --out FOLDER [--shard 1/4] --again
    python scripts/transformers_tests.py FILE --out FOLDER [--shard 1/4] --rest
    python scripts/transformers_tests.py --table FOLDER/transformers_tests_*.jsonl

The second line runs what failed once more, with torch's own kernels: what fails there too is a test that does not fit the torch
installed.  The third runs what had no time, or no memory beside the others.  EXPECTED names tests that cannot pass, with reasons;
a result that is not near enough is a failure, whatever its test is called.  LEFT_OUT names cases that hardly come to tilefold.
FILE is read where it is, and may be older than the torch installed: test_cpp_extensions_open_device_registration, from which it
imports generate_faked_module, is stood in for.

Without a GPU, SDPA of CPU tensors calls an operator of its own: fp16 and bf16 without a mask go from there to the operators that
SDPA of CUDA tensors calls.  Tests for CUDA alone that compare flash attention with plain torch then run on CPU tensors.
"""

import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_cases import Suite, main

from tilefold.errors import Unsupported
from tilefold.integrations import torch_flash
from tilefold.integrations.torch_flash import CALLS

Tensor = torch.Tensor
EXPECTED = {
    "warns of gradients that are not the same in every run, which they are": r"backwards_throws_determinism_warning",
    "compares the times of torch's backends": r"sdp_priority_order",
    "scores of 1.4e11, whose rounding alone overflows where a score is scaled and its maximum subtracted in one instruction": (
        r"large_bf16_nan_values"
    ),
}
"""Why tests of which names cannot pass."""
CLASSES = re.compile(r"Test(SDPA|AttnBias)\w*(CPU|CUDA)$")
LEFT_OUT = {
    "other backends of SDPA": r"mem_eff|cudnn|(cudagraph|nested_broadcasting)_.*kernel[1-9]",
    "what the file skips, or returns from at once": (
        r"seq_len_q_(\d+)_seq_len_k_(?!\1_).*is_causal_True|grads_nestedtensor.*is_causal_True"
    ),
    "most dropout, compared by a mask that torch's own kernel returns": r"grads_.*dropout_p_0_[1-9]\d*_.*(bfloat16|scale_l1)",
}
"""Which cases are not sampled: they hardly come to tilefold."""
CUDA_ON_CPU = re.compile(r"flash_attention_(grad_against_math|vs_math_ref_grads_batch(?!.*(2048|dropout_p_0_[1-9])))")
GPU = torch.cuda.is_available()
KEPT: list[Any] = []


def wanted(item: pytest.Item) -> bool:
    """Cases that may come to flash attention."""
    group = item.cls.__name__  # type: ignore[attr-defined]
    if not CLASSES.match(group) or any(re.search(pattern, item.name) for pattern in LEFT_OUT.values()):
        return False
    return not group.startswith("TestSDPACudaOnly") or GPU or bool(CUDA_ON_CPU.search(item.name))


def kept() -> str:
    """Why torch kept calls, since this was last asked."""
    reasons = ", ".join(sorted(CALLS.kept))
    CALLS.kept.clear()
    return reasons


def begin(_: Path, without: bool) -> Callable[[], int]:
    registration = types.ModuleType("test_cpp_extensions_open_device_registration")
    registration.generate_faked_module = None  # type: ignore[attr-defined]
    sys.modules[registration.__name__] = registration
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "cuda" if GPU else "cpu"
    if not GPU:
        cuda_tests_on_cpu()
    if not without:
        KEPT.append(torch_flash.activate("CUDA" if GPU else "CPU"))
        if not GPU:
            KEPT.append(flash_on_cpu())
    return lambda: CALLS.forward + CALLS.backward


# ---------------------------------------------------------------- without a GPU


def cuda_tests_on_cpu() -> None:
    """Make the tests that are for CUDA alone for CPU tensors."""
    from torch.testing._internal import common_cuda, common_device_type

    made: Any = common_device_type.instantiate_device_type_tests

    def instantiate(tests: type, scope: dict[str, Any], only_for: Any = None) -> None:
        made(tests, scope, only_for="cpu")

    common_cuda.PLATFORM_SUPPORTS_FLASH_ATTENTION = True
    common_device_type.instantiate_device_type_tests = instantiate  # type: ignore[assignment]


def flash_on_cpu() -> torch.library.Library:
    """SDPA's operator for CPU tensors, by way of aten::_flash_attention_forward, as that for CUDA tensors goes."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    library = torch.library.Library("aten", "IMPL", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    theirs, their_gradients = (torch.library.get_kernel(f"aten::{name}{end}", "CPU") for end in ("", "_backward"))
    ops = torch.ops.aten

    def fits(q: Tensor, k: Tensor, dropout_p: float, causal: bool, mask: Tensor | None) -> bool:
        half = q.dtype in (torch.float16, torch.bfloat16)
        return half and mask is None and not dropout_p and not (causal and q.shape[2] != k.shape[2])

    def forward(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, causal: bool = False, attn_mask: Any = None, scale: Any = None
    ) -> Any:  # fmt: skip
        if fits(q, k, dropout_p, causal, attn_mask):
            turned, numbers = [t.transpose(1, 2) for t in (q, k, v)], (q.shape[2], k.shape[2], dropout_p, causal)
            try:
                out, lse, *_ = ops._flash_attention_forward(*turned, None, None, *numbers, False, scale=scale)
                return out.transpose(1, 2), lse
            except Unsupported:
                pass
        return theirs.call_boxed(keys, q, k, v, dropout_p, causal, attn_mask=attn_mask, scale=scale)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout_p: float, causal: bool,
        attn_mask: Any = None, scale: Any = None,
    ) -> Any:  # fmt: skip
        given = grad, q, k, v, out
        if fits(q, k, dropout_p, causal, attn_mask):
            numbers, none = (q.shape[2], k.shape[2], dropout_p, causal), torch.zeros(())
            turned = [t.transpose(1, 2) for t in given]
            try:
                made = ops._flash_attention_backward(*turned, lse, None, None, *numbers, none, none, scale=scale)
                return tuple(t.transpose(1, 2) for t in made)
            except Unsupported:
                pass
        return their_gradients.call_boxed(keys, *given, lse, dropout_p, causal, attn_mask=attn_mask, scale=scale)

    library.impl(name, forward, "CPU")
    library.impl(f"{name}_backward", backward, "CPU")
    return library


SUITE = Suite(
    name="transformers_tests",
    title="PyTorch's own tests of scaled_dot_product_attention on tilefold",
    file="test/test_transformers.py",
    sample=600,
    expected=EXPECTED,
    begin=begin,
    wanted=wanted,
    kept=kept,
    shuffled=True,
)

if __name__ == "__main__":
    sys.exit(main(SUITE))
