"""tilefold: attention kernels in Triton.  Every variant is a fold of the online-softmax state over KV tiles.

Importing it imports neither Triton nor transformers and does not touch the GPU.
"""

from .api import attention, attention_plan, attention_varlen
from .errors import (
    DeviceError,
    DtypeError,
    LayoutError,
    PlanError,
    ShapeError,
    TilefoldError,
    Unsupported,
    ValueRangeError,
)
from .plan import AttentionPlan, AttentionProblem, plan_attention

__version__ = "0.1.0"

__all__ = [
    "AttentionPlan",
    "AttentionProblem",
    "DeviceError",
    "DtypeError",
    "LayoutError",
    "PlanError",
    "ShapeError",
    "TilefoldError",
    "Unsupported",
    "ValueRangeError",
    "attention",
    "attention_plan",
    "attention_varlen",
    "plan_attention",
]
