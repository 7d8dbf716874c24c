"""`tilefold tune`: candidates that fit, checked before they are timed; what is measured is kept; the table and who uses it."""

import itertools
import json
import os
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import asdict, replace

import pytest
import torch

import tilefold
from cases.cli import command, refused
from cases.refusals import refuses
from tilefold.bench import loop
from tilefold.bench.attention.cases import Case
from tilefold.bench.decode.cases import DecodeCase
from tilefold.bench.matrix.gemm import GemmCase
from tilefold.cli import doctor, runtime
from tilefold.errors import DeviceError, PlanError, ValueRangeError
from tilefold.ops import environment, records
from tilefold.plan import AttentionProblem, DecodeProblem, device_named, plan_attention, plan_decode
from tilefold.plan import table as tables
from tilefold.plan.cache.decode import rules_decode
from tilefold.plan.dense.forward import plan_forward
from tilefold.plan.matrix.matmul import MatmulProblem, plan_matmul
from tilefold.plan.table import Entry, Table, key_of, read_table, table_path, write_table
from tilefold.reference import compare
from tilefold.tune import candidates, measure
from tilefold.tune.measure import ENDED, Limits, Log, identity_of, table_of_outcomes, tune
from tilefold.tune.problems import Tunable, problems_of_cases, problems_of_model

pytestmark = pytest.mark.interpreter

INTERPRETER, H200 = device_named("interpreter"), device_named("h200")
IDENTITY = {"device": "interpreter", "title": "test", "triton": "3.6.0", "torch": "2.9", "tilefold": "abc"}
PROBLEM = AttentionProblem(1, 43, 47, 3, 1, 24, 16, dtype="float16", causal=True)
TUNABLES = {
    "attention": Tunable("attention", Case("dense", PROBLEM)),
    "window": Tunable("attention", Case("dense", replace(PROBLEM, dtype="bfloat16", causal=False, window=(9, 3)))),
    "decode": Tunable("decode", DecodeCase((70,), 7, 1, 16, 16, page=16)),
    "eight": Tunable("decode", DecodeCase((40,), 4, 2, 32, 32, queries=3, cache="int8", dtype="float16")),
    "matmul": Tunable("matmul", GemmCase(19, 41, 70, transposed=True, bias="n", activation="gelu")),
    "bmm": Tunable("matmul", GemmCase(20, 33, 66, batch=2, shared="b", dtype="float16")),
}
PLANS = {"attention": plan_attention, "decode": plan_decode, "matmul": plan_matmul}


@pytest.fixture(autouse=True)
def _plain_tables(monkeypatch):
    """Plans and tables of one test are not those of the next."""

    def clear():
        tables.reset()
        for plan in (*PLANS.values(), plan_forward):
            plan.cache_clear()

    monkeypatch.setattr(tables, "triton_here", lambda: "3.6.1")
    clear()
    yield
    clear()


class Clock:
    """Sampling and time in one: a plan takes what `ms` says of it, everything else no time."""

    def __init__(self, ms):
        self.ms, self.seconds, self.timed = ms, 0.0, []

    def now(self):
        return self.seconds

    def sampling(self, plan, calls):
        def sample():
            self.timed.append(plan)
            self.seconds += 1.0
            return [self.ms(plan)]

        return sample


def fields(kind, plan):
    return candidates.fields_of(kind, plan)


def searched(path, tunable, clock, seconds=1e9, **options):
    log = Log(path, IDENTITY)
    (found,) = tune(
        [tunable], INTERPRETER, "cpu", log, Limits(seconds, now=clock.now, **options), sampling=clock.sampling
    )
    return found


def key_fields(kind, plan):
    return json.dumps(fields(kind, plan), sort_keys=True)


@pytest.mark.parametrize("name", TUNABLES)
def test_the_fastest_right_candidate_is_found(name, tmp_path):
    """The clock prefers one candidate: of two groups the one that differs in both is reached."""
    tunable = TUNABLES[name]
    matmul = {"block_m": 32, "group": 1}
    want = {"attention": {"block_m": 16}, "decode": {"splits": 2, "block_n": 16}, "matmul": matmul}[tunable.kind]
    clock = Clock(lambda plan: 2.0 - 0.5 * sum(getattr(plan, field) == value for field, value in want.items()))
    found = searched(tmp_path / "log.jsonl", tunable, clock)
    assert not found.note and found.searched == "all" and found.tried == len(found.trials) >= 2
    assert {field: found.best[field] for field in want} == want and found.worth
    assert (found.planned_us, found.tuned_us) == (2000.0, 2000.0 - 500.0 * len(want))
    made = table_of_outcomes([found], IDENTITY, None)
    assert [entry.plan for entry in made.entries] == [found.best]
    write_table(tmp_path / "t.json", made)
    assert read_table(tmp_path / "t.json").entries[0].key == made.entries[0].key


def test_where_nothing_is_faster_nothing_is_taken(tmp_path):
    found = searched(tmp_path / "log.jsonl", TUNABLES["matmul"], Clock(lambda plan: 1.0))
    assert found.best == found.planned and not found.worth and found.gain == 1.0
    assert not table_of_outcomes([found], IDENTITY, None).entries
    one_percent = searched(
        tmp_path / "other.jsonl", TUNABLES["matmul"], Clock(lambda plan: 1.0 - 0.01 * (plan.group == 1))
    )
    assert one_percent.best != one_percent.planned and not one_percent.worth


def test_a_gain_within_the_noise_is_not_taken(tmp_path):
    """A third faster by the median, but turns overlap."""
    turns = itertools.cycle([0.5, 1.0, 1.5])
    found = searched(
        tmp_path / "log.jsonl", TUNABLES["decode"], Clock(lambda plan: next(turns) if plan.block_n == 16 else 1.2)
    )
    assert found.best["block_n"] == 16 and found.gain == 1.2 and not found.clear and not found.worth
    kept = Log(tmp_path / "log.jsonl", IDENTITY).outcome(TUNABLES["decode"])
    assert not kept.worth and kept.gain == found.gain


def _planted(monkeypatch, wrong, spoil):
    """Candidates for which wrong(plan) give spoil(result)."""
    work = Tunable.work

    def planted(self, device, count):
        made = work(self, device, count)

        def call(inputs, plan):
            true = made.call(inputs, plan)
            return (lambda: spoil(true())) if wrong(plan) else true

        return replace(made, call=call)

    monkeypatch.setattr(Tunable, "work", planted)


def _one_wrong(out):
    out = out.clone()
    out.view(-1)[-1] += 1.0
    return out


def _one_nan(out):
    out = out.clone()
    out.view(-1)[out.numel() // 2] = float("nan")
    return out


def _raises(out):
    raise RuntimeError("out of resource: shared memory")


@pytest.mark.parametrize(
    ("name", "spoil", "status"),
    [
        *((name, _one_wrong, "WRONG") for name in ("attention", "decode", "matmul")),
        ("decode", _one_nan, "WRONG"),
        ("decode", _raises, "failed"),
    ],
)
def test_a_wrong_candidate_is_never_timed(name, spoil, status, tmp_path, monkeypatch):
    """It would be ten times as fast."""
    field, value = {"attention": ("block_m", 16), "decode": ("splits", 2), "matmul": ("block_m", 32)}[name]
    _planted(monkeypatch, lambda plan: getattr(plan, field) == value, spoil)
    clock = Clock(lambda plan: 0.1 if getattr(plan, field) == value else 1.0)
    found = searched(tmp_path / "log.jsonl", TUNABLES[name], clock)
    refused = [one for one in found.trials if one.fields[field] == value]
    assert (
        refused and {one.status for one in refused} == {status} and all(one.note and not one.ratio for one in refused)
    )
    assert clock.timed and all(getattr(plan, field) != value for plan in clock.timed)
    assert found.best == found.planned


def test_a_problem_whose_own_plan_is_wrong_is_not_tuned(tmp_path, monkeypatch):
    _planted(monkeypatch, lambda plan: True, _one_wrong)
    clock = Clock(lambda plan: 1.0)
    found = searched(tmp_path / "log.jsonl", TUNABLES["matmul"], clock)
    assert "the rules' plan: WRONG: max error" in found.note and not found.worth and not clock.timed


def test_a_second_call_measures_nothing_again(tmp_path, monkeypatch):
    clock = Clock(lambda plan: 1.0 / plan.block_n)
    first = searched(tmp_path / "log.jsonl", TUNABLES["decode"], clock)
    monkeypatch.setattr(Tunable, "work", lambda *_: pytest.fail("inputs were made"))
    again = searched(tmp_path / "log.jsonl", TUNABLES["decode"], clock)
    assert json.loads(json.dumps(asdict(again))) == json.loads(json.dumps(asdict(first)))


def test_a_call_goes_on_where_the_time_was_over(tmp_path):
    tunable, path = TUNABLES["decode"], tmp_path / "log.jsonl"

    def slow(plan):  # all but the rules' plan, which has one share or even slices: one turn each, two seconds
        return 1.0 + 5 * (key_fields("decode", plan) != rules)

    rules = key_fields("decode", rules_decode(tunable.work("cpu", 1).problem, INTERPRETER))
    first = Clock(slow)
    cut = searched(path, tunable, first, seconds=3.0)
    assert cut.searched == "" and 1 <= len(cut.trials) < 5 and cut.planned_us == 1000.0
    second = Clock(slow)
    whole = searched(path, tunable, second)
    assert whole.searched == "all" and len(whole.trials) == 5
    timed = [{key_fields("decode", plan) for plan in clock.timed} for clock in (first, second)]
    assert timed[0] & timed[1] == {rules} and len(timed[0] | timed[1]) == 6
    none = Clock(slow)
    assert searched(tmp_path / "none.jsonl", tunable, none, seconds=0.0).note == "not reached" and not none.timed


def test_seconds_are_shared_among_problems(tmp_path):
    """Each problem gets something, however long the first one could go on."""
    clock, log = Clock(lambda plan: 1.0), Log(tmp_path / "log.jsonl", IDENTITY)
    these = [TUNABLES["matmul"], TUNABLES["decode"]]
    found = tune(these, INTERPRETER, "cpu", log, Limits(12.0, now=clock.now), sampling=clock.sampling)
    assert [one.tunable for one in found] == these and all(one.planned_us and one.trials for one in found)
    assert not found[0].searched


def test_quick_is_half_and_the_whole_goes_on(tmp_path):
    path, clock = tmp_path / "log.jsonl", Clock(lambda plan: 1.0)
    half = searched(path, TUNABLES["decode"], clock, quick=True)
    assert half.searched == "half" and len(half.trials) == 3
    assert searched(path, TUNABLES["decode"], Clock(None), quick=True).trials == half.trials
    assert len(searched(path, TUNABLES["decode"], clock).trials) == 5


def test_what_quick_found_is_not_lost_where_the_whole_was_cut_off(tmp_path):
    """The other half of the first group comes before what quick found in the second one."""
    path, clock = tmp_path / "log.jsonl", Clock(lambda plan: 0.5 if plan.block_n == 16 else 1.0)
    assert searched(path, TUNABLES["decode"], clock, quick=True).best["block_n"] == 16
    cut = searched(path, TUNABLES["decode"], Clock(clock.ms), seconds=0.5)
    assert cut.searched == "" and cut.best["block_n"] == 16 and cut.worth


def test_the_best_is_checked_once_more(tmp_path, monkeypatch):
    """One that is wrong now and then is found out; the next best is taken."""
    calls = []

    def at_last(plan):
        calls.append(plan.block_n) if plan.block_n == 16 else None
        return calls.count(16) > 1 and plan.block_n == 16

    _planted(monkeypatch, at_last, _one_wrong)
    clock = Clock(lambda plan: {16: 0.5, 64: 0.8}.get(plan.block_n, 1.0))
    found = searched(tmp_path / "log.jsonl", TUNABLES["decode"], clock)
    assert found.best["block_n"] == 64 and found.worth
    assert {one.status for one in found.trials if one.fields["block_n"] == 16} == {"WRONG"}
    assert Log(tmp_path / "log.jsonl", IDENTITY).outcome(TUNABLES["decode"]).best == found.best


def test_what_ended_the_process_is_not_tried_again_and_what_the_user_ended_is(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    for error, state in ((SystemExit, ENDED), (KeyboardInterrupt, "ok")):
        path.unlink(missing_ok=True)

        def dies(out, error=error):
            raise error

        with monkeypatch.context() as patch:
            _planted(patch, lambda plan: plan.block_m == 16, dies)
            with pytest.raises(error):
                searched(path, TUNABLES["attention"], Clock(lambda plan: 1.0))
        with path.open("a") as file:
            file.write('{"device": "interpreter", "cut o')
        clock = Clock(lambda plan: 0.5 if plan.block_m == 16 else 1.0)
        found = searched(path, TUNABLES["attention"], clock)
        assert {one.status for one in found.trials if one.fields["block_m"] == 16} == {state}
        assert found.worth == (state == "ok")


@pytest.mark.parametrize("name", ["device", "triton", "torch", "tilefold"])
def test_other_versions_measurements_are_not_taken(name, tmp_path):
    clock = Clock(lambda plan: 1.0)
    searched(tmp_path / "log.jsonl", TUNABLES["decode"], clock)
    assert Log(tmp_path / "log.jsonl", IDENTITY).outcome(TUNABLES["decode"]) is not None
    other = Log(tmp_path / "log.jsonl", {**IDENTITY, name: "other"})
    assert other.outcome(TUNABLES["decode"]) is None and not other.trials


# ---------------------------------------------------------------- candidates


PLANNED = {
    "prefill": ("attention", AttentionProblem(1, 2048, 2048, 28, 4, 128, 128, causal=True)),
    "odd": ("attention", AttentionProblem(2, 1001, 1003, 7, 1, 40, 24, dtype="float16", descriptors=False)),
    "fp32": ("attention", AttentionProblem(1, 300, 300, 4, 4, 64, 64, dtype="float32")),
    "one": ("decode", DecodeProblem(AttentionProblem(1, 1, 8192, 28, 4, 128, 128))),
    "many": ("decode", DecodeProblem(AttentionProblem(32, 1, 8192, 28, 4, 128, 128), page_size=16)),
    "latent": ("decode", DecodeProblem(AttentionProblem(4, 1, 4096, 16, 1, 576, 512), shared=True)),
    "vector": ("matmul", MatmulProblem(1, 1, 3584, 18944, b_major="k")),
    "large": ("matmul", MatmulProblem(1, 2048, 18944, 3584, b_major="k")),
    "single": ("matmul", MatmulProblem(1, 500, 301, 77, dtype="float32", out_dtype="float32", descriptors=False)),
}


@pytest.mark.parametrize("device", ["h200", "a100", "mi300x"])
@pytest.mark.parametrize("name", PLANNED)
def test_candidates_fit_the_device(name, device):
    """Each is a plan that checks itself for exactly this problem; there are enough of them, and each once."""
    kind, problem = PLANNED[name]
    planned = candidates.rules_plan(kind, problem, device_named(device))
    made = []
    for group in candidates.groups_of(kind):
        for changes in group(planned):
            with suppress(PlanError):
                made.append(candidates.applied(planned, {**fields(kind, planned), **changes}))
    distinct = {key_fields(kind, plan) for plan in made} - {key_fields(kind, planned)}
    assert len(distinct) >= 5
    for plan in made:
        assert plan.problem == problem and plan.device == planned.device
        again = candidates.applied(planned, fields(kind, plan))
        assert fields(kind, again) == fields(kind, plan), "the table's fields make the same plan"


# ---------------------------------------------------------------- problems


def test_names_of_cases_choose_problems():
    for gpu in (True, False):
        assert {one.kind for one in problems_of_cases("dense", gpu)} == {"attention"}
        assert {one.kind for one in problems_of_cases("gemm", gpu)} == {"matmul"}
    assert [one.name for one in problems_of_cases("b32_n8192_h28k4", True)] == ["b32_n8192_h28k4_d128"]
    assert not any("uneven" in one.name or "packed" in one.name for one in problems_of_cases("d|m", True))
    refuses(ValueRangeError, "nothing_like_it", problems_of_cases, "nothing_like_it", True)


QWEN = {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN |= {"intermediate_size": 18944, "vocab_size": 152064, "torch_dtype": "bfloat16"}


def _config(tmp_path, **changes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({name: value for name, value in {**QWEN, **changes}.items() if value != ""}))
    return path


def test_a_models_shapes(tmp_path):
    found = problems_of_model(_config(tmp_path), (1, 32), (2048,), (8192,))
    attention, one, many, *linear = found
    assert attention.case.problem == AttentionProblem(1, 2048, 2048, 28, 4, 128, 128, causal=True)
    assert (one.name, many.name) == ("b1_n8192_h28k4_d128", "b32_n8192_h28k4_d128")
    shapes = {(each.case.m, each.case.n, each.case.k, each.case.bias) for each in linear}
    layers = {(3584, 3584, "n"), (512, 3584, "n"), (3584, 3584, ""), (18944, 3584, ""), (3584, 18944, "")}
    expected = {(m, *shape) for m in (1, 32, 2048) for shape in layers} | {(m, 152064, 3584, "") for m in (1, 32)}
    assert shapes == expected and len(linear) == len(expected) == 17
    assert all(each.case.transposed and each.case.dtype == "bfloat16" for each in linear)
    outer = tmp_path / "outer.json"
    outer.write_text(
        json.dumps({"model_type": "other", "text_config": {**QWEN, "attention_bias": False, "head_dim": 64}})
    )
    inner = problems_of_model(outer, (1,), (9,), (33,), ("decode", "linear"))
    assert inner[0].case.dim_qk == 64 and {each.kind for each in inner} == {"decode", "matmul"}
    assert not any(each.case.bias for each in inner[1:])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": ""}, "hidden_size must be an integer of at least 1, got None"),
        ({"num_attention_heads": 0}, "num_attention_heads must be"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads=28, got 3"),
        ({"torch_dtype": "float8"}, "torch_dtype must be one of bfloat16, float16, float32, got 'float8'"),
        ({"vocab_size": "many"}, "vocab_size must be an integer"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, said, tmp_path):
    with pytest.raises(ValueRangeError, match=said):
        problems_of_model(_config(tmp_path, **changes))


@pytest.mark.parametrize("text", ["{", "[1]", None])
def test_what_is_no_config_is_refused(text, tmp_path):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    refuses(ValueRangeError, "--model must be a model's config.json", problems_of_model, path)


# ---------------------------------------------------------------- the table


def _entry(kind, plan, **changes):
    """An entry that changes fields of the rules' plan."""
    before = fields(kind, plan)
    problem = json.loads(json.dumps(asdict(plan.problem)))
    return Entry(kind, "name", problem, {**before, **changes}, before, 20.0, 16.0, 7, "2026-11-23T10:00:00+00:00")


def _table(*entries, device="h200", triton="3.6.0"):
    return Table(device, "NVIDIA H200", triton, "2.9.0", "0.1.1", entries)


def _use(monkeypatch, path, table):
    write_table(path, table)
    monkeypatch.setenv("TILEFOLD_TUNED", str(path))
    tables.reset()


CHANGES = {
    "prefill": {"block_n": 64, "num_stages": 4},
    "one": {"splits": 16, "merge": "last"},
    "vector": {"block_m": 16, "block_n": 32, "splits": 4},
}


@pytest.mark.parametrize("name", CHANGES)
def test_plans_follow_the_table(name, tmp_path, monkeypatch):
    kind, problem = PLANNED[name]
    ruled = candidates.rules_plan(kind, problem, H200)
    assert PLANS[kind](problem, H200) == ruled
    PLANS[kind].cache_clear()
    _use(monkeypatch, tmp_path / "t.json", _table(_entry(kind, ruled, **CHANGES[name])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = PLANS[kind](problem, H200)
        other = replace(problem, **({"attention": replace(problem.attention, seq_k=99)} if kind == "decode" else
                                    {"seq_k": 99} if kind == "attention" else {"k": 99}))  # fmt: skip
        assert PLANS[kind](other, H200) == candidates.rules_plan(kind, other, H200), "exactly the problem"
    assert fields(kind, plan) == {**fields(kind, ruled), **CHANGES[name]}
    text = " ".join(str(plan).split())
    assert "measured here" in text
    assert "Measured 2026-11-23 on NVIDIA H200 (torch 2.9.0, triton 3.6.0, tilefold 0.1.1): 16.00 us" in text
    assert "the rules' plan 20.00 us in the same turns; best of 7 tried." in text and "measured to be slower" in text
    assert type(plan).from_json(plan.to_json()) == plan


def test_plans_for_what_the_caller_asks_are_the_rules(tmp_path, monkeypatch):
    kind, problem = PLANNED["prefill"]
    product, step = PLANNED["vector"][1], PLANNED["one"][1]
    entries = [_entry(PLANNED[n][0], candidates.rules_plan(*PLANNED[n], H200), **CHANGES[n]) for n in CHANGES]
    _use(monkeypatch, tmp_path / "t.json", _table(*entries))
    assert plan_attention(problem, H200, portable=True).rule != "measured here"
    assert (
        plan_matmul(product, H200, "plain").order == "plain"
        and plan_matmul(product, H200, portable=True).rule != "measured here"
    )
    assert plan_decode(step, H200, 5) == rules_decode(step, H200, 5)
    assert (plan_attention(problem, H200).rule, plan_matmul(product, H200).rule) == ("measured here",) * 2
    forward = plan_forward(step.attention, H200)
    assert forward.splits == 16 and forward.rejected[0].what == "a dense kernel"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text.replace('"h200"', '"h100"'), "it was measured on h100, plans are asked for h200"),
        (lambda text: text.replace('"3.6.0"', '"3.5.9"'), "it was measured with triton 3.5.9, triton 3.6.1 is installed here"),
        (lambda text: text[:300], "it is no table of `tilefold tune`"),
        (lambda text: "\x00\xff", "it is no table"),
        (lambda text: "[]", "it is no table"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "format must be 1, got 2"),
        (lambda text: text.replace('"entries"', '"things"'), "it is no table"),
        (lambda text: text.replace("16.0", "-16.0"), "tuned_us must be a time in microseconds, got -16.0"),
        (lambda text: text.replace('"kind": "attention"', '"kind": "conv"'), "kind must be one of"),
        (lambda text: text.replace('"block_n": 64', '"block_n": 63'), "a plan of it does not fit: plan field block_n"),
        (lambda text: text.replace('"block_n": 64', '"block_z": 64'), "a plan of it does not fit"),
        (lambda text: text.replace('"num_stages": 4', '"num_stages": 8'), "a plan of it does not fit: plan field"),
        (None, "No such file"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_used_warns_once(spoil, said, tmp_path, monkeypatch):
    kind, problem = PLANNED["prefill"]
    ruled = candidates.rules_plan(kind, problem, H200)
    path = tmp_path / "t.json"
    _use(monkeypatch, path, _table(_entry(kind, ruled, **CHANGES["prefill"])))
    text = path.read_text()
    if spoil is None:
        path.unlink()
    else:
        assert spoil(text) != text
        path.write_text(spoil(text), encoding="latin-1")
    with pytest.warns(UserWarning, match="table of measured plans") as told:
        assert plan_attention(problem, H200) == ruled
    assert len(told) == 1 and str(path) in str(told[0].message) and said in str(told[0].message)
    assert "the rules decide" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (100, 200):
            plan_attention(replace(problem, seq_k=2048 + n), H200)
        plan_attention.cache_clear()
        assert plan_attention(problem, H200) == ruled


def test_where_tables_lie(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEFOLD_TUNED", "none")
    assert table_path("h200") is None and table_path("h200", tmp_path / "x.json") == tmp_path / "x.json"
    monkeypatch.setenv("TILEFOLD_TUNED", str(tmp_path))
    assert table_path("h200") == tmp_path / "h200.json"
    monkeypatch.setenv("TILEFOLD_TUNED", str(tmp_path / "t.json"))
    assert table_path("h200") == tmp_path / "t.json"
    monkeypatch.delenv("TILEFOLD_TUNED")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert table_path("h200") == tmp_path / "tilefold" / "tuned" / "h200.json"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tables.table_in_use(H200) is None, "without a table nobody is warned"


def test_keys_tell_what_changes_a_launch():
    one = AttentionProblem(1, 1, 100, 4, 2, 32, 32)
    same = [DecodeProblem(one), DecodeProblem(replace(one, causal=True)), DecodeProblem(one, equal=True)]
    assert len({key_of("decode", each) for each in same}) == 1
    several = DecodeProblem(replace(one, batch=2, seq_q=2))
    causal = replace(several, attention=replace(several.attention, causal=True))
    others = [several, replace(several, equal=True), causal]
    assert len({key_of("decode", each) for each in (*same, *others)}) == 4
    stored = json.loads(json.dumps(asdict(several)))
    assert key_of("decode", stored) == key_of("decode", several)


def test_the_version_of_triton_is_read_without_importing_it(monkeypatch):
    import triton

    monkeypatch.undo()
    assert tables.triton_here() == triton.__version__
    monkeypatch.delitem(sys.modules, "triton")
    assert tables.triton_here() == triton.__version__


def test_the_table_of_before_stays_if_it_was_measured_alike(tmp_path):
    clock = Clock(lambda plan: 0.5 if getattr(plan, "splits", 0) == 2 else 1.0)
    found = searched(tmp_path / "log.jsonl", TUNABLES["decode"], clock)
    ruled = candidates.rules_plan("matmul", PLANNED["vector"][1], H200)
    kept = _entry("matmul", ruled, splits=4)
    before = Table(**IDENTITY, entries=(kept, replace(kept, kind="decode", problem=found.problem)))
    made = table_of_outcomes([found], IDENTITY, before)
    assert made.entries[0] == kept and made.entries[1].plan == found.best and len(made.entries) == 2
    assert len(table_of_outcomes([found], {**IDENTITY, "triton": "3.7.0"}, before).entries) == 1
    slower = replace(found, tuned_us=found.planned_us)
    assert table_of_outcomes([slower], IDENTITY, before).entries == (kept,), "what is measured again is not kept"


# ---------------------------------------------------------------- calls and commands


def test_a_call_asks_the_table_once(monkeypatch, tmp_path):
    """Planning asks; a call that is made again does not; and its result is right."""
    from tilefold.reference import attention as exact

    q, k, v = (torch.randn(1, n, h, 24, dtype=torch.float16) for n, h in ((47, 4), (61, 2), (61, 2)))
    problem = tilefold.attention_plan(q, k, v, causal=True).problem
    ruled = candidates.rules_plan("attention", problem, INTERPRETER)
    entry = _entry("attention", ruled, block_m=16, block_n=32)
    _use(monkeypatch, tmp_path / "t.json", _table(entry, device="interpreter"))
    for plan in (plan_attention, plan_forward):
        plan.cache_clear()
    monkeypatch.setattr(records, "CACHE", {})
    asked = []
    found = tables._in_use
    monkeypatch.setattr(tables, "_in_use", lambda device: asked.append(device) or found(device))
    outs = [tilefold.attention(q, k, v, causal=True) for _ in range(3)]
    assert len(asked) == 1
    plan = tilefold.attention_plan(q, k, v, causal=True)
    assert (plan.block_m, plan.block_n, plan.rule) == (16, 32, "measured here")
    want, plain = (exact(q, k, v, causal=True, dtype=dtype)[0] for dtype in (torch.float64, torch.float16))
    assert compare(outs[0], want, plain).ok and all(torch.equal(outs[0], out) for out in outs)


_run = command("tune", columns=200, TRITON_INTERPRET="1")


def test_the_command_measures_shows_takes_and_forgets(tmp_path, monkeypatch):
    """The interpreter's own clock decides here, so nothing is said of which plans are faster."""
    path = tmp_path / "deep" / "t.json"
    first = _run("m70_n40_k50_nt_bias_gelu", "--table", path, "--quick").output
    assert "what changed" in first and "Nothing has changed" in first
    assert not path.exists() and path.with_suffix(".measured.jsonl").exists()
    monkeypatch.setattr(Tunable, "work", lambda *_: pytest.fail("measured again"))
    taken = _run("m70_n40_k50_nt_bias_gelu", "--table", path, "--quick", "--take")
    assert "later processes use them" in taken.output
    table = read_table(path)
    assert {name: getattr(table, name) for name in IDENTITY} == identity_of(INTERPRETER)
    assert f"{len(table.entries)} plans measured on Triton interpreter" in _run("--show", "--table", path).output
    gone = _run("--forget", "--table", path)
    assert gone.output.count("deleted") == 2 and not list(path.parent.iterdir())
    assert "plans come from the rules" in _run("--show", "--table", path).output


def test_what_the_command_refuses():
    model = "--model x.json --table t.json"
    refused(
        _run,
        ((), "tune takes one of CASE, --model, --show and --forget"),
        ("dense --model x.json", "tune takes one of"),
        ("dense --show", "tune takes one of"),
        ("nothing_like_it --table x.json", "matches none of"),
        ("dense", "TILEFOLD_TUNED=none switches tables off"),
        (f"{model} --batches 0", "--batches must be integers of at least 1"),
        (f"{model} --only conv", "--only must be from attention, decode, linear"),
    )


def test_without_a_gpu_the_command_refuses(monkeypatch):
    from tilefold.cli import tune as command

    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuses(DeviceError, "measures plans on a GPU, and torch sees none here", command.tune.__wrapped__, "d128")


def test_a_table_in_the_users_cache_is_used_by_another_process(tmp_path):
    """By `explain`, which needs no GPU: the table of an H200 was shipped."""
    kind, problem = PLANNED["prefill"]
    entry = _entry(kind, candidates.rules_plan(kind, problem, H200), **CHANGES["prefill"])
    import triton

    write_table(tmp_path / "tilefold" / "tuned" / "h200.json", _table(entry, triton=triton.__version__))
    env = {name: value for name, value in os.environ.items() if name != "TILEFOLD_TUNED"}
    asked = "explain --device h200 --heads 28 --kv-heads 4 --q 2048 --dim 128 --causal"
    say = [
        subprocess.run(
            [sys.executable, "-m", "tilefold", *asked.split()], env={**env, "XDG_CACHE_HOME": str(tmp_path), **more},
            capture_output=True, text=True, check=True,
        ).stdout
        for more in ({}, {"TILEFOLD_TUNED": "none"})
    ]  # fmt: skip
    assert "measured here" in say[0] and "Measured 2026-11-23 on NVIDIA H200" in say[0]
    assert "measured here" not in say[1]


def test_doctor_says_which_table_is_used(tmp_path, monkeypatch):
    (none,) = doctor.tuned()
    assert none.section == "plans" and "no GPU" in none.detail
    monkeypatch.setattr(doctor, "gpu_fault", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(doctor, "device_of", lambda *_: H200)
    (absent,) = doctor.tuned()
    assert absent.state == "no" and "the rules decide" in absent.detail
    entry = _entry("attention", candidates.rules_plan(*PLANNED["prefill"], H200), **CHANGES["prefill"])
    _use(monkeypatch, tmp_path / "t.json", _table(entry))
    (found,) = doctor.tuned()
    assert found.state == "yes" and found.detail.startswith(f"1 problems, from {tmp_path / 't.json'}")
    _use(monkeypatch, tmp_path / "t.json", _table(entry, device="h100"))
    (other,) = doctor.tuned()
    assert other.state == "no" and "measured on h100" in other.detail


def test_commands_say_that_a_table_is_used(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    for name, value in (("is_available", True), ("get_device_name", "NVIDIA H200"), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(runtime, "device_of", lambda *_: H200)
    monkeypatch.setattr(environment, "triton_fault", lambda: None)
    assert runtime.prepare_runtime().note == "Kernels run on NVIDIA H200."
    _use(monkeypatch, tmp_path / "t.json", _table())
    assert f"Plans measured here are used, of {tmp_path / 't.json'}" in runtime.prepare_runtime().note


def test_a_lost_gpu_ends_the_run_and_its_candidate_is_left_out(tmp_path, monkeypatch):
    """All that ran there would fail after it."""

    def lost(out):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for module in (loop, measure):
        monkeypatch.setattr(module, "gpu_lost", lambda error: True)
    path = tmp_path / "log.jsonl"
    with monkeypatch.context() as patch:
        _planted(patch, lambda plan: plan.splits == 2, lost)
        with pytest.raises(DeviceError, match="the GPU was lost while b1_n70_h7k1_d16_page16 was tried"):
            searched(path, TUNABLES["decode"], Clock(lambda plan: 1.0))
    found = searched(path, TUNABLES["decode"], Clock(lambda plan: 1.0))
    assert {one.status for one in found.trials if one.fields["splits"] == 2} == {ENDED} and found.searched == "all"
