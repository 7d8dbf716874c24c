"""What the authors of the block-sparse video pipeline report, beside what is measured here.

B=1, 12 heads, 23296 tokens in 364 blocks of 64, D=128, bf16, on an H800.  None of these figures is ours, and none was measured on
the device of a table in which they stand: they say where others were, not how much faster anything is.
"""

from collections.abc import Mapping

DEVICE = "H800"
SHAPE = (1, 12, 12, 23296, 128, "bfloat16", 64)  # batch, heads, KV heads, tokens, head dim, dtype, block
# Milliseconds of each stage and of the whole, in Triton.
STAGE_MS: Mapping[str, float] = {
    "coarse": 1.007,
    "select": 0.400,
    "index alone": 0.097,
    "fine": 3.125,
    "fuse": 0.231,
    "pipeline": 4.860,
}
FASTEST_MS = 3.666  # of the whole with a ThunderKittens fine kernel, and flash-attention in the coarse branch
# Per cent of the blocks left out -> milliseconds of the fine kernel in Triton and in ThunderKittens.
FINE_MS: Mapping[float, tuple[float, float]] = {
    1: (8.15, 7.10),
    50: (4.18, 3.22),
    90: (0.883, 0.704),
    99: (0.161, 0.118),
}
SAID = f"reported: by the pipeline's authors, on an {DEVICE}; not measured here"
