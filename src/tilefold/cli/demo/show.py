"""The report, said once: its parts, which a terminal prints and a page holds, and its two heat maps as one picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from tilefold.bench.page import Heading, Part, Picture, Rows, Words, new_figure
from tilefold.cli.demo.judge import Check, LayerError, Ranking
from tilefold.cli.demo.sentences import Sentence
from tilefold.cli.runtime import show, write_report

MODEL = "A trained sentence encoder embeds real sentences; its attention layers run through tilefold."
LIMIT = "Limit: some of an element's standard deviations on the same q, k, v, plus its rounding; shown is the worst element."
GREY, BLUES = "#e4e4e4", "Blues"


@dataclass(frozen=True, slots=True)
class Variant:
    """The model run one way. function: tilefold's public name; note: how the batch lies; plans: one per batch."""

    function: str
    note: str
    plans: list[Any]
    layers: list[LayerError]


@dataclass(frozen=True, slots=True)
class Head:
    """One head's attention over one sentence: probabilities [tokens, tokens], a row per query token."""

    layer: int
    head: int
    sentence: str
    tokens: tuple[str, ...]
    probabilities: torch.Tensor

    def links(self, count: int) -> list[tuple[str, str, float]]:
        """The strongest (query, key, probability) between different words, marks and punctuation left aside."""
        p, words, found = self.probabilities, self.tokens, []
        for place in p.flatten().argsort(descending=True).tolist():
            i, j = divmod(place, len(words))
            if words[i] != words[j] and words[i].isalpha() and words[j].isalpha():
                found.append((words[i], words[j], float(p[i, j])))
        return found[:count]


@dataclass(frozen=True, slots=True)
class Report:
    """The whole run. ranking: PyTorch's, which every variant must equal; lengths: tokens of every sentence; stages: the parts of
    the run and their wall time in seconds."""

    environment: list[tuple[str, str]]
    sentences: tuple[Sentence, ...]
    lengths: list[int]
    variants: list[Variant]
    ranking: Ranking
    head: Head
    checks: list[Check]
    stages: list[tuple[str, float]]

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)

    @property
    def verdict(self) -> str:
        wrong, seconds = sum(not check.ok for check in self.checks), sum(seconds for _, seconds in self.stages)
        what = f"{wrong} of {len(self.checks)} checks FAILED" if wrong else f"All {len(self.checks)} checks hold"
        return f"{what}. {seconds:.0f} s."


def heading() -> Panel:
    """What will happen, before anything runs."""
    text = f"{MODEL} Every layer is compared with fp64, the embeddings and the nearest-sentence ranking with PyTorch."
    return Panel(text, title="tilefold demo", title_align="left", border_style="blue")


def _parts(found: Report) -> list[Part]:
    """Everything but the verdict, which comes last on a terminal and first on a page."""
    head, nearest = found.head, found.ranking.nearest
    same = sum(found.sentences[j].topic == s.topic for s, (j, _) in zip(found.sentences, nearest, strict=True))
    alike = [
        (short(s.text, 34), short(found.sentences[j].text, 34), f"{cosine:.3f}")
        for s, (j, cosine) in zip(found.sentences, nearest, strict=True)
    ]
    said = [(query, key, f"{p:.0%}") for query, key, p in head.links(4)]
    return [
        Heading("Environment"),
        Rows(("", ""), tuple(found.environment)),
        Words(
            f"{len(found.sentences)} sentences, {min(found.lengths)} to {max(found.lengths)} tokens, "
            f"{sum(found.lengths)} in all."
        ),
        *(part for variant in found.variants for part in _variant(variant)),
        Heading("Nearest sentences"),
        Rows(("sentence", "nearest", "cosine"), tuple(alike)),
        Words(f"{same} of {len(alike)} have their nearest neighbour in their own topic."),
        Heading(f"Layer {head.layer}, head {head.head}: what its words look at"),
        Words(head.sentence),
        Rows(("word", "looks at", "p"), tuple(said)),
        Heading("Time"),
        Rows(("", ""), tuple((name, f"{seconds:.2f} s") for name, seconds in found.stages)),
        Heading("Checks"),
        Rows(("", "", ""), tuple(("ok" if c.ok else "FAILED", c.name, c.detail) for c in found.checks)),
    ]


def short(text: str, limit: int) -> str:
    """The text, cut at `limit` characters with an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def _variant(variant: Variant) -> list[Part]:
    """Its plan, and every layer's error against fp64 beside its limit."""
    shape = ", ".join(f"{plan.problem.batch} x {plan.problem.seq_q}" for plan in variant.plans)
    head = ("layer", "max err", "limit", "rel. L2", "limit", "lse err", "limit", "ms", "")
    rows = []
    for layer in variant.layers:
        out, lse = layer.out, layer.lse
        figures = (out.max_error, out.max_limit, out.l2_error, out.l2_limit, lse.max_error, lse.max_limit)
        took = f"{layer.seconds * 1e3:.{0 if layer.seconds >= 0.1 else 2}f}"
        rows.append((str(layer.layer), *(f"{x:.1e}" for x in figures), took, "ok" if layer.ok else "WRONG"))
    return [
        Heading(f"tilefold.{variant.function}: {variant.note} ({shape} tokens)"),
        Words(str(variant.plans[-1])),
        Rows(head, tuple(rows)),
        Words(LIMIT),
    ]


def report(found: Report, files: Sequence[Path], console: Console) -> None:
    """Print everything, the verdict last."""
    show(console, [*_parts(found), Words(""), *(Words(f"wrote {path}") for path in files)])
    console.print(Text(found.verdict, style="bold green" if found.ok else "bold red"))


def write(found: Report, out: Path) -> tuple[Path, Path]:
    """The page and the picture in a folder. Unsupported if matplotlib is not installed."""
    caption = (
        "Left: a row for each token, which shows how it spreads its attention over the tokens of the sentence; a dark first "
        "column is usual: a head with nothing to do for a word rests on [CLS]. The kernel never writes these probabilities: "
        "they are computed from the lse it returns, p = exp(q k scale - lse). Right: cosines of the embeddings of all "
        "sentences; lines part the topics."
    )
    parts = [Words(MODEL), Words(found.verdict), Picture(figure_of(found), caption), *_parts(found)]
    return write_report(out, "demo", "tilefold demo", parts)


# --- the picture ------------------------------------------------------------------------------------------------------------


def figure_of(found: Report) -> Any:
    """Both heat maps side by side."""
    figure: Any = new_figure(17, 7.4)
    left, right = figure.subplots(1, 2, width_ratios=(0.9, 1.1))
    head = found.head
    _heat(left, head.probabilities.numpy(), head.tokens, head.tokens, "probability", 0.0)
    said = ", ".join(f"“{query}” → “{key}” {p:.0%}" for query, key, p in head.links(2))
    left.set(xlabel="key token it looks at", ylabel="query token")
    left.set_title(f"Layer {head.layer}, head {head.head}: {said}", fontsize=13)
    # cosines of all pairs of sentences; a sentence with itself stays grey
    topics = [sentence.topic for sentence in found.sentences]
    cosine = found.ranking.similarity.clone().fill_diagonal_(float("nan")).numpy()
    rows = [f"{short(s.text, 44)}  {i}" for i, s in enumerate(found.sentences)]
    columns = [f"{i}  {topic}" for i, topic in enumerate(topics)]
    others = cosine[cosine == cosine]
    _heat(right, cosine, rows, columns, "cosine", min(0.0, float(others.min())))
    for at in (i for i in range(1, len(topics)) if topics[i] != topics[i - 1]):
        right.axhline(at - 0.5, color="#333", linewidth=0.8)
        right.axvline(at - 0.5, color="#333", linewidth=0.8)
    right.set_title("Cosine of sentence embeddings (lines part the topics)", fontsize=13)
    figure.suptitle("Attention by tilefold in a trained sentence encoder (all-MiniLM-L6-v2)", fontsize=15)
    return figure


def _heat(axes: Any, values: Any, rows: Sequence[str], columns: Sequence[str], unit: str, low: float) -> None:
    from matplotlib import colormaps

    image = axes.imshow(values, cmap=colormaps[BLUES].with_extremes(bad=GREY), vmin=low)
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.figure.colorbar(image, ax=axes, shrink=0.6, label=unit)
