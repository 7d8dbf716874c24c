"""Every planted fault is beyond a limit, in every dtype; what is right is not, nor is what plain PyTorch computes."""

import csv
from pathlib import Path

import pytest
import torch

from planted import DTYPES, FAMILIES, strain
from tilefold import reference

pytestmark = pytest.mark.no_poison  # no kernel runs
ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs/performance/limits.md"
RESULTS = ROOT / "benchmarks/results/planted_faults.csv"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_fault_is_found(name: str, dtype: str) -> None:
    family = FAMILIES[name]
    inputs, judge = family.judged(DTYPES[dtype])
    exact = judge(family.right(inputs))
    assert all(v.ok for v in exact.values()), exact
    found = {title: judge(fault(inputs)) for title, fault in family.faults.items()}
    missed = {title: verdicts for title, verdicts in found.items() if all(v.ok for v in verdicts.values())}
    assert not missed, missed


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_pytorch_is_within_the_limits(dtype: str) -> None:
    """A witness: products and attention by PyTorch's own kernels in the dtype, whatever sums they choose here."""
    kind = DTYPES[dtype]
    inputs, _ = FAMILIES["products"].judged(kind)
    for a, b in ((inputs.a, inputs.b), (inputs.dout, inputs.b.mT), (inputs.a.mT, inputs.dout)):
        exact, plain = (reference.matmul(a, b, dtype=d) for d in (torch.float64, kind))
        verdict = reference.compare(a @ b, exact, plain)
        assert verdict.ok, verdict
    inputs, judge = FAMILIES["attention"].judged(kind)
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    found = judge({"out": out.transpose(1, 2)})
    assert strain(found) <= 1, found
    inputs, judge = FAMILIES["convolution"].judged(kind)
    found = judge({"out": torch.nn.functional.conv2d(inputs.x, inputs.w, padding=1, groups=2)})
    assert strain(found) <= 1, found


def test_the_results_have_every_fault() -> None:
    """planted_faults.csv is what `python tests/planted.py` prints; the figures may differ in their last digit."""
    with RESULTS.open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["family", "fault", *DTYPES]
    wanted = [[name, title] for name, family in FAMILIES.items() for title in family.faults]
    assert [row[:2] for row in rows] == wanted
    assert len(wanted) >= 40
    assert all(float(figure) > 1 for row in rows for figure in row[2:])


def test_the_document_shows_the_faults_nearest_to_the_limit() -> None:
    with RESULTS.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    wanted = []
    for name in FAMILIES:
        family = [row for row in rows if row[0] == name]
        _, *nearest = min(family, key=lambda row: float(row[-1]))
        wanted.append([name, str(len(family)), *nearest])
    text = DOCUMENT.read_text()
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    assert [line for line in lines if line[0] in FAMILIES] == wanted
    assert f"Each of {len(rows)} faults" in text
