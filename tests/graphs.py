"""A step as a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["captured"]


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
