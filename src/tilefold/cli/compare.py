"""`tilefold compare`: how two implementations, or two files, differ number by number."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, TypeAlias

import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor
from typer import Argument, Option

from tilefold.bench import page
from tilefold.bench.accuracy import BINS, Difference, difference_of
from tilefold.bench.attention.peers import IMPLEMENTATIONS
from tilefold.bench.compared import attention_results, check_name, check_video_names, video_results, without_lse
from tilefold.bench.engine import Request
from tilefold.bench.implementation import make_inputs
from tilefold.bench.suites import engine_named
from tilefold.cli.options import Html, Json, Png, dtype_named, one_of
from tilefold.cli.runtime import Outputs, prepare_runtime, print_tables, user_errors, video_shape
from tilefold.errors import DtypeError, ValueRangeError
from tilefold.sparse import SelectOptions

Results: TypeAlias = tuple[dict[str, Tensor], dict[str, Tensor]]  # by name, of the first and of the second

FAMILIES = ("dense", "sparse", "video")
AXES = dict.fromkeys(("lse", "scores", "gini", "tau", "mass", "kept"), 2)  # of the queries, where it is not 1
LABELS, NAME = 8, 64  # labels of an axis, and characters of a name, that have room in a drawing

EPILOG = """
**Examples**

    tilefold compare tilefold math --quick

    tilefold compare tilefold fp64 --family sparse --quick --direction backward --html report.html

    tilefold compare tilefold cudnn --case d128,n4096,causal --json report.json

    tilefold compare tilefold fp64 --family video --quick --seeds 5 --same-lists

    tilefold compare before.pt after.pt

**Implementations**: tilefold, fp64 (plain PyTorch in float64, for sizes that it can hold) and the peers of `tilefold bench`.
Forward, tilefold, portable and fp64 tell the lse, too, and it is compared where both do.
**Family video**: the whole pipeline, every stage's results and the output, or the gradients of q, k, v and the gates. tilefold
runs it stage by stage, fused as one call that gives the output alone; fp64 and plain (in the inputs' dtype) are the oracles.
kept is 1 where a list has a block: scores that differ by rounding may break a tie the other way, and --same-lists keeps that
from what follows.
**Files**: a tensor or a dict of tensors as torch.save wrote it, or .npy.

**What is shown**: of each tensor shape, dtype, Euclidean norm, extremes and the SHA-256 of its bytes; of their difference the
mean with its sign, the largest and mean absolute value, the root mean square, the norm relative to the second, how many numbers
are not equal, and whether torch.allclose holds at --rtol and --atol. With --seeds each input has a column, and all have one.
Most differences are of rounding: `tilefold check` and `bench` judge.
With --strict the exit code is 1 unless allclose holds everywhere.
"""


@user_errors
def compare(
    first: Annotated[str, Argument(help="An implementation, or a file.")],
    second: Annotated[str, Argument(help="Another one.")],
    family: Annotated[str, Option(help="Cases of `dense` or `sparse` attention, or the `video` pipeline.")] = "dense",
    case: Annotated[
        str | None, Option(metavar="FILTER", help="As in bench; the first case that matches is taken.")
    ] = None,
    quick: Annotated[bool, Option("--quick", help="A small case (a tiny one in the interpreter).")] = False,
    dtype: Annotated[str, Option(help="bf16, fp16 or fp32.")] = "bf16",
    direction: Annotated[str, Option(help="forward or backward.")] = "forward",
    shape: Annotated[str | None, Option(metavar="B,H,N,D", help="Of video: batch, heads, tokens, head dim.")] = None,
    sparsity: Annotated[
        float | None, Option(min=0, max=100, help="Of video: top-k, so many per cent left out.", show_default="Gini")
    ] = None,
    same_lists: Annotated[
        bool, Option("--same-lists", help="Of video: the second attends the first one's lists.")
    ] = False,
    seed: Annotated[int, Option(min=0, help="Of the inputs.")] = 0,
    seeds: Annotated[int, Option(min=1, help="Compare on so many inputs, from --seed on.")] = 1,
    rtol: Annotated[float, Option(min=0, help="Relative tolerance of allclose.")] = 1e-5,
    atol: Annotated[float, Option(min=0, help="Absolute tolerance of allclose.")] = 1e-5,
    strict: Annotated[bool, Option("--strict", help="Exit code 1 unless allclose holds.")] = False,
    json: Json = None,
    png: Png = None,
    html: Html = None,
) -> None:
    """Compare the results of two implementations on one case, or two files, number by number."""
    outputs = Outputs(json=json, png=png, html=html)
    if direction not in ("forward", "backward"):
        raise ValueRangeError(f"direction must be forward or backward, got {direction!r}")
    _check_family(
        family, {"--shape": shape, "--sparsity": sparsity, "--same-lists": same_lists or None, "--case": case}
    )
    names, files = (first, second), [Path(name) for name in (first, second) if Path(name).is_file()]
    console, every = Console(), range(seed, seed + seeds)
    results: Callable[[int], Results]
    if files:
        if len(files) < 2:
            raise ValueRangeError(f"{files[0]} is a file, so the other one must be, too: {first!r}, {second!r}")
        if seeds > 1:
            raise ValueRangeError(f"--seeds is for implementations, and files are as they are, got {seeds}")
        what, results = "files", lambda seed: _results_of_files(*files)
    elif family == "video":
        asked = shape, quick, dtype, sparsity
        what, results = _video(names, asked, direction, same_lists, console)
    else:
        what, results = _case(names, (family, quick, case, dtype_named(dtype), direction), console)
    runs = []
    for own in every:  # one seed's tensors at a time
        one, other = results(own)
        both = [name for name in one if name in other]
        runs.append([difference_of(name, one[name], other[name], rtol, atol, AXES.get(name, 1)) for name in both])
    _show(runs, names, seed, console)
    console.print(Text(f"allclose: rtol {rtol:g}, atol {atol:g}; mean has the sign of first - second", style="dim"))
    _write(runs, f"{first} and {second}, {what}", names, every, outputs, console)
    if strict and not all(each.close for run in runs for each in run):
        raise typer.Exit(1)


def _check_family(family: str, options: dict[str, object]) -> None:
    """ValueRangeError if there is none of that name, or an option is another family's."""
    one_of(family, "--family", FAMILIES)
    for name, value in options.items():
        if value is not None and (family == "video") == (name == "--case"):
            where = "of attention; video has --shape and --sparsity" if name == "--case" else "for --family video"
            raise ValueRangeError(f"{name} is {where}, got {value!r} with --family {family}")


# ---------------------------------------------------------------- what is compared


def _results_of_files(first: Path, second: Path) -> Results:
    """The tensors of both, by name.  ValueRangeError for files with different names in them."""
    a, b = _tensors_of(first), _tensors_of(second)
    if a.keys() != b.keys():
        raise ValueRangeError(
            f"{first} holds {', '.join(a)}, but {second} holds {', '.join(b)}: the names must be the same"
        )
    return a, b


def _tensors_of(path: Path) -> dict[str, Tensor]:
    """Raises DtypeError for what holds no tensors."""
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


def _case(
    names: tuple[str, str], chosen: tuple[str, bool, str | None, str, str], console: Console
) -> tuple[str, Callable[[int], Results]]:
    """(the case's name, what gives the results of a seed)."""
    for name in names:
        check_name(name)
    runtime = prepare_runtime()
    case = engine_named(chosen[0]).cases(Request(*chosen[1:]), runtime.gpu)[0]
    console.print(Text(f"{runtime.note}\n{case.name}", style="dim"))
    for name in names:
        if case.pattern is not None and name in IMPLEMENTATIONS and not IMPLEMENTATIONS[name].lists:
            console.print(Text(f"{name} computes every pair, whatever the lists say", style="yellow"))
    if not case.backward and (silent := without_lse(names)):
        console.print(Text(f"no rows of lse: {' and '.join(silent)} tell none", style="dim"))

    def results(seed: int) -> Results:
        inputs = make_inputs(case, runtime.device, seed)
        first, second = (attention_results(name, inputs, runtime.device) for name in names)
        return first, second

    return case.name, results


def _video(
    names: tuple[str, str], asked: tuple[str | None, bool, str, float | None], direction: str, same_lists: bool,
    console: Console,
) -> tuple[str, Callable[[int], Results]]:  # fmt: skip
    """(the pipeline's shape and selection, what gives the results of a seed); asked: --shape, --quick, dtype, --sparsity."""
    backward = direction == "backward"
    check_video_names(names, backward, same_lists)
    runtime = prepare_runtime()
    text, quick, dtype, sparsity = asked
    usual = (1, 2, 256, 16) if not runtime.gpu else (1, 4, 4096, 128) if quick else (1, 12, 23296, 128)
    shape = video_shape(text, usual, dtype)
    select = SelectOptions() if sparsity is None else SelectOptions(method="top_k", sparsity=sparsity / 100)
    by = "selected by Gini" if sparsity is None else f"{sparsity:g} % sparsity"
    lists = ", the second over the first one's lists" if same_lists else ""
    size = f"{shape.batch} x {shape.seq} tokens, {shape.heads} heads, D={shape.dim}, {shape.dtype}"
    what = f"video pipeline {direction}, {size}, {by}{lists}"
    console.print(Text(f"{runtime.note}\n{what}", style="dim"))
    return what, lambda seed: video_results(names, shape, select, runtime.device, seed, backward, same_lists)


# ---------------------------------------------------------------- what is shown


FACTS = ("tensor", "of", "shape", "dtype", "norm", "max", "min", "NaN, inf", "SHA-256")
DIFFERENCES = (
    "tensor", "max abs", "mean", "mean abs", "RMSE", "relative L2", "differing", "of", "NaN, inf", "allclose"
)  # fmt: skip
ALL = "all seeds"


def _facts_rows(found: Sequence[Difference], names: tuple[str, str], digits: int = 16) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (each.name, name, " x ".join(map(str, facts.shape)), facts.dtype, f"{facts.norm:.9g}", f"{facts.largest:.6g}",
         f"{facts.smallest:.6g}", str(facts.specials), facts.sha256[:digits])
        for each in found
        for name, facts in zip(names, (each.first, each.second), strict=True)
    )  # fmt: skip


def _difference_row(name: str, *found: Difference) -> tuple[str, ...]:
    """Of one tensor, over all seeds: the largest difference and relative L2, means over all numbers, sums of counts."""
    sums = (sum(each.differing for each in found), sum(each.elements for each in found), sum(d.specials for d in found))
    close = "same bits" if all(d.identical for d in found) else "yes" if all(d.close for d in found) else "no"
    return (
        name, f"{max(each.max_abs for each in found):.3e}", f"{fmean(each.mean for each in found):+.2e}",
        f"{fmean(each.mean_abs for each in found):.3e}", f"{fmean(each.rmse**2 for each in found) ** 0.5:.3e}",
        f"{max(each.relative_l2 for each in found):.3e}", *map(str, sums), close,
    )  # fmt: skip


def _show(runs: Sequence[Sequence[Difference]], names: tuple[str, str], first_seed: int, console: Console) -> None:
    """What the first seed's tensors are, then how they differ: a column a tensor, or with several seeds a column a seed."""
    for each in runs[0]:
        columns = zip(FACTS[2:], *(row[2:] for row in _facts_rows([each], names)), strict=True)
        print_tables(console, (each.name, *names), tuple(columns), keys=1)
    if len(runs) == 1:
        _show_differences("difference", [_difference_row(each.name, each) for each in runs[0]], console)
        return
    for tensor in zip(*runs, strict=True):
        rows = [_difference_row(f"seed {seed}", each) for seed, each in enumerate(tensor, first_seed)]
        _show_differences(tensor[0].name, [*rows, _difference_row(ALL, *tensor)], console)


def _show_differences(corner: str, rows: Sequence[tuple[str, ...]], console: Console) -> None:
    """A column a row."""
    head, *columns = zip((corner, *DIFFERENCES[1:]), *rows, strict=True)
    print_tables(console, head, columns)


def _write(
    runs: Sequence[Sequence[Difference]],
    title: str,
    names: tuple[str, str],
    seeds: range,
    outputs: Outputs,
    console: Console,
) -> None:
    """Write the files that were asked for and say so; with several seeds a tensor's name has its seed behind it."""
    several = len(runs) > 1
    found = [
        replace(each, name=f"{each.name}, seed {number}") if several else each
        for number, run in zip(seeds, runs, strict=False)
        for each in run
    ]

    def document() -> dict[str, Any]:
        tensors = [asdict(each) for each in found]
        return {"first": names[0], "second": names[1], "title": title, "seeds": [*seeds], "tensors": tensors}

    def html() -> str:
        rows = [_difference_row(each.name, each) for each in found]
        if several:
            rows += [_difference_row(f"{each[0].name}, {ALL}", *each) for each in zip(*runs, strict=True)]
        parts = (
            page.Rows(FACTS, _facts_rows(found, names, 64)),
            page.Rows(DIFFERENCES, tuple(rows)),
            page.Words(f"allclose at rtol {found[0].rtol:g}, atol {found[0].atol:g}." if found else ""),
            _picture(found),
        )
        return page.to_html(title, parts)

    outputs.write(console, json=document, png=lambda: _picture(found).figure, html=html)


def _picture(found: list[Difference]) -> page.Picture:
    """Of each tensor how many differences there are of each size, and where the largest are."""
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
