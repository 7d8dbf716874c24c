"""The README: short, in its order, its example runs, its links lead somewhere, its figures are those of the records."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import smoke

from cases.backward_record import NAMES, planned, rate, record

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = ["Install", "Example", "When to use it, and when not", "Hardware", "Figures", "Links"]


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The rows of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_it_is_short_and_in_its_order() -> None:
    assert len(TEXT.split()) <= 1000
    assert re.findall(r"^## (.+)$", TEXT, re.MULTILINE) == SECTIONS
    head = TEXT.split("\n## ")[0].split("\n\n")
    assert head[0] == "# tilefold"
    assert len(head[1].splitlines()) == 3  # what it is, and why
    assert head[2].startswith("<img ")
    assert len(head) == 3
    peers = ["flash-attn 2", "FlashAttention-4", "cuDNN", "FlexAttention", "FlashInfer"]
    assert [row[0].split("**")[1] for row in rows(SECTIONS[2])] == peers
    assert len(rows("Figures")) == 8


def test_its_example_runs_as_it_is() -> None:
    example = smoke.first_example(TEXT)
    assert len([line for line in example.splitlines() if line]) == 5
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch.Size([1, 256, 4, 64]) Attention plan for ")


def measured(family: str, case: str, peers: set[str]) -> dict[str, str]:
    """TFLOP/s by implementation, of the newest run of a case that has all these peers beside tilefold."""
    runs: dict[str, dict[str, str]] = {}
    for line in (ROOT / "benchmarks" / "results" / f"{family}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["case"] == case and row["status"] == "ok":
            runs.setdefault(row["date"], {})[row["implementation"]] = f"{row['tflops']:.0f}"
    return runs[max(date for date, run in runs.items() if peers <= run.keys())]


@pytest.mark.parametrize(
    ("start", "family", "case", "peers"),
    [
        ("forward, D=128, 16384 tokens, causal", "dense", "d128_h16_n16384x1_causal", "FA4 cuDNN FA2"),
        ("forward, D=64, 16384 tokens, window", "dense", "d64_h32_n16384x1_window4095_0", "FA4"),
        ("block-sparse forward", "sparse", "d128_h12_n23296x1_b64_random_s80", "BSA TK FA4"),
        ("block-sparse backward", "sparse", "d128_h12_n23296x1_b64_random_s80_backward", "BSA TK"),
    ],
)
def test_figures_are_those_of_the_results(start: str, family: str, case: str, peers: str) -> None:
    names = {"FA4": "fa4", "cuDNN": "cudnn", "FA2": "flash", "BSA": "bsa", "TK": "tk"}
    found = measured(family, case, {names[peer] for peer in peers.split()})
    (row,) = [row for row in rows("Figures") if row[0].startswith(start)]
    assert row[1] == found["tilefold"]
    assert row[2] == ", ".join(f"{peer} {found[names[peer]]}" for peer in peers.split())


@pytest.mark.parametrize(
    ("start", "record", "part", "lines"),
    [
        (
            "backward, D=128",
            "performance/attention_backward_hopper.md",
            "### Beside FlashAttention-4, det",
            ["| 128, 16 | 16384 x 1 | causal |"],
        ),
        (
            "backward, D=64",
            "performance/attention_backward_hopper.md",
            "### Beside FlashAttention-4, det",
            ["| 64, 32 | 16384 x 1 | causal |"],
        ),
        ("decoding step", "performance/decode.md", "### Prediction", ["| B=1, N=8192 |", "| B=32, N=8192 |"]),
        (
            "Qwen2-7B",
            "performance/lowbit_model.md",
            "## What it does to the speed",
            ["| bfloat16 | graph |", "| 4 bits | graph |"],
        ),
    ],
)
def test_figures_are_those_of_the_records(start: str, record: str, part: str, lines: list[str]) -> None:
    """Every number that the README shows in a row stands in the record's lines."""
    (row,) = [row for row in rows("Figures") if row[0].startswith(start)]
    text = (ROOT / "docs" / record).read_text(encoding="utf-8")
    text = text[text.index(f"\n{part}") :]
    found = [next(one for one in text.splitlines() if one.startswith(line)) for line in lines]
    figures = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)", " ".join(row[1:]))
    assert len(figures) >= 2
    known = set(re.findall(r"\d+(?:\.\d+)?", " ".join(found)))
    assert set(figures) <= known


MARKS = {"": "", "**": "the default", "*": "what deterministic=False takes"}


def test_the_table_of_gradients_is_the_results() -> None:
    """Each figure of the record's tables beside FA4, which of them plans take, and how many times as fast as FA4."""
    text = (ROOT / "docs" / "performance" / "attention_backward_hopper.md").read_text(encoding="utf-8")
    text = text.split("\n### Beside FlashAttention-4, deterministic and not\n")[1].split("\n### ")[0]
    runs = {(device, case): times for (device, _, case), times in record().items()}
    columns = ("dS kept", "added in order", "added", "FA4 deterministic", "FA4")
    shown = 0
    for name, part in zip(("H200", "H100"), text.split("\nOne H100."), strict=True):
        device = next(one for one, _ in runs if name in one)
        for line in (line for line in part.splitlines() if re.match(r"\| \d", line)):
            dims, tokens, mask, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            dim, heads, kv_heads = (int(one) for one in re.fullmatch(r"(\d+), (\d+)/?(\d+)?", dims).groups("0"))  # type: ignore[union-attr]
            length, batch = (int(one) for one in tokens.split(" x "))
            case = (batch, length, heads, kv_heads or heads, dim, mask == "causal")
            times = runs[device, case]
            default, free = (NAMES[planned(device, case, deterministic).options] for deterministic in (True, False))
            for column, cell in zip(columns, cells, strict=True):
                for version, piece in zip((column, f"{column} apart"), cell.split(", apart "), strict=False):
                    mark, figure, against = re.fullmatch(r"(\**)(\d+|-)\**(?: \((.*)x\))?", piece).groups()  # type: ignore[union-attr]
                    assert figure == (f"{rate(case, times[version]):.0f}" if version in times else "-"), (line, version)
                    wanted = "the default" if version == default else MARKS["*"] if version == free else ""
                    assert MARKS[mark] == wanted, (line, version)
                    ours = {"FA4 deterministic": default, "FA4": free}.get(version)
                    assert against == (f"{times[version] / times[ours]:.2f}" if ours and version in times else None), (
                        line,
                        version,
                    )
                    shown += 1
    assert shown > 60


def test_ranges_are_those_of_the_results() -> None:
    """What the comparison says of forward and backward, over every dense case that the newest run of a peer has."""
    runs: dict[tuple[str, str], dict[str, float]] = {}
    for line in (ROOT / "benchmarks" / "results" / "dense.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["status"] == "ok" and "H200" in row["device"]:
            runs.setdefault((row["case"], row["date"]), {})[row["implementation"]] = row["tflops"]
    said = {row[0].split("**")[1]: row[0] for row in rows(SECTIONS[2])}
    for peer, name, directions in (
        ("flash-attn 2", "flash", ("forward",)),
        ("FlashAttention-4", "fa4", ("forward", "backward")),
        ("cuDNN", "cudnn", ("forward", "backward")),
        ("FlexAttention", "flex", ("forward",)),
    ):
        for direction in directions:
            newest: dict[str, float] = {}
            for (case, _), run in sorted(runs.items(), key=lambda item: item[0][1]):
                apart = name == "cudnn" and "packed" in case
                if (
                    case.endswith("_backward") == (direction == "backward")
                    and not apart
                    and {"tilefold", name} <= run.keys()
                ):
                    newest[case] = run["tilefold"] / run[name]
            assert f"{direction} {min(newest.values()):.2f} to {max(newest.values()):.2f}" in said[peer], peer
    beside = [
        times["FA4 deterministic"] / times[NAMES[planned(device, case, True).options]]
        for (device, _, case), times in record().items()
        if {"FA4 deterministic", NAMES[planned(device, case, True).options]} <= times.keys()
    ]
    assert len(beside) > 60
    assert f"{min(beside):.2f} to {max(beside):.2f}." in section(SECTIONS[2])
    assert "never measured here" in said["FlashInfer"]
    assert not re.search(r"\d", said["FlashInfer"])
