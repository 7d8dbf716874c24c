"""`tilefold bench`: the library beside others on named cases, every output checked before it is timed."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tilefold.cli.bench_epilogs import EPILOGS, HELP
from tilefold.cli.bench_flow import Session, peer_names
from tilefold.cli.bench_parallel import EPILOG as PARALLEL_EPILOG
from tilefold.cli.bench_parallel import parallel
from tilefold.cli.bench_runs import COMPARE_EPILOG, compare_runs, peers
from tilefold.cli.bench_suite import EPILOG as SUITE_EPILOG
from tilefold.cli.bench_suite import suite
from tilefold.cli.bench_video import EPILOG as VIDEO_EPILOG
from tilefold.cli.bench_video import video
from tilefold.cli.options import RunOptions, with_run
from tilefold.cli.runtime import dtype_named, prepare_runtime, user_errors

ATTENTION = ("dense", "sparse")
# Options -> the families that have them: the others' cases say it, or they do it always.
ONLY = {**dict.fromkeys(("dtype", "direction", "host", "graph"), ATTENTION), "sparsity": ("sparse",)}

EPILOG = """
**Examples**

    tilefold bench dense --quick

    tilefold bench suite quick --json before.json

    tilefold bench suite quick --compare before.json --fail-slower 5

    tilefold bench decode --against fa4,flashinfer --results benchmarks/results --refresh decode.md

    tilefold bench peers

dense, sparse, decode, gemm, conv, lowbit and move have the same options; `tilefold bench dense --help` says what is measured,
and how.
"""

app = typer.Typer(
    no_args_is_help=True,
    epilog=EPILOG,
    help="Time tilefold and other libraries, each output checked first; compare runs, and keep them.",
)


@with_run
@user_errors
def bench(
    family: str,
    run: RunOptions,
    quick: Annotated[bool, typer.Option("--quick", help="Few and small cases (tiny ones in the interpreter).")] = False,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    direction: Annotated[str, typer.Option(help="forward, backward or both.")] = "forward",
    sparsity: Annotated[
        str | None,
        typer.Option(metavar="PERCENTS", help="Random lists at these instead of the usual cases, as 1,10,20,...,99."),
    ] = None,
    host: Annotated[bool, typer.Option("--host", help="Measure the host cost of a call, too.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Measure CUDA-graph replays, too (GPU).")] = False,
) -> None:
    """Time the cases of a family and write what was asked for."""
    from tilefold.bench.choice import figures_in
    from tilefold.bench.engine import Request, peers_of

    names, must = peer_names(run)
    sparsities = () if sparsity is None else figures_in(sparsity, "--sparsity")
    request = Request(quick, run.case, dtype_named(dtype), direction, sparsities)
    session = Session(run, [family], prepare_runtime())
    from tilefold.bench.setting import Options
    from tilefold.bench.suites import engine_named

    engine, runtime = engine_named(family), session.runtime
    cases = engine.cases(request, runtime.gpu)
    chosen = peers_of(engine, names, runtime.device, must)
    session.begin()
    options = Options(session.rounds, host=host, graph=graph, budget_s=run.budget)
    done = session.measure(engine, cases, chosen, options, host or graph)
    if done.results or run.compare is not None:
        session.finish([done])


def of_family(family: str) -> Callable[..., None]:
    """`bench` as the command of one family: its options without the first argument and without those that are not for it."""
    left_out = ("family", *(option for option, families in ONLY.items() if family not in families))

    @functools.wraps(bench)
    def command(**options: Any) -> None:
        bench(family=family, **options)

    parameters = inspect.signature(bench).parameters.values()
    command.__signature__ = inspect.Signature([p for p in parameters if p.name not in left_out])  # type: ignore[attr-defined]
    command.__doc__ = HELP[family]
    return command


for _name in HELP:
    app.command(name=_name, epilog=EPILOGS[_name])(of_family(_name))
app.command(name="video", epilog=VIDEO_EPILOG)(video)
app.command(name="parallel", epilog=PARALLEL_EPILOG)(parallel)
app.command(name="suite", epilog=SUITE_EPILOG)(suite)
app.command(name="compare", epilog=COMPARE_EPILOG)(compare_runs)
app.command(name="peers")(peers)
