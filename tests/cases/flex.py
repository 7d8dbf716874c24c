"""Mods as users of FlexAttention write them, and what torch makes of them, mapped over the indices."""

import random

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import _vmap_for_bhqkv, and_masks, noop_mask, or_masks

from cases import judge, qkv, rand
from tilefold import reference
from tilefold.compat.flex_attention import create_block_mask, flex_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS = 2, 4
SEQ = 301 if DEVICE == "cuda" else 45
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


DOCUMENTS = torch.arange(SEQ, device=DEVICE) // 17


def document(b, h, q_idx, kv_idx):
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


LENGTHS = torch.tensor([31, SEQ], device=DEVICE)


def padded(b, h, q_idx, kv_idx):
    return kv_idx < LENGTHS[b]


SEEN = torch.ones(SEQ, SEQ, device=DEVICE).tril().bool() & (torch.arange(SEQ, device=DEVICE) % 5 != 2)


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
        score = (
            score
            + (torch.zeros_like(score) + 1).exp() * torch.full_like(score, 0.25)
            + torch.sqrt(score.abs() + 1)
            - torch.log1p((q_idx - kv_idx).abs().to(score.dtype))
        )
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


# Mods by a generator.

CONDITIONS = [
    lambda b, h, q_idx, kv_idx, n: q_idx >= kv_idx - n,
    lambda b, h, q_idx, kv_idx, n: (q_idx - kv_idx).abs() <= 3 * n,
    lambda b, h, q_idx, kv_idx, n: (q_idx - kv_idx) // n % 2 == 0,
    lambda b, h, q_idx, kv_idx, n: kv_idx < n * (h + 1),
    lambda b, h, q_idx, kv_idx, n: (q_idx ^ kv_idx) < 8 * n,
    lambda b, h, q_idx, kv_idx, n: torch.minimum(q_idx, kv_idx) % (n + 1) != b,
    lambda b, h, q_idx, kv_idx, n: DOCUMENTS[q_idx] <= DOCUMENTS[kv_idx] + n - 1,
    lambda b, h, q_idx, kv_idx, n: (q_idx << 1) >= (kv_idx * n).clamp(max=SEQ),
]
SHAPES = [
    torch.tanh,
    torch.sigmoid,
    torch.sin,
    lambda x: torch.exp(-x.abs()),
    lambda x: torch.sqrt(1 + x * x),
    lambda x: x / (1 + x.abs()),
    lambda x: x.clamp(-2.5, 2.5),
    lambda x: (1 + x**2).log(),
    lambda x: torch.where(x > 0, x, 0.1 * x),
]


def random_mask(seed, depth=2):
    """A mask_mod of two to four conditions, joined at random."""
    draw = random.Random(seed)
    if depth == 0:
        condition, n = draw.choice(CONDITIONS), draw.randint(1, 5)
        return lambda b, h, q_idx, kv_idx: condition(b, h, q_idx, kv_idx, n)
    left, right = (random_mask(draw.random(), depth - 1) for _ in range(2))
    joined = [lambda a, b: a & b, lambda a, b: a | b, lambda a, b: ~a | b, lambda a, b: a ^ b, torch.logical_and]
    join = draw.choice(joined)
    return lambda b, h, q_idx, kv_idx: join(left(b, h, q_idx, kv_idx), right(b, h, q_idx, kv_idx))


def random_score(seed, depth=2):
    """A function of a table [HEADS, 2 SEQ] that gives a score_mod: some functions of score, indices and table, one of another."""
    draw = random.Random(seed)
    shape, n = draw.choice(SHAPES), draw.randint(2, 5)
    if depth == 0:
        leaves = [
            lambda table: lambda score, b, h, q, kv: score,
            lambda table: lambda score, b, h, q, kv: table[h, q - kv],
            lambda table: lambda score, b, h, q, kv: table[h, (q + n * kv) % SEQ] * score,
            lambda table: lambda score, b, h, q, kv: score - (q - kv).abs() / (4 + h),
        ]
        return draw.choice(leaves)
    left, right = (random_score(draw.random(), depth - 1) for _ in range(2))
    condition = draw.choice(CONDITIONS)
    joined = [
        lambda a, b, c: shape(a) * n + b,
        lambda a, b, c: torch.where(c, a, shape(b)),
        lambda a, b, c: torch.maximum(a, shape(b)),
        lambda a, b, c: shape(a) * shape(b) - a / n,
    ]
    join = draw.choice(joined)

    def make(table):
        first, second = left(table), right(table)
        return lambda score, *indices: join(first(score, *indices), second(score, *indices), condition(*indices, n))

    return make


def tables_of(name, dtype=torch.float32):
    """The tensors that a score mod reads; every other one is not contiguous."""
    return [
        rand(*shape, 2, dtype=dtype, device=DEVICE)[..., 0] if i else rand(*shape, dtype=dtype, device=DEVICE)
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


def tensors(dtype=torch.float32, kv_heads=2, seq_q=SEQ, dim=16):
    """q, k, v [batch, heads, seq, dim], not contiguous."""
    return [t.transpose(1, 2) for t in qkv(BATCH, seq_q, SEQ, HEADS, kv_heads, dim, dtype=dtype, device=DEVICE)]


def blocks(mask, heads=None, batch=None, seq_q=SEQ, size=16):
    return create_block_mask(mask, batch, heads, seq_q, SEQ, device=DEVICE, BLOCK_SIZE=size)


def blocks_of(mask, name, size=16):
    per = {"by head": {"heads": HEADS}, "padded": {"batch": BATCH}}
    return blocks(mask, size=size, **per.get(name, {}))


def checked(make, tables, mask=None, block_mask=None, dtype=torch.float32, dim=16, judged=7):
    """Forward and backward of a call against fp64.  judged: so many of out, lse, dq, dk, dv and the gradients of tables; the
    others have to be finite."""
    given = tensors(dtype, dim=dim)
    upstream = rand(BATCH, HEADS, SEQ, dim, dtype=dtype, device=DEVICE), rand(BATCH, HEADS, SEQ, device=DEVICE)

    def run(dtype):
        leaves = [t.detach().double().requires_grad_() for t in (*given, *tables)]
        out, lse = expected(*leaves[:3], make, leaves[3:], mask, dtype)
        rows = torch.where(lse.isfinite(), lse, 0.0)  # a row without keys passes nothing
        loss = (out * upstream[0].to(out.dtype)).sum() + (rows * upstream[1].to(lse.dtype)).sum()
        return out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)

    want, plain = run(torch.float64), run(dtype)
    leaves = [t.detach().clone().requires_grad_() for t in (*given, *tables)]
    mod = {} if make is None else {"score_mod": make(*leaves[3:])}
    out, lse = flex_attention(*leaves[:3], **mod, block_mask=block_mask, enable_gqa=True, return_lse=True)
    got = out, lse, *torch.autograd.grad((out, lse), leaves, upstream)
    names = ("out", "lse", "dq", "dk", "dv", "first table", "second table")
    for i, (name, a, b, c) in enumerate(zip(names, got, want, plain, strict=False)):
        if i < judged and a.numel() > HEADS:  # of fewer numbers the errors make no statistic
            judge(a.detach(), b, c, name)
        assert a.isfinite().all() or name == "lse"
