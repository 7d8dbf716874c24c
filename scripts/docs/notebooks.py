"""The notebooks of docs/notebooks: read as text, run, and turned into Jupyter's format and into pages of the site.

A notebook is a Python file in the percent format that editors and jupytext know: a line `# %%` begins a cell of code, a line
`# %% [markdown]` one of text, whose lines are comments.  `python scripts/docs/notebooks.py fold` prints fold.ipynb.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import linecache
import os
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "Cell", "Output", "as_ipynb", "as_page", "cells_of", "execute", "paths", "prepare"]

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
MARK = re.compile(r"^# %%(?P<rest>.*)$")


@dataclass(frozen=True)
class Cell:
    """A cell: whether it is code, its text, and the number of its first line in the file."""

    code: bool
    text: str
    line: int


@dataclass
class Output:
    """What a cell of code printed, and its figures as SVG."""

    text: str = ""
    figures: list[str] = field(default_factory=list)


def paths() -> list[Path]:
    """Every notebook, by name."""
    return sorted(FOLDER.glob("*.py"))


def cells_of(path: Path) -> list[Cell]:
    """The cells of a notebook.  ValueError, naming the line, for what is neither: text before the first cell, bare text."""
    cells: list[Cell] = []
    code, first, lines = True, 0, [""]
    for number, line in enumerate([*path.read_text(encoding="utf-8").split("\n"), "# %%"], start=1):
        if found := MARK.match(line):
            text = "\n".join(lines).strip("\n")
            if text and not first:
                raise ValueError(f"{path.name}: text before the first cell")
            if text:
                skipped = len(lines) - len("\n".join(lines).lstrip("\n").split("\n"))
                cells.append(Cell(code, text, first + skipped))
            code, first, lines = "[markdown]" not in found["rest"], number + 1, []
        elif code:
            lines.append(line)
        elif line and not line.startswith("#"):
            raise ValueError(f"{path.name}:{number}: a line of a markdown cell begins with #, got {line!r}")
        else:
            lines.append(line.removeprefix("#").removeprefix(" "))
    return cells


def prepare() -> None:
    """Before the first notebook of a process: kernels in the interpreter, in half of its time, figures without a window."""
    os.environ.update(TRITON_INTERPRET="1", MPLBACKEND="agg")
    importlib.import_module("tilefold.debug").patch_interpreter()
    importlib.import_module("torch").set_num_threads(1)  # the tensors are tiny


def execute(path: Path) -> list[Output]:
    """Run the cells of code one after the other in this process; what each gave.  An error in a cell is raised as it is."""
    module = types.ModuleType(f"notebook_{path.stem}")
    module.__file__ = str(path)
    linecache.checkcache(str(path))
    sys.modules[module.__name__] = module
    try:
        return [_run(cell, path, module) for cell in cells_of(path) if cell.code]
    finally:
        del sys.modules[module.__name__]


def _run(cell: Cell, path: Path, module: types.ModuleType) -> Output:
    """One cell; the value of a last line that is an expression is printed, as in Jupyter."""
    tree = ast.parse(cell.text, str(path))
    ast.increment_lineno(
        tree, cell.line - 1
    )  # tracebacks, and Triton, which reads the source of kernels, find the file's lines
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, str(path), "exec"), module.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), str(path), "eval"), module.__dict__)
            if value is not None:
                print(repr(value))
    return Output(printed.getvalue().rstrip("\n"), list(_figures()))


def _figures() -> Iterator[str]:
    """The open figures of matplotlib, which are closed."""
    plt: Any = sys.modules.get("matplotlib.pyplot")
    if plt is None:
        return
    for number in plt.get_fignums():
        drawn = io.StringIO()
        figure = plt.figure(number)
        figure.savefig(drawn, format="svg", bbox_inches="tight", metadata={"Title": _told(figure)})
        plt.close(number)
        yield drawn.getvalue()


def _told(figure: Any) -> str:
    """What a figure shows, in words: its axes' titles and labels.  ValueError: an axis has none."""
    said = [(axis.get_title(), axis.get_ylabel(), axis.get_xlabel()) for axis in figure.axes]
    if not all(all(names) for names in said):
        raise ValueError(f"a figure's axes need a title and two labels, got {said}")
    return "; ".join(f"{title}: {y} over {x}" for title, y, x in said)


def as_ipynb(path: Path, outputs: list[Output] | None = None) -> str:
    """The notebook in Jupyter's format, with what its cells printed where they have been run."""
    ran = iter(outputs or [])
    cells: list[dict[str, Any]] = []
    for number, cell in enumerate(cells_of(path)):
        made: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}, "source": cell.text.splitlines(keepends=True)}
        if not cell.code:
            cells.append({"cell_type": "markdown", **made})
            continue
        output = next(ran, Output())
        shown: list[dict[str, Any]] = []
        if output.text:
            shown.append({"output_type": "stream", "name": "stdout", "text": output.text + "\n"})
        for figure in output.figures:
            shown.append({"output_type": "display_data", "data": {"image/svg+xml": figure}, "metadata": {}})
        cells.append({"cell_type": "code", "execution_count": None, "outputs": shown, **made})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def as_page(path: Path, outputs: list[Output]) -> tuple[str, dict[str, str]]:
    """(Markdown of the notebook as a page with its results, figures by file name)."""
    ran = iter(outputs)
    parts: list[str] = []
    figures: dict[str, str] = {}
    for cell in cells_of(path):
        if not cell.code:
            parts.append(cell.text)
            continue
        parts.append(f"```python\n{cell.text}\n```")
        output = next(ran)
        if output.text:
            parts.append(f"```text {{.result}}\n{output.text}\n```")
        for figure in output.figures:
            name = f"{path.stem}-{len(figures) + 1}.svg"
            figures[name] = figure
            told = re.search(r"<dc:title>(.*?)</dc:title>", figure, re.DOTALL)
            parts.append(f"![{told[1] if told else f'figure {len(figures)}'}]({name})")
    parts.append(f"[As a Jupyter notebook]({path.stem}.ipynb)")
    return "\n\n".join(parts) + "\n", figures


if __name__ == "__main__":
    sys.stdout.write(as_ipynb(FOLDER / f"{sys.argv[1]}.py"))
