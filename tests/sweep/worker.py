"""One process of a run: the next specialisation that no other has, a line of JSON for each, the problem at hand in a file."""

import json
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from .axes import covered_by
from .context import kernels_reached, poisoned
from .families import chosen
from .problem import NO_ROOM, Problem, Setting, failure_of, kind_of, shrink, specialisations

TAKEN = "taken-{}"  # a file for each specialisation that a process has begun
PER_KIND = 2  # failures of one kind that a process makes smaller; more of them are only counted
ROOM = 2 << 30  # bytes that a process keeps of the device's memory
SLOW = 25.0  # seconds after which a specialisation has had its turn


def work(args: Any, setting: Setting) -> int:
    """Run until args.until, seconds since the epoch.  The last line of the file says that it ended by itself."""
    args.out.mkdir(parents=True, exist_ok=True)
    now = args.out / f"now-{args.worker}.json"
    seen: dict[str, int] = {}
    with (args.out / f"worker-{args.worker}.jsonl").open("a") as lines, poisoned():
        done, ended = 0, -1
        asked = chosen(args.ops, setting.small), args.seed, args.memcheck, covered_by(args.after) if args.after else {}
        for number, (family, options, dims, rng) in enumerate(specialisations(*asked, once=args.once)):
            if time.time() > args.until or (args.problems and done >= args.problems):
                break
            if not _take(args.out, number):
                continue
            ended = number
            drawn = (
                Problem(
                    family.name, options, dims, family.sizes(rng, options, dims, setting.most), rng.randrange(1 << 30)
                )
                for _ in range(args.each)
            )
            done += _specialisation(args, setting, family, drawn, number, (lines, now, seen))
        lines.write(json.dumps({"end": ended}) + "\n")
    now.unlink(missing_ok=True)
    return 0


def _take(folder: Path, number: int) -> bool:
    """Whether no other process has this specialisation; then it is ours."""
    try:
        (folder / TAKEN.format(number)).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _specialisation(args: Any, setting: Setting, family: Any, drawn: Any, number: int, to: Any) -> int:
    lines, now, seen = to
    reached = kernels_reached()
    before, begin = dict(reached), time.time()
    count, failures, problem = 0, [], None
    for problem in drawn:
        now.write_text(json.dumps({"number": number, "problem": problem.plain()}))
        if args.memcheck:  # so that what the sanitizer says stands behind the problem that it is of
            print(json.dumps(problem.plain()), flush=True)
        failure = failure_of(family, problem, setting)
        if failure == NO_ROOM:
            torch.cuda.empty_cache()
            continue
        count += 1
        if setting.device.type == "cuda" and torch.cuda.memory_reserved() > ROOM:
            torch.cuda.empty_cache()
        if failure is not None:
            failures.append(_failed(args, setting, family, problem, failure, seen))
            if _lost(failure):
                _write(lines, family, problem, number, count, failures, before, reached, begin)
                raise SystemExit(3)  # the device's context is gone: a new process goes on
            if len(failures) >= 3:
                break
        if time.time() > args.until or time.time() - begin > SLOW or (args.problems and count >= args.problems):
            break
    if problem is not None:
        _write(lines, family, problem, number, count, failures, before, reached, begin)
    return count


LOST = ("CUDA error", "AcceleratorError", "Error [CUDA]", "illegal memory")


def _lost(failure: str) -> bool:
    """Whether the device's context is gone with it."""
    return "raised" in failure and any(x in failure for x in LOST)


def _failed(args: Any, setting: Setting, family: Any, problem: Problem, failure: str, seen: dict[str, int]) -> Any:
    kind = f"{family.name} {kind_of(failure)}"
    seen[kind] = seen.get(kind, 0) + 1
    small = problem
    if seen[kind] <= PER_KIND and not _lost(failure) and not args.memcheck:
        small = shrink(family, problem, setting, min(args.shrink, max(0.0, args.until + 15 - time.time())))
    return {"said": failure, "problem": small.plain(), "drawn": problem.plain()}


def _write(lines: TextIO, family: Any, problem: Problem, number: int, count: int, failures: Any, before: Any, reached: Any,
           begin: float) -> None:  # fmt: skip
    launched = {name: n - before.get(name, 0) for name, n in reached.items() if n > before.get(name, 0)}
    row = {"number": number, "op": family.name, "o": problem.o, "dims": problem.dims, "problems": count,
           "seconds": round(time.time() - begin, 3), "kernels": launched, "failures": failures}  # fmt: skip
    lines.write(json.dumps(row) + "\n")
    lines.flush()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """All rows of a run's folder."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "op" in row:
                found.append(row)
    return found
