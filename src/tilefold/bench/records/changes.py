"""Two runs side by side: each figure's ratio with a confidence interval, and whether it became slower.

The interval is that of Hodges and Lehmann, by order statistics: of all ratios of a new round to an old one, the k-th smallest and
the k-th largest, k from the exact distribution of the Mann-Whitney statistic.  It supposes nothing of how times are distributed,
only that rounds are independent.  What differs from run to run and not from round to round (clocks, where memory lies) it cannot
see; `noise` stands for that.
"""

import functools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilefold.bench.attention.peers import IMPLEMENTATIONS
from tilefold.bench.page import Rows, Words, to_markdown
from tilefold.bench.records.record import digits
from tilefold.bench.records.runs import METHODS, Key, Measured

CONFIDENCE = 0.95
LEAST_COVERAGE = (
    0.85  # below it, as of two rounds beside two, an interval concludes nothing; three beside three have 0.9
)
EXACT = 2500  # pairs up to which the exact distribution is worth its time
JUDGED = ("events", "graph")  # methods that can fail a comparison; the others are shown
CLOCK = 0.03
NAMED = 6  # of what is missing; the others are counted
OK = "ok"


@dataclass(frozen=True, slots=True)
class Interval:
    """Within it the ratio of two medians lies, in `coverage` of all repetitions."""

    low: float
    high: float
    coverage: float


def ratio_interval(old: Sequence[float], new: Sequence[float]) -> Interval:
    """Of new over old, from at least one sample each; the widest there is where fewer samples than CONFIDENCE needs."""
    ratios = sorted(n / o for n in new for o in old)
    rank, coverage = _rank(len(old), len(new))
    return Interval(ratios[rank - 1], ratios[-rank], coverage)


@functools.cache
def _rank(n: int, m: int) -> tuple[int, float]:
    """The largest k such that the k-th smallest and largest of n m ratios cover their middle with CONFIDENCE, else 1."""
    if n * m > EXACT:
        normal = statistics.NormalDist(n * m / 2, (n * m * (n + m + 1) / 12) ** 0.5)
        return max(1, int(normal.inv_cdf((1 - CONFIDENCE) / 2))), CONFIDENCE
    ways = _ways(n, m)
    total, below, rank = sum(ways), 0, 0
    for count in ways:
        if 2 * (below + count) > (1 - CONFIDENCE) * total:
            break
        below, rank = below + count, rank + 1
    return (rank, 1 - 2 * below / total) if rank else (1, max(0.0, 1 - 2 * ways[0] / total))


def _ways(n: int, m: int) -> list[int]:
    """In how many orders of n and m samples the Mann-Whitney statistic is 0, 1, ... n m: a Gaussian binomial coefficient."""
    size = n * m + 1
    ways = [1] + [0] * (size - 1)
    for i in range(1, n + 1):
        for u in range(size - 1, m + i - 1, -1):
            ways[u] -= ways[u - m - i]
        for u in range(i, size):
            ways[u] += ways[u - i]
    return ways


@dataclass(frozen=True, slots=True)
class Change:
    """One implementation on one case, by one method, in both runs.

    verdict: "faster", "slower", "same" (within the noise), "unclear" (the interval reaches from within it to beyond), "worse"
    (was right, now fails, is wrong, refused or out of memory), "fixed" (the other way round).  note: what became of it."""

    key: Key
    method: str
    ours: bool
    old_ms: float | None
    new_ms: float | None
    interval: Interval | None
    verdict: str
    rough: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """New over old: above 1 is slower."""
        return self.new_ms / self.old_ms if self.new_ms and self.old_ms else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """changes: in the order of the new run.  gone, added: what only one run has.  differences: settings that are not the same,
    the device first; other_device: nothing can be concluded.  noise: ratio that counts as none, such as 0.02."""

    changes: tuple[Change, ...]
    gone: tuple[Key, ...]
    added: tuple[Key, ...]
    differences: tuple[str, ...]
    other_device: bool
    noise: float

    def regressions(self, slower: float | None = None) -> list[Change]:
        """tilefold's changes that are worse, or whose whole interval is beyond 1 + slower (None: times fail nothing, and rough
        intervals never do)."""
        return [one for one in self.changes if one.ours and (one.verdict == "worse" or _beyond(one, slower))]

    @property
    def control(self) -> tuple[float, int] | None:
        """The geometric mean of the other libraries' ratios, and of how many: what the machine did in between."""
        ratios = [one.ratio for one in self.changes if not one.ours and one.ratio and one.method in JUDGED]
        return (statistics.geometric_mean(ratios), len(ratios)) if ratios else None

    @property
    def coverage(self) -> tuple[float, float] | None:
        """The least and the most that an interval covers."""
        found = [one.interval.coverage for one in self.changes if one.interval]
        return (min(found), max(found)) if found else None

    def record(self) -> dict[str, Any]:
        """As JSON keeps it."""
        changes = [asdict(one) | asdict(one.key) | {"ratio": one.ratio} for one in self.changes]
        for one in changes:
            del one["key"]
        return {
            "changes": changes,
            "gone": [asdict(key) for key in self.gone],
            "added": [asdict(key) for key in self.added],
            "differences": list(self.differences),
            "noise": self.noise,
        }


def _beyond(change: Change, slower: float | None) -> bool:
    interval = change.interval
    if slower is None or interval is None or change.rough or change.method not in JUDGED:
        return False
    return interval.coverage >= LEAST_COVERAGE and interval.low > 1 + slower


def compare(old: Mapping[Key, Measured], new: Mapping[Key, Measured], noise: float = 0.02) -> Comparison:
    """What became of each figure; noise: what may differ between two runs of the same code."""
    changes = [change for key, now in new.items() if key in old for change in _changes(old[key], now, noise)]
    both = [(old[key], new[key]) for key in new if key in old]
    differences, other = _differences(both)
    gone, added = (tuple(key for key in a if key not in b) for a, b in ((old, new), (new, old)))
    return Comparison(tuple(changes), gone, added, differences, other, noise)


def _changes(old: Measured, new: Measured, noise: float) -> Iterable[Change]:
    if old.status != OK and new.status != OK:
        return
    if old.status != OK or new.status != OK:
        method = next(iter(old.times or new.times), JUDGED[0])
        worse = old.status == OK
        note = f"{old.status} -> {new.status}" + (
            f": {new.note if worse else old.note}" if (new.note or old.note) else ""
        )
        verdict = "worse" if worse else "fixed"
        yield Change(new.key, method, new.ours, old.ms(method), new.ms(method), None, verdict, note=note)
        return
    for method in METHODS:
        before, after = old.times.get(method), new.times.get(method)
        if before and after and min(before) > 0:
            interval = ratio_interval(before, after)
            verdict, rough = verdict_of(interval, noise), old.rough or new.rough
            yield Change(new.key, method, new.ours, old.ms(method), new.ms(method), interval, verdict, rough)


def verdict_of(interval: Interval, noise: float) -> str:
    """What an interval of a ratio says; noise: what may differ between two runs of the same code."""
    if interval.coverage < LEAST_COVERAGE:
        return "unclear"
    if interval.low > 1 + noise:
        return "slower"
    if interval.high < 1 / (1 + noise):
        return "faster"
    return "same" if interval.low >= 1 / (1 + noise) and interval.high <= 1 + noise else "unclear"


def _differences(both: Sequence[tuple[Measured, Measured]]) -> tuple[tuple[str, ...], bool]:
    """What of the settings is not the same, as sentences, and whether the device is among it."""
    found = []
    devices = _sets(both, "device")
    other = devices[0] != devices[1]
    if other:
        found.append("the DEVICE is another one: old {}, new {}".format(*_named(devices)))
    for name in ("torch", "triton"):
        versions = _sets(both, name)
        if versions[0] != versions[1]:
            found.append("{} is another one: old {}, new {}".format(name, *_named(versions)))
    for old, new in both:
        before, after = old.setting.get("version", ""), new.setting.get("version", "")
        line = f"{new.key.implementation} is another version: old {before}, new {after}"
        if not new.ours and before and after and before != after and line not in found:
            found.append(line)
        work = [one.setting.get("flops", "") for one in (old, new)]
        line = f"{new.key.case} is other work: old {work[0]} FLOPs, new {work[1]}"
        if all(work) and work[0] != work[1] and line not in found:
            found.append(line)
    rounds = [
        sorted({len(one.times[m]) for pair in both for m in JUDGED if m in (one := pair[side]).times})
        for side in (0, 1)
    ]
    if rounds[0] != rounds[1]:
        found.append("rounds are not as many: old {}, new {}".format(*(" or ".join(map(str, each)) for each in rounds)))
    clocks = [[one.clock for pair in both if (one := pair[side]).clock] for side in (0, 1)]
    if all(clocks):
        middle = [statistics.median(each) for each in clocks]
        if abs(middle[1] / middle[0] - 1) > CLOCK:
            found.append(f"the SM clock was {middle[0]:.0f} MHz in the old run and {middle[1]:.0f} MHz in the new one")
    return tuple(found), other


def _sets(both: Sequence[tuple[Measured, Measured]], name: str) -> tuple[set[str], set[str]]:
    old, new = ({pair[side].setting.get(name, "unknown") for pair in both} for side in (0, 1))
    return old, new


def _named(sets: Sequence[set[str]]) -> list[str]:
    return [" and ".join(sorted(each)) for each in sets]


# --- as a table, as sentences, as markdown ------------------------------------------------------------------------------------


def change_table(found: Comparison) -> Rows:
    """A line a figure: old and new milliseconds, the ratio with its interval, the verdict."""
    several = len({one.key.family for one in found.changes}) > 1
    head = ("case", "implementation", "by", "old ms", "new ms", "new / old", "interval", "")
    return Rows(head, tuple(_line(one, several) for one in found.changes), left=3)


def _line(one: Change, several: bool) -> tuple[str, ...]:
    case = f"{one.key.family} {one.key.case}" if several else one.key.case
    old, new = (digits(ms) if ms else "-" for ms in (one.old_ms, one.new_ms))
    ratio = f"{one.ratio:.3f}" if one.ratio and one.interval else ""
    interval = f"{'~ ' if one.rough else ''}{one.interval.low:.3f} to {one.interval.high:.3f}" if one.interval else ""
    verdict = one.verdict.upper() if one.verdict == "worse" else one.verdict
    known = IMPLEMENTATIONS.get(one.key.implementation)
    title = known.title if known else one.key.implementation
    return case, title, one.method, old, new, ratio, interval, verdict


def change_lines(found: Comparison) -> list[str]:
    """How many became what, how sure that is, what the other libraries say of the machine, and what is missing on a side."""
    counts = Counter(one.verdict for one in found.changes if one.ours)
    lines = [
        f"tilefold: {', '.join(f'{count} {verdict}' for verdict, count in counts.items()) or 'nothing to compare'}"
    ]
    lines += [f"{one.key}: {one.note}" for one in found.changes if one.note]
    coverage = found.coverage
    if coverage is not None:
        share = " to ".join(dict.fromkeys(f"{100 * each:.0f}" for each in coverage))
        lines.append(
            f"intervals cover the ratio of the medians in {share} % of repetitions; beyond {100 * found.noise:g} % it counts"
            + (": too few rounds to conclude anything from some" if coverage[0] < LEAST_COVERAGE else "")
        )
    if any(one.rough for one in found.changes):
        lines.append(
            "~: one of the records holds percentiles only, no rounds: its interval is a rough one, which fails nothing"
        )
    if found.control is not None:
        mean, count = found.control
        lines.append(f"the other libraries took {mean:.3f} times as long as in the old run (geometric mean of {count})")
    lines += _missing("only in the old run", found.gone) + _missing("only in the new run", found.added)
    return lines


def _missing(where: str, keys: tuple[Key, ...]) -> list[str]:
    if not keys:
        return []
    some = ", ".join(map(str, keys[:NAMED]))
    return [f"{where} ({len(keys)}): {some}{', ...' if len(keys) > NAMED else ''}"]


def change_markdown(found: Comparison) -> str:
    """The same for a document."""
    table, said = change_table(found), [f"**Not the same setting**: {line}" for line in found.differences]
    return to_markdown([*([table] if table.rows else []), *(Words(f"{line}.") for line in said + change_lines(found))])
