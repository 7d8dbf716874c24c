"""`tilefold bench video`: the sparse video pipeline over sparsity, length and cached tokens, beside dense attention."""

from typing import Annotated

from typer import Option

from tilefold.bench.choice import figures_in
from tilefold.bench.setting import Options
from tilefold.bench.suites import ENGINES
from tilefold.bench.video import report
from tilefold.bench.video.engine import DEFAULTS, SHAPES
from tilefold.bench.video.stages import LISTED, PEERS
from tilefold.bench.video.sweep import SWEEPS, Point, points_of
from tilefold.cli.bench_flow import Session
from tilefold.cli.options import Budget, Html, Json, Markdown, Png, Results, RunOptions, integers, names_from
from tilefold.cli.runtime import Outputs, Runtime, prepare_runtime, user_errors, video_shape
from tilefold.errors import ValueRangeError
from tilefold.plan.sparse.video import VideoShape

EPILOG = """
**Examples**

    tilefold bench video

    tilefold bench video --sweep sparsity --peers cudnn,fa4 --html video.html --results benchmarks/results

    tilefold bench video --sweep length --values 8192,32768 --sparsity 80,90 --budget 90

    tilefold bench video --sweep cached --values 8192,131072 --page-size 128 --json cached.json

**Sweeps**: sparsity leaves out so many per cent of the blocks (top-k by the coarse scores); length is self-attention over so many
tokens; cached is one step of streaming, the newest block's queries over a cache of so many tokens, in one piece and in pages.

**Columns**: fine is block-sparse attention alone; stages the sum of coarse, select, fine and fuse (and append to the cache), each
called by itself; total the whole pipeline as a user calls it. TFLOP/s are the fine stage's on the listed blocks, TB/s what it
draws of K and V. Beside each dense peer: how many times as fast the fine stage and the total are; beside each that follows the
fine stage's lists (bsa, tk, fastvideo, flex, fa4-lists): how many times as fast the fine stage is.

**--module**: `tilefold.nn.SparseVideoAttention` by parts, with and without norms of q and k, beside the same layer over dense
attention, forward and both ways; over its products and the pipeline alone, and over the module. Checked is the attention of
each layer; N of --shape is that of --grid.

    tilefold bench video --module --grid 16,28,52 --sparsity 65.1,90 --peers fa4,cudnn

**Method**: sampled rows of each output are compared with fp64; what is wrong is not timed. Times are medians between GPU events
with a cold L2 cache, in rounds whose order alternates; cached, and all with --graph, as replays of CUDA graphs. Exit code 1 if a
result of tilefold is wrong.
"""


@user_errors
def video(
    sweep: Annotated[
        str, Option(metavar="NAMES", help="Comma-separated: sparsity, length, cached.")
    ] = "sparsity,cached",
    values: Annotated[
        str | None,
        Option(metavar="NUMBERS", help="What one sweep goes through: per cent, or tokens.", show_default="usual ones"),
    ] = None,
    quick: Annotated[bool, Option("--quick", help="The first value of each sweep, one turn.")] = False,
    module: Annotated[bool, Option("--module", help="A layer of a video model instead of the sweeps.")] = False,
    grid: Annotated[str | None, Option(metavar="T,H,W", help="Tokens of --module.", show_default="16,28,52")] = None,
    sparsity: Annotated[
        str | None,
        Option(
            metavar="NUMBERS",
            help="Per cent, of length, cached and --module.",
            show_default="80,90; cached 90; 65.1,90",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        Option(metavar="B,H,N,D", help="Batch, heads, tokens (of sparsity), head dim.", show_default="1,12,23296,128"),
    ] = None,
    kv_heads: Annotated[int | None, Option(min=1, help="KV heads.", show_default="as many as heads")] = None,
    block: Annotated[int, Option(help="Tokens of a block.")] = 64,
    page_size: Annotated[int, Option(min=0, help="Of the paged caches; 0: only contiguous ones.")] = 64,
    dtype: Annotated[str, Option(help="bf16, fp16 or fp32.")] = "bf16",
    peers: Annotated[
        str | None, Option(metavar="NAMES", help="Dense attention, comma-separated, or none.", show_default="cudnn,fa4")
    ] = None,
    graph: Annotated[bool, Option("--graph", help="Time CUDA-graph replays everywhere (GPU).")] = False,
    rounds: Annotated[int, Option(min=1, help="Turns that each call gets.")] = 3,
    budget: Budget = None,
    json: Json = None,
    markdown: Markdown = None,
    png: Png = None,
    html: Html = None,
    results: Results = None,
) -> None:
    """Sweep the sparse video pipeline over sparsity, length or cached tokens, beside dense attention."""
    outputs = Outputs(png=png, html=html)
    run = RunOptions(json=json, markdown=markdown, results=results, power=False)
    session = Session(run, prepare_runtime(kernels=False))
    engine, runtime = ENGINES["video"], session.runtime
    made = video_shape(shape, SHAPES[runtime.gpu], dtype, kv_heads, block)
    if module:
        given = {"--values": values is not None, "--png": png is not None, "--html": html is not None, "--graph": graph,
                 "--sweep": sweep != "sparsity,cached", "--block": block != 64, "--page-size": page_size != 64}  # fmt: skip
        if wrong := [name for name, is_given in given.items() if is_given]:
            raise ValueRangeError(
                f"{', '.join(wrong)} cannot be given with --module, which takes cubes of 4 x 4 x 4 tokens"
            )
        return _module(session, made, grid, sparsity, peers, Options(rounds, budget_s=budget), quick)
    if grid is not None:
        raise ValueRangeError(f"--grid is for --module, got {grid!r}")
    points = _points(sweep, made, (values, sparsity), page_size, runtime, quick)
    names = engine.usual(runtime.device) if peers is None else names_from(peers, "--peers", (*PEERS, *LISTED))
    session.begin()
    options = Options(rounds if runtime.gpu and not quick else 1, graph=graph, budget_s=budget)
    done = session.measure(engine, points, engine.beside(names, runtime.device), options)
    if done.results:
        outputs.write(
            session.console,
            png=lambda: report.picture_of(done.results).figure,
            html=lambda: report.to_html(done.results, session.setting),
        )
    session.finish([done])


def _points(
    sweep: str, shape: VideoShape, given: tuple[str | None, str | None], page_size: int, runtime: Runtime, quick: bool
) -> tuple[Point, ...]:
    """All points of the sweeps; given: the options --values and --sparsity; quick: one value and one sparsity of each."""
    sweeps = names_from(sweep, "--sweep", tuple(SWEEPS))
    if not sweeps:
        raise ValueRangeError(f"--sweep must name at least one of {', '.join(SWEEPS)}, got {sweep!r}")
    values, sparsities = (
        () if text is None else figures_in(text, name)
        for text, name in zip(given, ("--values", "--sparsity"), strict=True)
    )
    if values and len(sweeps) > 1:
        raise ValueRangeError(f"--values needs one --sweep that they belong to, got {sweep!r}")
    if sparsities and sweeps == ("sparsity",):
        raise ValueRangeError(f"--sparsity is for length and cached; --sweep sparsity takes --values, got {given[1]!r}")
    pages = (None, page_size) if page_size else (None,)
    found: list[Point] = []
    for name in dict.fromkeys(sweeps):
        usual, fixed = DEFAULTS[name][runtime.gpu]
        most = 1 if quick else None
        found += points_of(name, shape, (values or usual)[:most], (sparsities or fixed)[:most], pages)
    return tuple(found)


def _module(
    session: Session, shape: VideoShape, grid: str | None, sparsity: str | None, peers: str | None, options: Options,
    quick: bool,
) -> None:  # fmt: skip
    """`--module`."""
    from tilefold.bench.video.module import GRID, SPARSITIES, ModuleEngine, cases_of

    engine, gpu = ModuleEngine(), session.runtime.gpu
    names = engine.usual(session.runtime.device) if peers is None else names_from(peers, "--peers", PEERS)
    tokens = integers(grid, "--grid", 3) if grid else GRID[gpu]
    sparsities = figures_in(sparsity, "--sparsity") if sparsity else SPARSITIES[gpu]
    cases = cases_of(shape, tokens, sparsities)[: 1 if quick else None]
    session.begin()
    session.finish([session.measure(engine, cases, [engine.known[name] for name in ("tilefold", *names)], options)])
