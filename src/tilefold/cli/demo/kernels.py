"""`python -m tilefold.cli.demo.kernels`: attention's kernel in Triton's interpreter on a small problem, against fp64."""

import os
import subprocess
import sys

import torch

from tilefold.cli.demo.judge import Check

NAME = "the kernel in Triton's interpreter"


def begin() -> subprocess.Popen[str]:
    """`main` in a process of its own, beside what else is done: Triton decides when it is imported whether it interprets."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", __name__]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> Check:
    """What it found."""
    out, errors = process.communicate()
    return Check(NAME, process.returncode == 0, out.strip() or "".join(errors.strip().splitlines()[-1:]))


def main() -> int:
    """Print the error of a padded batch of the demo's shape; 0 if it is within its limit."""
    import tilefold
    from tilefold import reference
    from tilefold.debug import patch_interpreter

    patch_interpreter()
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 23, 2, 32)
    mask = torch.ones(2, 1, 1, 23, dtype=torch.bool)
    mask[1, ..., 17:] = False
    out = tilefold.attention(q, k, v, mask=mask)
    exact, plain = (reference.attention(q, k, v, mask=mask, dtype=kind)[0] for kind in (torch.float64, torch.float32))
    verdict = reference.compare(out, exact, plain)
    print(f"differs from fp64 by at most {verdict.max_error:.1e} (limit {verdict.max_limit:.1e})")
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main())
