"""`tilefold kv-memory`: figures that follow from the lengths, its files, refusals; and the page that shows it."""

import json
import re
from pathlib import Path

import pytest
import torch

from cases.cli import command, refused
from tilefold.bench.decode.kv_memory import FILLED, MODELS, Workload, layouts_of, paging_gains
from tilefold.errors import ValueRangeError

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "explanation" / "paged_cache.md"
RECORD = DOCS / "performance" / "paging.md"
SMALL = ("--layers", 2, "--kv-heads", 3, "--dim", 8, "--dim-v", 4, "--max-tokens", 100)


run = command("kv-memory")


def figures(*arguments):
    result = run(*arguments, "--json")
    return json.loads(result.output)


def test_figures_by_hand(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("# tokens\n10\n\n17\n1\n")
    row = 2 * 3 * 12 * 2
    found = figures(*SMALL, "--lengths", path, "--page-sizes", "1,16", "--budget", 45 * row / 2**30)
    assert (found["bytes_per_token"], found["sequences"], found["tokens"], found["longest"]) == (row, 3, 28, 17)
    contiguous, ones, sixteens = found["layouts"]
    assert (contiguous["bytes_allocated"], contiguous["bytes_used"]) == (300 * row, 28 * row)
    assert (contiguous["concurrent"], contiguous["bytes_wasted"]) == (0, 272 * row)
    assert (ones["bytes_allocated"], ones["bytes_wasted"]) == (28 * row, 0)
    assert ones["concurrent"] == 4  # 10 + 17 + 1 + 10 = 38 of 45
    assert (sixteens["bytes_allocated"], sixteens["bytes_wasted"]) == (64 * row, 36 * row)
    assert sixteens["concurrent"] == 1  # two pages: the second sequence needs two


def test_the_unused_pool_is_no_waste(tmp_path):
    """Used, wasted and unused bytes are the budget; what one sequence more would not fit into is unused."""
    path = tmp_path / "lengths.txt"
    path.write_text("10\n17\n1\n")
    row = 2 * 3 * 12 * 2
    found = figures(*SMALL, "--lengths", path, "--page-sizes", "1,16,64", "--budget", 230 * row / 2**30)
    pools = [tuple(each[f"pool_{what}"] // row for what in ("used", "wasted", "unused")) for each in found["layouts"]]
    # Two of 100 rows; 24 sequences of 10, 17, 1; 14 pages of 16, of which these take 1, 2, 1; three pages of 64.
    assert [each["concurrent"] for each in found["layouts"]] == [2, 24, 10, 3]
    assert pools == [(27, 173, 30), (8 * 28, 0, 6), (94, 130 - 94 + 78, 230 - 208), (28, 164, 38)]
    assert all(sum(pool) == 230 for pool in pools)
    shared = layouts_of(Workload((20, 30, 10), 64, shared=18), 2, (1, 8), 121)
    for each in shared:
        assert each.pool_used + each.pool_wasted + each.pool_unused == 121
    assert shared[1].pool_unused == 1 and shared[1].pool_wasted == 0


@pytest.mark.parametrize(("most", "size"), [(100, 16), (100, 1), (96, 16), (8192, 256), (10, 64), (64, 64)])
def test_when_paging_helps_is_what_the_allocator_finds(most, size):
    """By how many sequences of one length fit in memory of which every layout fills all but one sequence's."""
    gains, until = paging_gains(most, size)
    budget = 60 * most * (1 if size < most else size)
    for share, gain in zip(FILLED, gains, strict=True):
        length = -(-most * share // 100)
        contiguous, pages = layouts_of(Workload((length,), most), 1, (size,), budget)
        assert pages.concurrent == int(budget / most * gain + 1e-9)
        assert contiguous.concurrent == budget // most
    for length in (until, until + 1):
        if 1 <= length <= most:
            (_, pages) = layouts_of(Workload((length,), most), 1, (size,), budget)
            assert (pages.bytes_allocated < most) == (length <= until)


@pytest.mark.parametrize(("dtype", "kind"), [("e4m3", "float8_e4m3fn"), ("INT8", "int8")])
def test_a_cache_in_8_bits(tmp_path, dtype, kind):
    """Half the bytes a token, and two factors of 4 bytes a KV head and layer, which the budget has to hold, too."""
    path = tmp_path / "lengths.txt"
    path.write_text("10\n")
    row, factors = 2 * 3 * 12, 2 * 3 * 8
    given = (*SMALL, "--lengths", path, "--page-sizes", "1", "--dtype", dtype)
    room = ("--budget", (40 * row + factors) / 2**30)
    found = figures(*given, *room)
    assert (found["dtype"], found["bytes_per_token"], found["bytes_of_factors"]) == (kind, row, factors)
    assert found["layouts"][1]["concurrent"] == 4
    assert figures(*given, "--budget", 40 * row / 2**30)["layouts"][1]["concurrent"] == 3
    assert figures(*given[:-1], "bf16", *room)["bytes_of_factors"] == 0
    assert f"{kind}: 72 B a token, and 48 B of factors" in run(*given, *room).output


def test_long_figures_fit():
    run("--model llama-3.1-70b --requests 20 --budget 100 --max-tokens 131072 --page-sizes 16,1024")


def test_a_shared_prefix_is_there_once():
    work = Workload((20, 30, 10), 64, shared=18)
    (_, ones, eights) = layouts_of(work, 1, (1, 8), 60)
    assert ones.bytes_allocated == ones.bytes_used == 18 + 2 + 12
    # three shared pages, of which 20 and 30 tokens copy the last; the third sequence shares two
    assert eights.bytes_allocated == 8 * (2 + 1 + 2)
    assert eights.bytes_used == 16 + 4 + 14
    assert ones.concurrent == 9  # 18 for the prefix, three times 2 + 12 + 0: all 60
    with pytest.raises(
        ValueRangeError, match="--shared-prefix must be less than the longest sequence, 30 tokens, got 30"
    ):
        layouts_of(Workload((20, 30), 64, shared=30), 1, (1,), 60)


def test_drawn_lengths_are_the_same_for_the_same_seed():
    drawn = [figures("--model", "Qwen2.5-7B", "--requests", 40, "--seed", seed, "--budget", 1) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0]["bytes_per_token"] == 57344 == MODELS["qwen2.5-7b"].row_bytes(2)
    work = Workload.drawn(4000, 512, 256, 0.8, 100_000, 0)
    assert sorted(work.lengths)[2000] == pytest.approx(512 + 256, rel=0.2)
    assert max(Workload.drawn(100, 512, 256, 2.0, 600, 0).lengths) == 600
    paged = {each["page_size"]: each for each in drawn[0]["layouts"]}
    assert list(paged) == [0, 1, 16, 64, 256]
    wasted = [paged[size]["bytes_wasted"] for size in (1, 16, 64, 256)]
    assert wasted == sorted(set(wasted)) and wasted[0] == 0
    assert paged[1]["concurrent"] >= paged[16]["concurrent"] >= paged[256]["concurrent"] > paged[0]["concurrent"]


@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_plot(tmp_path, suffix, begins):
    pytest.importorskip("matplotlib", reason="the plot needs the plots extra")
    path = tmp_path / f"memory.{suffix}"
    result = run(*SMALL, "--requests", 5, "--prompt", 20, "--output", 10, "--budget", 0.001, "--plot", path)
    assert "wrote" in result.output
    assert path.read_bytes().startswith(begins)


def test_refusals(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("10\n101\n")
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    refused(
        run,
        ((), "--layers must be given, or --model: one of llama-2-7b"),
        ("--layers 2 --dim 8", "--kv-heads must be given"),
        ("--model gpt", "--model must be one of llama-2-7b, llama-3.1-8b"),
        ("--model qwen2.5-7b --dim 8", "--dim does not go with --model"),
        ((*SMALL[2:], "--layers 0"), "--layers must be at least 1, got 0"),
        ((*SMALL, "--page-sizes 16,0"), "--page-sizes must be integers of at least 1, comma-separated, got '16,0'"),
        ((*SMALL, "--page-sizes x"), "got 'x'"),
        ((*SMALL, "--dtype int4"), "dtype must be bf16, fp16, fp32, e4m3 or int8"),
        ((*SMALL, "--plot memory.jpg"), "--plot must end with .png or .svg, got 'memory.jpg'"),
        ((*SMALL, "--plot", tmp_path / "no" / "memory.png"), "--plot must be a file that can be written"),
        ((*SMALL, "--lengths", path), "line 2: expected a length from 1 to 100 (--max-tokens), got '101'"),
        ((*SMALL, "--lengths", empty), "--lengths must hold at least one length"),
        ((*SMALL, "--lengths", tmp_path), "--lengths must be a text file that can be read"),
        ((*SMALL, "--shared-prefix 100"), "--shared-prefix must be less than the longest sequence"),
        ((*SMALL, "--budget 10000"), "pages of 1 tokens are more than the 16777216 that are simulated"),
    )


def test_the_page_shows_what_is_printed():
    ((command, shown),) = re.findall(r"```console\n\$ tilefold kv-memory (.*)\n((?:.*\n)*?)```", RECORD.read_text())
    result = run(*command.split())
    assert [line.rstrip() for line in result.output.splitlines()] == shown.splitlines()


def test_examples_of_the_page(device):
    names = {}
    for example in PAGE.read_text().split("```python\n")[1:]:
        code = example.split("```")[0].replace('"cuda"', f'"{device.type}"')
        if "CUDAGraph" in code and not torch.cuda.is_available():
            continue
        exec(code, names)
    assert names["moved"] > 0
