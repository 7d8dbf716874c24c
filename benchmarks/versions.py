"""Two checkouts of tilefold beside each other on one GPU, in turns: did a change make a kernel or a call slower?

    python benchmarks/versions.py ../before/src src --what forward backward sparse [--only D128] [--rounds 7]

Each version runs in a process of its own and measures when it is told to, so both meet the same clocks.  A row is GPU time
(replays of a CUDA graph); for the time until a call returns see `host.py --before`.  Both make their inputs from one seed; the
last column says whether their results are equal to the bit."""

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Call = Callable[[], Any]
Sampler = Callable[[str, Call], Callable[[], float]]  # of a row's name and call: what measures it, in microseconds
KINDS = ("forward", "backward", "sparse", "matrix")

# name, batch, seq, query heads, KV heads, head dim, options
DENSE: tuple[tuple[str, int, int, int, int, int, dict[str, Any]], ...] = (
    ("D128 16k full", 1, 16384, 16, 16, 128, {}),
    ("D128 16k causal", 1, 16384, 16, 16, 128, {"causal": True}),
    ("D128 4k x 4 full", 4, 4096, 16, 16, 128, {}),
    ("D128 4k x 4 causal", 4, 4096, 16, 16, 128, {"causal": True}),
    ("D128 2k x 8 causal", 8, 2048, 16, 16, 128, {"causal": True}),
    ("D128 1k x 16 causal", 16, 1024, 16, 16, 128, {"causal": True}),
    ("D128 512 x 32 full", 32, 512, 16, 16, 128, {}),
    ("D128 window 4095", 1, 16384, 16, 16, 128, {"causal": True, "window": (4095, 0)}),
    ("D128 32/4 heads causal", 2, 8192, 32, 4, 128, {"causal": True}),
    ("D128 softcap", 1, 8192, 16, 16, 128, {"softcap": 30.0}),
    ("D128 1000 x 16 causal", 16, 1000, 16, 16, 128, {"causal": True}),
    ("D64 16k full", 1, 16384, 32, 32, 64, {}),
    ("D64 16k causal", 1, 16384, 32, 32, 64, {"causal": True}),
    ("D64 window 4095", 1, 16384, 32, 32, 64, {"causal": True, "window": (4095, 0)}),
    ("D64 4k x 4 causal", 4, 4096, 32, 32, 64, {"causal": True}),
    ("D64 2k x 8 causal", 8, 2048, 32, 32, 64, {"causal": True}),
    ("D64 1k x 16 causal", 16, 1024, 32, 32, 64, {"causal": True}),
    ("D96 8k causal", 1, 8192, 16, 16, 96, {"causal": True}),
    ("D192 8k causal", 1, 8192, 8, 8, 192, {"causal": True}),
    ("D256 2k x 8 causal", 8, 2048, 8, 8, 256, {"causal": True}),
    ("D256 window 1023", 1, 16384, 8, 8, 256, {"causal": True, "window": (1023, 0)}),
    ("D256 16k full", 1, 16384, 8, 8, 256, {}),
    ("D256 16k causal", 1, 16384, 8, 8, 256, {"causal": True}),
)
PACKED = (("packed 16 x 1k causal", (1024,) * 16), ("packed uneven causal", (8192, 4096, 1000, 999, 777, 512, 8, 0)))
SPARSITIES = (50.0, 80.0, 90.0, 99.0)
PLACES = ("packed", "pages of 64", "pages of 16")  # of K and V, beside one tensor


def draw(*shape: int, dtype: Any = None, seed: int = 0) -> Any:
    import torch

    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype or torch.bfloat16)


def gradients(call: Call, inputs: tuple[Any, ...]) -> Call:
    import torch

    for x in inputs:
        x.requires_grad_()
    out = call()
    dout = draw(*out.shape, seed=1)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def dense_rows(backward: bool) -> dict[str, Callable[[], Call]]:
    import torch

    import tilefold

    def row(batch: int, seq: int, heads: int, heads_kv: int, dim: int, options: dict[str, Any]) -> Call:
        q = draw(batch, seq, heads, dim)
        k, v = (draw(batch, seq, heads_kv, dim, seed=n) for n in (1, 2))

        def call() -> Any:
            return tilefold.attention(q, k, v, **options)

        return gradients(call, (q, k, v)) if backward else call

    def packed(lengths: tuple[int, ...]) -> Call:
        q, k, v = (draw(sum(lengths), 16, 128, seed=n) for n in range(3))
        cu = torch.tensor((0, *lengths), device="cuda").cumsum(0, dtype=torch.int32)

        def call() -> Any:
            return tilefold.attention_varlen(q, k, v, cu, cu, max(lengths), max(lengths), causal=True)

        return gradients(call, (q, k, v)) if backward else call

    def fp8(causal: bool) -> Call:
        e4m3 = torch.float8_e4m3fn
        q, k, v = (draw(1, 16384, 16, 128, dtype=e4m3, seed=n) for n in range(3))
        return lambda: tilefold.attention(q, k, v, causal=causal)

    rows: dict[str, Callable[[], Call]] = {name: lambda of=of: row(*of) for name, *of in DENSE}
    rows |= {name: lambda of=lengths: packed(of) for name, lengths in PACKED}
    if not backward:
        rows |= {"e4m3 16k full": lambda: fp8(False), "e4m3 16k causal": lambda: fp8(True)}
    return rows


def sparse_rows() -> dict[str, Callable[[], Call]]:
    import torch

    import tilefold
    from tilefold.bench.attention.lists import Pattern, lists_of
    from tilefold.plan.problem import AttentionProblem

    length = 23296

    def inputs(sparsity: float) -> tuple[Any, ...]:
        problem = AttentionProblem(1, length, length, 12, 12, 128, 128, "bfloat16")
        index = lists_of(Pattern("random", sparsity), problem).to("cuda")
        return *(draw(1, length, 12, 128, seed=n) for n in range(3)), index

    def row(sparsity: float, backward: bool) -> Call:
        q, k, v, index = inputs(sparsity)

        def call() -> Any:
            return tilefold.sparse_attention(q, k, v, index)

        return gradients(call, (q, k, v)) if backward else call

    def elsewhere(sparsity: float, place: str) -> Call:
        q, k, v, index = inputs(sparsity)
        if place == "packed":
            cu = torch.tensor([0, length], device="cuda", dtype=torch.int32)
            return lambda: tilefold.sparse_attention_varlen(q[0], k[0], v[0], index, cu, cu)
        page = int(place.split()[-1])
        order = torch.randperm(length // page, generator=torch.Generator().manual_seed(0)).to("cuda")
        k, v = (t.view(-1, page, 12, 128)[order] for t in (k, v))
        table, lengths = order.argsort().int()[None], torch.tensor([length], device="cuda", dtype=torch.int32)
        return lambda: tilefold.sparse_attention_paged(q, k, v, index, table, lengths)

    rows = {f"sparse {s:.0f} %{' backward' * b}": lambda s=s, b=b: row(s, b) for b in (False, True) for s in SPARSITIES}
    return rows | {f"sparse {s:.0f} % {p}": lambda s=s, p=p: elsewhere(s, p) for p in PLACES for s in SPARSITIES}


def matrix_rows() -> dict[str, Callable[[], Call]]:
    import torch

    import tilefold
    from tilefold.quant import quantize_weight

    def product(m: int, n: int, k: int, dtype: Any = torch.bfloat16, activation: str | None = None) -> Call:
        a, b, bias = draw(m, k, dtype=dtype), draw(n, k, seed=1, dtype=dtype).T, draw(n) if activation else None
        return lambda: tilefold.matmul(a, b, bias=bias, activation=activation)

    def eight(m: int, kind: Any) -> Call:
        x, weight = draw(m, 8192), (draw(8192, 8192, seed=1) * 40).clamp(-127, 127).to(kind)
        scale = draw(8192).float().abs() / 128
        return lambda: tilefold.matmul_w8a8(x, weight, scale)

    def lowbit(m: int, bits: int) -> Call:
        x, weight = draw(m, 8192), quantize_weight(draw(8192, 8192, seed=1), bits)
        return lambda: tilefold.lowbit_matmul(x, weight)

    sizes = ((8192, 8192, 8192), (4096, 4096, 4096), (1536, 1536, 4096), (16, 4096, 4096), (1000, 5000, 3000))
    rows: dict[str, Callable[[], Call]] = {
        f"matmul {m} x {n} x {k}": lambda of=(m, n, k): product(*of) for m, n, k in sizes
    }
    rows["matmul 16384 x 4096 x 1024 gelu"] = lambda: product(16384, 4096, 1024, activation="gelu")
    rows["matmul 4096 x 4096 x 4096 e4m3"] = lambda: product(4096, 4096, 4096, torch.float8_e4m3fn)
    kinds = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
    rows |= {
        f"w8a8 {name} {m} rows": lambda m=m, of=of: eight(m, of)
        for name, of in kinds.items()
        for m in (1, 64, 512, 4096)
    }
    return rows | {f"{b} bits {m} rows": lambda m=m, b=b: lowbit(m, b) for b in (4, 3, 8) for m in (1, 16, 256, 4096)}


def rows_of(kinds: list[str]) -> dict[str, Callable[[], Call]]:
    rows: dict[str, Callable[[], Call]] = {}
    for kind in kinds:
        if kind in ("sparse", "matrix"):
            rows |= sparse_rows() if kind == "sparse" else matrix_rows()
        else:
            backward = kind == "backward"
            rows |= {name + " backward" * backward: make for name, make in dense_rows(backward).items()}
    return rows


def digest(results: Any) -> str:
    import torch

    found = hashlib.sha256()
    for x in results if isinstance(results, tuple | list) else (results,):
        found.update(x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def kernel_sampler(name: str, call: Call) -> Callable[[], float]:
    from tilefold.bench import timers

    if name.endswith("backward"):
        return lambda: statistics.median(timers.queued_samples(call, 4)) * 1e3
    graph = timers.graph_sampler([call], 2, 6.0)
    return lambda: statistics.median(graph()) * 1e3


def worker(rows: Mapping[str, Callable[[], Call]], sampler: Sampler, bits: bool = True) -> None:
    """Answers lines of stdin: a request {"prepare": row} or {"sample": row}.  bits: a digest of the results, too."""
    import torch

    samplers: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if name := request.get("prepare"):
                call = rows[name]()
                results = call()
                answer: Any = {"bits": digest(results) if bits else ""}
                samplers[name] = sampler(name, call)
            elif name := request.get("forget"):
                answer = {"us": samplers.pop(name, None) and 0.0}
                torch.cuda.empty_cache()
            else:
                answer = {"us": samplers[request["sample"]]()}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        print("answer", json.dumps(answer), flush=True)


class Version:
    """One checkout's process; script: what it runs, as a worker."""

    def __init__(self, source: Path, script: str = __file__) -> None:
        environment = os.environ | {"PYTHONPATH": f"{source.resolve()}:{os.environ.get('PYTHONPATH', '')}"}
        self.process = subprocess.Popen([sys.executable, script, "--worker"], env=environment, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip

    def ask(self, request: dict[str, str]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("answer "):
                found: dict[str, Any] = json.loads(line.removeprefix("answer "))
                return found
        raise RuntimeError(f"a version's process ended ({self.process.wait()})")


def prepare(versions: list[Version], names: list[str]) -> dict[tuple[int, str], dict[str, Any]]:
    for version in versions:
        for name in names:
            version.ask({"prepare": name})
    return {(i, name): version.answer() for i, version in enumerate(versions) for name in names}


def compile_first(sources: Sequence[Path], names: Sequence[str], jobs: int, script: str) -> None:
    """Fills Triton's cache by many processes, so that the two that measure wait for no compiler."""
    per = max(1, jobs // len(sources))
    helpers = [(Version(source, script), names[n::per]) for source in sources for n in range(min(per, len(names)))]
    for helper, some in helpers:
        for name in some:
            helper.ask({"prepare": name})
            helper.ask({"forget": name})
    for helper, some in helpers:
        for _ in range(2 * len(some)):
            helper.answer()
        helper.process.kill()


def compare(
    sources: Sequence[Path],
    names: Sequence[str],
    rounds: int,
    jobs: int = 0,
    script: str = __file__,
    of: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[str, tuple[float, float]]:
    """Measures rows by both versions in turns, prints and returns them.  jobs: processes that compile before; of: the samples."""
    if jobs:
        compile_first(sources, names, jobs, script)
    versions = [Version(source, script) for source in sources]
    found = {}
    print(f"{'us':36} {'before':>9} {'after':>9} {'ratio':>6}  bits", flush=True)
    for name in names:
        prepared = prepare(versions, [name])
        if errors := [
            f"{'before' if i == 0 else 'after'}: {a['error']}" for (i, _), a in prepared.items() if "error" in a
        ]:
            print(f"{name:36} {'; '.join(errors)}", flush=True)
            continue
        samples: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds):
            for i in (0, 1) if turn % 2 == 0 else (1, 0):
                versions[i].ask({"sample": name})
                samples[i].append(versions[i].answer().get("us", math.nan))
        before, after = found[name] = of(samples[0]), of(samples[1])
        equal = "equal" if prepared[0, name]["bits"] == prepared[1, name]["bits"] else "DIFFER"
        bits = equal if prepared[0, name]["bits"] else ""
        print(f"{name:36} {before:9.1f} {after:9.1f} {after / before:6.3f}  {bits}", flush=True)
        for version in versions:
            version.ask({"forget": name})
            version.answer()
    for version in versions:
        version.process.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", type=Path, help="src of the version before and of the one after")
    parser.add_argument("--what", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile before anything is timed"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(rows_of(list(KINDS)), kernel_sampler)
    if len(options.sources) != 2:
        parser.error("two source folders: before and after")
    names = [name for name in rows_of(options.what) if options.only in name]
    compare(options.sources, names, options.rounds, options.jobs)


if __name__ == "__main__":
    main()
