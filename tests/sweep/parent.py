"""A run: processes that are started again, past the problem that ended them, until the time is up; then the tables."""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .report import summarise
from .worker import TAKEN

GRACE = 150.0  # seconds past the end that a process may take to finish what it is at
STUCK = 120.0  # seconds that one problem may take before the run goes on without it


class Worker:
    """A process with its number, started again where it ends early."""

    def __init__(self, args: Any, number: int, until: float) -> None:
        self.args, self.number, self.until, self.restarts = args, number, until, 0
        self.file, self.now = args.out / f"worker-{number}.jsonl", args.out / f"now-{number}.json"
        self.start()

    def start(self) -> None:
        a = self.args
        command = [*shlex.split(a.sanitizer), sys.executable, "-m", "sweep", "--worker", str(self.number), "--jobs", str(a.jobs),
                   "--seed", str(a.seed), "--out", str(a.out), "--ops", a.ops, "--each", str(a.each), "--most", str(a.most),
                   "--shrink", str(a.shrink), "--until", str(self.until),
                   "--problems", str(-(-a.problems // a.jobs))]  # fmt: skip
        command += ["--memcheck"] * a.memcheck + ["--once"] * a.once + (["--after", str(a.after)] if a.after else [])
        self.log = (a.out / f"worker-{self.number}.log").open("a")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def running(self) -> bool:
        """False once it has ended for good."""
        code = self.process.poll()
        if code is None:
            old = self.now.exists() and time.time() - self.now.stat().st_mtime > STUCK * (
                10 if self.args.memcheck else 1
            )
            if not old and time.time() < self.until + GRACE:
                return True
            self.process.kill()
            code = self.process.wait()
        if code == 0 or not self.now.exists():
            if code:
                self._note({"op": "process", "o": {}, "dims": {}}, f"ended with {code} before any problem")
            return False
        at = json.loads(self.now.read_text() or "{}")
        self.now.unlink()
        if at and code != 3:  # 3: it wrote that down itself
            self._note(at["problem"], f"the process ended with {code}", at["number"])
        self.restarts += 1
        if time.time() > self.until or self.restarts > 20:
            return False
        self.start()
        return True

    def _last_words(self) -> str:
        """The last line that the process printed."""
        said = (self.args.out / f"worker-{self.number}.log").read_text(errors="replace").strip().splitlines()
        return said[-1][:200] if said else ""

    def _note(self, problem: dict[str, Any], said: str, number: int = -1) -> None:
        said = f"crash: {said}: {self._last_words()}"
        failure = {"said": said, "problem": problem, "drawn": problem}
        row = {"number": number, "op": problem["op"], "o": problem["o"], "dims": problem["dims"], "problems": 1,
               "seconds": 0, "kernels": {}, "failures": [failure]}  # fmt: skip
        with self.file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def run_all(args: Any) -> int:
    args.out = Path(args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    for old in (*args.out.glob("*-*.json*"), *args.out.glob(TAKEN.format("*"))):
        old.unlink()
    until = time.time() + args.seconds
    workers = [Worker(args, number, until) for number in range(args.jobs)]
    while workers:
        time.sleep(0.5)
        workers = [w for w in workers if w.running()]
    told = {name: getattr(args, name) for name in ("seed", "seconds", "jobs", "memcheck", "commit", "ops")}
    (args.out / "run.json").write_text(json.dumps(told))
    return summarise(args.out, args.record)
