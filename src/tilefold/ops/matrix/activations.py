"""The activations that a product or a convolution may end in, by name."""

__all__ = ["CODES", "NAMES"]

CODES = {"none": 0, "relu": 1, "silu": 2, "gelu": 3, "gelu_tanh": 4}  # of device.activation
NAMES = tuple(CODES)
