"""`tilefold video`: which blocks of a video each policy attends, and what that leaves out."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from tilefold.bench.page import Rows, Words
from tilefold.cli.runtime import prepare_runtime, say, user_errors, write_report
from tilefold.cli.runtime import show as show_parts
from tilefold.errors import ValueRangeError
from tilefold.sparse import GridTiling

EPILOG = """
**Examples**

    tilefold video demo

    tilefold video demo --head 3 --query 12,10,10 --sparsity 0.9

    tilefold video calibrate --error 0.05

    tilefold video show out/calibrate/policy.json --layer 1 --head 2

    tilefold video calibrate mymodel:setup --error 0.02 --out out/mine

Exit code 1 if attention over listed blocks differs from fp64 by more than rounding allows.
"""

Query = Annotated[
    str | None, Option(metavar="T,H,W", help="The token whose block is shown.", show_default="in the middle")
]

app = typer.Typer(no_args_is_help=True, epilog=EPILOG)


@app.callback()
def video() -> None:
    """Sparse attention in video models: which blocks each policy attends, what it leaves out."""


@app.command(name="demo", epilog=EPILOG)
@user_errors
def demo(
    out: Annotated[Path, Option(metavar="DIR", help="Where to write the results.")] = Path("out/demo-video"),
    quick: Annotated[bool, Option("--quick", help="A smaller video.")] = False,
    sparsity: Annotated[float, Option(min=0, max=1, help="What policies that are told leave out.")] = 0.8,
    head: Annotated[int, Option(min=0, help="The head whose blocks are shown, 0 to 3.")] = 2,
    query: Query = None,
    seed: Annotated[int, Option(help="Of the rendered video.")] = 0,
) -> None:
    """Render a short video, attend it densely and by each policy, and draw the blocks that one query attends.

    Queries and keys are fixed random projections of its patches, turned by the rotary embedding: alike patches attend each
    other, near ones most. No model is loaded. Writes a page and a picture.
    """
    from tilefold.cli.video_demo import HEADS, policies_at

    _show(policies_at(sparsity), HEADS, out, quick, head, query, seed)


@app.command(name="show", epilog=EPILOG)
@user_errors
def show(
    policy: Annotated[Path, Argument(metavar="FILE", help="policy.json, as `calibrate` writes it.")],
    layer: Annotated[int, Option(min=0, help="Whose lists are shown, from 0.")] = 0,
    head: Annotated[int, Option(min=0, help="The head whose blocks are shown, from 0.")] = 0,
    query: Query = None,
    out: Annotated[Path, Option(metavar="DIR", help="Where to write the results.")] = Path("out/show-video"),
    quick: Annotated[bool, Option("--quick", help="A smaller video.")] = False,
    seed: Annotated[int, Option(help="Of the rendered video.")] = 0,
) -> None:
    """Draw the blocks that one query attends by the policy of a layer, over the frames of a rendered video.

    As `demo` does, with as many heads as the policy has.
    """
    from tilefold.cli.video_demo import policy_of

    chosen, heads = policy_of(policy, layer)
    _show([chosen], heads, out, quick, head, query, seed)


def _show(tried: list[Any], heads: int, out: Path, quick: bool, head: int, query: str | None, seed: int) -> None:
    """The table, the page and the picture; exit code 1 if a result is wrong."""
    import torch

    from tilefold.cli.video_demo import Demo

    runtime = prepare_runtime(kernels=False)
    console = Console()
    console.print(Text(runtime.note, style="dim"))
    if head >= heads:
        raise ValueRangeError(f"head must be 0 to {heads - 1}, got {head}")
    with torch.no_grad():
        found = Demo(runtime.device, quick, tried, head, query, seed, heads)
    show_parts(console, found.said())
    say(
        (f"wrote {path}" for path in write_report(out, "demo-video", "tilefold video demo", found.parts())), console, ""
    )
    if any(row[-1] != "ok" for row in found.rows):
        raise typer.Exit(1)


@app.command(name="calibrate", epilog=EPILOG)
@user_errors
def calibrate(
    model: Annotated[
        str | None,
        Argument(
            metavar="MODULE:FUNCTION",
            help="A function that returns (model, inputs) or (model, inputs, adapter); inputs: arguments by name, for each step.",
            show_default="a small model with planted heads",
        ),
    ] = None,
    error: Annotated[float, Option(help="The relative L2 error of the model's output that is allowed.")] = 0.05,
    cube: Annotated[
        str | None, Option(metavar="T,H,W", help="Tokens of a block.", show_default="the one that pads least")
    ] = None,
    out: Annotated[Path, Option(metavar="DIR", help="Where to write the results.")] = Path("out/calibrate"),
    quick: Annotated[bool, Option("--quick", help="A smaller video; without a model of your own only.")] = False,
) -> None:
    """Measure in each layer, head and step of a model what each policy leaves out, and fit the cheapest that meets an error.

    Writes policy.json (`tilefold.video.policy_from_json` reads it), a page and a picture. The fitted policy is compared with
    one policy for all heads that lists as many pairs.
    """
    from tilefold.cli.video_calibrate import FIT, HEADS, Report, planted, setup_of
    from tilefold.cli.video_demo import whole_numbers

    runtime = prepare_runtime(kernels=False)
    console = Console()
    console.print(Text(runtime.note, style="dim"))
    size = None if cube is None else GridTiling((1, 1, 1), whole_numbers(cube, "cube")).cube
    found = Report(setup_of(model) if model else planted(runtime.device, quick), error, size)
    show_parts(console, [Rows(HEADS, tuple(found.candidates())), Rows(FIT, tuple(found.fits())), Words(found.words)])
    say((f"wrote {path}" for path in found.write(out)), console, "")
