"""The typer application: one module per command, imported here, their heavy imports made when they run."""

import typer

import tilefold
from tilefold.cli import bench, check, compare, doctor, explain, kv_memory, ladder, profile, roofline, show, tune, video

HELP = """
Attention kernels in Triton: every variant is one fold of the online-softmax state over key/value tiles.

Without a GPU calls are plain torch, and so is what `bench` times; commands that look at kernels, and every one with
TRITON_INTERPRET=1, run them in Triton's interpreter, on small shapes. `explain` needs neither.

Exit codes: 0 ok, 1 a check failed, 2 wrong usage, an impossible request, or a check that could not run.
"""

EPILOG = "Start with `tilefold doctor` (what works here), then `tilefold demo` (a real model) and `tilefold check`."

app = typer.Typer(
    name="tilefold",
    help=HELP,
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command(name="demo", epilog=show.EPILOG)(show.demo)
app.command(name="check", epilog=check.EPILOG)(check.check)
app.add_typer(bench.app, name="bench")
app.command(name="compare", epilog=compare.EPILOG)(compare.compare)
app.command(name="explain", epilog=explain.EPILOG)(explain.explain)
app.command(name="kv-memory", epilog=kv_memory.EPILOG)(kv_memory.kv_memory)
app.command(name="ladder", cls=ladder.Ladder, epilog=ladder.EPILOG)(ladder.ladder)
app.add_typer(profile.app, name="profile")
app.command(name="roofline", epilog=roofline.EPILOG)(roofline.roofline)
app.command(name="tune", epilog=tune.EPILOG)(tune.tune)
app.add_typer(video.app, name="video")
app.command(name="doctor", epilog=doctor.EPILOG)(doctor.doctor)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True)) -> None:
    if version:
        typer.echo(f"tilefold {tilefold.__version__}")
        raise typer.Exit


root.__doc__ = HELP
