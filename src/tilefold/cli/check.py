"""`tilefold check`: every kernel against its fp64 oracle, on this machine."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

import tilefold
from tilefold import reference
from tilefold.bench.loop import first_line
from tilefold.cli.check_cases import CheckCase, arguments, check_cases
from tilefold.cli.progress import measuring
from tilefold.cli.runtime import Runtime, prepare_runtime, say, user_errors
from tilefold.errors import PlanError, Unsupported
from tilefold.plan import AttentionPlan
from tilefold.plan.sparse.sparse import SparsePlan
from tilefold.reference import Comparison

_ALL, _QUICK = check_cases(False, gpu=False), check_cases(True, gpu=False)
_FUNCTIONS, _DIMS = ", ".join(sorted({case.function for case in _ALL})), [case.dim_qk for case in _ALL]
EPILOG = f"""
**Examples**

    tilefold check --quick

    tilefold check

Each output is compared with an fp64 computation that writes every score out. The error may be what rounding
in the same dtype does to the same computation, in every element and in relative L2; the same holds for the lse.

**Covered**: {len(_ALL)} calls ({len(_QUICK)} with --quick) of {_FUNCTIONS}: masks, changes of scores, sinks,
block lists, packed and paged layouts, head dims {min(_DIMS)} to {max(_DIMS)}, out and lse.

**Not covered**: gradients, decoding over caches, dropout, e4m3, products of matrices, convolutions, several GPUs; `make test` of
a checkout covers these.

Exit code 1 if a result is wrong; 2 if none is, but a case could not run: an import, a compilation or a launch failed.
"""


SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class Result:
    """How one case went. ok: None if there is no result to judge; note says why: the device does not take the case, or it raised
    (failed)."""

    case: CheckCase
    kernel: str
    ok: bool | None
    out: Comparison | None = None
    note: str = ""
    failed: bool = False


def run_check(case: CheckCase, device: str) -> Result:
    """Run one case and judge out and lse."""
    (q, k, v), where, options = arguments(case, device)
    planner: Any = tilefold.sparse_plan if case.lists else tilefold.attention_plan
    plan: AttentionPlan | SparsePlan | None = None
    kernel = "none"
    try:
        if max(queries for queries, _ in case.lengths):
            plan = planner(q, k, v, **where, **options)
            if case.kernel not in (None, plan.kernel):
                plan = plan.with_tile(kernel=case.kernel)
            if isinstance(plan, SparsePlan):
                plan = plan.with_tile(splits=case.splits)
            kernel = plan.kernel
    except (PlanError, Unsupported) as error:
        return Result(case, case.kernel or kernel, None, note=str(error))
    out, lse = getattr(tilefold, case.function)(q, k, v, *where.values(), **options, return_lse=True, plan=plan)
    out, lse = out.cpu(), lse.cpu()
    oracle = getattr(reference, case.oracle)
    if case.oracle != case.function:
        index = where.pop("index")
        where |= {"max_seqlen_q": index.seq_q, "max_seqlen_k": index.seq_k} if case.packed else {}
    wanted = oracle(q, k, v, *where.values(), **options)
    plain = oracle(q, k, v, *where.values(), **options, dtype=q.dtype)
    outs, lses = (
        reference.compare(got, exact, rough, unit)
        for got, exact, rough, unit in zip((out, lse), wanted, plain, (0.0, 1.0), strict=True)
    )
    note = "" if lses.ok else f"lse: {lses}"
    return Result(case, kernel, outs.ok and lses.ok, outs, note or ("" if outs.ok else str(outs)))


def run_all(cases: tuple[CheckCase, ...], runtime: Runtime, console: Console) -> list[Result]:
    """Run the cases under a progress bar; an exception in one is its result, the others still run."""
    results: list[Result] = []
    with measuring(console, len(cases), verb="checking") as step:
        for case in cases:
            step(case.title, "beside fp64")
            try:
                results.append(run_check(case, runtime.device))
            except Exception as error:  # a check must say what broke in which case, and go on
                note = f"{type(error).__name__}: {first_line(error)}"
                results.append(Result(case, case.kernel or "?", None, note=note, failed=True))
    return results


def table_of(results: list[Result]) -> Table:
    """One row per case."""
    table = Table(box=None, pad_edge=False)
    for heading in ("case", "kernel"):
        table.add_column(heading, no_wrap=True)  # on a narrow terminal these give way; the verdict never does
    table.add_column("dtype", no_wrap=True, min_width=5)
    for heading in ("error", "limit", "rel. L2"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=7)
    table.add_column("", no_wrap=True, min_width=9)
    for result in results:
        start = (result.case.title, result.kernel.removeprefix("attention_"), SHORT[result.case.dtype])
        if result.ok is None:
            table.add_row(*start, "", "", "", "[bold red]no result[/]" if result.failed else "[dim]not here[/]")
            continue
        out = result.out
        figures = [f"{value:.1e}" for value in (out.max_error, out.max_limit, out.l2_error)] if out else [""] * 3
        table.add_row(*start, *figures, "[green]ok[/]" if result.ok else "[bold red]WRONG[/]")
    return table


@user_errors
def check(quick: Annotated[bool, Option("--quick", help="About half of the cases.")] = False) -> None:
    """Compare the forward kernels of attention with their fp64 oracles on this machine."""
    runtime = prepare_runtime()
    console = Console()
    console.print(Text(runtime.note, style="dim"))
    results = run_all(check_cases(quick, runtime.gpu), runtime, console)
    console.print(table_of(results))
    grouped: dict[tuple[bool, str], list[str]] = {}
    for result in results:
        if result.note:
            grouped.setdefault((result.ok is False or result.failed, result.note), []).append(result.case.title)
    for (bad, note), titles in grouped.items():
        console.print(Text(f"{'; '.join(titles)}: {note}", style="red" if bad else "dim"), soft_wrap=True)
    failed = sum(result.failed for result in results)
    wrong = sum(result.ok is False for result in results)
    right = sum(result.ok is True for result in results)
    kernels = ", ".join(sorted({result.kernel for result in results if result.ok} - {"none"}))
    what = [f"{failed} of {len(results)} cases could not run: nothing is said of them."] * bool(failed)
    say([*what, *[f"{wrong} of {wrong + right} cases are WRONG."] * bool(wrong)], console, "bold red")
    if wrong or failed:
        raise typer.Exit(1 if wrong else 2)
    console.print(Text(f"All {right} cases agree with fp64 ({kernels}).", style="bold green"))
