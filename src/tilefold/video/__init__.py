"""Sparse attention in video models: `sparsify` makes a model follow lists of blocks, policies say which."""

from .adapters import Adapter, DiffusersAdapter
from .calibrate import Calibration, Fitted, calibrate, fit, policy_from_json, policy_to_json
from .model import Sparse, desparsify, fitting_cube, sparsify
from .policies import (
    Antidiagonal,
    ByHead,
    ByLayer,
    Dense,
    DenseFirst,
    FixedMap,
    Gini,
    KeepFor,
    Pooled,
    Radial,
    SlidingTile,
)
from .site import Observer, Pass, Policy, Site, Text
from .trained import load_fastvideo_gates, load_trained, save_trained, trainable_parameters

__all__ = [
    "Adapter",
    "Antidiagonal",
    "ByHead",
    "ByLayer",
    "Calibration",
    "Dense",
    "DenseFirst",
    "DiffusersAdapter",
    "Fitted",
    "FixedMap",
    "Gini",
    "KeepFor",
    "Observer",
    "Pass",
    "Policy",
    "Pooled",
    "Radial",
    "Site",
    "SlidingTile",
    "Sparse",
    "Text",
    "calibrate",
    "desparsify",
    "fit",
    "fitting_cube",
    "load_fastvideo_gates",
    "load_trained",
    "policy_from_json",
    "policy_to_json",
    "save_trained",
    "sparsify",
    "trainable_parameters",
]
