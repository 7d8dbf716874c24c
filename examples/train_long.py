"""Train a small decoder on sequences that are cut over several GPUs: context parallelism, FSDP2, checkpoints.

    torchrun --nproc-per-node 4 examples/train_long.py                  # 131072 tokens a sequence, over the GPUs of this machine
    python examples/train_long.py --ranks 2                             # starts its own processes; tiny, over gloo, without a GPU
    python examples/train_long.py --ranks 4 --tokens 524288 --scheme ring --check

Each rank holds some of the tokens (zigzag shards), with their queries, keys and values; `tilefold.attention` inside
`context_parallel` sees all of them.  Everything else of a decoder works on one token at a time, so nothing else changes but three
things: positions (rotary embedding), labels (shifted before they are cut) and the mean of the loss.  The task: tokens as common
as words are (Zipf), and the second half of every sequence repeats the first.  How common they are is learnt in a few steps, the
repetition, which only attention over half of the sequence can see, in many more.  --check trains the same model with all tokens
on one rank beside it and compares the losses.  Exit code 1 if they differ."""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tilefold
from tilefold import parallel as tp

USUAL: dict[bool, dict[str, Any]] = {
    True: {"tokens": 131072, "layers": 4, "heads": 16, "kv_heads": 4, "dim": 128, "vocabulary": 8192, "steps": 10},
    False: {"tokens": 48, "layers": 2, "heads": 4, "kv_heads": 2, "dim": 16, "vocabulary": 32, "steps": 3},
}


def arguments(argv: Sequence[str] | None, gpu: bool) -> argparse.Namespace:
    """What was asked for; what was not is as USUAL says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in USUAL[gpu].items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help="(default %(default)s)")
    parser.add_argument(
        "--ranks", type=int, default=0, help="processes to start, if torchrun did not (default: all GPUs, or 2)"
    )
    parser.add_argument("--scheme", default="auto", choices=("auto", "ring", "all_gather", "heads"))
    parser.add_argument("--kind", default="zigzag", choices=("zigzag", "contiguous"), help="how tokens are cut")
    parser.add_argument("--no-fsdp", action="store_true", help="keep all parameters on every rank")
    parser.add_argument("--no-checkpoint", action="store_true", help="keep the activations of every layer")
    parser.add_argument("--compile", action="store_true", help="torch.compile every layer")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--check", action="store_true", help="train on one rank, too, and compare the losses")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser.parse_args(argv)


# --- the model ---------------------------------------------------------------------------------------------------------------


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of [batch, seq, heads, dim] by [seq, dim / 2] angles."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Layer(nn.Module):
    """Pre-norm attention and a gated MLP.  Heads are counted from the projections' outputs, so that these may be cut by heads."""

    def __init__(self, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        width = heads * dim
        self.dim = dim
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, n * dim, bias=False) for n in (heads, kv_heads, kv_heads))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.gate = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        h = self.norm_attention(x)
        q, k, v = (one(h).unflatten(-1, (-1, self.dim)) for one in (self.q, self.k, self.v))
        attended = tilefold.attention(rotate(q, angles), rotate(k, angles), v, causal=True)
        x = x + self.out(attended.flatten(2))
        h = self.norm_mlp(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class Decoder(nn.Module):
    """Tokens and their positions in, logits out."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.heads * options.dim
        self.embed = nn.Embedding(options.vocabulary, width)
        self.layers = nn.ModuleList(Layer(options.heads, options.kv_heads, options.dim) for _ in range(options.layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, options.vocabulary, bias=False)
        self.dim, self.checkpoints = options.dim, not options.no_checkpoint

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        rates = 10000.0 ** (-torch.arange(0, self.dim, 2, device=tokens.device) / self.dim)
        angles = positions[:, None] * rates
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, angles, use_reentrant=False) if self.checkpoints else layer(x, angles)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(options: argparse.Namespace, device: torch.device) -> Decoder:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Decoder(options).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def tokens_of(options: argparse.Namespace, step: int, device: torch.device) -> Tensor:
    """[1, tokens]: random ones, the n-th as common as 1 / n, twice; the same on every rank."""
    random = torch.Generator().manual_seed(step)
    common = 1.0 / torch.arange(1, options.vocabulary + 1)
    half = torch.multinomial(common, -(-options.tokens // 2), replacement=True, generator=random)[None]
    return torch.cat([half, half], 1)[:, : options.tokens].to(device)


# --- training ----------------------------------------------------------------------------------------------------------------


def wrapped(model: Decoder, options: argparse.Namespace, ranks: int) -> Decoder:
    """Layers compiled, parameters sharded by FSDP2, as asked."""
    if options.compile:
        for layer in model.layers:
            layer.compile(fullgraph=True, backend="inductor" if torch.cuda.is_available() else "aot_eager")
    if ranks > 1 and not options.no_fsdp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (ranks,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def train(options: argparse.Namespace, ranks: int, show: Callable[[int, float], None]) -> list[float]:
    """The losses of some steps, over all ranks' tokens, or alone with ranks 1."""
    rank = dist.get_rank() if ranks > 1 else 0
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    sharding = tp.shard(options.tokens, ranks, options.kind)
    model = wrapped(build(options, device), options, ranks)
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.rate)
    losses = []
    for step in range(options.steps):
        tokens = tokens_of(options, step, device)
        mine, labels = tp.shard_sequence(tokens, sharding, rank), tp.next_tokens(tokens, sharding, rank)
        count = tokens.numel() - 1  # labels of all ranks: the last token has none
        shared = tp.context_parallel(None, sharding, scheme=options.scheme) if ranks > 1 else nullcontext()
        with shared:  # backward inside, too: checkpoints compute their layers again there
            logits = model(mine, tp.positions(sharding, rank, device))
            summand = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / count
            # FSDP averages over the ranks what has to be a sum.
            (summand * (ranks if ranks > 1 and not options.no_fsdp else 1)).backward()
        loss = summand.detach().clone()
        if ranks > 1:
            dist.all_reduce(loss)
            if options.no_fsdp:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss))
        show(step, losses[-1])
    return losses


def peak_bytes() -> int:
    """The most memory that this process has had: the GPU's, or its own."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def planned(options: argparse.Namespace, ranks: int) -> Any:
    """Which scheme one layer's attention takes, and why."""
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    problem = tp.ParallelProblem(1, options.tokens, options.tokens, options.heads, options.kv_heads, options.dim, options.dim,
                                 dtype=dtype, window=(-1, 0), kind=options.kind, backward=True)  # fmt: skip
    return tp.plan_parallel(problem, tp.Links(ranks), options.scheme)


def run(options: argparse.Namespace) -> int:
    """On one rank of a process group that is there."""
    from rich.progress import Progress, TextColumn

    rank, ranks = dist.get_rank(), dist.get_world_size()
    plan = planned(options, ranks)  # on every rank: what is impossible is refused by all
    if rank == 0:
        print(plan)
    began = time.perf_counter()
    with Progress(TextColumn("step"), *Progress.get_default_columns(), disable=rank != 0, transient=True) as bar:
        task = bar.add_task("", total=options.steps)
        losses = train(
            options, ranks, lambda step, loss: bar.update(task, completed=step + 1, description=f"loss {loss:.4f}")
        )
    seconds, peaks = time.perf_counter() - began, [0] * ranks
    dist.all_gather_object(peaks, peak_bytes())
    wrong = False
    figures: dict[str, Any] = {
        "ranks": ranks,
        "tokens": options.tokens,
        "losses": losses,
        "seconds": seconds,
        "peaks": peaks,
    }
    if options.check:
        alone = figures["alone"] = train(options, 1, lambda step, loss: None)
        limit = 1e-2 if torch.cuda.is_available() else 1e-4  # what rounding in another order makes of a few steps
        wrong = max(abs(a - b) for a, b in zip(losses, alone, strict=True)) > limit
    if rank == 0:
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {options.steps} steps; "
              f"{options.tokens * options.steps / seconds:.0f} tokens/s, the first step's compilation included")  # fmt: skip
        print("peak memory of each rank: " + ", ".join(f"{peak / 1e9:.2f} GB" for peak in peaks))
        if options.check:
            print(f"alone: {alone[0]:.4f} to {alone[-1]:.4f}{': DIFFERENT' if wrong else ', the same'}")
        if options.json:
            options.json.write_text(json.dumps(figures))
    return int(wrong)


def _in_group(options: argparse.Namespace, local_rank: int, **group: Any) -> int:
    """Run as a rank of the process group that this makes."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if gpu else "gloo", **group)
    code = run(options)
    dist.destroy_process_group()
    return code


def _started(rank: int, options: argparse.Namespace, ranks: int, folder: str) -> None:
    sys.exit(_in_group(options, rank, init_method=f"file://{folder}/store", rank=rank, world_size=ranks))


def main(argv: Sequence[str] | None = None) -> int:
    gpu = torch.cuda.is_available()
    options = arguments(argv, gpu)
    if not gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if dist.is_initialized():
        return run(options)
    if "RANK" in os.environ:  # torchrun
        return _in_group(options, int(os.environ["LOCAL_RANK"]))
    ranks = options.ranks or (torch.cuda.device_count() if gpu else 2)
    try:
        planned(options, ranks)
    except tilefold.TilefoldError as refused:
        sys.exit(f"error: {refused}")
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        processes = [context.Process(target=_started, args=(rank, options, ranks, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main())
