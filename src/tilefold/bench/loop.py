"""What every runner does alike: case after case whatever one of them does, and an outcome for whatever a library does."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch

from tilefold.errors import DeviceError, TilefoldError, Unsupported
from tilefold.ops.device import interpreting
from tilefold.reference import Comparison

OK, WRONG, REFUSED, MEMORY, FAILED = "ok", "WRONG", "refused", "no memory", "failed"
GPU_LOST = "the GPU was lost in this case"

Case = TypeVar("Case")
Result = TypeVar("Result")
Ready = TypeVar("Ready")
Outcome = tuple[
    str, str, Comparison | None, Ready | None
]  # status, why, what the judge found, what is ready to be timed


def run_each(
    cases: Iterable[Case],
    one: Callable[[Case], Result],
    failed: Callable[[Case, str], Result],
    finished: Callable[[Result], None],
    budget_s: float | None = None,
) -> list[Result]:
    """one(case) for each case; failed(case, why) stands for a case that raised, and the next one is begun.

    finished(result) after each case.  No case is begun after `budget_s` seconds, nor after the GPU's context was lost: nothing
    runs there any more."""
    found: list[Result] = []
    begin = time.perf_counter()
    for case in cases:
        if budget_s is not None and time.perf_counter() - begin >= budget_s:
            break
        lost = False
        try:
            result = one(case)
        except Exception as error:  # one case's trouble must not cost the figures of those after it
            lost = gpu_lost(error)
            what = GPU_LOST if lost else f"this case ended with {type(error).__name__}"
            result = failed(case, f"{what}: {first_line(error)}")
        finished(result)
        found.append(result)
        if lost:
            break
    return found


def gpu_lost(error: Exception) -> bool:
    """Whether an error left a GPU that runs nothing any more, rather than a launch that was refused."""
    if not isinstance(error, RuntimeError) or "CUDA error" not in str(error):
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # whatever it raises, the context is gone
        return True
    return False


def checked(attempt: Callable[[], tuple[Comparison, Ready]]) -> Outcome[Ready]:
    """What became of preparing, running and judging an implementation once; raises only what lost the GPU.

    Whatever attempt raises becomes a status: Unsupported and NotImplementedError a refusal, too little memory, a failure;
    a refusal also DeviceError where calls are plain torch, which says that kernels alone serve it."""
    try:
        verdict, ready = attempt()
    except torch.OutOfMemoryError as error:
        return MEMORY, first_line(error), None, None
    except (Unsupported, NotImplementedError) as error:
        return REFUSED, first_line(error), None, None
    except Exception as error:  # another library may raise anything; its cell says what, the others are still measured
        if gpu_lost(error):
            raise
        refused = not isinstance(error, TilefoldError) and "No available kernel" in str(error)
        refused |= isinstance(error, DeviceError) and not (torch.cuda.is_available() or interpreting())
        return REFUSED if refused else FAILED, f"{type(error).__name__}: {first_line(error)}", None, None
    if not verdict.ok:
        return WRONG, verdict.words, verdict, None
    return OK, "", verdict, ready


def untimed(failed: Mapping[str, Exception]) -> dict[str, tuple[str, str]]:
    """The status of those that raised while they were timed, and why; raises what lost the GPU."""
    found = {}
    for name, error in failed.items():
        if gpu_lost(error):
            raise error
        status = MEMORY if isinstance(error, torch.OutOfMemoryError) else FAILED
        found[name] = status, f"while it was timed: {type(error).__name__}: {first_line(error)}"
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 160 characters."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if len(text) <= 160 else text[:157] + "..."
