"""Runs compared: intervals of ratios by order statistics, verdicts, what is missing, what differs, and the commands for it."""

import itertools
import json
import math
import random

import pytest

from cases.cli import command, refused
from tilefold.bench.records.changes import change_lines, change_markdown, change_table, compare, ratio_interval
from tilefold.bench.records.runs import latest, read_measured, read_rows
from tilefold.errors import ValueRangeError

OLD = (1.00, 1.01, 0.99, 1.02, 1.00)


run = command("bench")


def row(case="n1024", times=OLD, implementation="tilefold", **more):
    """A record with made-up rounds."""
    return {
        "commit": "aaaaaaa11111",
        "device": "Made-up GPU",
        "date": "2026-01-01T00:00:00+00:00",
        "family": "dense",
        "case": case,
        "direction": "forward",
        "dtype": "bfloat16",
        "implementation": implementation,
        "ours": implementation == "tilefold",
        "status": "ok" if times else "failed",
        "note": "",
        "rounds_ms": {"events": list(times)} if times else {},
        "torch": "2.11.0",
        "triton": "3.6.0",
        **more,
    }


def compared(old, new, noise=0.02):
    return compare(latest(read_measured(old)), latest(read_measured(new)), noise)


def scaled(factor):
    return tuple(factor * each for each in OLD)


# ---------------------------------------------------------------- intervals


def test_the_coverage_is_the_exact_one():
    """Counted: in how many of all orders of old and new samples the interval would hold 1, were both of one distribution."""
    for n, m in ((1, 3), (2, 2), (3, 3), (3, 5), (4, 4)):
        held = 0
        orders = list(itertools.combinations(range(n + m), n))
        for mine in orders:
            old = [2.0 + place for place in mine]
            new = [2.0 + place for place in range(n + m) if place not in mine]
            found = ratio_interval(old, new)
            held += found.low <= 1 <= found.high
        assert found.coverage == pytest.approx(held / len(orders)), (n, m)


def test_intervals_of_samples_hold_the_truth_as_often_as_they_say():
    draw_from = random.Random(0)
    held = 0
    for _ in range(400):
        old = [math.exp(draw_from.gauss(0, 0.02)) for _ in range(7)]
        new = [1.1 * math.exp(draw_from.gauss(0, 0.02)) for _ in range(7)]
        found = ratio_interval(old, new)
        held += found.low <= 1.1 <= found.high
    assert found.coverage == pytest.approx(0.962, abs=1e-3)
    assert 0.92 <= held / 400 <= 0.98


def test_many_rounds_take_the_normal_approximation_and_one_says_nothing():
    many = [1.0 + 0.001 * each for each in range(60)]
    found = ratio_interval(many, many)
    assert found.low < 1 < found.high and found.high - found.low < 0.03 and found.coverage == 0.95
    assert ratio_interval([1.0], [2.0]).coverage == 0.0


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "same"), (1.2, "slower"), (0.8, "faster"), (1.03, "unclear")])
def test_verdicts_follow_the_whole_interval(factor, verdict):
    (change,) = compared([row()], [row(times=scaled(factor))]).changes
    assert change.verdict == verdict
    assert change.ratio == pytest.approx(factor)
    assert change.interval.low <= change.ratio <= change.interval.high
    if verdict == "unclear":
        assert compared([row()], [row(times=scaled(factor))], noise=0.1).changes[0].verdict == "same"


def test_only_what_is_surely_beyond_the_limit_is_a_regression():
    found = compared(
        [row(), row(implementation="cudnn")], [row(times=scaled(1.2)), row(times=scaled(1.5), implementation="cudnn")]
    )
    assert [one.key.implementation for one in found.regressions(0.1)] == ["tilefold"]
    assert found.regressions(0.19) == [] and found.regressions(None) == []
    assert found.control == (pytest.approx(1.5), 1)
    assert "the other libraries took 1.500 times as long as in the old run (geometric mean of 1)" in change_lines(found)
    few = compared([row(times=(1.0, 1.0))], [row(times=(2.0, 2.0))])
    assert few.changes[0].verdict == "unclear" and few.regressions(0.1) == []
    assert any("too few rounds to conclude anything" in line for line in change_lines(few))


@pytest.mark.parametrize("status", ["WRONG", "failed", "refused", "no memory"])
def test_what_was_right_and_is_not_any_more_is_a_regression(status):
    bad = row(times=(), status=status, note="why")
    found = compared([row()], [bad])
    assert [one.verdict for one in found.regressions()] == ["worse"]
    assert f"dense n1024 tilefold: ok -> {status}: why" in change_lines(found)
    assert change_table(found).rows[0][-1] == "WORSE"
    assert compared([bad], [row()]).changes[0].verdict == "fixed"
    assert compared([bad], [bad]).changes == ()


def test_what_is_missing_on_a_side_and_what_differs_is_said():
    old = [row(), row("gone"), row(implementation="cudnn", version="1")]
    new = [
        row("added"),
        *(
            one | {"device": "Other GPU", "torch": "2.12.0"}
            for one in (row(), row(implementation="cudnn", version="2"))
        ),
    ]
    found = compared(old, new)
    assert found.other_device
    assert found.differences == (
        "the DEVICE is another one: old Made-up GPU, new Other GPU",
        "torch is another one: old 2.11.0, new 2.12.0",
        "cudnn is another version: old 1, new 2",
    )
    lines = change_lines(found)
    assert "only in the old run (1): dense gone tilefold" in lines
    assert "only in the new run (1): dense added tilefold" in lines
    assert "**Not the same setting**: the DEVICE is another one" in change_markdown(found)
    clocks = [row(power={"sm_mhz": {"least": 1, "median": mhz, "most": 2000}}) for mhz in (1980, 1500)]
    assert compared(clocks[:1], clocks[1:]).differences == (
        "the SM clock was 1980 MHz in the old run and 1500 MHz in the new one",
    )
    assert compared([row()], [row(times=OLD[:3])]).differences == ("rounds are not as many: old 5, new 3",)
    assert compared([row(flops=36)], [row(flops=37)]).differences == ("n1024 is other work: old 36 FLOPs, new 37",)
    assert compared([row(flops=36)], [row()]).differences == ()


# ---------------------------------------------------------------- files of any age


def test_records_of_before_rounds_were_kept_are_read(tmp_path):
    """Three rounds come back from their percentiles exactly; more of them stay a rough figure."""
    plain = {key: value for key, value in row().items() if key not in ("rounds_ms", "ours")}
    three = plain | {"ms": 2.0, "ms_p20": 1.4, "ms_p80": 2.6, "samples": 3, "graph_us": None}
    (one,) = read_measured([three])
    assert one.times["events"] == pytest.approx((1.0, 2.0, 3.0)) and not one.rough and one.ours
    (five,) = read_measured([three | {"samples": 5}])
    assert five.times["events"] == pytest.approx((1.4, 2.0, 2.6)) and five.rough
    (family,) = read_measured(
        [plain | {"events_us": 50.0, "events_us_p20": 49.0, "events_us_p80": 52.0, "graph_us": 20.0}]
    )
    assert family.times["events"] == pytest.approx((0.049, 0.050, 0.052)) and family.ms("graph") == pytest.approx(0.02)
    rough = compare(latest([five]), latest(read_measured([row(times=(9.0,) * 5)])))
    assert rough.changes[0].rough and rough.regressions(0.1) == []
    assert any(line.startswith("~: one of the records") for line in change_lines(rough))
    video = plain | {
        "ms": {"fine": 1.0, "dense cuDNN": 3.0},
        "spread": {"fine": (0.9, 1.1)},
        "errors": {"fine": {"ok": True}},
    }
    both = [video, video | {"rounds_ms": {"fine": [1.0, 1.1], "dense cuDNN": [3.0]}}]
    assert [(m.key.implementation, m.ours, m.rough, m.times["events"]) for m in read_measured(both)] == [
        ("fine", True, True, (0.9, 1.0, 1.1)),
        ("dense cuDNN", False, True, (3.0, 3.0, 3.0)),
        ("fine", True, False, (1.0, 1.1)),
        ("dense cuDNN", False, False, (3.0,)),
    ]


def test_a_commit_of_a_growing_file_can_be_named(tmp_path):
    file = tmp_path / "dense.jsonl"
    second = row(times=scaled(1.3), commit="bbbbbbb", date="2026-01-02T00:00:00+00:00")
    file.write_text("".join(json.dumps(one) + "\n" for one in (row(), second)))
    assert len(read_rows(file)) == len(read_rows(tmp_path)) == 2
    (newest,) = latest(read_measured(read_rows(file))).values()
    assert newest.setting["commit"] == "bbbbbbb"
    assert len(read_rows(tmp_path / "dense.jsonl@aaaa")) == 1
    for path, message in (
        (f"{file}@cccc", "no benchmark results of commit 'cccc'"),
        (tmp_path / "none", "cannot be read"),
    ):
        with pytest.raises(ValueRangeError, match=message):
            read_rows(type(tmp_path)(path))
    here = latest(read_measured([second | {"device": "Other GPU"}, row()]), "Made-up GPU")
    assert [one.setting["device"] for one in here.values()] == ["Made-up GPU"]


# ---------------------------------------------------------------- the commands


def test_the_compare_command(tmp_path):
    old, new, worse, elsewhere = (tmp_path / f"{name}.json" for name in ("old", "new", "worse", "elsewhere"))
    old.write_text(json.dumps({"rows": [row(), row("n4096")]}))
    new.write_text(json.dumps({"rows": [row(times=scaled(1.2)), row("n4096")]}))
    worse.write_text(json.dumps({"rows": [row(times=()), row("n4096")]}))
    elsewhere.write_text(json.dumps({"rows": [row(device="Other GPU")]}))
    figures, table = tmp_path / "figures.json", tmp_path / "table.md"
    result = run("compare", old, new, "--json", figures, "--markdown", table)
    assert "1.200" in result.output and "slower" in result.output and "regression" not in result.output
    assert json.loads(figures.read_text())["changes"][0]["verdict"] == "slower"
    assert "| n1024 | tilefold | events | 1.00 | 1.20 | 1.200 |" in table.read_text()
    limited = run("compare", old, new, "--fail-slower", 10, code=1)
    assert "regression: dense n1024 tilefold, events: 1.200 times as long" in limited.output
    run("compare", old, new, "--fail-slower", 19)
    run("compare", old, new, "--fail-slower", 10, "--case", "n4096")
    run("compare", old, worse, code=1)
    nothing = tmp_path / "nothing.json"
    nothing.write_text(json.dumps({"rows": [row("n99")]}))
    run("compare", old, nothing)
    run("compare", old, nothing, "--fail-slower", 10, code=1)
    other = run("compare", old, elsewhere)
    assert "NOT THE SAME SETTING: the DEVICE is another one" in other.output
    other = run("compare", old, elsewhere, "--fail-slower", 10, code=2)
    assert "--fail-slower cannot judge: the DEVICE" in other.said
    refused(
        command("bench", "compare"),
        ((old, tmp_path / "none.json"), "cannot be read as benchmark results"),
        ((old, new, "--case d96"), "no results of family None and case 'd96'"),
    )
