"""Decode with a Qwen2-shaped model in bfloat16 and in few bits, batch 1: tokens a second, memory, logits.

    python examples/quantized_decode.py                    # tiny without a GPU; with one Qwen2-7B's shape, random weights
    python examples/quantized_decode.py --bits 8 --layers 4 --json run.json

The model is Transformers' (random weights, made on the device); one step of it over a static KV cache is written out here, on
`kvcache_append` and `attention_kvcache`, for both alike: projections of one input are one layer, what lies between them is
compiled into single kernels.  Steps run eagerly and as a CUDA graph, the two models in turns.  Each one's logits are compared
with the same weights, dequantised, in fp32, beside what PyTorch makes of them in bfloat16 (bfloat16: beside Transformers
itself).  Exit code 1 if one is wrong.  Needs `pip install "tilefold[transformers]"`."""

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

USUAL: dict[bool, dict[str, Any]] = {
    True: {"layers": 28, "hidden": 3584, "intermediate": 18944, "heads": 28, "kv_heads": 4, "vocabulary": 152064,
           "prompt": 16, "new": 64, "rounds": 5, "dtype": "bfloat16"},
    False: {"layers": 2, "hidden": 128, "intermediate": 192, "heads": 4, "kv_heads": 2, "vocabulary": 160,
            "prompt": 3, "new": 2, "rounds": 1, "dtype": "bfloat16"},
}  # fmt: skip
Linear = Callable[[Any, Tensor], Tensor]


def arguments(argv: Sequence[str] | None, gpu: bool) -> argparse.Namespace:
    """What was asked for; what was not is as USUAL says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "vocabulary"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=USUAL[gpu][name], help="of the model (default %(default)s)")
    parser.add_argument("--bits", type=int, default=4, choices=(8, 4, 3, 2))
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=USUAL[gpu]["prompt"], help="tokens before the first decoded one")
    parser.add_argument("--new", type=int, default=USUAL[gpu]["new"], help="tokens decoded in a round")
    parser.add_argument("--rounds", type=int, default=USUAL[gpu]["rounds"], help="turns that each model gets")
    parser.add_argument("--dtype", default=USUAL[gpu]["dtype"], choices=("bfloat16", "float16"))
    parser.add_argument("--no-compile", action="store_true", help="leave norms and activations to single torch calls")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser.parse_args(argv)


# --- the model ---------------------------------------------------------------------------------------------------------------


def build(options: argparse.Namespace, device: str) -> Any:
    """Transformers' Qwen2ForCausalLM with random weights, made on the device in its dtype."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        tie_word_embeddings=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, options.dtype))
    try:
        torch.manual_seed(0)
        with torch.device(device):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    for layer in model.model.layers:  # Transformers starts biases at 0, where a lost one would not show
        for each in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            nn.init.normal_(each.bias, std=0.1)
    return model.eval().requires_grad_(False)


def merge(model: Any) -> None:
    """Make one layer of those that read the same input: queries, keys and values; gate and up.  In place, a layer at a time."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.qkv_proj = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        mlp.gate_up_proj = joined([mlp.gate_proj, mlp.up_proj])
        del attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj


def joined(parts: list[nn.Linear]) -> nn.Linear:
    """One layer whose outputs are those of all, one after the other."""
    with torch.device("meta"):
        made = nn.Linear(parts[0].in_features, sum(p.out_features for p in parts), bias=parts[0].bias is not None)
    made.weight = nn.Parameter(torch.cat([p.weight for p in parts]), requires_grad=False)
    if parts[0].bias is not None:
        made.bias = nn.Parameter(torch.cat([p.bias for p in parts]), requires_grad=False)
    return made


def in_few_bits(model: Any, bits: int, group: int) -> tuple[Any, Any]:
    """The model again with quantised linear layers, everything else shared with it, and the report."""
    import tilefold

    # Parameters are in the memo, so the copy has the same ones.
    low = copy.deepcopy(model, {id(each): each for each in [*model.parameters(), *model.buffers()]})
    return low, tilefold.quantize(low, bits, group, progress=sys.stderr.isatty())


# --- one step ----------------------------------------------------------------------------------------------------------------


def add_norm(x: Tensor, more: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The residual stream with what a layer adds, and its RMS norm."""
    x = x + more
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return x, weight.to(x.dtype) * wide.to(x.dtype)


def swiglu(both: Tensor) -> Tensor:
    """silu(first half) times the second."""
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


class Decoder:
    """One token after the other, batch 1, over a static cache; the next token is the likeliest.

    linear(layer, x) is how a linear layer is computed; dtype that of everything between."""

    def __init__(
        self, model: Any, capacity: int, compiled: bool, dtype: torch.dtype, linear: Linear = lambda layer, x: layer(x)
    ) -> None:
        config, device = model.config, model.lm_head.weight.device
        self.model, self.linear, self.dtype = model, linear, dtype
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = config.hidden_size // config.num_attention_heads
        rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or config.rope_theta
        rates = theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        angles = torch.arange(capacity, dtype=torch.float64)[:, None] * rates
        self.cos, self.sin = (t.float().to(device) for t in (angles.cos(), angles.sin()))
        shape = (config.num_hidden_layers, 2, 1, capacity, self.kv_heads, self.dim)
        self.cache = torch.zeros(shape, dtype=dtype, device=device)
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.past = torch.zeros(1, dtype=torch.int32, device=device)
        self.logits = torch.zeros(1, config.vocab_size, dtype=dtype, device=device)
        self.epsilon = config.rms_norm_eps
        self.add_norm: Any = torch.compile(add_norm) if compiled else add_norm
        self.swiglu: Any = torch.compile(swiglu) if compiled else swiglu

    @torch.no_grad()
    def step(self) -> None:
        """From self.token at place self.past to the next token and place."""
        import tilefold

        body, linear, now = self.model.model, self.linear, self.past + 1
        x = body.embed_tokens(self.token).to(self.dtype)
        layers = list(body.layers)
        x, h = self.add_norm(x, torch.zeros_like(x), layers[0].input_layernorm.weight, self.epsilon)
        for i, layer in enumerate(layers):
            q, k, v = self.heads_of(linear(layer.self_attn.qkv_proj, h))
            keys, values = self.cache[i]
            places = {"cache_seqlens": self.past, "rotary_cos": self.cos, "rotary_sin": self.sin}
            turned: Any = tilefold.kvcache_append(k, v, keys, values, q=q, **places)
            out = tilefold.attention_kvcache(turned, keys, values, cache_seqlens=now)
            more = linear(layer.self_attn.o_proj, out.flatten(1))
            x, h = self.add_norm(x, more, layer.post_attention_layernorm.weight, self.epsilon)
            more = linear(layer.mlp.down_proj, self.swiglu(linear(layer.mlp.gate_up_proj, h)))
            following = layers[i + 1].input_layernorm if i + 1 < len(layers) else body.norm
            x, h = self.add_norm(x, more, following.weight, self.epsilon)
        self.logits.copy_(linear(self.model.lm_head, h))
        self.token.copy_(self.logits.argmax(-1))
        self.past.copy_(now)

    def heads_of(self, qkv: Tensor) -> list[Tensor]:
        """[1, 1, heads, dim] of queries, keys and values."""
        parts = qkv.view(1, 1, -1, self.dim).split([self.heads, self.kv_heads, self.kv_heads], 2)
        return list(parts)

    def run(self, tokens: Tensor, advance: Callable[[], Any], new: int = 0) -> tuple[Tensor, Tensor]:
        """Feed tokens [n] one by one from an empty cache, then decode -> (logits after the last one fed, tokens decoded)."""
        self.past.zero_()
        for one in tokens:
            self.token.copy_(one)
            advance()
        fed, found = self.logits.clone(), []
        for _ in range(new):
            found.append(self.token.clone())
            advance()
        return fed, torch.cat(found) if found else tokens[:0]

    def captured(self) -> Callable[[], Any]:
        """The step as a CUDA graph."""
        self.past.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


# --- right? ------------------------------------------------------------------------------------------------------------------


def by_torch(dtype: torch.dtype) -> Linear:
    """A linear layer by torch, in this dtype, whatever holds its weight."""

    def linear(layer: Any, x: Tensor) -> Tensor:
        weight = layer.weight.to(dtype) if isinstance(layer.weight, Tensor) else layer.weight.dequantize(dtype)
        return F.linear(x, weight, None if layer.bias is None else layer.bias.to(dtype))

    return linear


def judged(model: Any, got: Tensor, tokens: Tensor, plain: Tensor | None = None) -> Any:
    """The logits after `tokens` beside the same weights in fp32; plain: by other means in the model's dtype (None: torch)."""
    from tilefold import reference

    def logits(dtype: torch.dtype) -> Tensor:
        decoder = Decoder(model, len(tokens), False, dtype, by_torch(dtype))
        return decoder.run(tokens, decoder.step)[0]

    return reference.compare(got, logits(torch.float32).double(), logits(got.dtype) if plain is None else plain)


# --- how fast? ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A model by one way of running it."""

    name: str
    way: str
    ms: float
    megabytes: float

    @property
    def tokens_per_s(self) -> float:
        return 1e3 / self.ms


def timed(ways: dict[tuple[str, str], Callable[[], Any]], options: argparse.Namespace, gpu: bool) -> dict[Any, float]:
    """Milliseconds a token: medians of rounds in which all take turns, in changing order."""
    wait: Callable[[], Any] = torch.cuda.synchronize if gpu else torch.cpu.synchronize
    found: dict[Any, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            wait()
            begin = time.perf_counter()
            for _ in range(options.new):
                ways[name]()
            wait()
            found[name].append((time.perf_counter() - begin) / options.new * 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


def rewound(decoder: Decoder, advance: Callable[[], Any], start: int) -> Callable[[], Any]:
    """A step that goes back to where the prompt ended when the cache is full."""
    place, limit = [decoder.cache.shape[3]], decoder.cache.shape[3]

    def step() -> None:
        if place[0] >= limit:
            decoder.past.fill_(start)
            place[0] = start
        place[0] += 1
        advance()

    return step


def main(argv: Sequence[str] | None = None) -> int:
    gpu = torch.cuda.is_available()
    if not gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    options, device = arguments(argv, gpu), "cuda" if gpu else "cpu"
    model = build(options, device)
    prompt = torch.randint(0, options.vocabulary, (options.prompt,), device=device)
    with torch.no_grad():
        theirs = model(prompt[None]).logits[:, -1]
    merge(model)
    low, report = in_few_bits(model, options.bits, options.group)
    print(report, flush=True)
    capacity, dtype = options.prompt + options.new, getattr(torch, options.dtype)
    lines, ways, wrong = [], {}, False
    size = {options.dtype: report.before, f"{options.bits} bits": report.after}
    for name, one in zip(size, (model, low), strict=True):
        decoder = Decoder(one, capacity, gpu and not options.no_compile, dtype)
        logits, tokens = decoder.run(prompt, decoder.step, options.new)
        verdict = judged(one, logits, prompt, theirs if one is model else None)
        wrong |= not verdict.ok
        lines.append(f"{name}: logits after the prompt beside fp32: {verdict}")
        ways[name, "eager"] = rewound(decoder, decoder.step, options.prompt)
        if gpu:
            replay = decoder.captured()
            again = decoder.run(prompt, replay, options.new)
            equal = torch.equal(again[0], logits) and torch.equal(again[1], tokens)
            wrong |= not equal
            lines.append(f"{name}: graph and eager steps {'agree bit for bit' if equal else 'DIFFER'}")
            ways[name, "graph"] = rewound(decoder, replay, options.prompt)
    times = timed(ways, options, gpu)
    rows = [Row(name, way, ms, size[name] / 1e6) for (name, way), ms in times.items()]
    print("\n".join(lines))
    show(rows, options.dtype, gpu)
    if options.json is not None:
        figures = [{**row.__dict__, "tokens_per_s": row.tokens_per_s} for row in rows]
        options.json.write_text(
            json.dumps({"options": vars(options) | {"json": None}, "rows": figures, "checks": lines}, indent=2)
        )
    return int(wrong)


def show(rows: list[Row], dtype: str, gpu: bool) -> None:
    """The table; beside each quantised row how many times as fast as the other by the same way."""
    print(f"{'weights':10} {'way':6} {'ms/token':>9} {'tokens/s':>9} {'MB':>8} {'ratio':>6}")
    base = {row.way: row.ms for row in rows if row.name == dtype}
    for row in rows:
        ratio = f"{base[row.way] / row.ms:.2f}x" if row.name != dtype else ""
        print(f"{row.name:10} {row.way:6} {row.ms:9.3f} {row.tokens_per_s:9.1f} {row.megabytes:8.0f} {ratio:>6}")
    if not gpu:
        print("Times in the interpreter say nothing about a GPU; the logits were checked all the same.")


if __name__ == "__main__":
    sys.exit(main())
