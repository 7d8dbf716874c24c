"""What a first call can do at once, where Triton does one thing after another.

The first launch of a process builds Triton's driver module and reads libtriton to hash it; a kernel that is compiled gets a
launcher in C, which Triton 3.6 builds after the kernel (3.9 has one launcher for all).  Both pairs run side by side here: the C
compiler is another process, and hashing and LLVM let other threads of Python run.  This fills Triton's own caches with what
Triton would put there; where Triton is not as expected, nothing is done ahead.  TILEFOLD_DISABLE_STARTUP=1 in the environment
leaves Triton to itself.
"""

import contextlib
import functools
import gc
import hashlib
import inspect
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["DISABLE", "ahead", "beside", "disabled", "uncollected"]

DISABLE = "TILEFOLD_DISABLE_STARTUP"
LAUNCHER = "__triton_launcher"  # the name of Triton's launcher modules
SWALLOWED = (Exception,)  # of what is done ahead: Triton does it again, and raises what there is to raise


def disabled() -> bool:
    """Whether the environment asks to leave Triton's start-up as it is."""
    return os.environ.get(DISABLE, "0") not in ("", "0")


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Python's cyclic garbage collector waits: the modules that a first call imports push it to look through all of torch's
    objects, which takes 0.1 s and finds nothing."""
    paused = gc.isenabled() and not disabled()
    if paused:
        gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def ahead(fn: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Before fn is compiled for args and keywords: begin what its launch will need.  The current device is the one meant."""
    if disabled():
        return
    _begin()
    with contextlib.suppress(*SWALLOWED):
        build = _launcher(fn, args, keywords)
        if build is not None:
            beside(build)


@functools.cache
def _begin() -> None:
    """Once in a process: Triton's hash of itself, from its file or in a thread, while its driver is made."""
    import triton

    from . import triton_key

    if triton_key.install():
        beside(triton.runtime.cache.triton_key)
    with contextlib.suppress(*SWALLOWED):
        triton.runtime.driver.active.get_current_device()


def beside(work: Callable[[], Any]) -> None:
    """Do in a thread what is done again, or found done, when it is needed; nothing where the environment says so.

    Not in a daemon, which the end of the process would cut off within the compiler."""
    if disabled():
        return

    def run() -> None:
        with contextlib.suppress(*SWALLOWED):
            work()

    threading.Thread(target=run, name="tilefold-startup", daemon=False).start()


def _launcher(fn: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> Callable[[], Any] | None:
    """What builds the launcher that Triton will ask for, or None if it is built or this Triton's launchers are not known."""
    import triton
    from triton.runtime import build

    active = triton.runtime.driver.active
    driver = sys.modules[active.launcher_cls.__module__]
    make = getattr(driver, "make_launcher", None)
    if make is None or [*inspect.signature(make).parameters] != ["constants", "signature", "tensordesc_meta"]:
        return None
    _, _, target, backend, binder = fn.device_caches[active.get_current_device()]
    keywords = {**keywords, "debug": fn.debug, "instrumentation_mode": ""}
    bound, kinds, options = binder(*args, **keywords)
    _, signature, constants, _ = fn._pack_args(backend, keywords, bound, kinds, options)
    source = make(constants, dict(signature), _boxes(signature, target))
    key = hashlib.sha256((source + build.platform_key()).encode()).hexdigest()
    if build.get_cache_manager(key).get_file(f"{LAUNCHER}{sysconfig.get_config_var('EXT_SUFFIX')}") is not None:
        return None
    return functools.partial(
        build.compile_module_from_src, src=source, name=LAUNCHER, library_dirs=driver.library_dirs(),
        include_dirs=driver.include_dirs, libraries=driver.libraries,
    )  # fmt: skip


def _boxes(signature: Mapping[str, Any], target: Any) -> list[Any] | None:
    """An entry for each descriptor that the copy engine gets, of which the launcher's source shows only that it is there."""
    count = sum(isinstance(kind, str) and kind.startswith("tensordesc") for kind in signature.values())
    return [{}] * count if count and target.backend == "cuda" and target.arch >= 90 else None
