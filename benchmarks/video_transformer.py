"""What a whole video transformer takes on one GPU, dense and sparse: a block by stages, the model, and a training step.

    PYTHONPATH=src python benchmarks/video_transformer.py --model wan-1.3b,hunyuan --budget 500 --jsonl out/video.jsonl

Random weights at true shapes, bf16, one sample (guidance doubles it).  Blocks are plain torch, not compiled, with norms in fp32
where the model has them so.  `tilefold.video.sparsify` makes the sparse rows' models, whose norms and rotary embedding of queries
and keys are one operation.  Lists of random queries and keys lie anywhere.  Two layers of weights are taken in turn: "whole" is
what lies outside the blocks plus layers times one block (the time of two blocks less that of one); --whole also runs all layers
once.  Results are checked in the same run.
--tiny: small models on the CPU."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from video_blocks import DENSE, SHAPES, TINY, Adapter, Shape, Transformer, dense, fa4

import tilefold
from tilefold import video
from tilefold.bench import timers
from tilefold.bench.page import table_lines
from tilefold.ops.environment import importable
from tilefold.video.attend import attend_lists

Tensor = torch.Tensor
Call = Callable[[], object]
SPARSITIES = (0.7, 0.8, 0.9)
ROWS = 64  # sampled queries of a check


# --- measuring --------------------------------------------------------------------------------------------------------------


class Meter:
    """Times calls in turns, prints tables and keeps records."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.cuda = not options.tiny
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.rounds, self.end = options.rounds, time.monotonic() + options.budget
        self.jsonl = Path(options.jsonl) if options.jsonl else None
        card = torch.cuda.get_device_name() if self.cuda else "cpu"
        self.versions = {"device": card, "torch": torch.__version__, "tilefold": tilefold.__version__}

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def sample(self, call: Call, at_most: int = 10) -> list[float]:
        """Times of a call in ms, for about a third of a second."""
        if not self.cuda:
            return timers.wall_samples(call, 0.0, 1)
        first = timers.queued_samples(call, 1)
        more = min(at_most, int(300 / max(first[0], 1e-3))) - 1
        return first if more <= 0 else first + timers.queued_samples(call, more)

    def turns(self, calls: dict[str, Call]) -> dict[str, timers.Timing]:
        """Each call warmed once, then rounds in turns; what fails is told and left out."""
        failed: dict[str, Exception] = {}
        for name, call in calls.items():
            try:
                call()
            except Exception as error:
                failed[name] = error.with_traceback(None)  # whose frames hold tensors
        samplers = {name: partial(self.sample, call) for name, call in calls.items() if name not in failed}
        found = timers.time_alternating(samplers, self.rounds, failed=failed)
        for name, error in failed.items():
            print(f"\n{name} failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return found

    def table(self, model: str, title: str, head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        """Print a Markdown table, and write its rows."""
        texts = [[f"{one:.3f}" if isinstance(one, float) else str(one) for one in row] for row in rows]
        print("\n".join(["", f"{model}: {title}", "", *table_lines(head, texts)]), flush=True)
        if self.jsonl is not None:
            self.jsonl.parent.mkdir(parents=True, exist_ok=True)
            with self.jsonl.open("a", encoding="utf-8") as file:
                for row in rows:
                    cells = [None if one in ("-",) or one != one else one for one in row]
                    record = {"model": model, "part": title, **dict(zip(head, cells, strict=True)), **self.versions}
                    file.write(json.dumps(record) + "\n")


class Bench:
    """One model and its inputs; each method is a part of the report."""

    def __init__(self, name: str, shape: Shape, meter: Meter) -> None:
        torch.manual_seed(0)
        self.name, self.shape, self.meter = name, shape, meter
        with torch.device(meter.device):
            self.model = Transformer(shape).to(meter.dtype)
            self.patches = torch.randn(1, shape.grid[0] * shape.grid[1] * shape.grid[2], 64, dtype=meter.dtype)
            self.text = torch.randn(1, shape.text, shape.dim, dtype=meter.dtype)
        self.tiling = tilefold.sparse.GridTiling(shape.grid, video.fitting_cube(shape.grid))
        self.head = shape.dim // shape.heads
        self.ways: dict[str, float | None] = {**dict.fromkeys(DENSE), **{f"{s:.0%} left out": s for s in SPARSITIES}}
        self.attention_ms: dict[str, float] = {}
        self.limit = 1e-2 if meter.dtype == torch.bfloat16 else 1e-5

    def site(self) -> video.Site:
        return video.Site(0, 1, self.shape.heads, None, self.tiling, self.head**-0.5, {})

    def run(self, depth: int = 1) -> Tensor:
        self.model.depth = depth
        found: Tensor = self.model(self.patches, self.text, self.shape.grid)
        return found

    def switch(self, way: str) -> None:
        """The model in one of the ways: dense by a kernel, or sparse."""
        video.desparsify(self.model)
        if self.ways[way] is not None:
            video.sparsify(self.model, video.Pooled(sparsity=self.ways[way]), adapter=Adapter())
        else:
            for block in self.model.blocks:
                block.attention.dense = way

    def inputs(self) -> tuple[list[Tensor], list[Tensor], video.Text | None]:
        """q, k, v of the first layer in row-major and in tiled order, and of the text."""
        layer: Any = self.model.blocks[0].attention
        main, tables = layer.streams[0], self.model.tables(self.shape.grid, self.head, self.meter.device)
        qkv = main.split(*main.project(main.normed(self.model.embed(self.patches), 0)), tables)
        text = None
        if self.shape.joint:
            text = video.Text(*layer.streams[1].split(*layer.streams[1].project(layer.streams[1].normed(self.text, 0))))
        return qkv, [self.tiling.tile(one) for one in qkv], text

    @torch.no_grad()
    def checks(self) -> None:
        """Relative L2 error of sampled queries of the first layer beside fp32 SDPA over the expanded block mask."""
        qkv, tiled, text = self.inputs()
        tiling, site, device = self.tiling, self.site(), self.meter.device
        live = torch.arange(tiling.slots, device=device) < tiling.block_sizes(device)[:, None]
        live = live.flatten()
        places = live.nonzero()[:, 0]
        rows = places[torch.randperm(len(places), device=device)[:ROWS]]
        keys, values = (
            [one] if text is None else [one, other]
            for one, other in zip(tiled[1:], text[1:3] if text else qkv, strict=False)
        )
        k, v = torch.cat(keys, 1).float(), torch.cat(values, 1).float()

        def truth(keep: Tensor) -> Tensor:
            out = []
            for head in range(self.shape.heads):
                mask = keep[0, head % keep.shape[1]][rows // tiling.slots].repeat_interleave(tiling.slots, 1) & live
                mask = F.pad(mask, (0, k.shape[1] - tiling.padded), value=True)
                one = [t[:, :, head][:, None] for t in (tiled[0][:, rows].float(), k, v)]
                with sdpa_kernel(SDPBackend.MATH):
                    out.append(F.scaled_dot_product_attention(*one, attn_mask=mask)[:, 0])
            return torch.stack(out, 2)

        def sparse(index: Any) -> Tensor:
            found = attend_lists(tiled[0], tiled[1], tiled[2], index, tiling, text, site.scale)[0]
            return found[:, rows]

        def away(got: Tensor, wanted: Tensor) -> float:
            return float((got.float() - wanted).norm() / wanted.norm())

        every, some = (video.Pooled(sparsity=s)(tiled[0], tiled[1], site) for s in (0.0, 0.8))
        full, all_of_them = truth(every.to_map()), sparse(every)
        found = {"80% left out": away(sparse(some), truth(some.to_map())), "no block left out": away(all_of_them, full)}
        for how, call in DENSE.items():
            out = dense(call, *qkv, text)
            found[how] = away(tiling.tile(out if text is None else out[0])[:, rows], full)
        limit = self.limit
        self.meter.table(self.name, f"relative L2 error of {len(rows)} queries, at most {limit}", ("attention", "error"), [
            (how, f"{error:.2e}") for how, error in found.items()
        ])  # fmt: skip
        wrong = {how: error for how, error in found.items() if not error <= limit}
        assert not wrong, f"wrong results: {wrong}"

    @torch.no_grad()
    def check_model(self) -> None:
        """Two blocks with every block listed beside the same dense, which differ as two dense kernels do."""
        self.ways["all listed"] = 0.0
        results = {}
        for way in ("SDPA", "ours", "all listed"):
            self.switch(way)
            results[way] = self.run(2).float()
        self.switch("ours")
        del self.ways["all listed"]
        base = results["ours"]
        found = {way: float((results[way] - base).norm() / base.norm()) for way in ("SDPA", "all listed")}
        title = "relative L2 difference of two blocks from those with our dense attention"
        self.meter.table(self.name, title, ("attention", "difference"), [(way, f"{d:.2e}") for way, d in found.items()])
        most = 2 * found["SDPA"] + self.limit
        assert found["all listed"] <= most, f"the sparse model is another one: {found}"

    @torch.no_grad()
    def attention(self) -> None:
        """Self-attention of one layer: dense by each kernel; sparse in its parts."""
        qkv, tiled, text = self.inputs()
        site, calls = self.site(), {how: partial(dense, call, *qkv, text) for how, call in DENSE.items()}
        for s in SPARSITIES:
            policy = video.Pooled(sparsity=s)
            index = policy(tiled[0], tiled[1], site)
            calls[f"select {s}"] = partial(policy, tiled[0], tiled[1], site)
            calls[f"attend {s}"] = partial(attend_lists, *tiled, index, self.tiling, text, site.scale)
        x = self.model.embed(self.patches)
        turned = self.tiling.tile(x)
        calls["tile"], calls["untile"] = partial(self.tiling.tile, x), partial(self.tiling.untile, turned)
        found = {name: one.ms for name, one in self.meter.turns(calls).items()}
        self.attention_ms = {how: found[how] for how in DENSE if how in found}
        base, tokens = (
            found.get("SDPA", float("nan")),
            self.tiling.tokens + (self.shape.text if self.shape.joint else 0),
        )
        flops = 4e-9 * tokens**2 * self.shape.dim
        rows: list[tuple[Any, ...]] = [
            (how, "-", ms, ms, flops / ms, base / ms) for how, ms in self.attention_ms.items()
        ]
        for s in SPARSITIES:
            select, attend = found.get(f"select {s}", float("nan")), found.get(f"attend {s}", float("nan"))
            both = select + attend
            rows.append((f"{s:.0%} left out", select, attend, both, (1 - s) * flops / attend, base / both))
        title = f"self-attention of a layer, {tokens} tokens in {self.tiling.padded} slots"
        head = ("attention", "selection ms", "attention ms", "both ms", "TFLOP/s of pairs kept", "SDPA / this")
        self.meter.table(self.name, title, head, rows)
        turning = [(name, found[name]) for name in ("tile", "untile") if name in found]
        self.meter.table(self.name, "once a forward pass", ("tokens turned", "ms"), turning)

    @torch.no_grad()
    def stages(self) -> None:
        """The parts of one dense block."""
        block: Any = self.model.blocks[0]
        streams = list(block.attention.streams)
        tables = self.model.tables(self.shape.grid, self.head, self.meter.device)
        tokens = [self.model.embed(self.patches), self.text][: len(streams)]
        pairs = list(zip(streams, tokens, strict=True))
        projected = [one.project(t) for one, t in pairs]

        def project() -> None:
            for one, t in pairs:
                one.project(t)
                one.out(t)

        def norms() -> None:
            for i, (one, t) in enumerate(pairs):
                one.gated(one.normed(t, 0), t, 2)
                one.split(*projected[i], None if i else tables)
                one.gated(one.normed(t, 3), t, 5)

        calls: dict[str, Call] = {"projections": project, "norms, gates, rotary": norms}
        if block.cross is not None:
            calls["cross-attention"] = partial(block.across, tokens[0], self.text)
        calls["feed-forward"] = lambda: [one.feed(t) for one, t in pairs]
        calls["a block, ours"] = partial(block, tokens[0], self.text, tables)
        found = {name: one.ms for name, one in self.meter.turns(calls).items()}
        whole = found.get("a block, ours", float("nan"))
        if "ours" in self.attention_ms:
            found = {"self-attention, ours": self.attention_ms["ours"]} | found
        rows = [(name, ms, ms / whole) for name, ms in found.items()]
        self.meter.table(self.name, "one dense block by stages", ("stage", "ms", "of the block"), rows)

    def time_ways(
        self, ways: list[str], call: Callable[[int], object], depths: tuple[int, ...]
    ) -> tuple[dict[str, list[float]], dict[str, float]]:
        """For each way the times at these depths in ms, and the peak of memory in GiB."""
        peaks: dict[str, float] = {}

        def go(way: str, depth: int) -> object:
            self.switch(way)
            return call(depth)

        for way in ways:
            if self.meter.cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                try:
                    go(way, depths[-1])
                except Exception:
                    continue  # `turns` tells it
                peaks[way] = torch.cuda.max_memory_allocated() / 2**30
        found = self.meter.turns({f"{way} {depth}": partial(go, way, depth) for way in ways for depth in depths})
        video.desparsify(self.model)
        names = {way: [f"{way} {depth}" for depth in depths] for way in ways}
        return {way: [found[n].ms for n in names[way]] for way in ways if all(n in found for n in names[way])}, peaks

    @torch.no_grad()
    def whole(self, measured: bool) -> None:
        """The transformer in each way, and what Amdahl's law leaves of it."""
        times, peaks = self.time_ways(list(self.ways), self.run, (1, 2))
        layers, rows = self.shape.layers, []
        blocks = {way: two - one for way, (one, two) in times.items()}
        totals = {way: (times[way][0] - block) + layers * block for way, block in blocks.items()}
        full, share = blocks.get("ours", float("nan")), self.attention_ms.get("ours", float("nan"))
        for way, total in totals.items():
            s = self.ways[way]
            law = "-" if s is None else full / (full - share * s)
            once: Any = "-"
            if measured and not self.meter.over:
                self.switch(way)
                once = timers.queued_samples(partial(self.run, layers), 1)[0] / 1e3 if self.meter.cuda else "-"
            ratio = [totals.get(base, float("nan")) / total for base in ("SDPA", "ours")]
            rows.append((way, blocks[way], total / 1e3, once, *ratio, law, peaks.get(way, float("nan"))))
        video.desparsify(self.model)
        title = f"the transformer, {layers} layers x a block + what is outside, one forward pass"
        head = ("attention", "a block ms", "whole s", "whole run once s", "SDPA / this", "ours dense / this", "Amdahl")
        self.meter.table(self.name, title, (*head, "peak GiB, 2 layers"), rows)

    def training(self) -> None:
        """Forward and backward pass of one block with its weights' gradients."""

        def step(depth: int) -> None:
            try:
                self.run(depth).square().mean().backward()
            finally:
                self.model.zero_grad(set_to_none=True)

        ways = [*DENSE, "80% left out"]
        times, peaks = self.time_ways(ways, step, (1,))
        base = [times.get(way, [float("nan")])[0] for way in ("SDPA", "ours")]
        rows = [(way, ms, *(b / ms for b in base), peaks.get(way, float("nan"))) for way, (ms,) in times.items()]
        head = ("attention", "ms", "SDPA / this", "ours dense / this", "peak GiB")
        self.meter.table(self.name, "a training step of one block, forward and backward", head, rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="wan-1.3b,wan-14b,hunyuan", help="names, separated by commas: " + ", ".join(SHAPES)
    )
    parser.add_argument("--only", default="checks,attention,stages,whole,training", help="parts, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no part begins")
    parser.add_argument("--whole", action="store_true", help="run all layers once, too")
    parser.add_argument("--jsonl", help="a file to which rows are added")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    options = parser.parse_args(arguments)
    if importable("flash_attn.cute") and not options.tiny:
        DENSE["FA4"] = fa4
    meter = Meter(options)
    print(", ".join(f"{name} {value}" for name, value in meter.versions.items()))
    shapes = TINY if options.tiny else SHAPES
    for name in shapes if options.tiny else options.model.split(","):
        shape = shapes[name]
        print(f"\n## {name}: {asdict(shape)}")
        bench: Any = Bench(name, shape, meter)
        for part in options.only.split(","):
            if meter.over:
                print(f"\nthe budget of {options.budget:.0f} s is spent: {name} {part} is left out")
            elif part == "checks":
                bench.checks()
                bench.check_model()
            elif part == "whole":
                bench.whole(options.whole)
            else:
                getattr(bench, part)()
        bench = None
        if meter.cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
