"""The tuner on a GPU: candidates of every kind run, are right and are timed; what is taken is used by the next plan."""

import pytest
import torch

import tilefold
from tilefold.bench.attention.cases import Case
from tilefold.bench.decode.cases import DecodeCase
from tilefold.bench.loop import WRONG
from tilefold.bench.matrix.gemm import GemmCase
from tilefold.ops import records
from tilefold.ops.device import device_of
from tilefold.plan import AttentionProblem, plan_attention
from tilefold.plan import table as tables
from tilefold.plan.dense.forward import plan_forward
from tilefold.plan.table import write_table
from tilefold.tune.measure import Limits, Log, Outcome, identity_of, table_of_outcomes, tune
from tilefold.tune.problems import Tunable

pytestmark = [pytest.mark.no_poison, pytest.mark.alone]
TUNABLES = [
    Tunable("attention", Case("dense", AttentionProblem(1, 1001, 1001, 28, 4, 128, 128, causal=True))),
    Tunable("attention", Case("dense", AttentionProblem(2, 300, 700, 4, 4, 40, 24, dtype="float16"))),
    Tunable("decode", DecodeCase((4097,), 28, 4)),
    Tunable("decode", DecodeCase((1000,) * 8, 28, 4, page=16, cache="int8")),
    Tunable("matmul", GemmCase(1, 3584, 3584, transposed=True, bias="n")),
    Tunable("matmul", GemmCase(2048, 3584, 3584, transposed=True)),
]


@pytest.mark.parametrize("tunable", TUNABLES, ids=lambda one: one.name)
def test_candidates_are_right_and_timed(tunable: Tunable, tmp_path) -> None:
    device = device_of(torch.device("cuda"))
    identity = identity_of(device)
    path = tmp_path / "log.jsonl"
    (found,) = tune([tunable], device, "cuda", Log(path, identity), Limits(5.0))
    assert not found.note and found.planned_us > 0 and found.tuned_us > 0 and found.tried >= 1
    assert not [one for one in found.trials if one.status == WRONG], found.trials
    (again,) = tune([tunable], device, "cuda", Log(path, identity), Limits(0.0))
    assert (again.best, again.tuned_us) == (found.best, found.tuned_us)


def test_a_taken_plan_is_used(tmp_path, monkeypatch) -> None:
    """Whatever it gains: the rules' plan is said to have been slower."""
    device, tunable = device_of(torch.device("cuda")), TUNABLES[1]
    (found,) = tune([tunable], device, "cuda", Log(tmp_path / "log.jsonl", identity_of(device)), Limits(5.0))
    other = next(one.fields for one in found.trials if one.status == "ok")
    claimed = Outcome(
        tunable, found.problem, found.planned, other, 2.0, 1.0, found.trials, found.searched, found.date, True
    )
    write_table(tmp_path / "t.json", table_of_outcomes([claimed], identity_of(device), None))
    monkeypatch.setenv("TILEFOLD_TUNED", str(tmp_path / "t.json"))
    monkeypatch.setattr(records, "CACHE", {})  # as in another process: the tuner has made the same call
    q, k, v = (
        torch.randn(2, n, 4, d, device="cuda", dtype=torch.float16) for n, d in ((300, 40), (700, 40), (700, 24))
    )
    try:
        for forget in (tables.reset, plan_attention.cache_clear, plan_forward.cache_clear):
            forget()
        plan = tilefold.attention_plan(q, k, v)
        assert plan.rule == "measured here" and {name: getattr(plan, name) for name in other} == other
    finally:
        monkeypatch.undo()
        for forget in (tables.reset, plan_attention.cache_clear, plan_forward.cache_clear):
            forget()
