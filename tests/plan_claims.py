"""What the text of a plan claims, and whether its own numbers and the plan bear it out.

A claim is a pattern, `#` for each number and `@` for each word, and a function of the plan and of these that says whether it
holds.  `contradictions` reads all of a plan's text.  Where its reason, or why something is rejected, speaks of filling, idling,
too few or too many, a claim has to read that: what nobody can check, a reason should not say.  Some patterns read sentences that
plans used to print and that were false."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from tilefold.plan.matrix.conv import FORWARD
from tilefold.plan.matrix.lowbit import plan_lowbit
from tilefold.plan.problem import next_power_of_two
from tilefold.plan.rules import MOST_LOADING
from tilefold.plan.sparse.sparse import plan_sparse

NUMBER, WORD = r"(-?\d+(?:\.\d+)?(?:e[+-]\d+)?)", r"([\w-]+)"
SPEAKS = re.compile(r"\b(?:fills?|idle|enough|few|fewer|short|under|many|more than|most of|at most|own equal)\b", re.I)
SILENT = re.compile(  # what is meant of any problem, and names of rules
    r"short-sequences|A tile as small as the sequence: many programs share an SM|short-queries|few-programs|long and short|"
    r"short test lengths|small enough to share an SM|splits the keys of few queries|"
    r"a long sequence (?:among short ones )?would be .*?few|pay where there are many keys|counts where keys are few"
)


def waves(programs: float, slots: float) -> float:
    """Percent of the slots used by whole waves."""
    full = programs / slots
    return 100 * full / math.ceil(full) if full else 0.0


def near(said: float, meant: float, digits: int = 3) -> bool:
    """Whether a number was rounded to so many digits."""
    return abs(said - meant) <= 0.51 * 10 ** (math.floor(math.log10(max(abs(meant), 1e-9))) + 1 - digits)


def same(said: float, meant: float, step: float = 0.1) -> bool:
    """Whether a number was rounded to a multiple of `step`."""
    return abs(said - meant) <= 0.51 * step


def loss(plan: Any, items: float, places: float) -> float:
    """Of what the best number of shares makes of lists, the part that the plan's does not."""
    n = plan.problem
    keys = n.capacity * n.block_k
    tiles = keys // plan.block_n

    def use(shares: int) -> float:
        return waves(items * shares, places) * (tiles / shares) / math.ceil(tiles / shares)

    return 1 - use(plan.splits) / max(use(shares) for shares in range(1, max(1, min(128, keys // 256, tiles)) + 1))


def programs_of(plan: Any) -> int:
    """All programs of a sparse plan: query blocks, not those that stay and draw them."""
    n = plan.problem.attention
    return -(-n.seq_q // plan.block_m) * n.batch * n.heads * plan.splits


def wide(plan: Any) -> int:
    return max(plan.problem.block_qk, plan.problem.block_v)


Holds = Callable[..., bool]
GENERAL: tuple[tuple[str, Holds], ...] = (
    (r"# of # (?:SMs|CUs|places|score tiles?|registers|rows)", lambda p, a, b: a <= b),
    (r"# of # (?:SMs|CUs) have work \(#%\)", lambda p, a, b, c: same(c, 100 * a / b, 1)),
    (r"# of # KiB", lambda p, a, b: a <= b),
    (r"needs # KiB of shared memory, a program on \w+ has # KiB", lambda p, a, b: a >= b),
    (r"hold dS of # keys .*?, fewer than the #", lambda p, a, b: a < b),
    (r"hold dS of # of # keys", lambda p, a, b: a < b),
    (r"needs? # registers.*?, (?:of # a thread can spare|a thread has|there are) #", lambda p, a, *b: a > b[-1]),
    (r"# keys are fewer than #", lambda p, a, b: a < b),
    (r"sequences of # queries and # keys have small tiles of their own", lambda p, a, b: max(a, b) <= MOST_LOADING),
    (r"# rows a KV head are more than (?:the )?#", lambda p, a, b: a > b),
    (r"with fewer than # keys", lambda p, a: p.problem.seq_k < a),
    (r"with fewer than # queries in the mean, or keys that one sees", lambda p, a: min(
        p.problem.mean_q or p.problem.seq_q, sum(p.problem.sides) + 1 if min(p.problem.sides) >= 0 else p.problem.seq_k) < a),
    (r"with fewer than # queries or keys", lambda p, a: min(p.problem.seq_q, p.problem.seq_k) < a),
    (r"under a causal mask", lambda p: max(p.problem.sides) >= 0),
    (r"only # of the # rows of a block would be used", lambda p, a, b: 2 * a < b),
    (r"head dims below #", lambda p, a: min(p.problem.dim_qk, p.problem.dim_v) < a),
    (r"head dims of # and #, the same for V, not # and #", lambda p, a, b, c, d: c not in (a, b) or c != d),
    (r"head dims of Q wider than # it has #, not #", lambda p, a, b, c: c > a and c != b),
    (r"a head dim wider than # it has # for Q, not #", lambda p, a, b, c: max(p.problem.dim_qk, p.problem.dim_v) > a and c != b),
    (r"stores # columns at a time, (?:V has|head dims are) #(?: and #)?", lambda p, a, *b: any(float(c) % a for c in b if c)),
    (r"V has # columns: past #", lambda p, a, b: a > b),
    (r"written for (\w+), this is (\w+)", lambda p, a, b: a != b),
    (r"multiplies ([\w, ]+) and (\w+), not (\w+)", lambda p, a, b, c: c not in (*a.split(", "), b)),
    (r"(\w+) has no tensor-descriptor loads \(sm_90", lambda p, a: p.device.target == a and p.device.generation < 90),
)  # fmt: skip

DENSE: tuple[tuple[str, Holds], ...] = (
    (r"# (?:program|block)s? = # query tiles? x # splits?", lambda p, a, b, c: a == b * c),
    (r"# (?:program|block)s? = # query tiles?(?: x # sequences)? x # heads?", lambda p, a, b, c, d: a == b * float(c or 1) * d),
    (r"# programs? = [^:]*: all # SMs have work; # waves of # \(# per SM\), #% of",
     lambda p, a, b, c, d, e, f: a >= b and d == b * e and same(c, a / d, 0.01) and same(f, waves(a, d), 1)),
    (r"# programs?, (one|two|up to two) per SM, draw from a counter: # blocks?",
     lambda p, a, each, b: a <= b and a <= p.device.sms * (1 if each == "one" else 2) and (each != "one") == (a > p.device.sms)),
    (r"(one|two|up to two) per SM, draw .*? # programs? per SM\.", lambda p, each, b: (each == "one") or b == 2),
    (r"(one|two|three) warpgroups? folds?", lambda p, a: {"one": 1, "two": 2, "three": 3}[a.lower()] == p.block_m // 64),
    (r"Two warpgroups fold while a third", lambda p: p.block_m == 128),
    (r"Would (?:fill|use) # of # SMs, not #", lambda p, a, b, c: c < a <= b),
    (r"it makes # programs for # SMs", lambda p, a, b: a < b),
    (r"it would have # blocks of # queries for # SMs(, two programs each)?", lambda p, a, b, c, two: 2 * a < c * (1 + bool(two))),
    (r"There are fewer queries than rows in a full tile", lambda p: p.problem.seq_q < 64),
    (r"takes the next power of two of rows, at least 16", lambda p: p.block_m <= max(16, next_power_of_two(p.problem.seq_q))),
    (r"takes just the next power of two of rows", lambda p: p.block_m == next_power_of_two(p.problem.seq_q)),
    (r"Full tiles make fewer programs than there are SMs",
     lambda p: -(-p.problem.seq_q // (2 * p.block_m)) * p.problem.batch * p.problem.heads < p.device.sms),
    (r"output tile of # x # takes # registers per thread, which leaves room for (at most )?# keys a step",
     lambda p, a, b, c, most, d: (p.block_m, p.block_n) == (a, d) or bool(most and p.block_n <= d)),
    (r"Head dims up to # leave registers", lambda p, a: wide(p) <= a),
    (r"compute unit has # KiB of shared memory, so K and V are buffered once", lambda p, a: p.device.smem_per_block == a * 1024),
    (r"read K and V once, not # times", lambda p, a: p.problem.group == a > 1),
    (r"# queries, one after the other", lambda p, a: a == p.queries_at_once),
    (r"# of # queries, one after", lambda p, a, b: a == -(-p.problem.seq_q // b)),
    (r"grid # and # programs on # SMs", lambda p, a, b, c: (a, b) == (p.grids[0][0], p.grids[1][0])),
    (r"dS of # KV heads and # of their keys is kept at a time",
     lambda p, a, b: a <= p.problem.batch * p.problem.kv_heads and b == p.keys_at_once),
    (r"memory # MiB beside inputs and gradients", lambda p, a: near(a, p.scratch_bytes / 2**20)),
    (r"at # columns bfloat16's kernel is faster", lambda p, a: p.problem.dim_v == a),
    (r"V of at most # columns", lambda p, a: p.problem.dim_v <= a),
)  # fmt: skip

SPLIT: tuple[tuple[str, Holds], ...] = (
    (r"# programs?(?: = [^:;]*)?(?:; # of them have keys)?: #% of the (?:SMs|CUs) have work, # waves of #",
     lambda p, a, b, c, d, e: same(c, 100 * min(1, float(b or a) / p.device.sms), 1) and same(d, a / e, 0.01)),
    (r"# tiles of at least # rows fill # SMs", lambda p, a, b, c: a >= c),
    (r"# query tiles?(?: \([^)]*\))? fill at least #% of # slots", lambda p, a, b, c: a >= 0.9999 * b / 100 * c),
    (r"# query tiles?(?: \([^)]*\))? for # slots, two an SM, are under #%", lambda p, a, b, c: a < 1.0001 * b * c / 100),
    (r"# query tiles?(?: \([^)]*\))? for # slots.*? # is the fewest splits that fills its waves(?: best)? \(#%\)",
     lambda p, a, b, c, d: c == p.splits and same(d, waves(a * c, b))),
    (r"fills its waves \(#%\) to at least #% of what the best, #, does \(#%\)", lambda p, a, b, c, d: a + 0.06 >= b / 100 * d),
    (r"Fills #% of its waves, under #% of the best, #%", lambda p, a, b, c: a - 0.06 <= b / 100 * c),
    (r"Fills #%; # (?:do|does) enough with less to merge",  # of the split kernel's tiles
     lambda p, a, b: b == p.splits and (b == 1 or waves(p.programs, p.slots) + 0.06 >= 0.85 * a)),
    (r"# splits Not weighed: # blocks? a split, as with #", lambda p, a, b, c: c == a - 1),
    (r"# query tiles? for # SMs: two splits would be more than one wave", lambda p, a, b: 2 * a > b),
    (r"# query tiles?: # splits are the most that fit # SMs at once", lambda p, a, b, c: a * b <= c < a * (b + 1)),
    (r"# query tiles? leave room for # splits on # SMs", lambda p, a, b, c: b == c // a),
    (r"a cache of # keys gives # of them # tiles of #", lambda p, a, b, c, d: -(-a // d) // b >= c > -(-a // d) // (b + 1)),
    (r"cache of # keys has no # tiles of # for each of two splits", lambda p, a, b, c: -(-a // c) < 2 * b),
    (r"all but # SMs without work", lambda p, a: a < p.device.sms),
    (r"# splits? More programs than SMs, or under # tiles of # keys a split",
     lambda p, a, b, c: p.tiles * a > p.device.sms or -(-p.capacity // c) < b * a),
    (r"Few keys, or one sequence: those of each of # KV heads and row blocks in (?:# equal shares|one share)",
     lambda p, a, b: a * float(b or 1) == p.programs),
    (r"asked for 1; (?:the last|@) ", lambda p, *a: False),  # one part is not merged
    (r"dropout is attention_cached's|prompts are attention_cached's", lambda p: p.kernel == "attention_cached"),
)  # fmt: skip

DECODE: tuple[tuple[str, Holds], ...] = (
    (r"# rows? (?:\([^)]*\) )?(?:is|are) # tiles? of #", lambda p, a, b, c: b == -(-a // c)),
    (r"# items? in # shares? each (?:are|make) # programs? for # SMs", lambda p, a, b, c, d: c == a * b),
    (r"cut # shares? of each of # items", lambda p, a, b: a * b == p.grid),
    (r"cut 1 shares .*? merge (?:the last|decode_combine)", lambda p: False),  # one part is not merged
    (r"a full cache takes # us at least", lambda p, a: near(a, 1e6 * p.cost.bytes / p.device.dram_rate)),
    (r"# programs on # SMs own equal numbers of tiles of # keys, at least #( or none)?",
     lambda p, a, b, c, d, none: a >= b and bool(none or a * d <= p.most_tiles)),
    (r"# programs own equal numbers of tiles of # keys, at least #( or none)?",
     lambda p, a, b, c, none: bool(none) or p.working == a),
    (r"Would be (at least )?# tiles? for # SMs, each with (?:# rows? and )?all (?:their keys|keys of its rows)",
     lambda p, least, a, b, rows: bool(least) or a < b or float(rows or 64) < 64),
    (r"would read K and V # times|Reads keys # times", lambda p, *a: any(float(b) > 1 for b in a if b)),
)  # fmt: skip

SPARSE: tuple[tuple[str, Holds], ...] = (
    (r"# query (?:tile|block)s?, each with (?:its) whole list, (?:fill # places|use # of # places)",
     lambda p, a, b, c, d: a == programs_of(p) and (a >= float(b) if b else a == float(c) < float(d))),
    (r"# query tiles? would leave # of # places idle; # shares of each list are # programs, which (?:fill #|use # of #) places",
     lambda p, a, b, c, d, e, f, g, h: a + b == c and a * d == e == programs_of(p)
     and (e >= c == float(f) if f else e == float(g) < c == float(h))),
    (r"# query tiles? leave most of # places idle; # shares of each list fill them", lambda p, a, b, c: 2 * a < b <= a * c),
    (r"enough query (?:tile|block)s to fill the device", lambda p: programs_of(p) >= p.device.sms),
    (r"lists of at most # keys are too short for (two|#) shares of at least #",
     lambda p, a, two, b, c: a == p.problem.capacity * p.problem.block_k < float(b or 2) * c and float(b or 2) == p.splits + 1),
    (r"# query tiles? would leave .* use # of # places: at most a twentieth is lost", lambda p, a, b, c: loss(p, a, c) <= 0.0501),
    (r"# query tiles?, each .* use # of # places: at most a twentieth is lost", lambda p, a, b, c: loss(p, a, c) <= 0.0501),
    (r"# query blocks?, each with its whole list, use # of # places: at most a twentieth is lost against the best number",
     lambda p, *places: plan_sparse(p.problem, p.device, portable=True).splits == 1),
    (r"# shares of a list are the most", lambda p, a: p.splits == a),
)  # fmt: skip

MATRIX: tuple[tuple[str, Holds], ...] = (
    (r"# tiles? would leave # of # SMs idle; # shares of the sum over k use #",
     lambda p, a, b, c, d, e: a + b == c and a * d == e == p.grid[0] <= c),
    (r"# us are estimated for it, # for the portable kernel", lambda p, a, b: a >= b),
    (r"# parts? of K would take # us", lambda p, *_: p.parts == 1),
    (r"# tiles leave most of # SMs idle", lambda p, a, b: 2 * a < b),
    (r"least estimated time: # tiles? on # SMs", lambda p, a, b: a >= b),
    (r"# tiles? on # SMs; sharing", lambda p, a, b: a < b and a == p.grid[0]),
    (r"# tiles? of # x # for # SMs: the portable kernel has smaller", lambda p, a, b, c, d: 4 * a < 3 * d),
    (r"# tiles of # x # leave SMs idle, and smaller tiles of the portable kernel use them", lambda p, a, b, c: p.grid[0] > a),
    (r"side of # leaves most of its # x", lambda p, a, b: 2 * a < b),
    (r"it has no batches of float8_e4m3fn\.", lambda p: p.problem.batch != 1),
    (r"# tiles of # x # are too few for # SMs", lambda p, a, b, c, d: a < d),
    (r"too few tiles of # x # for the device", lambda p, a, b: -(-p.problem.m // a) * -(-p.problem.n // b) < p.device.sms),
    (r"# tiles for # SMs: the largest", lambda p, a, b: a >= b),
    (r"few rows \(#\)", lambda p, a: a == p.problem.m <= 256),
    (r"few rows: memory-bound, many small programs", lambda p: p.problem.m <= 64 and p.items * p.parts > 1),
    (r"Few rows, or few tiles", lambda p: p.problem.m <= 64 or p.items * p.parts <= p.device.sms),
    (r"The estimate is # us, not #", lambda p, a, b: a >= b),
    (r"# rows? of x, at most #", lambda p, a, b: a == p.problem.m <= b),
    (r"needs K a multiple of #, not #", lambda p, a, b: b % a != 0),
    (r"needs rows of x at multiples of # bytes and K a multiple of #, not #", lambda p, a, b, c: c % b != 0),
    (r"needs groups of a multiple of # columns or of whole rows, not #", lambda p, a, b: b % a != 0),
    (r"makes at most # rows of x \(# at 2 and 3 bits\), not #", lambda p, a, b, c: c > (b if p.problem.bits < 4 else a)),
    (r"slower from # rows of x on",
     lambda p, a: plan_lowbit(replace(p.problem, m=p.problem.m - 1), p.device).path != "dequantise"),
    (r"slower with # rows of x", lambda p, a: a == p.problem.m),
    (r"channels-last copy (?:of # channels )?takes about # us, reading element by element #",
     lambda p, a, b, c: b <= c if p.method == "relayout" else b >= c),
    (r"input, weight and result(?: is moved)?\)", lambda p: p.splits(FORWARD) == 1),
    (r"input, weight and result, and the sums of # splits", lambda p, a: p.splits(FORWARD) == a > 1),
    (r"writes and reads # MB of columns beside # MB", lambda p, a, b: same(b, p.problem.bytes / 1e6)),
    (r"groups of # and # channels leave tensor cores", lambda p, a, b: min(a, b) <= 4),
    (r"(x|dy) would be read element by element",
     lambda p, a: not p.problem.y_last if a == "dy" else not p.problem.x_last or p.problem.channels < 16),
    (r"a row of x is # bytes apart from the next: not a multiple of #", lambda p, a, b: a % b != 0),
    (r"a row of the result has # bytes: not a multiple of #", lambda p, a, b: a % b != 0),
    (r"a row of more than # blocks", lambda p, a: p.problem.kv_blocks > a),
    (r"does not fit the registers of one warp", lambda p: p.num_warps > 1),
)  # fmt: skip

SIZES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
RANKS: tuple[tuple[str, Holds], ...] = (
    (r"predicted # times as fast as", lambda p, a: a >= 1),
    (r"within #% of @, the fastest, with # (\w+) less memory", lambda p, a, b, c, d: 0 <= a <= 0.5 and c > 0),
    (r"needs # (\w+), # (\w+) are free", lambda p, a, b, c, d: a * SIZES[b] >= c * SIZES[d]),
    (r"# query heads are not a multiple of # ranks", lambda p, a, b: a % b != 0),
    (r"# KV heads are neither a multiple of # ranks nor a divisor", lambda p, a, b: a % b != 0 and b % a != 0),
    (r"# sequences? read # MB of prefix from (L2|DRAM): # us; once for all, merged: # us",
     lambda p, a, b, c, d, e: same(b, p.plain_bytes / a / 1e6) and (e <= d if p.cascade else e >= d)),
)  # fmt: skip


def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(r"(?<![\w.])" + pattern.replace("#", NUMBER).replace("@", WORD), re.I)


PARTS = {
    "AttentionPlan": DENSE, "AttentionBackwardPlan": DENSE, "AttentionFp8Plan": DENSE, "DecodePlan": DECODE,
    "SplitDecision": (*DENSE, *DECODE, *SPLIT), "SparsePlan": SPARSE, "SparseBackwardPlan": SPARSE, "ParallelPlan": RANKS,
    "SharedPrefixPlan": RANKS,
}  # fmt: skip


@cache
def claims_of(kind: str) -> list[tuple[re.Pattern[str], Holds]]:
    """What plans of a class can say; products, convolutions and the like share one list."""
    return [(compiled(text), holds) for text, holds in (*GENERAL, *PARTS.get(kind, MATRIX))]


def value(text: str | None) -> Any:
    """A number where it is one."""
    return float(text) if text and re.fullmatch(NUMBER, text) else text


def reasons_of(plan: Any) -> str:
    """The reason of a plan, and what it rejects with why."""
    rejected = [
        " ".join(one) if isinstance(one, tuple) else f"{one.what} {one.why}" if hasattr(one, "why") else str(one)
        for one in getattr(plan, "rejected", ())
    ]
    return " ".join(f"{plan.reason} . {' . '.join(rejected)} .".split())


def contradictions(plan: Any) -> Iterator[str]:
    """Each claim of a plan's text that is false, and each word of its reasons that cannot be checked."""
    printed = "" if type(plan).__str__ is object.__str__ else " ".join(str(plan).split())
    text = f"{printed} . {reasons_of(plan)}"
    read = [False] * len(text)
    for pattern, holds in claims_of(type(plan).__name__):
        for found in pattern.finditer(text):
            read[found.start() : found.end()] = [True] * (found.end() - found.start())
            if not holds(plan, *map(value, found.groups())):
                yield f"false: {found[0]}"
    for found in SILENT.finditer(text):
        read[found.start() : found.end()] = [True] * (found.end() - found.start())
    for word in SPEAKS.finditer(text, len(printed)):
        if not read[word.start()]:
            yield f"unread: ...{text[max(len(printed), word.start() - 80) : word.end() + 80]}..."
