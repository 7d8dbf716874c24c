"""Users' score_mods and mask_mods for the kernels of sm_90, each with a twin in Python."""

import torch
import triton
import triton.language as tl

from cases import dilated, dilated_twin, rand, relative, relative_twin, squashed, squashed_twin
from cases.device import DEVICE


@triton.jit
def slanted(score, batch, head, q_index, kv_index, args):
    """ALiBi by hand: args = (slopes [H],)."""
    slopes, seq_q, seq_k = args
    return score - tl.load(slopes + head) * tl.abs(q_index + (seq_k - seq_q) - kv_index)


def slanted_twin(score, batch, head, q_index, kv_index, args):
    slopes, seq_q, seq_k = args
    return score - slopes.to(score.dtype)[head] * (q_index + (seq_k - seq_q) - kv_index).abs()


@triton.jit
def numbered(score, batch, head, q_index, kv_index, args):
    """Causal within a document: args = (numbers of queries [B, Sq], of keys [B, Sk])."""
    of_queries, of_keys, seq_q, seq_k = args
    alike = tl.load(of_queries + batch * seq_q + q_index) == tl.load(of_keys + batch * seq_k + kv_index)
    return alike & (kv_index <= q_index + (seq_k - seq_q))


def numbered_twin(score, batch, head, q_index, kv_index, args):
    of_queries, of_keys, seq_q, seq_k = args
    return (of_queries[batch, q_index] == of_keys[batch, kv_index]) & (kv_index <= q_index + (seq_k - seq_q))


@triton.jit
def sliding(score, batch, head, q_index, kv_index, args):
    """The last args[0] keys."""
    reach, seq_q, seq_k = args
    own = q_index + (seq_k - seq_q)
    return (kv_index <= own) & (kv_index > own - reach)


def sliding_twin(score, batch, head, q_index, kv_index, args):
    reach, seq_q, seq_k = args
    own = q_index + (seq_k - seq_q)
    return (kv_index <= own) & (kv_index > own - reach)


@triton.jit
def alone(score, batch, head, q_index, kv_index, args):
    """Within a document: args = (its number at each place [Sk])."""
    numbers, seq_q, seq_k = args
    return tl.load(numbers + tl.maximum(q_index + (seq_k - seq_q), 0)) == tl.load(numbers + kv_index)


def alone_twin(score, batch, head, q_index, kv_index, args):
    numbers, seq_q, seq_k = args
    return numbers[(q_index + (seq_k - seq_q)).clamp_min(0)] == numbers[kv_index]


@triton.jit
def by_head(score, batch, head, q_index, kv_index, args):
    """Every head has keys of its own, and the last 300 queries of the second one none: args = (step,)."""
    step, seq_q, seq_k = args
    return (kv_index >= step * head) & ((head != 1) | (q_index < seq_q - 300))


def by_head_twin(score, batch, head, q_index, kv_index, args):
    step, seq_q, seq_k = args
    return (kv_index >= step * head) & ((head != 1) | (q_index < seq_q - 300))


@triton.jit
def filled(score, batch, head, q_index, kv_index, args):
    """Makes a tensor of its own, which has no layout in this kernel."""
    return score + tl.full(score.shape, 1.0, tl.float32)


SLOPE = 0.5


def users(name, sq, sk, batch=2, heads=4):
    """-> (options, twins, unit of logarithms) of a mod."""
    if name == "slanted":
        slopes = torch.tensor([SLOPE ** (i + 1) for i in range(heads)], device=DEVICE)
        return {"score_mod": slanted, "score_args": (slopes,)}, {"score_mod": slanted_twin}, 1 + 64 * SLOPE
    if name == "relative":
        args = rand(heads, 2 * 40 + 1, device=DEVICE), 40
        return {"score_mod": relative, "score_args": args}, {"score_mod": relative_twin}, 1
    if name == "squashed":
        return {"score_mod": squashed, "score_args": (20.0,)}, {"score_mod": squashed_twin}, 21
    if name == "numbered":
        args = [torch.randint(0, 3, (batch, n), dtype=torch.int32).sort().values.to(DEVICE) for n in (sq, sk)]
        return {"mask_mod": numbered, "mask_args": tuple(args)}, {"mask_mod": numbered_twin}, 1
    if name == "alone":
        numbers = torch.randint(0, 3, (sk,), dtype=torch.int32).sort().values.to(DEVICE)
        return {"mask_mod": alone, "mask_args": (numbers,)}, {"mask_mod": alone_twin}, 1
    if name == "by_head":
        return {"mask_mod": by_head, "mask_args": (150,)}, {"mask_mod": by_head_twin}, 1
    if name == "dilated":
        return {"mask_mod": dilated, "mask_args": (3,)}, {"mask_mod": dilated_twin}, 1
    return {"mask_mod": sliding, "mask_args": (77,)}, {"mask_mod": sliding_twin}, 1
