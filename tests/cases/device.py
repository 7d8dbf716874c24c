"""Shared by the tests on a GPU: bits that must be the same, calls that must not wait, memory, compilations, a step as a graph."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from cases import same

DEVICE = torch.device("cuda")
SM_90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
SPARE = 8192  # bytes of small tensors that a call may make besides


def near(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], share: float = 1e-2) -> bool:
    """Whether two kernels' results differ by no more than `share` of their norms."""
    pairs = zip(first, second, strict=True)
    return all((a.double() - b.double()).norm() <= share * b.double().norm() for a, b in pairs)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def repeated(run: Callable[[], Any], times: int) -> tuple[Any, list[Any]]:
    """The result of a first run, and of `times` more that wait for nothing."""
    first = run()
    with no_waiting():
        return first, [run() for _ in range(times)]


def compilations(*kernels: Any) -> int:
    """How many compiled kernels are kept of some."""
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


def memory_beside(run: Callable[[], Sequence[torch.Tensor]]) -> tuple[Sequence[torch.Tensor], int]:
    """The results of a second run, and the bytes that it asks for at its peak beside them.

    The blocks that the allocator hands out may be larger, by what earlier tests left free."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    made = run()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    return made, peak - sum(t.numel() * t.element_size() for t in made)


def take_kernels_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Gluon does not work: the kernels for sm_90 are refused, and that has not been said yet."""
    from tilefold.kernels import hopper
    from tilefold.ops import hopper as ops

    monkeypatch.setattr(ops, "_WARNED", set())
    monkeypatch.setattr(hopper, "refusal", lambda: "it was taken away for this test")


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """(graph, what a replay fills) of a step that ran before, on a stream of its own, which waits for what made its inputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    return graph, made


def parts(made: Any) -> tuple[Any, ...]:
    """The tensors of a result."""
    return (made,) if isinstance(made, torch.Tensor) else tuple(made)


def followed(step: Callable[[], Any], *changes: Callable[[], Any], alike: Callable[..., bool] = same) -> Any:
    """A graph of `step` follows its inputs: after each change in place a replay fills in what a call gives.  Returns what."""
    graph, got = captured(step)
    for change in changes:
        with torch.no_grad():
            change()
        graph.replay()
        assert alike(parts(step()), parts(got))
    return got


def by_streams(step: Callable[[], Any], want: Any, times: int = 5) -> None:
    """Four streams at once, each so many times, give these bits."""
    streams, made = [torch.cuda.Stream() for _ in range(4)], []
    torch.cuda.synchronize()
    for stream in streams * times:
        with torch.cuda.stream(stream):
            made.append(step())
    torch.cuda.synchronize()
    assert all(same(parts(one), parts(want)) for one in made)


def alike_every_run(run: Callable[[], Any], times: int) -> Any:
    """The same bits in so many more runs; returns them."""
    first = run()
    assert all(same(parts(first), parts(run())) for _ in range(times))
    return first


def compiled_once(kernels: Any, runs: Sequence[Callable[[], Any]]) -> None:
    """The first of the runs compiles, the others do not.  kernels: one, or several."""
    kernels = kernels if isinstance(kernels, tuple) else (kernels,)
    runs[0]()
    before = compilations(*kernels)
    for run in runs[1:]:
        run()
    assert compilations(*kernels) == before


def command(*words: str) -> str:
    """What `tilefold` with these arguments prints; it has to end well."""
    testing = pytest.importorskip("typer.testing", reason="the command line's packages are not installed")
    from tilefold.cli.app import app

    result = testing.CliRunner().invoke(app, [*words], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return str(result.output)
