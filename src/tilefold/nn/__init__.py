"""Torch modules around the attention of tilefold, and what they are made of."""

from .rotary import Rotary3D, default_split, rotary_3d

__all__ = ["Rotary3D", "default_split", "rotary_3d"]
