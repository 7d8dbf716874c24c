"""`device=` of the functions that plan a call: tensors at hand, or without memory, are planned as on another device."""

from dataclasses import replace

import pytest
import torch

import tilefold
from cases import rand
from cases.refusals import refuses
from tilefold.compat.flex_attention import create_block_mask, flex_attention_plan
from tilefold.errors import DeviceError, DtypeError, PlanError, Unsupported
from tilefold.ops import records
from tilefold.ops.matrix.conv import conv_plan
from tilefold.ops.matrix.eight import matmul_w8a8_plan
from tilefold.ops.matrix.rms_norm import rms_norm_plan
from tilefold.plan import TorchPlan, device_named, plan_attention_fp8, plan_forward
from tilefold.plan.backward.attention_backward import plan_attention_backward
from tilefold.plan.cache.decode import plan_decode
from tilefold.plan.matrix.conv import plan_conv
from tilefold.plan.matrix.eight import plan_eight
from tilefold.plan.matrix.lowbit import plan_lowbit
from tilefold.plan.matrix.matmul import MatmulProblem, plan_matmul
from tilefold.plan.matrix.rms_norm import plan_rms_norm
from tilefold.plan.sparse.sparse import plan_sparse
from tilefold.plan.sparse.sparse_backward import plan_sparse_backward
from tilefold.quant import quantize_weight

N = 1024


def lists(t):
    return tilefold.BlockIndex.from_map(torch.ones(1, 4, 16, 16, dtype=torch.bool, device=t.device), seq_q=N, seq_k=N)


def packed(t, **options):
    offsets = torch.tensor([0, 300, N], dtype=torch.int32, device=t.device)
    places = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 724, "max_seqlen_k": 724}
    return tilefold.attention_plan(t[0], t[0], t[0], **places, **options)


def cached(t, **options):
    lengths = torch.tensor([N], dtype=torch.int32, device=t.device)
    return tilefold.attention_kvcache_plan(t[:, :1], t, t.clone(), cache_seqlens=lengths, **options)


# What plans t as q, k and v -> who plans its problem on a device.
PLANS = {
    "dense": (lambda t, **o: tilefold.attention_plan(t, t, t, causal=True, **o), plan_forward),
    "packed": (packed, plan_forward),
    "step": (lambda t, **o: tilefold.attention_plan(t[:, :1], t, t, **o), lambda p, d: plan_forward(p.attention, d)),
    "mask": (lambda t, **o: tilefold.attention_plan(t, t, t, mask=tilefold.masks.prefix(4), **o), plan_forward),
    "e4m3": (lambda t, **o: tilefold.attention_plan(*[t.to(torch.float8_e4m3fn)] * 3, **o), plan_attention_fp8),
    "backward": (lambda t, **o: tilefold.attention_backward_plan(t, t, t, **o), plan_attention_backward),
    "sparse": (lambda t, **o: tilefold.sparse_plan(t, t, t, lists(t), **o), plan_sparse),
    "sparse_backward": (
        lambda t, **o: tilefold.sparse_plan(t, t, t, lists(t), direction="backward", **o), plan_sparse_backward
    ),
    "kvcache": (cached, plan_decode),
}  # fmt: skip


@pytest.mark.parametrize("of", PLANS)
def test_the_problem_of_a_call_is_planned_as_on_the_device(of, device):
    plan_of, planner = PLANS[of]
    t = rand(1, N, 4, 64, dtype=torch.bfloat16, device=device)
    here = plan_of(t)
    kept = dict(records.CACHE)
    for name in ("h100", "H200", "a100", "mi300x"):
        made = plan_of(t, device=name)
        assert made == planner(here.problem, device_named(name)) and made.device == device_named(name)
    small = replace(device_named("h100"), name="slice", sms=16)
    assert plan_of(t, device=small).device is small
    assert kept == records.CACHE and plan_of(t) == here, "it is not what calls take"
    if of != "e4m3":
        plain = plan_of(t, device="cpu")
        assert isinstance(plain, TorchPlan) and plain.problem in (
            here.problem,
            getattr(here.problem, "attention", None),
        )


@pytest.mark.parametrize("of", [of for of in PLANS if not of.startswith("sparse")])  # whose lists are on the CPU first
def test_tensors_without_memory_are_enough(of):
    plan_of, _ = PLANS[of]
    t = rand(1, N, 4, 64, dtype=torch.bfloat16)
    assert plan_of(t.to("meta"), device="h100") == plan_of(t, device="h100")


def test_what_is_no_device_and_no_plan_of_it_is_refused(device):
    t = rand(1, N, 4, 64, dtype=torch.bfloat16, device=device)
    for plan_of, _ in PLANS.values():
        refuses(DeviceError, "device must be one of h200, h100, ", plan_of, t, device="here")
        refuses(DtypeError, "device must be a name of tilefold.plan.DEVICES", plan_of, t, device=torch.device("cuda"))
    ampere = tilefold.attention_plan(t, t, t, device="a100")
    refuses(PlanError, "arch", tilefold.attention_plan, t, t, t, plan=ampere, device="h100")
    eight = t.to(torch.float8_e4m3fn)
    refuses(
        Unsupported,
        "on a CPU kernels take TRITON_INTERPRET=1",
        tilefold.attention_plan,
        eight,
        eight,
        eight,
        device="cpu",
    )


ROWS = {
    "lowbit": (
        lambda x, **o: tilefold.lowbit_matmul_plan(x, quantize_weight(torch.ones(64, 256), bits=4, group=64), **o),
        plan_lowbit,
    ),
    "eight": (lambda x, **o: matmul_w8a8_plan(x, torch.ones(64, 256, dtype=torch.int8), **o), plan_eight),
    "rms_norm": (lambda x, **o: rms_norm_plan(x, x[0], x, **o), plan_rms_norm),
    "conv": (lambda x, **o: conv_plan(x.view(1, 2, 16, 256), rand(8, 2, 3, 3, dtype=x.dtype), **o), plan_conv),
}


@pytest.mark.parametrize("of", ROWS)
def test_matrix_plans(of, device):
    plan_of, planner = ROWS[of]
    x = rand(32, 256, dtype=torch.bfloat16, device=device)
    here = plan_of(x)
    for name in ("h100", "H200", "a100", "mi300x"):
        made = plan_of(x, device=name)
        assert made == planner(here.problem, device_named(name)) and made.device == device_named(name)
    assert plan_of(x) == here
    refuses(DeviceError, "device must be one of h200, h100, ", plan_of, x, device="here")
    if of in ("rms_norm", "lowbit"):
        plain = plan_of(x, device="cpu")
        assert isinstance(plain, TorchPlan) and f"torch_{of}" in str(plain)
    else:
        refuses(Unsupported, "TRITON_INTERPRET=1", plan_of, x, device="cpu")


def test_flex_attention(device):
    t = rand(1, 2, 512, 64, dtype=torch.bfloat16, device=device)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device=device)
    for block_mask in (None, mask):
        made = flex_attention_plan(t, t, t, block_mask=block_mask, device="h100")
        assert made.device == device_named("h100")


def test_a_name_is_no_record():
    """Planners take records; what names take says so, and has "cpu" among them."""
    problem = MatmulProblem(1, 4, 4, 4)
    refuses(DtypeError, "device must be a tilefold.plan.Device, as device_named('h200')", plan_matmul, problem, "h200")
    refuses(DtypeError, "or cpu, got None", device_named, None)
    refuses(DeviceError, "or cpu, got 'h900'", device_named, "h900")
    plan = tilefold.attention_plan(*(rand(1, N, 4, 64, dtype=torch.bfloat16) for _ in range(3)), device="h200")
    with pytest.raises(PlanError, match=r"plan field block_n: must be an int, got 64\.0"):
        plan.with_tile(block_n=64.0)
