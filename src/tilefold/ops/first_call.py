"""What makes a first call shorter without touching Triton: the collector waits, and a second kernel compiles in a thread."""

import contextlib
import gc
import threading
from collections.abc import Callable


class without_collector:  # as contextlib's are named
    """Python's cyclic garbage collector waits: the modules that a first call imports push it to look through all of torch's
    objects, which takes 0.1 s and finds nothing."""

    __slots__ = ("collecting",)

    def __enter__(self) -> None:
        self.collecting = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        if self.collecting:
            gc.enable()


def in_background(work: Callable[[], object]) -> None:
    """Do in a thread what is found done, or done again, when it is needed; an error of it is raised there, not here.

    Not in a daemon, which the end of the process would cut off within the compiler."""

    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    threading.Thread(target=run, name="tilefold-compile", daemon=False).start()
