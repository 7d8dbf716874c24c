"""`tilefold demo`: a trained sentence encoder whose attention layers run through tilefold, judged against PyTorch and fp64."""

from tilefold.cli.demo.run import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
