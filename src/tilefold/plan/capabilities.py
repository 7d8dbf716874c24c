"""What serves what: pure records that planners and operations ask.  Functions are named as text and found when a call needs them.

So far it holds the kernels that one architecture alone has, and all of `cpu`; that the portable kernels serve every GPU and the
interpreter goes without saying."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tilefold.cache_formats import FORMATS
from tilefold.errors import Unsupported
from tilefold.plan.architecture import CPU, SM_90, Architecture, HasArchitecture, architecture_of

FLOATS = ("float16", "bfloat16", "float32")
HALVES = ("float16", "bfloat16")
HELD = (*FLOATS, *[each.name for each in FORMATS])  # by caches


@dataclass(frozen=True, slots=True)
class Capability:
    """One kernel, or on `cpu` one function.

    operation: what it computes, as the public function is called.  kernel: its name in plans.  architecture: for which it is
    written.  function: "package.module:function" where it is called by this record.  dtypes: of the tensors.  refused: arguments
    of the operation that it does not serve, each with the reason.  rules: a mask_mod of named rules is served."""

    operation: str
    kernel: str
    architecture: Architecture
    function: str = ""
    dtypes: tuple[str, ...] = FLOATS
    refused: tuple[tuple[str, str], ...] = ()
    rules: bool = False


_MODS = tuple(
    (name, "it is a @triton.jit function, and this is plain torch")
    for name in ("score_mod", "mask_mod", "score_grad")
)  # fmt: skip


def _torch(operation: str, function: str, **more: Any) -> Capability:
    return Capability(operation, f"torch_{operation}", CPU, f"tilefold.cpu.{function}", **more)


CAPABILITIES = (
    Capability("attention", "attention_forward_hopper", SM_90, dtypes=HALVES),
    Capability("attention", "attention_forward_fp8", SM_90, dtypes=("float8_e4m3fn",)),
    Capability("attention_backward", "attention_backward_hopper", SM_90, dtypes=HALVES),
    Capability("sparse_attention", "sparse_forward_hopper", SM_90, dtypes=HALVES),
    Capability("matmul", "matmul_hopper", SM_90, dtypes=(*HALVES, "float8_e4m3fn")),
    Capability("matmul_w8a8", "matmul_eight_hopper", SM_90, dtypes=("int8", "float8_e4m3fn")),
    _torch("attention", "calls:attention", refused=_MODS, rules=True),
    _torch("attention_backward", "calls:attention_backward", refused=_MODS, rules=True),
    _torch("attention_kvcache", "calls:kvcache", dtypes=HELD),
    _torch("attention_cached", "calls:attention_cached"),
    _torch("kvcache_append", "cached:append", dtypes=HELD),
    _torch("apply_rotary", "rotary:rotary"),
    _torch("merge_attention", "calls:merge_results"),
    _torch("sparse_attention", "calls:sparse_attention", refused=_MODS),
    _torch("sparse_attention_backward", "calls:sparse_attention_backward", refused=_MODS),
    _torch("gather_blocks", "video:gather"),
    _torch("spread_blocks", "video:spread"),
    _torch("block_weight_gradient", "video:weight_gradient"),
    _torch("attend_rows", "video:attend"),
    _torch("attend_rows_backward", "video:attend_backward"),
    _torch("select", "video:select", dtypes=("float32",)),
    _torch("gini", "video:gini", dtypes=("float32",)),
    _torch("fuse", "video:mix"),
    _torch("fuse_backward", "video:mix_backward"),
    _torch("matmul", "matrix:product"),
    _torch("activation_gradient", "matrix:activation_gradient"),
    _torch("lowbit_matmul", "matrix:dequantise"),
    _torch("rms_norm", "matrix:rms_norm"),
    _torch("rms_norm_backward", "matrix:rms_norm_gradient"),
    _torch("rms_norm_rotary", "matrix:rms_norm_rotary"),
    _torch("rms_norm_rotary_backward", "matrix:rms_norm_rotary_gradient"),
)


@lru_cache(maxsize=256)
def capability(operation: str, architecture: Architecture) -> Capability | None:
    """The first record of an operation on an architecture, None if there is none."""
    return next((c for c in CAPABILITIES if (c.operation, c.architecture) == (operation, architecture)), None)


def function_of(operation: str, architecture: Architecture) -> Callable[..., Any] | None:
    """The function that computes an operation there; None where kernels are launched.  Unsupported if there is neither."""
    if not architecture.planner:
        return None
    found = capability(operation, architecture)
    if found is None:
        raise Unsupported(f"{operation} is not served by {architecture.title}")
    return _imported(found.function)


def plan_of(operation: str, problem: Any, device: Any) -> Any:
    """The plan of an operation that is a function on this `Device`; None where kernels are launched."""
    planner = architecture_of(device).planner
    return _imported(planner)(operation, problem, device) if planner else None


@lru_cache(maxsize=256)
def _imported(name: str) -> Callable[..., Any]:
    module, function = name.split(":")
    made: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return made


def architecture_refusal(kernel: str, device: HasArchitecture) -> str | None:
    """Why a kernel that is written for one architecture does not run on a device, as a sentence; None if it does."""
    written = next((c.architecture for c in CAPABILITIES if c.kernel == kernel), None)
    if written is None or architecture_of(device) is written:
        return None
    target = f"sm_{device.arch}" if device.backend == "cuda" else str(device.arch)
    return f"it is written for {written}, this is {target}"


def refuse_arguments(operation: str, architecture: Architecture, given: Mapping[str, object]) -> None:
    """Unsupported, naming it, for an argument that is not None and that the architecture does not serve."""
    found = capability(operation, architecture)
    for name, why in found.refused if found is not None else ():
        if given.get(name) is not None:
            raise Unsupported(
                f"{name} is not served by {architecture.title}: {why}; to run the kernels in Triton's interpreter set "
                f"TRITON_INTERPRET=1 before triton is imported"
            )
