"""The notebooks: each runs, and there is one for each page on a concept."""

import json
import os
import re
import traceback
from itertools import pairwise
from pathlib import Path

import notebooks
import pytest

DOCS = notebooks.FOLDER.parent
PATHS = notebooks.paths()


def test_every_notebook_belongs_to_a_page() -> None:
    assert len(PATHS) >= 19
    overview = (notebooks.FOLDER / "README.md").read_text(encoding="utf-8")
    for path in PATHS:
        (page,) = (one for part in ("explanation", "guides") if (one := DOCS / part / f"{path.stem}.md").is_file())
        assert f"](../notebooks/{path.name})" in page.read_text(encoding="utf-8"), (
            f"{page.name} does not link its notebook"
        )
        there = f"](../{page.parent.name}/{page.name})"
        assert there in path.read_text(encoding="utf-8"), f"{path.name} does not link its page"
        assert f"]({path.name})" in overview, f"{path.name} is not in the overview"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_checks_what_it_says(path: Path) -> None:
    cells = notebooks.cells_of(path)
    code = [cell for cell in cells if cell.code]
    assert 5 <= len(code) <= 12
    assert cells[0].text.startswith("# ")
    texts = [cell.text for cell in cells[1:] if not cell.code]
    assert len(texts) >= 3
    assert all(text.startswith("## ") for text in texts), "each part has a heading, for the table of contents"
    assert all(a.code != b.code or a.code for a, b in pairwise(cells)), "two cells of text in a row"
    assert sum("assert " in cell.text or "AssertionError" in cell.text for cell in code) >= len(code) // 2
    if any(
        re.search(r"^import triton|tilefold\.attention|ops\.|sparse\.|debug\.", cell.text, re.MULTILINE)
        for cell in code
    ):
        text = "\n".join(cell.text for cell in code)
        assert text.index('os.environ["TRITON_INTERPRET"] = "1"') < text.index("import torch")


@pytest.mark.interpreter
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    outputs = notebooks.execute(path)
    assert any(output.text for output in outputs) or any(output.figures for output in outputs)
    page, figures = notebooks.as_page(path, outputs)
    assert all(name in page for name in figures)
    assert len(figures) == page.count("](" + path.stem + "-")
    assert "object at 0x" not in page


def test_figures_have_titles_and_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what a reader who does not see the figure gets."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    path = tmp_path / "drawn.py"
    lines = ["# %%", "import matplotlib.pyplot as plt", "", "fig, axis = plt.subplots()", "axis.plot([1, 2])"]
    named = 'axis.set(title="T", xlabel="x <", ylabel="y")'
    path.write_text("\n".join([*lines, named, ""]))
    page, figures = notebooks.as_page(path, notebooks.execute(path))
    assert page.count("![T: y over x &lt;](drawn-1.svg)") == len(figures) == 1
    for lacks in ('axis.set(title="T", xlabel="x")', 'axis.set(xlabel="x", ylabel="y")'):
        path.write_text("\n".join([*lines, lacks, ""]))
        with pytest.raises(ValueError, match="a title and two labels"):
            notebooks.execute(path)
    import matplotlib.pyplot as plt

    plt.close("all")


CELLS = """# %% [markdown]
# # Title
#
# Text.

# %%
x = 20


def f():
    assert x == 21, "as it should"


# %%
print("said")
x + 1
# %%
f()
"""


def test_cells_and_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "small.py"
    path.write_text(CELLS)
    assert [(cell.code, cell.line) for cell in notebooks.cells_of(path)] == [
        (False, 2),
        (True, 7),
        (True, 15),
        (True, 18),
    ]
    assert notebooks.cells_of(path)[0].text == "# Title\n\nText."
    with pytest.raises(AssertionError, match="as it should") as caught:
        notebooks.execute(path)
    frames = [(Path(frame.filename).name, frame.lineno) for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-2:] == [("small.py", 18), ("small.py", 11)]
    path.write_text(CELLS.replace("x = 20", "x = 21"))
    outputs = notebooks.execute(path)
    assert [output.text for output in outputs] == ["", "said\n22", ""]
    assert "```text {.result}\nsaid\n22\n```" in notebooks.as_page(path, outputs)[0]
    saved = json.loads(notebooks.as_ipynb(path, outputs))
    assert [cell["cell_type"] for cell in saved["cells"]] == ["markdown", "code", "code", "code"]
    assert saved["cells"][2]["outputs"][0]["text"] == "said\n22\n"


@pytest.mark.parametrize("text", ["x = 1\n# %%\n", "# %% [markdown]\n# text\nx = 1\n"])
def test_what_is_no_cell_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ValueError, match=r"bad\.py"):
        notebooks.cells_of(tmp_path / "bad.py")


@pytest.mark.interpreter
def test_a_notebook_runs_in_a_kernel_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Jupyter runs it: kernels of Triton are compiled from the source of a cell, which is in no file."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(notebooks.FOLDER.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    )
    made = nbformat.reads(notebooks.as_ipynb(notebooks.FOLDER / "fold.py"), as_version=4)
    nbformat.validate(made)
    nbclient.NotebookClient(
        made, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    kinds = [output["output_type"] for cell in made.cells if cell.cell_type == "code" for output in cell.outputs]
    assert "stream" in kinds
    assert "display_data" in kinds
    assert "error" not in kinds
