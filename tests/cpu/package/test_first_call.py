"""A first call: the collector waits and comes back, what is compiled in a thread never fails a call."""

import gc
import threading

import pytest

from tilefold.ops.first_call import in_background, without_collector


def test_the_collector_waits_and_comes_back() -> None:
    def fail() -> None:
        with without_collector():
            assert not gc.isenabled()
            with without_collector():
                pass
            assert not gc.isenabled(), "the inner one must not wake it"
            raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_in_the_background_stays_there() -> None:
    done = threading.Event()

    def fail() -> None:
        done.set()
        raise KeyError

    in_background(fail)
    assert done.wait(10)
