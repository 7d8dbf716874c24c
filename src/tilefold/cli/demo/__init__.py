"""`tilefold demo`: a trained sentence encoder whose attention layers run through tilefold, judged against PyTorch and fp64."""

from tilefold.cli.demo.options import DemoOptions, DemoResult
from tilefold.cli.demo.run import run_demo

__all__ = ["DemoOptions", "DemoResult", "run_demo"]
