"""Attention and its gradients with the mods of benchmarks/gallery.py: `attention` beside FlexAttention compiled, in turns.

    PYTHONPATH=src python benchmarks/mods.py --jsonl out/mods.jsonl --budget 560    # repeat it: what is in the file is left out
    PYTHONPATH=src python benchmarks/mods.py --only sliding --tokens 4096 --dim 128 --variants
    TRITON_INTERPRET=1 PYTHONPATH=src python benchmarks/mods.py --tiny              # on the CPU: results alone

bf16, --batch-tokens tokens in all.  ours: `attention` with the mod, which makes lists of tiles in its first call and keeps them.
flex: FlexAttention, dynamic=False, its block mask made before.  own: our kernel without a function, of the same mask or of scores
as they are.  sdpa: torch's, with the mask as a tensor.  Forward passes keep what gradients need.  TFLOP/s count the pairs that
are seen.  Before anything is timed, results are held to those of FlexAttention (or SDPA): the relative L2 error of `out`, or of
dq, dk and dv together, and of what is learned.  --variants adds the portable kernel, other versions of ours, and tilefold's own
flex_attention.

Compiling takes longer than measuring: --workers processes compile a length and head dim first, into caches on the disk."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from gallery import CAP, LIMITS, MODS, Mod, numbers_of, slopes_of
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tilefold
from tilefold.bench import timers
from tilefold.bench.page import table_lines
from tilefold.bench.setting import setting_of
from tilefold.compat import flex_attention as door
from tilefold.plan import plan_attention

Tensor = torch.Tensor
Call = Callable[[], Any]
SIZES = ((4096, 128), (4096, 64), (16384, 128), (16384, 64), (1024, 128), (1024, 64))  # tokens, head dim; in this order


@dataclass(frozen=True)
class Case:
    """ours, own: keywords of `attention`.  flex: score_mod and mask_mod of FlexAttention; {}: it is no peer.  learned: tensors of
    them that get gradients, too."""

    name: str
    ours: dict[str, Any]
    flex: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] | None = None
    learned: tuple[Tensor, ...] = ()


@triton.jit
def distance(score, batch, head, q_index, kv_index, args):
    return score + tl.exp2(-0.5 * (head + 1)) * (kv_index - q_index)


@triton.jit
def by_distance(score, batch, head, q_index, kv_index, args):
    return score + tl.load(args[0] + head * args[1] + kv_index - q_index + args[1] // 2)


def case_of(mod: Mod, tokens: int, heads: int, device: str) -> Case:
    args = tuple(one.to(device) if isinstance(one, Tensor) else one for one in mod.args(tokens, heads))
    flex = tanh_by_instruction if mod.name == "softcap_approximate" and device == "cuda" else mod.in_torch(args, tokens)
    return Case(
        mod.name,
        mod.options(args),
        {"score_mod" if mod.is_score else "mask_mod": flex},
        mod.own(args) if mod.own else None,
    )


def built_in(name: str, tokens: int, heads: int, device: str) -> Case:
    """What is no function for us: boolean masks beside SDPA, and built-in changes of scores.  "distance" is a function without
    arguments."""
    torch.manual_seed(0)
    numbers, slopes = numbers_of(tokens).to(device), slopes_of(heads).to(device)
    if name == "boolean mask":
        return Case(name, {"mask": torch.rand(1, 1, tokens, tokens, device=device) < 0.5}, own={})
    if name == "boolean mask of documents":
        return Case(name, {"mask": (numbers[:, None] == numbers)[None, None]})
    if name.startswith("bias"):
        learned = name == "bias, learned"
        bias = torch.randn(1, heads, tokens, tokens, device=device, dtype=torch.bfloat16, requires_grad=learned)
        flex = {"score_mod": lambda s, b, h, i, j: s + bias[0, h, i, j]}
        return Case(name, {"bias": bias}, flex, learned=(bias,) * learned)
    if name == "table of distances, learned":
        table = torch.randn(heads, 2 * tokens, device=device, requires_grad=True)
        ours = {"score_mod": by_distance, "score_args": (table, 2 * tokens)}
        return Case(name, ours, {"score_mod": lambda s, b, h, i, j: s + table[h, j - i + tokens]}, learned=(table,))
    ours, change = {
        "none": ({}, lambda s, b, h, i, j: s),
        "alibi_slopes": ({"alibi_slopes": slopes}, lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()),
        "distance": ({"score_mod": distance}, lambda s, b, h, i, j: s + torch.exp2(-0.5 * (h + 1)) * (j - i)),
        "softcap, built in": ({"softcap": CAP}, lambda s, b, h, i, j: CAP * torch.tanh(s / CAP)),
    }[name]
    return Case(name, ours, {"score_mod": change})


MASKS = ("boolean mask", "boolean mask of documents")
MORE = ("none", "alibi_slopes", "distance", "softcap, built in", "bias", "bias, learned",
        "table of distances, learned")  # fmt: skip  # of --variants


def tanh_by_instruction(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """FlexAttention's fastest softcap: tanh.approx.f32."""
    return CAP * Tanh.apply(score / CAP)


class Tanh(torch.autograd.Function):
    """An operator that Inductor lowers to one instruction; see `register_tanh`."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.ops.tilefold_bench.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int]:
        return torch.tanh(x), 0


def register_tanh() -> None:
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    torch.library.define("tilefold_bench::tanh", "(Tensor x) -> Tensor")
    torch.library.impl("tilefold_bench::tanh", "CompositeExplicitAutograd", torch.tanh)
    torch.library.register_fake("tilefold_bench::tanh", torch.tanh)
    lowered = make_pointwise(partial(ops.inline_asm_elementwise, asm="tanh.approx.f32 $0, $1;"))
    register_lowering(torch.ops.tilefold_bench.tanh)(lowered)


# --- who is measured --------------------------------------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, flex: dict[str, Any]) -> Tensor:
    """What FlexAttention's functions mean, in plain torch."""
    batch, tokens, heads, dim = q.shape
    places = [torch.arange(n).view([-1 if a == d else 1 for a in range(4)])
              for d, n in enumerate((batch, heads, tokens, tokens))]  # fmt: skip
    s = torch.einsum("bihd,bjhd->bhij", q, k) * dim**-0.5
    s = flex["score_mod"](s, *places) if "score_mod" in flex else s
    s = s.masked_fill(~flex["mask_mod"](*places), -torch.inf) if "mask_mod" in flex else s
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v)


def seen(case: Case, tokens: int, device: str) -> float:
    """The share of pairs that a mask shows."""
    if "mask" in case.ours:
        return float(case.ours["mask"].float().mean())
    if "mask_mod" not in case.flex:
        return 1.0
    zero, keys = torch.zeros((), dtype=torch.int64, device=device), torch.arange(tokens, device=device)
    rows = keys[:, None].split(1024)
    return sum(int(case.flex["mask_mod"](zero, zero, row, keys).sum()) for row in rows) / tokens**2


def peers(q: Tensor, k: Tensor, v: Tensor, case: Case) -> dict[str, Call]:
    """Forward passes; the one that the others are held to comes first."""
    made: dict[str, Call] = {}
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    if not q.is_cuda:
        sees = {"mask_mod": lambda b, h, i, j: case.ours["mask"][0, 0, i, j]} if "mask" in case.ours else case.flex
        made["plain"] = lambda: plain(q, k, v, sees)
    if case.flex:
        compiled: Any = torch.compile(flex_attention, dynamic=False) if q.is_cuda else eager
        mask, change = block_mask(case, q), case.flex.get("score_mod")
        made["flex"] = lambda: compiled(*turned, score_mod=change, block_mask=mask).transpose(1, 2)
    tensor = next((case.ours[name] for name in ("mask", "bias") if name in case.ours), None)
    if tensor is not None and (q.is_cuda or "mask" in case.ours):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        made["sdpa"] = lambda: sdpa(*turned, attn_mask=tensor).transpose(1, 2)
    made["ours"] = lambda: tilefold.attention(q, k, v, **case.ours)
    if case.own is not None:
        made["own"] = lambda: tilefold.attention(q, k, v, **case.own)
    return made


def eager(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """FlexAttention on the CPU, which has no backward pass there."""
    with torch.no_grad():
        return flex_attention(q.detach(), k.detach(), v.detach(), **options)


def block_mask(case: Case, q: Tensor) -> Any:
    sees, tokens = case.flex.get("mask_mod"), q.shape[1]
    if sees is None:
        return None
    made = create_block_mask(sees, None, None, tokens, tokens, device=q.device)
    if q.is_cuda:
        torch.cuda.empty_cache()  # a mask over all pairs was there
    return made


def variants(q: Tensor, k: Tensor, v: Tensor, case: Case) -> dict[str, Call]:
    """Other versions of the forward pass."""
    plan: Any = tilefold.attention_plan(q, k, v, **case.ours)
    plans = {"portable": plan_attention(plan.problem, plan.device, portable=True)}
    if "lists" in plan.options:
        plans["without lists"] = plan.with_tile(options=tuple(one for one in plan.options if one != "lists"))
    made: dict[str, Call] = {
        name: partial(tilefold.attention, q, k, v, plan=one, **case.ours) for name, one in plans.items()
    }
    if case.flex:
        mask, turned = block_mask(case, q), [t.transpose(1, 2) for t in (q, k, v)]
        change = case.flex.get("score_mod")
        made["tilefold's flex_attention"] = lambda: door.flex_attention(*turned, change, mask).transpose(1, 2)
    return made


def backward_variants(q: Tensor, k: Tensor, v: Tensor, case: Case) -> dict[str, Call]:
    """Forward passes whose gradients are other versions."""
    plan = tilefold.attention_backward_plan(q, k, v, **case.ours)
    plans = {"portable": plan.with_tiles(kernel="attention_backward_box")}
    if plan.options is not None and plan.options.late:
        plans["dP beside the changes"] = plan.with_tiles(options=replace(plan.options, late=False))
    if plan.options is not None and plan.options.lists:
        plans["without lists"] = plan.with_tiles(options=replace(plan.options, lists=False))
        plans["any order"] = plan.with_tiles(options=replace(plan.options, ordered=False))
    made: dict[str, Call] = {
        name: partial(tilefold.attention, q, k, v, backward_plan=one, **case.ours) for name, one in plans.items()
    }
    return made | {name: call for name, call in variants(q, k, v, case).items() if "flex_attention" in name}


# --- measuring --------------------------------------------------------------------------------------------------------------


def flat(made: Any) -> Tensor:
    return torch.cat([t.detach().float().flatten() for t in ((made,) if isinstance(made, Tensor) else made)])


def gradients(calls: dict[str, Call], inputs: list[Tensor], failed: dict[str, Exception]) -> dict[str, Call]:
    """Backward passes of these forward passes, which give dq, dk and dv, and gradients of what is learned."""
    dout = torch.randn_like(inputs[0])
    made: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            out = call()
        except Exception as error:
            failed[name] = error.with_traceback(None)  # whose frames hold tensors
            continue
        if out.requires_grad:
            made[name] = partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
    return made


def errors(calls: dict[str, Call], failed: dict[str, Exception]) -> dict[str, float]:
    """The relative L2 error of each result by the first that there is.  `own` beside a score_mod is another function."""
    found, wanted = {}, None
    for name, call in calls.items():
        try:
            result = flat(call())
        except Exception as error:
            failed[name] = error.with_traceback(None)
            continue
        wanted = result if wanted is None else wanted
        found[name] = float((result - wanted).norm() / wanted.norm())
    return found


def measure(case: Case, tokens: int, dim: int, o: argparse.Namespace, warm: bool = False) -> Iterator[dict[str, Any]]:
    """A record of each pass; warm: compile only."""
    torch.manual_seed(0)
    torch.compiler.reset()
    device, dtype = ("cpu", torch.float32) if o.tiny else ("cuda", torch.bfloat16)
    batch = max(1, o.batch_tokens // tokens)
    inputs = [torch.randn(batch, tokens, o.heads, dim, device=device).to(dtype).requires_grad_() for _ in range(3)]
    calls, more = peers(*inputs, case), o.variants
    plans = {"forward": tilefold.attention_plan, "backward": tilefold.attention_backward_plan}
    share, products = seen(case, tokens, device), batch * o.heads * tokens**2
    for name in o.passes:
        failed: dict[str, Exception] = {}
        timed = calls | (variants(*inputs, case) if more and name == "forward" else {})
        if name == "backward":
            more_calls = backward_variants(*inputs, case) if more and not o.tiny else {}
            timed = gradients(calls | more_calls, [*inputs, *case.learned], failed)
        wrong = errors(timed, failed)
        if warm:
            continue
        sample = (
            partial(timers.wall_samples, budget_s=0.0, least=1) if o.tiny else partial(timers.queued_samples, samples=4)
        )
        found = timers.time_alternating(
            {each: partial(sample, call) for each, call in timed.items() if each in wrong}, o.rounds, failed=failed
        )
        plan: Any = plans[name](*inputs, **case.ours)
        yield {
            "mod": case.name, "tokens": tokens, "batch": batch, "heads": o.heads, "dim": dim, "pass": name,
            "seen": round(share, 5), "gflop": round((10 if name == "backward" else 4) * share * products * dim / 1e9, 3),
            "ms": {each: round(one.ms, 4) for each, one in found.items()},
            "error": {each: float(f"{one:.2e}") for each, one in wrong.items()},
            "failed": {each: f"{type(one).__name__}: {one}"[:300] for each, one in failed.items()},
            "kernel": plan.kernel, "lists": lists_of(plan),
        }  # fmt: skip


def lists_of(plan: Any) -> bool:
    options = plan.options
    return "lists" in options if isinstance(options, tuple) else bool(getattr(options, "lists", False))


def peer_of(record: dict[str, Any]) -> str:
    """Who is beaten: FlexAttention, else SDPA."""
    return next((name for name in ("flex", "sdpa", "plain") if name in record["ms"]), "")


def is_right(record: dict[str, Any]) -> bool:
    return bool(record["error"].get("ours", 1.0) <= LIMITS[record["pass"]])


HEAD = (
    "mod",
    "N",
    "D",
    "pass",
    "seen",
    "ours ms",
    "TFLOP/s",
    "peer",
    "its ms",
    "times as fast",
    "own ms",
    "of own",
    "error",
)


def cells(record: dict[str, Any]) -> list[str]:
    """A row of the table."""
    ms, peer = record["ms"], peer_of(record)
    ours, theirs, own = (ms.get(name) for name in ("ours", peer, "own"))

    def times(other: float | None) -> str:
        return f"{other / ours:.2f}" if other and ours and is_right(record) else "-"

    return [
        record["mod"], str(record["tokens"]), str(record["dim"]), record["pass"], f"{record['seen']:.3f}",
        f"{ours:.3f}" if ours else "-", f"{record['gflop'] / ours:.0f}" if ours else "-",
        peer, f"{theirs:.3f}" if theirs else "-", times(theirs), f"{own:.3f}" if own else "-", times(own),
        f"{record['error'].get('ours', float('nan')):.1e}" + ("" if is_right(record) else " WRONG"),
    ]  # fmt: skip


def markdown(records: list[dict[str, Any]]) -> str:
    """All rows as a table, then what failed."""
    failed = [f"{one['mod']}, {one['tokens']}, {one['dim']}, {one['pass']}: {who}: {why.splitlines()[0]}"
              for one in records for who, why in one["failed"].items()]  # fmt: skip
    return "\n".join([*table_lines(HEAD, [*map(cells, records)]), "", *failed])


# --- the run ----------------------------------------------------------------------------------------------------------------


def rows(o: argparse.Namespace) -> list[tuple[tuple[int, int], list[str]]]:
    """(tokens, dim) and the names of cases, in order: those of --only and --shard, without those that the file has."""
    names = [*(mod.name for mod in MODS), *MASKS, *(MORE if o.variants else ())]
    wanted = [name for name in names if any(part in name for part in o.only.split(","))]
    done = {(one["mod"], one["tokens"], one["dim"], one["pass"]) for one in kept(o)}
    sizes = [size for size in SIZES if (o.tokens or size[0]) == size[0] and (o.dim or size[1]) == size[1]]
    sizes = sizes if sizes or not (o.tokens and o.dim) else [(o.tokens, o.dim)]
    part, parts = map(int, o.shard.split("/"))
    every = [(size, name) for size in sizes for name in wanted][part - 1 :: parts]
    left = [(size, name) for size, name in every if any((name, *size, each) not in done for each in o.passes)]
    return [(size, names) for size in sizes if (names := [name for other, name in left if other == size])]


def kept(o: argparse.Namespace) -> list[dict[str, Any]]:
    path = Path(o.jsonl) if o.jsonl else None
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path and path.exists() else []
    )


def find(name: str, tokens: int, o: argparse.Namespace) -> Case:
    device = "cpu" if o.tiny else "cuda"
    mod = next((mod for mod in MODS if mod.name == name), None)
    return case_of(mod, tokens, o.heads, device) if mod else built_in(name, tokens, o.heads, device)


def compile_all(size: tuple[int, int], names: list[str], o: argparse.Namespace, end: float) -> None:
    """Fill the caches on the disk: each process runs its part of the cases once.  Long lengths take more memory: half of them."""
    workers = min(len(names), max(1, o.workers // (2 if size[0] > 8192 else 1)))
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    running = []
    for i in range(workers):
        command = [
            sys.executable,
            __file__,
            *sys.argv[1:],
            "--tokens",
            str(size[0]),
            "--dim",
            str(size[1]),
            "--jsonl",
            "",
        ]
        command += ["--warm", ",".join(names[i::workers])]
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    for each in running:
        try:
            if each.wait(max(1.0, end - time.monotonic())):
                print(f"a process that compiles ended with {each.returncode}", flush=True)
        except subprocess.TimeoutExpired:
            each.kill()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds one of these, between commas")
    parser.add_argument("--pass", dest="passes", default="forward,backward", help="forward, backward, or both")
    parser.add_argument("--tokens", type=int, help="this length only")
    parser.add_argument("--dim", type=int, help="this head dim only")
    parser.add_argument("--shard", default="1/1", help="part i of n of the rows")
    parser.add_argument("--budget", type=float, default=1e9, help="no row is begun after so many seconds")
    parser.add_argument("--workers", type=int, default=min(12, (os.cpu_count() or 1) - 2), help="that compile; 0: none")
    parser.add_argument(
        "--jsonl", default="", help="a file that each record is added to; its rows are not measured again"
    )
    parser.add_argument("--variants", action="store_true", help="other versions of ours, and more cases")
    parser.add_argument("--tiny", action="store_true", help="64 tokens on the CPU, in Triton's interpreter")
    parser.add_argument("--warm", default="", help=argparse.SUPPRESS)
    for name, size in (("batch-tokens", 16384), ("heads", 16), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=size)
    o = parser.parse_args()
    o.passes = o.passes.split(",")
    if o.tiny:
        o.tokens, o.dim, o.heads, o.rounds, o.workers, o.batch_tokens = o.tokens or 64, 16, 2, 1, 0, 0
    return o


def main() -> None:
    o, begin = options(), time.monotonic()
    if o.tiny:  # the interpreter in a fraction of the time
        from tilefold.debug import patch_interpreter

        patch_interpreter()
    else:
        register_tanh()
    if o.warm:
        for name in o.warm.split(","):
            try:
                list(measure(find(name, o.tokens, o), o.tokens, o.dim, o, warm=True))
            except Exception as error:  # the run tells it
                print(f"{name}: {error}")
        return
    setting, records, end = None, kept(o), begin + o.budget
    for size, names in rows(o):
        if o.workers > 0 and time.monotonic() < end:
            compile_all(size, names, o, end)
            print(f"{size}: compiled after {time.monotonic() - begin:.0f} s", flush=True)
        for name in names:
            if time.monotonic() > end:
                print(f"not reached: {name}, {size}")
                continue
            setting = setting or asdict(setting_of("cpu" if o.tiny else "cuda"))
            try:
                for record in measure(find(name, size[0], o), *size, o):
                    records.append(record)
                    print(*cells(record), record["ms"] if o.variants else "", flush=True)
                    if o.jsonl:
                        Path(o.jsonl).parent.mkdir(parents=True, exist_ok=True)
                        with open(o.jsonl, "a", encoding="utf-8") as file:
                            file.write(json.dumps(record | setting) + "\n")
            except Exception as error:
                print(f"{name}, {size}: {type(error).__name__}: {error}", flush=True)
    print(f"\n{markdown(records)}\n\n{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
