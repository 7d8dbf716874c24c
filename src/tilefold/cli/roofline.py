"""`tilefold roofline`: the roofs of this machine, measured or recorded, and kernels below them as PNG and interactive HTML."""

from pathlib import Path
from typing import Annotated

import torch
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from tilefold.cli.options import Png
from tilefold.cli.runtime import Outputs, prepare_runtime, say, table_of, user_errors
from tilefold.errors import DeviceError, ValueRangeError
from tilefold.plan.device import Device, device_named
from tilefold.profiling import roofline as drawing
from tilefold.profiling.roofs import Roofs, load_roofs, measure_roofs, store_roofs, with_roofs

EPILOG = """
**Examples**

    tilefold roofline --measure

    tilefold roofline before.json after.json --html roofline.html --png roofline.png

    tilefold roofline benchmarks/results/dense.jsonl --device h200 --html roofline.html

FILES are what `tilefold profile --json`, `tilefold bench --json` and `--results` wrote; each is a run of its own colour. A kernel
is drawn where its FLOPs over bytes and FLOPs over time are known. Measured roofs are kept for this GPU, driver, torch and triton
in the user's cache (TILEFOLD_ROOFS names another folder); without them, or with --device, the recorded ones are drawn, dashed.
"""


@user_errors
def roofline(
    files: Annotated[list[Path] | None, Argument(metavar="FILES", help="Results to draw.")] = None,
    measure: Annotated[bool, Option("--measure", help="Measure the roofs of this machine and keep them.")] = False,
    device: Annotated[
        str | None, Option(help="Recorded roofs of a known device, such as h200.", show_default="this machine")
    ] = None,
    match: Annotated[str | None, Option("--filter", metavar="TEXT", help="Only kernels whose name has TEXT.")] = None,
    html: Annotated[Path | None, Option(metavar="FILE", help="Write a page: hover, zoom, filter; no network.")] = None,
    png: Png = None,
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the measured roofs.")] = None,
) -> None:
    """Show what this machine can do at most, and how near to it kernels came."""
    outputs = Outputs(html=html, png=png, json=json)
    if measure and device:
        raise ValueRangeError("--measure measures this machine; it cannot be combined with --device")
    console = Console()
    record, roofs = _machine(measure, device, console)
    if roofs is not None:
        console.print(Text(f"{roofs.device}, measured {roofs.date[:10]}, driver {roofs.driver}", style="bold"))
        console.print(table_of(("roof", "", "how"), roofs.rows()))
    else:
        console.print(Text(f"{record.title}: roofs as recorded ({record.source})", style="bold"))
    if json is not None and roofs is None:
        raise ValueRangeError("--json writes measured roofs, and none were measured here: use --measure")
    runs = tuple(drawing.read_run(path, match) for path in files or ())
    say((f"{run.name}: {len(run.points)} kernels" for run in runs), console)
    picture = drawing.Picture(record, roofs is not None, runs)
    outputs.write(
        console,
        html=lambda: drawing.to_html(picture),
        png=lambda: drawing.figure_of(picture),
        json=lambda: roofs.to_json() if roofs else "",
    )


def _machine(measure: bool, name: str | None, console: Console) -> tuple[Device, Roofs | None]:
    """The device with its roofs, and what was measured of it, if anything."""
    if name is not None:
        return device_named(name), None
    if not torch.cuda.is_available() and not measure:
        raise DeviceError(
            "no GPU here whose roofs could be drawn: name a known one, --device h200, or --measure the interpreter"
        )
    runtime = prepare_runtime()
    record = runtime.record()
    if not measure:
        found = load_roofs()
        return with_roofs(record, found), found
    console.print(Text(runtime.note, style="dim"))
    found = measure_roofs(record, torch.device(runtime.device))
    kept = store_roofs(found) if runtime.gpu else None
    if kept is not None:
        say([f"kept in {kept}"], console)
    return with_roofs(record, found), found
