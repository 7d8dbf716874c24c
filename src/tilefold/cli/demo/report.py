"""Everything that the demo found, as one record; the terminal, the page and the picture are three views of it."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import tilefold
from tilefold.cli.demo.judge import LayerError, Ranking
from tilefold.cli.demo.options import Check, Stage
from tilefold.cli.demo.sentences import Sentence
from tilefold.ops.device import interpreting
from tilefold.ops.environment import triton_version
from tilefold.plan import AttentionPlan, TorchPlan
from tilefold.reference import Comparison


@dataclass(frozen=True, slots=True)
class Variant:
    """The model run one way. function: tilefold's public name; note: how the batch lies; plans: one per batch;
    embeddings: against fp64; difference: largest element's difference from eager PyTorch's embeddings."""

    function: str
    note: str
    plans: tuple[AttentionPlan | TorchPlan, ...]
    layers: tuple[LayerError, ...]
    embeddings: Comparison
    difference: float
    similarity_difference: float
    ranked_the_same: bool


@dataclass(frozen=True, slots=True)
class Head:
    """One head's attention over one sentence: probabilities [tokens, tokens], a row per query token."""

    layer: int
    head: int
    sentence: str
    tokens: tuple[str, ...]
    probabilities: torch.Tensor


@dataclass(frozen=True, slots=True)
class Report:
    """The whole run. ranking: PyTorch's, which every variant must equal; lengths: tokens of every sentence."""

    environment: tuple[tuple[str, str], ...]
    sentences: tuple[Sentence, ...]
    lengths: tuple[int, ...]
    variants: tuple[Variant, ...]
    ranking: Ranking
    head: Head
    checks: tuple[Check, ...]
    stages: tuple[Stage, ...]

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)


def environment(device: str) -> tuple[tuple[str, str], ...]:
    """Versions and the device, as (name, value)."""
    import transformers

    how = "Triton's interpreter" if interpreting() else "plain torch"
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {how}, {torch.get_num_threads()} threads"
    return (
        ("device", where),
        ("tilefold", tilefold.__version__),
        ("torch", torch.__version__),
        ("triton", triton_version() or "not installed"),
        ("transformers", transformers.__version__),
        ("python", platform.python_version()),
        ("model", "all-MiniLM-L6-v2: 6 layers, 12 heads of dim 32, 22.7 M weights, fp32"),
    )


def links(head: Head, count: int) -> list[tuple[str, str, float]]:
    """The strongest (query, key, probability) between different words, marks and punctuation left aside."""
    p, words = head.probabilities, head.tokens
    found: list[tuple[str, str, float]] = []
    for place in p.flatten().argsort(descending=True).tolist():
        i, j = divmod(place, len(words))
        if words[i] != words[j] and words[i].isalpha() and words[j].isalpha():
            found.append((words[i], words[j], float(p[i, j])))
        if len(found) == count:
            break
    return found


def shape_of(plans: Sequence[AttentionPlan | TorchPlan]) -> str:
    """The batches of a variant in words: '16 x 23, 1 x 88 tokens'."""
    return ", ".join(f"{plan.problem.batch} x {plan.problem.seq_q}" for plan in plans) + " tokens"
