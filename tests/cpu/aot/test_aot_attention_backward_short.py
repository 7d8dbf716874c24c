"""The backward kernel of short sequences, as planned for real devices, compiles for its targets under two Tritons."""

import pytest

from aot_cases import DEVICES, Results, compiled, problem
from aot_cases import job as job_of
from tilefold.aot import Job
from tilefold.plan import device_named, plan_attention
from tilefold.plan.backward.attention_backward import plan_attention_backward
from tilefold.plan.backward.attention_backward_short import KERNEL
from tilefold.plan.problem import AttentionProblem


def short(tokens: int, dim: int, **changes: object) -> AttentionProblem:
    return problem(dim, batch=1024, seq_q=tokens, seq_k=tokens, **{"kv_heads": 16, **changes})


PROBLEMS = {
    "16 of 64": (short(16, 64), 0),
    "32 of 32 bias": (short(32, 32, score_mods=("bias",)), 8),
    "49 of 32 bias": (short(49, 32, score_mods=("bias",)), 30),
    "64 of 64": (short(64, 64), 2),
    "64 of 64 causal fp16 groups": (short(64, 64, causal=True, dtype="float16", kv_heads=4), 0),
    "64 of 64 bias": (short(64, 64, score_mods=("bias",)), 0),
    "64 of 128": (short(64, 128), 2),
    "64 of 40 every mod": (short(64, 40, score_mods=("softcap", "alibi", "user"), mask_mods=("mask", "user")), 200),
    "64 of 64 dropout": (short(64, 64, dropout=True), 8),
    "128 of 64": (short(128, 64), 150),
    "256 of 32": (short(256, 32), 140),
    "packed 64 of 64": (short(64, 64, varlen=True), 2),
    "packed 32 of 80 groups": (short(32, 80, varlen=True, kv_heads=4), 2),
    "packed 64 of 80 every mod": (
        short(64, 80, varlen=True, score_mods=("softcap", "alibi", "user"), mask_mods=("mask", "user")),
        200,
    ),
}
"""Tokens and head dim, and how many numbers may go to memory in the loop over keys: of slices, which wait in registers, a few
hundred; fewer slices or keys at a time measured slower."""
EVERYWHERE = ("49 of 32 bias", "64 of 64", "packed 64 of 64")
NEWEST = ("64 of 64", "64 of 64 bias", "64 of 128", "128 of 64", "packed 64 of 64")


def job(name: str, target: str) -> Job:
    made, device = PROBLEMS[name][0], device_named(DEVICES[target])
    bias = (1, made.heads, made.seq_q) if "bias" in made.score_mods else ()
    plan = plan_attention_backward(made, device, bias)
    assert plan.kernel == KERNEL
    return job_of(
        "backward.attention_backward",
        target,
        problem=made,
        plan=plan_attention(made, device),
        backward_plan=plan,
        part="main",
    )


JOBS = {
    (name, target): job(name, target)
    for name in PROBLEMS
    for target in DEVICES
    if target == "sm_90" or (name in EVERYWHERE and target.startswith("sm_"))
}
results = compiled(__name__, JOBS, NEWEST)


@pytest.mark.parametrize(("name", "target"), JOBS)
def test_planned_configuration(results: Results, name: str, target: str) -> None:
    report = results.clean(name, target, tensor="any", spills="any")
    assert report.loop_spills <= PROBLEMS[name][1]
