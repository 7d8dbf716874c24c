"""Several processes on this machine with gloo between them: one start runs many cases, each of which fails by itself."""

import datetime
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from pathlib import Path

PRELOAD = ["torch", "torch.distributed", "tilefold", "tilefold.parallel", "tilefold.reference"]


def run_ranks(module, suite, ranks, timeout=60.0, limit=170.0):
    """{case: [None or the traceback of each rank]}; suite: the name of a function of the module `module` that makes cases.

    The processes are forked from a server that has imported torch once, which does nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (module, suite, ranks, folder, timeout)
        processes = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        end = time.monotonic() + limit
        for process in processes:
            process.join(max(0.1, end - time.monotonic()))
        hung = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        for process in processes:
            process.kill()
        found: dict[str, dict[int, str | None]] = {}
        for rank in range(ranks):
            lines = (
                (Path(folder) / f"rank{rank}").read_text().splitlines()
                if (Path(folder) / f"rank{rank}").exists()
                else []
            )
            for name, text in map(json.loads, lines):
                found.setdefault(name, {})[rank] = text
        if hung:
            found["hung"] = dict.fromkeys(hung, f"ranks {hung} did not come to an end")
    return found


def _rank(rank, module, suite, ranks, folder, timeout):
    import importlib

    os.environ["TRITON_INTERPRET"] = "1"  # here, before triton is loaded: the caller may have a GPU
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout),
    )
    from interpreter_patch import patch_once_a_launch

    patch_once_a_launch()
    with (Path(folder) / f"rank{rank}").open("w") as report:
        for name, case in getattr(importlib.import_module(module), suite)():
            torch.manual_seed(0)
            text = None
            try:
                case()
            except Exception:
                text = traceback.format_exc()
            print(json.dumps([name, text]), file=report, flush=True)
    if suite != "dying":
        dist.destroy_process_group()
