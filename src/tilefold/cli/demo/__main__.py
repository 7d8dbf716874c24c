"""`python -m tilefold.cli.demo`: the demo without the `tilefold` command, with argparse only."""

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Run it. Exit code 0 ok, 1 a check failed, 2 wrong usage or something is missing."""
    parser = argparse.ArgumentParser(prog="python -m tilefold.cli.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the results (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer sentences")
    parser.add_argument("--layer", type=int, default=3, help="layer of the heat map, from 0 (%(default)s)")
    parser.add_argument("--head", type=int, default=1, help="head of the heat map, from 0 (%(default)s)")
    parser.add_argument("--sentence", type=int, default=0, help="sentence of the heat map, from 0 (%(default)s)")
    given = parser.parse_args()
    import torch
    from rich.console import Console

    from tilefold.cli.demo import DemoOptions, run_demo
    from tilefold.errors import TilefoldError
    from tilefold.ops.device import interpreting

    device = "cpu" if interpreting() or not torch.cuda.is_available() else "cuda"
    options = DemoOptions(given.out, given.quick, device, given.layer, given.head, given.sentence)
    try:
        return run_demo(options, Console()).exit_code
    except TilefoldError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
