"""The report as one HTML file that needs nothing else: no network, no scripts, pictures as inline SVG."""

from collections.abc import Iterable, Sequence
from html import escape

from tilefold.cli.demo import judge
from tilefold.cli.demo.heat import HeatMap
from tilefold.cli.demo.options import Check, Stage
from tilefold.cli.demo.report import Report, Variant, links, shape_of

__all__ = ["head_map", "render", "short", "similarity_map"]

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff;
  max-width: 66rem; margin: 2.5rem auto; padding: 0 1.2rem; }
h1 { margin-bottom: .2rem; } h2 { margin-top: 2.6rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .8rem 0; }
th { text-align: left; font-weight: 600; color: #555; } td, th { padding: .18rem .9rem .18rem 0; vertical-align: top; }
td.n, th.n { text-align: right; white-space: nowrap; } .dim { color: #666; } figure { margin: 1rem 0; overflow-x: auto; }
svg { max-width: 100%; height: auto; }
pre { background: #f5f6f8; padding: .9rem 1rem; overflow-x: auto; font-size: .82rem; line-height: 1.4; border-radius: 4px; }
.ok { color: #12733a; font-weight: 600; } .bad { color: #b3141c; font-weight: 700; }
.verdict { border-left: 5px solid currentColor; padding: .4rem .9rem; font-size: 1.1rem; }
.verdict span { color: #1c1c1c; font-weight: 400; }
"""


def render(report: Report) -> str:
    """The whole page."""
    body = [
        "<h1>tilefold demo</h1>",
        "<p>A trained sentence encoder embeds real sentences; its attention layers run through tilefold.</p>",
        _verdict(report),
        _checks(report.checks),
        *_head(report),
        *_similarity(report),
        "<h2>Every layer against fp64</h2>",
        "<p>The q, k and v that each layer really had, attended by tilefold and written out in fp64. The limit is what "
        "rounding in the same dtype may do to the same tensors: some of each element's deviations, plus its rounding.</p>",
        *(part for variant in report.variants for part in _variant(variant)),
        "<h2>Time</h2>",
        _times(report.stages),
        "<h2>Environment</h2>",
        _table((), report.environment, numbers=0),
    ]
    view = '<meta name="viewport" content="width=device-width">'
    head = f'<meta charset="utf-8">{view}<title>tilefold demo</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def short(text: str, limit: int) -> str:
    """The text, cut at `limit` characters with an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def head_map(report: Report) -> HeatMap:
    """One head's probabilities, tokens on both sides."""
    head = report.head
    values = head.probabilities.tolist()
    high = max(max(row) for row in values)
    title = f"Attention of layer {head.layer}, head {head.head}"
    return HeatMap(title, values, head.tokens, head.tokens, "query token", "key token it looks at", "p", 0.0, high)


def similarity_map(report: Report) -> HeatMap:
    """Cosines of all pairs of sentences; a sentence with itself stays grey; lines between topics."""
    cosine = report.ranking.similarity.tolist()
    n = len(cosine)
    values = [[None if i == j else cosine[i][j] for j in range(n)] for i in range(n)]
    others = [value for row in values for value in row if value is not None]
    topics = [sentence.topic for sentence in report.sentences]
    breaks = [i for i in range(1, n) if topics[i] != topics[i - 1]]
    rows = [f"{short(s.text, 44)}  {i}" for i, s in enumerate(report.sentences)]
    columns = [f"{i}  {topic}" for i, topic in enumerate(topics)]
    low = min(0.0, *others)
    return HeatMap("Similarity of the sentences", values, rows, columns, "", "", "cosine", low, max(others), breaks)


def _verdict(report: Report) -> str:
    wrong = sum(not check.ok for check in report.checks)
    text = f"{wrong} of {len(report.checks)} checks failed" if wrong else f"All {len(report.checks)} checks hold"
    scale = f"{len(report.sentences)} sentences, {sum(report.lengths)} tokens, on {dict(report.environment)['device']}"
    return f'<p class="verdict {"bad" if wrong else "ok"}">{text}. <span>{escape(scale)}.</span></p>'


def _mark(ok: bool) -> str:
    return '<span class="ok">ok</span>' if ok else '<span class="bad">WRONG</span>'


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 1, html: bool = False) -> str:
    """A table whose columns from `numbers` on (0: none) are numbers, aligned right; cells are text unless `html`."""

    def cell(tag: str, i: int, text: str) -> str:
        kind = ' class="n"' if numbers and i >= numbers else ""
        return f"<{tag}{kind}>{text if html else escape(text)}</{tag}>"

    lines = ["<table>"]
    if headings:
        lines.append("<tr>" + "".join(cell("th", i, text) for i, text in enumerate(headings)) + "</tr>")
    lines += ["<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in rows]
    return "\n".join([*lines, "</table>"])


def _checks(checks: Sequence[Check]) -> str:
    rows = [(_mark(c.ok), escape(c.name), f'<span class="dim">{escape(c.detail)}</span>') for c in checks]
    return _table((), rows, numbers=0, html=True)


def _head(report: Report) -> list[str]:
    head = report.head
    said = ", ".join(f"“{a}” looks at “{b}” ({p:.0%})" for a, b, p in links(head, 3))
    return [
        f"<h2>What layer {head.layer}, head {head.head} looks at</h2>",
        f"<p>“{escape(head.sentence)}” Each row is a token, and shows how it spreads its attention over the tokens of the "
        f"sentence; darker is more. Between words the strongest links are: {escape(said)}. A dark first column is usual: a "
        f"head with nothing to do for a word rests on [CLS].</p>",
        f"<figure>{head_map(report).svg()}</figure>",
        "<p class='dim'>The kernel never writes these probabilities to memory. They are computed here from the lse it "
        "returns, p = exp(q·k · scale − lse), so that every row summing to 1 is also a test of the lse. "
        "Layers and heads are counted from 0; point at a cell to read it.</p>",
    ]


def _similarity(report: Report) -> list[str]:
    rows = []
    for i, (j, cosine) in enumerate(judge.nearest(report.ranking)):
        mine, other = report.sentences[i], report.sentences[j]
        rows.append((short(mine.text, 72), short(other.text, 72), f"{cosine:.3f}"))
    same = sum(
        report.sentences[j].topic == report.sentences[i].topic for i, (j, _) in enumerate(judge.nearest(report.ranking))
    )
    identical = all(variant.ranked_the_same for variant in report.variants)
    said = (
        "Every sentence ranks all others in the same order whether PyTorch or tilefold computed the attention."
        if identical
        else "The ranking DIFFERS from PyTorch's."
    )
    return [
        "<h2>Which sentences the model finds alike</h2>",
        f"<p>Cosine of the embeddings; lines part the topics. {same} of {len(rows)} sentences have their nearest neighbour in "
        f"their own topic. {said}</p>",
        f"<figure>{similarity_map(report).svg()}</figure>",
        "<details><summary>Nearest sentences</summary>",
        _table(("sentence", "nearest", "cosine"), rows, numbers=2),
        "</details>",
    ]


def _variant(variant: Variant) -> list[str]:
    headings = ("layer", "out: max error", "limit", "relative L2", "limit", "lse: max error", "limit", "ms", "")
    rows = [
        (
            str(layer.layer),
            *(f"{x:.1e}" for x in (layer.out.max_error, layer.out.max_limit, layer.out.l2_error, layer.out.l2_limit)),
            *(f"{x:.1e}" for x in (layer.lse.max_error, layer.lse.max_limit)),
            f"{layer.seconds * 1e3:.2f}",
            _mark(layer.ok),
        )
        for layer in variant.layers
    ]
    plans = "\n\n".join(str(plan) for plan in variant.plans)
    return [
        f"<h3><code>tilefold.{escape(variant.function)}</code>: {escape(variant.note)}</h3>",
        f"<p class='dim'>Sequences x longest: {escape(shape_of(variant.plans))}.</p>",
        _table(headings, rows, html=True),
        f"<details><summary>The plan{'s' * (len(variant.plans) > 1)} it followed</summary><pre>{escape(plans)}</pre></details>",
    ]


def _times(stages: Sequence[Stage]) -> str:
    return _table((), [(stage.name, f"{stage.seconds:.2f} s") for stage in stages])
