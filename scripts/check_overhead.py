"""What check="device" costs calls over a KV cache on the GPU that is here: a Markdown table.

    python scripts/check_overhead.py [--case TEXT] [--rounds 11] [--json FILE]

Each call is replayed from CUDA graphs without and with check="device", in turns; decoding goes around buffers that do not fit the
L2 cache together. Both forms have to give the same bits and leave no note. A percentage is the median over the rounds of the
ratio of both medians of a round, with the 20th and the 80th percentile. bfloat16, D=128, 28 query heads on 4.
Exit status 1 where bits differ or a note is left.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tilefold
from tilefold.bench.decode.cases import DecodeCase
from tilefold.bench.decode.inputs import make_decode_inputs
from tilefold.bench.timers import graph_sampler, l2_bytes, rotations, time_alternating

HEADS, KV_HEADS, DIM = 28, 4, 128
MOST_SETS = 64  # of buffers
Call = Callable[[bool | str], "tuple[torch.Tensor, ...]"]


@dataclass(frozen=True)
class Overhead:
    """A line of the table: microseconds without the check, and what it adds in per cent."""

    call: str
    us: float
    percent: float
    low: float
    high: float
    sets: int


@dataclass(frozen=True)
class Problem:
    """batch sequences of `keys` keys each, in rooms of `room` rows, in pages of `page` rows, 0: in one piece.  append: one token
    is appended to each, with rotary embedding of it and its queries; else one query decodes."""

    batch: int
    keys: int
    page: int
    room: int = 0
    append: bool = False

    @property
    def name(self) -> str:
        what = "append to" if self.append else "decode"
        place = f"pages of {self.page}" if self.page else "one piece"
        room = f" in rooms of {self.room}" if self.room else ""
        return f"{what} {self.batch} x {self.keys} keys{room}, {place}"

    @property
    def bytes(self) -> int:
        """What a call reads that another set of buffers does not share."""
        return 4 * KV_HEADS * DIM * self.batch * (1 if self.append else self.keys)


PROBLEMS = (
    *(Problem(batch, keys, 16) for batch in (1, 32) for keys in (1024, 8192)),
    Problem(1, 1024, 16, room=8192),
    Problem(32, 500, 16, room=8192),
    *(Problem(batch, 8192, page) for page in (64, 0) for batch in (1, 32)),
    *(Problem(batch, 1024, 16, append=True) for batch in (1, 32)),
)


def make_call(problem: Problem, device: str, seed: int, heads: int = HEADS, dim: int = DIM) -> Call:
    """The call on tensors of its own; it takes `check` and gives what it wrote."""
    rows = problem.room or problem.keys
    case = DecodeCase((rows,) * problem.batch, heads, KV_HEADS, dim, dim, page=problem.page)
    made = make_decode_inputs(case, device, seed)
    where: dict[str, Any] = {
        "cache_seqlens": torch.full_like(made.lengths, problem.keys - problem.append),
        "block_table": made.table,
    }
    if not problem.append:
        return lambda check: (tilefold.attention_kvcache(made.q, made.k_cache, made.v_cache, **where, check=check),)
    k, v = (torch.randn(problem.batch, 1, KV_HEADS, dim, device=device, dtype=made.q.dtype) for _ in range(2))
    angles = torch.rand(rows, dim // 2, device=device, dtype=made.q.dtype)
    turned: dict[str, Any] = {"q": made.q, "rotary_cos": angles, "rotary_sin": angles}

    def append(check: bool | str) -> tuple[torch.Tensor, ...]:
        q = tilefold.kvcache_append(k, v, made.k_cache, made.v_cache, **where, **turned, check=check)
        assert q is not None
        return q, made.k_cache, made.v_cache

    return append


def differs(call: Call) -> str:
    """Empty if both forms give the same bits and there is no note, else what is wrong."""
    tilefold.last_fault()
    right = [t.clone() for t in call(False)]
    same = all(torch.equal(a, b) for a, b in zip(right, call("device"), strict=True))
    fault = tilefold.last_fault()
    return "" if same and fault is None else f"the bits are {'the same' if same else 'others'}, the note is {fault}"


def measure(problem: Problem, rounds: int) -> Overhead:
    """Both forms in turns; RuntimeError where they are not the same."""
    sets = min(MOST_SETS, rotations(problem.bytes, l2_bytes()))
    calls = [make_call(problem, "cuda", seed) for seed in range(sets)]
    if wrong := differs(calls[0]):
        raise RuntimeError(f"{problem.name}: {wrong}")
    samplers = {
        str(check): graph_sampler([lambda call=call, check=check: call(check) for call in calls])  # type: ignore[misc]
        for check in (False, "device")
    }
    times = time_alternating(samplers, rounds)
    plain, checked = times["False"], times["device"]
    ratios = [100 * (b / a - 1) for a, b in zip(plain.values, checked.values, strict=True)]
    middle, low, high = np.quantile(ratios, (0.5, 0.2, 0.8)).tolist()
    return Overhead(problem.name, plain.us, middle, low, high, sets)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--case", default="", help="only calls whose name has this in it")
    parser.add_argument("--rounds", type=int, default=11, help="how often each form gets its turn")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(arguments)
    chosen = [problem for problem in PROBLEMS if options.case in problem.name]
    if not chosen:
        parser.error(f"--case {options.case!r}: no call has it in its name: {'; '.join(p.name for p in PROBLEMS)}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    print(
        f'| {torch.cuda.get_device_name()} | us | with `check="device"` | 20th to 80th percentile | sets of buffers |'
    )
    print("|---|---:|---:|---:|---:|", flush=True)
    found, failed = [], 0
    for problem in chosen:
        try:
            one = measure(problem, options.rounds)
        except RuntimeError as error:
            failed = 1
            print(error, file=sys.stderr)
            continue
        found.append(one)
        print(
            f"| {one.call} | {one.us:.2f} | {one.percent:+.1f} % | {one.low:+.1f} to {one.high:+.1f} % | {one.sets} |",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
