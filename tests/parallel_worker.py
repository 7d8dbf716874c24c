"""Several processes on this machine: one start runs many cases, each of which fails by itself."""

import datetime
import importlib
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from pathlib import Path

PRELOAD = ["torch", "torch.distributed", "tilefold", "tilefold.parallel", "tilefold.reference"]
MORE = ["torch._dynamo", "torch._functorch.aot_autograd", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
MORE += ["torch.distributed.tensor.experimental", "transformers.models.mistral.modeling_mistral", "tilefold.cli.app"]


def run_ranks(module, suite, ranks, timeout=60.0, limit=170.0, backend="gloo"):
    """{case: {rank: None or a traceback}}; suite: a function of `module` that yields (name, case); "hung" if some did not end.

    The processes are forked from a server that has imported torch once, and does nothing else.  timeout: of the process group;
    limit: seconds until all that still run are ended.  backend: "nccl" gives each rank a GPU and compiled kernels."""
    context = multiprocessing.get_context("forkserver")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # else triton, which these import, would not know yet
    context.set_forkserver_preload(PRELOAD + MORE * interpreted)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (module, suite, ranks, folder, timeout, backend)
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
            report = Path(folder) / f"rank{rank}"
            for name, text in map(json.loads, report.read_text().splitlines() if report.exists() else ()):
                found.setdefault(name, {})[rank] = text
    if hung:
        found["hung"] = dict.fromkeys(hung, f"ranks {hung} did not come to an end")
    return found


def _rank(rank, module, suite, ranks, folder, timeout, backend):
    if backend == "gloo":
        os.environ["TRITON_INTERPRET"] = "1"  # here, before triton is loaded: the caller may have a GPU
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store, wait = f"file://{folder}/store", datetime.timedelta(seconds=timeout)
    options = {"init_method": store, "rank": rank, "world_size": ranks, "timeout": wait}
    if backend == "nccl":
        from tilefold.bench.parallel.setup import join

        join(True, rank, **options)
    else:
        _prepare(torch)
        dist.init_process_group(backend, **options)
    with (Path(folder) / f"rank{rank}").open("w") as report:
        for name, case in getattr(importlib.import_module(module), suite)():
            torch.manual_seed(0)
            text = None
            try:
                case()
            except Exception:
                text = traceback.format_exc()
            print(json.dumps([name, text]), file=report, flush=True)
    if suite.startswith("dying"):
        os._exit(0)  # a group with a dead rank would be waited for
    dist.destroy_process_group()


def _prepare(torch):
    """As conftest.py does for other tests: a faster interpreter, and fresh memory that is full of NaN."""
    from conftest import _poisoned
    from tilefold.debug import patch_interpreter

    patch_interpreter()
    for name in ("empty", "empty_like", "empty_strided"):
        setattr(torch, name, _poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        setattr(torch.Tensor, name, _poisoned(getattr(torch.Tensor, name)))
