"""The command line: a run of many processes, one worker of it, or one problem again."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any


def main(argv: list[str] | None = None) -> int:
    """0 if nothing was wrong, 1 if something was."""
    args = _arguments().parse_args(argv)
    if args.summary:
        from .report import summarise

        return summarise(args.summary, args.record)
    if args.union:
        from .report import tell_union

        return tell_union(args.union)
    if args.reproduce is None and args.worker is None:
        from .parent import run_all

        return run_all(args)
    setting = prepare(args.most, args.memcheck)
    import torch

    torch.set_num_threads(1)  # processes share the cores
    if args.worker is not None:
        from .worker import work

        return work(args, setting)
    return _reproduce(args.reproduce, setting, args.shrink)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sweep", description="a random sweep of every public operation against fp64"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="stop drawing then (default 60)")
    parser.add_argument("--jobs", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)), help="processes")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--out", type=Path, default=Path("out/sweep"), help="folder of the records of a run")
    parser.add_argument("--record", type=Path, help="a JSONL file that the run's row is added to")
    parser.add_argument("--commit", default="", help="what the record says was run (default: git's)")
    parser.add_argument("--ops", default="", help="families, separated by commas (default: all)")
    parser.add_argument("--each", type=int, default=24, help="problems a specialisation")
    parser.add_argument("--problems", type=int, default=0, help="stop after so many, 0: by time alone")
    parser.add_argument("--most", type=int, default=0, help="about the longest length (default: 600 on a GPU, 40 else)")
    parser.add_argument("--memcheck", action="store_true",
                        help="odd dims and pages first, no room around tensors: for compute-sanitizer")  # fmt: skip
    parser.add_argument("--sanitizer", default="", help="a command put before each worker's")
    parser.add_argument("--shrink", type=float, default=15.0, help="seconds to make a failing problem smaller")
    parser.add_argument("--reproduce", help="one problem again: its JSON, or a file that holds it")
    parser.add_argument("--summary", type=Path, help="only add up the records of a folder")
    parser.add_argument("--after", type=Path, help="a record: pairs that its runs did not draw come first")
    parser.add_argument("--once", action="store_true", help="stop, too, when every pair is drawn")
    parser.add_argument("--union", type=Path, help="only say which pairs the runs of a record cover together")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser


def prepare(most: int = 0, memcheck: bool = False) -> Any:
    """The process ready to run problems: the interpreter where there is no GPU, launches counted."""
    os.environ["TILEFOLD_TUNED"] = "none"  # plans by rules, whatever was measured on this machine
    if memcheck:
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from .problem import Setting

    if os.environ.get("TRITON_INTERPRET") == "1":
        from tilefold.debug import patch_interpreter

        patch_interpreter()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    return Setting(device, most or (100 if memcheck else 600 if gpu else 40), guard=not memcheck, small=not gpu)


def _reproduce(given: str, setting: Any, seconds: float) -> int:
    from .context import kernels_reached, poisoned
    from .families import FAMILIES
    from .problem import Problem, failure_of, shrink

    problem = Problem(**json.loads(Path(given).read_text() if not given.lstrip().startswith("{") else given))
    family, reached = FAMILIES[problem.op], kernels_reached()
    with poisoned():
        failure = failure_of(family, problem, setting)
        print("right" if failure is None else failure)
        print("kernels:", ", ".join(sorted(reached)))
        if failure is not None and seconds:
            print("smaller:", json.dumps(shrink(family, problem, setting, seconds).plain()))
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
