"""tilefold: attention kernels in Triton.  Every variant is a fold of the online-softmax state over KV tiles.

Importing it imports neither Triton nor transformers and does not touch the GPU.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .api import apply_rotary, attention, attention_backward_plan, attention_plan, attention_varlen, quantize_fp8
from .cache_api import (
    attention_kvcache,
    attention_kvcache_plan,
    attention_shared_prefix,
    kvcache_append,
    merge_attention,
    quantize_kv,
)
from .errors import (
    CommunicationError,
    DeviceError,
    DtypeError,
    LayoutError,
    ModifiedError,
    OutOfPages,
    PlanError,
    ShapeError,
    TilefoldError,
    Unsupported,
    ValueRangeError,
)
from .masks import Mask
from .ops.faults import Fault, last_fault
from .ops.numerics import numerics
from .scores import Score
from .sparse_api import sparse_attention, sparse_attention_paged, sparse_attention_varlen, sparse_plan
from .types import constant

if TYPE_CHECKING:
    from .integrations import register, unregister
    from .nn import load_quantized, quantize, save_quantized
    from .ops.matrix.add import add
    from .ops.matrix.conv import conv2d
    from .ops.matrix.eight import matmul_w8a8
    from .ops.matrix.lowbit import lowbit_matmul, lowbit_matmul_plan
    from .ops.matrix.matmul import bmm, matmul
    from .ops.matrix.transpose import transpose
    from .paged import CacheBatch, CacheStatistics, PagedKVCache
    from .plan import AttentionFp8Plan, AttentionPlan, AttentionProblem, DecodePlan, InvariantPlan, plan_attention
    from .profiling import profile
    from .sparse import BlockIndex

__version__ = "0.2.0"

__all__ = [
    "AttentionFp8Plan",
    "AttentionPlan",
    "AttentionProblem",
    "BlockIndex",
    "CacheBatch",
    "CacheStatistics",
    "CommunicationError",
    "DecodePlan",
    "DeviceError",
    "DtypeError",
    "Fault",
    "InvariantPlan",
    "LayoutError",
    "Mask",
    "ModifiedError",
    "OutOfPages",
    "PagedKVCache",
    "PlanError",
    "Score",
    "ShapeError",
    "TilefoldError",
    "Unsupported",
    "ValueRangeError",
    "add",
    "apply_rotary",
    "attention",
    "attention_backward_plan",
    "attention_kvcache",
    "attention_kvcache_plan",
    "attention_plan",
    "attention_shared_prefix",
    "attention_varlen",
    "bmm",
    "constant",
    "conv2d",
    "kvcache_append",
    "last_fault",
    "load_quantized",
    "lowbit_matmul",
    "lowbit_matmul_plan",
    "matmul",
    "matmul_w8a8",
    "merge_attention",
    "numerics",
    "plan_attention",
    "profile",
    "quantize",
    "quantize_fp8",
    "quantize_kv",
    "register",
    "save_quantized",
    "sparse_attention",
    "sparse_attention_paged",
    "sparse_attention_varlen",
    "sparse_plan",
    "transpose",
    "unregister",
]


PARTS = (
    "compat",
    "debug",
    "ladder",
    "masks",
    "nn",
    "ops",
    "paged",
    "parallel",
    "plan",
    "profiling",
    "quant",
    "reference",
    "scores",
    "sparse",
    "video",
)


def __getattr__(name: str) -> Any:
    """The planner, the paged cache, the index of blocks, quantised models and the bridges to others load when first used."""
    if name in (
        "AttentionFp8Plan",
        "AttentionPlan",
        "AttentionProblem",
        "DecodePlan",
        "InvariantPlan",
        "plan_attention",
    ):
        return getattr(importlib.import_module(".plan", __name__), name)
    if name in ("CacheBatch", "CacheStatistics", "PagedKVCache"):
        return getattr(importlib.import_module(".paged", __name__), name)
    if name == "BlockIndex":
        return importlib.import_module(".sparse", __name__).BlockIndex
    if name in ("load_quantized", "quantize", "save_quantized"):
        return getattr(importlib.import_module(".nn", __name__), name)
    if name == "profile":
        return importlib.import_module(".profiling", __name__).profile
    if name in ("register", "unregister"):
        return getattr(importlib.import_module(".integrations", __name__), name)
    ops = importlib.import_module(".ops", __name__)
    if name in ops.COLLECTION:
        return getattr(ops, name)
    if name in PARTS:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
