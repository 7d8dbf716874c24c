"""Mods as users of FlexAttention write them, and what torch makes of them, mapped over the indices."""

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import _vmap_for_bhqkv, and_masks, noop_mask, or_masks

from cases import rand
from tilefold import reference

BATCH, HEADS, SEQ = 2, 4, 45
WIDTH = 7  # of the image of NATTEN


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= 11


def prefix(b, h, q_idx, kv_idx):
    return kv_idx < 9


def dilated(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 3 == 0


def blocks_of_seven(b, h, q_idx, kv_idx):
    return ((q_idx - kv_idx) // 7).abs() <= 1


def by_head(b, h, q_idx, kv_idx):
    return torch.where(h % 2 == 0, q_idx >= kv_idx, kv_idx >= q_idx - 2 * h)


def natten(b, h, q_idx, kv_idx):
    center_x = (q_idx // WIDTH).clamp(1, SEQ // WIDTH - 1)
    center_y = (q_idx % WIDTH).clamp(1, WIDTH - 2)
    seen = (center_x - kv_idx // WIDTH).abs() <= 1
    seen &= (center_y - kv_idx % WIDTH).abs() <= 1
    return seen


DOCUMENTS = torch.arange(SEQ) // 17


def document(b, h, q_idx, kv_idx):
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


LENGTHS = torch.tensor([31, SEQ])


def padded(b, h, q_idx, kv_idx):
    return kv_idx < LENGTHS[b]


SEEN = torch.ones(SEQ, SEQ).tril().bool() & (torch.arange(SEQ) % 5 != 2)


def tree(b, h, q_idx, kv_idx):
    return SEEN[q_idx][kv_idx] | (q_idx == kv_idx)


def nothing_for_some(b, h, q_idx, kv_idx):
    return ~((q_idx < 5) ^ (kv_idx >= 0)) == 1


MASKS = {
    "causal": causal,
    "sliding window": and_masks(causal, window),
    "prefix-LM": or_masks(causal, prefix),
    "dilated": and_masks(causal, dilated),
    "blocks of seven": blocks_of_seven,
    "by head": by_head,
    "NATTEN": natten,
    "documents": and_masks(causal, document),
    "padded": padded,
    "tree": tree,
    "sink and window": and_masks(causal, or_masks(window, prefix)),
    "rows without keys": nothing_for_some,
    "noop": noop_mask,
}


# Score mods: functions of the tensors that they read, to be given those in fp64 as well.


def alibi():
    return lambda score, b, h, q_idx, kv_idx: score + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (kv_idx - q_idx)


def soft_cap():
    return lambda score, b, h, q_idx, kv_idx: 20.0 * torch.tanh(score / 20.0)


def causal_score():
    return lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, float("-inf"))


def tanh_like():
    def mod(score, b, h, q_idx, kv_idx):
        x = torch.clamp(score * 0.5, -3.0, 3.0)
        return 2 * x * (27.0 + x * x) / (27.0 + 9.0 * x**2)

    return mod


def gated():
    def mod(score, b, h, q_idx, kv_idx):
        score = score * torch.sigmoid(score)
        score = score + torch.sqrt(score.abs() + 1) - torch.log1p((q_idx - kv_idx).abs().to(score.dtype))
        return score.masked_fill((q_idx + kv_idx) % 4 == 3, 0.25)

    return mod


def elementary():
    def mod(score, b, h, q_idx, kv_idx):
        near = torch.exp(-((q_idx - kv_idx) ** 2) / 50)
        wave = torch.cos(0.1 * score) + torch.sin(kv_idx / 9) + torch.erf(0.3 * score)
        wave = wave + torch.nn.functional.gelu(score) * torch.nn.functional.softplus(score) + torch.tan(b / 3)
        return torch.maximum(score, near * wave) - torch.minimum(score, torch.zeros_like(score)) / (1 + h)

    return mod


def slopes(table):
    return lambda score, b, h, q_idx, kv_idx: score - table[h] * (q_idx - kv_idx).abs()


def relative(table):
    return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx]  # negative ones count from the end


def by_index(table):
    return lambda score, b, h, q_idx, kv_idx: score + 2 * table[b, h, q_idx, kv_idx]


def two_tables(table, scales):
    return lambda score, b, h, q_idx, kv_idx: score * scales[kv_idx].exp() + table[(q_idx + 3 * kv_idx) % 11, 1]


SCORES = {
    "ALiBi": (alibi, ()),
    "softcap": (soft_cap, ()),
    "causal": (causal_score, ()),
    "tanh approximated": (tanh_like, ()),
    "gated": (gated, ()),
    "elementary": (elementary, ()),
    "slopes": (slopes, ((HEADS,),)),
    "relative": (relative, ((HEADS, 2 * SEQ),)),
    "by index": (by_index, ((BATCH, HEADS, SEQ, SEQ),)),
    "two tables": (two_tables, ((11, 2), (SEQ,))),
}


def tables_of(name, dtype=torch.float32):
    """The tensors that a score mod reads; every other one is not contiguous."""
    return [
        rand(*shape, 2, dtype=dtype)[..., 0] if i else rand(*shape, dtype=dtype)
        for i, shape in enumerate(SCORES[name][1])
    ]


def mapped(make, with_score):
    """A mod as `reference.attention` takes it, on whole tensors.  make: the mod of the tensors that it reads."""

    def twin(score, batch, head, q_index, kv_index, args):
        given = [each.flatten() for each in (batch, head, q_index, kv_index)]
        with TransformGetItemToIndex():
            if with_score:
                return _vmap_for_bhqkv(make(*args[:-2]), prefix=(0,))(score, *given)
            return _vmap_for_bhqkv(make(*args[:-2]), prefix=())(*given)

    return twin


def expected(q, k, v, make=None, tables=(), mask_mod=None, dtype=torch.float64, **options):
    """(out, lse) of FlexAttention, layout [batch, heads, seq, dim]."""
    if make is not None:
        options |= {"score_mod": mapped(make, True), "score_args": tuple(tables)}
    if mask_mod is not None:
        options["mask_mod"] = mapped(lambda: mask_mod, False)
    return reference.attention(q, k, v, layout="bhsd", dtype=dtype, **options)
