"""Plans: pure functions from a problem and a device to a printable decision, without tensors and without a GPU."""

from tilefold.plan.attention import AttentionPlan, Buffer, Rejected, plan_attention
from tilefold.plan.cost import Bound, Cost, attention_cost, bound, live_pairs
from tilefold.plan.device import DEVICES, Device, device_named
from tilefold.plan.problem import AttentionProblem

__all__ = [
    "DEVICES",
    "AttentionPlan",
    "AttentionProblem",
    "Bound",
    "Buffer",
    "Cost",
    "Device",
    "Rejected",
    "attention_cost",
    "bound",
    "device_named",
    "live_pairs",
    "plan_attention",
]
