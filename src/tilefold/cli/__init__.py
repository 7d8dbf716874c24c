"""The command line: `tilefold demo | check | bench | compare | explain | tune | kv-memory | ladder | profile | roofline |
doctor`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the `tilefold` command. Exit codes: 0 ok, 1 a check failed, 2 usage or user error."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        print(
            f"tilefold: the command line needs the Python package {error.name!r}. Install it with\n\n"
            f"    pip install 'tilefold[cli]'        (or: pip install typer rich)\n\n"
            f"The library itself works without it: import tilefold.",
            file=sys.stderr,
        )
        sys.exit(2)
    from tilefold.cli.app import app

    app(prog_name="tilefold")
