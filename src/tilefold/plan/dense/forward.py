"""Which kernel serves a call of `attention` or `attention_varlen`: a dense one, or, for few queries, the decode kernel.

A dense kernel gives each query head tiles of its own and folds all keys of a tile in one program.  With few queries that
leaves most SMs idle, and reads K and V once a query head.  The decode kernel makes the query heads of a KV head rows of one tile
and cuts the keys (split-KV)."""

from collections.abc import Callable
from functools import lru_cache

from tilefold.plan.architecture import SM_90
from tilefold.plan.cache.decode import MOST_ROWS, DecodePlan, DecodeProblem, decode_kernel_refusal, plan_decode
from tilefold.plan.dense.attention import AttentionPlan, Rejected, plan_attention
from tilefold.plan.dense.attention_hopper import packable_heads
from tilefold.plan.dense.specialised import SPECIALISED
from tilefold.plan.device import Device
from tilefold.plan.limits import require_supported
from tilefold.plan.problem import AttentionProblem, mean_of
from tilefold.plan.rules import is_short
from tilefold.plan.table import in_use

__all__ = ["FILLED_ROWS", "LEAST_SPLIT", "MOST_ROWS", "STEP", "cut_of", "decode_refusal", "lengths_alike", "mean_of",
           "plan_alike", "plan_forward", "plan_holds", "shared_by_tiles", "step_number"]  # fmt: skip

FILLED_ROWS = 64  # query rows of a head, or of heads packed into one tile: with so many a dense kernel wastes little
TILE_ROWS = 128  # that a dense kernel folds at once, at most
LEAST_QUERIES = 2  # of short sequences: one has the kernel of decoding
STEP = 64  # keys by which a cache may grow before its plan is looked at again
LEAST_SPLIT = 256  # of several queries: below that one program a tile is as soon done as several and a merge


@lru_cache(maxsize=4096)
def plan_forward(problem: AttentionProblem, device: Device, portable: bool = False) -> AttentionPlan | DecodePlan:
    """The plan that a call of `attention` or `attention_varlen` follows.  portable: no Hopper kernels.

    Pure, and cheap where the decode kernel serves: a cache that grows asks for a plan every STEP keys.  Raises what
    `plan_attention` and `plan_decode` raise."""
    if decode_refusal(problem, device):
        return plan_attention(problem, device, portable=portable)
    require_supported(problem, device)
    plan = plan_decode(DecodeProblem(problem, equal=not problem.varlen), device)
    return plan.later(reason=lambda: plan.reason, rejected=lambda: (_not_dense(problem, device), *plan.rejected[1:]))


def lengths_alike(seq_q: int, seq_k: int, group: int = 1) -> tuple[int, ...] | None:
    """Calls that differ in lengths alone have the same kernel, tile, versions and grid if this is the same of them; None where
    more than tiles decides.  group: query heads of a KV head, where they may be rows of one tile.

    Rules count tiles, of a multiple of 64 rows or keys, and have thresholds at multiples of 64."""
    if seq_q < 2 * FILLED_ROWS or seq_k < 1:
        return None
    rows = seq_q * group
    return -(-seq_q // 64), seq_q // 64, -(-rows // 64), rows // 64, -(-seq_k // 64), seq_k // 64


def plan_alike(plan: AttentionPlan, seq_q: int, seq_k: int) -> AttentionPlan:
    """The plan of the same problem with other lengths, of the same `lengths_alike`."""
    problem = plan.problem.of_lengths(seq_q, seq_k, plan.problem.mean_q)
    return plan.alike(problem, DEFERRED, lambda: plan_attention(problem, plan.device))


DEFERRED = ("buffers", "shared_bytes", "programs_per_sm", "cost", "bound", "rejected")


def shared_by_tiles(plan: AttentionPlan) -> bool:
    """Whether `lengths_alike` holds for this plan: of a specialised kernel, and not of a table, which has single problems."""
    return plan.kernel in SPECIALISED and not in_use(plan.device)


def _not_dense(problem: AttentionProblem, device: Device) -> Rejected:
    """Why a dense kernel does not serve where the decode kernel does."""
    pack, tiles = _dense_tiles(problem, device)
    few = "at least " * (pack > 1)  # where its kernel packs heads
    rows = problem.seq_q * pack
    held = "all keys of its rows" if rows >= FILLED_ROWS else f"{rows} row{'s' * (rows != 1)} and all their keys"
    why = f"Would be {few}{tiles} tile{'s' * (tiles > 1)} for {device.sms} SMs, each with {held}"
    if problem.group > pack:
        why += f", and would read K and V {problem.group // pack} times"
    return Rejected("a dense kernel", f"{why}.")


def step_number(keys: int) -> int:
    """Which STEP a number of keys, 1 or more, lies in: whole tiles are its last."""
    return -(-keys // STEP)


def plan_holds(keys: int, plan_of: Callable[[int], object]) -> bool:
    """Whether every number of keys in the same STEP is cut as this one is, by the decode kernel; plan_of: what plans a call of so
    many.

    Each decision is a threshold in the number, and nothing else of it changes inside a step: if both ends of the step are cut
    alike, so is what lies between."""
    last = step_number(keys) * STEP
    ends = [plan_of(n) for n in (last - STEP + 1, last)]
    cuts = {cut_of(plan) if isinstance(plan, DecodePlan) else None for plan in ends}
    return len(cuts) == 1 and None not in cuts


def cut_of(plan: DecodePlan) -> tuple[object, ...]:
    """What of a plan decides the launch."""
    return (plan.block_m, plan.block_n, plan.num_warps, plan.num_stages, plan.maxnreg, plan.programs, plan.least, plan.splits,
            plan.merge)  # fmt: skip


def decode_refusal(problem: AttentionProblem, device: Device) -> str:
    """Empty if the decode kernel takes a call from the dense kernels, else why not."""
    if "user" in problem.score_mods or "user" in problem.mask_mods:
        return "score_mod and mask_mod are the dense kernels'"
    if problem.band:
        return f"a {problem.band} is a band of the dense kernels"
    if why := decode_kernel_refusal(problem):
        return why
    if is_short(problem, device) and problem.seq_q >= LEAST_QUERIES:
        return f"sequences of {problem.seq_q} queries and {problem.seq_k} keys have small tiles of their own"
    pack, tiles = _dense_tiles(problem, device)
    if problem.seq_q * pack >= FILLED_ROWS and tiles >= device.sms:
        return f"{tiles} tiles of at least {FILLED_ROWS} rows fill {device.sms} SMs"
    interpreted = device.backend == "interpreter"  # where both kinds are to be run
    if problem.seq_k < LEAST_SPLIT and (interpreted or (problem.seq_q > 1 and tiles <= device.sms)):
        return f"{problem.seq_k} keys are fewer than {LEAST_SPLIT}: one program a tile is as soon done as several and a merge"
    return ""


def _dense_tiles(problem: AttentionProblem, device: Device) -> tuple[int, int]:
    """Query heads that share a tile of a dense kernel, which is where they fill one, and its tiles of query rows."""
    pack = packable_heads(problem) if device.architecture is SM_90 else 1
    if problem.seq_q * pack < FILLED_ROWS:
        pack = 1
    return pack, -(-problem.seq_q * pack // TILE_ROWS) * problem.batch * (problem.heads // pack)
