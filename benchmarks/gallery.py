"""Mods as data: each a @triton.jit function, the same in torch, its arguments at a length, where it is from.

`benchmarks/mods.py` times them beside FlexAttention.  The twin of `name` is `name_twin`, of the same arguments, as
`tilefold.masks.rule` takes it.  Lengths are powers of 4: images are square.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tilefold.device import approximate

Args = tuple[Any, ...]
CAP = 30.0
LIMITS = {"forward": 1e-2, "backward": 2e-2}  # relative L2 errors between two results in bf16


# --- causal masks -----------------------------------------------------------------------------------------------------------


@triton.jit
def causal(score, batch, head, q_index, kv_index, args):
    return kv_index <= q_index


def causal_twin(score, b, h, i, j, args):
    return j <= i


@triton.jit
def sliding_window(score, batch, head, q_index, kv_index, args):
    reach, seq_q, seq_k = args
    return (kv_index <= q_index) & (q_index - kv_index < reach)


def sliding_window_twin(score, b, h, i, j, args):
    return (j <= i) & (i - j < args[0])


@triton.jit
def sink_window(score, batch, head, q_index, kv_index, args):
    sinks, reach, seq_q, seq_k = args
    return (kv_index <= q_index) & ((q_index - kv_index < reach) | (kv_index < sinks))


def sink_window_twin(score, b, h, i, j, args):
    return (j <= i) & ((i - j < args[1]) | (j < args[0]))


@triton.jit
def prefix_lm(score, batch, head, q_index, kv_index, args):
    prefix, seq_q, seq_k = args
    return (kv_index < prefix) | (kv_index <= q_index)


def prefix_lm_twin(score, b, h, i, j, args):
    return (j < args[0]) | (j <= i)


@triton.jit
def strided(score, batch, head, q_index, kv_index, args):
    stride, seq_q, seq_k = args  # a power of two
    apart = q_index - kv_index
    return (apart >= 0) & ((apart < stride) | ((apart & (stride - 1)) == 0))


def strided_twin(score, b, h, i, j, args):
    return (j <= i) & ((i - j < args[0]) | ((i - j) % args[0] == 0))


@triton.jit
def block_causal(score, batch, head, q_index, kv_index, args):
    frame, seq_q, seq_k = args  # tokens of a frame
    return kv_index < (q_index // frame + 1) * frame


def block_causal_twin(score, b, h, i, j, args):
    return j // args[0] <= i // args[0]


@triton.jit
def tree(score, batch, head, q_index, kv_index, args):
    ends, seq_q, seq_k = args  # of each token, behind its last descendant; the tree in depth-first order
    return (kv_index <= q_index) & (q_index < tl.load(ends + kv_index))


def tree_twin(score, b, h, i, j, args):
    return (j <= i) & (i < args[0][j])


# --- masks over packed sequences --------------------------------------------------------------------------------------------


@triton.jit
def documents(score, batch, head, q_index, kv_index, args):
    numbers, seq_q, seq_k = args  # the document of each token
    return tl.load(numbers + q_index) == tl.load(numbers + kv_index)


def documents_twin(score, b, h, i, j, args):
    return args[0][i] == args[0][j]


@triton.jit
def causal_documents(score, batch, head, q_index, kv_index, args):
    numbers, seq_q, seq_k = args
    return (kv_index <= q_index) & (tl.load(numbers + q_index) == tl.load(numbers + kv_index))


def causal_documents_twin(score, b, h, i, j, args):
    return (j <= i) & (args[0][i] == args[0][j])


@triton.jit
def prefix_documents(score, batch, head, q_index, kv_index, args):
    starts, prefix, seq_q, seq_k = args  # where the document of each token begins
    start = tl.load(starts + q_index)
    return (start == tl.load(starts + kv_index)) & ((kv_index <= q_index) | (kv_index < start + prefix))


def prefix_documents_twin(score, b, h, i, j, args):
    return (args[0][i] == args[0][j]) & ((j <= i) | (j < args[0][i] + args[1]))


@triton.jit
def transfusion(score, batch, head, q_index, kv_index, args):
    images, seq_q, seq_k = args  # the image of each token, 0 for text
    image = tl.load(images + q_index)
    return (kv_index <= q_index) | ((image > 0) & (image == tl.load(images + kv_index)))


def transfusion_twin(score, b, h, i, j, args):
    return (j <= i) | ((args[0][i] > 0) & (args[0][i] == args[0][j]))


# --- masks that look both ways ----------------------------------------------------------------------------------------------


@triton.jit
def dilated_window(score, batch, head, q_index, kv_index, args):
    reach, seq_q, seq_k = args
    apart = tl.abs(q_index - kv_index)
    return (apart <= reach) & (apart % 2 == 0)


def dilated_window_twin(score, b, h, i, j, args):
    return ((i - j).abs() <= args[0]) & ((i - j).abs() % 2 == 0)


@triton.jit
def global_tokens(score, batch, head, q_index, kv_index, args):
    tokens, reach, seq_q, seq_k = args
    return (tl.abs(q_index - kv_index) <= reach) | (q_index < tokens) | (kv_index < tokens)


def global_tokens_twin(score, b, h, i, j, args):
    return ((i - j).abs() <= args[1]) | (i < args[0]) | (j < args[0])


@triton.jit
def near(query, key, reach, size):
    """Whether a key is in the window of 2 reach + 1 places around a query; at the ends of an axis the window is moved inside."""
    centre = tl.minimum(tl.maximum(query, reach), size - 1 - reach)
    return tl.abs(centre - key) <= reach


def near_twin(query, key, reach, size):
    return (query.clamp(reach, size - 1 - reach) - key).abs() <= reach


@triton.jit
def natten(score, batch, head, q_index, kv_index, args):
    bits, reach, seq_q, seq_k = args  # the image is 2**bits wide: shifts, where a width would divide
    width = 1 << bits
    rows = near(q_index >> bits, kv_index >> bits, reach, seq_q >> bits)
    return rows & near(q_index & (width - 1), kv_index & (width - 1), reach, width)


def natten_twin(score, b, h, i, j, args):
    (bits, reach), size = args[:2], 1 << args[0]
    return near_twin(i // size, j // size, reach, args[2] >> bits) & near_twin(i % size, j % size, reach, size)


@triton.jit
def row_column(index, bits, side):
    """Where a token lies in an image 2**bits wide whose tiles of 2**side x 2**side tokens lie one after the other."""
    tile, inner = index >> (2 * side), index & ((1 << (2 * side)) - 1)
    row = ((tile >> (bits - side)) << side) + (inner >> side)
    return row, ((tile & ((1 << (bits - side)) - 1)) << side) + (inner & ((1 << side) - 1))


def row_column_twin(index, bits, side):
    wide, across = 1 << side, 1 << (bits - side)  # tokens of a tile, tiles of the image
    tile, inner = index // wide**2, index % wide**2
    return tile // across * wide + inner // wide, tile % across * wide + inner % wide


@triton.jit
def tiled_natten(score, batch, head, q_index, kv_index, args):
    bits, side, reach, seq_q, seq_k = args
    q_row, q_column = row_column(q_index, bits, side)
    row, column = row_column(kv_index, bits, side)
    return near(q_row, row, reach, seq_q >> bits) & near(q_column, column, reach, 1 << bits)


def tiled_natten_twin(score, b, h, i, j, args):
    bits, side, reach = args[:3]
    here, there = row_column_twin(i, bits, side), row_column_twin(j, bits, side)
    rows = near_twin(here[0], there[0], reach, args[3] >> bits)
    return rows & near_twin(here[1], there[1], reach, 1 << bits)


@triton.jit
def neighbourhood(score, batch, head, q_index, kv_index, args):
    bits, reach, seq_q, seq_k = args  # frames are 2**bits x 2**bits
    last = (1 << bits) - 1
    frames = near(q_index >> (2 * bits), kv_index >> (2 * bits), reach, seq_q >> (2 * bits))
    rows = near((q_index >> bits) & last, (kv_index >> bits) & last, reach, 1 << bits)
    return frames & rows & near(q_index & last, kv_index & last, reach, 1 << bits)


def neighbourhood_twin(score, b, h, i, j, args):
    bits, reach = args[:2]
    size, frame = 1 << bits, 1 << 2 * bits
    frames = near_twin(i // frame, j // frame, reach, args[2] >> 2 * bits)
    rows = near_twin(i // size % size, j // size % size, reach, size)
    return frames & rows & near_twin(i % size, j % size, reach, size)


# --- changes of scores ------------------------------------------------------------------------------------------------------


@triton.jit
def alibi(score, batch, head, q_index, kv_index, args):
    slopes, seq_q, seq_k = args
    return score - tl.load(slopes + head) * tl.abs(q_index.to(tl.float32) - kv_index.to(tl.float32))


def alibi_twin(score, b, h, i, j, args):
    return score - args[0][h] * (i - j).abs()


@triton.jit
def relative_table(score, batch, head, q_index, kv_index, args):
    table, reach, seq_q, seq_k = args  # [heads, 2 reach + 1]
    place = tl.minimum(tl.maximum(kv_index - q_index, -reach), reach) + reach
    return score + tl.load(table + head * (2 * reach + 1) + place)


def relative_table_twin(score, b, h, i, j, args):
    return score + args[0][h, (j - i).clamp(-args[1], args[1]) + args[1]]


@triton.jit
def t5_buckets(score, batch, head, q_index, kv_index, args):
    table, seq_q, seq_k = (
        args  # [heads, 32]: 0 to 7 tokens apart, then half octaves up to 128; 16 more behind the query
    )
    apart = (kv_index - q_index).to(tl.float32)
    bucket = tl.minimum(tl.minimum(tl.abs(apart), tl.log2(apart * apart + 0.5) + 2.0), 15.0)
    return score + tl.load(table + head * 32 + tl.where(apart > 0, bucket + 16.0, bucket).to(tl.int32))


def t5_buckets_twin(score, b, h, i, j, args):
    apart = (j - i).float()
    bucket = torch.minimum(apart.abs(), torch.log2(apart * apart + 0.5) + 2.0).clamp(max=15.0)
    return score + args[0][h, torch.where(apart > 0, bucket + 16.0, bucket).int()]


@triton.jit
def softcap(score, batch, head, q_index, kv_index, args):
    cap, seq_q, seq_k = args
    return cap * (2.0 * tl.sigmoid(score * (2.0 / cap)) - 1.0)


def softcap_twin(score, b, h, i, j, args):
    return args[0] * torch.tanh(score / args[0])


@triton.jit
def softcap_approximate(score, batch, head, q_index, kv_index, args):
    cap, seq_q, seq_k = args
    return cap * approximate.tanh(score * (1.0 / cap))


softcap_approximate_twin = softcap_twin


# --- the gallery ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mod:
    """title, source: for readers.  fn: in Triton; its twin is found by its name.  args: of (tokens, heads), with tensors on the
    CPU.  shown: args of an example with 256 tokens and 4 heads, where `place` is the index of each token.  is_score: it is a
    score_mod.  own: keywords of our kernel without a function, by args: the same mask, or scores as they are.  calls: the
    functions that fn calls."""

    title: str
    source: str
    fn: Any
    args: Callable[[int, int], Args] = lambda tokens, heads: ()
    shown: str = ""
    is_score: bool = False
    own: Callable[[Args], dict[str, Any]] | None = None
    calls: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return str(self.fn.fn.__name__)

    @property
    def twin(self) -> Callable[..., Any]:
        found: Callable[..., Any] = globals()[f"{self.name}_twin"]
        return found

    def options(self, args: Args) -> dict[str, Any]:
        """The keywords of `tilefold.attention`."""
        kind = "score" if self.is_score else "mask"
        return {f"{kind}_mod": self.fn, f"{kind}_args": args}

    def in_torch(self, args: Args, tokens: int) -> Callable[..., Any]:
        """FlexAttention's function of it."""
        given, twin = (*args, tokens, tokens), self.twin
        if self.is_score:
            return lambda score, b, h, i, j: twin(score, b, h, i, j, given)
        return lambda b, h, i, j: twin(None, b, h, i, j, given)


def cut(tokens: int, parts: int = 8) -> torch.Tensor:
    """Offsets [parts + 1] of documents of unequal lengths."""
    return (torch.linspace(0, 1, parts + 1, dtype=torch.float64).pow(1.5) * tokens).round().int()


def numbers_of(tokens: int) -> torch.Tensor:
    """The document of each token."""
    return (torch.searchsorted(cut(tokens), torch.arange(tokens, dtype=torch.int32), right=True) - 1).int()


def ends_of(tokens: int) -> torch.Tensor:
    """A tree in depth-first order: a trunk of a quarter of the tokens, then two trees of what is left."""
    ends = torch.empty(tokens, dtype=torch.int32)

    def grow(first: int, last: int) -> None:
        split = first + max(1, (last - first) // 4)
        ends[first:split] = last
        if split < last:
            half = (split + last) // 2
            for begin, end in ((split, half), (half, last)):
                if begin < end:
                    grow(begin, end)

    grow(0, tokens)
    return ends


def images_of(tokens: int) -> torch.Tensor:
    """Four images in a text, each of an eighth of the tokens."""
    place = torch.arange(tokens)
    return torch.where(place % (tokens // 4) >= tokens // 8, place // (tokens // 4) + 1, 0).int()


def slopes_of(heads: int) -> torch.Tensor:
    return torch.tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)])


def table_of(heads: int, width: int) -> torch.Tensor:
    """Random biases, smaller from one to the next: a picture of it has a direction."""
    return torch.randn(heads, width, generator=torch.Generator().manual_seed(0)) * torch.linspace(2, 0.5, width)


def log2(n: int) -> int:
    return n.bit_length() - 1


def unchanged(args: Args) -> dict[str, Any]:
    return {}


SCORE: dict[str, Any] = {"is_score": True, "own": unchanged}
MODS = (
    Mod("Causal", "Vaswani et al. 2017, arXiv:1706.03762", causal, own=lambda args: {"causal": True}),
    Mod("Sliding window", "Mistral 7B, arXiv:2310.06825", sliding_window, lambda n, heads: (n // 8,), "(64,)",
        own=lambda args: {"window": (args[0] - 1, 0)}),
    Mod("Attention sink and window", "StreamingLLM, arXiv:2309.17453", sink_window, lambda n, heads: (4, n // 8),
        "(4, 64)"),
    Mod("Prefix LM", "T5, arXiv:1910.10683", prefix_lm, lambda n, heads: (n // 4,), "(64,)"),
    Mod("Strided", "Sparse Transformers, arXiv:1904.10509", strided, lambda n, heads: (1 << log2(n) // 2,), "(16,)"),
    Mod("Block-causal video frames", "MAGI-1, arXiv:2505.13211", block_causal, lambda n, heads: (n // 8,), "(32,)"),
    Mod("Tree", "SpecInfer, arXiv:2305.09781", tree, lambda n, heads: (ends_of(n),),
        "(torch.where(place // 64 == 1, 128, 256).int(),)"),
    Mod("Documents", "packed sequences, both ways", documents, lambda n, heads: (numbers_of(n),), "(place // 100,)"),
    Mod("Documents, causal", "Llama 3, arXiv:2407.21783", causal_documents, lambda n, heads: (numbers_of(n),),
        "(place // 100,)"),
    Mod("Documents with prefixes", "attention-gym, `generate_doc_mask_mod`", prefix_documents,
        lambda n, heads: (cut(n)[numbers_of(n)].contiguous(), n // 32), "(place // 100 * 100, 20)"),
    Mod("Transfusion", "arXiv:2408.11039", transfusion, lambda n, heads: (images_of(n),),
        "(place // 32 % 2 * (place // 64 + 1),)"),
    Mod("Dilated window", "Longformer, arXiv:2004.05150", dilated_window, lambda n, heads: (n // 8,), "(32,)"),
    Mod("Global tokens", "Longformer, arXiv:2004.05150; BigBird, arXiv:2007.14062", global_tokens,
        lambda n, heads: (n // 64, n // 16), "(2, 32)"),
    Mod("Neighbourhood, 2-D", "NATTEN, arXiv:2204.07143", natten,
        lambda n, heads: (log2(n) // 2, min(6, n // 32)), "(4, 2)", calls=(near,)),
    Mod("Neighbourhood, tokens in tiles", "Generalized NATTEN, arXiv:2504.16922", tiled_natten,
        lambda n, heads: (log2(n) // 2, 3 if n > 512 else 1, min(6, n // 32)), "(4, 2, 2)", calls=(near, row_column)),
    Mod("Neighbourhood, 3-D", "NATTEN, arXiv:2403.04690", neighbourhood,
        lambda n, heads: (log2(n) // 3, 3 if n > 512 else 1), "(2, 1)", calls=(near,)),
    Mod("ALiBi", "arXiv:2108.12409", alibi, lambda n, heads: (slopes_of(heads),), "(2.0 ** -torch.arange(1.0, 5.0),)",
        **SCORE),
    Mod("Table of relative positions", "Shaw et al. 2018, arXiv:1803.02155", relative_table,
        lambda n, heads: (table_of(heads, 2 * max(8, n // 32) + 1), max(8, n // 32)), "(torch.randn(4, 65), 32)", **SCORE),
    Mod("Buckets of relative positions", "T5, arXiv:1910.10683", t5_buckets, lambda n, heads: (table_of(heads, 32),),
        "(torch.randn(4, 32),)", **SCORE),
    Mod("Softcap", "Gemma 2, arXiv:2408.00118", softcap, lambda n, heads: (CAP,), "(30.0,)", **SCORE),
    Mod("Softcap, tanh approximated", "attention-gym, `softcapping`", softcap_approximate, lambda n, heads: (CAP,),
        "(30.0,)", **SCORE),
)  # fmt: skip
