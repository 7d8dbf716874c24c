"""Every planted fault is beyond a limit, in every dtype; what is right is not, nor is what plain PyTorch computes."""

from pathlib import Path

import pytest
import torch

from planted import DTYPES, FAMILIES, strain
from tilefold import reference

pytestmark = pytest.mark.no_poison  # no kernel runs
DOCUMENT = Path(__file__).parents[3] / "docs/performance/limits.md"


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


def test_the_document_shows_every_fault() -> None:
    """docs/performance/limits.md holds what `python tests/planted.py` prints; the figures may differ in their last digit."""
    rows = [line.split("|")[1:3] for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    shown = [[cell.strip() for cell in row] for row in rows]
    wanted = [[name, title] for name, family in FAMILIES.items() for title in family.faults]
    assert [row for row in shown if row[0] in FAMILIES] == wanted
    assert len(wanted) >= 40
