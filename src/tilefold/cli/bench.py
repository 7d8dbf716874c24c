"""`tilefold bench`: the library beside others on named cases, every output checked before it is timed."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Option

from tilefold.bench.choice import figures_in, installed
from tilefold.bench.engine import Request
from tilefold.bench.setting import Options
from tilefold.bench.suites import ENGINES, engine_named
from tilefold.cli import bench_parallel, bench_suite, bench_video
from tilefold.cli.bench_flow import Session
from tilefold.cli.options import RunOptions, dtype_named, names_from, with_run
from tilefold.cli.runtime import prepare_runtime, print_tables, user_errors
from tilefold.ops.environment import installed as version_of

ATTENTION = ("dense", "sparse")
# Options -> the families that have them: the others' cases say it, or they do it always.
ONLY = {**dict.fromkeys(("dtype", "direction", "graph"), ATTENTION), "sparsity": ("sparse",)}

EPILOG = """
**Examples**

    tilefold bench dense --quick

    tilefold bench suite quick --json quick.json

    tilefold bench decode --peers fa4,flashinfer --results benchmarks/results

    tilefold bench peers

dense, sparse, decode, gemm, conv, lowbit and move have the same options (`--graph`: dense and sparse alone);
`tilefold bench dense --help` says what is measured, and how.
"""

# Of each family: the first line of its help, and what that says below the options.
HELP = {
    "dense": "Attention over all pairs, full and causal, beside other libraries.",
    "sparse": "Attention over lists of blocks beside other libraries.",
    "decode": "Time one step of generation over contiguous, paged and quantised KV caches beside other libraries.",
    "gemm": "Time matrix products, batched or not, with what is fused behind them, beside torch.",
    "conv": "Time two-dimensional convolutions beside torch.",
    "lowbit": "Time products with weights of 8, 4, 3 and 2 bits beside 16-bit ones and other libraries.",
    "move": "Time sums and transposes, bound by the bytes that they move, beside torch.",
}
ATTENTION_EPILOG = """
**Examples**

    tilefold bench dense --quick

    tilefold bench dense --peers cudnn,flash --case d128,causal --markdown dense.md

    tilefold bench dense --graph --json dense.json --results benchmarks/results

    tilefold bench sparse --direction both --case "random_s80|video" --peers bsa,tk,cudnn --results benchmarks/results

    tilefold bench sparse --sparsity 1,10,20,...,99 --peers cudnn,bsa

    tilefold bench video --sweep length --peers cudnn,fa4

**Peers**: cudnn, flash (FlashAttention-2), efficient and math are backends of torch's scaled_dot_product_attention; flex is
FlexAttention, compiled; fa4 is flash_attn.cute, if installed; none measures tilefold alone. For sparse also bsa (cuDNN
block-sparse), tk and fastvideo (fastvideo-kernel's ThunderKittens and Triton), if installed, and portable (tilefold's own
portable kernel, where the plan takes another one). For gradients of dense attention also fa4-det (fa4 with deterministic=True)
and non-deterministic (tilefold with deterministic=False, where another kernel makes them then): tilefold's rows are
deterministic, fa4's are not. Peers that know no lists compute every pair, and are judged by that.

**Lists** keep at least as many KV blocks as the sparsity asks for; the column kept says how many, of how many.

**Method**: all implementations get the same normally distributed inputs. Each output is compared with fp64 on sampled rows; a
wrong one is reported and not timed. Times are medians between GPU events with a cold L2 cache, taken in rounds whose order
alternates. Backward, the gradients of q, k and v are computed over a graph that is kept. Rates of sparse cases count the listed
blocks only, dense peers' too. Clocks and power are read meanwhile, and a clock that moved is said. Exit code 1 if a result of
tilefold is wrong.
"""
DECODE_EPILOG = """
**Examples**

    tilefold bench decode --quick

    tilefold bench decode --case "b1,n8192|b32,page16" --peers plain,cudnn,fa4 --markdown decode.md

    tilefold bench decode --case "mla|fp8|int8|uneven" --rounds 3 --budget 120 --results benchmarks/results

**Peers**: cudnn, flash (FlashAttention-2) and math are backends of torch's scaled_dot_product_attention; flex is FlexAttention,
compiled; fa4 is flash_attn.cute, flashinfer and vllm (its Triton kernel) are used if installed; plain is tilefold itself over
the same numbers, contiguous and in the queries' dtype: what pages cost and what one byte a number gains. none measures tilefold
alone. Peers without pages or quantised caches get the plain numbers.

**Columns**: us of a call, GB/s of the bytes that a step has to move, how many times as long as a plain copy of as many bytes,
timed in the same rounds, would take (x floor), how many times as fast as the fastest other library (best).

**Method**: every output is compared with fp64, all sequences and heads; what is wrong is reported and not timed. Times are
medians between GPU events with a cold L2 cache, and of CUDA-graph replays over caches of six times the L2 cache, taken in rounds
whose order alternates. Without a GPU tiny cases run in plain torch, with TRITON_INTERPRET=1 in the interpreter. Exit code 1 if a
result of tilefold is wrong.
"""

_MATRIX_COLUMNS = """us of a call, GB/s of the bytes that have to move, TFLOP/s, the share of the roof (the longer one of
those bytes at the rate of a plain copy, timed in the same rounds, and the operations at the device's rate, in the time), how many
times as fast as the fastest other library (best)."""
_MOVE_COLUMNS = """us of a call, GB/s of the bytes that have to move, how many times as long as a plain copy of as many bytes,
timed in the same rounds, would take (x floor), how many times as fast as the fastest other library (best)."""
_MATRIX = f"""
**Columns**: {_MATRIX_COLUMNS}

**Method**: every output is compared with fp64 in full; what is wrong is reported and not timed. Times are medians between GPU
events with a cold L2 cache, and of CUDA-graph replays over inputs of six times the L2 cache, taken in rounds whose order
alternates. Without a GPU tiny cases run in plain torch, with TRITON_INTERPRET=1 in the interpreter. Exit code 1 if a result of
tilefold is wrong.
"""
EPILOGS = {
    "dense": ATTENTION_EPILOG,
    "sparse": ATTENTION_EPILOG,
    "decode": DECODE_EPILOG,
    "gemm": "**Peers**: torch (cuBLAS, bias and activation as calls of their own).\n\n    tilefold bench gemm --quick\n"
    + _MATRIX,
    "conv": "**Peers**: torch (cuDNN, with its benchmark mode).\n\n    tilefold bench conv --quick\n" + _MATRIX,
    "lowbit": "**Peers**: cublas (the dequantised weight in 16 bits), tinygemm (torch's int4, the same codes), torchao, "
    "gemlite and bitsandbytes, if installed: those that round by themselves are judged by their own weights.\n\n"
    '    tilefold bench lowbit --case "4bit,m1_" --peers cublas,tinygemm\n' + _MATRIX,
    "move": "**Peers**: torch (x + y, x.t().contiguous()).\n\n    tilefold bench move --case transpose --markdown transpose.md\n"
    + _MATRIX.replace(_MATRIX_COLUMNS, _MOVE_COLUMNS),
}

app = typer.Typer(
    no_args_is_help=True,
    epilog=EPILOG,
    help="Time tilefold and other libraries, each output checked first.",
)


@with_run
@user_errors
def bench(
    family: str,
    run: RunOptions,
    quick: Annotated[bool, Option("--quick", help="Few and small cases (tiny ones without a GPU).")] = False,
    dtype: Annotated[str, Option(help="bf16, fp16 or fp32.")] = "bf16",
    direction: Annotated[str, Option(help="forward, backward or both.")] = "forward",
    sparsity: Annotated[
        str | None,
        Option(metavar="PERCENTS", help="Random lists at these instead of the usual cases, as 1,10,20,...,99."),
    ] = None,
    graph: Annotated[bool, Option("--graph", help="Measure CUDA-graph replays, too (GPU).")] = False,
) -> None:
    """Time the cases of a family and write what was asked for."""
    sparsities = () if sparsity is None else figures_in(sparsity, "--sparsity")
    request = Request(quick, run.case, dtype_named(dtype), direction, sparsities)
    session = Session(run, prepare_runtime(kernels=False))
    engine, runtime = engine_named(family), session.runtime
    cases = engine.cases(request, runtime.gpu)
    names = None if run.peers is None else names_from(run.peers.lower(), "--peers", tuple(engine.known))
    session.begin()
    options = Options(session.rounds, graph=graph, budget_s=run.budget)
    done = session.measure(engine, cases, engine.beside(names, runtime.device), options, graph)
    if done.results:
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
app.command(name="video", epilog=bench_video.EPILOG)(bench_video.video)
app.command(name="parallel", epilog=bench_parallel.EPILOG)(bench_parallel.parallel)
app.command(name="suite", epilog=bench_suite.EPILOG)(bench_suite.suite)


@app.command()
def peers() -> None:
    """List the implementations that could be measured, and which of them are installed here."""
    rows = []
    for engine in ENGINES.values():
        for one in engine.known.values():
            if one.name != "tilefold":
                there = version_of(one.package) or ("here" if installed(one) else "not installed")
                rows.append((engine.name, one.name, one.package, there, one.what))
    print_tables(Console(), ("family", "name", "package", "version", "what"), rows, left=5, keys=2)
