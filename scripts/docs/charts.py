"""Charts of benchmarks/results for the README and the docs: dense forward and backward, block-sparse, beside other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bars import Bar, bars, read_rows
from svg import EDGE, OTHERS, OURS, svg, text

from tilefold.plan import AttentionProblem, device_named
from tilefold.plan.backward.attention_backward import plan_attention_backward

__all__ = ["Bars", "backward", "block_sparse", "forward", "newest", "speed"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Bars:
    """A group of the chart: one case of one family, and who is shown: (name in the results, name in the chart)."""

    title: str
    family: str
    case: str
    shown: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Gradients:
    """A group of dense gradients on an H200: of one case of backward_versions.jsonl, (B, N, heads, KV heads, D, causal)."""

    title: str
    case: tuple[Any, ...]


FORWARD = (("tilefold", "tilefold"), ("fa4", "FA4"), ("cudnn", "cuDNN"), ("flash", "FA2"))
CHART: tuple[Bars | Gradients, ...] = (
    Bars("Forward, head dim 128, causal", "dense", "d128_h16_n16384x1_causal", FORWARD),
    Bars("Forward, head dim 64, causal", "dense", "d64_h32_n16384x1_causal", FORWARD),
    Gradients("Backward, head dim 128, causal", (1, 16384, 16, 16, 128, True)),
    Gradients("Backward, head dim 64, causal", (1, 16384, 32, 32, 64, True)),
    Bars(
        "Block-sparse forward, 80 % left out",
        "sparse",
        "d128_h12_n23296x1_b64_random_s80",
        (("tilefold", "tilefold"), ("bsa", "cuDNN BSA"), ("tk", "ThunderKittens"), ("fa4", "FA4")),
    ),
)


def newest(group: Bars, results: Path = RESULTS) -> tuple[dict[str, float], dict[str, Any]]:
    """TFLOP/s of everybody in a group, of the newest run in which all of them were measured, and what that run says of itself.

    ValueError: there is no such run."""
    runs: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in read_rows(results / f"{group.family}.jsonl"):
        if row["case"] == group.case and row["status"] == "ok":
            runs.setdefault((row["date"], row["commit"], row["device"]), {})[row["implementation"]] = row
    whole = [run for run in sorted(runs) if all(name in runs[run] for name, _ in group.shown)]
    if not whole:
        raise ValueError(f"{results} has no run of {group.case} with {', '.join(name for name, _ in group.shown)}")
    rows = runs[whole[-1]]
    return {name: rows[name]["tflops"] for name, _ in group.shown}, rows[group.shown[0][0]]


def measured(group: Bars | Gradients, results: Path = RESULTS) -> tuple[dict[str, float], dict[str, Any]]:
    """TFLOP/s of a group by the names in the chart, and a row of its run."""
    if isinstance(group, Bars):
        rates, row = newest(group, results)
        return {said: rates[name] for name, said in group.shown}, row
    rows = read_rows(results / "backward_versions.jsonl")
    mine = [row for row in rows if row["device"] == "NVIDIA H200" and row["case"] == list(group.case)]
    return gradients(group.case, mine, {"FA4 det.": "FA4 deterministic", "FA4 \N{DAGGER}": "FA4"}), mine[0]


def rated(rates: dict[str, float]) -> list[Bar]:
    """A bar for each of a group."""
    return [Bar(name, rate, f"{rate:.0f}", OURS if name == "tilefold" else OTHERS) for name, rate in rates.items()]


def speed(results: Path = RESULTS) -> str:
    """Bars of TFLOP/s, a group a case; the longest bar of all is as long as there is room."""
    found = [(group.title, *measured(group, results)) for group in CHART]
    groups = [(title, rated(rates)) for title, rates, _ in found]
    days, devices = (sorted({row[key][:size] for *_, row in found}) for key, size in (("date", 10), ("device", 40)))
    below = (
        f"{', '.join(devices)}, bfloat16; {', '.join(days)}.\n16384 tokens; sparse: 23296.\n"
        "\N{DAGGER} non-deterministic; tilefold is deterministic."
    )
    return bars("Attention, TFLOP/s: longer is faster", groups, below)


# --- lines over lengths or sparsities ---------------------------------------------------------------------------------------

# name in the results: (name in the chart, its line): dashes and marks tell lines apart without colours
LINES = {
    "tilefold": ("tilefold", OURS, ""),
    "fa4": ("FA4", EDGE, ""),
    "cudnn": ("cuDNN", OTHERS, ""),
    "flash": ("FA2", OTHERS, "2 4"),
    "bsa": ("cuDNN BSA", OTHERS, ""),
    "tk": ("ThunderKittens", OTHERS, "2 4"),
}
Points = dict[str, list[tuple[float, float]]]  # of each line: (place from 0 to 1, value)


def panel(x: float, y: float, title: str, points: Points, most: float, ticks: Sequence[tuple[float, str]]) -> list[str]:
    """One diagram, 170 wide and 128 high, of values from 0 to `most`, whose lines have marks where something was measured."""
    wide, high = 170.0, 128.0
    parts = [text(x, y - 8, title, 13, weight="600")]
    for value in range(0, int(most) + 1, 200):
        at = y + high * (1 - value / most)
        parts.append(f'<path d="M{x:g} {at:g}h{wide:g}" stroke="currentColor" stroke-opacity="0.25"/>')
        parts.append(text(x - 4, at + 4, str(value), 12, "end"))
    for place, said in ticks:
        parts.append(text(x + wide * place, y + high + 16, said, 12, "end" if place == 1 else "middle"))
    for name in reversed(points):
        _, fill, dash = LINES[name]
        marks = [(x + wide * place, y + high * (1 - value / most)) for place, value in points[name]]
        line = "L".join(f"{a:.1f} {b:.1f}" for a, b in marks)
        width = 2.6 if name == "tilefold" else 1.8
        parts.append(
            f'<path d="M{line}" fill="none" stroke="{fill}" stroke-width="{width}" stroke-dasharray="{dash}"/>'
        )
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{2.8 if name == "tilefold" else 2}" fill="{fill}"/>'
            for a, b in marks
        ]
    return parts


def legend(x: float, y: float, names: Sequence[str]) -> list[str]:
    """What each line is."""
    parts = []
    for name in names:
        said, fill, dash = LINES[name]
        parts.append(f'<path d="M{x:g} {y - 4:g}h26" stroke="{fill}" stroke-width="2.6" stroke-dasharray="{dash}"/>')
        parts.append(text(x + 31, y, said, 13))
        x += 48 + 7.2 * len(said)
    return parts


def diagrams(
    title: str, groups: Sequence[tuple[str, dict[float, Bars]]], ticks: Sequence[tuple[float, str]], what: str
) -> str:
    """Panels of two a row; of each its title and the groups by place, whose cases one run measured."""
    found = [(name, {place: newest(group) for place, group in places.items()}) for name, places in groups]
    most = 100.0 * (
        1 + max(rate for _, places in found for rates, _ in places.values() for rate in rates.values()) // 100
    )
    names = [name for name, _ in next(iter(groups[0][1].values())).shown]
    parts = [text(12, 26, title, 16, weight="600"), *legend(12, 50, names)]
    told = []
    for turn, (name, places) in enumerate(found):
        points = {one: [(place, rates[one]) for place, (rates, _) in places.items()] for one in names}
        parts += panel(40 + turn % 2 * 222, 84 + turn // 2 * 182, name, points, most, ticks)
        told.append(
            f"{name}: "
            + "; ".join(f"{LINES[one][0]} {', '.join(f'{value:.0f}' for _, value in points[one])}" for one in names)
        )
    below = 84 + (len(found) + 1) // 2 * 182
    rows = [row for _, places in found for _, row in places.values()]
    days = ", ".join(sorted({row["date"][:10] for row in rows}))
    parts.append(
        text(12, below - 12, f"{what} {', '.join(sorted({row['device'] for row in rows}))}, bfloat16; {days}.", 12)
    )
    return svg(444, below, title, parts, ". ".join(told))


LENGTHS = {
    0.0: "n512x32",
    1 / 7: "n1024x16",
    2 / 7: "n2048x8",
    3 / 7: "n4096x4",
    4 / 7: "n8192x2",
    5 / 7: "n16384x1",
    1.0: "n65536x1",
}


def forward() -> str:
    """Dense forward attention over the length of a sequence."""
    groups = [
        (
            f"D={dim}, {said}",
            {place: Bars("", "dense", f"d{dim}_h{heads}_{length}{mask}", FORWARD) for place, length in LENGTHS.items()},
        )
        for dim, heads in ((128, 16), (64, 32))
        for said, mask in (("causal", "_causal"), ("full", ""))
    ]
    ticks = [(0.0, "512"), (3 / 7, "4096"), (1.0, "65536")]
    return diagrams("Dense forward, TFLOP/s over the length", groups, ticks, "16384 tokens, then 65536.")


def block_sparse() -> str:
    """Block-sparse attention over the share of blocks that is left out."""
    peers = (("tilefold", ""), ("bsa", ""), ("tk", ""))
    groups = [
        (said, {place: Bars("", "sparse", f"d128_h12_n23296x1_b64_random_s{left}{way}", peers) for place, left in
                ((0.0, "50"), (0.25, "65.1"), (0.5, "80"), (0.75, "90"), (1.0, "99"))})
        for said, way in (("forward", ""), ("backward", "_backward"))
    ]  # fmt: skip
    ticks = [(0.0, "50 %"), (0.25, "65"), (0.5, "80"), (0.75, "90"), (1.0, "99 %")]
    return diagrams("Block-sparse, TFLOP/s over what is left out", groups, ticks, "D=128, blocks of 64, 23296 tokens.")


# --- gradients --------------------------------------------------------------------------------------------------------------

# (B, N, heads, KV heads, D, causal) of backward_versions.jsonl
GRADIENTS = (
    ("D=128, causal, 16384 tokens", [1, 16384, 16, 16, 128, True]),
    ("D=128, full, 16384 tokens", [1, 16384, 16, 16, 128, False]),
    ("D=64, causal, 16384 tokens", [1, 16384, 32, 32, 64, True]),
    ("D=64, full, 16384 tokens", [1, 16384, 32, 32, 64, False]),
)
VERSIONS = {"attention_backward_hopper": "dS kept", "attention_backward_reduce": "added in order"}  # of kernels planned


def planned(case: Sequence[Any], device: str) -> str:
    """The version that a call takes without options."""
    batch, length, heads, kv_heads, dim, causal = case
    problem = AttentionProblem(batch, length, length, heads, kv_heads, dim, dim, causal=causal)
    return VERSIONS[plan_attention_backward(problem, device_named(device.lower())).kernel]


def gradients(case: Sequence[Any], rows: Sequence[dict[str, Any]], peers: dict[str, str]) -> dict[str, float]:
    """TFLOP/s of a case: of the version that a call takes, then of the peers, by the names in the chart."""
    took = {row["version"]: row["ms"] for row in rows}
    batch, length, heads, _, dim, causal = case
    work = 10 * batch * length**2 * heads * dim / (2 if causal else 1) * 1e-9
    names = {"tilefold": planned(case, rows[0]["device"].removeprefix("NVIDIA ").split()[0]), **peers}
    return {name: work / took[version] for name, version in names.items()}


def backward(results: Path = RESULTS) -> str:
    """Dense gradients beside FlashAttention-4, deterministic and not, on each device that was measured."""
    rows, groups = read_rows(results / "backward_versions.jsonl"), []
    for device in sorted({row["device"] for row in rows}, reverse=True):
        for title, case in GRADIENTS:
            mine = [row for row in rows if row["device"] == device and row["case"] == case]
            rates = gradients(case, mine, {"FA4 deterministic": "FA4 deterministic", "FA4 \N{DAGGER}": "FA4"})
            groups.append((f"{device.removeprefix('NVIDIA ').split()[0]}, {title}", rated(rates)))
    days = ", ".join(sorted({row["date"] for row in rows}))
    return bars(
        "Dense gradients, TFLOP/s: longer is faster", groups, f"bfloat16; {days}. \N{DAGGER} non-deterministic."
    )
