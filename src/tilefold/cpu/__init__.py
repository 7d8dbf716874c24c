"""The architecture `cpu`: the same fold in plain torch, tile by tile, for CPU tensors without Triton.

Everything here takes what was checked before; `ops` calls it by the names in `plan/capabilities.py`.
Scores are folded in fp32, whatever the inputs' dtype; memory is O(tokens), never the [queries, keys] matrix.
"""
