"""Plans: pure functions from a problem and a device to a printable decision, without tensors and without a GPU."""

from tilefold.plan.backward.attention_backward import AttentionBackwardPlan, plan_attention_backward
from tilefold.plan.backward.attention_backward_reduce import ReduceOptions
from tilefold.plan.cache.decode import DecodePlan, DecodeProblem, plan_decode
from tilefold.plan.cache.dispatch import POLICIES, SplitDecision, plan_splits
from tilefold.plan.cache.invariant import InvariantPlan, plan_invariant, plan_prompt
from tilefold.plan.cache.shared_prefix import PrefixProblem, SharedPrefixPlan, plan_shared_prefix
from tilefold.plan.cost import Bound, Cost, attention_cost, bound, live_pairs
from tilefold.plan.dense.attention import AttentionPlan, Buffer, Rejected, plan_attention
from tilefold.plan.dense.attention_fp8 import AttentionFp8Plan, plan_attention_fp8
from tilefold.plan.dense.forward import plan_forward
from tilefold.plan.device import DEVICES, Device, device_named
from tilefold.plan.limits import Tile
from tilefold.plan.problem import AttentionProblem
from tilefold.plan.sparse.sparse import SparsePlan, SparseProblem, plan_sparse
from tilefold.plan.sparse.sparse_backward import SparseBackwardPlan, plan_sparse_backward
from tilefold.plan.torch_cpu import TorchPlan
from tilefold.plan.trace import Generation, Trace, trace_generation

__all__ = [
    "DEVICES",
    "POLICIES",
    "AttentionBackwardPlan",
    "AttentionFp8Plan",
    "AttentionPlan",
    "AttentionProblem",
    "Bound",
    "Buffer",
    "Cost",
    "DecodePlan",
    "DecodeProblem",
    "Device",
    "Generation",
    "InvariantPlan",
    "PrefixProblem",
    "ReduceOptions",
    "Rejected",
    "SharedPrefixPlan",
    "SparseBackwardPlan",
    "SparsePlan",
    "SparseProblem",
    "SplitDecision",
    "Tile",
    "TorchPlan",
    "Trace",
    "attention_cost",
    "bound",
    "device_named",
    "live_pairs",
    "plan_attention",
    "plan_attention_backward",
    "plan_attention_fp8",
    "plan_decode",
    "plan_forward",
    "plan_invariant",
    "plan_prompt",
    "plan_shared_prefix",
    "plan_sparse",
    "plan_sparse_backward",
    "plan_splits",
    "trace_generation",
]
