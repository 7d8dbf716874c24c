"""Dropout of probabilities: each is dropped or kept by its own random number, whoever computes it, in whatever tile.

The number is Philox 4x32 with 7 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by the seed,
of the counter (query, key, sequence, head).  The indices are those in the sequence, so forward and backward passes, packed and
padded batches and every tile agree without a mask in memory.
"""

import triton
import triton.language as tl


@triton.jit
def dropout_factor(place, kv_index, dropout):
    """What probabilities are multiplied by, of the shape of the scores: 0 where dropped, else 1 / (1 - p).

    dropout = (pointer to one int64 seed, p, 1 / (1 - p)); place as for device.mods."""
    batch, head, q_index, extent = place
    seed, p, kept = dropout
    bits, _, _, _ = tl.philox(tl.load(seed), q_index, kv_index, batch, head, 7)
    return tl.where((bits >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0) < p, 0.0, kept)
