"""The head and the similarities as one PNG, by matplotlib."""

from pathlib import Path
from typing import Any

from tilefold.bench.page import new_figure
from tilefold.cli.demo.heat import STOPS, HeatMap
from tilefold.cli.demo.page import head_map, similarity_map
from tilefold.cli.demo.report import Report, links

__all__ = ["write"]


def write(report: Report, path: Path) -> None:
    """Draw both heat maps side by side. Unsupported if matplotlib is not installed."""
    figure: Any = new_figure(17, 7.4)
    left, right = figure.subplots(1, 2, width_ratios=(0.9, 1.1))
    _draw(left, head_map(report))
    said = ", ".join(f"“{query}” → “{key}” {p:.0%}" for query, key, p in links(report.head, 2))
    left.set_title(f"Layer {report.head.layer}, head {report.head.head}: {said}", fontsize=13)
    _draw(right, similarity_map(report))
    right.set_title("Cosine of sentence embeddings (lines part the topics)", fontsize=13)
    figure.suptitle("Attention by tilefold in a trained sentence encoder (all-MiniLM-L6-v2)", fontsize=15)
    figure.savefig(path, dpi=110)


def _draw(axes: Any, heat: HeatMap) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    stops = [tuple(part / 255 for part in stop) for stop in STOPS]
    scale = LinearSegmentedColormap.from_list("tilefold", stops).with_extremes(bad="#e4e4e4")
    values = [[float("nan") if value is None else value for value in row] for row in heat.values]
    image = axes.imshow(values, cmap=scale, vmin=heat.low, vmax=heat.high)
    axes.set_xticks(range(len(heat.columns)), heat.columns, rotation=90)
    axes.set_yticks(range(len(heat.rows)), heat.rows)
    axes.tick_params(length=0)
    axes.set_xlabel(heat.columns_title)
    axes.set_ylabel(heat.rows_title)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for at in heat.breaks:
        axes.axhline(at - 0.5, color="#333", linewidth=0.8)
        axes.axvline(at - 0.5, color="#333", linewidth=0.8)
    axes.figure.colorbar(image, ax=axes, shrink=0.6, label="probability" if heat.unit == "p" else heat.unit)
