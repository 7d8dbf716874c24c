"""What explains the stages of the video pipeline: declared work, predictions, traces cut into calls, sums. No GPU."""

from types import SimpleNamespace

import pytest

from tilefold.bench import timers
from tilefold.plan import device_named
from tilefold.plan.sparse.video import VideoShape
from tilefold.plan.sparse.video_launches import TOGETHER, LaunchWork, launch_works
from tilefold.profiling import video
from tilefold.profiling.launches import Launched, between_marks, by_place, ordered
from tilefold.profiling.predict import memory_traffic, predict
from tilefold.profiling.video import Account, explain_video, stages_inside
from tilefold.sparse import CoarseOptions

H200 = device_named("h200")
SHAPE = VideoShape(1, 12, 12, 23296, 128)
LISTED = 12 * 364 * 127


def test_what_launches_do_at_the_published_shape():
    works = launch_works(SHAPE, LISTED, 127, H200)
    names = {stage: [work.kernel for work in each] for stage, each in works.items()}
    assert names == {
        "coarse": ["gather_blocks", "gather_blocks", "coarse_forward"],
        "select": ["select"],
        "fine": ["sparse_forward_hopper"],
        "fuse": ["fuse_forward"],
        TOGETHER: ["sparse_forward_hopper"],
    }
    k, v, rows = works["coarse"]
    assert (k.what, v.what, k.read, k.written) == ("k", "v", 23296 * 12 * 256, 364 * 12 * 256)
    assert rows.flops == 3 * 2 * 128 * 12 * 23296 * 384, "364 rows are six tiles of 64"
    assert rows.exps == 2 * 12 * 23296 * 384
    assert rows.l2_bytes == 23296 * 12 * 256 + 12 * 364 * 3 * 364 * 256, (
        "every program: q, and K, V and K again to the end"
    )
    (fine,), (mixed,) = works["fine"], works[TOGETHER]
    assert fine.exps == 12 * 364 * 128 * 64 * 64, "127 blocks are taken in 64 pairs"
    assert mixed.read - fine.read == mixed.l2_bytes - fine.l2_bytes == 23296 * 12 * (256 + 2 * 2)
    assert mixed.written == fine.written


def test_launches_of_other_coarse_branches():
    small, pooled = VideoShape(1, 2, 2, 128, 16), device_named("interpreter")
    found = launch_works(small, 4, 2, pooled, "pooled")
    assert [(work.kernel, work.what) for work in found["coarse"]] == [
        ("gather_blocks", "k"), ("gather_blocks", "v"), ("gather_blocks", "q"), ("coarse_forward", ""), ("spread_blocks", ""),
    ]  # fmt: skip
    assert launch_works(small, 4, 2, pooled, "dense")["coarse"] == ()
    assert launch_works(VideoShape(1, 1, 1, 64 * 4097, 16), 4097, 1, H200)["select"] == (), "torch's kernels run there"
    assert [work.kernel for work in found[TOGETHER]] == ["sparse_forward", "fuse_forward"]


def test_a_prediction():
    work = LaunchWork("k", flops=760 * 10**9, read=427 * 10**6, l2_bytes=96 * 10**8, items=133)
    made = predict(work, H200, "bfloat16", launch=2e-6)
    assert made.uneven == pytest.approx(2 / (133 / 132)), "one SM has two of 133 pieces"
    times = dict(made.times)
    assert times == pytest.approx({"tensor pipe": 1e-3 * made.uneven, "L2 to SM": 1e-3 * made.uneven, "DRAM": 1e-4})
    assert made.seconds == pytest.approx(1e-3 * made.uneven + 2e-6)
    assert made.apart == pytest.approx(sum(times.values()) + 2e-6)
    assert made.explains(made.seconds * 1.1) and not made.explains(made.seconds * 1.12)
    assert made.explains(made.seconds / 1.09) and not made.explains(made.seconds / 1.12)
    assert made.overlap(made.seconds) == 1 and made.overlap(2 * made.apart) == 0
    alone = predict(LaunchWork("k", read=427 * 10**6), H200, "bfloat16", launch=0.0, moved=427 * 10**7)
    assert (alone.resource, alone.overlap(1.0)) == ("DRAM", None)
    assert alone.seconds == pytest.approx(1e-3)
    sorting = predict(LaunchWork("select", alu=528 * 1830, items=528), H200, "bfloat16", launch=0.0)
    assert (sorting.resource, sorting.seconds) == ("ALU pipe", pytest.approx(2e-6))


def test_what_a_cleared_cache_costs_whoever_comes_first():
    """Clearing leaves 60 of written data; a launch that brings in 72 pushes it out, the next one finds nothing to push."""
    stream, copy = LaunchWork("gather", read=71, written=1), LaunchWork("copy", read=100, written=100)
    assert list(memory_traffic([stream, stream, copy, copy], 60, 60)) == [72 + 60 - 1, 72 + 1 - 1, 200 + 1 - 60, 200]
    assert list(memory_traffic([None, stream], 60, 60)) == [0, 71], "nobody knows what an unknown launch leaves"


def ran(kernel, begin, seconds=1.0, programs=None):
    return Launched(kernel, (seconds,), programs, 128 if programs else None, 168 if programs else None, 0, begin)


def test_a_trace_is_cut_into_calls():
    marks = "void at::cuda::(anonymous namespace)::spin_kernel(long)"
    names = ["fill", marks, "a", "b", marks, "fill", marks, marks, "fill", marks, "a"]
    parts = list(between_marks([ran(name, i) for i, name in enumerate(names)]))
    assert [[each.kernel for each in part] for part in parts] == [["a", "b"], []]
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 5.0, "dur": 2.0}
    event["args"] = {"grid": [2, 3, 1], "block": [128, 1, 1]}
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 1.0, "dur": 1.0, "args": {}}
    first, second = ordered(
        {"traceEvents": [event, copy, {"ph": "X", "cat": "cuda_runtime", "name": "x", "ts": 0, "dur": 9}]}
    )
    assert (first.kernel, second.programs, second.threads) == ("Memcpy DtoD", 6, 128)
    assert second.seconds == (pytest.approx(2e-6),)


def test_launches_by_place():
    samples = [[ran("a", 0, 1.0), ran("a", 2, 5.0)], [ran("a", 9, 3.0), ran("a", 12, 7.0)], [ran("b", 20, 100.0)]]
    assert [(each.kernel, each.seconds) for each in by_place(samples)] == [("a", (1.0, 3.0)), ("a", (5.0, 7.0))]
    assert by_place([]) == ()


def test_launches_of_the_pipeline_go_to_its_stages():
    alone = {"coarse": ["g", "g", "c"], "select": ["s"], "fine": ["f"], "fuse": ["m"], TOGETHER: ["f"]}
    found, notes = stages_inside({**alone, "pipeline": ["g", "g", "c", "s", "f"]})
    assert found == [("coarse", 0, 3), ("select", 3, 4), (TOGETHER, 4, 5)] and not notes
    found, _ = stages_inside({**alone, "pipeline": ["g", "g", "c", "s", "f", "m"]})
    assert found[2:] == [("fine", 4, 5), ("fuse", 5, 6)]
    found, notes = stages_inside({**alone, "pipeline": ["g", "c", "s", "f"]})
    assert found == [("not attributed", 0, 4)] and "something else" in notes[0]


def test_an_account():
    sum_ = Account("coarse", 0.36, 0.32, 3, 0.30, 0.004)
    assert (sum_.waits, sum_.left, sum_.share) == pytest.approx((0.04, 0.016, 0.05))
    assert sum_.cells() == ("coarse", "0.3600", "0.0400", "0.3200", "3", "0.3000", "0.0040", "0.0160", "5.0")


GATHER, ROWS, SELECT, FINE, FUSE = "gather_blocks", "coarse_forward", "select", "sparse_forward_hopper", "fuse_forward"
MICROSECONDS = {
    "coarse": ((GATHER, 33), (GATHER, 19), (ROWS, 242)),
    "select": ((SELECT, 24),),
    "fine": ((FINE, 1930),),
    "fuse": ((FUSE, 58),),
    TOGETHER: ((FINE, 1970),),
    "pipeline": ((GATHER, 33), (GATHER, 19), (ROWS, 240), (SELECT, 23), (FINE, 1965)),
    "1 empty": (("nothing", 1.2),),
    "9 empty": (("nothing", 1.2),) * 9,
}


def test_the_explanation_of_an_h200(monkeypatch):
    """The times of its record, as a trace and events would give them: what is explained, what is not, and what adds up."""
    calls = {name: (lambda name=name: name) for name in MICROSECONDS if "empty" not in name}
    empty = {name: (lambda name=name: name) for name in MICROSECONDS if "empty" in name}

    def traced(calls, samples):
        launches = {
            name: [ran(kernel, i, us * 1e-6, 4368) for i, (kernel, us) in enumerate(each)]
            for name, each in MICROSECONDS.items()
        }
        return {name: (launches[name],) * samples for name in calls}

    def queued(call):
        each = MICROSECONDS[call()]
        return [1e-3 * (sum(us for _, us in each) + 2.0 + 0.8 * (len(each) - 1))]

    monkeypatch.setattr(video, "traced", traced)
    monkeypatch.setattr(timers, "queued_samples", queued)
    monkeypatch.setattr(video, "_empty_calls", lambda device: empty)
    monkeypatch.setattr(video, "load_roofs", lambda: None)
    measured = {name: queued(call)[0] + (0.03 if name == "select" else 0) for name, call in calls.items()}
    index, options = SimpleNamespace(capacity=127), {"coarse": CoarseOptions()}
    ready = SimpleNamespace(shape=SHAPE, calls=calls, listed=LISTED, index=index, options=options)
    found = explain_video(ready, H200, "cuda", measured, rounds=1)

    assert (found.first, found.next) == pytest.approx((2e-6, 0.8e-6))
    assert all(abs(row.share) < 1e-6 for row in found.sums)
    sums = {each.name: each for each in found.sums}
    assert sums["select"].waits == pytest.approx(0.03)
    assert [stage for stage, *_ in found.inside] == ["coarse", "select", TOGETHER]
    assert sum(seconds for *_, seconds in found.inside) == pytest.approx(sums["pipeline"].kernels * 1e-3)
    rows = {row.name: row for row in found.launches}
    explained = {name: row.predicted.explains(row.evidence.seconds) for name, row in rows.items()}
    assert explained == {
        "coarse: gather_blocks (k)": True,  # with what clearing the cache left to be written
        "coarse: gather_blocks (v)": True,
        "coarse: coarse_forward": False,
        "select: select": False,
        "fine: sparse_forward_hopper": True,
        "fuse: fuse_forward": False,
        f"{TOGETHER}: sparse_forward_hopper": True,
    }
    assert rows["fine: sparse_forward_hopper"].verdict.resource == "L2-to-SM path"
    assert rows["coarse: coarse_forward"].verdict.resource == "unknown"
    assert rows["coarse: coarse_forward"].inside == pytest.approx(240e-6)
    assert rows["fine: sparse_forward_hopper"].inside is None
    assert rows["select: select"].predicted.resource == "ALU pipe"
    line = rows["coarse: coarse_forward"].line()
    assert "Not explained" in line and "one after the other" in line and "overlapped" in line
    assert any("roofs are those recorded" in note for note in found.notes)
    document = found.document()
    assert document["launches"][2]["unexplained"] == pytest.approx(rows["coarse: coarse_forward"].unexplained)
    assert [len(row) for row in found.tables()[0].rows] == [len(video.LAUNCH_HEAD)] * 7
