"""How long a program waits for tilefold's first call, in processes of their own, with an empty cache of kernels and a full one.

A process imports torch, makes its inputs on the device and waits for them; from there on the clock runs: the import of tilefold,
the first call, its gradients.  What torch itself does in a process's first backward pass (it imports sympy) is done and timed
before, so that it is not taken for ours.  The first process of a case finds an empty folder as Triton's cache, the others what
the first one left.  Its results are compared with fp64 after the clock stopped.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tilefold.bench.attention.cases import Case, dense_problem
from tilefold.errors import TilefoldError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FIRST_S", "SECOND_S", "Start", "lines_of", "measure_start", "right", "rows_of", "startup_cases", "to_json"]

FIRST_S, SECOND_S = 3.0, 0.3  # what a first call may take, in seconds: with compilation, and with compiled kernels
SHAPES = {True: ((64, 32, 4096, 1), (128, 16, 4096, 1)), False: ((16, 1, 32, 1), (32, 1, 32, 1))}  # D, H, N, B

CHILD = """
import json, sys, time
import torch

case = json.loads(sys.argv[1])
device, shape = case["device"], (case["batch"], case["seq_q"], case["heads"], case["dim_qk"])
wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
torch.manual_seed(0)
q, k, v, grad = (torch.randn(shape, device=device, dtype=getattr(torch, case["dtype"])) for _ in range(4))
seconds = {}

def timed(name, work):
    wait()
    start = time.perf_counter()
    result = work()
    wait()
    seconds[name] = time.perf_counter() - start
    return result

def importing():
    import tilefold
    return tilefold

leaf = torch.ones(1, device=device, requires_grad=True)
timed("autograd", lambda: torch.autograd.grad(leaf * 2, leaf, torch.ones_like(leaf)))
tilefold = timed("importing", importing)
leaves = [t.requires_grad_() for t in (q, k, v)]
out = timed("forward", lambda: tilefold.attention(*leaves, causal=case["causal"]))
gradients = timed("backward", lambda: torch.autograd.grad(out, leaves, grad))
ok = None
if case["check"]:
    from tilefold.bench.startup import right
    ok = right(case, [t.detach() for t in leaves], grad, out.detach(), gradients)
print(json.dumps({**seconds, "ok": ok}))
"""


@dataclass(frozen=True, slots=True)
class Start:
    """One process: the case's name, whether its kernels were compiled before, whether tilefold's own start-up was on, and the
    seconds of each part; ok: whether its results were right, None where that was not asked.

    importing: `import tilefold`; autograd: torch's own first backward pass."""

    case: str
    cached: bool
    ours: bool
    importing: float
    forward: float
    backward: float
    autograd: float
    ok: bool | None

    @property
    def first_call(self) -> float:
        """Seconds from the import of tilefold to the first result."""
        return self.importing + self.forward


def startup_cases(gpu: bool) -> tuple[Case, ...]:
    """Head dim 64 over all pairs and 128 causal; tiny ones without a GPU."""
    dtype = "bfloat16" if gpu else "float32"
    return tuple(Case("dense", dense_problem(shape, i == 1, dtype)) for i, shape in enumerate(SHAPES[gpu]))


def measure_start(
    case: Case, device: str, rounds: int, ours: bool = True, step: Callable[[str], None] = lambda what: None
) -> tuple[Start, ...]:
    """A process with an empty cache of Triton's, then `rounds` that find it full; TilefoldError with its words if one fails.

    ours: False turns tilefold's start-up off; step: told what comes next."""
    found = []
    with tempfile.TemporaryDirectory(prefix="tilefold-startup-") as folder:
        for i in range(1 + rounds):
            step(
                f"{case.name}: {'empty cache' if i == 0 else f'process {i} of {rounds}'}{'' if ours else ', as Triton starts'}"
            )
            told = _child(case, device, Path(folder), ours, check=i == 0)
            found.append(Start(case.name, i > 0, ours, **told))  # type: ignore[arg-type]
    return tuple(found)


def _child(case: Case, device: str, cache: Path, ours: bool, check: bool) -> dict[str, float | bool | None]:
    p = case.problem
    sizes = {name: getattr(p, name) for name in ("batch", "seq_q", "heads", "dim_qk", "dtype", "causal")}
    own = {"TRITON_CACHE_DIR": str(cache), "TILEFOLD_DISABLE_STARTUP": "0" if ours else "1"}
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps({**sizes, "device": device, "check": check})],
        env={**os.environ, **own, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise TilefoldError(f"{case.name}: a process that was to be timed failed: {done.stderr.strip()[-2000:]}")
    told: dict[str, float | bool | None] = json.loads(done.stdout.splitlines()[-1])
    return told


def right(
    case: dict[str, Any], inputs: "Sequence[Tensor]", grad: "Tensor", out: "Tensor", gradients: "Sequence[Tensor]"
) -> bool:
    """In the process that was timed: are out and the gradients within the tolerance of the fp64 reference?"""
    from tilefold.bench.implementation import Inputs
    from tilefold.bench.judge import Judge

    shape = (case["dim_qk"], case["heads"], case["seq_q"], case["batch"])
    problem = dense_problem(shape, case["causal"], case["dtype"])
    q, k, v = inputs
    forward = Judge(Inputs(Case("dense", problem), q, k, v)).verdict(out)
    backward = Judge(Inputs(Case("dense", problem, backward=True), q, k, v, grad=grad)).verdict(gradients)
    return forward.ok and backward.ok


def rows_of(starts: Sequence[Start]) -> list[tuple[str, ...]]:
    """A row for each case and kind of process: its name, import, forward, the two together, backward and torch's own, in
    seconds, medians where there are several."""
    rows = []
    for case, ours, cached in dict.fromkeys((each.case, each.ours, each.cached) for each in starts):
        same = [each for each in starts if (each.case, each.ours, each.cached) == (case, ours, cached)]
        parts = (
            median(getattr(each, name) for each in same)
            for name in ("importing", "forward", "first_call", "backward", "autograd")
        )
        process = ("compiled before" if cached else "empty cache") + ("" if ours else ", as Triton starts")
        rows.append((case, process, *(f"{part:.3f}" for part in parts)))
    return rows


def lines_of(starts: Sequence[Start]) -> list[str]:
    """What was wanted and what came of it, and which results were wrong."""
    lines = []
    for cached, limit, what in ((False, FIRST_S, "with an empty cache"), (True, SECOND_S, "with compiled kernels")):
        for case in dict.fromkeys(each.case for each in starts):
            same = [each.first_call for each in starts if each.ours and (each.case, each.cached) == (case, cached)]
            if same:
                took = median(same)
                verdict = "" if took <= limit else ", MISSED"
                lines.append(f"{case}: first call {what} {took:.2f} s, wanted at most {limit:g}{verdict}")
    return lines + [f"{each.case}: a result was WRONG" for each in starts if each.ok is False]


def to_json(starts: Sequence[Start], setting: dict[str, str]) -> str:
    """All processes with what they ran on."""
    return json.dumps({"setting": setting, "starts": [asdict(each) for each in starts]}, indent=1)
