"""The timers and the command line on a GPU: figures agree with one another, outputs are checked, files are written."""

import json
import statistics
from dataclasses import replace

import pytest
import torch

import tilefold
from cases.device import command
from tilefold.bench import timers
from tilefold.bench.attention.cases import DECODE, Case, cases_of
from tilefold.bench.attention.lists import Pattern
from tilefold.bench.attention.peers import DEFAULT_PEERS, DENSE
from tilefold.bench.attention.peers import SPARSE as LISTED
from tilefold.bench.implementation import make_inputs
from tilefold.bench.loop import gpu_lost
from tilefold.bench.power import Sampler, gpu_id
from tilefold.bench.run import run_case, scratch_bytes
from tilefold.bench.setting import Options
from tilefold.plan.problem import AttentionProblem

pytestmark = pytest.mark.no_poison


@pytest.fixture
def products():
    """Calls that multiply different 2048 x 2048 matrices."""

    def product():
        a = torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
        return lambda: a @ a

    return [product() for _ in range(4)]


@pytest.mark.alone
def test_events_and_graph_agree_on_a_call_that_fills_the_gpu(products):
    by_events, by_graph = timers.event_samples(products[0]), timers.graph_sampler(products)()
    assert 0.3 < statistics.median(by_graph) / statistics.median(by_events) < 1.5


@pytest.mark.alone
def test_host_time_does_not_wait_for_the_gpu():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)

    def call():
        return a @ a

    host = timers.time_host(call, torch.cuda.synchronize, calls=20, repetitions=3)
    assert host.ms < statistics.median(timers.event_samples(call)) / 2


def test_alternating_samples_every_call(products):
    found = timers.time_alternating(
        {str(i): lambda call=call: timers.event_samples(call, 1, 5) for i, call in enumerate(products)}, rounds=3
    )
    assert all(timing.ms > 0 and timing.samples == 3 for timing in found.values())


@pytest.mark.parametrize("causal", [False, True])
def test_every_available_implementation_is_right_and_timed(causal):
    case = Case("dense", AttentionProblem(2, 1024, 1024, 8, 8, 128, 128, causal=causal))
    names = ("tilefold", *DEFAULT_PEERS["dense"]["cuda"], "efficient", "math")
    implementations = [DENSE.peers[name] for name in names]
    options = Options(rounds=2, rep_ms=5.0, graph=True)
    row = run_case(DENSE, case, implementations, "cuda", options, lambda *_: None)
    cells = {cell.implementation: cell for cell in row.cells}
    assert not [cell for cell in cells.values() if cell.status not in ("ok", "refused")]
    ours = cells["tilefold"]
    assert ours.status == "ok"
    assert ours.timing.ms > 0
    assert ours.graph is not None, ours.note
    assert cells["flash"].status == cells["math"].status == "ok"


def alone(case):
    """The cell of tilefold, measured without peers."""
    options = Options(rounds=1, rep_ms=5.0)
    return run_case(DENSE, case, [DENSE.peers["tilefold"]], "cuda", options, lambda *_: None).cells


def test_a_large_case_is_judged_on_sampled_rows_without_running_out_of_memory():
    case = cases_of("dense")[1]
    (cell,) = alone(case)
    assert cell.status == "ok", cell.note


SPARSE = Case("sparse", AttentionProblem(1, 8192, 8192, 8, 8, 128, 128), Pattern("random", 80))


@pytest.mark.parametrize("backward", [False, True])
def test_every_available_sparse_implementation_is_right_and_timed(backward):
    case = replace(SPARSE, backward=backward)
    names = [name for name in DEFAULT_PEERS["sparse"]["cuda"] if name != "flex" or not backward]  # tunes for a minute
    implementations = [LISTED.peers[name] for name in ("tilefold", *names)]
    cells = run_case(LISTED, case, implementations, "cuda", Options(rounds=2, rep_ms=5.0), lambda *_: None).cells
    by_name = {cell.implementation: cell for cell in cells}
    assert by_name["tilefold"].status == ("ok" if not backward else by_name["tilefold"].status)
    assert not [cell for cell in cells if cell.status == "WRONG"]
    assert by_name["cudnn"].status == "ok"
    assert backward or by_name["flex"].status == "ok", by_name["flex"].note


def ours(case):
    """tilefold's cell of a case, its q, k and v in bytes; skipped where it refuses the case."""
    (cell,) = alone(case)
    if cell.status == "refused":
        pytest.skip(cell.note)
    assert cell.status == "ok", cell.note
    p = case.problem
    tokens = (p.seq_q * p.heads, p.seq_k * p.kv_heads)
    return cell, tuple(n * p.batch * p.dim_qk * p.itemsize for n in tokens)


@pytest.mark.parametrize("kind", ["random", "uneven"])
def test_sparse_attention_copies_nothing_and_makes_no_score_matrix(kind):
    """Beyond inputs and output: lse, and room for plans of lists; a copy of q, k or v would be eight times what is allowed, a
    [queries, keys] matrix even of bits more still."""
    cell, (query_bytes, _) = ours(replace(SPARSE, pattern=Pattern(kind, 80 if kind == "random" else 0)))
    assert cell.scratch <= query_bytes // 8


@pytest.mark.alone
def test_split_lists_take_far_less_than_a_copy_of_k():
    cell, (_, key_bytes) = ours(Case("sparse", DECODE, Pattern("random", 9.9)))
    assert cell.scratch <= key_bytes // 4
    assert cell.graph is not None, cell.note


def test_the_backward_of_sparse_attention_states_its_scratch():
    """What the plan says, where it keeps dS; else at most accumulators in fp32 for dq, dk and dv, and what rows and lists need.
    In neither case a [queries, keys] matrix."""
    case = replace(SPARSE, backward=True)
    cell, (query_bytes, key_bytes) = ours(case)
    assert cell.scratch is not None
    inputs = make_inputs(case, "cuda")
    plan = tilefold.sparse_plan(inputs.q, inputs.k, inputs.v, inputs.index, direction="backward")
    if plan.scratch_bytes:
        assert cell.scratch == pytest.approx(plan.scratch_bytes, rel=0.1), plan
    else:
        assert cell.scratch <= 2 * (query_bytes + 2 * key_bytes) + query_bytes // 4
    p = case.problem
    assert cell.scratch < p.heads * p.seq_q * p.seq_k * p.itemsize


def test_scratch_is_what_a_call_allocates_beyond_its_result():
    a = torch.randn(1 << 20, device="cuda")
    assert scratch_bytes(lambda: a * 2) == 0
    assert scratch_bytes(lambda: (a * 2 + 1, a.view(-1))) == pytest.approx(4 << 20, rel=0.01)


def test_the_command_line(tmp_path):
    command("doctor")
    command("explain", "--device", "here", "--heads", "8", "--q", "128", "--dim", "64")
    command("check", "--quick")
    figures = tmp_path / "figures.json"
    given = ("--quick", "--case", "d64", "--peers", "flash", "--rounds", "1", "--json", str(figures))
    command("bench", "dense", *given)
    assert json.loads(figures.read_text())["setting"]["backend"] in ("cuda", "hip")


@pytest.mark.alone
def test_video_sweeps_on_the_gpu(tmp_path):
    """Steps over a cache are captured and replayed; the rest is called."""
    figures = tmp_path / "video.json"
    common = ("--shape", "1,4,2048,64", "--peers", "cudnn,flash", "--rounds", "1", "--json", str(figures))
    for sweep, values, extra in (
        ("sparsity", "0,90", ()),
        ("length", "1000,4096", ("--graph",)),
        ("cached", "1024,8192", ()),
    ):
        command("bench", "video", "--sweep", sweep, "--values", values, *common, *extra)
        document = json.loads(figures.read_text())
        assert document["overtakes"]
        for row in document["rows"]:
            assert all(one["ok"] for one in row["errors"].values()), row
            assert row["ms"]["fine"] < row["ms"]["pipeline"]
            assert row["speedup"]


@pytest.mark.alone
def test_clocks_and_power_are_read_while_the_gpu_works(products):
    """Through nvidia-smi."""
    import shutil
    import time

    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not here")
    with Sampler(gpu_id()) as sampler:
        begin, found = time.perf_counter(), None
        while (found is None or found.samples < 4) and time.perf_counter() - begin < 10:
            for _ in range(200):
                products[0]()
            torch.cuda.synchronize()
            found = sampler.since()
    assert found is not None and found.sm_mhz is not None and found.power_w is not None
    assert 200 < found.sm_mhz.least <= found.sm_mhz.most < 4000
    assert 20 < found.power_w.median < 2000


def test_a_launch_that_is_refused_does_not_count_as_a_lost_gpu():
    assert not gpu_lost(RuntimeError("CUDA error: invalid configuration argument"))
