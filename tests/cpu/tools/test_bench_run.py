"""Running cases with implementations that are made up: what is wrong is not timed, what fails does not stop the others."""

import itertools
from dataclasses import replace

import pytest
import torch

from tilefold import reference
from tilefold.bench.attention.cases import Case, cases_of
from tilefold.bench.attention.peers import DENSE, IMPLEMENTATIONS
from tilefold.bench.engine import AttentionEngine
from tilefold.bench.family import Calls, Peer
from tilefold.bench.implementation import make_inputs
from tilefold.bench.judge import Judge, sampled_rows
from tilefold.bench.loop import first_line
from tilefold.bench.run import run_case
from tilefold.bench.setting import Options, commit, setting_of
from tilefold.errors import Unsupported
from tilefold.plan.problem import AttentionProblem

CASE = Case("dense", AttentionProblem(2, 80, 80, 2, 1, 16, 16, dtype="float32", causal=True))
FAST = Options(rounds=2, rep_ms=1.0)


def right(inputs):
    p = inputs.problem
    out = reference.attention(inputs.q, inputs.k, inputs.v, causal=p.causal)[0].to(inputs.q.dtype)
    return Calls([lambda: out])


def made_up(name, prepare, refuses=lambda case, device: None):
    return Peer(name, name.title(), "made up", "torch", prepare, refuses)


def run(*implementations, options=FAST):
    steps = []
    row = run_case(DENSE, CASE, implementations, "cpu", options, lambda case, what: steps.append(what))
    return {cell.implementation: cell for cell in row.cells}, steps


def test_a_right_output_is_timed_a_wrong_one_is_not():
    calls = []

    def wrong(inputs):
        out = right(inputs).call() + 1e-3

        def call():
            calls.append(1)
            return out

        return Calls([call])

    cells, steps = run(made_up("good", right), made_up("bad", wrong))
    good, bad = cells["good"], cells["bad"]
    assert (good.status, good.verdict.ok) == ("ok", True)
    assert good.timing.method == "alternating"
    assert good.flops_per_s == pytest.approx(CASE.flops / (good.timing.ms * 1e-3))
    assert (bad.status, bad.timing, bad.flops_per_s) == ("WRONG", None, None)
    assert bad.note.startswith("max error 1.00e-03 (limit ")
    assert len(calls) == 1
    assert steps == ["Good", "Bad", "timing"]


def test_nan_outside_the_sampled_rows_is_found():
    def prepare(inputs):
        out = right(inputs).call().clone()
        row = next(r for r in range(80) if r not in sampled_rows(80))
        out[1, row, 0, 3] = float("nan")
        return Calls([lambda: out])

    cell = run(made_up("holes", prepare))[0]["holes"]
    assert (cell.status, cell.note.split(";")[0]) == ("WRONG", "output is not finite")


def failing(error):
    def prepare(inputs):
        raise error

    return prepare


@pytest.mark.parametrize(
    ("error", "status", "note"),
    [
        (RuntimeError("No available kernel. Aborting execution."), "refused", "RuntimeError: No available kernel."),
        (Unsupported("head dim 257"), "refused", "head dim 257"),
        (NotImplementedError("SM90 only"), "refused", "SM90 only"),
        (torch.OutOfMemoryError("out of memory\nlong story"), "no memory", "out of memory"),
        (ZeroDivisionError("division by zero"), "failed", "ZeroDivisionError: division by zero"),
    ],
)
def test_an_error_is_the_cell_of_its_own_implementation_only(error, status, note):
    cells, _ = run(made_up("broken", failing(error)), made_up("good", right))
    assert cells["broken"].status == status
    assert cells["broken"].note.startswith(note)
    assert "\n" not in cells["broken"].note
    assert cells["good"].status == "ok"


def test_what_was_measured_before_the_gpu_was_lost_is_kept(monkeypatch):
    cases = [replace(CASE, problem=replace(CASE.problem, batch=batch)) for batch in (1, 2, 3)]
    kept = []

    def lost(family, case, *rest):
        if case == cases[1]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nlong story")
        return run_case(family, case, *rest)

    monkeypatch.setattr("tilefold.bench.engine.run_case", lost)
    rows = AttentionEngine(DENSE).run(cases, (made_up("good", right),), "cpu", FAST, lambda *_: None, kept.append)
    cells = [cell for row in rows for cell in row.cells]
    assert [(cell.case.problem.batch, cell.status) for cell in cells] == [(1, "ok"), (2, "failed")]
    assert cells[1].note == "the GPU was lost in this case: CUDA error: an illegal memory access was encountered"
    assert kept == rows


def once(error):
    """Right at the first call, by which it is judged; later ones raise."""

    def prepare(inputs):
        call, calls = right(inputs).call, []

        def later():
            calls.append(1)
            if len(calls) > 1:
                raise error
            return call()

        return Calls([later])

    return prepare


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("too late"), "failed"), (torch.OutOfMemoryError("full"), "no memory")]
)
def test_what_raises_while_it_is_timed_is_left_out_and_the_others_are_timed(error, status):
    cells, _ = run(made_up("good", right), made_up("bad", once(error)))
    assert cells["bad"].status == status and cells["bad"].timing is None
    assert cells["bad"].note == f"while it was timed: {type(error).__name__}: {error}"
    assert cells["good"].status == "ok" and cells["good"].timing.samples == FAST.rounds


def test_a_budget_begins_no_further_case():
    for budget, reached in ((0.0, 0), (60.0, 1)):
        options = replace(FAST, budget_s=budget)
        rows = AttentionEngine(DENSE).run([CASE], (made_up("good", right),), "cpu", options, lambda *_: None)
        assert len(rows) == reached


def test_a_refusal_is_not_even_prepared():
    refused = made_up("elsewhere", failing(AssertionError()), lambda case, device: f"not on {device}")
    assert run(refused)[0]["elsewhere"].note == "not on cpu"


def test_without_a_gpu_nothing_is_replayed():
    cell = run(made_up("good", right), options=Options(rounds=1, rep_ms=1.0, graph=True))[0]["good"]
    assert cell.timing and cell.graph is None  # graphs are CUDA's


@pytest.mark.parametrize("window", [(-1, -1), (7, 0), (3, 5)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(90, 90), (70, 100), (100, 70), (1, 33)])
def test_the_judge_agrees_with_the_whole_reference(seq_q, seq_k, causal, window):
    problem = AttentionProblem(2, seq_q, seq_k, 4, 2, 16, 8, dtype="float32", causal=causal, window=window)
    inputs = make_inputs(Case("dense", problem), "cpu")
    judge = Judge(inputs, count=20)
    want = reference.attention(inputs.q, inputs.k, inputs.v, causal=causal, window=window)[0]
    torch.testing.assert_close(judge.want[0], want[:, judge.rows], rtol=1e-12, atol=1e-12)
    verdict = judge.verdict(want.float())
    assert verdict.ok
    assert verdict.max_error <= verdict.max_limit


def test_sampled_rows_keep_both_ends():
    rows = sampled_rows(5000)
    assert rows[0] == 0
    assert rows[-1] == 4999
    assert rows == sorted(set(rows))
    assert len(rows) == 64
    assert sampled_rows(7) == list(range(7))


def test_inputs_are_normal_never_zero_and_repeatable():
    case = cases_of("dense", "tiny")[0]
    first, again, other = make_inputs(case, "cpu"), make_inputs(case, "cpu"), make_inputs(case, "cpu", seed=1)
    assert first.q.equal(again.q)
    assert not first.q.equal(other.q)
    assert first.q.shape == (1, 128, 1, 128)
    assert first.k.float().std().item() == pytest.approx(1.0, abs=0.05)
    assert not first.k.equal(first.v)


@pytest.mark.parametrize("name", ["flash", "math"])
@pytest.mark.parametrize(("kv_heads", "causal", "seq_q"), [(4, False, 50), (4, True, 50), (2, True, 50), (2, True, 1)])
def test_torch_peers_give_the_reference(name, kv_heads, causal, seq_q):
    problem = AttentionProblem(2, seq_q, 50, 4, kv_heads, 16, 16, dtype="float32", causal=causal)
    peer = IMPLEMENTATIONS[name]
    case = Case("dense", problem)
    assert peer.refuses(case, "cpu") is None
    inputs = make_inputs(case, "cpu")
    prepared = peer.prepare(inputs)
    with prepared.context():
        out = prepared.call()
    assert out.shape == inputs.q.shape
    assert Judge(inputs).verdict(out).ok


def test_torch_peers_get_views_of_the_inputs(monkeypatch):
    seen = {}

    def spy(q, k, v, **options):
        seen.update(q=q, k=k, v=v, **options)
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    inputs = make_inputs(CASE, "cpu")
    out = IMPLEMENTATIONS["cudnn"].prepare(inputs).call()
    assert seen["is_causal"] is True
    assert seen["enable_gqa"] is True
    for name in ("q", "k", "v"):
        given = getattr(inputs, name)
        assert seen[name].data_ptr() == given.data_ptr()
        assert seen[name].shape[1:3] == (given.shape[2], given.shape[1])
    assert out.data_ptr() == inputs.q.data_ptr()
    assert out.shape == inputs.q.shape


def test_every_peer_says_why_it_is_not_available():
    plain, unequal = CASE, Case("dense", AttentionProblem(1, 8, 16, 1, 1, 16, 16, causal=True))
    half = Case("dense", AttentionProblem(1, 8, 8, 1, 1, 16, 16))
    for name in ("cudnn", "efficient", "flex"):
        assert "GPU" in IMPLEMENTATIONS[name].refuses(half, "cpu")
    assert IMPLEMENTATIONS["fa4"].refuses(half, "cpu") in ("flash-attn-4 is not installed", "needs a GPU")
    assert "float16 and bfloat16" in IMPLEMENTATIONS["flash"].refuses(plain, "cuda")
    assert "top left" in IMPLEMENTATIONS["math"].refuses(unequal, "cpu")
    packed = Case("dense", AttentionProblem(1, 8, 8, 1, 1, 16, 16, varlen=True), lengths=(8,))
    window = Case("dense", AttentionProblem(1, 8, 8, 1, 1, 16, 16, window=(4, 0)))
    for case in (packed, window):
        assert all(each.refuses(case, "cpu") for each in IMPLEMENTATIONS.values() if each.name != "tilefold")
        assert IMPLEMENTATIONS["tilefold"].refuses(case, "cpu") is None
    assert "packed batches for cuDNN and FlashAttention-2" in IMPLEMENTATIONS["efficient"].refuses(
        replace(packed, problem=replace(packed.problem, dtype="float16")), "cuda"
    )


@pytest.mark.parametrize("backward", [False, True])
def test_a_packed_batch_is_judged_by_its_own_sequences(backward):
    problem = AttentionProblem(4, 100, 100, 2, 1, 16, 16, "float32", varlen=True, causal=True)
    inputs = make_inputs(Case("dense", problem, backward=backward, lengths=(70, 1, 0, 100)), "cpu")
    judge = Judge(inputs)
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]

    def attended(*bounds):
        parts = [
            reference.attention(*(t[:, a:b] for t in leaves), causal=True)[0] for a, b in itertools.pairwise(bounds)
        ]
        out = torch.cat(parts, 1)
        return torch.autograd.grad(out, leaves, inputs.grad) if backward else out.detach()

    assert judge.verdict(attended(0, 70, 71, 171)).ok
    assert not judge.verdict(attended(0, 30, 171)).ok


@pytest.mark.parametrize(("interpreted", "backend"), [("1", "interpreter"), ("0", "cpu")])
def test_setting_says_where_and_with_what(interpreted, backend, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    setting = setting_of("cpu")
    assert (setting.backend, setting.torch) == (backend, torch.__version__)
    assert setting.triton.startswith("3.")
    assert setting.date.endswith("+00:00")
    assert setting.commit == commit()


def test_first_line_is_short():
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
    assert len(first_line(ValueError("x" * 500))) == 160
