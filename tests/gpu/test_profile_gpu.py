"""Profiles on a GPU: the planted faults are found, roofs are plausible, machine code and counters are read where they can be."""

import dataclasses
import os
import statistics

import pytest
import torch

import tilefold
from cases.device import DEVICE
from faults import FAULTS, counted, hit_of, run, table, watch
from tilefold.bench import timers
from tilefold.bench.video.stages import prepare_stages, profile_video
from tilefold.errors import Unsupported
from tilefold.plan.sparse.video import STAGES, VideoShape
from tilefold.plan.sparse.video_launches import TOGETHER, LaunchWork
from tilefold.profiling import roofs
from tilefold.profiling.launches import by_place, traced
from tilefold.profiling.predict import predict
from tilefold.profiling.video import explain_video
from tilefold.sparse import CoarseOptions, SelectOptions

pytestmark = [pytest.mark.no_poison, pytest.mark.alone]
alone = pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
    reason="roofs and times can only be measured alone, and other processes of this run use the GPU: run it with -n 1",
)


@pytest.fixture(scope="module")
def device():
    from tilefold.ops.device import device_of

    return device_of(torch.device("cuda", 0))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_without_counters(fault, device):
    if fault.without == "L2-to-SM path" and device.measured_l2_bytes_per_s is None:  # no roof is on record for this GPU
        fault = dataclasses.replace(fault, without="unknown")
    hit = hit_of(fault, watch(fault, torch.device("cuda", 0)), ())
    assert hit.ok, hit.sentence


def test_faults_with_counters():
    try:
        counters = counted()
    except Unsupported as error:
        pytest.skip(str(error))
    hits = run(counters, torch.device("cuda", 0))
    print(table(hits))
    assert all(hit.ok for hit in hits), table(hits)


@alone
def test_roofs_are_below_the_datasheet(device):
    found = roofs.measure_roofs(device, torch.device("cuda", 0))
    for name in ("dram_read", "dram_write", "dram_copy"):
        assert 0.5 < getattr(found, name) / device.dram_bytes_per_s < 1.02, name
    assert found.l2_read > found.dram
    recorded = dict(device.tensor_flops)
    for dtype, rate in found.flops:
        if dtype in recorded:
            assert 0.4 < rate / recorded[dtype] < 1.1, (dtype, rate)
    assert 0.4 < found.exps / device.exp_rate < 1.1
    assert 5e-7 < found.launch_device < 1e-5 and 1e-6 < found.launch_host < 1e-4


def test_an_attention_call():
    """Of a kernel that keeps all in registers; that of head dim 128 spills a few outside of its loop."""
    q, k, v = (torch.randn(2, 4096, 16, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    tilefold.attention(q, k, v)
    with tilefold.profile() as p:
        for _ in range(3):
            tilefold.attention(q, k, v)
    longest = p.profile.rows[0].evidence
    assert longest.launches == 3 and longest.share > 0.9
    assert longest.spills == 0 and longest.registers > 32 and longest.resident >= 1
    assert any(name.startswith(("HGMMA", "HMMA")) for name in longest.opcodes)


def test_regions_do_not_nest():
    with tilefold.profile(), pytest.raises(Unsupported, match="cannot be nested"), tilefold.profile():
        pass
    with tilefold.profile() as p:
        torch.ones(8, device=DEVICE).add_(1)
    assert p.profile.rows


SHAPE = VideoShape(1, 12, 12, 23296, 128)


@alone
def test_the_video_pipeline_is_explained(device):
    """Launches and the gaps between them come to the time of every stage and of the whole; no launch is without its work."""
    ready = prepare_stages(SHAPE, "cuda", CoarseOptions(), SelectOptions(method="top_k", sparsity=0.651))
    found = profile_video(ready, device, "cuda", rounds=3)
    why = explain_video(ready, device, "cuda", {row.name: row.timing.ms for row in found.rows}, rounds=3)
    print(
        "\n".join(" | ".join(row) for table in why.tables() for row in (table.head, *table.rows)),
        *why.lines(),
        sep="\n",
    )
    assert [row.name for row in why.sums] == [*STAGES, TOGETHER, "pipeline"]
    over = {row.name: row.share for row in why.sums if abs(row.share) > 0.1}
    assert not over, over
    assert not any("not attributed" in note for note in why.notes) and len(why.inside) >= 3
    assert all(row.predicted is not None for row in why.launches), "a launch whose work nobody declared"
    assert 2e-7 < why.first < 2e-5 and 0 <= why.next < 5e-6


@alone
def test_a_launch_that_is_at_its_roof_is_predicted(device):
    """A sum that fills the memory's way: the model of a stream holds, and events and trace agree on its time."""
    x, y = torch.randn(2, 1 << 26, device=DEVICE)

    def add():
        return torch.add(x, y)

    add()
    (launched,) = by_place(traced({"add": add})["add"])
    work = LaunchWork(launched.kernel, read=8 * x.numel(), written=4 * x.numel())
    made = predict(work, device, "bfloat16", launch=1e-6)
    assert made.resource == "DRAM"
    assert 0.7 < made.seconds / statistics.median(launched.seconds) < 1.15
    queued = statistics.median(timers.queued_samples(add))
    assert queued * 1e-3 == pytest.approx(statistics.median(launched.seconds), rel=0.1)
