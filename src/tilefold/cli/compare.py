"""`tilefold compare`: how two implementations, or two files, differ number by number."""

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from tilefold.cli.runtime import dtype_named, prepare_runtime, table_of, user_errors, writable
from tilefold.errors import DtypeError, Unsupported, ValueRangeError

if TYPE_CHECKING:
    from torch import Tensor

    from tilefold.bench.accuracy import Difference
    from tilefold.bench.implementation import Inputs
    from tilefold.bench.page import Picture

__all__ = ["EPILOG", "compare"]

GRADIENTS = ("dq", "dk", "dv")
LABELS, NAME = 8, 64  # labels of an axis, and characters of a name, that have room in a drawing

EPILOG = """
**Examples**

    tilefold compare tilefold math --quick

    tilefold compare tilefold fp64 --family sparse --quick --direction backward --html report.html

    tilefold compare tilefold cudnn --case d128,n4096,causal --json report.json

    tilefold compare before.pt after.pt

**Implementations**: tilefold, fp64 (plain PyTorch in float64, for sizes that it can hold) and the peers of `tilefold bench`.
**Files**: a tensor or a dict of tensors as torch.save wrote it, or .npy.

**What is shown**: of each tensor shape, dtype, Euclidean norm, extremes and the SHA-256 of its bytes; of their difference the
largest and mean absolute value, the root mean square, the norm relative to the second, how many numbers are not equal, and
whether torch.allclose holds at --rtol and --atol. Most differences are of rounding: `tilefold check` and `bench` judge.
With --strict the exit code is 1 unless allclose holds everywhere.
"""


@user_errors
def compare(
    first: Annotated[str, typer.Argument(help="An implementation, or a file.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    family: Annotated[str, typer.Option(help="Cases of `dense` or `sparse`.")] = "dense",
    case: Annotated[
        str | None, typer.Option(metavar="FILTER", help="As in bench; the first case that matches is taken.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small case (a tiny one in the interpreter).")] = False,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    direction: Annotated[str, typer.Option(help="forward or backward.")] = "forward",
    rtol: Annotated[float, typer.Option(min=0, help="Relative tolerance of allclose.")] = 1e-5,
    atol: Annotated[float, typer.Option(min=0, help="Absolute tolerance of allclose.")] = 1e-5,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 unless allclose holds.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything as JSON.")] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw where and how large the differences are.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write tables and drawing as one HTML file.")
    ] = None,
) -> None:
    """Compare the results of two implementations on one case, or two files, number by number."""
    for path, name in ((json, "--json"), (png, "--png"), (html, "--html")):
        writable(path, name)
    if direction not in ("forward", "backward"):
        raise ValueRangeError(f"direction must be forward or backward, got {direction!r}")
    files = [Path(name) for name in (first, second) if Path(name).is_file()]
    console = Console()
    if len(files) == 2:
        what, pairs = "files", _pairs_of_files(*files)
    elif files:
        raise ValueRangeError(f"{files[0]} is a file, so the other one must be, too: {first!r}, {second!r}")
    else:
        for name in (first, second):
            _check_name(name)
        what, pairs = _pairs_of_case((first, second), (family, quick, case, dtype_named(dtype), direction), console)
    from tilefold.bench.accuracy import difference_of

    found = [difference_of(name, a, b, rtol, atol) for name, a, b in pairs]
    title = f"{first} and {second}, {what}"
    for each in found:
        columns = zip(FACTS[2:], *(row[2:] for row in _facts_rows([each], (first, second))), strict=True)
        console.print(table_of((each.name, first, second), tuple(columns)))
        console.print()
    console.print(
        table_of(
            ("difference", *(each.name for each in found)),
            tuple(zip(DIFFERENCES[1:], *(row[1:] for row in _difference_rows(found)), strict=True)),
        )
    )
    console.print(Text(f"allclose: rtol {rtol:g}, atol {atol:g}", style="dim"))
    _write(found, title, (first, second), {"json": json, "png": png, "html": html}, console)
    if strict and not all(each.close for each in found):
        raise typer.Exit(1)


# ---------------------------------------------------------------- what is compared


def _pairs_of_files(first: Path, second: Path) -> "list[tuple[str, Tensor, Tensor]]":
    """(name, tensor of the first, tensor of the second) for every tensor that both have.

    Raises DtypeError for what holds no tensors, ValueRangeError for files with different names in them."""
    a, b = _tensors_of(first), _tensors_of(second)
    if a.keys() != b.keys():
        raise ValueRangeError(
            f"{first} holds {', '.join(a)}, but {second} holds {', '.join(b)}: the names must be the same"
        )
    return [(name, a[name], b[name]) for name in a]


def _tensors_of(path: Path) -> "dict[str, Tensor]":
    import torch

    if path.suffix == ".npy":
        import numpy

        found: Any = torch.from_numpy(numpy.load(path, allow_pickle=False))
    else:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as problem:  # torch raises what its unpickler does
            raise DtypeError(f"{path} is no file of torch.save or .npy: {type(problem).__name__}") from None
    named = found if isinstance(found, dict) else {"tensor": found}
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise DtypeError(f"{path} must hold a tensor or a dict of tensors, {name!r} is {type(value).__name__}")
    return {str(name): value for name, value in named.items()}


def _pairs_of_case(
    names: tuple[str, str], chosen: tuple[str, bool, str | None, str, str], console: Console
) -> "tuple[str, list[tuple[str, Tensor, Tensor]]]":
    """(the case's name, the pairs of results)."""
    runtime = prepare_runtime()
    from tilefold.bench.attention.peers import IMPLEMENTATIONS
    from tilefold.bench.engine import AttentionEngine, Request
    from tilefold.bench.implementation import make_inputs

    cases = AttentionEngine(chosen[0]).cases(Request(*chosen[1:]), runtime.gpu)
    console.print(Text(f"{runtime.note}\n{cases[0].name}", style="dim"))
    inputs = make_inputs(cases[0], runtime.device)
    results = [_result_of(name, inputs, runtime.device) for name in names]
    for name in names:
        if inputs.index is not None and name in IMPLEMENTATIONS and not IMPLEMENTATIONS[name].lists:
            console.print(Text(f"{name} computes every pair, whatever the lists say", style="yellow"))
    titles = GRADIENTS if cases[0].backward else ("out",)
    return cases[0].name, list(zip(titles, *results, strict=True))


def _check_name(name: str) -> None:
    from tilefold.bench.attention.peers import IMPLEMENTATIONS

    if name != "fp64" and name not in IMPLEMENTATIONS:
        raise ValueRangeError(
            f"an implementation must be a file or one of fp64, {', '.join(IMPLEMENTATIONS)}, got {name!r}"
        )


def _result_of(name: str, inputs: "Inputs", device: str) -> "tuple[Tensor, ...]":
    """The output, or the gradients, of one implementation. Unsupported, naming it, if it cannot take the case."""
    from tilefold.bench.accuracy import exact_result
    from tilefold.bench.attention.peers import IMPLEMENTATIONS

    if name == "fp64":
        return exact_result(inputs)
    implementation = IMPLEMENTATIONS[name]
    if why := implementation.refuses(inputs.case, device):
        raise Unsupported(f"{name} cannot take {inputs.case.name}: {why}")
    run = implementation.prepare(inputs)
    with run.context():
        found = run.call()
    return tuple(found) if inputs.case.backward else (found,)


# ---------------------------------------------------------------- what is shown


FACTS = ("tensor", "of", "shape", "dtype", "norm", "max", "min", "NaN, inf", "SHA-256")
DIFFERENCES = ("tensor", "max abs", "mean abs", "RMSE", "relative L2", "differing", "of", "NaN, inf", "allclose")


def _facts_rows(found: "list[Difference]", names: tuple[str, str], digits: int = 16) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (each.name, name, " x ".join(map(str, facts.shape)), facts.dtype, f"{facts.norm:.9g}", f"{facts.largest:.6g}",
         f"{facts.smallest:.6g}", str(facts.specials), facts.sha256[:digits])
        for each in found
        for name, facts in zip(names, (each.first, each.second), strict=True)
    )  # fmt: skip


def _difference_rows(found: "list[Difference]") -> tuple[tuple[str, ...], ...]:
    return tuple(
        (each.name, f"{each.max_abs:.3e}", f"{each.mean_abs:.3e}", f"{each.rmse:.3e}", f"{each.relative_l2:.3e}",
         str(each.differing), str(each.elements), str(each.specials),
         "same bits" if each.identical else "yes" if each.close else "no")
        for each in found
    )  # fmt: skip


def _write(
    found: "list[Difference]", title: str, names: tuple[str, str], files: dict[str, Path | None], console: Console
) -> None:
    """Write the files that were asked for and say so."""
    if files["json"] is not None:
        document = {"first": names[0], "second": names[1], "title": title, "tensors": [asdict(each) for each in found]}
        files["json"].write_text(jsonlib.dumps(document, indent=2) + "\n", encoding="utf-8")
    if files["png"] is not None or files["html"] is not None:
        from tilefold.bench import page

        picture = _picture(found)
        if files["png"] is not None:
            page.save_png(picture.figure, files["png"])
        if files["html"] is not None:
            parts = (
                page.Rows(FACTS, _facts_rows(found, names, 64)),
                page.Rows(DIFFERENCES, _difference_rows(found)),
                page.Words(f"allclose at rtol {found[0].rtol:g}, atol {found[0].atol:g}." if found else ""),
                picture,
            )
            files["html"].write_text(page.to_html(title, parts), encoding="utf-8")
    for path in files.values():
        if path is not None:
            console.print(Text(f"wrote {path}", style="dim"), soft_wrap=True)


def _picture(found: "list[Difference]") -> "Picture":
    """Of each tensor how many differences there are of each size, and where the largest are."""
    from tilefold.bench import page
    from tilefold.bench.accuracy import BINS

    figure = page.new_figure(11, 3.0 * max(1, len(found)))
    axes = figure.subplots(max(1, len(found)), 2, squeeze=False)
    for (left, right), each in zip(axes, found, strict=False):
        left.bar(list(BINS), each.decades, width=0.9)
        left.set_yscale("symlog")
        marked = BINS[:: 1 + len(BINS) // LABELS]
        left.set_xticks(marked, [f"1e{e}" for e in marked], fontsize=8)
        name = each.name if len(each.name) <= NAME else f"{each.name[: NAME // 2]}...{each.name[-NAME // 2 :]}"
        left.set_title(
            f"{name}\nabsolute differences by decade ({each.elements - sum(each.decades)} are 0)", fontsize=9
        )
        right.plot(range(len(each.along)), each.along, linewidth=0.8)
        right.set_title(f"{name}\nthe largest along dimension {each.axis}", fontsize=9)
        right.set_ylim(bottom=0)
    return page.Picture(figure, "How large the differences are, and where.")
