"""Gradients of dense attention: which kernels make them, in which memory, in which order."""
