"""From evidence to one verdict: what bounds a kernel, the numbers that say so, and one thing to try.

The rules are asked in order and the first that holds answers:

1. A launch so short that launching is most of it: no other figure matters.
2. Waste: spilled registers, sectors that are moved for a few bytes, passes over shared memory that bank conflicts made necessary.
   It comes before saturation because waste saturates: a path that is full of bytes nobody asked for is no roof. It is weighed
   by its share of the traffic: a few scattered loads beside copies to shared memory (TMA) fill nothing.
3. Saturation: the resource with the largest share of its peak, from `SATURATED` percent. All resources are compared, so that a
   kernel at 83 % of the way from L2 to the SMs and 62 % of the tensor pipe is bound by the first, not "compute".
4. Shape: too few programs for the device, or a last wave that leaves most of it empty.
5. Waiting: what warps wait for, where stall reasons were read.
6. Otherwise "unknown", with what is missing to know.

Without counters only declared work over time is known, and nothing of the other resources: below `DECLARED` percent of a roof
the answer is "unknown", not the nearest roof.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .evidence import FULL_SECTOR, Counters, Evidence, Region

SATURATED = 70.0  # percent of a peak that counters saw: beyond this, ordinary kernels do not get much faster
DECLARED = 80.0  # percent of a roof by declared work, without counters to see other resources
WASTED = 0.5  # of the bytes moved: beyond this, most of the traffic is for nothing
CONFLICTS = 0.3  # of the passes over shared memory
LOCAL = 0.1  # of the sectors through L1
QUIET = 30.0  # percent of a peak: a path that nobody waits for
MANY_SPILLS = 8  # registers; below this they are mostly moved outside of loops
SHORT = 2.0  # launches of an empty kernel that a short kernel takes
SHORT_SECONDS = 3e-6  # and in any case: a wave of memory accesses alone takes about one
FEW_SMS = 0.75  # share of the SMs that have work
TAIL = 0.75  # share of the places that are filled
TAIL_WAVES = 4.0  # with more waves the last is a small part of the whole
STALLED = 0.4  # of all waiting
IDLE = 0.3  # of a region
EAGER_SECONDS = 30e-6  # an eager launch through Triton's dispatch, watched by a profiler

# What a verdict names (docs/reference/verdicts.md says what each means) -> one thing to try.
TRY = {
    "launch": "fuse it with its neighbours, batch the calls, or replay them from a CUDA graph",
    "spills": "use smaller tiles, more warps, or fewer values alive at once (a larger maxnreg, if occupancy allows)",
    "uncoalesced": "let neighbouring lanes take neighbouring elements: change the order of the tile's axes, or of the tensor's",
    "bank conflicts": "transpose in registers or with a swizzled (or padded) layout of shared memory",
    "L2-to-SM path": "larger tiles, so that each loaded tile meets more work; multicast or clusters share what neighbours load",
    "DRAM": "move fewer bytes: fuse with the producer or consumer, use a smaller dtype, keep what is read again in L2",
    "L2": "larger tiles or an order of tiles that reuses what an SM already holds",
    "L1": "load each value once, in wider accesses; keep it in registers or shared memory",
    "shared memory": "keep an operand in registers; read each tile of shared memory for more work",
    "tensor pipe": "do less arithmetic (skip masked tiles) or use a smaller dtype: this is the roof of the machine",
    "FMA pipe": "move the multiply-adds to the tensor cores (tl.dot), or hoist what does not change out of the loop",
    "ALU pipe": "simplify addresses and masks: hoist them out of the loop, use descriptors",
    "exp unit": "fewer exponentials: exp2 with a folded scale, skip masked tiles, or some of them as polynomials",
    "issue slots": "fewer instructions for each byte and FLOP: wider loads, descriptors, larger tiles",
    "too few programs": "split the work further (along the reduced axis too), or use smaller tiles",
    "tail wave": "choose tiles so that the programs fill whole waves, or make the kernel persistent",
    "memory latency": "have more loads in flight: software pipelining (num_stages), loads before their first use, more warps",
    "barriers": "let warps run apart: fewer synchronisations, warp specialisation, smaller programs",
    "tensor latency": "have more tensor work in flight: two tiles in turn, or a second program on the SM",
    "host": "replay from a CUDA graph, remove host synchronisations (.item(), .cpu()), or give the device larger calls",
}

# ncu's stall reason -> what that says. Reasons that name a full unit are left to saturation.
STALLS = {
    "long_scoreboard": "memory latency",
    "barrier": "barriers",
    "gmma": "tensor latency",
    "lg_throttle": "L1",
    "mio_throttle": "shared memory",
    "short_scoreboard": "shared memory",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """resource: a key of `TRY`, or "unknown". sentence: with the numbers. advice: one thing to try, "" for "unknown".
    missing: what would have to be known, for "unknown" only."""

    resource: str
    sentence: str
    advice: str = ""
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        more = f" Try: {self.advice}." if self.advice else ""
        missing = f" Missing: {'; '.join(self.missing)}." if self.missing else ""
        return f"{self.resource}: {self.sentence}.{more}{missing}"


def _found(resource: str, sentence: str) -> Verdict:
    return Verdict(resource, sentence, TRY[resource])


def _launch(e: Evidence) -> Verdict | None:
    if e.seconds is None:
        return None
    limit = max(SHORT * (e.launch_seconds or 0.0), SHORT_SECONDS)
    if e.seconds >= limit:
        return None
    empty = (
        f"an empty kernel takes {e.launch_seconds * 1e6:.1f} us" if e.launch_seconds else "an empty one takes 1 to 2"
    )
    return _found("launch", f"a launch takes {e.seconds * 1e6:.1f} us where {empty}")


def _spills(e: Evidence) -> Verdict | None:
    c = e.counters
    if c is not None and c.local_share is not None:
        local = c.local_share
        # A kernel that loads by descriptors sends little else through L1: a large share of little traffic is little.
        waited = c.top_stall is not None and c.top_stall[0] in ("long_scoreboard", "lg_throttle")
        if local < LOCAL or (c.l1 is not None and c.l1 < QUIET and not waited):
            return None
        count = f" ({e.spills} registers of a thread)" if e.spills else ""
        return _found(
            "spills", f"{100 * local:.0f} % of the sectors through L1 are local memory, spilled registers{count}"
        )
    if e.spills is None or e.spills < MANY_SPILLS:
        return None
    held = f" beside {e.registers} that it holds" if e.registers else ""
    return _found("spills", f"each thread keeps {e.spills} registers in memory{held}")


def _paths(e: Evidence) -> list[tuple[str, float]]:
    """Every share of a peak that is known, largest first."""
    c = e.counters
    known = [("DRAM", e.dram_share), ("tensor pipe", e.tensor_share), ("L2-to-SM path", e.l2_share)]
    if c is not None:
        known = [
            ("L2-to-SM path", c.l2_to_sm), ("DRAM", c.dram), ("L2", c.l2), ("L1", c.l1), ("shared memory", c.shared),
            ("tensor pipe", c.tensor), ("FMA pipe", c.fma), ("ALU pipe", c.alu), ("exp unit", c.exp), ("issue slots", c.issue),
        ]  # fmt: skip
    # sorted() keeps the order of equals: of a path and what feeds it, the narrower one, which is named first
    return sorted(((name, share) for name, share in known if share is not None), key=lambda entry: -entry[1])


def _listed(paths: list[tuple[str, float]], first: int = 3) -> str:
    return ", ".join(f"{name} {share:.1f} %" for name, share in paths[:first])


WANTING = ("lg_throttle", "drain", "mio_throttle")  # stall reasons of warps that have more to send than the way takes
MEMORY = ("DRAM", "L2", "L1", "L2-to-SM path", "shared memory")


def _uncoalesced(e: Evidence) -> Verdict | None:
    c = e.counters
    if c is None or not (used := _half_used(c)):
        return None
    stall = c.top_stall
    full = stall is not None and stall[0] in WANTING
    # Unweighed, waste counts where warps wait to send more: these are the accesses that the ratio is about.
    if not (full if c.wasted_share is None else c.wasted_share >= WASTED):
        return None
    paths = _paths(e)
    if not paths or paths[0][0] not in MEMORY:
        return None  # a few scattered accesses of a kernel whose time goes elsewhere
    if stall is not None and not full and paths[0][1] < SATURATED:
        return None  # nobody waits for room on the way: each access is waited for, however much it moves
    share = "" if c.wasted_share is None else f", {100 * c.wasted_share:.0f} % of the traffic for nothing"
    return _found(
        "uncoalesced",
        f"accesses use {used:.1f} of the {FULL_SECTOR:.0f} bytes of each sector they move{share}, at {_listed(paths, 2)}",
    )


def _half_used(c: Counters) -> float | None:
    """Bytes used of a sector by loads or stores, whichever wastes more, if that is less than half."""
    used = min((each for each in (c.bytes_per_sector, c.store_bytes_per_sector) if each), default=FULL_SECTOR)
    return used if used < (1 - WASTED) * FULL_SECTOR else None


def _conflicts(e: Evidence) -> Verdict | None:
    c = e.counters
    if c is None or c.conflict_share is None or c.conflict_share < CONFLICTS:
        return None
    # Conflicts matter where shared memory is busy with them, or warps wait for it; elsewhere they are hidden.
    paths = _paths(e)
    busy = bool(paths) and paths[0][0] in ("L1", "shared memory")
    stall = c.top_stall
    if not busy and (stall is None or STALLS.get(stall[0]) != "shared memory"):
        return None
    return _found(
        "bank conflicts",
        f"{100 * c.conflict_share:.0f} % of the passes over shared memory repeat for bank conflicts, at {_listed(paths, 2)}",
    )


def _saturated(e: Evidence) -> Verdict | None:
    paths = _paths(e)
    if not paths or paths[0][1] < (SATURATED if e.counters else DECLARED):
        return None
    name, share = paths[0]
    rest = f"; next {_listed(paths[1:], 2)}" if paths[1:] else ""
    what = "of its peak by the counters" if e.counters else _roof_words(e)
    used = _half_used(e.counters) if e.counters and e.counters.wasted_share is None and name in MEMORY else None
    unweighed = (
        f"; loads or stores use {used:.1f} of the {FULL_SECTOR:.0f} bytes of a sector, a share of the traffic not read"
        if used
        else ""
    )
    return _found(name, f"{name} at {share:.1f} % {what}{rest}{unweighed}")


def _roof_words(e: Evidence) -> str:
    return f"of the {'measured' if e.measured_roofs else 'recorded'} roof by declared work"


def _few(e: Evidence) -> Verdict | None:
    w = e.waves
    if e.programs and e.sms and e.programs / e.sms < FEW_SMS:
        return _found("too few programs", f"{e.programs} programs keep {e.programs} of {e.sms} SMs busy")
    if w is not None and w.waves <= TAIL_WAVES and w.filled < TAIL:
        return _found(
            "tail wave",
            f"{e.programs} programs are {w.waves:.2f} waves of {(e.sms or 0) * (e.resident or 0)}, which fill "
            f"{100 * w.filled:.0f} % of the device while it works",
        )
    return None


def _waiting(e: Evidence) -> Verdict | None:
    c = e.counters
    if c is None or c.top_stall is None:
        return None
    reason, share = c.top_stall
    if share < STALLED or reason not in STALLS:
        return None
    occupancy = f", {c.occupancy:.0f} % of the warps resident" if c.occupancy is not None else ""
    return _found(
        STALLS[reason],
        f"{100 * share:.0f} % of all waiting is {reason} while no resource is full ({_listed(_paths(e), 2)}){occupancy}",
    )


def _unknown(e: Evidence) -> Verdict:
    missing = []
    if e.seconds is None:
        missing.append("its time")
    if e.counters is None:
        missing.append("hardware counters (Nsight Compute: --ncu)")
        if e.flops is None and e.bytes is None:
            missing.append("declared FLOPs and bytes")
    elif not e.counters.stalls:
        missing.append("stall reasons")
    paths = _paths(e)
    if paths:
        source = "" if e.counters else f" {_roof_words(e)}"
        sentence = f"nothing is full: {_listed(paths)}{source}"
    else:
        sentence = "no rates are known"
    if e.counters is None:
        sentence += "; the way from L2 to the SMs, pipes and stalls were not read"
    return Verdict("unknown", sentence, missing=tuple(missing))


RULES: tuple[Callable[[Evidence], Verdict | None], ...] = (
    _launch, _spills, _uncoalesced, _conflicts, _saturated, _few, _waiting,
)  # fmt: skip


def judge(evidence: Evidence) -> Verdict:
    """The verdict on one kernel."""
    return next(filter(None, (rule(evidence) for rule in RULES)), None) or _unknown(evidence)


def judge_region(region: Region) -> Verdict | None:
    """The verdict on a region as a whole: "launch" or "host" where the device waits, None where it is busy enough."""
    if not region.kernels or region.idle < IDLE:
        return None
    watched = " (the profiler itself slows the host: an upper estimate)" if region.under_profiler else ""
    words = f"the device is idle {100 * region.idle:.0f} % of {region.span * 1e3:.3f} ms{watched}"
    gap = (region.span - region.busy) / max(1, region.kernels - 1)
    limit = max(EAGER_SECONDS, 3 * (region.launch_seconds or 0.0))
    detail = f"{region.kernels} kernels of {region.median * 1e6:.1f} us with {gap * 1e6:.1f} us between them"
    # Gaps of a few launches' time are the price of launching; longer ones are something else that the host does.
    resource = "launch" if gap < limit and region.median < limit and not region.replayed else "host"
    return _found(resource, f"{words}: {detail}")
