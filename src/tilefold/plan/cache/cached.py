"""How attention over a KV cache is cut: the tile of the packed kernel's plan, and the parts of the key range folded apart."""

from dataclasses import replace
from functools import lru_cache

from tilefold.errors import ValueRangeError
from tilefold.plan.dense.attention import plan_attention
from tilefold.plan.device import Device
from tilefold.plan.limits import Tile
from tilefold.plan.problem import AttentionProblem

MAX_SPLITS = 128  # flash-attention's bound, too
LEAST_TILES = 4  # of keys in a split: below that a program's beginning and end, and the merge, outweigh what it folds

CachedPlan = tuple[Tile, int]


def require_splits(splits: int) -> None:
    """ValueRangeError for a number of splits that no kernel over a cache takes; 0: the plan chooses."""
    if not 0 <= splits <= MAX_SPLITS:
        raise ValueRangeError(f"num_splits must be 0 to {MAX_SPLITS}, got {splits}")


@lru_cache(maxsize=4096)
def plan_cached(problem: AttentionProblem, device: Device, splits: int) -> CachedPlan:
    """(tile, splits) for a problem whose seq_k is the capacity of the cache: lengths are known on the device alone, so the same
    cache gets the same cut while it fills, as CUDA graphs need.

    splits: 0 to choose, else what the caller wants.  Chosen: as many as fill the SMs once when the query tiles alone do not, and
    leave every split 4 tiles of keys at full capacity.  Raises ValueRangeError, and what `plan_attention` raises."""
    require_splits(splits)
    packed = replace(problem, varlen=True, descriptors=False, query_descriptors=False)
    tile = plan_attention(packed, device, portable=True).tile
    if splits:
        return tile, splits
    programs = -(-problem.seq_q // tile.block_m) * problem.batch * problem.heads
    most = -(-problem.seq_k // tile.block_n) // LEAST_TILES
    return tile, max(1, min(device.sms // programs if programs else 1, most, MAX_SPLITS))
